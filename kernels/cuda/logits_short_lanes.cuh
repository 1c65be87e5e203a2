/* logits_short_lanes.cuh - what the lanes that share a short row of logits have in common: numbers
 * of the launch, elements between shared memory and registers, sums by shuffles, exponentials. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_LANES_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_LANES_CUH

#include "kernels/cuda/logits_short_math.cuh"
#include "kernels/cuda/row.cuh"

namespace logits_short {

/* The loss alone; with the gradient of q where that is a multiple of q - p; everything. */
enum mode { LOSS, DIFFERENCE, GENERAL };

/* The same for all rows. */
struct launch_numbers {
    temperature t;
    double inverse; /* 1 / T; this and the rule for FP64 */
    kld_rule rule;
    float span; /* logits this far below another have no mass beside it */
    float of_p, of_q, share, rest, k;
    float minus_log_share, minus_log_rest; /* MIXTURE */

    __device__ __forceinline__ explicit launch_numbers(const kld_cuda_args &args)
        : t(args.inverse_temperature), inverse(args.inverse_temperature), rule(args.rule),
          span(150.0f / t.scale.high), of_p((float)args.rule.of_p), of_q((float)args.rule.of_q),
          share((float)args.rule.share), rest((float)args.rule.rest),
          k((float)(args.rule.of_p * args.rule.rest - args.rule.of_q * args.rule.share)),
          minus_log_share(log_ratio_from<true>(1.0f, share, rest)),
          minus_log_rest(log_ratio_from<true>(1.0f, rest, share)) {}
};

template <class T> static __device__ __forceinline__ float number(T x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return (float)x;
}

/* W elements of shared memory. ALIGNED: in one piece. */
template <class T, int W, bool ALIGNED>
static __device__ __forceinline__ void load_some(const T *from, float *x) {
    if constexpr (ALIGNED && W * sizeof(T) == 16) {
        float y[W];
        unpack<T>(*(const uint4 *)from, y);
#pragma unroll
        for (int i = 0; i < W; i++)
            x[i] = y[i];
    } else if constexpr (ALIGNED && W == 2 && sizeof(T) == 4) {
        float2 both = *(const float2 *)from;
        x[0] = both.x;
        x[1] = both.y;
    } else if constexpr (ALIGNED && W == 2) {
        unpack2<T>(*(const unsigned *)from, x[0], x[1]);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            x[i] = number<T>(from[i]);
    }
}

/* W elements of both sides from element i on; -inf behind the row's end. FULL: there is none. */
template <class T, int W, bool ALIGNED, bool FULL>
static __device__ __forceinline__ void load_pair(const T *from_p, const T *from_q, uint32_t i,
                                                 uint32_t classes, float *p, float *q) {
    bool has = FULL || i < classes;
    load_some<T, W, ALIGNED>(from_p + (has ? i : 0), p);
    load_some<T, W, ALIGNED>(from_q + (has ? i : 0), q);
    if (!FULL)
#pragma unroll
        for (int w = 0; w < W; w++) {
            p[w] = pick(has, p[w], -CUDART_INF_F);
            q[w] = pick(has, q[w], -CUDART_INF_F);
        }
}

template <class T, int W>
static __device__ __forceinline__ void store_some(T *to_row, bool aligned, const float *x) {
    alignas(16) T y[W];
#pragma unroll
    for (int i = 0; i < W; i++)
        y[i] = to<T>(x[i]);
    if (W > 1 && aligned) {
        if constexpr (W * sizeof(T) == 16)
            *(uint4 *)to_row = *(const uint4 *)y;
        else if constexpr (W * sizeof(T) == 8)
            *(uint2 *)to_row = *(const uint2 *)y;
        else if constexpr (W * sizeof(T) == 4)
            *(unsigned *)to_row = *(const unsigned *)y;
        return;
    }
#pragma unroll
    for (int i = 0; i < W; i++)
        to_row[i] = y[i];
}

/* The lanes that share a row. */
struct lanes {
    uint32_t lane, count; /* count: a power of 2 */

    template <class REAL, int N> __device__ __forceinline__ void sum(REAL (&x)[N]) const {
        for (uint32_t step = count / 2; step; step /= 2)
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] += __shfl_xor_sync(KLD_FULL_WARP, x[i], step);
    }
    template <int N> __device__ __forceinline__ void max(float (&x)[N]) const {
        for (uint32_t step = count / 2; step; step /= 2)
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = max_nan(x[i], __shfl_xor_sync(KLD_FULL_WARP, x[i], step));
    }
    __device__ __forceinline__ int largest(int x) const {
        for (uint32_t step = count / 2; step; step /= 2) {
            int other = __shfl_xor_sync(KLD_FULL_WARP, x, step);
            x = other > x ? other : x;
        }
        return x;
    }
};

/* One side's exponentials: against its largest logit, or PRECISE against a power of 2 near it. */
template <bool PRECISE> struct side {
    float top, c, least;
    float sum, sum_low; /* of powers of 2, and of what the exponentials are more */

    __device__ __forceinline__ side(float largest_logit, const launch_numbers &n)
        : top(largest_logit), c(0), least(0), sum(0), sum_low(0) {
        if (!PRECISE)
            return;
        /* Beyond that exp_split() is no good: NaN, and the row is left to any.cuh. */
        c = exp_split(top, n.t).k;
        c = fabsf(c) < 2097152.0f ? c : CUDART_NAN_F;
        least = top - n.span;
    }
    __device__ __forceinline__ float add(float z, const launch_numbers &n) {
        if (!PRECISE) {
            float x = exp2_fast((z - top) * n.t.scale.high);
            sum += x;
            return x;
        }
        exp_parts e = exp_split(fmaxf(z, least), n.t);
        float power = exp2_fast(e.k - c);
        sum += power;
        sum_low = fmaf(power, e.w, sum_low);
        return fmaf(power, e.w, power);
    }
};

} /* namespace logits_short */
#endif
