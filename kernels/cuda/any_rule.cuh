/* any_rule.cuh - the four formulas of kernels/rule.h on one class, in FP64: its term and df/dx of
 * both sides, for whatever forms the tensors have. Knows no tensor and no row; branches are the
 * same for all classes but for zeros and close values.
 *
 * Close values. q - p comes from d = ln p - ln q by a series, and where both sides are softmaxes
 * the term is a sum of x ln(x/y) - x + y, each >= 0 and without cancellation: all classes together
 * add as much as they take away. */
#ifndef KLD_KERNELS_CUDA_ANY_RULE_CUH
#define KLD_KERNELS_CUDA_ANY_RULE_CUH

#include <math_constants.h>

#include "kernels/rule.h"

/* Which derivative a side's gradient is made of. */
enum any_want {
    ANY_NOTHING,
    ANY_SLOPE,   /* df/dx: the tensor holds x */
    ANY_MOMENT,  /* x df/dx: the tensor holds ln x, or logits under a grad_output of each class */
    ANY_CENTRED, /* x df/dx + c x, c the same for all classes: a softmax takes it off again */
};

struct any_element {
    double p, q, d; /* d = ln p - ln q; of no meaning where both are 0 */
    double log_q;
};

struct any_result {
    double value, of_p, of_q; /* derivatives as wanted */
};

struct any_rule {
    kld_rule rule;
    uint32_t want_p, want_q; /* enum any_want */
    bool balanced;           /* both sides sum to 1 */
};

#define ANY_NEAR 0.35

/* x - 1 + exp(-x) for |x| < ANY_NEAR, >= 0. */
static __device__ __forceinline__ double any_excess(double x) {
    double y = 1.0 / 87178291200.0; /* (-x)^n / (n + 2)! */
    y = y * -x + 1.0 / 6227020800.0;
    y = y * -x + 1.0 / 479001600.0;
    y = y * -x + 1.0 / 39916800.0;
    y = y * -x + 1.0 / 3628800.0;
    y = y * -x + 1.0 / 362880.0;
    y = y * -x + 1.0 / 40320.0;
    y = y * -x + 1.0 / 5040.0;
    y = y * -x + 1.0 / 720.0;
    y = y * -x + 1.0 / 120.0;
    y = y * -x + 1.0 / 24.0;
    y = y * -x + 1.0 / 6.0;
    y = y * -x + 0.5;
    return x * x * y;
}

/* x ln(x/y) - x + y with log = ln(x/y). */
static __device__ __forceinline__ double any_balanced(double x, double y, double log) {
    if (x == 0)
        return y;
    return fabs(log) < ANY_NEAR ? x * any_excess(log) : x * log - x + y;
}

/* (smaller - larger) / larger of the two. */
static __device__ __forceinline__ double any_shortfall(const any_element &e) {
    double size = fabs(e.d);
    return size < ANY_NEAR ? any_excess(size) - size
           : e.p >= e.q    ? (e.q - e.p) / e.p
                           : (e.p - e.q) / e.q;
}

static __device__ __forceinline__ any_result any_kl(const any_rule &at, const any_element &e) {
    double p = e.p, q = e.q, d = e.d, a = at.rule.of_p, b = at.rule.of_q;
    double term_p = p == 0 ? 0.0 : p * d, term_q = q == 0 ? 0.0 : -q * d;
    double q_less_p = fabs(d) < ANY_NEAR ? p * (any_excess(d) - d) : q - p;
    any_result r;
    r.value = a * (at.balanced ? any_balanced(p, q, d) : term_p);
    if (b != 0)
        r.value += b * (at.balanced ? any_balanced(q, p, -d) : term_q);
    switch (at.want_p) {
    case ANY_NOTHING: r.of_p = 0.0; break;
    case ANY_SLOPE:
        r.of_p = (p == 0 ? 0.0 : a * (d + 1)) - (q == 0 || b == 0 ? 0.0 : b * (q / p));
        break;
    case ANY_MOMENT: r.of_p = a * (term_p + p) - b * q; break;
    default: r.of_p = a * term_p - b * q_less_p;
    }
    switch (at.want_q) {
    case ANY_NOTHING: r.of_q = 0.0; break;
    case ANY_SLOPE:
        r.of_q = (q == 0 || b == 0 ? 0.0 : b * (1 - d)) - (p == 0 ? 0.0 : a * (p / q));
        break;
    case ANY_MOMENT: r.of_q = (b != 0 ? b * (term_q + q) : 0.0) - a * p; break;
    default: r.of_q = (b != 0 ? b * term_q : 0.0) + a * q_less_p;
    }
    return r;
}

