/* quick_value.h - the passes of quick.h over a piece of a row whose sums are known, without
 * gradients: what makes the ratio of the masses of a close row exact enough, the value of a mixture
 * and of tv. Included by the quick_*.c of each vector width. Heavy classes and wild blocks are done
 * in double. */
#ifndef KLD_KERNELS_CPU_QUICK_VALUE_H
#define KLD_KERNELS_CPU_QUICK_VALUE_H

#include "kernels/cpu/quick_classes.h"

/* ---- close rows -------------------------------------------------------------------------------
 */

INLINE double vd_top(vd x) {
    double top = x[0];
    for (int i = 1; i < DOUBLES; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

INLINE vd vd_abs(vd x) { return vd_select(x < 0.0, -x, x); }

static __attribute__((noinline)) void refine_in_double(const struct kld_cpu_quick *quick,
                                                       const struct kld_cpu_quick_row *row,
                                                       const float *const at[2], uint64_t count,
                                                       struct kld_cpu_partial *sums) {
    vd term[2] = {vd_of(0), vd_of(0)}, square[2] = {vd_of(0), vd_of(0)};
    vd difference = vd_of(0), mass = vd_of(0), largest = vd_of(0), most = vd_of(0);
    vd centre[2] = {vd_of(0), vd_of(0)}, furthest[2] = {vd_of(0), vd_of(0)};
    for (uint64_t i = 0; i < count; i += DOUBLES) {
        struct wide wide = wide_of(quick, row, at, i);
        vd less_q = wide.difference;
        difference += wide.difference;
        mass += wide.mass[KLD_CPU_Q];
        most = vd_max(vd_abs(wide.difference), most);
        for (int side = 0; side < 2; side++) {
            vd d = side == KLD_CPU_P ? wide.d : -wide.d, own = wide.mass[side];
            vd balance = side == KLD_CPU_P ? -less_q : less_q; /* other - own */
            vd product = vd_select(own == 0.0, vd_of(0), own * d);
            term[side] += vd_select(is_near(d), own * excess(d), product + balance);
            square[side] += vd_select(own == 0.0, vd_of(0), product * d);
            largest = vd_max(own, largest);
            vd from = side == KLD_CPU_P ? product : -product;
            from -= own * (row->near[side] * LN2);
            centre[side] += from;
            furthest[side] = vd_max(vd_abs(from), furthest[side]);
        }
    }
    sums->value += vd_total(term[KLD_CPU_P]);
    sums->dot[KLD_CPU_Q] += vd_total(term[KLD_CPU_Q]);
    sums->dot[KLD_CPU_P] += vd_total(difference);
    sums->sum[KLD_CPU_Q] += vd_total(mass);
    for (int side = 0; side < 2; side++) {
        sums->square[side] += vd_total(square[side]) / (LN2 * LN2);
        sums->centre[side] += vd_total(centre[side]) / LN2;
        sums->top[side] = fmax(sums->top[side], vd_top(furthest[side]) / LN2);
    }
    sums->max[KLD_CPU_Q] = fmax(sums->max[KLD_CPU_Q], vd_top(largest));
    sums->max[KLD_CPU_P] = fmax(sums->max[KLD_CPU_P], vd_top(most));
}

/* What a KL centres, d less about its mean, as it is made for the gradient: rounded at its own
 * size, not at that of d. */
struct balance {
    vf middle, middle_low; /* of the difference of the logits, base 2 */
    vd centre;
    vf some, unevenness, distance, furthest;
};

static struct balance balance_of(const struct kld_cpu_quick_row *row, int side) {
    double middle = row->apart + row->near[side];
    struct balance at = {.middle = vf_of((float)middle),
                         .middle_low = vf_of((float)(middle - (double)(float)middle))};
    return at;
}

INLINE void balance_add(struct balance *at, vf own, vf from) {
    from *= own;
    at->some += from;
    at->unevenness += from * from;
    at->distance += vf_abs(from);
    at->furthest = vf_max(vf_abs(from), at->furthest);
}

/* of_q, of_p: which of the balances there are. */
INLINE void refine_block(const struct constants *row, const struct pair *pair, bool of_q, bool of_p,
                         const struct balance start[2], struct kld_cpu_partial *sums) {
    const bool centred[2] = {of_q, of_p};
    struct balance balance[2] = {start[0], start[1]};
    vf term[2] = {{0}}, square[2] = {{0}}, difference = {0}, mass = {0}, squares = {0};
    vf largest = {0}, most = {0}, total = {0}, zero = {0};
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, row->norm, false, false);
        vf apart = at.larger * at.less, larger, smaller, low = at.larger * at.ratio;
        vf_excess(&at, vf_abs(at.d) * (float)LN2, &larger, &smaller);
        difference += vf_if_less(at.d, zero, -apart, apart);
        squares += apart * apart;
        total += apart;
        most = vf_max(apart, most);
        largest = vf_max(at.larger, largest);
        vf q = vf_if_less(at.d, zero, at.larger, low), p = vf_if_less(at.d, zero, low, at.larger);
        mass += q;
        square[KLD_CPU_Q] += q * at.d * at.d;
        square[KLD_CPU_P] += p * at.d * at.d;
        for (int side = 0; side < 2; side++) {
            struct balance *to = &balance[side];
            if (!centred[side])
                continue;
            balance_add(to, side == KLD_CPU_P ? p : q,
                        gap_from(row, pair, i, to->middle, to->middle_low));
            if ((i + FLOATS) % PIECE == 0) {
                to->centre += vd_halves(to->some);
                to->some = zero;
            }
        }
        term[KLD_CPU_Q] += at.larger * vf_if_less(at.d, zero, larger, smaller);
        term[KLD_CPU_P] += at.larger * vf_if_less(at.d, zero, smaller, larger);
    }
    sums->value += vf_total(term[KLD_CPU_P]);
    sums->dot[KLD_CPU_Q] += vf_total(term[KLD_CPU_Q]);
    sums->dot[KLD_CPU_P] += vf_total(difference);
    sums->sum[KLD_CPU_Q] += vf_total(mass);
    sums->sum[KLD_CPU_P] += vf_total(squares);
    sums->cross += vf_total(total);
    for (int side = 0; side < 2; side++)
        sums->square[side] += vf_total(square[side]);
    sums->max[KLD_CPU_Q] = fmax(sums->max[KLD_CPU_Q], (double)vf_top(largest));
    sums->max[KLD_CPU_P] = fmax(sums->max[KLD_CPU_P], (double)vf_top(most));
    for (int side = 0; side < 2; side++) {
        if (!centred[side])
            continue;
        const struct balance *at = &balance[side];
        sums->centre[side] += vd_total(at->centre + vd_halves(at->some));
        sums->unevenness[side] += vf_total(at->unevenness);
        sums->distance[side] += vf_total(at->distance);
        sums->top[side] = fmax(sums->top[side], (double)vf_top(at->furthest));
    }
}

