/* table_data.c - inputs of a case, made from a seed, and what the oracle says about them.
 * Nothing here runs a back end. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/table.h"

#define DISTINCT_ROWS_MAX 16
#define DISTINCT_ELEMENTS_MAX 300000 /* the oracle takes some 0.3 us an element */

/* What both back ends take a constant between the sides for in FP32: beyond it, in units of T, and
 * in FP64, it costs nothing. */
#define FAR_FP32 1e5L
#define FAR_FP64 64.0L

#define VALUE_NOISE 1e-15L /* of the parts that cancel: what double arithmetic leaves */

static uint64_t next_random(struct table_random *random) {
    uint64_t x = random->state ? random->state : 0x9e3779b97f4a7c15u;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    random->state = x;
    return x * 0x2545f4914f6cdd1du;
}

double table_uniform(struct table_random *random) {
    return ((double)(next_random(random) >> 12) + 0.5) * 0x1p-52;
}

double table_normal(struct table_random *random) {
    double radius = sqrt(-2 * log(table_uniform(random)));
    return radius * cos(2 * 3.14159265358979323846 * table_uniform(random));
}

/* Bits of significand, exponent of the smallest normal and the largest number. */
static void dtype_range(uint32_t dtype, int *ret_digits, int *ret_least, int *ret_most) {
    switch (dtype) {
    case KLD_DTYPE_FP64: *ret_digits = 53, *ret_least = -1022, *ret_most = 1023; break;
    case KLD_DTYPE_FP32: *ret_digits = 24, *ret_least = -126, *ret_most = 127; break;
    case KLD_DTYPE_FP16: *ret_digits = 11, *ret_least = -14, *ret_most = 15; break;
    default: *ret_digits = 8, *ret_least = -126, *ret_most = 127; break;
    }
}

long double table_ulp(uint32_t dtype, long double value) {
    int digits, least, most, exponent = 0;
    dtype_range(dtype, &digits, &least, &most);
    if (value != 0 && isfinite(value))
        exponent = ilogbl(value);
    if (value == 0 || exponent < least)
        exponent = least;
    return ldexpl(1, (exponent > most ? most : exponent) - digits + 1);
}

/* To the nearest number of the type, ties to even; beyond its range: an infinity. */
static long double round_to(uint32_t dtype, long double value) {
    if (!isfinite(value))
        return value;
    int digits, least, most;
    dtype_range(dtype, &digits, &least, &most);
    long double ulp = table_ulp(dtype, value), rounded = rintl(value / ulp) * ulp;
    return fabsl(rounded) >= ldexpl(1, most + 1) ? copysignl(INFINITY, value) : rounded;
}

void table_write(uint32_t dtype, unsigned char *to, long double value) {
    long double rounded = round_to(dtype, value);
    double wide = (double)rounded;
    float single = (float)rounded;
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, &single, sizeof bits);
    switch (dtype) {
    case KLD_DTYPE_FP64: memcpy(to, &wide, 8); return;
    case KLD_DTYPE_FP32: memcpy(to, &single, 4); return;
    case KLD_DTYPE_BF16: half = (uint16_t)(bits >> 16); break;
    default:
        half = (uint16_t)(bits >> 16 & 0x8000);
        if (isnan(single))
            half |= 0x7e00;
        else if (isinf(single))
            half |= 0x7c00;
        else if (fabsf(single) < 0x1p-14f)
            half |= (uint16_t)(fabsf(single) * 0x1p24f);
        else
            half |= (uint16_t)(((bits & 0x7fffffff) - (112u << 23)) >> 13);
    }
    memcpy(to, &half, 2);
}

