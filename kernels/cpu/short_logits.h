/* short_logits.h - short rows of logits of 16 and 32 bits: as short.h a row in each lane and in
 * double, but with exponentials that are no better than they need be, and one pass for masses, sums
 * and the terms of a KL; mixtures and tv take one more (short_rules.h). Rows that hold infinities
 * or NaN, or are as far apart that a mass would underflow, are left to short.h, but for classes
 * that are masked on both sides. Included once by
 * each kernel_*.c; runs on the threads of the team. What a row yields does not depend on its lane
 * or on the rows beside it.
 *
 * With a = e^((zq - max zq) / T), b the same of p, and e = ln(b / a), all comes of the larger of
 * the two and of |e|. Of their sums A and B and of D = B - A, KL(p, q) is
 * sum(b e - b + a) / B + D / B - ln(B / A); q - p is a D / (A B) - (b - a) / B; and p (ln p/q - KL)
 * is b / B (e - sum(b e) / B). Nothing cancels there that is not small against the largest of the
 * row: so what a mass is off by, 1e-9 of itself and the same for a and b, is off a result by little
 * more.
 *
 * A gradient is mine (q - p) + weight mass (h - mean h), the mean by the mass; h is e of a KL, ln q
 * but for a constant of a cross entropy. */
#ifndef KLD_KERNELS_CPU_SHORT_LOGITS_H
#define KLD_KERNELS_CPU_SHORT_LOGITS_H

#include "kernels/cpu/short_rules.h"

/* How far apart the logits of a row lie, in powers of two: here a mass must be a normal number. */
INLINE vi64 is_within(const struct short_rows *rows, vd max, vd min) {
    return (max - min) * (rows->work->inverse_temperature * LOG2E) <= RANGE_MOST / 2;
}

/* Classes that have no mass on either side, masked ones: what they hold becomes RANGE_MOST less
 * than the largest, so that the rest of the row decides whether it is for here. -> that; a largest
 * from which RANGE_MOST cannot be taken is not. */
static __attribute__((noinline)) vi64 short_logits_masked(struct short_rows *rows,
                                                          const struct short_sums *sums) {
    double unit = 1 / (rows->work->inverse_temperature * LOG2E);
    vd none[2], instead[2], min[2];
    vi64 within = ~(vi64){0};
    for (int side = 0; side < 2; side++) {
        none[side] = sums->max[side] - unit * MASS_LEAST;
        instead[side] = sums->max[side] - unit * RANGE_MOST;
        min[side] = sums->max[side];
    }
    for (uint64_t b = 0; b < rows->blocks; b++)
        for (uint64_t i = 0, m = short_entries(rows, b); i < m; i += DOUBLES) {
            double *to[2] = {rows->columns[b].raw[0] + i, rows->columns[b].raw[1] + i};
            vi64 masked = vd_load(to[0]) < none[0];
            masked &= vd_load(to[1]) < none[1];
            for (int side = 0; side < 2; side++) {
                vd z = vd_load(to[side]);
                min[side] = vd_min(vd_select(masked, sums->max[side], z), min[side]);
                vd_store(to[side], vd_select(masked, instead[side], z));
            }
        }
    for (int side = 0; side < 2; side++)
        within &=
            is_within(rows, sums->max[side], min[side]) & (vd_abs(sums->max[side]) < unit * 0x1p30);
    return within;
}

/* The largest logits, and which rows are for here. */
static void short_logits_range(struct short_rows *rows, struct short_sums *sums) {
    vd max[2], below[2]; /* below: less the least */
    for (int side = 0; side < 2; side++) {
        max[side] = vd_of(-INFINITY);
        below[side] = vd_of(-INFINITY);
    }
    for (uint64_t b = 0; b < rows->blocks; b++)
        for (uint64_t i = 0, m = short_entries(rows, b); i < m; i += DOUBLES)
            for (int side = 0; side < 2; side++) {
                vd z = vd_load(rows->columns[b].raw[side] + i);
                max[side] = vd_max(z, max[side]);
                below[side] = vd_max(-z, below[side]);
            }
    vd between = (max[KLD_CPU_P] - max[KLD_CPU_Q]) * rows->work->inverse_temperature;
    vi64 within = ~(vi64){0};
    sums->fine = (between >= -NEAR_SIDES) & (between <= NEAR_SIDES);
    for (int side = 0; side < 2; side++) {
        sums->max[side] = max[side];
        within &= is_within(rows, max[side], -below[side]);
    }
    if (vi32_any((vi32)(sums->fine & ~within)))
        within |= short_logits_masked(rows, sums);
    sums->fine &= within;
}

/* What the first pass adds up besides the masses. */
enum short_terms { SHORT_NOTHING, SHORT_KL_P, SHORT_KL_Q, SHORT_KL_BOTH, SHORT_CROSS_ENTROPY };