static void refine_block_of(const struct constants *row, const struct pair *pair,
                            const bool centred[2], const struct balance balance[2],
                            struct kld_cpu_partial *sums) {
    if (centred[KLD_CPU_Q] && centred[KLD_CPU_P])
        refine_block(row, pair, true, true, balance, sums);
    else if (centred[KLD_CPU_Q])
        refine_block(row, pair, true, false, balance, sums);
    else if (centred[KLD_CPU_P])
        refine_block(row, pair, false, true, balance, sums);
    else
        refine_block(row, pair, false, false, balance, sums);
}

static void quick_refine(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                         const struct kld_cpu_span *span, struct kld_cpu_partial *ret_partial) {
    struct constants constants = constants_of(quick, row, 1);
    struct kld_cpu_quick_row against = *row; /* masses against the references */
    struct kld_cpu_partial sums = {0};
    struct pair pair;
    /* The centre, good to a part of the largest of a row's gradients: a class that holds most of a
     * side may have next to none. */
    bool exact = !quick->half && (quick->centred[0] || quick->centred[1]), centred[2];
    bool kl = quick->rule.kind == KLD_RULE_KL;
    const struct balance balance[2] = {balance_of(row, 0), balance_of(row, 1)};
    exact = exact && (!kl || row->exact);
    for (int side = 0; side < 2; side++)
        centred[side] = kl && !quick->half && quick->centred[side];
    constants.norm[KLD_CPU_Q] = 1;
    constants.norm[KLD_CPU_P] = row->ratio;
    for (int side = 0; side < 2; side++)
        against.log_mass[side] = row->reference[side] * LN2;
    against.log_mass[KLD_CPU_P] -= log((double)row->ratio);
    for (uint64_t k = 0; k < blocks_of(span); k++) {
        pair_load(quick, span, k, &pair);
        if (pair.wild || exact) {
            refine_in_double(quick, &against, pair.at, pair.count, &sums);
        } else if (is_heavy(&constants, &pair)) {
            struct apart apart;
            apart_of(quick, &constants, &pair, &apart);
            refine_block_of(&constants, &apart.light, centred, balance, &sums);
            refine_in_double(quick, &against, apart.at, apart.heavies.padded, &sums);
        } else {
            refine_block_of(&constants, &pair, centred, balance, &sums);
        }
    }
    *ret_partial = sums;
}

