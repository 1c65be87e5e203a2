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
#include "kernels/cuda/resident_exchange.cuh"
#include "kernels/cuda/resident_slice.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

using resident::part;

/* Rows below this value go the careful way: the fast one's error is some 1e-7 in 16 bits, 1e-8 in
 * FP32. */
template <class T> static constexpr double FAST_MIN = sizeof(T) == 4 ? 1.0 / 256 : 1.0 / 16;

/* And those whose sums are beyond this: classes far above all that the scout saw, which 16 bits
 * round by what they are above. */
template <class T> static constexpr double FAST_SUM_MAX = sizeof(T) == 4 ? 1e30 : 1048576.0;

/* Below this entropies of the careful way are no good: any.cuh. */
template <class T>
static constexpr double CAREFUL_ENTROPY_MIN = sizeof(T) == 4 ? 1.0 / 64 : 1.0 / 16;

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

/* What masses are measured against: the largest of 32 vectors, in powers of 2. */
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
    __device__ __forceinline__ reference() {}
    __device__ __forceinline__ explicit reference(const float (&x)[4])
        : c_p(x[0]), c_q(x[1]), pad_p(x[2]), pad_q(x[3]) {}
    /* Of a vector of each lane, the first `left` classes of it. */
    template <class T>
    static __device__ __forceinline__ reference of(const pair_of<T> &z, uint32_t left,
                                                   const temperature &t, float span) {
        reference at;
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
template <class T, int EXTRA, bool SHIFTED>
static __device__ __forceinline__ void fast_of(const resident::slice &slice, const temperature &t,
                                               const reference &at, uint32_t ring, bool release) {
    constexpr int V = packet<T>::V;
    double total[4] = {0, 0, 0, 0};
    chunk_sums<EXTRA> sum;
    slice.template pass_of<SHIFTED, true>(
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
        [&](uint32_t chunk) {
            sum.flush(total);
            if (release)
                slice.release(chunk);
        });
    resident::block_shared &block = resident::here();
    resident::store_sums(block.sums[ring][resident::group_thread() / 32], total);
    if (threadIdx.x % 32 == 0)
        barrier_arrive(&block.found[ring]);
}

template <class T, int EXTRA>
static __device__ __forceinline__ void fast(const resident::slice &slice, const temperature &t,
                                            const reference &at, uint32_t ring, bool release) {
    if (slice.shift_p || slice.shift_q)
        fast_of<T, EXTRA, true>(slice, t, at, ring, release);
    else
        fast_of<T, EXTRA, false>(slice, t, at, ring, release);
}

/* 2^x, 0 far below. */
static __device__ __forceinline__ double power_of_2(int x) {
    return x < -1000 ? 0.0 : __hiloint2double((1023 + min(x, 1000)) << 20, 0);
}

/* A part to each lane; beyond `count` one without classes. */
static __device__ __forceinline__ part lane_part(const part *parts, uint32_t count) {
    unsigned lane = threadIdx.x % 32;
    return lane < count ? parts[lane] : part{{0, 0, 0, 0}, {INT32_MIN / 4, INT32_MIN / 4}};
}

/* The sums of all lanes, to all of them. */
static __device__ __forceinline__ void sums_of(part &to, const double (&x)[4]) {
    double sum = resident::warp_sums(x);
#pragma unroll
    for (int i = 0; i < 4; i++)
        to.sum[i] = __shfl_sync(KLD_FULL_WARP, sum, 8 * i);
}

/* One warp: up to 32 parts to one, in all its lanes. */
template <int EXTRA>
static __device__ __forceinline__ part fast_merge(const part *parts, uint32_t count) {
    part from = lane_part(parts, count), to;
    to.mark[0] = __reduce_max_sync(KLD_FULL_WARP, from.mark[0]);
    to.mark[1] = __reduce_max_sync(KLD_FULL_WARP, from.mark[1]);
    int by_p = from.mark[0] - to.mark[0], by_q = from.mark[1] - to.mark[1];
    double scale_p = power_of_2(by_p), scale_q = power_of_2(by_q);
    double x[4] = {scale_p * from.sum[0], scale_q * from.sum[1],
                   scale_p * (from.sum[2] + from.sum[0] * (double)(by_p - by_q)), 0.0};
    if (EXTRA == REVERSE)
        x[3] = scale_q * (from.sum[3] + from.sum[1] * (double)(by_p - by_q));
    if (EXTRA == ENTROPY)
        x[3] = scale_p * (from.sum[3] + from.sum[0] * (double)by_q);
    sums_of(to, x);
    return to;
}

/* One warp: the row from the only part that is left. unit: a power of 2 in units of 1 / T, ln 2 but
 * for what rounding left of the scale that was used. */
template <int EXTRA>
static __device__ __forceinline__ row_stats fast_row(const part &all, double least, double most,
                                                     double unit) {
    row_stats row;
    row.c_p = all.mark[0];
    row.c_q = all.mark[1];
    /* Two lanes, one for each side: these take long. */
    double mine = threadIdx.x % 2 ? all.sum[1] : all.sum[0];
    double inverse = wide_reciprocal(mine), logarithm = wide_log(mine, mine - 1.0);
    row.inverse_p = __shfl_sync(KLD_FULL_WARP, inverse, 0);
    row.inverse_q = __shfl_sync(KLD_FULL_WARP, inverse, 1);
    double log_q = __shfl_sync(KLD_FULL_WARP, logarithm, 1);
    double ratio = __shfl_sync(KLD_FULL_WARP, logarithm, 0) - log_q;
    row.shift = (double)(row.c_p - row.c_q) * unit + ratio;
    row.forward = all.sum[2] * row.inverse_p * LN_2 - ratio;
    row.reverse = EXTRA == REVERSE ? ratio - all.sum[3] * row.inverse_q * LN_2 : 0.0;
    row.entropy = EXTRA == ENTROPY ? log_q - all.sum[3] * row.inverse_p * LN_2 : 0.0;
    row.good = row.forward >= least && row.forward < 1e30 && all.sum[0] > 0.25 &&
               all.sum[0] < most && all.sum[1] > 0.25 && all.sum[1] < most &&
               (EXTRA == NOTHING || fabs(all.sum[3]) < 1e300);
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
    if (isnan(z_p + z_q)) { /* fmaxf() drops it */
        r.forward = r.reverse = CUDART_NAN;
        return r;
    }
    r.forward = r.a == 0.0 ? r.b : no_q ? CUDART_INF : fma(r.a, v, -r.change);
    r.reverse = r.b == 0.0 ? r.a : no_p ? CUDART_INF : fma(-r.b, v, r.change);
    return r;
}

/* The same of 16 bits, in FP32: v is exact but for its last bit, and every term is of the size of
 * the result. */
static __device__ __forceinline__ void careful_pair_16(float z_p, float z_q, const reference &at,
                                                       float delta, float c_p, float fraction,
                                                       const temperature &t, float &ret_b,
                                                       float &ret_change, float &ret_forward,
                                                       float &ret_reverse, float &ret_a) {
    bool no_p = z_p == -CUDART_INF_F, no_q = z_q == -CUDART_INF_F;
    float v = no_p || no_q ? 0.0f : (z_p - z_q - delta) * t.inverse.high;
    float b = z_q < NO_MASS ? 0.0f : exp2_fast(fmaf(fmaxf(z_q, at.pad_q), t.scale.high, -at.c_q));
    float f = expm1_rest(v), square = v * v * b;
    bool near = !no_p && !no_q && fabsf(v) < 0.5f;
    float a =
        z_p < NO_MASS ? 0.0f : exp2_fast(fmaf(fmaxf(z_p, at.pad_p), t.scale.high, -c_p)) * fraction;
    float change = near ? fmaf(square, f, b * v) : a - b;
    float forward = a == 0.0f ? b : no_q ? CUDART_INF_F : fmaf(a, v, -change);
    float reverse = b == 0.0f ? a : no_p ? CUDART_INF_F : fmaf(-b, v, change);
    ret_b = b;
    ret_change = change;
    ret_forward = near ? square * fmaf(v - 1.0f, f, 1.0f) : forward;
    if (isnan(z_p + z_q)) /* fmaxf() drops it */
        ret_forward = CUDART_NAN_F;
    ret_reverse = near ? square * f : reverse;
    ret_a = near ? b + change : a;
}

/* Against what the careful way measures a warp's part. */
struct careful_reference : reference {
    float delta; /* the difference at the class whose q is the largest */
    float c_p;   /* p's exponentials are 2^(zp s - c_p) fraction there */
    double fraction;

    template <class T, class SLICE>
    static __device__ __forceinline__ careful_reference of(const SLICE &slice, const temperature &t,
                                                           float span) {
        constexpr int V = packet<T>::V;
        careful_reference at;
        uint4 first_p = {}, first_q = {};
        uint32_t has = slice.template peek<T>(first_p, first_q);
        pair_of<T> z(first_p, first_q);
        (reference &)at = reference::of<T>(z, has, t, span);
        float delta = CUDART_NAN_F;
#pragma unroll
        for (int i = 0; i < V; i++)
            if (i < has && z.q[i] == at.top_q)
                delta = z.p[i] - z.q[i];
        unsigned have = __ballot_sync(KLD_FULL_WARP, fabsf(delta) < 1e30f);
        delta = __shfl_sync(KLD_FULL_WARP, delta, have ? __ffs(have) - 1 : 0);
        bool known = have || fabsf(at.top_p - at.top_q) < 1e30f;
        if (!have)
            delta = known ? at.top_p - at.top_q : 0.0f;
        /* 16 bits take all exponentials by the high part alone */
        double scale = (double)t.scale.high + (sizeof(T) == 4 ? (double)t.scale.low : 0.0);
        double c = (double)at.c_q + (double)delta * scale;
        at.delta = delta;
        at.c_p = known ? (float)floor(c) : CUDART_NAN_F;
        at.fraction = exp2(floor(c) - c);
        at.pad_p = below(at.top_q + delta, span);
        return at;
    }
};

/* sum: b, change, forward terms, and reverse terms or a zq. mark: delta, the reference of b. */
template <class T, int EXTRA, class SLICE>
static __device__ __noinline__ part careful(SLICE slice, temperature t, float span) {
    constexpr int V = packet<T>::V;
    careful_reference at = careful_reference::of<T>(slice, t, span);
    float fraction = (float)at.fraction;
    double total[4] = {0, 0, 0, 0};
    slice.template pass<T>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
        pair_of<T> z(raw_p, raw_q);
        z.pad(left, -CUDART_INF_F, -CUDART_INF_F);
        [[maybe_unused]] float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < V; i++)
            if constexpr (sizeof(T) == 4) {
                careful_term r = careful_pair(z.p[i], z.q[i], at, at.delta, at.c_p, at.fraction, t);
                total[0] += r.b;
                total[1] += r.change;
                total[2] += r.forward;
                if (EXTRA == REVERSE)
                    total[3] += r.reverse;
                if (EXTRA == ENTROPY)
                    total[3] += r.a == 0.0 ? 0.0 : r.a * (double)z.q[i];
            } else {
                float b, change, forward, reverse, a;
                careful_pair_16(z.p[i], z.q[i], at, at.delta, at.c_p, fraction, t, b, change,
                                forward, reverse, a);
                sum[0] += b;
                sum[1] += change;
                sum[2] += forward;
                if (EXTRA == REVERSE)
                    sum[3] += reverse;
                if (EXTRA == ENTROPY)
                    sum[3] = a == 0.0f ? sum[3] : fmaf(a, z.q[i], sum[3]);
            }
        if constexpr (sizeof(T) != 4)
#pragma unroll
            for (int i = 0; i < 4; i++)
                total[i] += (double)sum[i];
    });
    return {{total[0], total[1], total[2], total[3]},
            {__float_as_int(at.delta), reference::mark(at.c_q)}};
}

