/* quick_classes.h - what the passes of quick.h after the scan share: the numbers of a row as
 * vectors, and a vector of classes' masses and differences of logarithms, in FP32 and in double.
 * Included by the quick_*.c of each vector width; static and pure.
 *
 * From d, the difference of the logarithms, come 1 - e^-|d| and the larger of the two masses: their
 * product is the difference of the masses, and nothing cancels. */
#ifndef KLD_KERNELS_CPU_QUICK_CLASSES_H
#define KLD_KERNELS_CPU_QUICK_CLASSES_H

#include "kernels/cpu/quick_scan.h"

/* What a row's vectors need. */
struct constants {
    vf scale, scale_low;
    bool coarse; /* there is no low part */
    vi32 origin[2];
    vf whole, rest;      /* row.apart */
    vf apart, apart_low; /* the same, for FP32 logits */
    float norm[2];       /* over the sum; for gradients times the factor */
    double norm_wide[2]; /* the same */
    float of[2];         /* the rule's weights */
    float share[2];      /* of q and of p in the mixture */
    float share_low[2];
    double skew;      /* of p - q in a mixture's terms */
    double slope[2];  /* of (p - q) / m in its gradients */
    double heavy[2];  /* logits above these are for double */
    double height[2]; /* what is centred is counted from these */
    struct pivot {
        vf middle, middle_low; /* of the difference of the logits, base 2, at the pivot */
        vf whole, rest;        /* the same, its nearest integer apart */
        double of;
        float weight, weight_low, lack;
    } pivot[2];
};

static struct pivot pivot_of(const struct kld_cpu_quick_row *row, int side, double *ret_height) {
    const struct kld_cpu_quick_pivot *from = &row->pivot[side];
    double by = from->at / LN2, middle = row->apart + (side == KLD_CPU_P ? by : -by);
    struct pivot pivot = {
        .middle = vf_of((float)middle),
        .middle_low = vf_of((float)(middle - (double)(float)middle)),
        .whole = vf_of((float)rint(middle)),
        .rest = vf_of((float)(middle - rint(middle))),
        .of = from->of,
        .weight = (float)from->weight,
        .weight_low = (float)(from->weight - (double)(float)from->weight),
        .lack = (float)from->lack,
    };
    *ret_height = from->height;
    return pivot;
}

static struct constants constants_of(const struct kld_cpu_quick *quick,
                                     const struct kld_cpu_quick_row *row, double factor) {
    const struct kld_rule *rule = &quick->rule;
    double skew = rule->of_p * rule->rest - rule->of_q * rule->share;
    if (rule->of_p == rule->share && rule->of_q == rule->rest)
        skew = 0; /* js; a fused multiply-add would leave the rounding of one product */
    struct constants at = {
        .scale = vf_of(quick->scale),
        .scale_low = vf_of(quick->scale_low),
        .coarse = quick->coarse,
        .of = {(float)rule->of_q, (float)rule->of_p},
        .share = {(float)rule->rest, (float)rule->share},
        .skew = skew,
        .slope = {-skew * rule->rest, -skew * rule->share},
    };
    double whole = rint(row->apart);
    at.whole = vf_of((float)whole);
    at.rest = vf_of((float)(row->apart - whole));
    at.apart = vf_of((float)row->apart);
    at.apart_low = vf_of((float)(row->apart - (double)(float)row->apart));
    for (int side = 0; side < 2; side++) {
        at.share_low[side] = (float)((side ? rule->share : rule->rest) - (double)at.share[side]);
        at.origin[side] = origin_of(row->reference[side]);
        at.norm_wide[side] = row->inverse_mass[side] * factor;
        at.norm[side] = (float)at.norm_wide[side];
        at.heavy[side] = (row->log_mass[side] + log(HEAVY)) / quick->inverse_temperature;
        at.height[side] = 0;
        if (quick->pivoted)
            at.pivot[side] = pivot_of(row, side, &at.height[side]);
    }
    return at;
}

INLINE bool is_heavy(const struct constants *row, const struct pair *pair) {
    return pair->top[0] > row->heavy[0] || pair->top[1] > row->heavy[1];
}

/* A block with its heavy classes aside. */
struct apart {
    struct pair light;
    struct heavies heavies;
    const float *at[2]; /* heavies.z */
};

