/* rules.h - the four formulas of kernels/rule.h: what one class adds to a row, and what it adds to
 * the gradients.
 *
 * A rule gets blocks of p, q and d = ln p - ln q, whatever the forms of the tensors were, and
 * gives for each class f(p, q) and, for a side whose gradient is wanted, one of
 *     SLOPE   df/dx             the tensor holds x
 *     MOMENT  x df/dx           the tensor holds ln x; or logits under reduction none
 *     CENTRED x df/dx + c x     the tensor holds logits; c, any constant, has no influence: the
 *                               softmax takes it off again
 * Zeros: what a term gives whose own mass is 0 is 0, and so are its derivatives, unless d says NaN.
 * Own is the mass in front of a logarithm, other the mass below it. */
#ifndef KLD_KERNELS_CPU_RULES_H
#define KLD_KERNELS_CPU_RULES_H

#include "kernels/cpu/vector.h"

enum want { WANT_NOTHING, WANT_SLOPE, WANT_MOMENT, WANT_CENTRED };

struct rule_block {
    const double *mass[2]; /* q, p */
    const double *d;       /* ln p - ln q; of a cross entropy ln q */
    double *term;
    double *derivative[2];
    enum want want[2];
    bool balanced; /* both sides sum to 1, so -p + q may be added to each term */
};

/* ---- KL: of_p p d - of_q q d ------------------------------------------------------------------
 */

INLINE vd kl_own_derivative(enum want want, vd own, vd d, vi64 empty) {
    vd value = want == WANT_SLOPE ? d + 1.0 : want == WANT_MOMENT ? own * (d + 1.0) : own * d;
    return vd_select(empty, vd_of(0), value);
}

INLINE vd kl_other_derivative(enum want want, vd own, vd other, vd d, vi64 empty) {
    vd value = want == WANT_SLOPE ? -own / other : -own;
    value = vd_select(empty, vd_of(0), value);
    return vd_select(d != d, d, value);
}

/* x + weight y, or weight y where nothing is there yet. */
INLINE void put(double *to, vd value, double weight, bool more) {
    value = value * weight;
    vd_store(to, more ? vd_load(to) + value : value);
}

/* weight KL(own, other): sum of own (ln own - ln other). sign makes that difference of p's and
 * q's d. more: adds to what another has written. */
INLINE void rule_kl(const struct rule_block *at, uint64_t m, int own_side, double weight,
                    bool more) {
    int other_side = 1 - own_side;
    double sign = own_side == KLD_CPU_P ? 1 : -1;
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd own = vd_load(at->mass[own_side] + i), other = vd_load(at->mass[other_side] + i);
        vd d = sign * vd_load(at->d + i);
        vi64 empty = (own == 0.0) & (d == d);
        vd term = vd_select(empty, vd_of(0), own * d);
        if (at->balanced)
            term = vd_select(is_near(d), own * excess(d), term - own + other);
        put(at->term + i, term, weight, more);
        if (at->want[own_side])
            put(at->derivative[own_side] + i, kl_own_derivative(at->want[own_side], own, d, empty),
                weight, more);
        if (at->want[other_side])
            put(at->derivative[other_side] + i,
                kl_other_derivative(at->want[other_side], own, other, d, empty), weight, more);
    }
}

/* ---- MIXTURE: of_p p ln(p/m) + of_q q ln(q/m), m = share p + rest q ---------------------------
 */

struct mixture {
    vd log_p, log_q;   /* ln(p/m), ln(q/m) */
    vd part_p, part_q; /* p/m, q/m */
};

/* From d alone: nothing cancels where p and q agree, nothing is lost where both are tiny. With n =
 * |d|, and w the other's share of m, the larger mass is 1 / (1 + w (exp(-n) - 1)) of m. */
INLINE struct mixture mixture_of(vd d, double of_p, double of_q) {
    vi64 p_larger = d >= 0.0;
    vd n = vd_select(p_larger, d, -d), e = vd_exp(-n);
    vd own_share = vd_select(p_larger, vd_of(of_p), vd_of(of_q));
    vd rest = vd_select(p_larger, vd_of(of_q), vd_of(of_p));
    vd e1 = vd_select(n < NEAR, excess(n) - n, e - 1.0); /* exp(-n) - 1 */
    vd x = rest * e1, y = own_share + rest * e;
    vd larger = -vd_select(x > -0.3, log1p_near(x), vd_log_ratio(y, vd_of(1)));
    vd smaller = larger - n;
    if (of_p < KLD_RULE_SHARE_SMALL || of_q < KLD_RULE_SHARE_SMALL) {
        vd more = -own_share * e1 / e; /* m over the smaller, less 1 */
        smaller = vd_select(more < 0.3, -log1p_near(more), smaller);
    }
    struct mixture at = {
        vd_select(p_larger, larger, smaller),
        vd_select(p_larger, smaller, larger),
        vd_select(p_larger, 1.0 / y, e / y),
        vd_select(p_larger, e / y, 1.0 / y),
    };
    return at;
}

/* own ln(own/m), with balanced less own and m on top. */
INLINE vd mixture_term(bool balanced, vd own, vd log_own, vd m, vi64 empty) {
    vd term = vd_select(empty, vd_of(0), own * log_own);
    if (balanced)
        term = vd_select(is_near(log_own), own * excess(log_own), term - own + m);
    return term;
}