static __device__ __forceinline__ any_result any_mixture(const any_rule &at, const any_element &e) {
    double p = e.p, q = e.q, a = at.rule.of_p, b = at.rule.of_q;
    double share = at.rule.share, rest = at.rule.rest;
    double m = fmax(share * p + rest * q, CUDART_MIN_DENORM); /* of the least it may round to 0 */
    bool p_larger = e.d >= 0;
    double shortfall = any_shortfall(e);
    /* ln of the larger over m first, and the other follows. What is left of 1 where the smaller's
     * share is nearly all would have lost the larger's: nothing cancels in the sum of the two. */
    double own = p_larger ? share : rest, other = p_larger ? rest : share;
    double less = other * shortfall;
    double log_larger = less < -0.3 ? -log(own + other * (p_larger ? q / p : p / q)) : -log1p(less);
    double log_smaller = log_larger - fabs(e.d);
    if (own < KLD_RULE_SHARE_SMALL) {
        /* m over the smaller, less 1 */
        double more = -own * shortfall / (p_larger ? q / p : p / q);
        log_smaller = more < 0.3 ? -log1p(more) : log_smaller;
    }
    double log_p = p_larger ? log_larger : log_smaller, log_q = p_larger ? log_smaller : log_larger;
    double q_less_p = p_larger ? p * shortfall : -q * shortfall;
    double term_p = p == 0 ? 0.0 : p * log_p, term_q = q == 0 ? 0.0 : q * log_q;
    any_result r;
    r.value = a * (at.balanced ? any_balanced(p, m, log_p) : term_p) +
              b * (at.balanced ? any_balanced(q, m, log_q) : term_q);
    r.of_p = r.of_q = 0.0;
    if (at.want_p == ANY_NOTHING && at.want_q == ANY_NOTHING)
        return r;
    /* a rest - b share, which is 0 where both weigh: then a is the share. */
    double cross = b == 0 ? a * rest : a == 0 ? -b * share : 0.0;
    bool parts = cross != 0 || at.want_p == ANY_SLOPE || at.want_q == ANY_SLOPE;
    double p_part = parts ? p / m : 0.0, q_part = parts ? q / m : 0.0;
    if (at.want_p == ANY_CENTRED)
        r.of_p = a * term_p + cross * share * p_part * q_less_p;
    else if (p == 0)
        r.of_p = at.want_p == ANY_SLOPE ? -b * share * q_part : 0.0;
    else
        r.of_p = (a * log_p + cross * q_part) * (at.want_p == ANY_SLOPE ? 1.0 : p);
    if (at.want_q == ANY_CENTRED)
        r.of_q = b * term_q + cross * rest * q_part * q_less_p;
    else if (q == 0)
        r.of_q = at.want_q == ANY_SLOPE ? -a * rest * p_part : 0.0;
    else
        r.of_q = (b * log_q - cross * p_part) * (at.want_q == ANY_SLOPE ? 1.0 : q);
    return r;
}

static __device__ __forceinline__ any_result any_tv(const any_rule &at, const any_element &e) {
    double p_less_q = fabs(e.d) < ANY_NEAR ? (e.d >= 0 ? -e.p : e.q) * any_shortfall(e) : e.p - e.q;
    double slope = p_less_q > 0 ? 0.5 : p_less_q < 0 ? -0.5 : 0.0;
    return {0.5 * fabs(p_less_q), at.want_p == ANY_SLOPE ? slope : e.p * slope,
            at.want_q == ANY_SLOPE ? -slope : -e.q * slope};
}

static __device__ __forceinline__ any_result any_cross_entropy(const any_rule &at,
                                                               const any_element &e) {
    double slope = e.p == 0 ? 0.0 : -e.log_q, term = e.p == 0 ? 0.0 : e.p * slope;
    double q_less_p = fabs(e.d) < ANY_NEAR ? e.p * (any_excess(e.d) - e.d) : e.q - e.p;
    return {term, at.want_p == ANY_SLOPE ? slope : term,
            at.want_q == ANY_SLOPE    ? (e.p == 0 ? 0.0 : -e.p / e.q)
            : at.want_q == ANY_MOMENT ? -e.p
                                      : q_less_p};
}

/* The result of a class where both masses are 0 is 0, where one is NaN it is NaN. */
static __device__ __forceinline__ any_result any_apply(const any_rule &at, const any_element &e) {
    if (isnan(e.p) || isnan(e.q))
        return {CUDART_NAN, CUDART_NAN, CUDART_NAN};
    if (e.p == 0 && e.q == 0)
        return {0.0, 0.0, 0.0};
    switch (at.rule.kind) {
    case KLD_RULE_MIXTURE: return any_mixture(at, e);
    case KLD_RULE_TV: return any_tv(at, e);
    case KLD_RULE_CROSS_ENTROPY: return any_cross_entropy(at, e);
    default: return any_kl(at, e);
    }
}

#endif
