/* logits_stats.cuh - the first pass over a row pair of logits held in shared memory: the sums of
 * the exponentials and what gives the row's value, by one warp for its part; and how the parts of
 * all warps make the row.
 *
 * Two ways. The fast one serves rows that differ: KL comes from sum(a u) / sum(a) less the
 * logarithm of the ratio of the two sums, where a are p's exponentials and u the differences of the
 * logits. Of close rows that difference would be noise. The careful one adds only what is of the
 * size of the result: with b q's exponentials and v the difference of the logits less that of one
 * class, so that p is b e^v up to a factor, the terms b (v e^v - e^v + 1) >= 0 and the change b
 * (e^v - 1) of the sum. It also knows classes of -inf. What it cannot do (NaN, +inf, mass over a
 * zero) is left to any.cuh. A row is tried in this order; which way it takes depends on the row
 * alone. */
#ifndef KLD_KERNELS_CUDA_LOGITS_STATS_CUH
#define KLD_KERNELS_CUDA_LOGITS_STATS_CUH

#include "kernels/cuda/logits_math.cuh"
#include "kernels/cuda/resident.cuh"

namespace logits_stats {

using resident::part;
using resident::place;

/* Rows below this value go the careful way: the fast one's error is some 1e-7 in 16 bits, 1e-8 in
 * FP32. */
template <class T> static constexpr double FAST_MIN = sizeof(T) == 4 ? 1.0 / 256 : 1.0 / 16;

/* The fourth sum: nothing, sum q (ln q - ln p), or sum p ln q. */
enum extra { NOTHING, REVERSE, ENTROPY };

/* Of the row. p_i = 2^(z_i s - c_p) inverse_p, d_i = (zp_i - zq_i) / T - shift. */
struct row_stats {
    int32_t c_p, c_q;
    double inverse_p, inverse_q, shift;
    double forward, reverse, entropy; /* sum p d, sum q (-d), - sum p ln q */
    bool good;
};

/* The largest of the warp, in two instructions more than one: integers order as floats do. NaN
 * counts as large. */
static __device__ __forceinline__ float warp_max(float x) {
    int bits = __float_as_int(x);
    bits = __reduce_max_sync(KLD_FULL_WARP, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}

template <class T> struct pair_of {
    static constexpr int V = packet<T>::V;
    float p[V], q[V];

    __device__ __forceinline__ pair_of(const uint4 &raw_p, const uint4 &raw_q) {
        unpack<T>(raw_p, p);
        unpack<T>(raw_q, q);
    }
    template <class LEFT> __device__ __forceinline__ void pad(LEFT left, float pad_p, float pad_q) {
        if (!LEFT::ALL)
#pragma unroll
            for (int i = 0; i < V; i++)
                if (i >= left.left) {
                    p[i] = pad_p;
                    q[i] = pad_q;
                }
    }
};

/* What a warp measures its part against: the largest of its first 32 vectors, in powers of 2. */
struct reference {
    float c_p, c_q;
    float pad_p,
        pad_q; /* a logit whose exponential is 0 beside that; stands behind the last class */
    float top_p, top_q;

    static __device__ __forceinline__ float below(float top, float span) {
        return fabsf(top) < 1e6f ? top - span : -3e38f;
    }
    /* Beyond 2^21 exp_split() is no good: NaN, which spoils the row and sends it to any.cuh. */
    static __device__ __forceinline__ float whole(float x) {
        return fabsf(x) < 2097152.0f ? rintf(x) : CUDART_NAN_F;
    }
    /* Of a part without a class that counts: below all others. */
    static __device__ __forceinline__ int32_t mark(float c) {
        return isnan(c) ? INT32_MIN / 4 : (int32_t)c;
    }
    template <class T>
    static __device__ __forceinline__ reference of(resident::slice &slice, const temperature &t,
                                                   float span) {
        reference at;
        uint4 raw_p, raw_q;
        slice.peek(raw_p, raw_q);
        pair_of<T> z(raw_p, raw_q);
        uint32_t before = threadIdx.x * packet<T>::V;
        uint32_t left = slice.count > before ? slice.count - before : 0;
        float top_p = -CUDART_INF_F, top_q = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < packet<T>::V; i++)
            if (i < left) {
                top_p = fmaxf(top_p, z.p[i]);
                top_q = fmaxf(top_q, z.q[i]);
            }
        top_p = warp_max(top_p);
        top_q = warp_max(top_q);
        /* Nothing but classes of no mass: no reference for those that may come later. NaN spoils
         * the part unless none comes. */
        top_p = fabsf(top_p) < 1e30f ? top_p : CUDART_NAN_F;
        top_q = fabsf(top_q) < 1e30f ? top_q : CUDART_NAN_F;
        at.c_p = whole(top_p * t.scale.high);
        at.c_q = whole(top_q * t.scale.high);
        at.pad_p = below(top_p, span);
        at.pad_q = below(top_q, span);
        at.top_p = top_p;
        at.top_q = top_q;
        return at;
    }
};

/* ---- the fast way -----------------------------------------------------------------------------
 */

/* Sums of one chunk, of one thread, in FP32. */
template <int EXTRA> struct chunk_sums {
    float p = 0, p_low = 0, q = 0, q_low = 0, u = 0, extra = 0;

    __device__ __forceinline__ void flush(double (&total)[4]) {
        total[0] += (double)p + (double)p_low;
        total[1] += (double)q + (double)q_low;
        total[2] += (double)u;
        if (EXTRA != NOTHING)
            total[3] += (double)extra;
        p = p_low = q = q_low = u = extra = 0;
    }
};

template <int EXTRA>
static __device__ __forceinline__ void fast_fp32(float z_p, float z_q, const reference &at,
                                                 const temperature &t, chunk_sums<EXTRA> &sum) {
    exp_parts e_p = exp_split(z_p, t), e_q = exp_split(z_q, t);
    float k_p = e_p.k - at.c_p, k_q = e_q.k - at.c_q;
    float scale_p = exp2_fast(k_p), scale_q = exp2_fast(k_q);
    sum.p += scale_p;
    sum.q += scale_q;
    sum.p_low = fmaf(scale_p, e_p.w, sum.p_low);
    sum.q_low = fmaf(scale_q, e_q.w, sum.q_low);
    float a = fmaf(scale_p, e_p.w, scale_p), u = (k_p - k_q) + (e_p.r - e_q.r);
    sum.u = fmaf(a, u, sum.u);
    if (EXTRA == REVERSE)
        sum.extra = fmaf(fmaf(scale_q, e_q.w, scale_q), u, sum.extra);
    if (EXTRA == ENTROPY)
        sum.extra = fmaf(a, k_q + e_q.r, sum.extra);
}

template <int EXTRA>
static __device__ __forceinline__ void fast_16(float z_p, float z_q, const reference &at,
                                               const temperature &t, chunk_sums<EXTRA> &sum) {
    float x_p = fmaf(z_p, t.scale.high, -at.c_p), x_q = fmaf(z_q, t.scale.high, -at.c_q);
    float a = exp2_fast(x_p), b = exp2_fast(x_q), u = x_p - x_q;
    sum.p += a;
    sum.q += b;
    sum.u = fmaf(a, u, sum.u);
    if (EXTRA == REVERSE)
        sum.extra = fmaf(b, u, sum.extra);
    if (EXTRA == ENTROPY)
        sum.extra = fmaf(a, x_q, sum.extra);
}

/* sum: a, b, a u, and b u or a ln b; logarithms of base 2 and less the references. */
template <class T, int EXTRA>
static __device__ __forceinline__ void fast(const place &at_place, resident::slice &slice,
                                            const temperature &t, float span, uint32_t turn) {
    constexpr int V = packet<T>::V;
    reference at = reference::of<T>(slice, t, span);
    double total[4] = {0, 0, 0, 0};
    chunk_sums<EXTRA> sum;
    slice.pass<true>(
        V,
        [&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            pair_of<T> z(raw_p, raw_q);
            z.pad(left, at.pad_p, at.pad_q);
#pragma unroll
            for (int i = 0; i < V; i++)
                if constexpr (sizeof(T) == 4)
                    fast_fp32(z.p[i], z.q[i], at, t, sum);
                else
                    fast_16(z.p[i], z.q[i], at, t, sum);
        },
        [&] { sum.flush(total); });
    resident::send_part(at_place, total, reference::mark(at.c_p), reference::mark(at.c_q), turn);
}

/* 2^x, 0 far below. */
static __device__ __forceinline__ double power_of_2(int x) {
    return x < -1000 ? 0.0 : __hiloint2double((1023 + min(x, 1000)) << 20, 0);
}

template <int COUNT> static __device__ __forceinline__ void warp_sum(double (&x)[COUNT]) {
#pragma unroll
    for (int step = 16; step; step /= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] += __shfl_xor_sync(KLD_FULL_WARP, x[i], step);
}

/* One warp: the parts of all to the row. unit: a power of 2 in units of 1 / T, ln 2 but for what
 * rounding left of the scale that was used. */
template <int EXTRA>
static __device__ row_stats fast_row(const part *parts, uint32_t count, double least, double unit) {
    unsigned lane = threadIdx.x % 32;
    int c_p = INT32_MIN, c_q = INT32_MIN;
    for (uint32_t i = lane; i < count; i += 32) {
        c_p = max(c_p, parts[i].mark[0]);
        c_q = max(c_q, parts[i].mark[1]);
    }
    c_p = __reduce_max_sync(KLD_FULL_WARP, c_p);
    c_q = __reduce_max_sync(KLD_FULL_WARP, c_q);
    double x[4] = {0, 0, 0, 0};
    for (uint32_t i = lane; i < count; i += 32) {
        const part &from = parts[i];
        int by_p = from.mark[0] - c_p, by_q = from.mark[1] - c_q;
        double scale_p = power_of_2(by_p), scale_q = power_of_2(by_q);
        x[0] += scale_p * from.sum[0];
        x[1] += scale_q * from.sum[1];
        x[2] += scale_p * (from.sum[2] + from.sum[0] * (double)(by_p - by_q));
        if (EXTRA == REVERSE)
            x[3] += scale_q * (from.sum[3] + from.sum[1] * (double)(by_p - by_q));
        if (EXTRA == ENTROPY)
            x[3] += scale_p * (from.sum[3] + from.sum[0] * (double)by_q);
    }
    warp_sum(x);
    row_stats row;
    row.c_p = c_p;
    row.c_q = c_q;
    /* Two lanes, one for each side: these take long. */
    double mine = lane % 2 ? x[1] : x[0];
    double inverse = wide_reciprocal(mine), logarithm = wide_log(mine, mine - 1.0);
    row.inverse_p = __shfl_sync(KLD_FULL_WARP, inverse, 0);
    row.inverse_q = __shfl_sync(KLD_FULL_WARP, inverse, 1);
    double log_q = __shfl_sync(KLD_FULL_WARP, logarithm, 1);
    double ratio = __shfl_sync(KLD_FULL_WARP, logarithm, 0) - log_q;
    row.shift = (double)(c_p - c_q) * unit + ratio;
    row.forward = x[2] * row.inverse_p * LN_2 - ratio;
    row.reverse = EXTRA == REVERSE ? ratio - x[3] * row.inverse_q * LN_2 : 0.0;
    row.entropy = EXTRA == ENTROPY ? log_q - x[3] * row.inverse_p * LN_2 : 0.0;
    row.good = row.forward >= least && row.forward < 1e30 && x[0] > 0.25 && x[0] < 1e30 &&
               x[1] > 0.25 && x[1] < 1e30 && (EXTRA == NOTHING || fabs(x[3]) < 1e300);
    return row;
}

/* ---- the careful way --------------------------------------------------------------------------
 */

struct careful_term {
    double b, change, forward, reverse, a;
};

/* Logits below it have no mass, whatever the rest: what masks classes without being -inf. */
static constexpr float NO_MASS = -1e30f;

/* 2^(z s - c) in FP64. */
static __device__ __forceinline__ double careful_exp(float z, float c, const temperature &t) {
    exp_parts e = exp_split(z, t);
    double scale = (double)exp2_fast(e.k - c);
    return fma(scale, (double)e.w, scale);
}

/* p's exponentials are 2^(zp s - c_p) fraction there; v is (zp - zq - delta) / T. */
static __device__ careful_term careful_pair(float z_p, float z_q, const reference &at, float delta,
                                            float c_p, double fraction, const temperature &t) {
    bool no_p = z_p == -CUDART_INF_F, no_q = z_q == -CUDART_INF_F;
    double inverse = (double)t.inverse.high + (double)t.inverse.low;
    double v = no_p || no_q ? 0.0 : ((double)z_p - (double)z_q - (double)delta) * inverse;
    careful_term r;
    r.b = z_q < NO_MASS ? 0.0 : careful_exp(fmaxf(z_q, at.pad_q), at.c_q, t);
    if (!no_p && !no_q && fabs(v) < 0.5) {
        double f = (double)expm1_rest((float)v), square = v * v * r.b;
        r.change = fma(square, f, r.b * v);
        r.forward = square * fma(v - 1.0, f, 1.0);
        r.reverse = square * f;
        r.a = r.b + r.change;
        return r;
    }
    r.a = z_p < NO_MASS ? 0.0 : careful_exp(fmaxf(z_p, at.pad_p), c_p, t) * fraction;
    r.change = r.a - r.b;
    r.forward = r.a == 0.0 ? r.b : no_q ? CUDART_INF : fma(r.a, v, -r.change);
    r.reverse = r.b == 0.0 ? r.a : no_p ? CUDART_INF : fma(-r.b, v, r.change);
    return r;
}

/* sum: b, change, forward terms, and reverse terms or a zq. mark: delta, the reference of b. */
template <class T, int EXTRA>
static __device__ __noinline__ void careful(place at_place, resident::slice slice, temperature t,
                                            float span, uint32_t turn) {
    constexpr int V = packet<T>::V;
    reference at = reference::of<T>(slice, t, span);
    uint4 first_p, first_q;
    slice.peek(first_p, first_q);
    pair_of<T> z(first_p, first_q);
    uint32_t before = threadIdx.x * V;
    uint32_t has = slice.count > before ? slice.count - before : 0;
    float delta = CUDART_NAN_F; /* the difference at the class whose q is the largest */
#pragma unroll
    for (int i = 0; i < V; i++)
        if (i < has && z.q[i] == at.top_q)
            delta = z.p[i] - z.q[i];
    unsigned have = __ballot_sync(KLD_FULL_WARP, fabsf(delta) < 1e30f);
    delta = __shfl_sync(KLD_FULL_WARP, delta, have ? __ffs(have) - 1 : 0);
    bool known = have || fabsf(at.top_p - at.top_q) < 1e30f;
    if (!have)
        delta = known ? at.top_p - at.top_q : 0.0f;
    double c = (double)at.c_q + ((double)delta * ((double)t.scale.high + (double)t.scale.low));
    float c_p = known ? (float)floor(c) : CUDART_NAN_F;
    double fraction = exp2(floor(c) - c);
    at.pad_p = reference::below(at.top_q + delta, span);
    double total[4] = {0, 0, 0, 0};
    slice.pass<false>(
        V,
        [&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            pair_of<T> z(raw_p, raw_q);
            z.pad(left, -CUDART_INF_F, -CUDART_INF_F);
#pragma unroll 1
            for (int i = 0; i < V; i++) {
                float z_p = z.p[0], z_q = z.q[0];
#pragma unroll
                for (int j = 1; j < V; j++) {
                    z_p = i == j ? z.p[j] : z_p;
                    z_q = i == j ? z.q[j] : z_q;
                }
                careful_term r = careful_pair(z_p, z_q, at, delta, c_p, fraction, t);
                total[0] += r.b;
                total[1] += r.change;
                total[2] += r.forward;
                if (EXTRA == REVERSE)
                    total[3] += r.reverse;
                if (EXTRA == ENTROPY)
                    total[3] += r.a == 0.0 ? 0.0 : r.a * (double)z_q;
            }
        },
        [] {});
    resident::send_part(at_place, total, __float_as_int(delta), reference::mark(at.c_q), turn);
}

/* With eta by which a part's delta differs from the row's: a grows by e^eta. */
template <int EXTRA>
static __device__ row_stats careful_row(const part *parts, uint32_t count,
                                        double inverse_temperature) {
    unsigned lane = threadIdx.x % 32;
    int c_q = INT32_MIN;
    uint32_t main = 0; /* the part with the largest reference lends its delta to the row */
    for (uint32_t i = 0; i < count; i++)
        if (parts[i].mark[1] > c_q && parts[i].sum[0] > 0) {
            c_q = parts[i].mark[1];
            main = i;
        }
    double origin = (double)__int_as_float(parts[main].mark[0]);
    double x[4] = {0, 0, 0, 0}; /* b, change, forward, reverse or a zq */
    for (uint32_t i = lane; i < count; i += 32) {
        const part &from = parts[i];
        double scale = power_of_2(from.mark[1] - c_q);
        double b = from.sum[0], a = from.sum[0] + from.sum[1];
        double eta = ((double)__int_as_float(from.mark[0]) - origin) * inverse_temperature;
        double grow = a > 0 ? expm1(eta) : 0.0;
        double more = grow * a;
        x[0] += scale * b;
        x[1] += scale * (from.sum[1] + more);
        /* sum of a'(v + eta) - a' + b with a' = a e^eta */
        x[2] += scale * (from.sum[2] + grow * (from.sum[2] - b) + (more + a) * eta);
        if (EXTRA == REVERSE)
            x[3] += scale * (from.sum[3] + more - eta * b);
        if (EXTRA == ENTROPY)
            x[3] += scale * from.sum[3] * (1.0 + grow);
    }
    warp_sum(x);
    row_stats row;
    double relative = x[1] / x[0], ratio = log1p(relative), inverse_a = 1.0 / (x[0] + x[1]);
    row.c_q = c_q;
    row.inverse_q = 1.0 / x[0];
    row.shift = origin * inverse_temperature + ratio;
    double lse_p = (double)c_q + log2(x[0]) + row.shift * LOG2_E;
    row.c_p = (int)floor(lse_p);
    row.inverse_p = exp2(floor(lse_p) - lse_p);
    row.forward = fmax(x[2] * inverse_a + (relative * x[0] * inverse_a - ratio), 0.0);
    row.reverse = EXTRA == REVERSE ? fmax(x[3] / x[0] + (ratio - relative), 0.0) : 0.0;
    row.entropy = EXTRA == ENTROPY
                      ? (double)c_q * LN_2 + log(x[0]) - x[3] * inverse_a * inverse_temperature
                      : 0.0;
    row.good = x[0] > 0 && x[0] < 1e300 && x[0] + x[1] > 0 && fabs(x[2]) < 1e300 &&
               fabs(x[3]) < 1e300 && fabs(lse_p) < 1e6;
    return row;
}

} /* namespace logits_stats */
#endif
