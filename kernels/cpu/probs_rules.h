/* probs_rules.h - probabilities on both sides in FP32 arithmetic for the rules that probs.h does
 * not do: one pass for value and gradients. A block with a number that FP32 is not for (outside
 * [2^-125, 2), or a zero where a gradient is asked for) is given to the stages in double. Included
 * once by each kernel_*.c; vectors of 16 bytes do without it.
 *
 * ln(p/m) and ln(q/m) come from p - q, not from the rounded m, where m is near: they are good to
 * 2 ulp also where p and q agree. Gradients of two terms may cancel: what that leaves must be
 * little beside the largest of the block, or the block is one for double. */
#ifndef KLD_KERNELS_CPU_PROBS_RULES_H
#define KLD_KERNELS_CPU_PROBS_RULES_H

#include "kernels/cpu/probs.h"

/* What does a block in double. */
typedef void stages_pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                         struct kld_cpu_partial *ret_partial);

/* What a gradient is made of: log * ln(x/m) + ratio * y/m (KL: log * (ln(x/y) + 1) + ratio * y/x;
 * cross_entropy: of p, -ln q; tv: log * sign(x - y)). */
struct probs_rule {
    uint32_t kind;
    float of[2], share[2];
    float log[2], ratio[2];
    float factor;               /* of the gradients: log and ratio have it */
    bool wanted[2], cancels[2]; /* the terms of the gradient may */
    float least[2];             /* what the largest of a block's gradients must be */
    bool beyond;                /* FP32 does not hold one of these: all is for the stages */
};

/* 0, or a number that FP32 holds with all its bits. */
INLINE bool is_float(double x) {
    double size = fabs(x);
    return size == 0 || (size >= FLT_MIN && size <= FLT_MAX);
}

static struct probs_rule probs_rule_of(const struct kld_cpu_work *work, double factor) {
    const struct kld_rule *rule = &work->rule;
    const double of[2] = {rule->of_q, rule->of_p}, share[2] = {rule->rest, rule->share};
    struct probs_rule at = {.kind = rule->kind, .factor = (float)factor};
    for (int side = 0; side < 2; side++) {
        at.of[side] = (float)of[side];
        at.share[side] = (float)share[side];
        at.wanted[side] = work->gradient[side];
        double log = 0, ratio = 0;
        if (rule->kind == KLD_RULE_MIXTURE) {
            log = of[side];
            /* of js 0; a fused multiply-add would leave the rounding of one product */
            bool js = of[0] == share[0] && of[1] == share[1];
            ratio = js ? 0 : of[side] * share[1 - side] - share[side] * of[1 - side];
        } else if (rule->kind == KLD_RULE_KL) {
            log = of[side];
            ratio = -of[1 - side];
        } else if (rule->kind == KLD_RULE_CROSS_ENTROPY) {
            log = side == KLD_CPU_P ? -1 : 0;
            ratio = side == KLD_CPU_Q ? -1 : 0;
        } else {
            log = 0.5;
        }
        at.cancels[side] = log != 0 && (rule->kind == KLD_RULE_KL ||
                                        (rule->kind == KLD_RULE_MIXTURE && ratio != 0));
        at.log[side] = (float)(log * factor);
        /* ln(x/y) + 1 is off by some 5e-8. */
        at.least[side] = rule->kind == KLD_RULE_KL ? 0.75f * fabsf(at.log[side]) : 0;
        at.ratio[side] = (float)(ratio * factor);
        at.beyond = at.beyond || !is_float(of[side]) || !is_float(share[side]);
        if (at.wanted[side])
            at.beyond = at.beyond || !is_float(log * factor) || !is_float(ratio * factor);
    }
    return at;
}

INLINE bool probs_rule_fits(const struct kld_cpu_work *work) {
    return KLD_VECTOR_BYTES > 16 && work->form[0] == KLD_FORM_PROBS &&
           work->form[1] == KLD_FORM_PROBS && work->dtype[0] != KLD_DTYPE_FP64 &&
           work->dtype[1] != KLD_DTYPE_FP64 && !work->none;
}

/* ln(a/b) where b was rounded, and a - b is known where they are within a factor of 1.5. */
INLINE vf vf_log_ratio_near(vf a, vf b, vf difference) {
    vi32 k = (vi32)((vu32)a - (vu32)b + 0x00400000u) >> 23;
    vf y = (vf)((vu32)b + ((vu32)k << 23));
    vf s = vf_select(k == 0, difference, a - y) / (a + y), z = s * s;
    vf p = vf_of(2.0f / 9);
    p = p * z + 2.0f / 7;
    p = p * z + 2.0f / 5;
    p = p * z + 2.0f / 3;
    p = p * z + 2.0f;
    return __builtin_convertvector(k, vf) * 0.693147180559945f + s * p;
}

