/* op.c - names, defaults and the one check of struct kld_op.
 * Pure: no allocation, no I/O, no tensor is read, every product and sum is checked for overflow.
 * Any thread. What a launch means numerically is not decided here (kernels/). */
#include "proto/op.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

struct named {
    const char *name;
    uint32_t number;
};

static const struct named dtypes[] = {
#define X(NAME, name, number, bytes) {name, number},
    KLD_DTYPE_MAP(X)
#undef X
};
static const struct named forms[] = {
#define X(NAME, name, number) {name, number},
    KLD_FORM_MAP(X)
#undef X
};
static const struct named divergences[] = {
#define X(NAME, name, number, works) {name, number},
    KLD_DIVERGENCE_MAP(X)
#undef X
};
static const struct named reductions[] = {
#define X(NAME, name, number) {name, number},
    KLD_REDUCTION_MAP(X)
#undef X
};
static const char *const slot_names[KLD_SLOT_COUNT] = {
#define X(NAME, name, output) name,
    KLD_SLOT_MAP(X)
#undef X
};
static const bool slot_outputs[KLD_SLOT_COUNT] = {
#define X(NAME, name, output) output,
    KLD_SLOT_MAP(X)
#undef X
};
static const char *const number_names[KLD_NUMBER_COUNT] = {
#define X(NAME, name, value) name,
    KLD_NUMBER_MAP(X)
#undef X
};
static const double number_defaults[KLD_NUMBER_COUNT] = {
#define X(NAME, name, value) value,
    KLD_NUMBER_MAP(X)
#undef X
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const char *name_of(const struct named *list, size_t count, uint32_t number) {
    for (size_t i = 0; i < count; i++)
        if (list[i].number == number)
            return list[i].name;
    return "unknown";
}

static bool number_of(const struct named *list, size_t count, const char *name,
                      uint32_t *ret_number) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(list[i].name, name) == 0) {
            *ret_number = list[i].number;
            return true;
        }
    }
    return false;
}

const char *kld_dtype_name(uint32_t dtype) { return name_of(dtypes, COUNT(dtypes), dtype); }
const char *kld_form_name(uint32_t form) { return name_of(forms, COUNT(forms), form); }
const char *kld_divergence_name(uint32_t divergence) {
    return name_of(divergences, COUNT(divergences), divergence);
}
const char *kld_reduction_name(uint32_t reduction) {
    return name_of(reductions, COUNT(reductions), reduction);
}
const char *kld_slot_name(uint32_t slot) {
    return slot < KLD_SLOT_COUNT ? slot_names[slot] : "unknown";
}
bool kld_slot_is_output(uint32_t slot) { return slot < KLD_SLOT_COUNT && slot_outputs[slot]; }

uint32_t kld_dtype_bytes(uint32_t dtype) {
    switch (dtype) {
#define X(NAME, name, number, bytes)                                                               \
    case number: return bytes;
        KLD_DTYPE_MAP(X)
#undef X
    default: return 0;
    }
}

bool kld_dtype_is_float(uint32_t dtype) {
    return dtype >= KLD_DTYPE_FP32 && dtype <= KLD_DTYPE_BF16;
}

bool kld_dtype_from_name(const char *name, enum kld_dtype *ret_dtype) {
    uint32_t number;
    if (!number_of(dtypes, COUNT(dtypes), name, &number))
        return false;
    *ret_dtype = (enum kld_dtype)number;
    return true;
}

bool kld_slot_from_name(const char *name, enum kld_slot *ret_slot) {
    for (uint32_t i = 0; i < KLD_SLOT_COUNT; i++) {
        if (strcmp(slot_names[i], name) == 0) {
            *ret_slot = (enum kld_slot)i;
            return true;
        }
    }
    return false;
}

bool kld_divergence_works(uint32_t divergence) {
    switch (divergence) {
#define X(NAME, name, number, works)                                                               \
    case number: return works;
        KLD_DIVERGENCE_MAP(X)
#undef X
    default: return false;
    }
}

/* The lists are joined by the preprocessor, so that they cannot differ from the tables; the first
 * two bytes, a ", ", are skipped. */
