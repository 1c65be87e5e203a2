/* body.h - the arithmetic on a piece of a row, in blocks of KLD_CPU_BLOCK classes that stay in the
 * first-level cache: load as double, masses and logarithms by form, the rule, the way back from
 * df/dx to the gradient of a form, store. Forms, data types and rules are independent stages, so
 * that none of them is written out for the others. Two combinations have their own code, in FP32
 * (probs.h, logits.h). Included once by each kernel_*.c. Runs on the threads of the team; touches
 * its span only. */
#include "kernels/cpu/logits.h"
#include "kernels/cpu/probs.h"
#include "kernels/cpu/probs_rules.h"
#include "kernels/cpu/rules.h"
#include "kernels/cpu/vector.h"

struct block {
    double raw[2][BLOCK] ALIGNED;
    double mass[2][BLOCK] ALIGNED;
    double d[BLOCK] ALIGNED; /* ln p - ln q, or ln q */
    double term[BLOCK] ALIGNED;
    double derivative[2][BLOCK] ALIGNED;
    double grad_output[BLOCK] ALIGNED;
};

/* A value whose probability is 0 in each form: it adds nothing to any sum. */
INLINE double padding(uint32_t form) { return form == KLD_FORM_PROBS ? 0 : -(double)INFINITY; }

static double maximum_of_doubles(const unsigned char *in, uint64_t count) {
    double x[BLOCK] ALIGNED;
    vd max = vd_of(-INFINITY);
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t n = count - at < BLOCK ? count - at : BLOCK, m = whole_vectors(n);
        block_load(KLD_DTYPE_FP64, in + at * sizeof *x, n, -(double)INFINITY, x);
        for (uint64_t i = 0; i < m; i += DOUBLES)
            max = vd_select(vd_load(x + i) > max, vd_load(x + i), max);
    }
    double top = max[0];
    for (int i = 1; i < DOUBLES; i++)
        top = max[i] > top ? max[i] : top;
    return top;
}

static double maximum_of_floats(uint32_t dtype, const unsigned char *in, uint64_t count) {
    float x[BLOCK] ALIGNED;
    vf max = vf_of(-INFINITY);
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t n = count - at < BLOCK ? count - at : BLOCK, m = whole_vectors(n);
        const float *from = x;
        if (dtype == KLD_DTYPE_FP32 && n == BLOCK)
            from = (const float *)(const void *)in + at;
        else
            block_load_floats(dtype, in + at * element_bytes(dtype), n, -INFINITY, x);
        for (uint64_t i = 0; i < m; i += FLOATS) {
            vf y = *(const vf_any *)(from + i);
            max = vf_select(y > max, y, max);
        }
    }
    float top = max[0];
    for (int i = 1; i < FLOATS; i++)
        top = max[i] > top ? max[i] : top;
    return top;
}

/* A NaN does not count for the maximum; it makes the sum NaN. */
static void statistics(const struct kld_cpu_work *work, enum kld_cpu_side side,
                       const unsigned char *in, uint64_t count, double *ret_max, double *ret_sum) {
    double x[BLOCK] ALIGNED;
    uint32_t dtype = work->dtype[side];
    double top = dtype == KLD_DTYPE_FP64 ? maximum_of_doubles(in, count)
                                         : maximum_of_floats(dtype, in, count);
    /* Nothing but -inf (and NaN): exp(-inf - 0) gives a sum of 0 (or NaN). */
    double origin = top == -(double)INFINITY ? 0 : top;
    *ret_max = top;
    if (logits_fits(work)) {
        *ret_sum = logits_sum(work, dtype, in, count, (float)origin);
        return;
    }
    vd sum[2] = {vd_of(0), vd_of(0)};
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t n = count - at < BLOCK ? count - at : BLOCK, m = whole_vectors(n);
        block_load(dtype, in + at * element_bytes(dtype), n, -(double)INFINITY, x);
        for (uint64_t i = 0; i < m; i += 2 * DOUBLES)
            for (int j = 0; j < 2; j++)
                sum[j] +=
                    vd_exp((vd_load(x + i + j * DOUBLES) - origin) * work->inverse_temperature);
    }
    *ret_sum = vd_sum(sum[0] + sum[1]);
}