/* A gradient's two terms, and what one takes away of the other. */
INLINE vf probs_rule_sum(vf first, vf second, vf *lost) {
    vf size = vf_abs(first), other = vf_abs(second);
    size = vf_select(size < other, size, other);
    size = vf_select((first < 0.0f) ^ (second < 0.0f), size, vf_of(0));
    *lost = vf_select(size > *lost, size, *lost);
    return first + second;
}

/* Of the sides x and y: log[] is ln(x/y) or ln(x/m), to which a KL adds 1; m stands for y where
 * there is none. */
INLINE void probs_rule_gradients(const struct probs_rule *rule, const vf x[2], const vf below[2],
                                 const vf log[2], vf ret_gradient[2], vf lost[2]) {
    for (int side = 0; side < 2; side++) {
        if (!rule->wanted[side])
            continue;
        if (rule->ratio[side] == 0) {
            ret_gradient[side] = log[side] * rule->log[side];
            continue;
        }
        vf ratio = x[1 - side] / below[side] * rule->ratio[side];
        ret_gradient[side] = ratio;
        if (rule->log[side] != 0)
            ret_gradient[side] = probs_rule_sum(log[side] * rule->log[side], ratio, &lost[side]);
    }
}

#define TV_MOST 0x1p119f /* a block's sum of these is a number of FP32 */

/* |p - q|, of which the caller takes a half: of a subnormal FP32 rounds it. */
INLINE vf probs_rule_tv(const struct probs_rule *rule, bool gradients, vf q, vf p, vi32 *bad,
                        vf ret_gradient[2]) {
    vf difference = p - q;
    *bad |= ~((q >= 0.0f) & (p >= 0.0f) & (q < TV_MOST) & (p < TV_MOST));
    for (int side = 0; gradients && side < 2; side++) {
        float step = side == KLD_CPU_P ? rule->log[side] : -rule->log[side];
        vf value = vf_select(difference > 0.0f, vf_of(step), vf_of(-step));
        ret_gradient[side] = vf_select(difference == 0.0f, vf_of(0), value);
    }
    return vf_abs(difference);
}

/* ln(p/q); with 1, and less 1 and turned round: k ln 2 and the 1 round off nothing. */
INLINE vf probs_rule_kl(vf q, vf p, vf ret_log[2]) {
    vu32 pbits = (vu32)p, qbits = (vu32)q;
    vf s, series = vf_atanh_of(pbits, qbits, &s);
    vf k = __builtin_convertvector((vi32)(pbits - qbits + 0x00400000u) >> 23, vf);
    vf rest = k * -2.12194440e-4f + s * series;
    ret_log[KLD_CPU_P] = (1.0f + k * 0.693359375f) + rest;
    ret_log[KLD_CPU_Q] = (1.0f - k * 0.693359375f) - rest;
    return k * 0.693147180559945f + s * series;
}

/* One vector: the terms, of tv twice those; what must lie inside for them to hold, into *bad;
 * gradients. */
INLINE vf probs_rule_term(const struct probs_rule *rule, uint32_t kind, bool gradients, vf q, vf p,
                          vi32 *bad, vf ret_gradient[2], vf lost[2]) {
    if (kind == KLD_RULE_TV)
        return probs_rule_tv(rule, gradients, q, p, bad, ret_gradient);
    vf x[2] = {q, p}, below[2] = {q, p}, log[2] = {{0}}, term;
    vf m = p * rule->share[KLD_CPU_P] + q * rule->share[KLD_CPU_Q];
    if (kind == KLD_RULE_MIXTURE) {
        *bad |= outside((vu32)m);
        below[0] = below[1] = m;
    }
    for (int side = 0; side < 2; side++) {
        /* Without gradients a mass of 0 adds nothing: let another stand in for its logarithm. */
        if (!gradients && kind == KLD_RULE_MIXTURE)
            x[side] = vf_select(x[side] == 0.0f, m, x[side]);
        if (!(kind == KLD_RULE_CROSS_ENTROPY && side == KLD_CPU_P && !gradients))
            *bad |= outside((vu32)x[side]);
    }
    if (kind == KLD_RULE_CROSS_ENTROPY) {
        *bad |= ~((p >= 0.0f) & (p < (float)INFINITY));
        log[KLD_CPU_P] = vf_log_ratio((vu32)x[KLD_CPU_Q], (vu32)vf_of(1));
        term = -p * log[KLD_CPU_P];
    } else if (kind == KLD_RULE_KL) {
        vf d = probs_rule_kl(q, p, log);
        term = (rule->of[KLD_CPU_P] * p - rule->of[KLD_CPU_Q] * q) * d;
    } else {
        vf difference = p - q;
        log[KLD_CPU_P] = vf_log_ratio_near(x[KLD_CPU_P], m, rule->share[KLD_CPU_Q] * difference);
        log[KLD_CPU_Q] = vf_log_ratio_near(x[KLD_CPU_Q], m, -rule->share[KLD_CPU_P] * difference);
        term = rule->of[KLD_CPU_P] * p * log[KLD_CPU_P] + rule->of[KLD_CPU_Q] * q * log[KLD_CPU_Q];
    }
    if (gradients)
        probs_rule_gradients(rule, x, below, log, ret_gradient, lost);
    return term;
}