#define JOIN_1(text) ", " text
#define JOIN_0(text)
#define JOIN_DIVERGENCE(NAME, name, number, works) JOIN_##works(name)
#define JOIN_NAMED(NAME, name, number) ", " name
#define JOIN_NUMBER(NAME, name, value) ", " name
const char *kld_divergence_list(void) { return KLD_DIVERGENCE_MAP(JOIN_DIVERGENCE) + 2; }
const char *kld_form_list(void) { return KLD_FORM_MAP(JOIN_NAMED) + 2; }
const char *kld_reduction_list(void) { return KLD_REDUCTION_MAP(JOIN_NAMED) + 2; }
const char *kld_dtype_list(void) { return "FP32, FP64, FP16, BF16"; }
const char *kld_op_parameter_list(void) {
    return "divergence, predictions_form, targets_form, reduction" KLD_NUMBER_MAP(JOIN_NUMBER);
}

void kld_op_init(struct kld_op *op) {
    memset(op, 0, sizeof *op);
    memcpy(op->number, number_defaults, sizeof op->number);
}

/* The four parameters that take text. */
static uint32_t *text_parameter(struct kld_op *op, const char *name, const struct named **ret_list,
                                size_t *ret_count, const char **ret_known) {
    if (strcmp(name, "divergence") == 0) {
        *ret_list = divergences;
        *ret_count = COUNT(divergences);
        *ret_known = kld_divergence_list();
        return &op->divergence;
    }
    if (strcmp(name, "reduction") == 0) {
        *ret_list = reductions;
        *ret_count = COUNT(reductions);
        *ret_known = kld_reduction_list();
        return &op->reduction;
    }
    *ret_list = forms;
    *ret_count = COUNT(forms);
    *ret_known = kld_form_list();
    if (strcmp(name, "predictions_form") == 0)
        return &op->predictions_form;
    if (strcmp(name, "targets_form") == 0)
        return &op->targets_form;
    return NULL;
}

static int number_parameter(const char *name) {
    for (int i = 0; i < KLD_NUMBER_COUNT; i++)
        if (strcmp(number_names[i], name) == 0)
            return i;
    return -1;
}

int kld_op_parameter_kind(const char *name) {
    struct kld_op op;
    const struct named *list;
    size_t count;
    const char *known;
    if (text_parameter(&op, name, &list, &count, &known))
        return 1;
    return number_parameter(name) >= 0 ? 2 : 0;
}

static enum kld_status unknown_parameter(const char *name, struct kld_error *err) {
    return kld_error_set(err, KLD_INVALID, "unknown parameter '%.40s'; known: %s", name,
                         kld_op_parameter_list());
}

enum kld_status kld_op_set_text(struct kld_op *op, const char *name, const char *value,
                                struct kld_error *err) {
    const struct named *list;
    size_t count;
    const char *known;
    uint32_t *field = text_parameter(op, name, &list, &count, &known);
    if (!field && number_parameter(name) >= 0)
        return kld_error_set(err, KLD_INVALID, "parameter '%s' takes a number, not text", name);
    if (!field)
        return unknown_parameter(name, err);
    if (!number_of(list, count, value, field))
        return kld_error_set(err, KLD_INVALID, "unknown %s '%.40s'; known: %s", name, value, known);
    return KLD_OK;
}

enum kld_status kld_op_set_number(struct kld_op *op, const char *name, double value,
                                  struct kld_error *err) {
    int index = number_parameter(name);
    if (index < 0 && kld_op_parameter_kind(name) == 1)
        return kld_error_set(err, KLD_INVALID, "parameter '%s' takes text, not a number", name);
    if (index < 0)
        return unknown_parameter(name, err);
    op->number[index] = value;
    op->given |= 1u << index;
    return KLD_OK;
}

static bool given(const struct kld_op *op, enum kld_number number) {
    return op->given & (1u << number);
}

static bool present(const struct kld_op *op, enum kld_slot slot) {
    return op->tensor[slot].dtype != KLD_DTYPE_ABSENT;
}

