/* quick_write.h - the passes of quick.h over a piece of a row whose sums are known: the value of a
 * mixture, and gradients. Included by the quick_*.c of each vector width.
 *
 * From d, the difference of the logarithms, come 1 - e^-|d| and the larger of the two masses: their
 * product is the difference of the masses, and nothing cancels. Heavy classes and wild blocks are
 * done in double. */
#ifndef KLD_KERNELS_CPU_QUICK_WRITE_H
#define KLD_KERNELS_CPU_QUICK_WRITE_H

#include "kernels/cpu/quick_scan.h"

enum quick_way { QUICK_DIFFERENCE, QUICK_KL, QUICK_MIXTURE };

/* What a row's vectors need. */
struct constants {
    vf scale, scale_low;
    vi32 origin[2];
    vf whole, rest;      /* of the difference of the logarithms of the sums, p less q, base 2 */
    float norm[2];       /* over the sum; for gradients times the factor */
    float of[2];         /* the rule's weights */
    float share[2];      /* of q and of p in the mixture */
    vf apart, apart_low; /* whole + rest, for FP32 logits */
    float weight[2];     /* norm times of: of what is centred; 0: nothing is */
    float centre[2];
    double heavy[2]; /* logits above these are for double */
};

static struct constants constants_of(const struct kld_cpu_quick *quick,
                                     const struct kld_cpu_quick_row *row, double factor) {
    struct constants at = {
        .scale = vf_of(quick->scale),
        .scale_low = vf_of(quick->scale_low),
        .of = {(float)quick->rule.of_q, (float)quick->rule.of_p},
        .share = {(float)(1 - quick->rule.share), (float)quick->rule.share},
    };
    double difference = row->reference[KLD_CPU_P] - row->reference[KLD_CPU_Q];
    double rest = row->log2_mass[KLD_CPU_P] - row->log2_mass[KLD_CPU_Q];
    at.whole = vf_of((float)(difference + rint(rest)));
    at.rest = vf_of((float)(rest - rint(rest)));
    at.apart = vf_of((float)(difference + rest));
    at.apart_low = vf_of((float)(difference + rest - (double)(float)(difference + rest)));
    for (int side = 0; side < 2; side++) {
        at.origin[side] = origin_of(row->reference[side]);
        at.norm[side] = (float)(row->inverse_mass[side] * factor);
        at.heavy[side] = (row->log_mass[side] + log(HEAVY)) / quick->inverse_temperature;
        if (!quick->centred[side])
            continue;
        at.weight[side] = (float)(row->inverse_mass[side] * factor *
                                  (side == KLD_CPU_P ? quick->rule.of_p : quick->rule.of_q));
        at.centre[side] = (float)row->centre[side];
    }
    return at;
}

/* A vector of classes. */
struct classes {
    struct parts t[2];
    vf d;      /* base 2 */
    vf larger; /* mass, times norm */
    vf ratio;  /* of the smaller to the larger: e^-|d| */
    vf gap;    /* 1 - ratio, to the last bits */
};