/* ---- mixtures and tv --------------------------------------------------------------------------
 */

static __attribute__((noinline)) void value_in_double(const struct kld_cpu_quick *quick,
                                                      const struct kld_cpu_quick_row *row,
                                                      const struct constants *constants,
                                                      const float *const at[2], uint64_t count,
                                                      struct kld_cpu_partial *sums) {
    vd value = vd_of(0), dot[2] = {vd_of(0), vd_of(0)}, square[2] = {vd_of(0), vd_of(0)};
    vd most[2] = {vd_of(0), vd_of(0)};
    const double of[2] = {quick->rule.of_q, quick->rule.of_p};
    for (uint64_t i = 0; i < count; i += DOUBLES) {
        struct wide wide = wide_of(quick, row, at, i);
        vd log[2], centred[2];
        wide_logs(quick, constants, &wide, log, centred);
        value -= constants->skew * wide.difference;
        for (int side = 0; side < 2; side++) {
            vd product = wide.mass[side] * centred[side];
            value += of[side] * wide.mass[side] * log[side];
            dot[side] += product;
            square[side] += product * centred[side];
            most[side] = vd_max(vd_abs(product), most[side]);
        }
    }
    sums->value += vd_total(value);
    for (int side = 0; side < 2; side++) {
        sums->max[side] = fmax(sums->max[side], vd_top(most[side]));
        sums->dot[side] += vd_total(dot[side]);
        sums->square[side] += vd_total(square[side]);
    }
}

/* ln(m / larger) <= 0, and m over the larger mass. */
INLINE vf log_of_mixture(const struct constants *row, const struct classes *at, vf *ret_sum) {
    vf low;
    *ret_sum = mixture_sum(row, at, &low);
    return vf_log(*ret_sum, low);
}

