/* body.h - the arithmetic on a piece of a row, in blocks of KLD_CPU_BLOCK classes that stay in the
 * first-level cache: load as double, the steps of stages.h, store. Forms, data types and rules are
 * independent of each other there, so that none of them is written out for the others. Some
 * combinations have their own code, in FP32 (probs.h, logprobs.h), and short rows (short.h,
 * short_logits.h). Included once by each kernel_*.c. Runs on the threads of the team; touches its
 * span only. */
#include "kernels/cpu/logprobs.h"
#include "kernels/cpu/probs.h"
#include "kernels/cpu/probs_rules.h"
#include "kernels/cpu/short_logits.h"
#include "kernels/cpu/stages.h"

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

static struct row_constants row_constants(const struct kld_cpu_work *work,
                                          const struct kld_cpu_span *span) {
    struct row_constants row = {0};
    for (int side = 0; side < 2; side++) {
        bool logits = work->form[side] == KLD_FORM_LOGITS;
        row.factor[side] = vd_of(span->gradient_factor * (logits ? work->inverse_temperature : 1));
        row.dot[side] = vd_of(span->dot[side]);
        row.max[side] = vd_of(span->max[side]);
        row.log_sum[side] = vd_of(logits ? log(span->sum[side]) : 0);
        row.inverse_sum[side] = vd_of(logits ? 1 / span->sum[side] : 1);
    }
    if (work->form[0] == KLD_FORM_LOGITS && work->form[1] == KLD_FORM_LOGITS) {
        set_origins(&row, work->inverse_temperature);
        row.log_sum_difference =
            vd_log_ratio(vd_of(span->sum[KLD_CPU_P]), vd_of(span->sum[KLD_CPU_Q]));
    }
    return row;
}

/* grad_output of reduction none comes before the sum over the row. */
static void block_weigh(const struct kld_cpu_work *work, const unsigned char *from, uint64_t n,
                        struct columns *at) {
    double grad_output[BLOCK] ALIGNED;
    uint64_t m = whole_vectors(n);
    block_load(work->grad_output_dtype, from, n, 0, grad_output);
    for (int side = 0; side < 2; side++)
        for (uint64_t i = 0; work->gradient[side] && i < m; i += DOUBLES)
            vd_store(at->raw[side] + i, vd_load(at->raw[side] + i) * vd_load(grad_output + i));
}

static void block_loss(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                       struct block *block, uint64_t at, uint64_t n) {
    uint64_t m = whole_vectors(n);
    for (uint64_t i = 0; i < m; i += DOUBLES)
        vd_store(block->term + i, vd_load(block->term + i) * span->loss_factor);
    block_store(work->loss_dtype, block->term, n,
                span->loss + at * element_bytes(work->loss_dtype));
}

static void pass_in_stages(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                           struct kld_cpu_partial *ret_partial) {
    struct columns columns;
    struct block block;
    struct row_constants row = row_constants(work, span);
    struct kld_cpu_partial sums = {0};
    for (uint64_t at = 0; at < span->count; at += BLOCK) {
        uint64_t n = span->count - at < BLOCK ? span->count - at : BLOCK, m = whole_vectors(n);
        for (int side = 0; side < 2; side++) {
            block_load(work->dtype[side], span->in[side] + at * element_bytes(work->dtype[side]), n,
                       padding(work->form[side]), columns.raw[side]);
            block_masses(work, &row, side, &columns, m);
        }
        block_rule(work, &row, &columns, &block, m);
        sums.value += vd_sum(block_sums(block.term, m));
        if (span->grad_output)
            block_weigh(work, span->grad_output + at * element_bytes(work->grad_output_dtype), n,
                        &columns);
        for (int side = 0; side < 2; side++) {
            double *derivative = columns.raw[side];
            if (work->gradient[side] && work->form[side] == KLD_FORM_LOGITS)
                sums.dot[side] += vd_sum(block_sums(derivative, m));
            if (!span->gradient[side])
                continue;
            block_gradient(work, &row, side, &columns, m);
            block_store(work->dtype[side], derivative, n,
                        span->gradient[side] + at * element_bytes(work->dtype[side]));
        }
        if (span->loss)
            block_loss(work, span, &block, at, n);
    }
    *ret_partial = sums;
}

/* A factor of the gradients beyond FP32 would be inf, or 0, where its product with a small, or
 * large, p/q is neither. */
INLINE bool factor_fits(const struct kld_cpu_span *span) {
    return (!span->gradient[0] && !span->gradient[1]) || is_float(span->gradient_factor);
}

static void pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                 struct kld_cpu_partial *ret_partial) {
    if (!factor_fits(span))
        pass_in_stages(work, span, ret_partial);
    else if (probs_fits(work))
        probs_pass(work, span, ret_partial);
    else if (probs_rule_fits(work))
        probs_rule_pass(work, span, pass_in_stages, ret_partial);
    else if (logprobs_fits(work))
        logprobs_pass(work, span, pass_in_stages, ret_partial);
    else
        pass_in_stages(work, span, ret_partial);
}

const struct kld_cpu_kernels KERNELS = {
    .name = KERNELS_NAME,
    .statistics = statistics,
    .pass = pass,
    .lanes = DOUBLES,
    .rows = short_rows,
    .stream = stream,
};