long double table_read(uint32_t dtype, const unsigned char *from) {
    double wide;
    float single;
    uint16_t half;
    if (dtype == KLD_DTYPE_FP64) {
        memcpy(&wide, from, 8);
        return wide;
    }
    if (dtype == KLD_DTYPE_FP32) {
        memcpy(&single, from, 4);
        return single;
    }
    memcpy(&half, from, 2);
    int fraction_bits = dtype == KLD_DTYPE_FP16 ? 10 : 7, bias = dtype == KLD_DTYPE_FP16 ? 15 : 127;
    int top = (1 << (15 - fraction_bits)) - 1;
    int exponent = half >> fraction_bits & top, fraction = half & ((1 << fraction_bits) - 1);
    long double value =
        exponent == top ? (fraction ? (long double)NAN : (long double)INFINITY)
        : exponent      ? ldexpl(fraction + (1 << fraction_bits), exponent - bias - fraction_bits)
                        : ldexpl(fraction, 1 - bias - fraction_bits);
    return half >> 15 ? -value : value;
}

static void *need(size_t bytes) {
    void *space = calloc(1, bytes ? bytes : 1);
    if (!space)
        abort();
    return space;
}

static bool is_masked(const struct table_case *at, uint64_t row, uint64_t rows) {
    switch (at->masking) {
    case TABLE_MASK_RUNS: return row + 1 == rows || row % 7 == 0 || (row / 60 + row / 171) % 3 == 0;
    case TABLE_MASK_MOST: return row % 101 != 50;
    case TABLE_MASK_ALL: return true;
    default: return row % 3 == 1;
    }
}

static void make_inputs(struct table_truth *truth, const struct table_case *at,
                        struct table_random *random) {
    uint64_t classes = truth->geometry.classes, rows = truth->geometry.rows;
    double *q = need(classes * sizeof *q), *p = need(classes * sizeof *p);
    for (int side = 0; side < 2; side++)
        truth->input[side] = need(truth->distinct * classes * kld_dtype_bytes(at->dtype[side]));
    for (uint64_t row = 0; row < truth->distinct; row++) {
        unsigned char *to[2];
        for (int side = 0; side < 2; side++)
            to[side] = truth->input[side] + row * classes * kld_dtype_bytes(at->dtype[side]);
        table_row_make(at, row, classes, random, q, p, to);
    }
    free(q);
    free(p);
    for (uint64_t row = 0; at->weights && row < rows; row++) {
        if (!truth->input[KLD_SLOT_ROW_WEIGHTS])
            truth->input[KLD_SLOT_ROW_WEIGHTS] = need(rows * 4);
        long double weight = 0.25L + 2 * table_uniform(random);
        if (at->weights_few)
            weight = weight < 0.75L ? 0 : weight < 1.5L ? 0.5L : 2;
        if (at->weights_cancel && row % 2)
            weight = -table_row_weight(truth, row - 1);
        table_write(KLD_DTYPE_FP32, truth->input[KLD_SLOT_ROW_WEIGHTS] + row * 4, weight);
    }
    if (at->mask)
        truth->input[KLD_SLOT_ROW_MASK] = need(rows);
    for (uint64_t row = 0; at->mask && row < rows; row++)
        truth->input[KLD_SLOT_ROW_MASK][row] =
            is_masked(at, row, rows) ? 0 : (unsigned char)(1 + row % 2);
    if (!at->grad_output_dtype)
        return;
    bool wide = at->reduction == KLD_REDUCTION_NONE;
    static const double factors[] = {1, -0.75, 0, 3}; /* few: see table_check.c */
    uint64_t count = wide                                 ? truth->distinct * classes
                     : at->reduction == KLD_REDUCTION_ROW ? rows
                                                          : 1;
    uint32_t bytes = kld_dtype_bytes(at->grad_output_dtype);
    truth->input[KLD_SLOT_GRAD_OUTPUT] = need(count * bytes);
    for (uint64_t i = 0; i < count; i++)
        table_write(at->grad_output_dtype, truth->input[KLD_SLOT_GRAD_OUTPUT] + i * bytes,
                    at->shuffled && !wide ? factors[i % 4] : table_normal(random));
}

static void number(struct kld_op *op, enum kld_number which, double value) {
    if (value == 0)
        return;
    op->number[which] = value;
    op->given |= 1u << which;
}