static enum kld_status check_enums(const struct kld_op *op, struct kld_error *err) {
    if (op->divergence >= COUNT(divergences))
        return kld_error_set(err, KLD_INVALID, "unknown divergence number %" PRIu32 "; known: %s",
                             op->divergence, kld_divergence_list());
    if (op->reduction >= COUNT(reductions))
        return kld_error_set(err, KLD_INVALID, "unknown reduction number %" PRIu32 "; known: %s",
                             op->reduction, kld_reduction_list());
    if (op->predictions_form >= COUNT(forms) || op->targets_form >= COUNT(forms))
        return kld_error_set(err, KLD_INVALID, "unknown form number; known: %s", kld_form_list());
    if (op->given >> KLD_NUMBER_COUNT)
        return kld_error_set(err, KLD_INVALID, "unknown parameter bits 0x%" PRIx32, op->given);
    if (!kld_divergence_works(op->divergence))
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "divergence '%s' is not computed by this version; it computes: %s",
                             kld_divergence_name(op->divergence), kld_divergence_list());
    return KLD_OK;
}

/* A parameter that its divergence, form or reduction has no use for is an error: the caller
 * believes that it does something. */
static enum kld_status check_numbers(const struct kld_op *op, struct kld_error *err) {
    for (int i = 0; i < KLD_NUMBER_COUNT; i++)
        if (given(op, (enum kld_number)i) && !isfinite(op->number[i]))
            return kld_error_set(err, KLD_INVALID, "%s must be a finite number", number_names[i]);

    bool logits = op->predictions_form == KLD_FORM_LOGITS || op->targets_form == KLD_FORM_LOGITS;
    if (given(op, KLD_NUMBER_TEMPERATURE)) {
        if (!logits)
            return kld_error_set(err, KLD_INVALID,
                                 "temperature is given but no tensor has the form 'logits'");
        if (!(op->number[KLD_NUMBER_TEMPERATURE] > 0))
            return kld_error_set(err, KLD_INVALID, "temperature must be greater than 0, not %g",
                                 op->number[KLD_NUMBER_TEMPERATURE]);
    }

    const struct {
        enum kld_number number;
        uint32_t first, second; /* divergences that take it */
        bool closed, required;  /* 1 itself is allowed; must be given */
    } rules[] = {
        {KLD_NUMBER_BETA, KLD_DIVERGENCE_JS, KLD_DIVERGENCE_JS, true, false},
        {KLD_NUMBER_WEIGHT, KLD_DIVERGENCE_MIXED_KL, KLD_DIVERGENCE_MIXED_KL, true, true},
        {KLD_NUMBER_SKEW, KLD_DIVERGENCE_SKEW_KL, KLD_DIVERGENCE_SKEW_REVERSE_KL, false, true},
    };
    for (size_t i = 0; i < COUNT(rules); i++) {
        const char *name = number_names[rules[i].number];
        double value = op->number[rules[i].number];
        bool fits = op->divergence == rules[i].first || op->divergence == rules[i].second;
        if (!given(op, rules[i].number)) {
            if (fits && rules[i].required)
                return kld_error_set(err, KLD_INVALID, "divergence '%s' needs the parameter %s",
                                     kld_divergence_name(op->divergence), name);
            continue;
        }
        if (!fits)
            return kld_error_set(err, KLD_INVALID, "%s does not fit divergence '%s'", name,
                                 kld_divergence_name(op->divergence));
        if (!(value >= 0 && (rules[i].closed ? value <= 1 : value < 1)))
            return kld_error_set(err, KLD_INVALID, "%s must be in [0, 1%s, not %g", name,
                                 rules[i].closed ? "]" : ")", value);
    }

    if (given(op, KLD_NUMBER_NORMALIZER)) {
        if (op->reduction != KLD_REDUCTION_MEAN && op->reduction != KLD_REDUCTION_BATCHMEAN &&
            op->reduction != KLD_REDUCTION_ROWMEAN)
            return kld_error_set(
                err, KLD_INVALID,
                "normalizer does not fit reduction '%s'; it fits mean, batchmean, rowmean",
                kld_reduction_name(op->reduction));
        if (!(op->number[KLD_NUMBER_NORMALIZER] > 0))
            return kld_error_set(err, KLD_INVALID, "normalizer must be greater than 0, not %g",
                                 op->number[KLD_NUMBER_NORMALIZER]);
    }
    return KLD_OK;
}