/* Classes of a block with n of them: whole pairs of vectors. */
INLINE uint64_t probs_rule_padded(uint64_t n) {
    return (n + 2 * FLOATS - 1) / (2 * FLOATS) * (2 * FLOATS);
}

/* n of them, padded. false: somewhere in the block is a number for double. */
INLINE bool probs_rule_block(const struct probs_rule *rule, uint32_t kind, bool gradients,
                             const float *q, const float *p, uint64_t n, float gradient[2][BLOCK],
                             vf lost[2], vd *total) {
    vf sum[2] = {{0}};
    vi32 bad = {0};
    lost[0] = lost[1] = vf_of(0);
    for (uint64_t i = 0; i < n; i += 2 * FLOATS)
        for (uint64_t j = 0; j < 2; j++) {
            uint64_t k = i + j * FLOATS;
            vf made[2] = {{0}, {0}};
            read_ahead(q + k);
            read_ahead(p + k);
            sum[j] += probs_rule_term(rule, kind, gradients, *(const vf_any *)(q + k),
                                      *(const vf_any *)(p + k), &bad, made, lost);
            for (int side = 0; gradients && side < 2; side++)
                if (rule->wanted[side])
                    *(vf *)(gradient[side] + k) = made[side];
        }
    if (vi32_any(bad))
        return false;
    vf both = sum[0] + sum[1];
    vfh half[2];
    memcpy(half, &both, sizeof half);
    vd terms = __builtin_convertvector(half[0], vd) + __builtin_convertvector(half[1], vd);
    *total += kind == KLD_RULE_TV ? 0.5 * terms : terms;
    return true;
}

static bool probs_rule_block_of(const struct probs_rule *rule, const float *q, const float *p,
                                uint64_t n, float gradient[2][BLOCK], vf lost[2], vd *total) {
    bool gradients = rule->wanted[0] || rule->wanted[1];
    switch (rule->kind * 2 + gradients) {
    case KLD_RULE_KL * 2:
        return probs_rule_block(rule, KLD_RULE_KL, false, q, p, n, gradient, lost, total);
    case KLD_RULE_KL * 2 + 1:
        return probs_rule_block(rule, KLD_RULE_KL, true, q, p, n, gradient, lost, total);
    case KLD_RULE_MIXTURE * 2:
        return probs_rule_block(rule, KLD_RULE_MIXTURE, false, q, p, n, gradient, lost, total);
    case KLD_RULE_MIXTURE * 2 + 1:
        return probs_rule_block(rule, KLD_RULE_MIXTURE, true, q, p, n, gradient, lost, total);
    case KLD_RULE_TV * 2 + 1:
        return probs_rule_block(rule, KLD_RULE_TV, true, q, p, n, gradient, lost, total);
    case KLD_RULE_TV * 2:
        return probs_rule_block(rule, KLD_RULE_TV, false, q, p, n, gradient, lost, total);
    case KLD_RULE_CROSS_ENTROPY * 2:
        return probs_rule_block(rule, KLD_RULE_CROSS_ENTROPY, false, q, p, n, gradient, lost,
                                total);
    case KLD_RULE_CROSS_ENTROPY * 2 + 1:
        return probs_rule_block(rule, KLD_RULE_CROSS_ENTROPY, true, q, p, n, gradient, lost, total);
    default: return false;
    }
}