static int parameter_of(uint32_t divergence) {
    switch (divergence) {
    case KLD_DIVERGENCE_MIXED_KL: return KLD_NUMBER_WEIGHT;
    case KLD_DIVERGENCE_JS: return KLD_NUMBER_BETA;
    case KLD_DIVERGENCE_SKEW_KL:
    case KLD_DIVERGENCE_SKEW_REVERSE_KL: return KLD_NUMBER_SKEW;
    default: return -1;
    }
}

static void make_op(struct table_truth *truth, const struct table_case *at) {
    struct kld_op *op = &truth->op;
    kld_op_init(op);
    op->divergence = at->divergence;
    op->reduction = at->reduction;
    op->predictions_form = at->form[0];
    op->targets_form = at->form[1];
    op->rank = at->rank;
    memcpy(op->shape, at->shape, sizeof op->shape);
    bool logits = at->form[0] == KLD_FORM_LOGITS || at->form[1] == KLD_FORM_LOGITS;
    number(op, KLD_NUMBER_TEMPERATURE, logits ? at->temperature : 0);
    number(op, KLD_NUMBER_SCALE, at->scale);
    number(op, KLD_NUMBER_NORMALIZER, at->normalizer);
    number(op, KLD_NUMBER_GRAD_OUTPUT, at->grad_output);
    int parameter = parameter_of(at->divergence);
    if (parameter >= 0 && !isnan(at->parameter)) {
        op->number[parameter] = at->parameter; /* 0 is a value of it */
        op->given |= 1u << parameter;
    }
    bool wide = at->dtype[0] == KLD_DTYPE_FP64 || at->dtype[1] == KLD_DTYPE_FP64;
    uint32_t loss = wide ? KLD_DTYPE_FP64 : KLD_DTYPE_FP32;
    const uint32_t dtype[KLD_SLOT_COUNT] = {
        [KLD_SLOT_PREDICTIONS] = at->dtype[0],
        [KLD_SLOT_TARGETS] = at->dtype[1],
        [KLD_SLOT_ROW_WEIGHTS] = at->weights ? KLD_DTYPE_FP32 : 0,
        [KLD_SLOT_ROW_MASK] = !at->mask        ? 0
                              : at->mask_uint8 ? KLD_DTYPE_UINT8
                                               : KLD_DTYPE_BOOL,
        [KLD_SLOT_GRAD_OUTPUT] = at->grad_output_dtype,
        [KLD_SLOT_LOSS] = at->loss ? loss : 0,
        [KLD_SLOT_ROW_LOSS] = !at->row_loss       ? 0
                              : at->row_loss_wide ? KLD_DTYPE_FP64
                                                  : loss,
        [KLD_SLOT_GRAD_PREDICTIONS] = at->gradient[0] ? at->dtype[0] : 0,
        [KLD_SLOT_GRAD_TARGETS] = at->gradient[1] ? at->dtype[1] : 0,
    };
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        op->tensor[slot].dtype = dtype[slot];
        op->tensor[slot].region = (uint64_t)slot + 1; /* places follow; nothing overlaps here */
    }
}

void table_truth_alias(const struct table_truth *truth, const struct table_case *at,
                       struct table_truth *ret_alias) {
    *ret_alias = *truth;
    ret_alias->op.divergence = at->alias;
    enum kld_number parameter = parameter_of(at->divergence);
    struct kld_op plain;
    kld_op_init(&plain);
    ret_alias->op.given &= ~(1u << parameter);
    ret_alias->op.number[parameter] = plain.number[parameter];
}

uint64_t table_row_of(const struct table_truth *truth, uint64_t row) {
    uint64_t x = row * 0x9e3779b97f4a7c15u;
    bool shuffled = truth->shuffled && row >= truth->distinct; /* each comes at least once */
    return (shuffled ? (x ^ x >> 29) * 0xbf58476d1ce4e5b9u >> 33 : row) % truth->distinct;
}

bool table_row_masked(const struct table_truth *truth, uint64_t row) {
    return truth->input[KLD_SLOT_ROW_MASK] && truth->input[KLD_SLOT_ROW_MASK][row] == 0;
}

long double table_row_weight(const struct table_truth *truth, uint64_t row) {
    const unsigned char *weights = truth->input[KLD_SLOT_ROW_WEIGHTS];
    return weights ? table_read(KLD_DTYPE_FP32, weights + row * 4) : 1;
}

