/* logits.h - logits of FP16 or BF16 on both sides in FP32 arithmetic: value of a KL and the
 * gradient of the side in the denominator. Two 16-bit logits differ by much more than FP32 rounds
 * off, or not at all; FP32 logits may differ by less and go through double. Included once by each
 * kernel_*.c; needs a fused multiply-add, so vectors of 16 bytes do without it.
 *
 * An error of the two sums moves the value in second order only (the terms p d - p + q are flat
 * there), and a difference of the two masses is never taken: where d is small it is a series. */
#ifndef KLD_KERNELS_CPU_LOGITS_H
#define KLD_KERNELS_CPU_LOGITS_H

#include "kernels/cpu/probs.h"

INLINE bool is_half(uint32_t dtype) { return dtype == KLD_DTYPE_FP16 || dtype == KLD_DTYPE_BF16; }

INLINE bool logits_fits(const struct kld_cpu_work *work) {
    return KLD_VECTOR_BYTES > 16 &&
           (work->divergence == KLD_DIVERGENCE_FORWARD_KL ||
            work->divergence == KLD_DIVERGENCE_REVERSE_KL) &&
           work->form[0] == KLD_FORM_LOGITS && work->form[1] == KLD_FORM_LOGITS &&
           is_half(work->dtype[0]) && is_half(work->dtype[1]) && !work->none &&
           !work->gradient[probs_own_side(work)];
}

/* exp(x) for x <= 0, 0 below exp(-87); a NaN stays one. */
INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    vi32 gone = x < -87.0f;
    vf shifted = x * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = vf_of(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    vu32 scale = ((vu32)shifted - 0x4b400000u + 127u) << 23;
    return vf_select(gone, vf_of(0), p * (vf)scale);
}

INLINE vd vf_sums(const vf sum[LANES_OF_SUM]) {
    vd total = vd_of(0);
    for (int j = 0; j < LANES_OF_SUM; j++) {
        vfh half[2];
        memcpy(half, &sum[j], sizeof half);
        total += __builtin_convertvector(half[0], vd) + __builtin_convertvector(half[1], vd);
    }
    return total;
}

#define LOGITS_STEP (LANES_OF_SUM * FLOATS)

/* Whole steps of a block: the rest is classes of no mass. Returns where they end. */
INLINE uint64_t logits_load(uint32_t dtype, const unsigned char *from, uint64_t n, float *to) {
    uint64_t m = (n + LOGITS_STEP - 1) / LOGITS_STEP * LOGITS_STEP;
    block_load_floats(dtype, from, n, -INFINITY, to);
    for (uint64_t i = whole_vectors(n); i < m; i++)
        to[i] = -INFINITY;
    return m;
}

/* The sum of exp((z - origin) / T). */
static double logits_sum(const struct kld_cpu_work *work, uint32_t dtype, const unsigned char *in,
                         uint64_t count, float origin) {
    float x[BLOCK] ALIGNED, inverse = (float)work->inverse_temperature;
    vd total = vd_of(0);
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t n = count - at < BLOCK ? count - at : BLOCK;
        uint64_t m = logits_load(dtype, in + at * 2, n, x);
        vf sum[LANES_OF_SUM] = {{0}};
        for (uint64_t i = 0; i < m; i += LOGITS_STEP)
            for (int j = 0; j < LANES_OF_SUM; j++)
                sum[j] += vf_exp((*(const vf *)(x + i + j * FLOATS) - origin) * inverse);
        total += vf_sums(sum);
    }
    return vd_sum(total);
}

struct logits_row {
    float max[2], inverse_sum[2]; /* own, other */
    float inverse_temperature, difference_high, difference_low;
    float factor;
};

/* d - 1 + exp(-d) for |d| < 0.35. */
INLINE vf vf_excess(vf d) {
    vf s = vf_of(1.0f / 40320);
    s = s * d - 1.0f / 5040;
    s = s * d + 1.0f / 720;
    s = s * d - 1.0f / 120;
    s = s * d + 1.0f / 24;
    s = s * d - 1.0f / 6;
    s = s * d + 0.5f;
    return s * d * d;
}

/* One vector: the terms, and other less own mass times the factor. */
INLINE vf logits_term(const struct logits_row *row, vf x, vf y, vf *ret_gradient) {
    vf own = vf_exp((x - row->max[0]) * row->inverse_temperature) * row->inverse_sum[0];
    vf other = vf_exp((y - row->max[1]) * row->inverse_temperature) * row->inverse_sum[1];
    vf d =
        ((x - row->max[0]) - (y - row->max[1])) * row->inverse_temperature - row->difference_high;
    d = d - row->difference_low;
    vf excess = vf_excess(d);
    vi32 near = (d < 0.35f) & (d > -0.35f), over_zero = d == INFINITY;
    vf term = vf_select(own == 0.0f, other, own * d - own + other);
    term = vf_select(near, own * excess, term);
    *ret_gradient = vf_select(near, own * (excess - d), other - own) * row->factor;
    return vf_select(over_zero, vf_of(INFINITY), term);
}

static struct logits_row logits_row(const struct kld_cpu_work *work,
                                    const struct kld_cpu_span *span, int own, int other) {
    double difference = log(span->sum[own] / span->sum[other]);
    struct logits_row row = {
        .max = {(float)span->max[own], (float)span->max[other]},
        .inverse_sum = {(float)(1 / span->sum[own]), (float)(1 / span->sum[other])},
        .inverse_temperature = (float)work->inverse_temperature,
        .difference_high = (float)difference,
        .factor = (float)(span->gradient_factor * work->inverse_temperature),
    };
    row.difference_low = (float)(difference - (double)row.difference_high);
    return row;
}

static void logits_pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                        struct kld_cpu_partial *ret_partial) {
    int own_side = probs_own_side(work), other_side = 1 - own_side;
    float own[BLOCK] ALIGNED, other[BLOCK] ALIGNED, gradient[BLOCK] ALIGNED;
    struct logits_row row = logits_row(work, span, own_side, other_side);
    vd total = vd_of(0);
    for (uint64_t at = 0; at < span->count; at += BLOCK) {
        uint64_t n = span->count - at < BLOCK ? span->count - at : BLOCK;
        uint64_t m = logits_load(work->dtype[own_side], span->in[own_side] + at * 2, n, own);
        logits_load(work->dtype[other_side], span->in[other_side] + at * 2, n, other);
        vf sum[LANES_OF_SUM] = {{0}};
        for (uint64_t i = 0; i < m; i += LOGITS_STEP)
            for (int j = 0; j < LANES_OF_SUM; j++) {
                uint64_t k = i + (uint64_t)j * FLOATS;
                sum[j] += logits_term(&row, *(const vf *)(own + k), *(const vf *)(other + k),
                                      (vf *)(gradient + k));
            }
        total += vf_sums(sum);
        if (span->gradient[other_side])
            block_store_floats(work->dtype[other_side], gradient, n,
                               span->gradient[other_side] + at * 2);
    }
    *ret_partial = (struct kld_cpu_partial){.value = vd_sum(total)};
}

#endif