/* One warp: up to 32 parts to one. With eta by which a part's delta differs from that of the part
 * with the largest reference: a grows by e^eta. */
template <int EXTRA>
static __device__ part careful_merge(const part *parts, uint32_t count,
                                     double inverse_temperature) {
    part from = lane_part(parts, count), to;
    int mark = from.sum[0] > 0 ? from.mark[1] : INT32_MIN / 4;
    int c_q = __reduce_max_sync(KLD_FULL_WARP, mark);
    int main = __ffs(__ballot_sync(KLD_FULL_WARP, mark == c_q)) - 1;
    to.mark[0] = __shfl_sync(KLD_FULL_WARP, from.mark[0], main);
    to.mark[1] = c_q;
    double origin = (double)__int_as_float(to.mark[0]);
    double scale = power_of_2(from.mark[1] - c_q);
    double b = from.sum[0], a = from.sum[0] + from.sum[1];
    double eta = ((double)__int_as_float(from.mark[0]) - origin) * inverse_temperature;
    double grow = a > 0 ? expm1(eta) : 0.0, more = grow * a;
    if (threadIdx.x % 32 >= count)
        eta = 0.0;
    /* sum of a'(v + eta) - a' + b with a' = a e^eta */
    double x[4] = {scale * b, scale * (from.sum[1] + more),
                   scale * (from.sum[2] + grow * (from.sum[2] - b) + (more + a) * eta), 0.0};
    if (EXTRA == REVERSE)
        x[3] = scale * (from.sum[3] + more - eta * b);
    if (EXTRA == ENTROPY)
        x[3] = scale * from.sum[3] * (1.0 + grow);
    sums_of(to, x);
    return to;
}