long double table_row_factor(const struct table_truth *truth, uint64_t row) {
    const struct kld_op *op = &truth->op;
    if (truth->divisor == 0)
        return 0;
    long double factor =
        table_row_weight(truth, row) * op->number[KLD_NUMBER_SCALE] / truth->divisor;
    const unsigned char *output = truth->input[KLD_SLOT_GRAD_OUTPUT];
    uint32_t dtype = op->tensor[KLD_SLOT_GRAD_OUTPUT].dtype;
    if (!output)
        return factor * op->number[KLD_NUMBER_GRAD_OUTPUT];
    if (op->reduction == KLD_REDUCTION_NONE)
        return factor;
    return factor * table_read(dtype, output + (op->reduction == KLD_REDUCTION_ROW ? row : 0) *
                                                   kld_dtype_bytes(dtype));
}

/* The oracle's own derivatives against differences of its value, at a few places. A difference is
 * noise below what rounding the value leaves of it after division by a step of 1e-6. */
static void check_differences(struct table_truth *truth, const struct table_case *at,
                              const struct oracle_row *row) {
    if (row->classes > 200 || !isfinite(row->value) || at->data != TABLE_RANDOM)
        return;
    for (int side = 0; side < 2; side++) {
        for (uint64_t i = 0; row->gradient[side] && i < row->classes; i += 1 + row->classes / 3) {
            long double largest = 0, gradient = row->gradient[side][i];
            if (at->divergence == KLD_DIVERGENCE_TV && row->term[i] == 0)
                continue; /* |p - q| has no derivative there */
            for (uint64_t k = 0; k < row->classes; k++)
                largest = fmaxl(largest, fabsl(row->gradient[side][k]));
            long double difference = oracle_row_difference(row, side, i);
            if (fabsl(difference - gradient) > 2e-6L * largest + 1e-11L)
                snprintf(truth->failure, sizeof truth->failure,
                         "oracle: %s gradient %Lg, finite difference %Lg",
                         side ? "targets" : "predictions", gradient, difference);
        }
    }
}

static void ask_oracle(struct table_truth *truth, const struct table_case *at) {
    uint64_t classes = truth->geometry.classes;
    long double *x[2] = {need(classes * sizeof *x[0]), need(classes * sizeof *x[0])};
    long double *output = need(classes * sizeof *output), *parts = need(classes * sizeof *parts);
    uint32_t bytes = kld_dtype_bytes(at->grad_output_dtype);
    bool wide = at->grad_output_dtype && at->reduction == KLD_REDUCTION_NONE;
    for (uint64_t i = 0; i < truth->distinct; i++) {
        struct oracle_row row = {
            .divergence = at->divergence,
            .beta = truth->op.number[KLD_NUMBER_BETA],
            .skew = truth->op.number[KLD_NUMBER_SKEW],
            .weight = truth->op.number[KLD_NUMBER_WEIGHT],
            .form = {at->form[0], at->form[1]},
            .temperature = truth->op.number[KLD_NUMBER_TEMPERATURE],
            .far = truth->geometry.loss_dtype == KLD_DTYPE_FP64 ? FAR_FP64 : FAR_FP32,
            .classes = classes,
            .x = {x[0], x[1]},
            .grad_output = wide ? output : NULL,
            .term = truth->term + i * classes,
        };
        if (truth->term_magnitude) {
            row.term_magnitude = truth->term_magnitude + i * classes;
            row.term_parts = parts;
        }
        for (int side = 0; side < 2; side++) {
            if (at->gradient[side])
                row.gradient[side] = truth->gradient[side] + i * classes;
            if (truth->slack[side])
                row.slack[side] = truth->slack[side] + i * classes;
            for (uint64_t k = 0; k < classes; k++)
                x[side][k] = table_read(at->dtype[side],
                                        truth->input[side] +
                                            (i * classes + k) * kld_dtype_bytes(at->dtype[side]));
        }
        for (uint64_t k = 0; wide && k < classes; k++)
            output[k] = table_read(at->grad_output_dtype,
                                   truth->input[KLD_SLOT_GRAD_OUTPUT] + (i * classes + k) * bytes);
        oracle_row_run(&row);
        if (i == 0)
            check_differences(truth, at, &row);
        truth->value[i] = row.value;
        truth->relative[i] = table_row_relative(at, i, row.value);
        long double share = truth->geometry.loss_dtype == KLD_DTYPE_FP64 ? 1e-12L : 1e-6L;
        truth->magnitude[i] = row.magnitude + VALUE_NOISE / share * row.value_parts;
        for (uint64_t k = 0; truth->term_magnitude && k < classes; k++)
            row.term_magnitude[k] += VALUE_NOISE / share * parts[k];
        memcpy(truth->parts[i], row.parts, sizeof row.parts);
    }
    free(x[0]);
    free(x[1]);
    free(output);
    free(parts);
}

