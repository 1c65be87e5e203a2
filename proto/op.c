/* op.c - the one check of struct kld_op.
 * Pure: no allocation, no I/O, no tensor is read, every product and sum is checked for overflow.
 * Any thread. What a launch means numerically is not decided here (kernels/). */
#include "proto/op.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "proto/number.h"
#include "proto/overlap.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* How many numbers of each kind there are; they are dense. */
#define ONE(...) +1
enum { DIVERGENCES = KLD_DIVERGENCE_MAP(ONE), FORMS = KLD_FORM_MAP(ONE) };
enum { REDUCTIONS = KLD_REDUCTION_MAP(ONE) };

static bool given(const struct kld_op *op, enum kld_number number) {
    return op->given & (1u << number);
}

static bool present(const struct kld_op *op, enum kld_slot slot) {
    return op->tensor[slot].dtype != KLD_DTYPE_ABSENT;
}

static enum kld_status check_enums(const struct kld_op *op, struct kld_error *err) {
    if (op->divergence >= DIVERGENCES)
        return kld_error_set(err, KLD_INVALID, "unknown divergence number %" PRIu32 "; known: %s",
                             op->divergence, kld_divergence_list());
    if (op->reduction >= REDUCTIONS)
        return kld_error_set(err, KLD_INVALID, "unknown reduction number %" PRIu32 "; known: %s",
                             op->reduction, kld_reduction_list());
    bool targets = op->predictions_form < FORMS;
    if (!targets || op->targets_form >= FORMS)
        return kld_error_set(err, KLD_INVALID, "%s: unknown form number %" PRIu32 "; known: %s",
                             kld_slot_name(targets ? KLD_SLOT_TARGETS : KLD_SLOT_PREDICTIONS),
                             targets ? op->targets_form : op->predictions_form, kld_form_list());
    if (op->given >> KLD_NUMBER_COUNT)
        return kld_error_set(err, KLD_INVALID, "unknown parameter bits 0x%" PRIx32, op->given);
    return KLD_OK;
}

/* A parameter that its divergence, form or reduction has no use for is an error: the caller
 * believes that it does something. */
static enum kld_status check_numbers(const struct kld_op *op, struct kld_error *err) {
    static const double defaults[KLD_NUMBER_COUNT] = {
#define X(NAME, name, value) value,
        KLD_NUMBER_MAP(X)
#undef X
    };
    char shown[2][KLD_NUMBER_SHOWN_MAX];
    for (int i = 0; i < KLD_NUMBER_COUNT; i++) /* a server would not be told of it */
        if (!given(op, (enum kld_number)i) && !(op->number[i] == defaults[i]))
            return kld_error_set(err, KLD_INVALID,
                                 "%s is %s but not marked as given; expected "
                                 "kld_op_set_number(), or the default, %s",
                                 kld_number_name((uint32_t)i),
                                 kld_number_show(op->number[i], shown[0]),
                                 kld_number_show(defaults[i], shown[1]));
    for (int i = 0; i < KLD_NUMBER_COUNT; i++)
        if (given(op, (enum kld_number)i) && !isfinite(op->number[i]))
            return kld_error_set(err, KLD_INVALID, "%s must be a finite number",
                                 kld_number_name((uint32_t)i));

    bool logits = op->predictions_form == KLD_FORM_LOGITS || op->targets_form == KLD_FORM_LOGITS;
    if (given(op, KLD_NUMBER_TEMPERATURE)) {
        if (!logits)
            return kld_error_set(err, KLD_INVALID,
                                 "temperature is given but no tensor has the form 'logits'");
        if (!(op->number[KLD_NUMBER_TEMPERATURE] > 0))
            return kld_error_set(err, KLD_INVALID, "temperature must be greater than 0, not %s",
                                 kld_number_show(op->number[KLD_NUMBER_TEMPERATURE], shown[0]));
        if (!(op->number[KLD_NUMBER_TEMPERATURE] >= DBL_MIN))
            return kld_error_set(err, KLD_INVALID,
                                 "temperature is %s; expected a normal number, at least %s",
                                 kld_number_show(op->number[KLD_NUMBER_TEMPERATURE], shown[0]),
                                 kld_number_show(DBL_MIN, shown[1]));
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
        const char *name = kld_number_name(rules[i].number);
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
            return kld_error_set(err, KLD_INVALID, "%s must be in [0, 1%s, not %s", name,
                                 rules[i].closed ? "]" : ")", kld_number_show(value, shown[0]));
    }