static enum kld_status check_shape(const struct kld_op *op, struct kld_geometry *geometry,
                                   struct kld_error *err) {
    if (op->rank < 1 || op->rank > KLD_RANK_MAX)
        return kld_error_set(err, KLD_INVALID, "rank must be 1 to %d, not %" PRIu32, KLD_RANK_MAX,
                             op->rank);
    uint64_t elements = 1;
    for (uint32_t i = 0; i < op->rank; i++) {
        if (op->shape[i] == 0)
            return kld_error_set(err, KLD_INVALID, "dimension %" PRIu32 " of the shape is 0", i);
        if (__builtin_mul_overflow(elements, op->shape[i], &elements) ||
            elements > KLD_ELEMENTS_MAX)
            return kld_error_set(err, KLD_TOO_LARGE,
                                 "the shape has more than 2^40 elements, the most allowed");
    }
    geometry->classes = op->shape[op->rank - 1];
    geometry->rows = elements / geometry->classes;
    geometry->elements = elements;
    return KLD_OK;
}

static bool dtype_fits(const struct kld_op *op, const struct kld_geometry *geometry,
                       enum kld_slot slot, const char **ret_expected) {
    uint32_t dtype = op->tensor[slot].dtype;
    uint32_t wanted;
    switch (slot) {
    case KLD_SLOT_ROW_WEIGHTS: wanted = KLD_DTYPE_FP32; break;
    case KLD_SLOT_ROW_MASK:
        *ret_expected = "BOOL or UINT8";
        return dtype == KLD_DTYPE_BOOL || dtype == KLD_DTYPE_UINT8;
    case KLD_SLOT_LOSS:
    case KLD_SLOT_ROW_LOSS: wanted = geometry->loss_dtype; break;
    case KLD_SLOT_GRAD_PREDICTIONS: wanted = op->tensor[KLD_SLOT_PREDICTIONS].dtype; break;
    case KLD_SLOT_GRAD_TARGETS: wanted = op->tensor[KLD_SLOT_TARGETS].dtype; break;
    default: *ret_expected = kld_dtype_list(); return kld_dtype_is_float(dtype);
    }
    *ret_expected = kld_dtype_name(wanted);
    return dtype == wanted;
}

/* Elements of one row of the slot, and its rows. */
static void slot_extent(const struct kld_op *op, const struct kld_geometry *geometry,
                        enum kld_slot slot, uint64_t *ret_rows, uint64_t *ret_columns) {
    bool wide = false, tall = true; /* C columns? N rows? */
    switch (slot) {
    case KLD_SLOT_LOSS:
    case KLD_SLOT_GRAD_OUTPUT:
        wide = op->reduction == KLD_REDUCTION_NONE;
        tall = wide || op->reduction == KLD_REDUCTION_ROW;
        break;
    case KLD_SLOT_ROW_WEIGHTS:
    case KLD_SLOT_ROW_MASK:
    case KLD_SLOT_ROW_LOSS: break;
    default: wide = true;
    }
    *ret_rows = tall ? geometry->rows : 1;
    *ret_columns = wide ? geometry->classes : 1;
}

