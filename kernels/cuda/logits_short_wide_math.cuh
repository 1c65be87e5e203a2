/* logits_short_wide_math.cuh - what a class adds, in FP64 and without a branch: tv, mixtures of
 * masses and of close ones. No memory, no threads. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_MATH_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_MATH_CUH

#include "kernels/cuda/wide_math.cuh"

namespace logits_short {

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
