/* quick_scan.h - the first pass of quick.h over a piece of a row: references, sums of the masses,
 * and of mass times the difference of the logarithms. Included by the quick_*.c of each vector
 * width.
 *
 * The logarithm of the ratio of the two sums is needed to 1e-8, which exponentials in FP32 give
 * only where no class weighs much: the blocks of heavy classes are summed again without them, and
 * these in double; of a short row, all of such a block in double. */
#ifndef KLD_KERNELS_CPU_QUICK_SCAN_H
#define KLD_KERNELS_CPU_QUICK_SCAN_H

#include "kernels/cpu/quick_heavy.h"

#define SPAN_BLOCKS_MAX 64 /* their sums are kept at a time */

/* Classes whose sums are in FP32: those of many equal classes round the same way each time, and the
 * sums of the sides must not be apart by that. */
#define PIECE 64

/* Up to so many classes of a row, or behind its last whole piece: blocks with a heavy class are
 * summed in double as a whole. Equal logits round the same way, which shows in the gradients where
 * there are too few others to average it out. */
#define FEW 512

/* Sums of classes in double, of any logits, in whole vectors. max and value of *sums are given. */
static __attribute__((noinline)) void scan_in_double(const struct kld_cpu_quick *quick,
                                                     const float *const at[2], uint64_t count,
                                                     struct kld_cpu_partial *sums) {
    vd mass[2] = {vd_of(0), vd_of(0)}, dot[2] = {vd_of(0), vd_of(0)}, cross = vd_of(0);
    vd square[2] = {vd_of(0), vd_of(0)};
    bool cross_entropy = quick->rule.kind == KLD_RULE_CROSS_ENTROPY;
    double inverse = quick->inverse_temperature, scale = inverse / LN2;
    for (uint64_t i = 0; i < count; i += DOUBLES) {
        vd z[2], x[2];
        for (int side = 0; side < 2; side++) {
            z[side] = __builtin_convertvector(*(const vfh_any *)(at[side] + i), vd);
            x[side] = vd_exp(z[side] * inverse - sums->max[side] * LN2);
            mass[side] += x[side];
        }
        vd apart = (z[KLD_CPU_P] - z[KLD_CPU_Q]) * scale - (sums->max[1] - sums->max[0]);
        vd d = cross_entropy ? z[KLD_CPU_Q] * scale - sums->value : apart;
        for (int side = 0; side < 2; side++) {
            vd product = vd_select(x[side] == 0.0, vd_of(0), x[side] * d);
            dot[side] += product;
            square[side] += vd_select(x[side] == 0.0, vd_of(0), product * d);
        }
        cross += vd_select(x[KLD_CPU_P] == 0.0, vd_of(0), x[KLD_CPU_P] * apart);
    }
    for (int side = 0; side < 2; side++) {
        sums->sum[side] = vd_total(mass[side]);
        sums->dot[side] = vd_total(dot[side]);
        sums->square[side] = vd_total(square[side]);
    }
    sums->cross = vd_total(cross);
}

/* The same in FP32, of logits that are not wild; as much of it as the rule needs. both: the sums of
 * a KL weighed by either side. */