static void apart_of(const struct kld_cpu_quick *quick, const struct constants *row,
                     const struct pair *pair, struct apart *ret_apart) {
    heavies_of(pair, row->heavy, &ret_apart->heavies);
    pair_without(quick, pair, &ret_apart->heavies, &ret_apart->light);
    for (int side = 0; side < 2; side++)
        ret_apart->at[side] = ret_apart->heavies.z[side];
}

/* zp - zq, exactly. */
struct gap {
    vf high, low;
};

INLINE struct gap gap_of(const struct pair *pair, uint64_t i) {
    vf zq = *(const vf_any *)(pair->at[KLD_CPU_Q] + i);
    vf zp = *(const vf_any *)(pair->at[KLD_CPU_P] + i);
    struct gap gap = {.high = zp - zq};
    vf back = gap.high + zq;
    gap.low = (zp - back) - (zq - (back - gap.high));
    return gap;
}

/* zp - zq by the scale, less a number of two parts. */
INLINE vf gap_from(const struct constants *row, const struct pair *pair, uint64_t i, vf middle,
                   vf middle_low) {
    struct gap gap = gap_of(pair, i);
    vf low = vf_fma(gap.low, row->scale, -middle_low);
    return vf_fma(gap.high, row->scale, -middle) + vf_fma(gap.high, row->scale_low, low);
}

/* A vector of classes. */
struct classes {
    struct parts t[2];
    vf d;           /* base 2 */
    vf larger;      /* mass, times norm */
    vf ratio;       /* of the smaller to the larger: e^-|d| */
    vf less;        /* 1 - ratio, to the last bits */
    vf unit, power; /* ratio = unit + unit power */
};

/* half: the logits have 16 bits and the row is not close; brief: the results have 16 bits. */
INLINE struct classes classes_of(const struct constants *row, const struct pair *pair, uint64_t i,
                                 const float norm[2], bool half, bool brief) {
    struct classes at;
    for (int side = 0; side < 2; side++)
        at.t[side] = parts_of(*(const vf_any *)(pair->at[side] + i), row->scale, row->scale_low,
                              half && row->coarse);
    struct parts q = at.t[KLD_CPU_Q], p = at.t[KLD_CPU_P];
    /* FP32 logits may agree where the row's sums do not: what zp - zq rounds off counts there. */
    if (half) {
        at.d = ((p.whole - q.whole) - row->whole) + ((p.rest - q.rest) - row->rest);
    } else {
        at.d = gap_from(row, pair, i, row->apart, row->apart_low);
    }
    vf zero = vf_of(0);
    vf above_q = (vf)((vu32)q.bits - (vu32)row->origin[KLD_CPU_Q]);
    vf above_p = (vf)((vu32)p.bits - (vu32)row->origin[KLD_CPU_P]);
    vi32 above = (vi32)vf_if_less(at.d, zero, above_q, above_p);
    vf power = (vf)(vi32_positive(above) << 23);
    vf rest = vf_if_less(at.d, zero, q.rest, p.rest);
    vf own = vf_if_less(at.d, zero, vf_of(norm[KLD_CPU_Q]), vf_of(norm[KLD_CPU_P]));
    at.larger = (power * vf_power_less_one(rest, brief) + power) * own;
    vf down = (vf)((vu32)at.d | 0x80000000u);
    vf shifted = down + SHIFTER;
    at.power = vf_power_less_one(down - (shifted - SHIFTER), brief);
    at.unit = power_of_whole((vi32)shifted, origin_of(0));
    at.ratio = at.unit * at.power + at.unit;
    at.less = vf_fma(-at.unit, at.power, 1.0f - at.unit);
    return at;
}

/* m over the larger mass, which is 1 less the smaller's share of the difference, and what that
 * rounds off. */
INLINE vf mixture_sum(const struct constants *row, const struct classes *at, vf *ret_low) {
    vf zero = vf_of(0), one = vf_of(1), rest = 1.0f - at->unit;
    vf share = vf_if_less(at->d, zero, vf_of(row->share[1]), vf_of(row->share[0]));
    vf share_low = vf_if_less(at->d, zero, vf_of(row->share_low[1]), vf_of(row->share_low[0]));
    vf taken = vf_fma(share, rest, zero), whole = one - taken, scaled = share * at->unit;
    vf sum = vf_fma(scaled, at->power, whole);
    *ret_low = vf_fma(scaled, at->power, whole - sum) + ((one - whole) - taken) -
               vf_fma(share, rest, -taken) - share_low * at->less +
               share * (at->unit - (one - rest));
    return sum;
}