static void reduce(struct table_truth *truth) {
    long double weights = 0, sum = 0, magnitude = 0;
    for (uint64_t row = 0; row < truth->geometry.rows; row++) {
        if (table_row_masked(truth, row))
            continue;
        long double weight = table_row_weight(truth, row);
        weights += weight;
        sum += weight * truth->value[table_row_of(truth, row)];
        magnitude += fabsl(weight) * truth->magnitude[table_row_of(truth, row)];
    }
    truth->divisor = truth->geometry.divisor;
    if (truth->op.reduction == KLD_REDUCTION_ROWMEAN && truth->divisor == 0)
        truth->divisor = weights;
    if (truth->divisor == 0)
        return;
    long double scale = truth->op.number[KLD_NUMBER_SCALE];
    truth->loss = sum * scale / truth->divisor;
    truth->loss_magnitude = magnitude * fabsl(scale / truth->divisor);
}

void table_truth_init(struct table_truth *truth, const struct table_case *at, uint64_t seed) {
    struct table_random random = {seed};
    struct kld_error err;
    memset(truth, 0, sizeof *truth);
    for (int i = 0; i < 8; i++)
        table_uniform(&random);
    make_op(truth, at);
    if (kld_op_check(&truth->op, &truth->geometry, &err)) {
        snprintf(truth->failure, sizeof truth->failure, "kld_op_check: %.200s", err.text);
        return;
    }
    uint64_t classes = truth->geometry.classes;
    truth->distinct = DISTINCT_ELEMENTS_MAX / classes;
    uint64_t most = at->distinct ? at->distinct : DISTINCT_ROWS_MAX;
    if (truth->distinct > most)
        truth->distinct = most;
    if (truth->distinct < 1)
        truth->distinct = 1;
    if (truth->distinct > truth->geometry.rows)
        truth->distinct = truth->geometry.rows;
    truth->shuffled = at->shuffled;
    uint64_t elements = truth->distinct * classes;
    truth->term = need(elements * sizeof *truth->term);
    if (at->reduction == KLD_REDUCTION_NONE)
        truth->term_magnitude = need(elements * sizeof *truth->term_magnitude);
    truth->value = need(truth->distinct * sizeof *truth->value);
    truth->magnitude = need(truth->distinct * sizeof *truth->magnitude);
    truth->parts = need(truth->distinct * sizeof *truth->parts);
    truth->relative = need(truth->distinct * sizeof *truth->relative);
    for (int side = 0; side < 2; side++) {
        if (at->gradient[side])
            truth->gradient[side] = need(elements * sizeof *truth->gradient[side]);
        if (at->gradient[side] && at->divergence == KLD_DIVERGENCE_TV)
            truth->slack[side] = need(elements * sizeof *truth->slack[side]);
    }
    make_inputs(truth, at, &random);
    ask_oracle(truth, at);
    reduce(truth);
}

void table_truth_done(struct table_truth *truth) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        free(truth->input[slot]);
    for (int side = 0; side < 2; side++) {
        free(truth->gradient[side]);
        free(truth->slack[side]);
    }
    free(truth->term);
    free(truth->term_magnitude);
    free(truth->value);
    free(truth->magnitude);
    free(truth->parts);
    free(truth->relative);
}