INLINE void scan_block(const struct kld_cpu_quick *quick, const struct pair *pair, bool half,
                       uint32_t kind, bool both, bool squares, struct kld_cpu_partial *sums) {
    vd mass[2] = {vd_of(0), vd_of(0)}, dot[2] = {vd_of(0), vd_of(0)};
    vf square[2][2] = {{{0}}}, cross[2] = {{0}};
    vf scale = vf_of(quick->scale), scale_low = vf_of(quick->scale_low);
    vi32 origin[2] = {origin_of(sums->max[0]), origin_of(sums->max[1])};
    vf offset = vf_of((float)sums->value), apart = vf_of((float)(sums->max[1] - sums->max[0]));
    for (uint64_t from = 0; from < pair->count; from += PIECE) {
        vf masses[2][2] = {{{0}}}, dots[2][2] = {{{0}}};
        uint64_t end = from + PIECE < pair->count ? from + PIECE : pair->count;
        for (uint64_t i = from; i < end; i += STEP)
            for (uint64_t j = 0; j < 2; j++) {
                struct parts t[2];
                vf x[2], d = {0};
                for (int side = 0; side < 2; side++) {
                    vf z = *(const vf_any *)(pair->at[side] + i + j * FLOATS);
                    t[side] = parts_of(z, scale, scale_low, half);
                    x[side] = mass_of(&t[side], origin[side], false);
                    masses[side][j] += x[side];
                }
                if (kind == KLD_RULE_MIXTURE)
                    continue;
                if (kind == KLD_RULE_KL || squares)
                    d = ((t[KLD_CPU_P].whole - t[KLD_CPU_Q].whole) - apart) +
                        (t[KLD_CPU_P].rest - t[KLD_CPU_Q].rest);
                if (kind == KLD_RULE_CROSS_ENTROPY) {
                    if (squares)
                        cross[j] += x[KLD_CPU_P] * d;
                    d = (t[KLD_CPU_Q].whole - offset) + t[KLD_CPU_Q].rest;
                }
                for (int side = both ? KLD_CPU_Q : KLD_CPU_P; side < 2; side++) {
                    dots[side][j] += x[side] * d;
                    if (squares)
                        square[side][j] += x[side] * d * d;
                }
            }
        for (int side = 0; side < 2; side++) {
            mass[side] += vd_halves(masses[side][0] + masses[side][1]);
            dot[side] += vd_halves(dots[side][0] + dots[side][1]);
        }
    }
    for (int side = 0; side < 2; side++) {
        sums->sum[side] = vd_total(mass[side]);
        sums->dot[side] = vd_total(dot[side]);
        sums->square[side] = squares ? vf_total(square[side][0] + square[side][1]) : 0;
    }
    sums->cross = squares ? vf_total(cross[0] + cross[1]) : 0;
}

INLINE void scan_block_of(const struct kld_cpu_quick *quick, const struct pair *pair, bool half,
                          struct kld_cpu_partial *sums) {
    switch (quick->rule.kind) {
    case KLD_RULE_KL:
        if (quick->squares)
            scan_block(quick, pair, half, KLD_RULE_KL, true, true, sums);
        else if (quick->rule.of_q != 0)
            scan_block(quick, pair, half, KLD_RULE_KL, true, false, sums);
        else
            scan_block(quick, pair, half, KLD_RULE_KL, false, false, sums);
        return;
    case KLD_RULE_CROSS_ENTROPY:
        if (quick->squares)
            scan_block(quick, pair, half, KLD_RULE_CROSS_ENTROPY, false, true, sums);
        else
            scan_block(quick, pair, half, KLD_RULE_CROSS_ENTROPY, false, false, sums);
        return;
    default:
        if (quick->pivoted)
            scan_block(quick, pair, half, KLD_RULE_KL, true, true, sums);
        else
            scan_block(quick, pair, half, KLD_RULE_MIXTURE, false, false, sums);
    }
}

static void scan_block_of_halves(const struct kld_cpu_quick *quick, const struct pair *pair,
                                 struct kld_cpu_partial *sums) {
    scan_block_of(quick, pair, true, sums);
}
static void scan_block_of_floats(const struct kld_cpu_quick *quick, const struct pair *pair,
                                 struct kld_cpu_partial *sums) {
    scan_block_of(quick, pair, false, sums);
}

static void scan_pair(const struct kld_cpu_quick *quick, const struct pair *pair,
                      struct kld_cpu_partial *sums) {
    if (pair->wild)
        scan_in_double(quick, pair->at, pair->count, sums);
    else if (quick->coarse)
        scan_block_of_halves(quick, pair, sums);
    else
        scan_block_of_floats(quick, pair, sums);
}

/* Once more, where it is known what is heavy. */
static void scan_apart(const struct kld_cpu_quick *quick, const struct pair *pair,
                       const double heavy[2], struct kld_cpu_partial *sums) {
    struct heavies heavies;
    struct pair light;
    struct kld_cpu_partial wide = *sums;
    heavies_of(pair, heavy, &heavies);
    pair_without(quick, pair, &heavies, &light);
    scan_pair(quick, &light, sums);
    scan_in_double(quick, (const float *const[]){heavies.z[0], heavies.z[1]}, heavies.padded,
                   &wide);
    kld_cpu_quick_add(sums, &wide);
}

