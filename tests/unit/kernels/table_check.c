/* table_check.c - compares what a back end wrote with the truth: the loss within 1e-6 (FP64: 1e-12)
 * of the sum of the terms' magnitudes (of reduction none: of each term's own), a gradient within 4
 * steps of FP32, 1 of FP16 or BF16, of the rounded truth, or 1e-7 of the row's largest. A case of
 * close rows also bounds the value's own relative error. Of rows that hold the same only the first
 * is compared with the truth, the others with it: what a row is among others must not change its
 * bits. Pure. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/kernels/table.h"

#define FAILURE_MAX 256
#define FACTORS_MAX 8
#define LOSS_SHARE_FP32 1e-6L
#define LOSS_SHARE_FP64 1e-12L
#define GRADIENT_FLOOR 1e-7L
#define GRADIENT_FLOOR_FP64 1e-13L
#define GRADIENT_NOISE 4e-15L    /* of the parts that cancel: what some steps of double leave */
#define GRADIENT_STEPS_FP64 1000 /* 2e-13 */

static bool same_kind(long double got, long double want) {
    return isnan(want) ? isnan(got) : isinf(want) ? got == want : isfinite(got);
}

static bool check_loss(const char *what, uint64_t row, uint32_t dtype, long double got,
                       long double want, long double magnitude, long double relative,
                       char *failure) {
    if (!isfinite(want) && same_kind(got, want))
        return true;
    /* A value beyond the type's range is an infinity there. */
    if (isfinite(want) && dtype == KLD_DTYPE_FP32 && fabsl(want) > 3.4028235e38L && isinf(got))
        return true;
    long double share = dtype == KLD_DTYPE_FP64 ? LOSS_SHARE_FP64 : LOSS_SHARE_FP32;
    long double allowed = share * magnitude + table_ulp(dtype, want);
    if (relative > 0)
        allowed = fminl(allowed, relative * fabsl(want) + table_ulp(dtype, want));
    if (isfinite(want) && fabsl(got - want) <= allowed)
        return true;
    snprintf(failure, FAILURE_MAX, "%s[%llu] = %.17Lg, expected %.17Lg (off by %.3Lg of %.3Lg)",
             what, (unsigned long long)row, got, want, fabsl(got - want), allowed);
    return false;
}

static const unsigned char *output(const struct table_truth *truth,
                                   const struct table_outputs *outputs, enum kld_slot slot,
                                   uint64_t row) {
    return outputs->at[slot] + row * truth->geometry.slot[slot].row_bytes;
}

/* Adds to the failure what kind of row it is. */
static bool failed(const struct table_truth *truth, const struct table_case *at, uint64_t row,
                   char *failure) {
    size_t length = strlen(failure);
    table_row_text(at, table_row_of(truth, row), failure + length, FAILURE_MAX - length);
    return false;
}

/* Of a row of those that differ: where it came first with a factor. Further factors are compared
 * with the truth each time. */
struct seen {
    uint64_t row[FACTORS_MAX];
    long double factor[FACTORS_MAX];
    unsigned count;
};

static struct seen *seen_new(const struct table_truth *truth) {
    struct seen *seen = calloc(truth->distinct, sizeof *seen);
    if (!seen)
        abort();
    return seen;
}

/* true: an earlier row, *ret_first, must have had the same bits. */
static bool seen_before(struct seen *all, const struct table_truth *truth, uint64_t row,
                        long double factor, uint64_t *ret_first) {
    struct seen *seen = &all[table_row_of(truth, row)];
    for (unsigned i = 0; i < seen->count; i++)
        if (seen->factor[i] == factor && !signbit(seen->factor[i]) == !signbit(factor)) {
            *ret_first = seen->row[i];
            return true;
        }
    if (seen->count < FACTORS_MAX) {
        seen->row[seen->count] = row;
        seen->factor[seen->count++] = factor;
    }
    return false;
}

static bool check_same(const struct table_truth *truth, const struct table_outputs *outputs,
                       enum kld_slot slot, uint64_t row, uint64_t first, char *failure) {
    const unsigned char *a = output(truth, outputs, slot, first);
    const unsigned char *b = output(truth, outputs, slot, row);
    uint32_t dtype = truth->op.tensor[slot].dtype, bytes = kld_dtype_bytes(dtype);
    if (memcmp(a, b, truth->geometry.slot[slot].row_bytes) == 0)
        return true;
    uint64_t i = 0;
    while (memcmp(a + i * bytes, b + i * bytes, bytes) == 0)
        i++;
    snprintf(failure, FAILURE_MAX,
             "%s: rows %llu and %llu hold the same, and have other bits: at %llu %.9Lg and %.9Lg",
             kld_slot_name(slot), (unsigned long long)first, (unsigned long long)row,
             (unsigned long long)i, table_read(dtype, a + i * bytes),
             table_read(dtype, b + i * bytes));
    return false;
}

