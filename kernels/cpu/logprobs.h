/* logprobs.h - logarithms of probabilities on both sides in FP32 arithmetic: a KL, either way or
 * both, and a cross entropy, value and gradients in one pass. A block with a number that FP32 is
 * not for (-inf, NaN, beyond 8), or whose gradients cancel too far, is given to the stages in
 * double. Included once by each kernel_*.c; vectors of 16 bytes do without it.
 *
 * The difference of the logarithms is exact, in two parts where 1 is added to it. */
#ifndef KLD_KERNELS_CPU_LOGPROBS_H
#define KLD_KERNELS_CPU_LOGPROBS_H

#include "kernels/cpu/probs_rules.h"

struct logprobs {
    bool cross_entropy;
    float of[2];  /* the weights of a KL */
    float factor; /* of the gradients */
    bool wanted[2];
};

INLINE bool logprobs_fits(const struct kld_cpu_work *work) {
    return KLD_VECTOR_BYTES > 16 && work->form[0] == KLD_FORM_LOGPROBS &&
           work->form[1] == KLD_FORM_LOGPROBS && work->dtype[0] != KLD_DTYPE_FP64 &&
           work->dtype[1] != KLD_DTYPE_FP64 && !work->none &&
           (work->rule.kind == KLD_RULE_KL || work->rule.kind == KLD_RULE_CROSS_ENTROPY);
}

/* exp(x) for -2^17 < x < 8; 0 below -87.7. As 2^n (1 + w): n the nearest integer to x log2(e), w by
 * a polynomial good to 2e-8 of itself. */
INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    vf log2e = vf_of(1.44269502f), shifted = vf_fma(x, log2e, vf_of(magic));
    vf r = vf_fma(x, vf_of(1.92596303e-8f), vf_fma(x, log2e, magic - shifted));
    vf w = vf_of(0.000154531634f);
    w = w * r + 0.00133908633f;
    w = w * r + 0.00961808302f;
    w = w * r + 0.0555035695f;
    w = w * r + 0.240226507f;
    w = w * r + 0.693147182f;
    vf power = (vf)(vi32_positive((vi32)((vu32)shifted - 0x4b400000u + 127u)) << 23);
    return vf_fma(power, w * r, power);
}

/* One vector: its terms and gradients. both: a KL has both weights. */
INLINE vf logprobs_term(const struct logprobs *at, bool cross_entropy, bool both, bool gradients,
                        vf lq, vf lp, vf ret_gradient[2], vf lost[2]) {
    vf q = vf_of(0), p = vf_of(0), d = lp - lq;
    if (cross_entropy) {
        p = vf_exp(lp);
        if (gradients) {
            ret_gradient[KLD_CPU_Q] = -p * at->factor;
            ret_gradient[KLD_CPU_P] = -p * lq * at->factor;
        }
        return -p * lq;
    }
    if (both || at->of[KLD_CPU_P] != 0)
        p = vf_exp(lp) * at->of[KLD_CPU_P];
    if (both || at->of[KLD_CPU_Q] != 0)
        q = vf_exp(lq) * at->of[KLD_CPU_Q];
    if (gradients) {
        /* d less what it was rounded to */
        vf back = d + lq, low = (lp - back) - (lq - (back - d));
        vf own_p = p * ((1.0f + d) + low), own_q = q * ((1.0f - d) - low);
        if (both) {
            own_p = probs_rule_sum(own_p, -q, &lost[KLD_CPU_P]);
            own_q = probs_rule_sum(own_q, -p, &lost[KLD_CPU_Q]);
        } else {
            own_p -= q;
            own_q -= p;
        }
        ret_gradient[KLD_CPU_P] = own_p * at->factor;
        ret_gradient[KLD_CPU_Q] = own_q * at->factor;
    }
    return (p - q) * d;
}

/* false: somewhere in the block is a number for double. */
INLINE bool logprobs_block(const struct logprobs *at, bool cross_entropy, bool both, bool gradients,
                           const float *q, const float *p, float gradient[2][BLOCK], vf lost[2],
                           vd *total) {
    vf sum[2] = {{0}};
    vf most = vf_of(-INFINITY), least = vf_of(INFINITY);
    lost[0] = lost[1] = vf_of(0);
    for (uint64_t i = 0; i < BLOCK; i += 2 * FLOATS)
        for (uint64_t j = 0; j < 2; j++) {
            uint64_t k = i + j * FLOATS;
            vf lq = *(const vf_any *)(q + k), lp = *(const vf_any *)(p + k), made[2] = {{0}, {0}};
            most = vf_max(vf_max(lq, lp), most); /* a NaN is seen in the sum */
            least = vf_min(vf_min(lq, lp), least);
            sum[j] += logprobs_term(at, cross_entropy, both, gradients, lq, lp, made, lost);
            for (int side = 0; gradients && side < 2; side++)
                if (at->wanted[side])
                    *(vf *)(gradient[side] + k) = made[side];
        }
    vf all = sum[0] + sum[1];
    if (vi32_any(~((least > -0x1p17f) & (most < 8.0f) & (all == all))))
        return false;
    vfh half[2];
    memcpy(half, &all, sizeof half);
    *total = __builtin_convertvector(half[0], vd) + __builtin_convertvector(half[1], vd);
    return true;
}

static bool logprobs_block_of(const struct logprobs *at, const float *q, const float *p,
                              float gradient[2][BLOCK], vf lost[2], vd *total) {
    bool gradients = at->wanted[0] || at->wanted[1];
    bool both = !at->cross_entropy && at->of[0] != 0 && at->of[1] != 0;
    if (at->cross_entropy)
        return gradients ? logprobs_block(at, true, false, true, q, p, gradient, lost, total)
                         : logprobs_block(at, true, false, false, q, p, gradient, lost, total);
    if (both)
        return gradients ? logprobs_block(at, false, true, true, q, p, gradient, lost, total)
                         : logprobs_block(at, false, true, false, q, p, gradient, lost, total);
    return gradients ? logprobs_block(at, false, false, true, q, p, gradient, lost, total)
                     : logprobs_block(at, false, false, false, q, p, gradient, lost, total);
}

static void logprobs_pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                          stages_pass *in_stages, struct kld_cpu_partial *ret_partial) {
    float space[2][BLOCK] ALIGNED, gradient[2][BLOCK] ALIGNED;
    const struct logprobs at = {
        .cross_entropy = work->rule.kind == KLD_RULE_CROSS_ENTROPY,
        .of = {(float)work->rule.of_q, (float)work->rule.of_p},
        .factor = (float)span->gradient_factor,
        .wanted = {span->gradient[0] != NULL, span->gradient[1] != NULL},
    };
    bool both = !at.cross_entropy && at.of[0] != 0 && at.of[1] != 0;
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
        bool fine = logprobs_block_of(&at, x[KLD_CPU_Q], x[KLD_CPU_P], gradient, lost, &sum);
        for (int side = 0; both && side < 2; side++)
            if (at.wanted[side])
                fine = fine && !is_rough(gradient[side], block.count, 0,
                                         lost[side] * vf_abs(vf_of(at.factor)));
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
