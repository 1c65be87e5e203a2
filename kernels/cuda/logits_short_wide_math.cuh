/* logits_short_wide_math.cuh - exponentials, logarithms and reciprocals in FP64 without a branch:
 * those of several classes are computed side by side, where the library's functions would wait for
 * one at a time; a mixture of close masses. No memory, no threads. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_MATH_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_MATH_CUH

#include "kernels/cuda/logits_math.cuh"

namespace logits_short {

/* 2^(x scale) to 1e-12 of it, 1 of 0 exactly; for |x scale| <= 1000. */
static __device__ __forceinline__ double wide_power(double x, double scale) {
    const double round = 6755399441055744.0; /* 1.5 * 2^52: its last bits are the whole number */
    double at = fma(x, scale, round), r = fma(x, scale, -(at - round));
    /* 2^r on [-1/2, 1/2], minimax */
    double y = fma(r, 1.317893563986946e-6, 1.5309156112425249e-5);
    y = fma(y, r, 1.5403825451524313e-4);
    y = fma(y, r, 1.3333454860787013e-3);
    y = fma(y, r, 9.6181286161417127e-3);
    y = fma(y, r, 5.5504109352660924e-2);
    y = fma(y, r, 0.24022650698110506);
    y = fma(y, r, 0.69314718054821234);
    y = fma(y, r, 1.0);
    int power = (int)((uint32_t)(int)__double_as_longlong(at) << 20);
    return __hiloint2double(__double2hiint(y) + power, (int)__double_as_longlong(y));
}

/* 1 / x for normal x, to some steps of FP64. */
static __device__ __forceinline__ double wide_inverse(double x) {
    double y = reciprocal_wide(x), e = fma(-x, y, 1.0);
    e = fma(e, e, e);
    return fma(y, e, y);
}

/* ln x for normal x > 0, to 3e-14 of it; less: x - 1, as exactly as it is known. */
static __device__ __forceinline__ double wide_ln(double x, double less) {
    int power = (__double2hiint(x) - 0x3fe6a09e) & (int)0xfff00000; /* x in 2^k [0.7, 1.4) */
    x = __hiloint2double(__double2hiint(x) - power, (int)__double_as_longlong(x));
    double s = (power == 0 ? less : x - 1.0) * wide_inverse(x + 1.0), z = __dmul_rn(s, s);
    /* 2 atanh(s) / s for |s| <= 0.1717, minimax */
    double y = fma(z, 0.19611303795104115, 0.22174030068385551);
    y = fma(y, z, 0.28572171388841956);
    y = fma(y, z, 0.39999994841135105);
    y = fma(y, z, 0.66666666679749457);
    y = fma(y, z, 1.9999999999999463);
    /* The whole number k + 2^31 as the last bits of 1.5 * 2^52. */
    double k = __hiloint2double(0x43380000, power >> 20 ^ (int)0x80000000) - 6755401588539392.0;
    return fma(k, LN_2, __dmul_rn(s, y));
}

/* (x - 1 + e^-x) / x^2 for |x| <= WIDE_NEAR, to 1e-12 of it. */
#define WIDE_NEAR 0.35
static __device__ __forceinline__ double wide_excess(double x) {
    double y = fma(x, -2.757775407433625e-6, 2.4869134553529701e-5);
    y = fma(y, x, -1.9841310646994628e-4);
    y = fma(y, x, 1.3888837210916478e-3);
    y = fma(y, x, -8.3333332910924482e-3);
    y = fma(y, x, 4.1666666793083327e-2);
    y = fma(y, x, -0.16666666666744472);
    return fma(y, x, 0.49999999999951742);
}

/* q - p where |d| <= WIDE_NEAR. */
static __device__ __forceinline__ double wide_less(double p, double d) {
    return p * fma(d * d, wide_excess(d), -d);
}

/* The upper half of |x|, which orders as it does. */
static __device__ __forceinline__ int wide_size(double x) { return __double2hiint(x) & 0x7fffffff; }

/* What a class adds to the value, and h of both sides: of the gradients for each unit of mass. */
struct wide_terms {
    double value, of_p, of_q;
};

/* The same of tv, with q - p. */
static __device__ __forceinline__ wide_terms wide_tv(double more) {
    double slope = more < 0 ? 0.5 : more > 0 ? -0.5 : 0.0;
    return {0.5 * fabs(more), slope, -slope};
}

/* What h has of a mixture besides the logarithms; 0 for js. As q/m is 1 + share (q - p)/m, and p/m
 * 1 - rest (q - p)/m, it is that times (q - p)/m, and times the other side's share. */
static __device__ __forceinline__ double wide_cross(double weight_p, double weight_q, double share,
                                                    double rest) {
    return __dmul_rn(weight_p, rest) - __dmul_rn(weight_q, share);
}

/* x ln(x/m) - x + m, with the logarithm. */
static __device__ __forceinline__ double wide_balanced(double mass, double m, double log) {
    double near = mass * (log * log) * wide_excess(log);
    double term = fabs(log) < WIDE_NEAR ? near : fma(mass, log, m - mass);
    return mass == 0 ? m : term;
}

/* A mixture of masses that may agree to any digit, from d = ln p - ln q. */
static __device__ __forceinline__ wide_terms wide_mixture(double weight_p, double weight_q,
                                                          double share, double rest, double p,
                                                          double q, double d) {
    const double size = fabs(d);
    const bool more_p = d >= 0, near = size < WIDE_NEAR;
    const double own = more_p ? share : rest, other = more_p ? rest : share;
    /* The smaller mass to the larger, less 1; m to the larger. */
    double ratio = wide_power(-fmin(size, 690.0), LOG2_E);
    double less = near ? fma(size * size, wide_excess(size), -size) : ratio - 1.0;
    double m = near ? fma(other, less, 1.0) : fma(other, ratio, own);
    double log_large = -wide_ln(m, other * less), log_small = log_large - size;
    double log_p = more_p ? log_large : log_small, log_q = more_p ? log_small : log_large;
    double whole = m * (more_p ? p : q);
    double part =
        wide_cross(weight_p, weight_q, share, rest) * (more_p ? less : -less) * wide_inverse(m);
    wide_terms r;
    r.value =
        fma(weight_p, wide_balanced(p, whole, log_p), weight_q * wide_balanced(q, whole, log_q));
    r.of_p = fma(part, share, weight_p * log_p);
    r.of_q = fma(part, rest, weight_q * log_q);
    return r;
}

} /* namespace logits_short */
#endif