    if (given(op, KLD_NUMBER_NORMALIZER)) {
        if (op->reduction != KLD_REDUCTION_MEAN && op->reduction != KLD_REDUCTION_BATCHMEAN &&
            op->reduction != KLD_REDUCTION_ROWMEAN)
            return kld_error_set(
                err, KLD_INVALID,
                "normalizer does not fit reduction '%s'; it fits mean, batchmean, rowmean",
                kld_reduction_name(op->reduction));
        if (!(op->number[KLD_NUMBER_NORMALIZER] > 0))
            return kld_error_set(err, KLD_INVALID, "normalizer must be greater than 0, not %s",
                                 kld_number_show(op->number[KLD_NUMBER_NORMALIZER], shown[0]));
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
    case KLD_SLOT_ROW_LOSS: /* in FP64 these are the terms of the sum themselves (sum.h) */
        wanted = geometry->loss_dtype;
        *ret_expected = wanted == KLD_DTYPE_FP64 ? "FP64" : "FP32 or FP64";
        return dtype == wanted || dtype == KLD_DTYPE_FP64;
    case KLD_SLOT_LOSS: wanted = geometry->loss_dtype; break;
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
    const char *name = kld_slot_name(slot), *expected;
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
    return x->region == y->region && kld_rows_overlap(x->offset_bytes, &geometry->slot[a],
                                                      y->offset_bytes, &geometry->slot[b]);
}

static bool same_place(const struct kld_op *op, const struct kld_geometry *geometry,
                       enum kld_slot a, enum kld_slot b) {
    const struct kld_tensor *x = &op->tensor[a], *y = &op->tensor[b];
    return x->region == y->region && x->offset_bytes == y->offset_bytes &&
           (geometry->slot[a].stride_bytes == geometry->slot[b].stride_bytes ||
            (geometry->slot[a].rows == 1 && geometry->slot[b].rows == 1));
}

static enum kld_status check_aliasing(const struct kld_op *op, const struct kld_geometry *geometry,
                                      struct kld_error *err) {
    for (int a = 0; a < KLD_SLOT_COUNT; a++) {
        if (!kld_slot_is_output((uint32_t)a) || !present(op, (enum kld_slot)a))
            continue;
        enum kld_slot own = a == KLD_SLOT_GRAD_PREDICTIONS ? KLD_SLOT_PREDICTIONS
                            : a == KLD_SLOT_GRAD_TARGETS   ? KLD_SLOT_TARGETS
                                                           : KLD_SLOT_COUNT;
        for (int b = 0; b < KLD_SLOT_COUNT; b++) {
            if (b == a || (b < a && kld_slot_is_output((uint32_t)b)) ||
                !present(op, (enum kld_slot)b) ||
                !overlap(op, geometry, (enum kld_slot)a, (enum kld_slot)b))
                continue;
            if (b == (int)own && same_place(op, geometry, (enum kld_slot)a, (enum kld_slot)b))
                continue;
            return kld_error_set(err, KLD_INVALID,
                                 "%s overlaps %s; an output may only be written exactly over the "
                                 "tensor that it is the gradient of",
                                 kld_slot_name((uint32_t)a), kld_slot_name((uint32_t)b));
        }
    }
    return KLD_OK;
}

static enum kld_status check_tensors(const struct kld_op *op, struct kld_geometry *geometry,
                                     struct kld_error *err) {
    if (!present(op, KLD_SLOT_PREDICTIONS) || !present(op, KLD_SLOT_TARGETS))
        return kld_error_set(err, KLD_INVALID, "tensor '%s' is missing",
                             kld_slot_name(present(op, KLD_SLOT_PREDICTIONS)
                                               ? KLD_SLOT_TARGETS
                                               : KLD_SLOT_PREDICTIONS));
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
                             kld_slot_name(slot), span, tensor->offset_bytes, region_bytes);
    if (element != 0 && tensor->offset_bytes % element != 0)
        return kld_error_set(err, KLD_INVALID,
                             "%s: offset %" PRIu64 " is not a multiple of its %" PRIu64
                             "-byte element",
                             kld_slot_name(slot), tensor->offset_bytes, element);
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