static enum kld_status check_slot(const struct kld_op *op, struct kld_geometry *geometry,
                                  enum kld_slot slot, struct kld_error *err) {
    const struct kld_tensor *tensor = &op->tensor[slot];
    struct kld_slot_geometry *at = &geometry->slot[slot];
    const char *name = slot_names[slot], *expected;
    if (!dtype_fits(op, geometry, slot, &expected))
        return kld_error_set(err, KLD_INVALID, "%s has dtype %s; expected %s", name,
                             kld_dtype_name(tensor->dtype), expected);
    if (tensor->reserved != 0)
        return kld_error_set(err, KLD_INVALID, "%s: reserved field is not 0", name);

    uint64_t element = kld_dtype_bytes(tensor->dtype), columns;
    slot_extent(op, geometry, slot, &at->rows, &columns);
    at->row_bytes = columns * element; /* at most 2^40 * 8 */
    at->stride_bytes = tensor->row_stride_bytes ? tensor->row_stride_bytes : at->row_bytes;
    if (at->stride_bytes < at->row_bytes || at->stride_bytes % element != 0)
        return kld_error_set(err, KLD_INVALID,
                             "%s: row stride of %" PRIu64 " bytes; expected a multiple of %" PRIu64
                             ", at least %" PRIu64,
                             name, at->stride_bytes, element, at->row_bytes);
    uint64_t end;
    if (__builtin_mul_overflow(at->rows - 1, at->stride_bytes, &at->span_bytes) ||
        __builtin_add_overflow(at->span_bytes, at->row_bytes, &at->span_bytes) ||
        __builtin_add_overflow(at->span_bytes, tensor->offset_bytes, &end))
        return kld_error_set(err, KLD_INVALID, "%s: offset and strides overflow 64 bits", name);
    return KLD_OK;
}

static bool overlap(const struct kld_op *op, const struct kld_geometry *geometry, enum kld_slot a,
                    enum kld_slot b) {
    const struct kld_tensor *x = &op->tensor[a], *y = &op->tensor[b];
    return x->region == y->region &&
           x->offset_bytes < y->offset_bytes + geometry->slot[b].span_bytes &&
           y->offset_bytes < x->offset_bytes + geometry->slot[a].span_bytes;
}

static bool same_place(const struct kld_op *op, const struct kld_geometry *geometry,
                       enum kld_slot a, enum kld_slot b) {
    const struct kld_tensor *x = &op->tensor[a], *y = &op->tensor[b];
    return x->region == y->region && x->offset_bytes == y->offset_bytes &&
           geometry->slot[a].stride_bytes == geometry->slot[b].stride_bytes;
}

static enum kld_status check_aliasing(const struct kld_op *op, const struct kld_geometry *geometry,
                                      struct kld_error *err) {
    for (int a = 0; a < KLD_SLOT_COUNT; a++) {
        if (!slot_outputs[a] || !present(op, (enum kld_slot)a))
            continue;
        enum kld_slot own = a == KLD_SLOT_GRAD_PREDICTIONS ? KLD_SLOT_PREDICTIONS
                            : a == KLD_SLOT_GRAD_TARGETS   ? KLD_SLOT_TARGETS
                                                           : KLD_SLOT_COUNT;
        for (int b = 0; b < KLD_SLOT_COUNT; b++) {
            if (b == a || (b < a && slot_outputs[b]) || !present(op, (enum kld_slot)b) ||
                !overlap(op, geometry, (enum kld_slot)a, (enum kld_slot)b))
                continue;
            if (b == (int)own && same_place(op, geometry, (enum kld_slot)a, (enum kld_slot)b))
                continue;
            return kld_error_set(err, KLD_INVALID,
                                 "%s overlaps %s; an output may only be written exactly over the "
                                 "tensor that it is the gradient of",
                                 slot_names[a], slot_names[b]);
        }
    }
    return KLD_OK;
}