/* half: the logits have 16 bits; brief: so have the results. */
INLINE struct classes classes_of(const struct constants *row, const struct pair *pair, uint64_t i,
                                 const float norm[2], bool half, bool brief) {
    struct classes at;
    for (int side = 0; side < 2; side++)
        at.t[side] =
            parts_of(*(const vf_any *)(pair->at[side] + i), row->scale, row->scale_low, half);
    struct parts q = at.t[KLD_CPU_Q], p = at.t[KLD_CPU_P];
    /* FP32 logits may agree where the row's sums do not: what zp - zq rounds off counts there. */
    if (half) {
        at.d = ((p.whole - q.whole) - row->whole) + ((p.rest - q.rest) - row->rest);
    } else {
        vf zq = *(const vf_any *)(pair->at[KLD_CPU_Q] + i),
           zp = *(const vf_any *)(pair->at[KLD_CPU_P] + i);
        vf dz = zp - zq, back = dz + zq, low = (zp - back) - (zq - (back - dz));
        at.d = (dz * row->scale - row->apart) +
               (dz * row->scale_low + (low * row->scale - row->apart_low));
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
    vf less = vf_power_less_one(down - (shifted - SHIFTER), brief);
    vf unit = power_of_whole((vi32)shifted, origin_of(0));
    at.ratio = unit * less + unit;
    at.gap = (1.0f - unit) - unit * less;
    return at;
}

/* The terms, and what gradients centre: ln(q/m) and ln(p/m), or without a mixture ln(q/p) and
 * ln(p/q). */
INLINE vf terms_of(const struct constants *row, const struct classes *at, bool brief,
                   enum quick_way way, vf ret_log[2]) {
    vf zero = vf_of(0), q = vf_of(row->of[KLD_CPU_Q]), p = vf_of(row->of[KLD_CPU_P]);
    vf d = at->d * (float)LN2;
    vf larger_of = vf_if_less(d, zero, q, p), smaller_of = vf_if_less(d, zero, p, q);
    vf smaller = smaller_of * at->ratio;
    if (way == QUICK_KL) {
        ret_log[KLD_CPU_P] = d;
        ret_log[KLD_CPU_Q] = -d;
        return at->larger * (larger_of - smaller) * vf_abs(d);
    }
    q = vf_of(row->share[KLD_CPU_Q]);
    p = vf_of(row->share[KLD_CPU_P]);
    vf larger_share = vf_if_less(d, zero, q, p), smaller_share = vf_if_less(d, zero, p, q);
    vf sum = smaller_share * at->ratio + larger_share;
    vf log = vf_log(sum, smaller_share * at->ratio - (sum - larger_share), brief);
    ret_log[KLD_CPU_Q] = -vf_max(d, zero) - log;
    ret_log[KLD_CPU_P] = vf_min(d, zero) - log;
    return -at->larger * ((larger_of + smaller) * log + smaller * vf_abs(d));
}

/* ---- in double --------------------------------------------------------------------------------
 */

struct wide {
    vd mass[2], d; /* natural */
};

INLINE struct wide wide_of(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                           const float *const at[2], uint64_t i) {
    struct wide wide;
    vd z[2];
    for (int side = 0; side < 2; side++) {
        z[side] = __builtin_convertvector(*(const vfh_any *)(at[side] + i), vd);
        wide.mass[side] = vd_exp(z[side] * quick->inverse_temperature - row->log_mass[side]);
    }
    wide.d = (z[KLD_CPU_P] - z[KLD_CPU_Q]) * quick->inverse_temperature -
             (row->log_mass[KLD_CPU_P] - row->log_mass[KLD_CPU_Q]);
    vi64 nothing = (wide.mass[0] == 0.0) & (wide.mass[1] == 0.0);
    wide.d = vd_select(nothing, vd_of(0), wide.d);
    return wide;
}

/* What gradients centre; of a side without mass: 0. */
INLINE void wide_logs(const struct kld_cpu_quick *quick, const struct wide *wide, vd ret_log[2]) {
    if (quick->rule.kind != KLD_RULE_MIXTURE) {
        ret_log[KLD_CPU_P] = vd_select(wide->mass[KLD_CPU_P] == 0.0, vd_of(0), wide->d);
        ret_log[KLD_CPU_Q] = vd_select(wide->mass[KLD_CPU_Q] == 0.0, vd_of(0), -wide->d);
        return;
    }
    vd ratio = vd_exp(vd_select(wide->d > 0.0, -wide->d, wide->d)), p = vd_of(quick->rule.share);
    vd q = 1.0 - p;
    vd sum = vd_select(wide->d > 0.0, p + q * ratio, q + p * ratio);
    vd log = vd_log_ratio(sum, vd_of(1));
    ret_log[KLD_CPU_Q] = vd_select(wide->d > 0.0, -wide->d, vd_of(0)) - log;
    ret_log[KLD_CPU_P] = vd_select(wide->d > 0.0, vd_of(0), wide->d) - log;
    for (int side = 0; side < 2; side++)
        ret_log[side] = vd_select(wide->mass[side] == 0.0, vd_of(0), ret_log[side]);
}

static __attribute__((noinline)) void value_in_double(const struct kld_cpu_quick *quick,
                                                      const struct kld_cpu_quick_row *row,
                                                      const float *const at[2],
                                                      struct kld_cpu_partial *sums) {
    vd value = vd_of(0), dot[2] = {vd_of(0), vd_of(0)}, square[2] = {vd_of(0), vd_of(0)};
    for (uint64_t i = 0; i < BLOCK; i += DOUBLES) {
        struct wide wide = wide_of(quick, row, at, i);
        vd log[2];
        wide_logs(quick, &wide, log);
        for (int side = 0; side < 2; side++) {
            vd product = wide.mass[side] * log[side];
            dot[side] += product;
            square[side] += product * log[side];
        }
    }
    /* 0 times an infinity would be no number. */
    if (quick->rule.of_q != 0)
        value += quick->rule.of_q * dot[KLD_CPU_Q];
    if (quick->rule.of_p != 0)
        value += quick->rule.of_p * dot[KLD_CPU_P];
    sums->value += vd_total(value);
    for (int side = 0; side < 2; side++) {
        sums->dot[side] += vd_total(dot[side]);
        sums->sum[side] += vd_total(square[side]);
    }
}

INLINE vd wide_gradient(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                        const struct wide *wide, enum quick_way way, int side) {
    vd own = wide->mass[side], difference = own - wide->mass[1 - side], log[2];
    const double of[2] = {quick->rule.of_q, quick->rule.of_p};
    if (way == QUICK_DIFFERENCE)
        return difference;
    wide_logs(quick, wide, log);
    vd value = vd_of(0);
    if (of[side] != 0)
        value = of[side] * own * (log[side] - row->centre[side]);
    return way == QUICK_KL ? of[1 - side] * difference + value : value;
}

static __attribute__((noinline)) void write_in_double(const struct kld_cpu_quick *quick,
                                                      const struct kld_cpu_quick_row *row,
                                                      const struct pair *pair, enum quick_way way,
                                                      float gradient[2][BLOCK]) {
    for (uint64_t i = 0; i < BLOCK; i += DOUBLES) {
        struct wide wide = wide_of(quick, row, pair->at, i);
        for (int side = 0; side < 2; side++)
            if (quick->gradient[side])
                *(vfh *)(gradient[side] + i) = __builtin_convertvector(
                    wide_gradient(quick, row, &wide, way, side) * row->factor, vfh);
    }
}

/* ---- in FP32 ----------------------------------------------------------------------------------
 */

/* dots: a side is centred. The norms' rounding to FP32 is kept out of its sums. */
INLINE void value_block(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                        const struct constants *constants, const struct pair *pair, bool half,
                        enum quick_way way, bool dots, struct kld_cpu_partial *sums) {
    vf value[2] = {{0}}, dot[2] = {{0}}, square[2] = {{0}};
    for (uint64_t i = 0; i < BLOCK; i += FLOATS) {
        struct classes at = classes_of(constants, pair, i, constants->norm, half, false);
        vf log[2];
        value[i / FLOATS % 2] += terms_of(constants, &at, false, way, log);
        for (int side = 0; side < 2; side++) {
            if (!dots || !quick->centred[side])
                continue;
            vf product = mass_of(&at.t[side], constants->origin[side], false) * log[side];
            dot[side] += product;
            square[side] += product * log[side];
        }
    }
    sums->value += vf_total(value[0] + value[1]);
    for (int side = 0; dots && side < 2; side++) {
        sums->dot[side] += vf_total(dot[side]) * row->inverse_mass[side];
        sums->sum[side] += vf_total(square[side]) * row->inverse_mass[side];
    }
}

INLINE bool is_heavy(const struct constants *row, const struct pair *pair) {
    return pair->top[0] > row->heavy[0] || pair->top[1] > row->heavy[1];
}

static void quick_value(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                        const struct kld_cpu_span *span, struct kld_cpu_partial *ret_partial) {
    struct constants constants = constants_of(quick, row, 1);
    struct kld_cpu_partial sums = {0};
    struct pair pair;
    bool mixture = quick->rule.kind == KLD_RULE_MIXTURE;
    bool dots = quick->centred[0] || quick->centred[1];
    for (uint64_t at = 0; at < span->count; at += BLOCK) {
        uint64_t left = span->count - at;
        pair_load(quick, span, at, left < BLOCK ? left : BLOCK, &pair);
        if (pair.wild || is_heavy(&constants, &pair) || (dots && !quick->half))
            value_in_double(quick, row, pair.at, &sums);
        else if (quick->half && !mixture)
            value_block(quick, row, &constants, &pair, true, QUICK_KL, true, &sums);
        else if (!mixture)
            value_block(quick, row, &constants, &pair, false, QUICK_KL, true, &sums);
        else if (quick->half && dots)
            value_block(quick, row, &constants, &pair, true, QUICK_MIXTURE, true, &sums);
        else if (quick->half)
            value_block(quick, row, &constants, &pair, true, QUICK_MIXTURE, false, &sums);
        else if (dots)
            value_block(quick, row, &constants, &pair, false, QUICK_MIXTURE, true, &sums);
        else
            value_block(quick, row, &constants, &pair, false, QUICK_MIXTURE, false, &sums);
    }
    *ret_partial = sums;
}

/* The difference of the masses of one side, q - p or p - q: the signs are in norm. */
INLINE void write_difference(const struct constants *row, const struct pair *pair, bool half,
                             const float norm[2], float *gradient) {
    for (uint64_t i = 0; i < BLOCK; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, norm, half, half);
        *(vf *)(gradient + i) = at.larger * at.gap;
    }
}