/* dots: a side is centred; close: terms whose sum cancels are of its size. */
INLINE void mixture_block(const struct kld_cpu_quick *quick, const struct constants *row,
                          const struct pair *pair, bool half, bool dots, bool close,
                          struct kld_cpu_partial *sums) {
    vf value[2] = {{0}}, dot[2] = {{0}}, square[2] = {{0}}, zero = vf_of(0);
    vf of_q = vf_of(row->of[0]), of_p = vf_of(row->of[1]), skew = vf_of((float)row->skew);
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, row->norm, half, false);
        vf d = vf_abs(at.d) * (float)LN2, sum, term;
        vf larger_of = vf_if_less(at.d, zero, of_q, of_p);
        vf smaller = vf_if_less(at.d, zero, of_p, of_q) * at.ratio;
        vf log = log_of_mixture(row, &at, &sum);
        vf apart = vf_if_less(at.d, zero, -at.less, at.less); /* p - q over the larger */
        term = -((larger_of + smaller) * log + smaller * d + skew * apart);
        if (close) { /* x ln(x/m) - x + m of either side */
            vf even[2], odd[2];
            vf_series(-log, &even[0], &odd[0]);
            vf_series(d + log, &even[1], &odd[1]);
            vf balanced = larger_of * (even[0] - odd[0]) + smaller * (even[1] + odd[1]);
            term = vf_if_less(d, vf_of(SERIES), balanced, term);
        }
        value[i / FLOATS % 2] += at.larger * term;
        for (int side = 0; dots && side < 2; side++) {
            if (!quick->centred[side])
                continue;
            vf own = side == KLD_CPU_P ? vf_if_less(at.d, zero, at.ratio, vf_of(1))
                                       : vf_if_less(at.d, zero, vf_of(1), at.ratio);
            vf down = side == KLD_CPU_P ? vf_if_less(at.d, zero, d, zero)
                                        : vf_if_less(at.d, zero, zero, d);
            vf h = row->of[side] * (-down - log) + (float)row->slope[side] * (apart / sum);
            vf product = at.larger * own * h;
            dot[side] += product;
            square[side] += product * h;
        }
    }
    sums->value += vf_total(value[0] + value[1]);
    for (int side = 0; dots && side < 2; side++) {
        sums->dot[side] += vf_total(dot[side]);
        sums->square[side] += vf_total(square[side]);
    }
}

/* The centres, from their pivots. Masses against the reference: what a norm in FP32 rounds off
 * would be off the same way for all classes but the heavy ones. */
static void pivot_block(const struct kld_cpu_quick *quick, const struct constants *row,
                        const struct pair *pair, struct kld_cpu_partial *sums) {
    for (int side = 0; side < 2; side++) {
        vd dot = vd_of(0);
        vf square = {0}, most = {0};
        for (uint64_t from = 0; quick->centred[side] && from < pair->count; from += PIECE) {
            vf dots = {0};
            uint64_t end = from + PIECE < pair->count ? from + PIECE : pair->count;
            for (uint64_t i = from; i < end; i += FLOATS) {
                vf log = pivot_log(row, pair, i, side);
                vf product = own_mass(row, pair, i, side, false) * log;
                dots += product;
                square += product * log;
                most = vf_max(vf_abs(product), most);
            }
            dot += vd_halves(dots);
        }
        double of = row->pivot[side].of, norm = row->norm_wide[side];
        sums->max[side] = fmax(sums->max[side], norm * of * (double)vf_top(most));
        sums->square[side] += norm * of * of * vf_total(square);
        sums->dot[side] -= norm * of * vd_total(dot);
    }
}

static void mixture_block_of(const struct kld_cpu_quick *quick, const struct constants *row,
                             const struct pair *pair, bool close, struct kld_cpu_partial *sums) {
    bool dots = quick->half && (quick->centred[0] || quick->centred[1]);
    if (quick->pivoted)
        pivot_block(quick, row, pair, sums);
    if (close)
        mixture_block(quick, row, pair, false, dots, true, sums);
    else if (quick->half && dots)
        mixture_block(quick, row, pair, true, true, false, sums);
    else if (quick->half)
        mixture_block(quick, row, pair, true, false, false, sums);
    else
        mixture_block(quick, row, pair, false, false, false, sums);
}

