/* elementwise_rule.cuh - the divergences on one class of probs or logprobs, in FP32: its term, and
 * the derivatives by what the tensors hold. plain() is for positive, finite values of the common
 * range and says nothing about others; is_plain() finds out, for a whole vector at once, and what
 * it turns down is done again in FP64 by careful(). No loops, no memory. */
#ifndef KLD_KERNELS_CUDA_ELEMENTWISE_RULE_CUH
#define KLD_KERNELS_CUDA_ELEMENTWISE_RULE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/any_rule.cuh"
#include "kernels/cuda/logits_math.cuh"
#include "kernels/cuda/math.cuh"

/* The rules that differ in their instructions. In the roles of p and q, see launch.h. */
enum element_kind {
    ELEMENT_KL,      /* p ln(p/q) */
    ELEMENT_KL_BOTH, /* of_p p ln(p/q) + of_q q ln(q/p) */
    ELEMENT_SKEW,    /* p ln(p/m) */
    ELEMENT_JS,      /* share p ln(p/m) + rest q ln(q/m) */
    ELEMENT_TV,
    ELEMENT_CROSS_ENTROPY,
    ELEMENT_JS_EVEN, /* JS with a share of 1/2; loss only */
};

enum gradients { NO_GRADIENT = 0, GRADIENT_Q = 1, GRADIENT_P = 2 }; /* or both: 3 */

struct element_numbers {
    kld_rule rule;
    float of_p, of_q, share, rest;
    float share_low, rest_low; /* what the rounding of the two left */
    bool lopsided; /* share or rest is so small that differences of logarithms lose it */
    double g;      /* factor of the gradients */

    __device__ __forceinline__ element_numbers(const kld_rule &of, double gradient) {
        rule = of;
        of_p = (float)of.of_p;
        of_q = (float)of.of_q;
        share = (float)of.share;
        rest = (float)of.rest;
        share_low = (float)(of.share - (double)share);
        rest_low = (float)(of.rest - (double)rest);
        lopsided = fminf(share, rest) < 0.2f;
        g = gradient;
    }
};

/* (w + low) x, low a rounding of w. */
template <bool PRECISE>
static __device__ __forceinline__ float weighted(float w, float low, float x) {
    return PRECISE ? fmaf(w, x, low * x) : w * x;
}

struct element_result {
    float value, of_p, of_q; /* derivatives without g */
};

/* Whether all of p are 0 or of log_ratio()'s range, and all of q of that range, for two elements of
 * 16 bits at a time: what sm_90 does in one instruction. */