/* Of 16 bits only: the sum that is taken off leaves an error of FP32 behind, which against the
 * largest gradient of a row is too much for gradients of FP32. */
INLINE void write_block(const struct constants *row, const struct pair *pair, enum quick_way way,
                        const bool wanted[2], float gradient[2][BLOCK]) {
    for (uint64_t i = 0; i < BLOCK; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, row->norm, true, true);
        vf log[2], gap = at.larger * at.gap;
        gap = vf_if_less(at.d, vf_of(0), gap, -gap); /* q - p */
        terms_of(row, &at, true, way, log);
        for (int side = 0; side < 2; side++) {
            if (!wanted[side])
                continue;
            vf mass = mass_of(&at.t[side], row->origin[side], true) * row->weight[side];
            vf value = mass * (log[side] - row->centre[side]);
            if (way == QUICK_KL)
                value += row->of[1 - side] * (side == KLD_CPU_P ? -gap : gap);
            *(vf *)(gradient[side] + i) = value;
        }
    }
}

INLINE void store_block(const struct kld_cpu_quick *quick, int side, const float *from, uint64_t n,
                        unsigned char *to) {
    if (quick->streaming[side] && quick->dtype[side] == KLD_DTYPE_FP32 && n == BLOCK &&
        (uintptr_t)to % KLD_VECTOR_BYTES == 0)
        for (uint64_t i = 0; i < BLOCK; i += FLOATS)
            vf_store_streaming((float *)(void *)to + i, *(const vf *)(from + i));
    else
        block_store_floats(quick->dtype[side], from, n, to);
}

