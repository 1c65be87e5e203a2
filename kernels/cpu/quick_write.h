/* quick_write.h - the gradients of quick.h over a piece of a row whose sums are known. Included by
 * the quick_*.c of each vector width. Heavy classes and wild blocks are done in double, and what
 * FP32 cannot centre well enough for gradients of FP32.
 *
 * Differences of the masses cancel nothing (quick_classes.h). What is centred, x (l - centre), is
 * made of l - centre in one piece where l is a difference of logits: their product with the scale
 * less one number that holds both the sums' ratio and the centre. */
#ifndef KLD_KERNELS_CPU_QUICK_WRITE_H
#define KLD_KERNELS_CPU_QUICK_WRITE_H

#include "kernels/cpu/quick_value.h"

enum quick_way {
    QUICK_DIFFERENCE, /* of the masses: the side in the denominator */
    QUICK_OWN,        /* the side that weighs a KL */
    QUICK_KL,         /* both in one, or both sides */
    QUICK_CROSS,      /* of a cross entropy the targets, too */
    QUICK_MIXTURE,
    QUICK_TV,
};

/* Besides constants: what is centred. */
struct centres {
    float weight[2]; /* of mass against the reference times what is centred */
    float norm[2];
    vf middle[2], middle_low[2]; /* where what is linear in the logits has its centre; base 2 */
    float centre[2];             /* of a mixture */
    float slope[2], level[2];    /* from a pivot: of the logarithm, and what is taken off */
    float step[2][3];            /* tv */
};

static struct centres centres_of(const struct kld_cpu_quick *quick,
                                 const struct kld_cpu_quick_row *row) {
    const struct kld_rule *rule = &quick->rule;
    const double of[2] = {rule->of_q, rule->of_p};
    struct centres at;
    memset(&at, 0, sizeof at);
    for (int side = 0; side < 2; side++) {
        double norm = row->inverse_mass[side] * row->factor, centre = row->centre[side] / LN2;
        double middle = side == KLD_CPU_P ? row->apart + centre : row->apart - centre;
        double weight = of[side] * LN2;
        if (rule->kind == KLD_RULE_CROSS_ENTROPY) {
            middle = row->log_mass[KLD_CPU_Q] / LN2 - centre;
            weight = -LN2;
        } else if (rule->kind == KLD_RULE_MIXTURE) {
        } else if (side == KLD_CPU_Q) {
            weight = -weight;
        }
        at.weight[side] = (float)(norm * weight);
        at.middle[side] = vf_of((float)middle);
        at.middle_low[side] = vf_of((float)(middle - (double)(float)middle));
        at.norm[side] = (float)norm;
        at.centre[side] = (float)row->centre[side];
        at.slope[side] = (float)(-norm * of[side]);
        at.level[side] = (float)(norm * row->centre[side]);
        for (int i = 0; i < 3; i++)
            at.step[side][i] = (float)(row->step[side][i] * norm);
    }
    return at;
}

/* ---- in double --------------------------------------------------------------------------------
 */

INLINE vd wide_gradient(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                        const struct constants *constants, const struct wide *wide, int side) {
    vd own = wide->mass[side], log[2], centred[2], zero = vd_of(0);
    vd difference = side == KLD_CPU_P ? wide->difference : -wide->difference;
    const double of[2] = {quick->rule.of_q, quick->rule.of_p}, *step = row->step[side];
    if (quick->rule.kind == KLD_RULE_CROSS_ENTROPY) {
        if (side == KLD_CPU_Q)
            return difference;
        return vd_select(own == 0.0, zero, own * (-wide->log_q - row->centre[side]));
    }
    if (quick->rule.kind == KLD_RULE_TV)
        return own * vd_select(wide->d < 0.0, vd_of(step[0]),
                               vd_select(wide->d > 0.0, vd_of(step[2]), vd_of(step[1])));
    wide_logs(quick, constants, wide, log, centred);
    vd value = own * (centred[side] - row->centre[side]);
    if (quick->rule.kind == KLD_RULE_MIXTURE)
        return value;
    return of[1 - side] * difference + (of[side] != 0 ? of[side] * value : zero);
}

static __attribute__((noinline)) void write_in_double(const struct kld_cpu_quick *quick,
                                                      const struct kld_cpu_quick_row *row,
                                                      const struct constants *constants,
                                                      const float *const at[2], uint64_t count,
                                                      float gradient[2][BLOCK]) {
    for (uint64_t i = 0; i < count; i += DOUBLES) {
        struct wide wide = wide_of(quick, row, at, i);
        for (int side = 0; side < 2; side++)
            if (quick->gradient[side])
                *(vfh *)(gradient[side] + i) = __builtin_convertvector(
                    wide_gradient(quick, row, constants, &wide, side) * row->factor, vfh);
    }
}

