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

#include <type_traits>

#include "kernels/cuda/logits_math.cuh"
#include "kernels/cuda/resident_exchange.cuh"
#include "kernels/cuda/resident_slice.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

using resident::part;

/* Rows below this value go the careful way: the fast one's error is some 1e-7 in 16 bits, 1e-8 in
 * FP32. */
template <class T> static constexpr double FAST_MIN = sizeof(T) == 4 ? 1.0 / 256 : 1.0 / 16;

/* So do rows below this value of which one class has more than 1/16 of a side's mass: its errors do
 * not average out. Where such a class lies so many powers of 2 above all that the scout saw, the
 * row is summed once more, from what it is now known to hold: exponentials are rounded by what they
 * are above the reference. */
static constexpr double HEAVY_MIN = 0.3;
static constexpr float HEAVY_PART = 1.0f / 16, HEAVY_ABOVE = 8.0f;

/* And those whose sums are beyond this, whatever they are made of. */
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
    bool missed; /* by the scout */
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
        float top_p = -CUDART_INF_F, top_q = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < packet<T>::V; i++)
            if (i < left) {
                top_p = fmaxf(top_p, z.p[i]);
                top_q = fmaxf(top_q, z.q[i]);
            }
        return of_tops(warp_max(top_p), warp_max(top_q), t, span);
    }
    static __device__ __forceinline__ reference of_tops(float top_p, float top_q,
                                                        const temperature &t, float span) {
        reference at;
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

/* The largest logits of one thread. NaN is passed over: it shows in the sums. */
template <class T> struct top_of {
    typedef typename std::conditional<std::is_same<T, __half>::value, __half2, __nv_bfloat162>::type
        two;
    float p, q;
    two many_p, many_q;

    __device__ __forceinline__ top_of() {
        p = q = -CUDART_INF_F;
        many_p = many_q = two_of(-CUDART_INF_F);
    }

    static __device__ __forceinline__ two two_of(float x) {
        two y;
        y.x = y.y = ::to<decltype(y.x)>(x);
        return y;
    }
    static __device__ __forceinline__ two many(const two &so_far, const uint4 &raw) {
        const two *x = (const two *)&raw;
        return __hmax2(__hmax2(so_far, x[0]), __hmax2(__hmax2(x[1], x[2]), x[3]));
    }
    /* A vector, of which z is padded. */
    template <class LEFT>
    __device__ __forceinline__ void add(LEFT, const uint4 &raw_p, const uint4 &raw_q,
                                        const pair_of<T> &z) {
        if (LEFT::ALL && sizeof(T) == 2) {
            many_p = many(many_p, raw_p);
            many_q = many(many_q, raw_q);
        } else {
#pragma unroll
            for (int i = 0; i < packet<T>::V; i++) {
                p = fmaxf(p, z.p[i]);
                q = fmaxf(q, z.q[i]);
            }
        }
    }
    /* One warp: the largest of all its lanes. */
    __device__ __forceinline__ void store(float (&to)[2]) const {
        float top_p = warp_max(fmaxf(p, fmaxf((float)many_p.x, (float)many_p.y)));
        float top_q = warp_max(fmaxf(q, fmaxf((float)many_q.x, (float)many_q.y)));
        if (threadIdx.x % 32 == 0) {
            to[0] = top_p;
            to[1] = top_q;
        }
    }
};

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
    top_of<T> top;
    slice.template pass_of<SHIFTED, true>(
        V,
        [&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            pair_of<T> z(raw_p, raw_q);
            z.pad(left, at.pad_p, at.pad_q);
            top.add(left, raw_p, raw_q, z);
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
    top.store(block.tops[ring][resident::group_thread() / 32]);
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

/* The same by any slice, all of which has come. */
template <class T, int EXTRA, class SLICE>
static __device__ __noinline__ part fast_again(SLICE slice, temperature t, reference at) {
    constexpr int V = packet<T>::V;
    part mine = {{0, 0, 0, 0}, {reference::mark(at.c_p), reference::mark(at.c_q)}, {}};
    slice.template pass<T>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
        pair_of<T> z(raw_p, raw_q);
        z.pad(left, at.pad_p, at.pad_q);
        chunk_sums<EXTRA> sum;
#pragma unroll
        for (int i = 0; i < V; i++)
            if constexpr (sizeof(T) == 4)
                fast_fp32(z.p[i], z.q[i], at, t, sum);
            else
                fast_16(z.p[i], z.q[i], at, t, sum);
        sum.flush(mine.sum);
    });
    return mine;
}

/* 2^x, 0 far below. */
static __device__ __forceinline__ double power_of_2(int x) {
    return x < -1000 ? 0.0 : __hiloint2double((1023 + min(x, 1000)) << 20, 0);
}

/* A part to each lane; beyond `count` one without classes. */
static __device__ __forceinline__ part lane_part(const part *parts, uint32_t count) {
    unsigned lane = threadIdx.x % 32;
    return lane < count
               ? parts[lane]
               : part{{0, 0, 0, 0}, {INT32_MIN / 4, INT32_MIN / 4}, {-CUDART_INF_F, -CUDART_INF_F}};
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
    to.top[0] = warp_max(from.top[0]);
    to.top[1] = warp_max(from.top[1]);
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
                                                     double unit, float scale) {
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
    float above = threadIdx.x % 2 ? fmaf(all.top[1], scale, -(float)row.c_q)
                                  : fmaf(all.top[0], scale, -(float)row.c_p);
    bool heavy = exp2_fast(above) > HEAVY_PART * (float)mine;
    row.missed = __any_sync(KLD_FULL_WARP, heavy && above > HEAVY_ABOVE && above < 1e6f);
    double small = EXTRA == ENTROPY   ? fmin(row.forward, row.entropy)
                   : EXTRA == REVERSE ? fmin(row.forward, row.reverse)
                                      : row.forward;
    heavy = heavy && small < HEAVY_MIN;
    row.good = !row.missed && !__any_sync(KLD_FULL_WARP, heavy) && row.forward >= least &&
               row.forward < 1e30 && all.sum[0] > 0.25 && all.sum[0] < most && all.sum[1] > 0.25 &&
               all.sum[1] < most && (EXTRA == NOTHING || fabs(all.sum[3]) < 1e300);
    return row;
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