/* The difference of the logits less the pivot, whole + rest, |rest| <= 1/2: near the pivot good to
 * a part of itself, far from it to 1e-7, as what an exponential is of must be. */
INLINE vf pivot_distance(const struct constants *row, const struct pivot *at,
                         const struct pair *pair, uint64_t i, vf *ret_rest) {
    struct gap gap = gap_of(pair, i);
    vf low = vf_fma(gap.high, row->scale_low, gap.low * row->scale);
    vf near = vf_fma(gap.high, row->scale, -at->middle) + (low - at->middle_low);
    vf whole = vf_fma(gap.high, row->scale, vf_of(SHIFTER)) - SHIFTER;
    vf rest = (vf_fma(gap.high, row->scale, -whole) - at->rest) + low, limit = vf_of(1.5f);
    vi32 is_near = vf_abs(near) < limit;
    whole = vf_select(is_near, vf_of(0), whole - at->whole);
    rest = vf_select(is_near, near, rest);
    vf more = (rest + SHIFTER) - SHIFTER;
    *ret_rest = rest - more;
    return whole + more;
}

/* What is centred of a side of js, less what it is at the pivot, over -of; some 2 units in the last
 * place. Beyond 2^115 the logarithm goes on as a straight line. */
INLINE vf pivot_log(const struct constants *row, const struct pair *pair, uint64_t i, int side) {
    const struct pivot *at = &row->pivot[side];
    vf most = vf_of(115), rest, whole = pivot_distance(row, at, pair, i, &rest);
    rest = side == KLD_CPU_P ? -rest : rest;
    whole = side == KLD_CPU_P ? -whole : whole;
    vf kept = vf_min(vf_max(whole, -most), most);
    vf unit = power_of_whole((vi32)(kept + SHIFTER), origin_of(0));
    vf power = vf_power_less_one(rest, false);
    vf less = vf_fma(unit, power, unit - 1.0f), weight = vf_of(at->weight), half = vf_of(-0.5f);
    vf s = vf_fma(weight, less, at->weight_low * less), one = vf_of(1);
    vf low = vf_fma(weight, vf_fma(unit, power, unit), vf_of(at->lack));
    vf mean = vf_if_less(s, half, low, one + s);
    /* The mean is 2^n (1 + f) with f in [-1/4, 1/2). */
    vi32 n = (vi32)((vu32)mean - 0x3f400000u) & (vi32)(0xff800000u + (vu32){0});
    vf scale = (vf)(0x3f800000u - (vu32)n);
    vf f = vf_if_less(s, half, vf_fma(mean, scale, -one), vf_fma(s, scale, scale - 1.0f));
    vf z = vf_fma(vf_of(0.0461981446f), f, vf_of(-0.105925903f)); /* (f - ln(1 + f)) / f^2 */
    z = vf_fma(z, f, vf_of(0.131938815f));
    z = vf_fma(z, f, vf_of(-0.144681066f));
    z = vf_fma(z, f, vf_of(0.16642867f));
    z = vf_fma(z, f, vf_of(-0.199909627f));
    z = vf_fma(z, f, vf_of(0.250002325f));
    z = vf_fma(z, f, vf_of(-0.333334535f));
    z = vf_fma(z, f, vf_of(0.5f));
    z = vf_fma(f * f, -z, f);
    vf log = vf_fma(__builtin_convertvector(n >> 23, vf), vf_of((float)LN2), z);
    return log + vf_max(whole - most, vf_of(0)) * (float)LN2;
}

/* The mass of one side, against the reference. */
INLINE vf own_mass(const struct constants *row, const struct pair *pair, uint64_t i, int side,
                   bool half) {
    vf z = *(const vf_any *)(pair->at[side] + i);
    struct parts t = parts_of(z, row->scale, row->scale_low, half && row->coarse);
    return mass_of(&t, row->origin[side], half);
}

/* The even and the odd terms of e^d - 1 - d, for 0 <= d < SERIES. */
#define SERIES 0.35f
INLINE void vf_series(vf d, vf *ret_even, vf *ret_odd) {
    vf z = d * d, even = vf_of(1.0f / 720), odd = vf_of(1.0f / 5040);
    even = (even * z + 1.0f / 24) * z + 0.5f;
    odd = (odd * z + 1.0f / 120) * z + 1.0f / 6;
    *ret_even = even * z;
    *ret_odd = odd * z * d;
}

