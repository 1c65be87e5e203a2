/* logits_stats.cuh - what the first pass over a row pair of logits counts from and finds out: the
 * sums of the exponentials and what gives the row's value, by one warp for its part
 * (logits_fast.cuh, logits_careful.cuh). logits_merge.cuh makes the row of all warps' parts.
 *
 * Two ways. The fast one serves rows that differ: KL comes from sum(a u) / sum(a) less the
 * logarithm of the ratio of the two sums, where a are p's exponentials and u the differences of the
 * logits. Of close rows that difference would be noise. The careful one adds only what is of the
 * size of the result: with b q's exponentials and v = ln p - ln q, but for what is still unknown of
 * the sums, the terms b (v e^v - e^v + 1) >= 0 and the change b (e^v - 1) of the sum. It also knows
 * classes of -inf. What it cannot do (NaN, +inf, mass over a zero) is left to any.cuh. A row is
 * tried in this order; which way it takes depends on the row alone. */
#ifndef KLD_KERNELS_CUDA_LOGITS_STATS_CUH
#define KLD_KERNELS_CUDA_LOGITS_STATS_CUH

#include <type_traits>

#include "kernels/cuda/logits_math.cuh"
#include "kernels/cuda/resident_exchange.cuh"
#include "kernels/cuda/resident_slice.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

using resident::part;

/* Rows below this value go the careful way: the fast one's error is some 2e-8 in 16 bits, 1e-8 in
 * FP32, where no class has much of the mass. */
template <class T> static constexpr double FAST_MIN = sizeof(T) == 4 ? 1.0 / 256 : 1.0 / 32;

/* The exponential of a class with much of the mass is not to be rounded as the others are: their
 * errors average out, its does not. Such classes count one by one in FP64: those above a limit that
 * the scout has guessed, where one has about 2^-HEAVY_POWERS of the mass. When the sums are known
 * so is how good the guess was. A row below HEAVY_MIN in which a class below the limit may have
 * more than HEAVY_PART, or any in which it lies so many powers of 2 above all that the scout saw
 * that its exponent is rounded, is summed once more, from what it is now known to hold. */
static constexpr float HEAVY_POWERS = 5.0f, HEAVY_PART = 1.0f / 8, HEAVY_ABOVE = 8.0f;
/* In powers of 2 above the reference; what is further below the row than 1000 counts as nothing. */
static constexpr double HEAVY_MOST = 900.0;
template <class T> static constexpr double HEAVY_MIN = sizeof(T) == 4 ? 1e300 : 0.3;

/* And those whose sums are beyond this. */
template <class T> static constexpr double FAST_SUM_MAX = sizeof(T) == 4 ? 1e30 : 1048576.0;

/* Below this entropies of the careful way are no good: any.cuh. */
template <class T> static constexpr double CAREFUL_ENTROPY_MIN = sizeof(T) == 4 ? 1.0 / 64 : 1e-6;

/* The fourth sum: none, q (ln q - ln p), p ln q, p (ln p - ln q)^2, the same roughly (FP32). */
enum extra { NOTHING, REVERSE, ENTROPY, SQUARES, ROUGH };

/* The difference of two logits of 16 bits is exact unless a constant lies between the sides; beyond
 * this one it is taken off first, by the careful way. A number of few bits, or 0. */
static constexpr float APART_MIN = 32.0f;
/* A constant between the sides, in units of T, of which a row is for any.cuh: 16 bits, whose
 * smallest logits FP32 rounds when it is taken off them (and so in logits as they are, too, which a
 * high T leaves as far from it); and of 32 bits, where two floats hold too little. */
static constexpr double APART_MOST_16 = 128, APART_MOST = 65536;
template <class T> static __device__ __forceinline__ float apart_of(double between) {
    if (sizeof(T) == 4 || !(fabs(between) > (double)APART_MIN))
        return 0.0f;
    return __bfloat162float(__float2bfloat16_rn((float)between));
}

/* Of the row. p_i = 2^(z_i s - c_p) inverse_p, d_i = (zp_i - apart - zq_i) / T - shift. */
struct row_stats {
    int32_t c_p, c_q;
    float apart;
    double inverse_p, inverse_q, shift;
    double forward, reverse, entropy; /* sum p d, sum q (-d), - sum p ln q */
    double center;                    /* sum p (zp - apart - zq) / T */
    double log_p, log_q;              /* of the sums, base e; of the fast way */
    double variance;                  /* of d over p; of the fast way, where it is summed */
    bool good;
    bool is_careful; /* by the careful way */
    bool missed;     /* by the scout */
    float powers[2]; /* of the fast way: of all mass of p and of q, to the base of 2 */
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

/* What masses are measured against: the largest of a sample, in powers of 2. */
struct reference {
    float c_p, c_q;
    float pad_p,
        pad_q; /* a logit whose exponential is 0 beside that; stands behind the last class */
    float top_p, top_q;
    float limit_p, limit_q; /* classes above one of them count one by one; numbers of the dtype */

