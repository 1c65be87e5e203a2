/* probs.h - the hot combination in FP32 arithmetic: probabilities on both sides (FP32, FP16, BF16),
 * value of a KL and the gradient of the side in the denominator, in one pass at the speed of
 * memory. Everything else, and every vector that holds a number which is not in [2^-125, 2), goes
 * through double. Included once by each kernel_*.c.
 *
 * Accuracy: ln(a/b) as in vd_log_ratio(), 2 ulp; terms are added in float for 16 vectors at most
 * before they go to double, so that the error does not grow with the length of a row. */
#ifndef KLD_KERNELS_CPU_PROBS_H
#define KLD_KERNELS_CPU_PROBS_H

#include "kernels/cpu/vector.h"

#define LANES_OF_SUM 4 /* independent sums: hides the latency of the addition */

/* KL(own, other) with forms probs; only the other's gradient; no grad_output by element. */
INLINE int probs_own_side(const struct kld_cpu_work *work) {
    return work->divergence == KLD_DIVERGENCE_FORWARD_KL ? KLD_CPU_P : KLD_CPU_Q;
}

INLINE bool probs_fits(const struct kld_cpu_work *work) {
    return (work->divergence == KLD_DIVERGENCE_FORWARD_KL ||
            work->divergence == KLD_DIVERGENCE_REVERSE_KL) &&
           work->form[0] == KLD_FORM_PROBS && work->form[1] == KLD_FORM_PROBS &&
           work->dtype[0] != KLD_DTYPE_FP64 && work->dtype[1] != KLD_DTYPE_FP64 && !work->none &&
           !work->gradient[probs_own_side(work)];
}

/* Lanes outside [2^-125, 2): zero, denormal or all but, negative, large, NaN. Half of the least is
 * still normal, so that a power of two taken off its exponent leaves a number. */
INLINE vi32 outside(vu32 bits) { return (vi32)(bits - 0x01000000u >= 0x3f000000u); }

/* ln(a/b) for bits inside is k ln 2 + s p: returns p. */
INLINE vf vf_atanh_of(vu32 abits, vu32 bbits, vf *ret_s) {
    vi32 k = (vi32)(abits - bbits + 0x00400000u) >> 23;
    vf x = (vf)abits, y = (vf)(bbits + ((vu32)k << 23));
    vf s = (x - y) / (x + y), z = s * s;
    vf p = vf_of(2.0f / 9);
    p = p * z + 2.0f / 7;
    p = p * z + 2.0f / 5;
    p = p * z + 2.0f / 3;
    p = p * z + 2.0f;
    *ret_s = s;
    return p;
}

INLINE vf vf_log_ratio(vu32 abits, vu32 bbits) {
    vf s, p = vf_atanh_of(abits, bbits, &s);
    vi32 k = (vi32)(abits - bbits + 0x00400000u) >> 23;
    return __builtin_convertvector(k, vf) * 0.693147180559945f + s * p;
}

/* LANES_OF_SUM vectors of which some lane is outside, in double; any values. */
static __attribute__((noinline)) double probs_careful(const float *own, const float *other,
                                                      float *gradient, float factor) {
    vd sum = vd_of(0), zero = vd_of(0);
    for (int i = 0; i < LANES_OF_SUM * FLOATS; i += DOUBLES) {
        vd a = __builtin_convertvector(*(const vfh_any *)(own + i), vd);
        vd b = __builtin_convertvector(*(const vfh_any *)(other + i), vd);
        b = b + 0.0; /* of -0 it makes a 0, over which the infinity has its sign */
        vd d = vd_log_ratio(a, b);
        vi64 empty = (a == 0.0) & (d == d);
        sum += vd_select(empty, zero, a * d);
        if (!gradient)
            continue;
        vd value = vd_select(d != d, d, a / b * (double)factor);
        *(vfh_any *)(gradient + i) = __builtin_convertvector(vd_select(empty, zero, value), vfh);
    }
    return vd_sum(sum);
}

/* A whole block; n is a multiple of LANES_OF_SUM vectors. gradient may be own's or other's place:
 * each vector is read before it is written. */
INLINE vd probs_block(const float *own, const float *other, float *gradient, bool streaming,
                      float factor, uint64_t n) {
    vf sum[LANES_OF_SUM] = {{0}};
    double careful = 0;
    for (uint64_t i = 0; i < n; i += LANES_OF_SUM * FLOATS) {
        vf a[LANES_OF_SUM], b[LANES_OF_SUM];
        vu32 abits[LANES_OF_SUM];
        vi32 bad = {0};
        for (int j = 0; j < LANES_OF_SUM; j++) {
            read_ahead(own + i + j * FLOATS);
            read_ahead(other + i + j * FLOATS);
            a[j] = *(const vf_any *)(own + i + j * FLOATS);
            b[j] = *(const vf_any *)(other + i + j * FLOATS);
            /* An own mass of 0 is common and adds nothing: let ln(b/b) stand for its logarithm. */
            abits[j] = (vu32)vf_select(a[j] == 0.0f, b[j], a[j]);
            bad |= outside(abits[j]) | outside((vu32)b[j]);
        }
        if (__builtin_expect(vi32_any(bad), 0)) {
            careful += probs_careful(own + i, other + i, gradient ? gradient + i : NULL, factor);
            continue;
        }
        for (int j = 0; j < LANES_OF_SUM; j++)
            sum[j] += a[j] * vf_log_ratio(abits[j], (vu32)b[j]);
        for (int j = 0; gradient && j < LANES_OF_SUM; j++) {
            vf value = a[j] / b[j] * factor;
            if (streaming)
                vf_store_streaming(gradient + i + j * FLOATS, value);
            else
                *(vf_any *)(gradient + i + j * FLOATS) = value;
        }
    }
    vd total = vd_of(0);
    for (int j = 0; j < LANES_OF_SUM; j++) {
        vfh half[2];
        memcpy(half, &sum[j], sizeof half);
        total += __builtin_convertvector(half[0], vd) + __builtin_convertvector(half[1], vd);
    }
    total[0] += careful;
    return total;
}

