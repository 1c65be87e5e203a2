/* logits_careful.cuh - the statistics of rows of logits whose sides are close, or have a heavy
 * class in common: see logits_stats.cuh. Every class is measured against the row: v = ln p - ln q
 * but for what is still unknown of the two sums, some 1e-7. So all that is added up is of the size
 * of the result, wherever in the row it comes from; what v lacks shows in the change of the sum. */
#ifndef KLD_KERNELS_CUDA_LOGITS_CAREFUL_CUH
#define KLD_KERNELS_CUDA_LOGITS_CAREFUL_CUH

#include "kernels/cuda/logits_merge.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

/* Logits below it have no mass, whatever the rest: what masks classes without being -inf. */
static constexpr float NO_MASS = -1e30f;

/* |v| below it: by series. */
static constexpr float SERIES_MAX = 1.0f;

/* 2^(z s - c) in FP64. */
static __device__ __forceinline__ double careful_exp(float z, float c, const temperature &t) {
    exp_parts e = exp_split(z, t);
    double scale = (double)exp2_fast(e.k - c);
    return fma(scale, (double)e.w, scale);
}

/* What the exponentials are measured against: q's are 2^(zq s - c_q), p's 2^(zp s - c_p) fraction,
 * which is b e^v. 16 bits take s by its high part alone, here and in all passes, and q's
 * exponentials from the largest logit: that of a class with all the mass is then 1 exactly. */
struct careful_reference {
    float top_q, pad_p, pad_q; /* no mass below the pads */
    float c_q, c_p;
    float apart; /* 16 bits: taken off zp, so that no difference is rounded */
    double shift, fraction, inverse_temperature;
    double origin_q, delta, scale; /* c_q before rounding in 16 bits; shift T; s */
    two_floats rest;               /* shift - apart / T */

    __device__ __forceinline__ careful_reference() {}
    template <class T>
    static __device__ __forceinline__ careful_reference of(float top_q, double shift,
                                                           double inverse_temperature,
                                                           const temperature &t, float span) {
        careful_reference at;
        at.shift = shift;
        at.inverse_temperature = inverse_temperature;
        at.scale = (double)t.scale.high + (sizeof(T) == 4 ? (double)t.scale.low : 0.0);
        at.delta = shift / inverse_temperature;
        at.apart = apart_of<T>(at.delta);
        at.rest = two_floats(shift - (double)at.apart * inverse_temperature);
        at.top_q = fabsf(top_q) < 1e30f ? top_q : CUDART_NAN_F;
        at.c_q = reference::whole(top_q * t.scale.high);
        at.origin_q = sizeof(T) == 4 ? (double)at.c_q : (double)top_q * at.scale;
        double c = at.origin_q + (at.delta - (double)at.apart) * at.scale;
        at.c_p = fabs(c) < 2097152.0 ? (float)rint(c) : CUDART_NAN_F;
        at.fraction = exp2(rint(c) - c);
        at.pad_q = reference::below(top_q, span);
        at.pad_p = reference::below(top_q + (float)at.delta, span);
        return at;
    }
};

struct careful_term {
    double b, change, forward, reverse, a;
};

static __device__ careful_term careful_pair(float z_p, float z_q, const careful_reference &at,
                                            const temperature &t) {
    bool no_p = z_p == -CUDART_INF_F, no_q = z_q == -CUDART_INF_F;
    double v = fma((double)z_p - (double)z_q, at.inverse_temperature, -at.shift);
    careful_term r;
    r.b = z_q < NO_MASS ? 0.0 : careful_exp(fmaxf(z_q, at.pad_q), at.c_q, t);
    if (!no_p && !no_q && fabs(v) < (double)SERIES_MAX) {
        double f = (double)expm1_rest((float)v), square = v * v * r.b;
        r.change = fma(square, f, r.b * v);
        r.forward = square * fma(v - 1.0, f, 1.0);
        r.reverse = square * f;
        r.a = r.b + r.change;
        return r;
    }
    r.a = z_p < NO_MASS ? 0.0 : careful_exp(fmaxf(z_p, at.pad_p), at.c_p, t) * at.fraction;
    r.change = r.a - r.b;
    if (isnan(z_p + z_q)) { /* fmaxf() drops it */
        r.forward = r.reverse = CUDART_NAN;
        return r;
    }
    r.forward = r.a == 0.0 ? r.b : no_q ? CUDART_INF : fma(r.a, v, -r.change);
    r.reverse = r.b == 0.0 ? r.a : no_p ? CUDART_INF : fma(-r.b, v, r.change);
    return r;
}

struct careful_term_16 {
    float b, change, forward, reverse, a;
};

/* The same of 16 bits, in FP32: v is exact but for its last bit, and every term is of the size of
 * the result. */
static __device__ __forceinline__ careful_term_16 careful_pair_16(float z_p, float z_q,
                                                                  const careful_reference &at,
                                                                  float fraction,
                                                                  const temperature &t) {
    bool no_p = z_p == -CUDART_INF_F, no_q = z_q == -CUDART_INF_F;
    float above = z_p - at.apart, u = above - z_q;
    float v = fmaf(u, t.inverse.high, -at.rest.high) + fmaf(u, t.inverse.low, -at.rest.low);
    float b = z_q < NO_MASS ? 0.0f : exp2_fast((z_q - at.top_q) * t.scale.high);
    float f = expm1_rest(v), square = v * v * b;
    bool near = !no_p && !no_q && fabsf(v) < SERIES_MAX;
    float a = z_p < NO_MASS ? 0.0f : exp2_fast(fmaf(above, t.scale.high, -at.c_p)) * fraction;
    careful_term_16 r;
    r.b = b;
    r.change = near ? fmaf(square, f, b * v) : a - b;
    float forward = a == 0.0f ? b : no_q ? CUDART_INF_F : fmaf(a, v, -r.change);
    float reverse = b == 0.0f ? a : no_p ? CUDART_INF_F : fmaf(-b, v, r.change);
    r.forward = near ? square * fmaf(v - 1.0f, f, 1.0f) : forward;
    if (isnan(z_p + z_q)) /* the largest of all drops it */
        r.forward = CUDART_NAN_F;
    r.reverse = near ? square * f : reverse;
    r.a = near ? b + r.change : a;
    return r;
}