static enum kld_status check_tensors(const struct kld_op *op, struct kld_geometry *geometry,
                                     struct kld_error *err) {
    if (!present(op, KLD_SLOT_PREDICTIONS) || !present(op, KLD_SLOT_TARGETS))
        return kld_error_set(err, KLD_INVALID, "tensor '%s' is missing",
                             slot_names[present(op, KLD_SLOT_PREDICTIONS) ? KLD_SLOT_TARGETS
                                                                          : KLD_SLOT_PREDICTIONS]);
    bool wants_gradient =
        present(op, KLD_SLOT_GRAD_PREDICTIONS) || present(op, KLD_SLOT_GRAD_TARGETS);
    if (!wants_gradient && (present(op, KLD_SLOT_GRAD_OUTPUT) || given(op, KLD_NUMBER_GRAD_OUTPUT)))
        return kld_error_set(err, KLD_INVALID, "grad_output is given but no gradient is asked for");
    if (present(op, KLD_SLOT_GRAD_OUTPUT) && given(op, KLD_NUMBER_GRAD_OUTPUT))
        return kld_error_set(err, KLD_INVALID, "grad_output is given as a number and as a tensor");
    if (!geometry->scalar && given(op, KLD_NUMBER_GRAD_OUTPUT))
        return kld_error_set(err, KLD_INVALID,
                             "reduction '%s' takes grad_output as a tensor of the loss's shape",
                             kld_reduction_name(op->reduction));
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!present(op, (enum kld_slot)slot))
            continue;
        enum kld_status status = check_slot(op, geometry, (enum kld_slot)slot, err);
        if (status)
            return status;
    }
    return check_aliasing(op, geometry, err);
}

static double divisor(const struct kld_op *op, const struct kld_geometry *geometry) {
    if (given(op, KLD_NUMBER_NORMALIZER))
        return op->number[KLD_NUMBER_NORMALIZER];
    switch (op->reduction) {
    case KLD_REDUCTION_MEAN: return (double)geometry->elements;
    case KLD_REDUCTION_BATCHMEAN: return (double)op->shape[0];
    case KLD_REDUCTION_ROWMEAN: return 0;
    default: return 1;
    }
}

enum kld_status kld_op_check(const struct kld_op *op, struct kld_geometry *ret_geometry,
                             struct kld_error *err) {
    struct kld_geometry geometry;
    memset(&geometry, 0, sizeof geometry);
    enum kld_status status;
    if ((status = check_enums(op, err)) || (status = check_numbers(op, err)) ||
        (status = check_shape(op, &geometry, err)))
        return status;
    geometry.loss_dtype = op->tensor[KLD_SLOT_PREDICTIONS].dtype == KLD_DTYPE_FP64 ||
                                  op->tensor[KLD_SLOT_TARGETS].dtype == KLD_DTYPE_FP64
                              ? KLD_DTYPE_FP64
                              : KLD_DTYPE_FP32;
    geometry.scalar = op->reduction != KLD_REDUCTION_NONE && op->reduction != KLD_REDUCTION_ROW;
    geometry.divisor = divisor(op, &geometry);
    if ((status = check_tensors(op, &geometry, err)))
        return status;
    *ret_geometry = geometry;
    return KLD_OK;
}

enum kld_status kld_op_check_bounds(const struct kld_op *op, const struct kld_geometry *geometry,
                                    enum kld_slot slot, uint64_t region_bytes,
                                    struct kld_error *err) {
    const struct kld_tensor *tensor = &op->tensor[slot];
    uint64_t span = geometry->slot[slot].span_bytes, element = kld_dtype_bytes(tensor->dtype);
    if (tensor->offset_bytes > region_bytes || span > region_bytes - tensor->offset_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "%s needs %" PRIu64 " bytes at offset %" PRIu64
                             " of a region of %" PRIu64 " bytes",
                             slot_names[slot], span, tensor->offset_bytes, region_bytes);
    if (element != 0 && tensor->offset_bytes % element != 0)
        return kld_error_set(err, KLD_INVALID,
                             "%s: offset %" PRIu64 " is not a multiple of its %" PRIu64
                             "-byte element",
                             slot_names[slot], tensor->offset_bytes, element);
    return KLD_OK;
}

bool kld_op_in_place(const struct kld_op *op) {
    const enum kld_slot pairs[2][2] = {{KLD_SLOT_GRAD_PREDICTIONS, KLD_SLOT_PREDICTIONS},
                                       {KLD_SLOT_GRAD_TARGETS, KLD_SLOT_TARGETS}};
    for (int i = 0; i < 2; i++) {
        const struct kld_tensor *x = &op->tensor[pairs[i][0]], *y = &op->tensor[pairs[i][1]];
        if (x->dtype && x->region == y->region && x->offset_bytes == y->offset_bytes)
            return true;
    }
    return false;
}