/* scale: of the exponentials. least: an entropy below it is lost in the numbers it is made of. */
template <int EXTRA>
static __device__ row_stats careful_row(const part &all, double inverse_temperature, double scale,
                                        double least) {
    const double(&x)[4] = all.sum; /* b, change, forward, reverse or a zq */
    row_stats row;
    double relative = x[1] / x[0], ratio = log1p(relative), inverse_a = 1.0 / (x[0] + x[1]);
    row.c_q = all.mark[1];
    row.inverse_q = 1.0 / x[0];
    double delta = (double)__int_as_float(all.mark[0]);
    row.shift = delta * inverse_temperature + ratio;
    double lse_p = (double)row.c_q + log2(x[0]) + delta * scale + ratio * LOG2_E;
    row.c_p = (int)floor(lse_p);
    row.inverse_p = exp2(floor(lse_p) - lse_p);
    row.forward = fmax(x[2] * inverse_a + (relative * x[0] * inverse_a - ratio), 0.0);
    row.reverse = EXTRA == REVERSE ? fmax(x[3] / x[0] + (ratio - relative), 0.0) : 0.0;
    row.entropy = EXTRA == ENTROPY
                      ? (double)row.c_q * LN_2 + log(x[0]) - x[3] * inverse_a * inverse_temperature
                      : 0.0;
    row.good = x[0] > 0 && x[0] < 1e300 && x[0] + x[1] > 0 && fabs(x[2]) < 1e300 &&
               fabs(x[3]) < 1e300 && fabs(lse_p) < 1e6 &&
               (EXTRA != ENTROPY || row.entropy >= least);
    return row;
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
