/* npy.c - headers of .npy files. The header is a Python dict literal; only what NumPy writes there
 * is understood: 'descr' (a text), 'fortran_order' (True, False) and 'shape' (a tuple of whole
 * numbers), in any order. Pure. */
#include "client/cli/npy.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define HEADER_BYTES_MAX (1u << 20)

static const struct {
    const char *descr;
    enum kld_dtype dtype;
} dtypes[] = {
    {"<f4", KLD_DTYPE_FP32}, {"<f8", KLD_DTYPE_FP64},  {"<f2", KLD_DTYPE_FP16},
    {"|b1", KLD_DTYPE_BOOL}, {"|u1", KLD_DTYPE_UINT8},
};

struct literal {
    const char *at, *end;
};

static char peek(struct literal *text) {
    while (text->at < text->end && (*text->at == ' ' || *text->at == '\n' || *text->at == '\t'))
        text->at++;
    return text->at < text->end ? *text->at : '\0';
}

static bool take(struct literal *text, char wanted) {
    if (peek(text) != wanted)
        return false;
    text->at++;
    return true;
}

/* 'text' or "text", without escapes. */
static bool take_text(struct literal *text, char *to, size_t capacity) {
    char quote = peek(text);
    if (quote != '\'' && quote != '"')
        return false;
    const char *start = ++text->at;
    while (text->at < text->end && *text->at != quote && *text->at != '\\')
        text->at++;
    size_t length = (size_t)(text->at - start);
    if (text->at == text->end || *text->at != quote || length >= capacity)
        return false;
    memcpy(to, start, length);
    to[length] = '\0';
    text->at++;
    return true;
}

static bool take_word(struct literal *text, const char *word) {
    size_t length = strlen(word);
    (void)peek(text);
    if ((size_t)(text->end - text->at) < length || memcmp(text->at, word, length) != 0)
        return false;
    text->at += length;
    return true;
}

static bool take_whole(struct literal *text, uint64_t *ret_number) {
    uint64_t number = 0;
    char c = peek(text);
    if (c < '0' || c > '9')
        return false;
    for (; text->at < text->end && *text->at >= '0' && *text->at <= '9'; text->at++)
        if (__builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(*text->at - '0'), &number))
            return false;
    if (text->at < text->end && *text->at == 'L') /* Python 2 */
        text->at++;
    *ret_number = number;
    return true;
}

static enum kld_status take_shape(struct literal *text, struct kld_array *array,
                                  struct kld_error *err) {
    if (!take(text, '('))
        return kld_error_set(err, KLD_INVALID, "npy: the shape is not a tuple");
    array->rank = 0;
    while (!take(text, ')')) {
        if (array->rank == KLD_RANK_MAX)
            return kld_error_set(err, KLD_INVALID, "npy: more than %d dimensions", KLD_RANK_MAX);
        if (!take_whole(text, &array->shape[array->rank++]) ||
            (!take(text, ',') && peek(text) != ')'))
            return kld_error_set(err, KLD_INVALID,
                                 "npy: the shape is not a tuple of whole numbers "
                                 "of at most 64 bits");
    }
    return KLD_OK;
}

static enum kld_status dtype_of(const char *descr, enum kld_dtype *ret_dtype,
                                struct kld_error *err) {
    for (size_t i = 0; descr[0] && i < sizeof dtypes / sizeof dtypes[0]; i++) {
        /* One byte has no order: NumPy writes '|', others may not. */
        bool same = strcmp(descr, dtypes[i].descr) == 0 ||
                    (dtypes[i].descr[0] == '|' && strcmp(descr + 1, dtypes[i].descr + 1) == 0);
        if (same) {
            *ret_dtype = dtypes[i].dtype;
            return KLD_OK;
        }
    }
    if (descr[0] == '>')
        return kld_error_set(err, KLD_INVALID,
                             "npy: the values are big-endian ('%.20s'); save the array with "
                             "array.astype(array.dtype.newbyteorder('<'))",
                             descr);
    if (strchr(descr, 'O'))
        return kld_error_set(err, KLD_INVALID,
                             "npy: the array holds Python objects; save numbers, for example "
                             "array.astype('float32')");
    return kld_error_set(err, KLD_INVALID,
                         "npy: dtype '%.20s' is not supported; expected float16, float32, float64, "
                         "bool or uint8",
                         descr);
}

enum kld_status kld_array_size(struct kld_array *array, struct kld_error *err) {
    uint64_t elements = 1;
    for (uint32_t i = 0; i < array->rank; i++) {
        if (array->shape[i] == 0)
            return kld_error_set(err, KLD_INVALID, "the array is empty: dimension %" PRIu32 " is 0",
                                 i);
        if (__builtin_mul_overflow(elements, array->shape[i], &elements) ||
            elements > KLD_ELEMENTS_MAX)
            return kld_error_set(err, KLD_TOO_LARGE, "the array has more than 2^40 elements");
    }
    array->bytes = elements * kld_dtype_bytes(array->dtype);
    return KLD_OK;
}

