/* rules.h - the divergences: what one class adds to a row, and what it adds to the gradients.
 *
 * A rule gets blocks of p, q and d = ln p - ln q, whatever the forms of the tensors were, and
 * gives for each class f(p, q) and, for a side whose gradient is wanted, one of
 *     SLOPE   df/dx             the tensor holds x
 *     MOMENT  x df/dx           the tensor holds ln x; or logits under reduction none
 *     CENTRED x df/dx + c x     the tensor holds logits; c, any constant, has no influence: the
 *                               softmax takes it off again
 * Another divergence is another rule in rule_run(); nothing else knows them. Zeros: a term whose
 * own mass is 0 is 0 and so is its gradient, unless d says NaN. */
#ifndef KLD_KERNELS_CPU_RULES_H
#define KLD_KERNELS_CPU_RULES_H

#include "kernels/cpu/vector.h"

enum want { WANT_NOTHING, WANT_SLOPE, WANT_MOMENT, WANT_CENTRED };

struct rule_block {
    const double *mass[2], *d; /* q, p; ln p - ln q */
    double *term;
    double *derivative[2];
    enum want want[2];
    bool balanced; /* both sides sum to 1, so -p + q may be added to each term */
};

/* d - 1 + exp(-d) = d^2 (1/2 - d/6 + d^2/24 - ...) for |d| < 0.35. */
INLINE vd excess(vd d) {
    vd s = vd_of(1.0 / 87178291200.0); /* (-1)^n / n!, n from 14 down to 2 */
    s = s * d - 1.0 / 6227020800.0;
    s = s * d + 1.0 / 479001600.0;
    s = s * d - 1.0 / 39916800.0;
    s = s * d + 1.0 / 3628800.0;
    s = s * d - 1.0 / 362880.0;
    s = s * d + 1.0 / 40320.0;
    s = s * d - 1.0 / 5040.0;
    s = s * d + 1.0 / 720.0;
    s = s * d - 1.0 / 120.0;
    s = s * d + 1.0 / 24.0;
    s = s * d - 1.0 / 6.0;
    s = s * d + 0.5;
    return s * d * d;
}

INLINE vd kl_own_derivative(enum want want, vd own, vd d, vi64 empty) {
    vd value = want == WANT_SLOPE ? d + 1.0 : want == WANT_MOMENT ? own * (d + 1.0) : own * d;
    return vd_select(empty, vd_of(0), value);
}

INLINE vd kl_other_derivative(enum want want, vd own, vd other, vd d, vi64 empty) {
    vd value = want == WANT_SLOPE ? -own / other : -own;
    value = vd_select(empty, vd_of(0), value);
    return vd_select(d != d, d, value);
}

/* KL(own, other): sum of own (ln own - ln other). sign makes that difference of p's and q's d. */
INLINE void rule_kl(const struct rule_block *at, uint64_t m, int own_side, double sign) {
    int other_side = 1 - own_side;
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd own = vd_load(at->mass[own_side] + i), other = vd_load(at->mass[other_side] + i);
        vd d = sign * vd_load(at->d + i);
        vi64 empty = (own == 0.0) & (d == d);
        vd term = vd_select(empty, vd_of(0), own * d);
        if (at->balanced) {
            vi64 near = (d < 0.35) & (d > -0.35);
            term = vd_select(near, own * excess(d), term - own + other);
        }
        vd_store(at->term + i, term);
        if (at->want[own_side])
            vd_store(at->derivative[own_side] + i,
                     kl_own_derivative(at->want[own_side], own, d, empty));
        if (at->want[other_side])
            vd_store(at->derivative[other_side] + i,
                     kl_other_derivative(at->want[other_side], own, other, d, empty));
    }
}

static void rule_run(uint32_t divergence, const struct rule_block *at, uint64_t m) {
    switch (divergence) {
    case KLD_DIVERGENCE_REVERSE_KL: rule_kl(at, m, KLD_CPU_Q, -1.0); break;
    default: rule_kl(at, m, KLD_CPU_P, 1.0); break;
    }
}

#endif