/* A block as it lies, or converted, or filled up to m numbers. */
static const float *probs_side(uint32_t dtype, const unsigned char *from, uint64_t n, uint64_t m,
                               float pad, float *space) {
    if (dtype == KLD_DTYPE_FP32 && n == m)
        return (const float *)(const void *)from;
    block_load_floats(dtype, from, n, pad, space);
    for (uint64_t i = whole_vectors(n); i < m; i++)
        space[i] = pad;
    return space;
}

/* A block that has to be converted, or that is shorter than BLOCK. */
static vd probs_block_converted(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                                int own_side, uint64_t at, uint64_t n, float factor) {
    int other_side = 1 - own_side;
    uint32_t own_type = work->dtype[own_side], other_type = work->dtype[other_side];
    float space[3][BLOCK] ALIGNED, *gradient = NULL;
    uint64_t step = LANES_OF_SUM * FLOATS, m = (n + step - 1) / step * step;
    uint64_t skip = at * element_bytes(other_type);
    const float *own =
        probs_side(own_type, span->in[own_side] + at * element_bytes(own_type), n, m, 0, space[0]);
    const float *other = probs_side(other_type, span->in[other_side] + skip, n, m, 1, space[1]);
    unsigned char *to = span->gradient[other_side];
    if (to) {
        to += skip;
        gradient = other_type == KLD_DTYPE_FP32 && n == m ? (float *)(void *)to : space[2];
    }
    vd sum = probs_block(own, other, gradient, false, factor, m);
    if (gradient == space[2])
        block_store_floats(other_type, gradient, n, to);
    return sum;
}

static void probs_pass(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                       struct kld_cpu_partial *ret_partial) {
    int own_side = probs_own_side(work), other_side = 1 - own_side;
    bool direct = work->dtype[0] == KLD_DTYPE_FP32 && work->dtype[1] == KLD_DTYPE_FP32;
    float factor = (float)-span->gradient_factor;
    const float *own = (const float *)(const void *)span->in[own_side];
    const float *other = (const float *)(const void *)span->in[other_side];
    float *gradient = (float *)(void *)span->gradient[other_side];
    bool streaming = work->streaming[other_side] && direct && KLD_VECTOR_BYTES > 16 &&
                     (uintptr_t)gradient % KLD_VECTOR_BYTES == 0;
    vd sum = vd_of(0);
    uint64_t at = 0;
    if (direct && gradient && streaming)
        for (; at + BLOCK <= span->count; at += BLOCK)
            sum += probs_block(own + at, other + at, gradient + at, true, factor, BLOCK);
    else if (direct && gradient)
        for (; at + BLOCK <= span->count; at += BLOCK)
            sum += probs_block(own + at, other + at, gradient + at, false, factor, BLOCK);
    else if (direct)
        for (; at + BLOCK <= span->count; at += BLOCK)
            sum += probs_block(own + at, other + at, NULL, false, factor, BLOCK);
    for (; at < span->count; at += BLOCK)
        sum += probs_block_converted(work, span, own_side, at,
                                     span->count - at < BLOCK ? span->count - at : BLOCK, factor);
#if KLD_VECTOR_BYTES > 16
    if (streaming)
        _mm_sfence(); /* streaming stores are not ordered with the ones that report completion */
#endif
    *ret_partial = (struct kld_cpu_partial){.value = vd_sum(sum)};
}

/* What memory can do: two arrays read, with `to` a third written past the caches. */
static uint64_t stream(const unsigned char *a, const unsigned char *b, unsigned char *to,
                       uint64_t bytes) {
    vu32 seen = {0};
    uint64_t step = 4 * KLD_VECTOR_BYTES, at = 0;
    for (; at + step <= bytes; at += step) {
        for (int j = 0; j < 4; j++) {
            uint64_t here = at + (uint64_t)j * KLD_VECTOR_BYTES;
            vu32 x = (vu32) * (const vf_any *)(const void *)(a + here);
            vu32 y = (vu32) * (const vf_any *)(const void *)(b + here);
            seen ^= x + y;
            if (to)
                vf_store_streaming((float *)(void *)(to + here), (vf)(x ^ y));
        }
    }
#if KLD_VECTOR_BYTES > 16
    _mm_sfence();
#endif
    uint64_t folded = 0;
    for (int i = 0; i < FLOATS; i++)
        folded ^= seen[i];
    return folded;
}

#endif
