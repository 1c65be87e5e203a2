/* quick_math.h - FP32 vectors for quick_scan.h and quick_write.h: masses of logits, blocks of them
 * and their range. Included by the quick_*.c of each vector width; needs a fused multiply-add.
 * Everything is static and pure. */
#ifndef KLD_KERNELS_CPU_QUICK_MATH_H
#define KLD_KERNELS_CPU_QUICK_MATH_H

#include "kernels/cpu/quick.h"
#include "kernels/cpu/vector_float.h"

#define STEP (2 * FLOATS) /* vectors of a block are done in pairs: two chains of operations */

INLINE float vf_top(vf x) {
#if KLD_VECTOR_BYTES == 64
    return _mm512_reduce_max_ps((__m512)x);
#elif KLD_VECTOR_BYTES == 32
    __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
#endif
}

INLINE double vd_total(vd x) {
#if KLD_VECTOR_BYTES == 64
    return _mm512_reduce_add_pd((__m512d)x);
#elif KLD_VECTOR_BYTES == 32
    __m128d y =
        _mm_add_pd(_mm256_castpd256_pd128((__m256d)x), _mm256_extractf128_pd((__m256d)x, 1));
    return _mm_cvtsd_f64(_mm_add_sd(y, _mm_unpackhi_pd(y, y)));
#endif
}

/* Its halves added up, in double. */
INLINE vd vd_halves(vf x) {
    vfh half[2];
    memcpy(half, &x, sizeof half);
    return __builtin_convertvector(half[0], vd) + __builtin_convertvector(half[1], vd);
}

INLINE double vf_total(vf x) { return vd_total(vd_halves(x)); }

/* z log2(e) / T in parts: whole and rest, |rest| <= 1/2. bits: whole + SHIFTER_BITS. */
struct parts {
    vf whole, rest;
    vi32 bits;
};

INLINE struct parts parts_of(vf z, vf scale, vf scale_low, bool coarse) {
    vf shifted = vf_fma(z, scale, vf_of(SHIFTER));
    struct parts parts = {.whole = shifted - SHIFTER, .bits = (vi32)shifted};
    parts.rest = vf_fma(z, scale, -parts.whole);
    if (!coarse)
        parts.rest = vf_fma(z, scale_low, parts.rest);
    return parts;
}

/* 2^(whole - reference), 0 where that is below 2^-126. origin: of origin_of(). */
INLINE vf power_of_whole(vi32 bits, vi32 origin) {
    return (vf)(vi32_positive((vi32)((vu32)bits - (vu32)origin)) << 23);
}
INLINE vi32 origin_of(double reference) {
    uint32_t origin = SHIFTER_BITS - 127u + (uint32_t)(int32_t)reference;
    return (vi32)(origin - (vu32){0});
}

INLINE vf mass_of(const struct parts *parts, vi32 origin, bool brief) {
    vf power = power_of_whole(parts->bits, origin);
    return power * vf_power_less_one(parts->rest, brief) + power;
}

/* The two sides of a block's classes. */
struct pair {
    const float *at[2];
    float space[2][BLOCK] ALIGNED;
    uint64_t count; /* a whole number of STEPs, filled up with classes of no mass */
    double top[2];  /* the largest logit, or something at or below -limit */
    bool wild;      /* a logit is infinite or beyond the limit, or all are low; a NaN is not seen */
};

INLINE void pair_pad(struct pair *pair, uint64_t n, float with) {
    for (int side = 0; side < 2; side++)
        for (uint64_t i = n; i < pair->count; i++)
            pair->space[side][i] = with;
}

/* The k-th block of a span. That of no mass is, unless the pair is wild, what has half the limit or
 * less. */
INLINE uint64_t pair_fetch(const struct kld_cpu_quick *quick, const struct kld_cpu_span *span,
                           uint64_t k, struct pair *ret_pair) {
    uint64_t left = span->count - k * BLOCK, n = left < BLOCK ? left : BLOCK;
    ret_pair->count = (n + STEP - 1) / STEP * STEP;
    for (int side = 0; side < 2; side++) {
        uint32_t dtype = quick->dtype[side];
        const unsigned char *from = span->in[side] + k * BLOCK * element_bytes(dtype);
        ret_pair->at[side] = ret_pair->space[side];
        if (dtype == KLD_DTYPE_FP32 && n == ret_pair->count)
            ret_pair->at[side] = (const float *)(const void *)from;
        else
            block_load_floats(dtype, from, n, -quick->limit, ret_pair->space[side]);
    }
    if (n < ret_pair->count)
        pair_pad(ret_pair, n, -quick->limit);
    return n;
}

/* And what range its logits have. -> how many of its classes are the span's. */
INLINE uint64_t pair_load(const struct kld_cpu_quick *quick, const struct kld_cpu_span *span,
                          uint64_t k, struct pair *ret_pair) {
    uint64_t n = pair_fetch(quick, span, k, ret_pair);
    float limit = quick->limit;
    vf most[2][2], least = vf_of(limit);
    for (int side = 0; side < 2; side++)
        most[side][0] = most[side][1] = vf_of(-INFINITY);
    for (uint64_t i = 0; i < ret_pair->count; i += STEP)
        for (int side = 0; side < 2; side++)
            for (uint64_t j = 0; j < 2; j++) {
                read_ahead(ret_pair->at[side] + i + j * FLOATS);
                vf z = *(const vf_any *)(ret_pair->at[side] + i + j * FLOATS);
                most[side][j] = vf_max(z, most[side][j]);
                least = vf_min(z, least);
            }
    ret_pair->wild = !(-vf_top(-least) >= -limit);
    for (int side = 0; side < 2; side++) {
        float top = vf_top(vf_max(most[side][0], most[side][1]));
        ret_pair->top[side] = (double)top;
        ret_pair->wild = ret_pair->wild || !(top < limit) || !(top > -limit / 2);
    }
    if (ret_pair->wild && n < ret_pair->count)
        pair_pad(ret_pair, n, -INFINITY);
    return n;
}

INLINE uint64_t blocks_of(const struct kld_cpu_span *span) {
    return (span->count + BLOCK - 1) / BLOCK;
}

#endif
