/* math.cuh - ln p - ln q in single precision, without the cancellation of two logarithms, at a cost
 * that hides behind memory: one reciprocal and some 20 multiply-adds.
 *
 * ln(p/q) = e ln 2 + 2 atanh((p - q 2^e) / (p + q 2^e)), with e chosen so that p and q 2^e are
 * within a factor of 1.5: their difference is then exact. Error of the result: 2e-7 of it. */
#ifndef KLD_KERNELS_CUDA_MATH_CUH
#define KLD_KERNELS_CUDA_MATH_CUH

#include <math_constants.h>

#include "kernels/cuda/ptx.cuh"

/* p, q in [2^-125, 2^125). SHORT: a multiply-add less; 5e-7 of the result, enough for a loss. */
template <bool SHORT = false> static __device__ __forceinline__ float log_ratio(float p, float q) {
    int p_bits = __float_as_int(p), q_bits = __float_as_int(q);
    int exponent = (p_bits - q_bits + 0x400000) & (int)0xff800000;
    float near = __int_as_float(q_bits + exponent);
    float s = (p - near) * reciprocal(p + near);
    float z = s * s;
    /* 2 atanh(s) / s on z <= 0.0402 (|s| <= 0.2), minimax, error 1e-8; SHORT: 3e-7 */
    float y;
    if (SHORT) {
        y = fmaf(z, 0.417883515f, 0.666393638f);
        y = fmaf(y, z, 2.00000048f);
    } else {
        y = fmaf(z, 0.299647918f, 0.399787219f);
        y = fmaf(y, z, 0.666667145f);
        y = fmaf(y, z, 2.0f);
    }
    /* ln 2 / 2^23: exponent is e 2^23 */
    return fmaf((float)exponent, 8.26295829e-8f, s * y);
}

/* p / q within 1 ulp, in the same range; wrong where the quotient overflows, which shows in
 * largest. */
static __device__ __forceinline__ float ratio(float p, float q, float &largest) {
    float y = reciprocal(q);
    float r = p * y;
    largest = fmaxf(largest, r);
    return fmaf(fmaf(-r, q, p), y, r);
}

/* 0 .. 0x7cffffff where 2^-125 <= x < 2^125, beyond that for all else: the range of the two above.
 */
static __device__ __forceinline__ unsigned plain_rank(float x) {
    return __float_as_uint(x) - 0x01000000u;
}
static constexpr unsigned PLAIN_RANKS = 0x7d000000u;

/* ln(a/b) with a - b given, better than a and b would give it where they are close. Same range.
 * PRECISE: within 1 unit in the last place of what the difference and a + b say, at four more
 * instructions. */
template <bool PRECISE>
static __device__ __forceinline__ float log_ratio_from(float a, float b, float difference) {
    int a_bits = __float_as_int(a), b_bits = __float_as_int(b);
    int exponent = (a_bits - b_bits + 0x400000) & (int)0xff800000;
    float near = __int_as_float(b_bits + exponent);
    float over = exponent == 0 ? difference : a - near, under = a + near, y = reciprocal(under);
    float s = over * y;
    if (PRECISE)
        s = fmaf(fmaf(-s, under, over), y, s);
    float z = s * s;
    float series = fmaf(z, 0.299647918f, 0.399787219f);
    series = fmaf(series, z, 0.666667145f);
    float log = PRECISE ? fmaf(s, series * z, s + s) : s * fmaf(series, z, 2.0f);
    return fmaf((float)exponent, 8.26295829e-8f, log);
}

/* f(d) / d^2 with f(d) = d + expm1(-d), |d| <= 1/2; error 4e-8. From it both expm1(-d) = f - d and
 * the KL term p f(d) = p ln(p/q) - p + q follow without cancellation. */
static __device__ __forceinline__ float term_series(float d) {
    float y = fmaf(d, 1.0f / 40320, -1.0f / 5040);
    y = fmaf(y, d, 1.0f / 720);
    y = fmaf(y, d, -1.0f / 120);
    y = fmaf(y, d, 1.0f / 24);
    y = fmaf(y, d, -1.0f / 6);
    return fmaf(y, d, 0.5f);
}

/* e^(x + rest), |rest| far below |x|: half a unit in the last place, where expf() has more than
 * one; 2^x of the hardware below e^-87. */
static __device__ __forceinline__ float exp_precise(float x, float rest) {
    const float round = 12582912.0f; /* 1.5 * 2^23 */
    float k = fmaf(x, 1.44269504f, round) - round;
    float r = fmaf(k, -0.693145752f, x); /* ln 2 in two parts; the first product is exact */
    float r_low = fmaf(k, -1.42860677e-6f, rest);
    float t = r + r_low, t_low = (r - t) + r_low;
    float y = fmaf(t, 1.0f / 5040, 1.0f / 720);
    y = fmaf(y, t, 1.0f / 120);
    y = fmaf(y, t, 1.0f / 24);
    y = fmaf(y, t, 1.0f / 6);
    y = fmaf(y, t, 0.5f);
    float e = 1.0f + (t + fmaf(t * t, y, t_low));
    float scale = exp2_fast(x > -87.0f ? k : x * 1.44269504f);
    return x > -87.0f ? e * scale : scale;
}

/* expm1(-x), x >= 0, and e^-x; PRECISE: of x + low, within half a unit or so where x > 1/2. */
template <bool PRECISE>
static __device__ __forceinline__ float shortfall(float x, float low, float &ret_exp) {
    ret_exp = PRECISE ? exp_precise(-x, -low) : expf(-x);
    return x < 0.5f ? fmaf(x * x, term_series(x), -x) : ret_exp - 1.0f;
}

#endif