template <class T> struct packed_check {
    static constexpr bool EXISTS = false, ZEROS = false; /* ZEROS: of q, where p is 0 too */
    __device__ __forceinline__ void add(unsigned, unsigned) {}
    __device__ __forceinline__ bool passed() const { return true; }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/* The upper bits of the halves that are limit or more; what is carried over them does not matter,
 * as then there is one already. */
static __device__ __forceinline__ unsigned halves_from(unsigned x, unsigned limit) {
    return (x | (x + (0x8000u - limit) * 0x10001u)) & 0x80008000u;
}
/* And of those below limit, which is no more than 0x8000. */
static __device__ __forceinline__ unsigned halves_to(unsigned x, unsigned limit) {
    return (x - limit * 0x10001u) & ~x & 0x80008000u;
}

template <> struct packed_check<__nv_bfloat16> {
    static constexpr bool EXISTS = true, ZEROS = false;
    unsigned least_p = 0xffffffffu, most_p = 0, most_q = 0;
    __device__ __forceinline__ void add(unsigned p, unsigned q) {
        least_p = __viaddmin_u16x2(p, 0xffffffffu, least_p); /* 0 comes out on top */
        most_p = __viaddmax_u16x2(p, 0u, most_p);
        most_q = __viaddmax_u16x2(q, 0xff00ff00u, most_q);
    }
    __device__ __forceinline__ bool passed() const {
        return (halves_to(least_p, 0xffu) | halves_from(most_p, 0x7e00u) |
                halves_from(most_q, 0x7d00u)) == 0;
    }
};

/* Every FP16 number but 0 is a normal FP32 number; q may be 0 where p is, as numbers that small are
 * in FP16. The largest of them is turned down where p is 0, as +inf is where it is not. */
template <> struct packed_check<__half> {
    static constexpr bool EXISTS = true, ZEROS = true;
    unsigned most_p = 0, most_q = 0;
    __device__ __forceinline__ void add(unsigned p, unsigned q) {
        most_p = __viaddmax_u16x2(p, 0u, most_p);
        unsigned present = __viaddmin_u16x2(p, 0u, 0x00010001u);
        most_q = __viaddmax_u16x2(q - present, 0u, most_q);
    }
    __device__ __forceinline__ bool passed() const {
        return (halves_from(most_p, 0x7c00u) | halves_from(most_q, 0x7bffu)) == 0;
    }
};
#endif

/* PACKS: elements may be looked at as they come from memory, which plain() then leaves to others.
 */
template <class T, int FORM, int KIND, int GRADIENTS, bool PACKS = true> struct element_rule;

template <class T, int KIND, int GRADIENTS, bool PACKS>
struct element_rule<T, KLD_FORM_PROBS, KIND, GRADIENTS, PACKS> {
    /* Gradients of mixtures are good for FP32, or for 16 bits; losses always are. */
    static constexpr bool PRECISE = GRADIENTS && sizeof(T) == 4;
    static constexpr bool SHORT = sizeof(T) == 2;
    /* Two elements at a time are looked at as they come from memory. */
    static constexpr bool PACKED =
        PACKS && packed_check<T>::EXISTS && (KIND == ELEMENT_KL || KIND == ELEMENT_CROSS_ENTROPY);
    /* Where p and q are 0 that is nothing rare. */
    static constexpr bool ZEROS = (PACKED && packed_check<T>::ZEROS) || KIND == ELEMENT_TV;
    static constexpr float PAD = 1.0f; /* beyond the last class, in both: adds 0 */
    static constexpr any_want WANT = ANY_SLOPE;

    /* What a vector gathers of its elements to tell whether all were plain. */
    struct check {
        unsigned rank = 0;
        float largest = 0.0f, lowest = 0.0f;
    };
    static __device__ __forceinline__ bool is_plain(const check &c, float sum) {
        if (KIND == ELEMENT_JS_EVEN && !(c.largest < 0x1p125f && fabsf(sum) < CUDART_INF_F))
            return false;
        return c.rank < PLAIN_RANKS && c.largest < 3.0e38f && c.lowest >= 0.0f &&
               (KIND != ELEMENT_TV || fabsf(sum) < CUDART_INF_F);
    }

    /* For 16 bits a product is good enough, and an infinity is one. */
    static __device__ __forceinline__ float ratio_checked(float a, float b, check &c) {
        return sizeof(T) == 4 ? ratio(a, b, c.largest) : a * reciprocal(b);
    }

    static __device__ __forceinline__ element_result mixture(const element_numbers &at, float p,
                                                             float q, check &c) {
        element_result r = {0.0f, 0.0f, 0.0f};
        float more = q - p, low = PRECISE ? fmaf(at.rest_low, q, at.share_low * p) : 0.0f;
        float m = fmaf(at.rest, q, PRECISE ? fmaf(at.share, p, low) : at.share * p);
        float some_p = p == 0.0f ? m : p, some_q = q == 0.0f ? m : q;
        c.rank = max(plain_rank(m), c.rank);
        c.rank = max(plain_rank(some_p), c.rank);
        float log_p =
            log_ratio_from<PRECISE>(some_p, m, weighted<PRECISE>(-at.rest, -at.rest_low, more));
        if (KIND == ELEMENT_SKEW) {
            c.lowest = fminf(c.lowest, q);
            r.value = p * log_p;
            if (GRADIENTS) {
                float y = reciprocal(m), q_in_m = q * y, p_in_m = p * y;
                if (PRECISE) {
                    q_in_m = fmaf(fmaf(-q_in_m, m, q), y, q_in_m);
                    p_in_m = fmaf(fmaf(-p_in_m, m, p), y, p_in_m);
                }
                r.of_p = p == 0.0f ? 0.0f : fmaf(at.rest, q_in_m, log_p);
                r.of_q = -weighted<PRECISE>(at.rest, at.rest_low, p_in_m);
            }
            return r;
        }
        c.rank = max(plain_rank(some_q), c.rank);
        float log_q =
            log_ratio_from<PRECISE>(some_q, m, weighted<PRECISE>(at.share, at.share_low, more));
        /* At 0 the term of its own has no derivative; the other's is left. */
        r.of_p = p == 0.0f ? -at.share : weighted<PRECISE>(at.share, at.share_low, log_p);
        r.of_q = q == 0.0f ? -at.rest : weighted<PRECISE>(at.rest, at.rest_low, log_q);
        r.value = fmaf(p, r.of_p, q * r.of_q);
        return r;
    }

    /* (p + q) / 4 ((1 + u) ln(1 + u) + (1 - u) ln(1 - u)) with u = (p - q) / (p + q). */
    static __device__ __forceinline__ float even_js(float p, float q, check &c) {
        float sum = p + q, y = reciprocal(sum == 0.0f ? 1.0f : sum), u = (p - q) * y, z = u * u;
        float less = fminf(p, q);
        c.lowest = fminf(c.lowest, less);
        c.largest = fmaxf(c.largest, sum);
        /* over u^2, on u^2 < 1/4: minimax, error 1e-7 */
        float series = fmaf(z, 0.0355532803f, 0.0324643254f);
        series = fmaf(series, z, 0.0669740215f);
        series = fmaf(series, z, 0.166656688f);
        series = fmaf(series, z, 1.0f);
        float a = 1.0f + fabsf(u), b = 2.0f * (less * y);
        float far = fmaf(a, log2_fast(a), b * log2_fast(fmaxf(b, 0x1p-126f)));
        return 0.25f * sum * (z < 0.25f ? z * series : far * 0.693147181f);
    }

    static __device__ __forceinline__ element_result plain(const element_numbers &at, float p,
                                                           float q, check &c) {
        element_result r = {0.0f, 0.0f, 0.0f};
        if (KIND == ELEMENT_JS_EVEN) {
            r.value = even_js(p, q, c);
            return r;
        }
        if (KIND == ELEMENT_SKEW || KIND == ELEMENT_JS)
            return mixture(at, p, q, c);
        if (KIND == ELEMENT_TV) {
            float more = p - q;
            c.lowest = fminf(c.lowest, fminf(p, q));
            r.of_p = more > 0.0f ? 0.5f : more < 0.0f ? -0.5f : 0.0f;
            r.of_q = -r.of_p;
            r.value = 0.5f * fabsf(more);
            return r;
        }
        if (KIND == ELEMENT_KL_BOTH) {
            c.rank = max(plain_rank(p), c.rank);
            c.rank = max(plain_rank(q), c.rank);
            float d = log_ratio<SHORT>(p, q);
            r.value = fmaf(at.of_p, p, -at.of_q * q) * d;
            float more = q - p, over = at.of_p - at.of_q;
            if (GRADIENTS & GRADIENT_P)
                r.of_p = fmaf(-at.of_q, ratio_checked(more, p, c), fmaf(at.of_p, d, over));
            if (GRADIENTS & GRADIENT_Q)
                r.of_q = fmaf(-at.of_p, ratio_checked(-more, q, c), -fmaf(at.of_q, d, over));
            return r;
        }
        /* p = 0 is common (one class holds all the mass): any logarithm does, it is times 0. */
        float present = PACKED ? fmaxf(p, 0x1p-125f) : p == 0.0f ? 1.0f : p;
        if (PACKED) {
            q = packed_check<T>::ZEROS ? fmaxf(q, 0x1p-125f) : q;
        } else {
            c.rank = max(plain_rank(present), c.rank);
            c.rank = max(plain_rank(q), c.rank);
        }
        if (KIND == ELEMENT_CROSS_ENTROPY) {
            float log_q = log_ratio<SHORT>(q, 1.0f);
            r.value = -p * log_q;
            r.of_p = p == 0.0f ? 0.0f : -log_q;
        } else {
            float d = log_ratio<SHORT>(present, q);
            r.value = p * d;
            r.of_p = p == 0.0f ? 0.0f : d + 1.0f;
        }
        if (GRADIENTS & GRADIENT_Q)
            r.of_q = -ratio_checked(p, q, c);
        return r;
    }

    static __device__ __forceinline__ double mass(float x) { /* -0 is 0 */
        return x >= 0.0f && x < CUDART_INF_F ? (double)fabsf(x) : CUDART_NAN;
    }
    static __device__ __forceinline__ any_element exact(float p, float q) {
        any_element e = {mass(p), mass(q), 0.0, 0.0};
        e.log_q = log(e.q);
        e.d = log(e.p) - e.log_q;
        return e;
    }
};

template <class T, int KIND, int GRADIENTS, bool PACKS>
struct element_rule<T, KLD_FORM_LOGPROBS, KIND, GRADIENTS, PACKS> {
    static constexpr bool PRECISE = GRADIENTS && sizeof(T) == 4;
    static constexpr bool PACKED = false, ZEROS = false;
    static constexpr float PAD = 0.0f;
    static constexpr any_want WANT = ANY_MOMENT;

    struct check {
        float spread = 0.0f;
    };
    /* Every infinity and NaN shows in the sum of the terms, or in that of the distances where a
     * logarithm of bits hides it. */
    static __device__ __forceinline__ bool is_plain(const check &c, float sum) {
        return fabsf(sum) < CUDART_INF_F && c.spread < CUDART_INF_F;
    }

    /* From the larger of the two masses and the shortfall of the other, so that close ones do not
     * cancel. */
    static __device__ __forceinline__ element_result mixture(const element_numbers &at, float x,
                                                             float y, check &c) {
        bool p_larger = x >= y;
        float top = fmaxf(x, y), bottom = fminf(x, y), away = fabsf(x - y), away_low = 0.0f, part;
        if (PRECISE) { /* what the rounding of top - bottom left */
            float back = away - top;
            away_low = (top - (away - back)) - (bottom + back);
        }
        float less = shortfall<PRECISE>(away, away_low, part);
        c.spread += away;
        float larger = PRECISE ? exp_precise(top, 0.0f) : expf(top), smaller = larger * part;
        if (KIND == ELEMENT_TV) {
            float half = x == y ? 0.0f : 0.5f, p = p_larger ? larger : smaller;
            float q = p_larger ? smaller : larger;
            half = p_larger ? half : -half;
            return {-0.5f * larger * less, half * p, -half * q};
        }
        /* of the mixture, over the larger: the smaller's weight is w */
        float w = p_larger ? at.rest : at.share, v = p_larger ? at.share : at.rest;
        float w_low = p_larger ? at.rest_low : at.share_low;
        float v_low = p_larger ? at.share_low : at.rest_low;
        float m = fmaf(w, part, PRECISE ? v + fmaf(w_low, part, v_low) : v);
        float log_larger = log_ratio_from<PRECISE>(1.0f, m, -weighted<PRECISE>(w, w_low, less));
        float log_smaller = log_larger - away;
        if ((PRECISE || at.lopsided) && away < 80.0f)
            log_smaller = log_ratio_from<PRECISE>(part, m, weighted<PRECISE>(v, v_low, less));
        if (KIND == ELEMENT_SKEW) {
            float p = PRECISE ? exp_precise(x, 0.0f) : p_larger ? larger : smaller;
            float log_p = p_larger ? log_larger : log_smaller, y = reciprocal(m);
            float q_in_m = p_larger ? part : 1.0f, r = q_in_m * y;
            if (PRECISE)
                r = fmaf(fmaf(-r, m, q_in_m), y, r);
            r = weighted<PRECISE>(at.rest, at.rest_low, r);
            return {p * log_p, p * (log_p + r), -p * r};
        }
        float of_larger = larger * weighted<PRECISE>(v, v_low, log_larger);
        float of_smaller = smaller * weighted<PRECISE>(w, w_low, log_smaller);
        return {of_larger + of_smaller, p_larger ? of_larger : of_smaller,
                p_larger ? of_smaller : of_larger};
    }

    /* See the other form; with d = x - y: u = tanh(d / 2), and far from 0 the two terms are
     * 2 ln(2 / (1 + e^-|d|)) - 2 |d| / (1 + e^|d|). */
    static __device__ __forceinline__ float even_js(float x, float y, check &c) {
        float away = fabsf(x - y), w = away * away, part = expf(-away), sum = 1.0f + part;
        c.spread += away;
        /* over d^2, on |d| < 1.1: minimax, error 4e-8 */
        float series = fmaf(w, 2.85020924e-05f, -0.000359031081f);
        series = fmaf(series, w, 0.00346805854f);
        series = fmaf(series, w, -0.031249376f);
        series = fmaf(series, w, 0.249999985f);
        float inverse = reciprocal(sum);
        float far = fmaf(-2.0f * part * away, inverse, 1.38629436f * log2_fast(2.0f * inverse));
        return 0.25f * expf(fmaxf(x, y)) * sum * (w < 1.21f ? w * series : far);
    }

    /* FP32 gradients that are differences of two terms: in FP64. */
    static constexpr bool WIDE = PRECISE && (KIND == ELEMENT_KL_BOTH || KIND == ELEMENT_SKEW ||
                                             (KIND == ELEMENT_KL && (GRADIENTS & GRADIENT_P)));
    static __device__ __forceinline__ element_result wide(const element_numbers &at, float x,
                                                          float y, check &c) {
        double p = wide_exp2((double)x * LOG2_E), d = (double)x - (double)y;
        c.spread += fabsf(x - y);
        if (KIND == ELEMENT_KL)
            return {(float)(p * d), (float)fma(p, d, p), (float)-p};
        if (KIND == ELEMENT_SKEW) {
            mixture_terms<double> m = mixture_of(at.rule, d);
            double q_in_m = at.rule.rest * fma(at.rule.share, m.more, 1.0);
            return {(float)(p * m.log_p), (float)(p * (m.log_p + q_in_m)), (float)(-p * q_in_m)};
        }
        /* q - p from the larger of the two: where they are close all else cancels */
        double q = wide_exp2((double)y * LOG2_E), less = wide_one_minus_exp(fabs(d));
        double more = d < 0 ? q * less : -p * less, over = at.rule.of_p - at.rule.of_q;
        double a = at.rule.of_p, b = at.rule.of_q;
        return {(float)((a * p - b * q) * d), (float)(p * fma(a, d, over) - b * more),
                (float)(a * more - q * fma(b, d, over))};
    }

    static __device__ __forceinline__ element_result plain(const element_numbers &at, float x,
                                                           float y, check &c) {
        if (WIDE)
            return wide(at, x, y, c);
        if (KIND == ELEMENT_JS_EVEN)
            return {even_js(x, y, c), 0.0f, 0.0f};
        if (KIND == ELEMENT_SKEW || KIND == ELEMENT_JS || KIND == ELEMENT_TV)
            return mixture(at, x, y, c);
        float p = expf(x), d = x - y;
        if (KIND == ELEMENT_CROSS_ENTROPY)
            return {-p * y, -p * y, -p};
        if (KIND == ELEMENT_KL)
            return {p * d, p * (d + 1.0f), -p};
        float q = expf(y), less = p - q;
        if (GRADIENTS && fabsf(d) < 0.5f) /* p - q */
            less = p * fmaf(-d * d, term_series(d), d);
        float over = at.of_p - at.of_q;
        return {fmaf(at.of_p, p, -at.of_q * q) * d,
                fmaf(at.of_p * p, d, fmaf(over, p, at.of_q * less)),
                fmaf(-at.of_q * q, d, fmaf(-over, q, -at.of_p * less))};
    }

    static __device__ __forceinline__ double mass(float log) { /* one of +inf is none */
        return exp(log < CUDART_INF_F ? (double)log : CUDART_NAN);
    }
    static __device__ __forceinline__ any_element exact(float x, float y) {
        return {mass(x), mass(y), (double)x - (double)y, (double)y};
    }
};

/* One element with a zero, denormal, huge or impossible value; derivatives times g, before they are
 * rounded. */
template <class RULE, int KIND>
static __device__ __forceinline__ element_result careful(const element_numbers &at, float x,
                                                         float y) {
    any_rule rule = {at.rule, RULE::WANT, RULE::WANT, false};
    rule.rule.kind = KIND == ELEMENT_TV              ? KLD_RULE_TV
                     : KIND == ELEMENT_CROSS_ENTROPY ? KLD_RULE_CROSS_ENTROPY
                     : KIND >= ELEMENT_SKEW          ? KLD_RULE_MIXTURE
                                                     : KLD_RULE_KL;
    any_result r = any_apply(rule, RULE::exact(x, y));
    return {(float)r.value, (float)(at.g * r.of_p), (float)(at.g * r.of_q)};
}

#endif