/* What the stages need of a row, besides its span. */
struct row_constants {
    double log_sum[2], inverse_sum[2];
    double max_difference, log_sum_difference; /* p less q */
};

static struct row_constants row_constants(const struct kld_cpu_work *work,
                                          const struct kld_cpu_span *span) {
    struct row_constants row = {{0, 0}, {1, 1}, 0, 0};
    for (int side = 0; side < 2; side++) {
        if (work->form[side] != KLD_FORM_LOGITS)
            continue;
        row.log_sum[side] = log(span->sum[side]);
        row.inverse_sum[side] = 1 / span->sum[side];
    }
    row.max_difference = span->max[KLD_CPU_P] - span->max[KLD_CPU_Q];
    row.log_sum_difference =
        log1p((span->sum[KLD_CPU_P] - span->sum[KLD_CPU_Q]) / span->sum[KLD_CPU_Q]);
    return row;
}

static void block_masses(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                         const struct row_constants *row, int side, struct block *block,
                         uint64_t m) {
    const double *x = block->raw[side];
    double *mass = block->mass[side];
    switch (work->form[side]) {
    case KLD_FORM_PROBS:
        for (uint64_t i = 0; i < m; i += DOUBLES)
            vd_store(mass + i, vd_load(x + i));
        break;
    case KLD_FORM_LOGPROBS:
        for (uint64_t i = 0; i < m; i += DOUBLES)
            vd_store(mass + i, vd_exp(vd_load(x + i)));
        break;
    default:
        for (uint64_t i = 0; i < m; i += DOUBLES)
            vd_store(mass + i,
                     vd_exp((vd_load(x + i) - span->max[side]) * work->inverse_temperature) *
                         row->inverse_sum[side]);
    }
}

INLINE vd log_of(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                 const struct row_constants *row, int side, vd x) {
    switch (work->form[side]) {
    case KLD_FORM_PROBS: return vd_log_ratio(x, vd_of(1));
    case KLD_FORM_LOGPROBS: return x;
    default: return (x - span->max[side]) * work->inverse_temperature - row->log_sum[side];
    }
}

/* d = ln p - ln q. Where both sides have one form it comes from the difference or the ratio of
 * what they hold, so that it is exact to rounding where they agree. */
static void block_differences(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                              const struct row_constants *row, struct block *block, uint64_t m) {
    const double *q = block->raw[KLD_CPU_Q], *p = block->raw[KLD_CPU_P];
    bool same = work->form[KLD_CPU_Q] == work->form[KLD_CPU_P];
    vd none = vd_of(-INFINITY);
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd x = vd_load(q + i), y = vd_load(p + i), d;
        vi64 both = vd_load(block->mass[0] + i) == 0.0;
        both &= vd_load(block->mass[1] + i) == 0.0;
        if (same && work->form[KLD_CPU_Q] == KLD_FORM_PROBS) {
            d = vd_log_ratio(y, x);
        } else {
            vd lq, lp;
            if (!same) {
                lq = log_of(work, span, row, KLD_CPU_Q, x);
                lp = log_of(work, span, row, KLD_CPU_P, y);
                d = lp - lq;
            } else {
                lq = x;
                lp = y;
                d = y - x;
                if (work->form[KLD_CPU_Q] == KLD_FORM_LOGITS)
                    d = (d - row->max_difference) * work->inverse_temperature -
                        row->log_sum_difference;
            }
            d = vd_select(both & (lq == none) & (lp == none), vd_of(0), d);
        }
        vd_store(block->d + i, d);
    }
}

/* ln q in the place of d. */
static void block_logs(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                       const struct row_constants *row, struct block *block, uint64_t m) {
    for (uint64_t i = 0; i < m; i += DOUBLES)
        vd_store(block->d + i,
                 log_of(work, span, row, KLD_CPU_Q, vd_load(block->raw[KLD_CPU_Q] + i)));
}

static enum want wanted(const struct kld_cpu_work *work, int side) {
    if (!work->gradient[side])
        return WANT_NOTHING;
    if (work->form[side] == KLD_FORM_PROBS)
        return WANT_SLOPE;
    return work->form[side] == KLD_FORM_LOGITS && !work->none ? WANT_CENTRED : WANT_MOMENT;
}