/* What a class adds to a KL, x ln(x/y) - x + y, as parts of the larger mass: where x is the larger,
 * and where it is the smaller. d: |ln x/y|. */
INLINE void vf_excess(const struct classes *at, vf d, vf *ret_larger, vf *ret_smaller) {
    vf even, odd, near = vf_of(SERIES);
    vf_series(d, &even, &odd);
    *ret_larger = vf_if_less(d, near, even - odd, d - at->less);
    *ret_smaller = vf_if_less(d, near, at->ratio * (even + odd), at->less - at->ratio * d);
}

/* ---- in double --------------------------------------------------------------------------------
 */

struct wide {
    vd mass[2], d; /* natural */
    vd ratio;      /* of the smaller mass to the larger */
    vd difference; /* p - q, nothing cancels */
    vd log_q;
};

INLINE struct wide wide_of(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                           const float *const at[2], uint64_t i) {
    struct wide wide;
    vd log[2];
    for (int side = 0; side < 2; side++) {
        vd z = __builtin_convertvector(*(const vfh_any *)(at[side] + i), vd);
        log[side] = z * quick->inverse_temperature;
    }
    vd d = (log[KLD_CPU_P] - log[KLD_CPU_Q]) - row->apart * LN2;
    wide.d = vd_select(d != d, vd_of(0), d); /* two classes of no mass */
    wide.log_q = log[KLD_CPU_Q] - row->log_mass[KLD_CPU_Q];
    vi64 p_larger = wide.d > 0.0;
    vd larger = vd_exp(vd_select(p_larger, log[KLD_CPU_P] - row->log_mass[KLD_CPU_P], wide.log_q));
    wide.ratio = vd_exp(vd_select(p_larger, -wide.d, wide.d));
    vd smaller = larger * wide.ratio;
    wide.mass[KLD_CPU_P] = vd_select(p_larger, larger, smaller);
    wide.mass[KLD_CPU_Q] = vd_select(p_larger, smaller, larger);
    /* p (1 - e^-d) */
    wide.difference = vd_select(is_near(wide.d), wide.mass[KLD_CPU_P] * (wide.d - excess(wide.d)),
                                wide.mass[KLD_CPU_P] - wide.mass[KLD_CPU_Q]);
    return wide;
}

/* What gradients centre: ln(q/p) and ln(p/q), of a mixture ln(q/m) and ln(p/m) with what else the
 * rule has; of a side without mass: 0. Also those logarithms alone. */
INLINE void wide_logs(const struct kld_cpu_quick *quick, const struct constants *row,
                      const struct wide *wide, vd ret_log[2], vd ret_centred[2]) {
    const double of[2] = {quick->rule.of_q, quick->rule.of_p};
    ret_log[KLD_CPU_P] = wide->d;
    ret_log[KLD_CPU_Q] = -wide->d;
    for (int side = 0; side < 2; side++)
        ret_centred[side] = ret_log[side];
    if (quick->rule.kind == KLD_RULE_MIXTURE) {
        vd p = vd_of(quick->rule.share), q = vd_of(quick->rule.rest), zero = vd_of(0);
        vi64 p_larger = wide->d > 0.0;
        vd sum = vd_select(p_larger, p + q * wide->ratio, q + p * wide->ratio);
        vd log = vd_log_ratio(sum, vd_of(1));
        ret_log[KLD_CPU_P] = vd_select(p_larger, zero, wide->d) - log;
        ret_log[KLD_CPU_Q] = vd_select(p_larger, -wide->d, zero) - log;
        vd less = (1.0 - wide->ratio) / sum;
        less = vd_select(p_larger, less, -less); /* (p - q) / m */
        for (int side = 0; side < 2; side++)
            ret_centred[side] =
                ret_log[side] * of[side] + less * row->slope[side] - row->height[side];
    }
    for (int side = 0; side < 2; side++) {
        vi64 empty = wide->mass[side] == 0.0;
        ret_log[side] = vd_select(empty, vd_of(0), ret_log[side]);
        ret_centred[side] = vd_select(empty, vd_of(0), ret_centred[side]);
    }
}

#endif
