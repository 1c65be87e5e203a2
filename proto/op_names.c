/* op_names.c - the names of what a struct kld_op holds, its defaults, and setting it by name.
 * Checks no value against another (op.c). Pure: no allocation, no I/O. Any thread. */
#include "proto/op.h"

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
#define X(NAME, name, number) {name, number},
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
const char *kld_number_name(uint32_t number) {
    return number < KLD_NUMBER_COUNT ? number_names[number] : "unknown";
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

/* The lists are joined by the preprocessor, so that they cannot differ from the tables; the first
 * two bytes, a ", ", are skipped. */
#define JOIN_NAMED(NAME, name, number) ", " name
#define JOIN_NUMBER(NAME, name, value) ", " name
const char *kld_divergence_list(void) { return KLD_DIVERGENCE_MAP(JOIN_NAMED) + 2; }
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