/* grad_output of reduction none comes before the sum over the row. */
static void block_weigh(const struct kld_cpu_work *work, const unsigned char *from, uint64_t n,
                        const enum want *want, struct block *block) {
    uint64_t m = whole_vectors(n);
    block_load(work->grad_output_dtype, from, n, 0, block->grad_output);
    for (int side = 0; side < 2; side++)
        for (uint64_t i = 0; want[side] && i < m; i += DOUBLES)
            vd_store(block->derivative[side] + i,
                     vd_load(block->derivative[side] + i) * vd_load(block->grad_output + i));
}

static void block_gradient(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                           int side, struct block *block, uint64_t at, uint64_t n) {
    double *derivative = block->derivative[side];
    uint64_t m = whole_vectors(n);
    bool logits = work->form[side] == KLD_FORM_LOGITS;
    double factor = span->gradient_factor * (logits ? work->inverse_temperature : 1);
    double dot = span->dot[side];
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd x = vd_load(derivative + i), mass = vd_load(block->mass[side] + i);
        if (logits) /* a class of probability 0 takes nothing, even off an infinite sum */
            x = x - vd_select(mass == 0.0, vd_of(0), mass * dot);
        vd_store(derivative + i, x * factor);
    }
    block_store(work->dtype[side], derivative, n,
                span->gradient[side] + at * element_bytes(work->dtype[side]));
}

static void block_loss(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                       struct block *block, uint64_t at, uint64_t n) {
    uint64_t m = whole_vectors(n);
    for (uint64_t i = 0; i < m; i += DOUBLES)
        vd_store(block->term + i, vd_load(block->term + i) * span->loss_factor);
    block_store(work->loss_dtype, block->term, n,
                span->loss + at * element_bytes(work->loss_dtype));
}

INLINE double block_sum(const double *x, uint64_t m) {
    vd sum = vd_of(0);
    for (uint64_t i = 0; i < m; i += DOUBLES)
        sum += vd_load(x + i);
    return vd_sum(sum);
}

static void pass_in_stages(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                           struct kld_cpu_partial *ret_partial) {
    struct block block;
    struct row_constants row = row_constants(work, span);
    struct rule_block rule = {
        .mass = {block.mass[0], block.mass[1]},
        .d = block.d,
        .term = block.term,
        .derivative = {block.derivative[0], block.derivative[1]},
        .want = {wanted(work, 0), wanted(work, 1)},
        .balanced =
            work->form[0] == KLD_FORM_LOGITS && work->form[1] == KLD_FORM_LOGITS && !work->none,
    };
    struct kld_cpu_partial sums = {0};
    for (uint64_t at = 0; at < span->count; at += BLOCK) {
        uint64_t n = span->count - at < BLOCK ? span->count - at : BLOCK, m = whole_vectors(n);
        for (int side = 0; side < 2; side++) {
            block_load(work->dtype[side], span->in[side] + at * element_bytes(work->dtype[side]), n,
                       padding(work->form[side]), block.raw[side]);
            block_masses(work, span, &row, side, &block, m);
        }
        if (work->rule.kind == KLD_RULE_CROSS_ENTROPY)
            block_logs(work, span, &row, &block, m);
        else
            block_differences(work, span, &row, &block, m);
        rule_run(&work->rule, &rule, m);
        sums.value += block_sum(block.term, m);
        if (span->grad_output)
            block_weigh(work, span->grad_output + at * element_bytes(work->grad_output_dtype), n,
                        rule.want, &block);
        for (int side = 0; side < 2; side++) {
            if (rule.want[side] && work->form[side] == KLD_FORM_LOGITS)
                sums.dot[side] += block_sum(block.derivative[side], m);
            if (span->gradient[side])
                block_gradient(work, span, side, &block, at, n);
        }
        if (span->loss)
            block_loss(work, span, &block, at, n);
    }
    *ret_partial = sums;
}

static void pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                 struct kld_cpu_partial *ret_partial) {
    if (probs_fits(work))
        probs_pass(work, span, ret_partial);
    else if (probs_rule_fits(work))
        probs_rule_pass(work, span, pass_in_stages, ret_partial);
    else if (logits_fits(work))
        logits_pass(work, span, ret_partial);
    else
        pass_in_stages(work, span, ret_partial);
}

const struct kld_cpu_kernels KERNELS = {
    .name = KERNELS_NAME,
    .statistics = statistics,
    .pass = pass,
    .stream = stream,
};
