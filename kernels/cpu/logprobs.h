/* logprobs.h - logarithms of probabilities on both sides in FP32 arithmetic, but for mixtures:
 * value and gradients in one pass. A block with a number that FP32 is not for (-inf, NaN, beyond
 * 8), whose gradients cancel too far, or which holds little but masses that are 0 in FP32, is given
 * to the stages in double. Included once by each kernel_*.c; vectors of 16 bytes do without it.
 *
 * The difference of the logarithms is exact, in two parts where 1 is added to it; that of the
 * masses is the larger times 1 - e^-|d|. */
#ifndef KLD_KERNELS_CPU_LOGPROBS_H
#define KLD_KERNELS_CPU_LOGPROBS_H

#include "kernels/cpu/probs_rules.h"
#include "kernels/cpu/vector_float.h"

INLINE bool logprobs_fits(const struct kld_cpu_work *work) {
    return KLD_VECTOR_BYTES > 16 && work->form[0] == KLD_FORM_LOGPROBS &&
           work->form[1] == KLD_FORM_LOGPROBS && work->dtype[0] != KLD_DTYPE_FP64 &&
           work->dtype[1] != KLD_DTYPE_FP64 && !work->none && work->rule.kind != KLD_RULE_MIXTURE;
}

/* Masses below e^LOGPROBS_LEAST may be 0. What that leaves out of a block is 2^-101 at most, 256
 * times 2^-126 by logarithms of 2^17, which a sum or a largest gradient of LOGPROBS_FAINT hides. */
#define LOGPROBS_LEAST -87.0f
#define LOGPROBS_FAINT 0x1p-76

/* What there is code for. */
enum logprobs_kind {
    LOGPROBS_KL,   /* of one weight */
    LOGPROBS_BOTH, /* of two */
    LOGPROBS_TV,
    LOGPROBS_CROSS_ENTROPY,
};

static enum logprobs_kind logprobs_kind_of(const struct kld_rule *rule) {
    switch (rule->kind) {
    case KLD_RULE_TV: return LOGPROBS_TV;
    case KLD_RULE_CROSS_ENTROPY: return LOGPROBS_CROSS_ENTROPY;
    default: return rule->of_p != 0 && rule->of_q != 0 ? LOGPROBS_BOTH : LOGPROBS_KL;
    }
}

INLINE vf logprobs_kl(const struct probs_rule *at, bool both, bool gradients, vf lq, vf lp,
                      vf ret_gradient[2], vf lost[2]) {
    vf q = vf_of(0), p = vf_of(0), d = lp - lq;
    if (both || at->of[KLD_CPU_P] != 0)
        p = vf_exp(lp) * at->of[KLD_CPU_P];
    if (both || at->of[KLD_CPU_Q] != 0)
        q = vf_exp(lq) * at->of[KLD_CPU_Q];
    if (gradients) {
        /* d less what it was rounded to */
        vf back = d + lq, low = (lp - back) - (lq - (back - d));
        vf own_p = p * ((1.0f + d) + low), own_q = q * ((1.0f - d) - low);
        if (both) {
            ret_gradient[KLD_CPU_P] =
                probs_rule_sum(own_p * at->factor, q * -at->factor, &lost[KLD_CPU_P]);
            ret_gradient[KLD_CPU_Q] =
                probs_rule_sum(own_q * at->factor, p * -at->factor, &lost[KLD_CPU_Q]);
        } else {
            ret_gradient[KLD_CPU_P] = (own_p - q) * at->factor;
            ret_gradient[KLD_CPU_Q] = (own_q - p) * at->factor;
        }
    }
    return (p - q) * d;
}

INLINE vf logprobs_tv(const struct probs_rule *at, bool gradients, vf lq, vf lp,
                      vf ret_gradient[2]) {
    vf d = lp - lq, zero = vf_of(0), rest, unit = vf_power_of_e(-vf_abs(d), &rest);
    for (int side = 0; gradients && side < 2; side++) {
        vf step = vf_of(side == KLD_CPU_P ? at->log[side] : -at->log[side]);
        step = vf_if_less(d, zero, -step, vf_if_less(zero, d, step, zero));
        if (at->wanted[side])
            ret_gradient[side] = vf_exp(side == KLD_CPU_P ? lp : lq) * step;
    }
    return 0.5f * vf_exp(vf_max(lq, lp)) * vf_fma(-unit, rest, 1.0f - unit);
}

INLINE vf logprobs_cross_entropy(const struct probs_rule *at, bool gradients, vf lq, vf lp,
                                 vf ret_gradient[2]) {
    vf p = vf_exp(lp);
    if (gradients) {
        ret_gradient[KLD_CPU_Q] = -p * at->factor;
        ret_gradient[KLD_CPU_P] = -p * lq * at->factor;
    }
    return -p * lq;
}

/* One vector: its terms and gradients. */
INLINE vf logprobs_term(const struct probs_rule *at, enum logprobs_kind kind, bool gradients, vf lq,
                        vf lp, vf ret_gradient[2], vf lost[2]) {
    switch (kind) {
    case LOGPROBS_TV: return logprobs_tv(at, gradients, lq, lp, ret_gradient);
    case LOGPROBS_CROSS_ENTROPY: return logprobs_cross_entropy(at, gradients, lq, lp, ret_gradient);
    default: return logprobs_kl(at, kind == LOGPROBS_BOTH, gradients, lq, lp, ret_gradient, lost);
    }
}