static bool check_rows(const struct table_truth *truth, const struct table_case *at,
                       const struct table_outputs *outputs, enum kld_slot slot, struct seen *seen,
                       char *failure) {
    uint32_t dtype = truth->op.tensor[slot].dtype;
    long double scale = truth->op.number[KLD_NUMBER_SCALE];
    bool logits = at->form[0] == KLD_FORM_LOGITS && at->form[1] == KLD_FORM_LOGITS;
    for (uint64_t row = 0; row < truth->geometry.rows; row++) {
        uint64_t kind = table_row_of(truth, row), first;
        long double got = table_read(dtype, output(truth, outputs, slot, row));
        bool masked = table_row_masked(truth, row);
        long double factor = masked ? 0 : table_row_weight(truth, row) * scale;
        long double want = masked ? 0 : factor * truth->value[kind];
        long double magnitude = masked ? 0 : fabsl(factor) * truth->magnitude[kind];
        if (!check_loss(kld_slot_name(slot), row, truth->geometry.loss_dtype, got, want, magnitude,
                        truth->relative[kind], failure))
            return failed(truth, at, row, failure);
        if (logits && factor >= 0 && got < 0 && at->reduction != KLD_REDUCTION_NONE) {
            snprintf(failure, FAILURE_MAX,
                     "row %llu: a divergence of two distributions below 0: %Lg",
                     (unsigned long long)row, got);
            return failed(truth, at, row, failure);
        }
        if (masked && got != 0) {
            snprintf(failure, FAILURE_MAX, "masked row %llu has a loss", (unsigned long long)row);
            return false;
        }
        if (!masked && seen_before(seen, truth, row, factor, &first) &&
            !check_same(truth, outputs, slot, row, first, failure))
            return false;
    }
    return true;
}

static bool check_elements(const struct table_truth *truth, const struct table_case *at,
                           const struct table_outputs *outputs, enum kld_slot slot,
                           struct seen *seen, char *failure) {
    uint32_t dtype = truth->geometry.loss_dtype, bytes = kld_dtype_bytes(dtype);
    uint64_t classes = truth->geometry.classes;
    (void)at;
    for (uint64_t row = 0; row < truth->geometry.rows; row++) {
        uint64_t kind = table_row_of(truth, row), first;
        bool masked = table_row_masked(truth, row);
        long double factor =
            masked ? 0 : table_row_weight(truth, row) * truth->op.number[KLD_NUMBER_SCALE];
        if (!masked && seen_before(seen, truth, row, factor, &first)) {
            if (!check_same(truth, outputs, slot, row, first, failure))
                return false;
            continue;
        }
        for (uint64_t i = 0; i < classes; i++) {
            long double want = masked ? 0 : factor * truth->term[kind * classes + i];
            long double got = table_read(dtype, output(truth, outputs, slot, row) + i * bytes);
            /* By the term's own size, not the row's: each is a result. */
            long double magnitude = fabsl(factor) * truth->term_magnitude[kind * classes + i];
            if (!check_loss("loss", row * classes + i, dtype, got, want, magnitude, 0, failure))
                return false;
        }
    }
    return true;
}

/* Are two numbers of a data type within its steps? An infinity counts as the number after the last.
 */
static bool near_enough(uint32_t dtype, long double got, long double want, long double floor) {
    long double steps = dtype == KLD_DTYPE_FP64   ? GRADIENT_STEPS_FP64
                        : dtype == KLD_DTYPE_FP32 ? 4
                                                  : 1;
    unsigned char rounded[8];
    long double limit = dtype == KLD_DTYPE_FP16 ? 65536.0L : 0x1p128L;
    if (isnan(want) || isnan(got))
        return isnan(want) && isnan(got);
    table_write(dtype, rounded, want);
    long double exact = table_read(dtype, rounded);
    if (dtype != KLD_DTYPE_FP64) {
        exact = isinf(exact) ? copysignl(limit, exact) : exact;
        got = isinf(got) ? copysignl(limit, got) : got;
    }
    if (exact == got)
        return true;
    return fabsl(got - exact) <= steps * table_ulp(dtype, exact) ||
           fabsl(got - want) <= floor + 0.5L * table_ulp(dtype, want);
}

/* Of a row whose value is infinite the softmax's share of an infinite sum is inf - inf, which is
 * left open. What is finite there is well defined: of forward_kl to the predictions q - p. */
static bool is_open(const struct table_case *at, int side, long double value,
                    long double gradient) {
    return isinf(value) && at->form[side] == KLD_FORM_LOGITS && !isfinite(gradient);
}