static __attribute__((noinline)) void tv_in_double(const struct kld_cpu_quick *quick,
                                                   const struct kld_cpu_quick_row *row,
                                                   const float *const at[2], uint64_t count,
                                                   struct kld_cpu_partial *sums) {
    vd value = vd_of(0), mass[2][3] = {{{0}}};
    for (uint64_t i = 0; i < count; i += DOUBLES) {
        struct wide wide = wide_of(quick, row, at, i);
        value += vd_abs(wide.difference);
        for (int side = 0; side < 2; side++) {
            vd own = wide.mass[side], zero = vd_of(0);
            mass[side][0] += vd_select(wide.d < 0.0, own, zero);
            mass[side][1] += vd_select(wide.d == 0.0, own, zero);
            mass[side][2] += vd_select(wide.d > 0.0, own, zero);
        }
    }
    sums->value += vd_total(value) * 0.5;
    for (int side = 0; side < 2; side++) {
        sums->dot[side] += vd_total(mass[side][side == KLD_CPU_P ? 2 : 0]);
        sums->square[side] += vd_total(mass[side][1]);
        sums->sum[side] += vd_total(mass[side][side == KLD_CPU_P ? 0 : 2]);
    }
}

INLINE void tv_block(const struct constants *row, const struct pair *pair, bool half,
                     struct kld_cpu_partial *sums) {
    vf value = {0}, larger[2] = {{0}}, smaller[2] = {{0}}, same = {0}, zero = vf_of(0);
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, row->norm, half, false);
        vf low = at.larger * at.ratio;
        value += at.larger * at.less;
        larger[KLD_CPU_Q] += vf_if_less(at.d, zero, at.larger, zero);
        larger[KLD_CPU_P] += vf_if_less(zero, at.d, at.larger, zero);
        smaller[KLD_CPU_Q] += vf_if_less(zero, at.d, low, zero);
        smaller[KLD_CPU_P] += vf_if_less(at.d, zero, low, zero);
        same += vf_if_less(zero, vf_abs(at.d), zero, at.larger);
    }
    sums->value += vf_total(value) * 0.5;
    for (int side = 0; side < 2; side++) {
        sums->dot[side] += vf_total(larger[side]);
        sums->sum[side] += vf_total(smaller[side]);
        sums->square[side] += vf_total(same);
    }
}

static void tv_block_of(const struct kld_cpu_quick *quick, const struct constants *row,
                        const struct pair *pair, bool close, struct kld_cpu_partial *sums) {
    if (quick->half && !close)
        tv_block(row, pair, true, sums);
    else
        tv_block(row, pair, false, sums);
}

static void value_of(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                     const struct constants *constants, const float *const at[2], uint64_t count,
                     struct kld_cpu_partial *sums) {
    if (quick->rule.kind == KLD_RULE_TV)
        tv_in_double(quick, row, at, count, sums);
    else
        value_in_double(quick, row, constants, at, count, sums);
}

static void value_block(const struct kld_cpu_quick *quick, const struct constants *row,
                        const struct pair *pair, bool close, struct kld_cpu_partial *sums) {
    if (quick->rule.kind == KLD_RULE_TV)
        tv_block_of(quick, row, pair, close, sums);
    else
        mixture_block_of(quick, row, pair, close, sums);
}

static void quick_value(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                        const struct kld_cpu_span *span, struct kld_cpu_partial *ret_partial) {
    struct constants constants = constants_of(quick, row, 1);
    struct kld_cpu_partial sums = {0};
    struct pair pair;
    bool tv = quick->rule.kind == KLD_RULE_TV;
    /* Centres in FP32 are too little for gradients of FP32, but from a pivot. */
    bool centred = !quick->half && (quick->centred[0] || quick->centred[1]);
    bool exact = quick->pivoted ? row->exact : centred;
    for (uint64_t k = 0; k < blocks_of(span); k++) {
        pair_load(quick, span, k, &pair);
        if (pair.wild || (exact && !tv)) {
            value_of(quick, row, &constants, pair.at, pair.count, &sums);
        } else if (is_heavy(&constants, &pair)) {
            struct apart apart;
            apart_of(quick, &constants, &pair, &apart);
            value_block(quick, &constants, &apart.light, row->close, &sums);
            value_of(quick, row, &constants, apart.at, apart.heavies.padded, &sums);
        } else {
            value_block(quick, &constants, &pair, row->close, &sums);
        }
    }
    *ret_partial = sums;
}

#endif