/* n classes, padded. false: somewhere in the block is a number for double. */
INLINE bool logprobs_block(const struct probs_rule *at, enum logprobs_kind kind, bool gradients,
                           const float *q, const float *p, uint64_t n, float gradient[2][BLOCK],
                           vf lost[2], vd *total, bool *ret_low) {
    vf sum[2] = {{0}};
    vf most = vf_of(-INFINITY), least = vf_of(INFINITY);
    lost[0] = lost[1] = vf_of(0);
    for (uint64_t i = 0; i < n; i += 2 * FLOATS)
        for (uint64_t j = 0; j < 2; j++) {
            uint64_t k = i + j * FLOATS;
            read_ahead(q + k);
            read_ahead(p + k);
            vf lq = *(const vf_any *)(q + k), lp = *(const vf_any *)(p + k), made[2] = {{0}, {0}};
            most = vf_max(vf_max(lq, lp), most); /* a NaN is seen in the sum */
            least = vf_min(vf_min(lq, lp), least);
            sum[j] += logprobs_term(at, kind, gradients, lq, lp, made, lost);
            for (int side = 0; gradients && side < 2; side++)
                if (at->wanted[side])
                    *(vf *)(gradient[side] + k) = made[side];
        }
    vf all = sum[0] + sum[1];
    if (vi32_any(~((least > -0x1p17f) & (most < 8.0f) & (all == all))))
        return false;
    *ret_low = vi32_any(least < LOGPROBS_LEAST);
    vfh half[2];
    memcpy(half, &all, sizeof half);
    *total = __builtin_convertvector(half[0], vd) + __builtin_convertvector(half[1], vd);
    return true;
}

static bool logprobs_block_of(const struct probs_rule *at, enum logprobs_kind kind, const float *q,
                              const float *p, uint64_t n, float gradient[2][BLOCK], vf lost[2],
                              vd *total, bool *ret_low) {
    bool gradients = at->wanted[0] || at->wanted[1];
#define LOGPROBS_BLOCK(of_kind)                                                                    \
    case of_kind:                                                                                  \
        return gradients                                                                           \
                   ? logprobs_block(at, of_kind, true, q, p, n, gradient, lost, total, ret_low)    \
                   : logprobs_block(at, of_kind, false, q, p, n, gradient, lost, total, ret_low)
    switch (kind) {
        LOGPROBS_BLOCK(LOGPROBS_KL);
        LOGPROBS_BLOCK(LOGPROBS_BOTH);
        LOGPROBS_BLOCK(LOGPROBS_TV);
        LOGPROBS_BLOCK(LOGPROBS_CROSS_ENTROPY);
    }
#undef LOGPROBS_BLOCK
    return false;
}

/* Are there masses of which double has more than FP32? Below e^-746 both have 0. */
static bool logprobs_has_small(const float *x, uint64_t n) {
    uint64_t i = 0;
    while (i < n && !(x[i] < LOGPROBS_LEAST && x[i] > -746))
        i++;
    return i < n;
}

/* Would masses that are 0 in FP32 show in the value of a block of n classes, or in a gradient? The
 * first gradient that is large enough settles it. */
static bool logprobs_is_faint(const struct probs_rule *at, const float *q, const float *p,
                              float gradient[2][BLOCK], uint64_t n, vd sum) {
    float least = (float)LOGPROBS_FAINT * fabsf(at->factor);
    bool faint = !(fabs(vd_sum(sum)) >= LOGPROBS_FAINT);
    for (int side = 0; side < 2 && !faint; side++) {
        uint64_t i = 0;
        while (at->wanted[side] && i < n && !(fabsf(gradient[side][i]) >= least))
            i++;
        faint = i == n;
    }
    return faint && (logprobs_has_small(q, n) || logprobs_has_small(p, n));
}

static void logprobs_pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                          stages_pass *in_stages, struct kld_cpu_partial *ret_partial) {
    float space[2][BLOCK] ALIGNED, gradient[2][BLOCK] ALIGNED;
    const struct probs_rule at = probs_rule_of(work, span->gradient_factor);
    if (at.beyond) {
        in_stages(work, span, ret_partial);
        return;
    }
    enum logprobs_kind kind = logprobs_kind_of(&work->rule);
    bool both = kind == LOGPROBS_BOTH;
    vd total = vd_of(0);
    double in_double = 0;
    struct kld_cpu_span block = *span;
    for (uint64_t from = 0; from < span->count; from += BLOCK) {
        block.count = span->count - from < BLOCK ? span->count - from : BLOCK;
        const float *x[2];
        for (int side = 0; side < 2; side++)
            x[side] = probs_rule_load(work, &block, side, block.count, space[side]);
        vf lost[2];
        vd sum = vd_of(0);
        bool low = false;
        bool fine = logprobs_block_of(&at, kind, x[KLD_CPU_Q], x[KLD_CPU_P],
                                      probs_rule_padded(block.count), gradient, lost, &sum, &low);
        if (fine && low)
            fine = !logprobs_is_faint(&at, x[KLD_CPU_Q], x[KLD_CPU_P], gradient, block.count, sum);
        for (int side = 0; side < 2; side++)
            if (at.wanted[side] && both)
                fine = fine && !is_rough(gradient[side], block.count, 0, lost[side]);
        if (fine)
            total += sum;
        else
            in_double += block_in_stages(work, &block, in_stages);
        for (int side = 0; side < 2; side++) {
            uint64_t bytes = block.count * element_bytes(work->dtype[side]);
            if (fine && block.gradient[side])
                probs_rule_store(work, side, gradient[side], block.count, block.gradient[side]);
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