/* A side's derivative: of ln(own/m) from its own term, `cross` other/m from both terms, and where
 * its own mass is 0 only what the other term gives. */
INLINE vd mixture_derivative(enum want want, vd own, vd log_own, vd part_other, double weight,
                             double cross, double of_other, vi64 empty) {
    vd slope = vd_select(empty, of_other * part_other, weight * log_own + cross * part_other);
    return want == WANT_SLOPE ? slope : vd_select(empty, vd_of(0), own * slope);
}

INLINE void rule_mixture(const struct rule_block *at, const struct kld_rule *rule, uint64_t m) {
    double share = rule->share, rest = rule->rest;
    bool js = rule->of_p == share && rule->of_q == rest;
    double cross = js ? 0 : rule->of_p * rest - rule->of_q * share;
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd q = vd_load(at->mass[KLD_CPU_Q] + i), p = vd_load(at->mass[KLD_CPU_P] + i);
        vd d = vd_load(at->d + i), both = share * p + rest * q;
        vi64 empty_q = (q == 0.0) & (d == d), empty_p = (p == 0.0) & (d == d);
        struct mixture ratio = mixture_of(d, share, rest);
        vd term = vd_of(0);
        if (rule->of_p != 0)
            term = rule->of_p * mixture_term(at->balanced, p, ratio.log_p, both, empty_p);
        if (rule->of_q != 0)
            term += rule->of_q * mixture_term(at->balanced, q, ratio.log_q, both, empty_q);
        vd_store(at->term + i, term);
        vd part_q = vd_select(empty_q, vd_of(0), ratio.part_q);
        vd part_p = vd_select(empty_p, vd_of(0), ratio.part_p);
        if (at->want[KLD_CPU_P])
            vd_store(at->derivative[KLD_CPU_P] + i,
                     mixture_derivative(at->want[KLD_CPU_P], p, ratio.log_p, part_q, rule->of_p,
                                        cross, -rule->of_q * share, empty_p));
        if (at->want[KLD_CPU_Q])
            vd_store(at->derivative[KLD_CPU_Q] + i,
                     mixture_derivative(at->want[KLD_CPU_Q], q, ratio.log_q, part_p, rule->of_q,
                                        -cross, -rule->of_p * rest, empty_q));
    }
}

/* ---- TV: |p - q| / 2 --------------------------------------------------------------------------
 */

INLINE void rule_tv(const struct rule_block *at, uint64_t m) {
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd q = vd_load(at->mass[KLD_CPU_Q] + i), p = vd_load(at->mass[KLD_CPU_P] + i);
        vd d = vd_load(at->d + i), apart = vd_select(p > q, p - q, q - p);
        vd sign = vd_select(d > 0.0, vd_of(0.5), vd_of(-0.5));
        sign = vd_select(d == 0.0, vd_of(0), vd_select(d != d, d, sign));
        vd_store(at->term + i, vd_select(d != d, d, 0.5 * apart));
        if (at->want[KLD_CPU_P])
            vd_store(at->derivative[KLD_CPU_P] + i,
                     at->want[KLD_CPU_P] == WANT_SLOPE ? sign : p * sign);
        if (at->want[KLD_CPU_Q])
            vd_store(at->derivative[KLD_CPU_Q] + i,
                     at->want[KLD_CPU_Q] == WANT_SLOPE ? -sign : -q * sign);
    }
}

/* ---- CROSS_ENTROPY: -p ln q; d is ln q --------------------------------------------------------
 */

INLINE void rule_cross_entropy(const struct rule_block *at, uint64_t m) {
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd q = vd_load(at->mass[KLD_CPU_Q] + i), p = vd_load(at->mass[KLD_CPU_P] + i);
        /* A p that is no probability must show where ln q is fine. */
        vi64 wrong = ~((p >= 0.0) & (p < (double)INFINITY));
        vd log_q = vd_select(wrong, vd_of(NAN), vd_load(at->d + i));
        vi64 empty = (p == 0.0) & (log_q == log_q);
        vd term = vd_select(empty, vd_of(0), -p * log_q);
        vd_store(at->term + i, term);
        if (at->want[KLD_CPU_P])
            vd_store(at->derivative[KLD_CPU_P] + i,
                     at->want[KLD_CPU_P] == WANT_SLOPE ? vd_select(empty, vd_of(0), -log_q) : term);
        if (at->want[KLD_CPU_Q])
            vd_store(at->derivative[KLD_CPU_Q] + i,
                     kl_other_derivative(at->want[KLD_CPU_Q], p, q, log_q, empty));
    }
}

static inline void rule_run(const struct kld_rule *rule, const struct rule_block *at, uint64_t m) {
    switch (rule->kind) {
    case KLD_RULE_MIXTURE: rule_mixture(at, rule, m); return;
    case KLD_RULE_TV: rule_tv(at, m); return;
    case KLD_RULE_CROSS_ENTROPY: rule_cross_entropy(at, m); return;
    default:
        if (rule->of_p != 0)
            rule_kl(at, m, KLD_CPU_P, rule->of_p, false);
        if (rule->of_q != 0)
            rule_kl(at, m, KLD_CPU_Q, rule->of_q, rule->of_p != 0);
    }
}

#endif