/* Over what FP32 made of them. */
static __attribute__((noinline)) void write_heavies(const struct kld_cpu_quick *quick,
                                                    const struct kld_cpu_quick_row *row,
                                                    const struct constants *constants,
                                                    const struct pair *pair,
                                                    float gradient[2][BLOCK]) {
    struct heavies heavies;
    float made[2][BLOCK] ALIGNED;
    heavies_of(pair, constants->heavy, &heavies);
    write_in_double(quick, row, constants, (const float *const[]){heavies.z[0], heavies.z[1]},
                    heavies.padded, made);
    for (int side = 0; side < 2; side++)
        for (uint64_t k = 0; quick->gradient[side] && k < heavies.count; k++)
            gradient[side][heavies.at[k]] = made[side][k];
}

/* ---- in FP32 ----------------------------------------------------------------------------------
 */

/* The difference of the masses of one side, q - p or p - q: the signs are in norm. */
INLINE void write_difference(const struct constants *row, const struct pair *pair, bool half,
                             const float norm[2], float *gradient) {
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, norm, half, half);
        *(vf *)(gradient + i) = at.larger * at.less;
    }
}

/* What is linear in the logits, less its centre. */
INLINE vf linear(const struct constants *row, const struct centres *centres,
                 const struct pair *pair, uint64_t i, int side, bool half) {
    if (half) {
        vf zq = *(const vf_any *)(pair->at[KLD_CPU_Q] + i);
        vf zp = *(const vf_any *)(pair->at[KLD_CPU_P] + i);
        vf gap = zp - zq, low = vf_fma(gap, row->scale_low, -centres->middle_low[side]);
        return vf_fma(gap, row->scale, -centres->middle[side]) + low;
    }
    return gap_from(row, pair, i, centres->middle[side], centres->middle_low[side]);
}

INLINE void write_own(const struct constants *row, const struct centres *centres,
                      const struct pair *pair, int side, bool half, float *gradient) {
    for (uint64_t i = 0; i < pair->count; i += FLOATS)
        *(vf *)(gradient + i) = own_mass(row, pair, i, side, half) * centres->weight[side] *
                                linear(row, centres, pair, i, side, half);
}

INLINE void write_kl(const struct constants *row, const struct centres *centres,
                     const struct pair *pair, const bool wanted[2], bool half,
                     float gradient[2][BLOCK]) {
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, row->norm, half, half);
        vf apart = at.larger * at.less, zero = vf_of(0);
        vf difference[2] = {vf_if_less(at.d, zero, apart, -apart),
                            vf_if_less(at.d, zero, -apart, apart)};
        for (int side = 0; side < 2; side++)
            if (wanted[side])
                *(vf *)(gradient[side] + i) = mass_of(&at.t[side], row->origin[side], half) *
                                                  centres->weight[side] *
                                                  linear(row, centres, pair, i, side, half) +
                                              row->of[1 - side] * difference[side];
    }
}

INLINE void write_cross(const struct constants *row, const struct centres *centres,
                        const struct pair *pair, const bool wanted[2], bool half,
                        float gradient[2][BLOCK]) {
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        vf zq = *(const vf_any *)(pair->at[KLD_CPU_Q] + i), zero = vf_of(0);
        vf log = vf_fma(zq, row->scale, -centres->middle[KLD_CPU_P]);
        if (!half || !row->coarse)
            log += vf_fma(zq, row->scale_low, -centres->middle_low[KLD_CPU_P]);
        *(vf *)(gradient[KLD_CPU_P] + i) =
            own_mass(row, pair, i, KLD_CPU_P, half) * centres->weight[KLD_CPU_P] * log;
        if (!wanted[KLD_CPU_Q])
            continue;
        struct classes at = classes_of(row, pair, i, row->norm, half, half);
        vf apart = at.larger * at.less;
        *(vf *)(gradient[KLD_CPU_Q] + i) = vf_if_less(at.d, zero, apart, -apart);
    }
}

INLINE void write_tv(const struct constants *row, const struct centres *centres,
                     const struct pair *pair, const bool wanted[2], bool half,
                     float gradient[2][BLOCK]) {
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        vf d = gap_from(row, pair, i, row->apart, row->apart_low), zero = vf_of(0);
        for (int side = 0; side < 2; side++) {
            const float *of = centres->step[side];
            vf step =
                vf_if_less(d, zero, vf_of(of[0]), vf_if_less(zero, d, vf_of(of[2]), vf_of(of[1])));
            if (wanted[side])
                *(vf *)(gradient[side] + i) = own_mass(row, pair, i, side, half) * step;
        }
    }
}

/* Of logits of 16 bits: what is centred takes too many roundings for FP32. */
INLINE void write_mixture(const struct constants *row, const struct centres *centres,
                          const struct pair *pair, const bool wanted[2], float gradient[2][BLOCK]) {
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        struct classes at = classes_of(row, pair, i, row->norm, true, false);
        vf zero = vf_of(0), d = at.d * (float)LN2, sum;
        vf log = log_of_mixture(row, &at, &sum);
        vf apart = vf_if_less(d, zero, -at.less, at.less) / sum;
        const vf logs[2] = {-vf_max(d, zero) - log, vf_min(d, zero) - log};
        for (int side = 0; side < 2; side++) {
            if (!wanted[side])
                continue;
            vf h = row->of[side] * logs[side] + (float)row->slope[side] * apart;
            vf mass = mass_of(&at.t[side], row->origin[side], false) * centres->norm[side];
            *(vf *)(gradient[side] + i) = mass * (h - centres->centre[side]);
        }
    }
}