/* Masses, in their place h, or e, in that of the predictions and b - a in that of the targets. */
INLINE void short_logits_sums(struct short_rows *rows, enum short_terms terms,
                              struct short_sums *sums) {
    double inverse = rows->work->inverse_temperature, scale = inverse * LOG2E;
    vd zero = vd_of(0), mass = zero, lost = zero, apart = zero, term[2] = {zero, zero};
    vd top = sums->max[KLD_CPU_Q], between = sums->max[KLD_CPU_P] - top;
    for (uint64_t k = 0; k < rows->blocks; k++) {
        struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES) {
            vd zq = vd_load(at->raw[KLD_CPU_Q] + i), zp = vd_load(at->raw[KLD_CPU_P] + i);
            vd gap = (zp - zq) - between, e = gap * inverse, up = gap * scale;
            struct power x = power_of_two((zq - top) * scale + vd_max(up, zero), true);
            vd larger = x.unit + x.unit * (x.rest * (x.square * x.rest + LN_OF_2));
            struct apart y = apart_of(up, e);
            vd more = larger * y.less, smaller = larger * y.ratio;
            vd a = vd_if_negative(e, larger, smaller), b = vd_if_negative(e, smaller, larger);
            vd difference = vd_with_sign(more, e);
            if (terms == SHORT_CROSS_ENTROPY)
                add_exactly(&mass, &lost, a);
            else
                mass += a;
            apart += difference;
            /* n - less, and of the smaller mass less - n ratio */
            vd high = larger * y.excess, low = vd_fma(more, y.n, -high);
            if (terms == SHORT_KL_Q || terms == SHORT_KL_BOTH)
                term[KLD_CPU_Q] += vd_if_negative(e, high, low);
            if (terms == SHORT_KL_P || terms == SHORT_KL_BOTH)
                term[KLD_CPU_P] += vd_if_negative(e, low, high);
            if (terms == SHORT_CROSS_ENTROPY) {
                vd log_q = (zq - top) * inverse;
                term[KLD_CPU_P] = vd_fma(b, log_q, term[KLD_CPU_P]);
                vd_store(at->raw[KLD_CPU_Q] + i, log_q);
            } else {
                vd_store(at->raw[KLD_CPU_Q] + i, e);
            }
            vd_store(at->raw[KLD_CPU_P] + i, difference);
            vd_store(at->mass[KLD_CPU_Q] + i, a);
            vd_store(at->mass[KLD_CPU_P] + i, b);
        }
    }
    mass += lost;
    sums->mass[KLD_CPU_Q] = mass;
    sums->mass[KLD_CPU_P] = mass + apart;
    sums->apart = apart;
    sums->term[KLD_CPU_Q] = term[KLD_CPU_Q];
    sums->term[KLD_CPU_P] = term[KLD_CPU_P];
}

/* By the rule: a value, and the means of h. */
static vd short_logits_kl(const struct kld_rule *rule, struct short_sums *sums) {
    vd q = sums->mass[KLD_CPU_Q], p = sums->mass[KLD_CPU_P], zero = vd_of(0), value = zero;
    vd term_q = sums->term[KLD_CPU_Q], term_p = sums->term[KLD_CPU_P];
    vd log = short_sums_log(sums);
    if (rule->of_p != 0)
        value += rule->of_p * vd_max(term_p / p + (sums->apart / p - log), zero);
    if (rule->of_q != 0)
        value += rule->of_q * vd_max(term_q / q - (sums->apart / q - log), zero);
    sums->mean[KLD_CPU_Q] = (sums->apart - term_q) / q;
    sums->mean[KLD_CPU_P] = (sums->apart + term_p) / p;
    return value;
}

static vd short_logits_cross_entropy(struct short_sums *sums) {
    vd mean = sums->term[KLD_CPU_P] / sums->mass[KLD_CPU_P];
    sums->mean[KLD_CPU_Q] = sums->mean[KLD_CPU_P] = mean;
    return vd_log_ratio(sums->mass[KLD_CPU_Q], vd_of(1)) - mean;
}

/* What is still off the mean, which is rounded at its own size: in a row that is sure of its class
 * h less the mean is much smaller there. */
static vd short_logits_rest(const struct short_rows *rows, int side, int h,
                            const struct short_sums *sums) {
    vd rest = vd_of(0), mean = sums->mean[side];
    for (uint64_t k = 0; k < rows->blocks; k++) {
        const struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES)
            rest += vd_load(at->mass[side] + i) * (vd_load(at->raw[h] + i) - mean);
    }
    return rest / sums->mass[side];
}

/* The numbers of a gradient, and where its h is. */
struct short_gradient {
    double mine, weight;
    int h;
};