/* Would what is lost show beside the largest of the block's n gradients? lost: the largest of the
 * terms that another takes away, of which some 4e-7 is lost. least: what it must be at any rate. */
static bool is_rough(const float *gradient, uint64_t n, float least, vf lost) {
    vf top = vf_of(0);
    uint64_t i = 0;
    for (; i + FLOATS <= n; i += FLOATS) {
        vf size = vf_abs(*(const vf *)(gradient + i));
        top = vf_select(size > top, size, top);
    }
    float most = 0, largest = 0;
    for (; i < n; i++)
        most = fabsf(gradient[i]) > most ? fabsf(gradient[i]) : most;
    for (int k = 0; k < FLOATS; k++) {
        most = top[k] > most ? top[k] : most;
        largest = lost[k] > largest ? lost[k] : largest;
    }
    return !(most >= least + 4 * largest);
}

static void probs_rule_store(const struct kld_cpu_work *work, int side, const float *from,
                             uint64_t n, unsigned char *to) {
    if (KLD_VECTOR_BYTES > 16 && work->streaming[side] && work->dtype[side] == KLD_DTYPE_FP32 &&
        n == BLOCK && (uintptr_t)to % KLD_VECTOR_BYTES == 0)
        for (uint64_t i = 0; i < BLOCK; i += FLOATS)
            vf_store_streaming((float *)(void *)to + i, *(const vf *)(from + i));
    else
        block_store_floats(work->dtype[side], from, n, to);
}

/* The rest of a short block: two classes of the mass 1 add nothing to any of these rules. */
static const float *probs_rule_load(const struct kld_cpu_work *work,
                                    const struct kld_cpu_span *span, int side, uint64_t n,
                                    float space[BLOCK]) {
    float pad = work->form[side] == KLD_FORM_PROBS ? 1 : 0;
    uint64_t m = probs_rule_padded(n);
    if (work->dtype[side] == KLD_DTYPE_FP32 && n == m)
        return (const float *)(const void *)span->in[side];
    block_load_floats(work->dtype[side], span->in[side], n, pad, space);
    for (uint64_t i = whole_vectors(n); i < m; i++)
        space[i] = pad;
    return space;
}

static double block_in_stages(const struct kld_cpu_work *work, const struct kld_cpu_span *block,
                              stages_pass *in_stages) {
    struct kld_cpu_partial partial;
    in_stages(work, block, &partial);
    return partial.value;
}

static void probs_rule_pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                            stages_pass *in_stages, struct kld_cpu_partial *ret_partial) {
    float space[2][BLOCK] ALIGNED, gradient[2][BLOCK] ALIGNED;
    struct probs_rule rule = probs_rule_of(work, span->gradient_factor);
    if (rule.beyond) {
        in_stages(work, span, ret_partial);
        return;
    }
    vd total = vd_of(0);
    double in_double = 0;
    struct kld_cpu_span block = *span;
    for (uint64_t at = 0; at < span->count; at += BLOCK) {
        block.count = span->count - at < BLOCK ? span->count - at : BLOCK;
        const float *x[2];
        for (int side = 0; side < 2; side++)
            x[side] = probs_rule_load(work, &block, side, block.count, space[side]);
        vf lost[2];
        vd sum = vd_of(0);
        bool fine = probs_rule_block_of(&rule, x[KLD_CPU_Q], x[KLD_CPU_P],
                                        probs_rule_padded(block.count), gradient, lost, &sum);
        for (int side = 0; side < 2; side++)
            if (rule.wanted[side] && rule.cancels[side])
                fine = fine && !is_rough(gradient[side], block.count, rule.least[side], lost[side]);
        if (fine) {
            total += sum;
            for (int side = 0; side < 2; side++)
                if (block.gradient[side])
                    probs_rule_store(work, side, gradient[side], block.count, block.gradient[side]);
        } else {
            in_double += block_in_stages(work, &block, in_stages);
        }
        for (int side = 0; side < 2; side++) {
            uint64_t bytes = block.count * element_bytes(work->dtype[side]);
            block.in[side] += bytes;
            if (block.gradient[side])
                block.gradient[side] += bytes;
        }
    }
#if KLD_VECTOR_BYTES > 16
    if (work->streaming[0] || work->streaming[1])
        _mm_sfence(); /* streaming stores are not ordered with the ones that report completion */
#endif
    *ret_partial = (struct kld_cpu_partial){.value = vd_sum(total) + in_double};
}

#endif