/* One row of a gradient; zero: it is masked, or weights sum to 0. */
static bool check_gradient_row(const struct table_truth *truth, const struct table_case *at,
                               const unsigned char *from, int side, uint64_t row, bool zero,
                               long double factor, char *failure) {
    enum kld_slot slot = side ? KLD_SLOT_GRAD_TARGETS : KLD_SLOT_GRAD_PREDICTIONS;
    uint32_t dtype = at->dtype[side], bytes = kld_dtype_bytes(dtype);
    uint64_t classes = truth->geometry.classes, kind = table_row_of(truth, row);
    const long double *truths = truth->gradient[side] + kind * classes;
    long double largest = 0;
    for (uint64_t i = 0; i < classes && !zero; i++)
        if (isfinite(truths[i]))
            largest = fmaxl(largest, fabsl(truths[i] * factor));
    long double floor = largest * (dtype == KLD_DTYPE_FP64 ? GRADIENT_FLOOR_FP64 : GRADIENT_FLOOR) +
                        GRADIENT_NOISE * fabsl(factor) * truth->parts[kind][side];
    for (uint64_t i = 0; i < classes; i++) {
        long double got = table_read(dtype, from + i * bytes);
        long double want = zero ? 0 : truths[i] * factor;
        long double slack = 0;
        if (truth->slack[side])
            slack = truth->slack[side][kind * classes + i] * fabsl(factor);
        if (zero ? got == 0
                 : near_enough(dtype, got, want, floor + slack) ||
                       is_open(at, side, truth->value[kind], truths[i]))
            continue;
        snprintf(failure, FAILURE_MAX,
                 "%s[%llu, %llu] = %.9Lg, expected %.9Lg (largest of the row %.3Lg)",
                 kld_slot_name(slot), (unsigned long long)row, (unsigned long long)i, got, want,
                 largest);
        return false;
    }
    return true;
}

static bool check_gradient(const struct table_truth *truth, const struct table_case *at,
                           const struct table_outputs *outputs, enum kld_slot slot,
                           struct seen *seen, char *failure) {
    for (uint64_t row = 0; row < truth->geometry.rows; row++) {
        bool zero = table_row_masked(truth, row) || truth->divisor == 0;
        long double factor = zero ? 0 : table_row_factor(truth, row);
        uint64_t first;
        bool again = !zero && seen_before(seen, truth, row, factor, &first);
        if (again ? !check_same(truth, outputs, slot, row, first, failure)
                  : !check_gradient_row(truth, at, output(truth, outputs, slot, row),
                                        slot == KLD_SLOT_GRAD_TARGETS, row, zero, factor, failure))
            return failed(truth, at, row, failure);
    }
    return true;
}

static bool check_scalar(const struct table_truth *truth, const struct table_case *at,
                         const struct table_outputs *outputs, char *failure) {
    uint32_t dtype = truth->geometry.loss_dtype;
    if (!check_loss("reported loss", 0, dtype, outputs->loss, truth->loss, truth->loss_magnitude,
                    at->relative, failure))
        return false;
    if (!outputs->at[KLD_SLOT_LOSS])
        return true;
    double written = (double)table_read(dtype, outputs->at[KLD_SLOT_LOSS]);
    if (memcmp(&written, &outputs->loss, sizeof written) == 0 ||
        (isnan(written) && isnan(outputs->loss)))
        return true;
    snprintf(failure, FAILURE_MAX, "loss written %.17g, reported %.17g", written, outputs->loss);
    return false;
}

typedef bool check_slot(const struct table_truth *truth, const struct table_case *at,
                        const struct table_outputs *outputs, enum kld_slot slot, struct seen *seen,
                        char *failure);

bool table_check(const struct table_truth *truth, const struct table_case *at,
                 const struct table_outputs *outputs, char *failure) {
    if (truth->geometry.scalar && !check_scalar(truth, at, outputs, failure))
        return false;
    check_slot *const checks[KLD_SLOT_COUNT] = {
        [KLD_SLOT_LOSS] = at->reduction == KLD_REDUCTION_ROW    ? check_rows
                          : at->reduction == KLD_REDUCTION_NONE ? check_elements
                                                                : NULL,
        [KLD_SLOT_ROW_LOSS] = check_rows,
        [KLD_SLOT_GRAD_PREDICTIONS] = check_gradient,
        [KLD_SLOT_GRAD_TARGETS] = check_gradient,
    };
    bool fine = true;
    for (int slot = 0; fine && slot < KLD_SLOT_COUNT; slot++) {
        if (!checks[slot] || !outputs->at[slot])
            continue;
        struct seen *seen = seen_new(truth);
        fine = checks[slot](truth, at, outputs, (enum kld_slot)slot, seen, failure);
        free(seen);
    }
    return fine;
}