/* The dict. *ret_fortran: the first dimension varies fastest. */
static enum kld_status take_header(struct literal *text, struct kld_array *array, bool *ret_fortran,
                                   struct kld_error *err) {
    enum { DESCR = 1, ORDER = 2, SHAPE = 4 };
    unsigned seen = 0;
    char key[32], descr[32];
    enum kld_status status = KLD_OK;
    if (!take(text, '{'))
        return kld_error_set(err, KLD_INVALID, "npy: the header is not a dict");
    while (!take(text, '}')) {
        if (!take_text(text, key, sizeof key) || !take(text, ':'))
            return kld_error_set(err, KLD_INVALID, "npy: the header is malformed");
        if (strcmp(key, "descr") == 0) {
            seen |= DESCR;
            if (!take_text(text, descr, sizeof descr))
                return kld_error_set(err, KLD_INVALID,
                                     "npy: a structured dtype; expected one number an element");
            status = dtype_of(descr, &array->dtype, err);
        } else if (strcmp(key, "fortran_order") == 0) {
            seen |= ORDER;
            *ret_fortran = take_word(text, "True");
            if (!*ret_fortran && !take_word(text, "False"))
                status = kld_error_set(err, KLD_INVALID, "npy: fortran_order is not True or False");
        } else if (strcmp(key, "shape") == 0) {
            seen |= SHAPE;
            status = take_shape(text, array, err);
        } else {
            status = kld_error_set(err, KLD_INVALID, "npy: unknown key '%.20s' in the header", key);
        }
        if (status)
            return status;
        if (!take(text, ',') && peek(text) != '}')
            return kld_error_set(err, KLD_INVALID, "npy: the header is malformed");
    }
    return seen == (DESCR | ORDER | SHAPE)
               ? KLD_OK
               : kld_error_set(err, KLD_INVALID,
                               "npy: the header lacks descr, fortran_order or shape");
}

enum kld_status kld_npy_parse(const void *data, uint64_t bytes, struct kld_array *ret_array,
                              struct kld_error *err) {
    const unsigned char *start = data;
    if (bytes < 10 || memcmp(start, "\x93NUMPY", 6) != 0)
        return kld_error_set(err, KLD_INVALID, "not a .npy file: it does not start as one");
    unsigned version = start[6];
    if (version < 1 || version > 3)
        return kld_error_set(err, KLD_INVALID, "npy: format version %u; expected 1, 2 or 3",
                             version);
    uint64_t at = version == 1 ? 10 : 12;
    if (bytes < at)
        return kld_error_set(err, KLD_INVALID, "npy: the file ends inside its header");
    uint64_t length = start[8] | (uint64_t)start[9] << 8;
    if (version > 1)
        length |= (uint64_t)start[10] << 16 | (uint64_t)start[11] << 24;
    if (length > HEADER_BYTES_MAX || length > bytes - at)
        return kld_error_set(err, KLD_INVALID,
                             "npy: a header of %" PRIu64 " bytes in a file of %" PRIu64, length,
                             bytes);
    struct literal text = {(const char *)start + at, (const char *)start + at + length};
    struct kld_array array;
    memset(&array, 0, sizeof array);
    bool fortran = false;
    enum kld_status status = take_header(&text, &array, &fortran, err);
    if (!status && peek(&text) != '\0')
        status = kld_error_set(err, KLD_INVALID, "npy: something follows the header's dict");
    if (!status)
        status = kld_array_size(&array, err);
    if (status)
        return status;
    if (fortran && array.rank > 1)
        return kld_error_set(err, KLD_INVALID,
                             "npy: the array is in Fortran order; save it with "
                             "numpy.ascontiguousarray(array)");
    array.offset_bytes = at + length;
    if (array.bytes > bytes - array.offset_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "npy: the file is cut short: its header promises %" PRIu64
                             " bytes of values, %" PRIu64 " are there",
                             array.bytes, bytes - array.offset_bytes);
    *ret_array = array;
    return KLD_OK;
}

size_t kld_npy_header(const struct kld_array *array, char ret_header[KLD_NPY_HEADER_BYTES]) {
    const char *descr = NULL;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].dtype == array->dtype)
            descr = dtypes[i].descr;
    if (!descr)
        return 0;
    /* Eight dimensions of up to 14 digits: 200 bytes at most. */
    int used = snprintf(ret_header + 10, KLD_NPY_HEADER_BYTES - 10,
                        "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
    for (uint32_t i = 0; i < array->rank; i++)
        used += snprintf(ret_header + 10 + used, KLD_NPY_HEADER_BYTES - 10 - (size_t)used,
                         "%" PRIu64 ",%s", array->shape[i], i + 1 < array->rank ? " " : "");
    used += snprintf(ret_header + 10 + used, KLD_NPY_HEADER_BYTES - 10 - (size_t)used, "), }");
    size_t total = ((size_t)used + 11 + 63) / 64 * 64;
    memset(ret_header + 10 + used, ' ', total - 10 - (size_t)used);
    ret_header[total - 1] = '\n';
    memcpy(ret_header, "\x93NUMPY\x01\x00", 8);
    ret_header[8] = (char)((total - 10) & 0xff);
    ret_header[9] = (char)((total - 10) >> 8);
    return total;
}