static struct short_gradient short_gradient_of(const struct kld_rule *rule, int side) {
    bool q = side == KLD_CPU_Q;
    switch (rule->kind) {
    case KLD_RULE_MIXTURE: return (struct short_gradient){0, 1, side};
    case KLD_RULE_TV: return (struct short_gradient){0, q ? -0.5 : 0.5, KLD_CPU_Q};
    case KLD_RULE_CROSS_ENTROPY: return (struct short_gradient){q, q ? 0 : -1, KLD_CPU_Q};
    default:
        return (struct short_gradient){q ? rule->of_p : -rule->of_q, q ? -rule->of_q : rule->of_p,
                                       KLD_CPU_Q};
    }
}

/* In the place of the masses. */
static void short_logits_gradient(struct short_rows *rows, int side,
                                  const struct short_sums *sums) {
    struct short_gradient of = short_gradient_of(&rows->work->rule, side);
    vd factor = rows->row.factor[side], mean = sums->mean[side], zero = vd_of(0);
    vd inverse_other = 1.0 / sums->mass[1 - side], weight = of.weight / sums->mass[side];
    vd apart = sums->apart / (sums->mass[KLD_CPU_Q] * sums->mass[KLD_CPU_P]);
    vd rest = of.weight != 0 ? short_logits_rest(rows, side, of.h, sums) : zero;
    for (uint64_t k = 0; k < rows->blocks; k++) {
        struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES) {
            vd own = vd_load(at->mass[side] + i), value = zero;
            if (of.mine != 0) {
                vd difference = vd_load(at->raw[KLD_CPU_P] + i) * inverse_other;
                value = of.mine * vd_fma(own, apart, -difference); /* q - p */
            }
            if (of.weight != 0) {
                vd h = (vd_load(at->raw[of.h] + i) - mean) - rest;
                value = vd_fma(own * weight, h, value);
            }
            vd_store(at->mass[side] + i, value * factor);
        }
    }
}

/* -> the values; besides, what gradients are made of. */
static vd short_logits_value(struct short_rows *rows, struct short_sums *sums) {
    const struct kld_rule *rule = &rows->work->rule;
    bool gradient = rows->work->gradient[0] || rows->work->gradient[1];
    switch (rule->kind) {
    case KLD_RULE_MIXTURE:
        short_logits_sums(rows, SHORT_NOTHING, sums);
        return short_mixture(rows, sums, gradient);
    case KLD_RULE_TV:
        short_logits_sums(rows, SHORT_NOTHING, sums);
        return short_tv(rows, sums, gradient);
    case KLD_RULE_CROSS_ENTROPY:
        short_logits_sums(rows, SHORT_CROSS_ENTROPY, sums);
        return short_logits_cross_entropy(sums);
    default: break;
    }
    if (rule->of_q == 0)
        short_logits_sums(rows, SHORT_KL_P, sums);
    else if (rule->of_p == 0)
        short_logits_sums(rows, SHORT_KL_Q, sums);
    else
        short_logits_sums(rows, SHORT_KL_BOTH, sums);
    return short_logits_kl(rule, sums);
}

/* -> which rows were done, a bit each; nothing is written of the others. */
static __attribute__((noinline)) uint32_t short_logits(const struct kld_cpu_work *work,
                                                       const struct kld_cpu_span *span,
                                                       uint64_t count, double *ret_value) {
    struct short_rows rows;
    struct short_sums sums;
    uint32_t done = 0;
    short_begin(&rows, work, span, count);
    short_logits_range(&rows, &sums);
    for (uint64_t r = 0; r < count; r++)
        done |= (uint32_t)(sums.fine[r] & 1) << r;
    if (done == 0)
        return 0;
    vd value = short_logits_value(&rows, &sums);
    vd whole = sums.mass[KLD_CPU_P] + sums.mass[KLD_CPU_Q] + value;
    sums.fine = whole < (double)INFINITY; /* no NaN among them */
    for (uint64_t r = 0; r < count; r++) {
        if (!sums.fine[r])
            done &= ~(1u << r);
        ret_value[r] = value[r];
    }
    for (int side = 0; side < 2; side++)
        if (work->gradient[side])
            short_logits_gradient(&rows, side, &sums);
    for (int side = 0; side < 2; side++)
        if (work->gradient[side])
            short_store(&rows, side, true, span, count, done);
    return done;
}

/* Rows that are not masked, DOUBLES of them at most; of any rule.
 * dots: a gradient needs a sum over its row first. */
static void short_rows(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                       uint64_t count, bool dots, double *ret_value) {
    struct kld_cpu_span left[DOUBLES];
    double value[DOUBLES];
    uint64_t from[DOUBLES], others = 0;
    uint32_t done = kld_cpu_short_logits_fit(work) ? short_logits(work, span, count, ret_value) : 0;
    for (uint64_t r = 0; r < count; r++)
        if (!(done >> r & 1)) {
            from[others] = r;
            left[others++] = span[r];
        }
    if (others == 0)
        return;
    short_any(work, left, others, dots, value);
    for (uint64_t k = 0; k < others; k++)
        ret_value[from[k]] = value[k];
}

#endif