/* References only grow, by whole numbers. A side without any mass so far keeps none. */
INLINE void scan_refer(const struct kld_cpu_quick *quick, const struct pair *pair,
                       double reference[2]) {
    for (int side = 0; side < 2; side++) {
        double top = pair->top[side], limit = (double)quick->limit;
        if (top > limit)
            top = limit;
        if (top > -limit) {
            double whole = rint(top * quick->inverse_temperature / LN2);
            if (whole > reference[side])
                reference[side] = whole;
        }
    }
}

/* As kld_cpu_quick_fold(), which it leaves the blocks to that move a reference. */
INLINE void scan_add(const struct kld_cpu_quick *quick, struct kld_cpu_partial *total,
                     const struct kld_cpu_partial *part) {
    if (total->max[0] != part->max[0] || total->max[1] != part->max[1]) {
        kld_cpu_quick_fold(quick, total, part);
        return;
    }
    kld_cpu_quick_add(total, part);
}

/* What a span's blocks add up to; those that were kept are done again where one of their classes is
 * a large share of either side. */
static void scan_blocks(const struct kld_cpu_quick *quick, const struct kld_cpu_span *span,
                        struct kld_cpu_partial *ret_sums) {
    struct kld_cpu_partial sums[SPAN_BLOCKS_MAX], total;
    double reference[2] = {KLD_CPU_QUICK_NOTHING, KLD_CPU_QUICK_NOTHING};
    double top[SPAN_BLOCKS_MAX][2];
    bool done[SPAN_BLOCKS_MAX];
    uint64_t blocks = blocks_of(span);
    struct pair pair;
    for (uint64_t k = 0; k < blocks; k++) {
        pair_load(quick, span, k, &pair);
        scan_refer(quick, &pair, reference);
        memcpy(sums[k].max, reference, sizeof reference);
        memcpy(top[k], pair.top, sizeof top[k]);
        memcpy(sums[k].top, pair.top, sizeof top[k]);
        sums[k].value = reference[KLD_CPU_Q];
        if (quick->rule.kind != KLD_RULE_CROSS_ENTROPY)
            sums[k].value = reference[KLD_CPU_P] - reference[KLD_CPU_Q];
        done[k] = pair.wild;
        scan_pair(quick, &pair, &sums[k]);
        if (k == 0)
            total = sums[0];
        else
            scan_add(quick, &total, &sums[k]);
    }
    *ret_sums = total;
    double heavy[2]; /* logits above these */
    for (int side = 0; side < 2; side++)
        heavy[side] =
            (total.max[side] + log2(total.sum[side] * HEAVY)) * LN2 / quick->inverse_temperature;
    for (uint64_t k = 0; k < blocks; k++) {
        if (!done[k] && (top[k][0] > heavy[0] || top[k][1] > heavy[1])) {
            pair_fetch(quick, span, k, &pair);
            pair.wild = false;
            memcpy(pair.top, top[k], sizeof pair.top);
            if (span->count <= FEW)
                scan_in_double(quick, pair.at, pair.count, &sums[k]);
            else
                scan_apart(quick, &pair, heavy, &sums[k]);
        }
        if (k == 0)
            total = sums[0];
        else
            scan_add(quick, &total, &sums[k]);
    }
    *ret_sums = total;
}

static void quick_scan(const struct kld_cpu_quick *quick, const struct kld_cpu_span *span,
                       struct kld_cpu_partial *ret_partial) {
    struct kld_cpu_span part = *span;
    for (uint64_t at = 0; at < span->count; at += part.count) {
        struct kld_cpu_partial sums;
        part.count = span->count - at;
        if (part.count > SPAN_BLOCKS_MAX * BLOCK)
            part.count = SPAN_BLOCKS_MAX * BLOCK;
        for (int side = 0; side < 2; side++)
            part.in[side] = span->in[side] + at * element_bytes(quick->dtype[side]);
        scan_blocks(quick, &part, &sums);
        if (at == 0)
            *ret_partial = sums;
        else
            kld_cpu_quick_fold(quick, ret_partial, &sums);
    }
}

#endif