/* The two sums of exponentials against the largest of each side, -inf and all: what the fast way
 * could not say. sum: p's, q's. */
template <class T, class SLICE>
static __device__ __noinline__ part masses(SLICE slice, temperature t, reference at) {
    part mine = {{0, 0, 0, 0}, {0, 0}, {}};
    slice.template pass<T>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
        pair_of<T> z(raw_p, raw_q);
        z.pad(left, -CUDART_INF_F, -CUDART_INF_F);
#pragma unroll
        for (int i = 0; i < packet<T>::V; i++) {
            /* NaN is dropped: the careful way finds it again. */
            float z_p = fmaxf(z.p[i], at.pad_p), z_q = fmaxf(z.q[i], at.pad_q);
            mine.sum[0] += careful_exp(z_p, at.c_p, t);
            mine.sum[1] += careful_exp(z_q, at.c_q, t);
        }
    });
    return mine;
}

/* One warp: parts that count alike, to one. */
static __device__ __forceinline__ part plain_merge(const part *parts, uint32_t count) {
    part from = lane_part(parts, count, threadIdx.x % 32), to = from;
    sums_of(to, from.sum);
    return to;
}

/* sum: b, change, forward terms, and reverse terms or a (zq - the largest). */
template <class T, int EXTRA, class SLICE>
static __device__ __noinline__ part careful(SLICE slice, temperature t, careful_reference at) {
    constexpr int V = packet<T>::V;
    float fraction = (float)at.fraction;
    part mine = {{0, 0, 0, 0}, {0, 0}, {}};
    double(&total)[4] = mine.sum;
    slice.template pass<T>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
        pair_of<T> z(raw_p, raw_q);
        z.pad(left, -CUDART_INF_F, -CUDART_INF_F);
        [[maybe_unused]] float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < V; i++)
            if constexpr (sizeof(T) == 4) {
                careful_term r = careful_pair(z.p[i], z.q[i], at, t);
                total[0] += r.b;
                total[1] += r.change;
                total[2] += r.forward;
                if (EXTRA == REVERSE)
                    total[3] += r.reverse;
                if (EXTRA == ENTROPY)
                    total[3] += r.a == 0.0 ? 0.0 : r.a * ((double)z.q[i] - (double)at.top_q);
            } else {
                careful_term_16 r = careful_pair_16(z.p[i], z.q[i], at, fraction, t);
                if (EXTRA == ENTROPY) /* what is small beside 1 counts */
                    total[0] += (double)r.b;
                else
                    sum[0] += r.b;
                sum[1] += r.change;
                sum[2] += r.forward;
                if (EXTRA == REVERSE)
                    sum[3] += r.reverse;
                if (EXTRA == ENTROPY)
                    sum[3] = r.a == 0.0f ? sum[3] : fmaf(r.a, z.q[i] - at.top_q, sum[3]);
            }
        if constexpr (sizeof(T) != 4)
#pragma unroll
            for (int i = 0; i < 4; i++)
                total[i] += (double)sum[i];
    });
    return mine;
}

/* least: an entropy below it is lost in the numbers it is made of. */
template <int EXTRA>
static __device__ row_stats careful_row(const part &all, const careful_reference &at,
                                        double least) {
    const double(&x)[4] = all.sum;
    row_stats row;
    double relative = x[1] / x[0], ratio = log1p(relative), inverse_a = 1.0 / (x[0] + x[1]);
    double log2_b = log2(x[0]);
    row.c_q = (int)at.c_q;
    row.inverse_q = exp2((double)at.c_q - at.origin_q) / x[0];
    row.apart = at.apart;
    row.shift = at.shift - (double)at.apart * at.inverse_temperature + ratio;
    double lse_p = at.origin_q + log2_b + at.delta * at.scale + ratio * LOG2_E;
    row.c_p = (int)floor(lse_p);
    row.inverse_p = exp2(floor(lse_p) - lse_p);
    row.forward = fmax(x[2] * inverse_a + (relative * x[0] * inverse_a - ratio), 0.0);
    row.center = row.shift + row.forward;
    row.reverse = EXTRA == REVERSE ? fmax(x[3] / x[0] + (ratio - relative), 0.0) : 0.0;
    double top = at.inverse_temperature * inverse_a * x[3];
    row.entropy = EXTRA == ENTROPY
                      ? log2_b * LN_2 + (at.origin_q - (double)at.top_q * at.scale) * LN_2 - top
                      : 0.0;
    row.missed = false;
    row.is_careful = true;
    row.log_p = row.log_q = row.variance = 0.0;
    double most = at.apart == 0.0f ? APART_MOST : APART_MOST_16;
    /* Of values beyond 1e30, of logits of -3e38 that stand for -inf on one side, gradients may be
     * made of differences that FP32 cannot hold. */
    row.good = fabs(ratio) < 1e-3 && x[0] > 0 && x[0] < 1e300 && fabs(x[2]) < 1e300 &&
               row.forward < 1e30 && fabs(x[3]) < 1e300 && row.reverse < 1e30 &&
               fabs(lse_p) < 1e6 && fabs(at.shift) <= most && fabs(at.apart) <= APART_MOST_16 &&
               (EXTRA != ENTROPY || row.entropy >= least);
    return row;
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