/* The way of a rule's gradients: where only the side in the denominator is asked for, they are a
 * difference. */
static enum quick_way way_of(const struct kld_cpu_quick *quick) {
    if (quick->rule.kind == KLD_RULE_MIXTURE)
        return QUICK_MIXTURE;
    if (quick->rule.kind == KLD_RULE_CROSS_ENTROPY)
        return QUICK_DIFFERENCE;
    int other = quick->rule.of_q == 0 ? KLD_CPU_Q : KLD_CPU_P;
    bool single = other == KLD_CPU_Q ? quick->rule.of_p == 1 : quick->rule.of_p == 0;
    return single && quick->rule.of_p + quick->rule.of_q == 1 && !quick->gradient[1 - other]
               ? QUICK_DIFFERENCE
               : QUICK_KL;
}

static void quick_write(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                        const struct kld_cpu_span *span) {
    struct constants constants = constants_of(quick, row, row->factor);
    float gradient[2][BLOCK] ALIGNED;
    struct pair pair;
    enum quick_way way = way_of(quick);
    int only = quick->gradient[KLD_CPU_P] ? KLD_CPU_P : KLD_CPU_Q;
    float norm[2] = {constants.norm[0], constants.norm[1]};
    norm[1 - only] = -norm[1 - only];
    const bool *wanted = quick->gradient;
    for (uint64_t at = 0; at < span->count; at += BLOCK) {
        uint64_t n = span->count - at < BLOCK ? span->count - at : BLOCK;
        pair_load(quick, span, at, n, &pair);
        bool centred_floats = way != QUICK_DIFFERENCE && !quick->half;
        if (pair.wild || centred_floats || is_heavy(&constants, &pair))
            write_in_double(quick, row, &pair, way, gradient);
        else if (way == QUICK_DIFFERENCE && quick->half)
            write_difference(&constants, &pair, true, norm, gradient[only]);
        else if (way == QUICK_DIFFERENCE)
            write_difference(&constants, &pair, false, norm, gradient[only]);
        else if (way == QUICK_MIXTURE)
            write_block(&constants, &pair, QUICK_MIXTURE, wanted, gradient);
        else
            write_block(&constants, &pair, QUICK_KL, wanted, gradient);
        for (int side = 0; side < 2; side++)
            if (span->gradient[side])
                store_block(quick, side, gradient[side], n,
                            span->gradient[side] + at * element_bytes(quick->dtype[side]));
    }
    if (quick->streaming[0] || quick->streaming[1])
        _mm_sfence(); /* streaming stores are not ordered with those that report completion */
}

#endif