    static __device__ __forceinline__ float below(float top, float span) {
        return fabsf(top) < 1e6f ? top - span : -3e38f;
    }
    /* Beyond 2^21 exp_split() is no good: NaN, which spoils the row and sends it to any.cuh. */
    static __device__ __forceinline__ float whole(float x) {
        return fabsf(x) < 2097152.0f ? rintf(x) : CUDART_NAN_F;
    }
    /* The reference and, in whole powers of 2 above it, the largest class that did not count by
     * itself. Of a part without a class that counts: below all others. */
    static constexpr int32_t NO_MARK = -(1 << 30), MARK_LEAST = -100, MARK_MOST = 155;
    static __device__ __forceinline__ int32_t mark(float c, float top, float limit, float scale) {
        float above = ceilf(fmaf(fminf(top, limit), scale, -c));
        return isnan(c) ? NO_MARK : mark((int32_t)c, (int32_t)fminf(fmaxf(above, -1e6f), 1e6f));
    }
    static __device__ __forceinline__ int32_t mark(int32_t c, int32_t above) {
        return c * 256 + min(max(above, MARK_LEAST), MARK_MOST) - MARK_LEAST;
    }
    static __device__ __forceinline__ int32_t mark_c(int32_t mark) { return mark >> 8; }
    static __device__ __forceinline__ int32_t mark_above(int32_t mark) {
        return (mark & 255) + MARK_LEAST;
    }
    __device__ __forceinline__ reference() {}
    static __device__ __forceinline__ reference none() {
        reference at;
        at.c_p = at.c_q = at.top_p = at.top_q = CUDART_NAN_F;
        at.pad_p = at.pad_q = -3e38f;
        at.limit_p = at.limit_q = CUDART_INF_F;
        return at;
    }
    /* As the scout has left it. */
    __device__ __forceinline__ explicit reference(const float (&x)[4], float span)
        : c_p(x[0]), c_q(x[1]), pad_p(below(x[2], span)), pad_q(below(x[3], span)), limit_p(x[2]),
          limit_q(x[3]) {}
    template <class T> static __device__ __forceinline__ float limit_at(float powers, float scale) {
        float limit = (powers - HEAVY_POWERS) * reciprocal(scale);
        return fabsf(limit) < 1e6f ? (float)::to<T>(limit) : CUDART_INF_F;
    }
    /* The limit of one side of a row from the largest that each lane has seen, of `top` of which
     * all. What lies below the top stands for the mass of the rest, some half of which the largest
     * of a vector is; or what more classes would reach if they went on as these do, whichever is
     * more. Everything waits for this: two reductions, side by side with the other side's. */
    template <class T>
    static __device__ __forceinline__ float limit_of(float most, float top, float scale,
                                                     uint32_t classes, int vectors = 1) {
        const float unit = 33554432.0f; /* 2^25, so that 32 of them add up */
        float part = most < top ? exp2_fast((most - top) * scale) : 0.0f;
        uint32_t parts = __reduce_add_sync(KLD_FULL_WARP, (uint32_t)(part * unit));
        float least = -warp_max(-most), each = 2.0f / (31.0f * packet<T>::V * vectors);
        float rest = log2_fast(fmaxf((float)parts, 1.0f) * (1.0f / unit) * each * (float)classes);
        float reach = 0.6f * (top - least) * scale;
        return limit_at<T>(fmaf(top, scale, fmaxf(rest, reach)), scale);
    }
    /* Of a vector of each lane, the first `left` classes of it; of a row of `classes`. */
    template <class T>
    static __device__ __forceinline__ reference of(const pair_of<T> &z, uint32_t left,
                                                   const temperature &t, float span,
                                                   uint32_t classes) {
        float top_p = -CUDART_INF_F, top_q = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < packet<T>::V; i++)
            if (i < left) {
                top_p = fmaxf(top_p, z.p[i]);
                top_q = fmaxf(top_q, z.q[i]);
            }
        return of_most<T>(top_p, top_q, t, span, classes, 1);
    }
    /* Of the largest of each side that each lane has seen in so many vectors. */
    template <class T>
    static __device__ __forceinline__ reference of_most(float most_p, float most_q,
                                                        const temperature &t, float span,
                                                        uint32_t classes, int vectors) {
        float top_p = warp_max(most_p), top_q = warp_max(most_q);
        reference at = of_tops(top_p, top_q, t, span);
        at.limit_p = limit_of<T>(most_p, top_p, t.scale.high, classes, vectors);
        at.limit_q = limit_of<T>(most_q, top_q, t.scale.high, classes, vectors);
        return at;
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
        at.limit_p = at.limit_q = CUDART_INF_F;
        return at;
    }
};