/* And of FP32. */
INLINE void write_pivoted(const struct constants *row, const struct centres *centres,
                          const struct pair *pair, const bool wanted[2], float gradient[2][BLOCK]) {
    for (int side = 0; side < 2; side++)
        for (uint64_t i = 0; wanted[side] && i < pair->count; i += FLOATS)
            *(vf *)(gradient[side] + i) =
                own_mass(row, pair, i, side, false) * vf_fma(pivot_log(row, pair, i, side),
                                                             vf_of(centres->slope[side]),
                                                             vf_of(-centres->level[side]));
}

/* ---- which of them ----------------------------------------------------------------------------
 */

static enum quick_way way_of(const struct kld_cpu_quick *quick) {
    const struct kld_rule *rule = &quick->rule;
    switch (rule->kind) {
    case KLD_RULE_MIXTURE: return QUICK_MIXTURE;
    case KLD_RULE_TV: return QUICK_TV;
    case KLD_RULE_CROSS_ENTROPY: return quick->gradient[KLD_CPU_P] ? QUICK_CROSS : QUICK_DIFFERENCE;
    default: break;
    }
    bool single = rule->of_p + rule->of_q == 1 && (rule->of_p == 0 || rule->of_q == 0);
    int own = rule->of_p == 0 ? KLD_CPU_Q : KLD_CPU_P;
    if (!single || (quick->gradient[0] && quick->gradient[1]))
        return QUICK_KL;
    return quick->gradient[own] ? QUICK_OWN : QUICK_DIFFERENCE;
}

INLINE void write_block(const struct kld_cpu_quick *quick, const struct constants *row,
                        const struct centres *centres, const struct pair *pair, enum quick_way way,
                        bool half, float gradient[2][BLOCK]) {
    const bool *wanted = quick->gradient;
    int only = wanted[KLD_CPU_P] ? KLD_CPU_P : KLD_CPU_Q;
    const float norm[2] = {only == KLD_CPU_P ? -row->norm[0] : row->norm[0],
                           only == KLD_CPU_Q ? -row->norm[1] : row->norm[1]};
    switch (way) {
    case QUICK_DIFFERENCE: write_difference(row, pair, half, norm, gradient[only]); return;
    case QUICK_OWN: write_own(row, centres, pair, only, half, gradient[only]); return;
    case QUICK_KL: write_kl(row, centres, pair, wanted, half, gradient); return;
    case QUICK_CROSS: write_cross(row, centres, pair, wanted, half, gradient); return;
    case QUICK_TV: write_tv(row, centres, pair, wanted, half, gradient); return;
    default:
        if (quick->pivoted)
            write_pivoted(row, centres, pair, wanted, gradient);
        else
            write_mixture(row, centres, pair, wanted, gradient);
    }
}

/* From here on, in powers of 2, the difference of two logits of 16 bits, one of each side, is no
 * number of FP32 where it counts. */
#define FAR 64

static void write_block_of(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                           const struct constants *constants, const struct centres *centres,
                           const struct pair *pair, float gradient[2][BLOCK]) {
    enum quick_way way = way_of(quick);
    bool rough =
        way == QUICK_MIXTURE && (row->close || (quick->pivoted ? row->rough : !quick->half));
    bool far = fabs(row->apart) >= FAR;
    if (pair->wild || rough) {
        write_in_double(quick, row, constants, pair->at, pair->count, gradient);
        return;
    }
    if (quick->half && !row->close && !far)
        write_block(quick, constants, centres, pair, way, true, gradient);
    else
        write_block(quick, constants, centres, pair, way, false, gradient);
    if (is_heavy(constants, pair))
        write_heavies(quick, row, constants, pair, gradient);
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

static void quick_write(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                        const struct kld_cpu_span *span) {
    struct constants constants = constants_of(quick, row, row->factor);
    struct centres centres = centres_of(quick, row);
    float gradient[2][BLOCK] ALIGNED;
    struct pair pair;
    for (uint64_t k = 0; k < blocks_of(span); k++) {
        uint64_t n = pair_load(quick, span, k, &pair);
        write_block_of(quick, row, &constants, &centres, &pair, gradient);
        for (int side = 0; side < 2; side++)
            if (span->gradient[side])
                store_block(quick, side, gradient[side], n,
                            span->gradient[side] + k * BLOCK * element_bytes(quick->dtype[side]));
    }
    if (quick->streaming[0] || quick->streaming[1])
        _mm_sfence(); /* streaming stores are not ordered with those that report completion */
}

#endif