/* The largest logits of one thread. NaN is passed over: it shows in the sums. */
template <class T> struct top_of {
    typedef typename std::conditional<std::is_same<T, __half>::value, __half2, __nv_bfloat162>::type
        two;
    float p, q;
    two many_p, many_q;
    two limit_p, limit_q;

    __device__ __forceinline__ explicit top_of(const reference &at) {
        p = q = -CUDART_INF_F;
        many_p = many_q = two_of(-CUDART_INF_F);
        limit_p = two_of(at.limit_p);
        limit_q = two_of(at.limit_q);
    }

    static __device__ __forceinline__ two two_of(float x) {
        two y;
        y.x = y.y = ::to<decltype(y.x)>(x);
        return y;
    }
    static __device__ __forceinline__ two largest(const uint4 &raw) {
        const two *x = (const two *)&raw;
        return __hmax2(__hmax2(x[0], x[1]), __hmax2(x[2], x[3]));
    }
    /* A vector, of which z is padded. Is there a class above the limit, or NaN? */
    template <class LEFT>
    __device__ __forceinline__ bool add(LEFT, const uint4 &raw_p, const uint4 &raw_q,
                                        const pair_of<T> &z, const reference &at) {
        if constexpr (LEFT::ALL && sizeof(T) == 2) {
            two high_p = largest(raw_p), high_q = largest(raw_q);
            many_p = __hmax2(many_p, high_p);
            many_q = __hmax2(many_q, high_q);
            return (__hgtu2_mask(high_p, limit_p) | __hgtu2_mask(high_q, limit_q)) != 0;
        } else {
            float high_p = z.p[0], high_q = z.q[0];
#pragma unroll
            for (int i = 1; i < packet<T>::V; i++) {
                high_p = fmaxf(high_p, z.p[i]);
                high_q = fmaxf(high_q, z.q[i]);
            }
            p = fmaxf(p, high_p);
            q = fmaxf(q, high_q);
            return !(high_p <= at.limit_p && high_q <= at.limit_q);
        }
    }
    /* Is one of a whole vector above the limit (16 bits: or NaN)? */
    __device__ __forceinline__ bool is_above(const uint4 &raw_p, const uint4 &raw_q,
                                             const reference &at) const {
        if constexpr (sizeof(T) == 4) {
            float high_p, high_q;
            most({raw_p}, high_p);
            most({raw_q}, high_q);
            return high_p > at.limit_p || high_q > at.limit_q;
        }
        return (__hgtu2_mask(largest(raw_p), limit_p) | __hgtu2_mask(largest(raw_q), limit_q)) != 0;
    }
    /* The largest of whole vectors. */
    template <uint32_t N>
    static __device__ __forceinline__ void most(const uint4 (&raw)[N], float &ret) {
        if constexpr (sizeof(T) == 2) {
            two high = largest(raw[0]);
#pragma unroll
            for (uint32_t i = 1; i < N; i++)
                high = __hmax2(high, largest(raw[i]));
            ret = fmaxf((float)high.x, (float)high.y);
        } else {
            ret = -CUDART_INF_F;
#pragma unroll
            for (uint32_t i = 0; i < N; i++) {
                float x[packet<T>::V];
                unpack<T>(raw[i], x);
#pragma unroll
                for (int k = 0; k < packet<T>::V; k++)
                    ret = fmaxf(ret, x[k]);
            }
        }
    }
    /* A whole vector that nobody has unpacked. */
    __device__ __forceinline__ bool add_raw(const uint4 &raw_p, const uint4 &raw_q,
                                            const reference &at) {
        return add(resident::all_of(), raw_p, raw_q, pair_of<T>(raw_p, raw_q), at);
    }
    __device__ __forceinline__ void get_mine(float &ret_p, float &ret_q) const {
        ret_p = fmaxf(p, fmaxf((float)many_p.x, (float)many_p.y));
        ret_q = fmaxf(q, fmaxf((float)many_q.x, (float)many_q.y));
    }
    /* One warp: the largest of all its lanes. */
    __device__ __forceinline__ void store(float (&to)[2]) const {
        float top_p, top_q;
        get_mine(top_p, top_q);
        top_p = warp_max(top_p);
        top_q = warp_max(top_q);
        if (threadIdx.x % 32 == 0) {
            to[0] = top_p;
            to[1] = top_q;
        }
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
