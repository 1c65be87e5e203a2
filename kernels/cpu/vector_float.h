/* vector_float.h - vectors of FP32: what vector.h leaves to intrinsics, powers and logarithms by
 * polynomials. Included by what each vector width has of its own; static and pure. Fused
 * multiply-adds where vectors have more than 16 bytes. */
#ifndef KLD_KERNELS_CPU_VECTOR_FLOAT_H
#define KLD_KERNELS_CPU_VECTOR_FLOAT_H

#include "kernels/cpu/vector.h"

#define LN2 0.693147180559945309417
#define SHIFTER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
#define SHIFTER_BITS 0x4b400000u

/* a < b ? yes : no */
INLINE vf vf_if_less(vf a, vf b, vf yes, vf no) {
#if KLD_VECTOR_BYTES == 64
    return (vf)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ),
                                    (__m512)no, (__m512)yes);
#elif KLD_VECTOR_BYTES == 32
    return (vf)_mm256_blendv_ps((__m256)no, (__m256)yes,
                                _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ));
#else
    return vf_select(a < b, yes, no);
#endif
}

/* With a NaN in a: b. */
INLINE vf vf_max(vf a, vf b) {
#if KLD_VECTOR_BYTES == 64
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif KLD_VECTOR_BYTES == 32
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}
INLINE vf vf_min(vf a, vf b) {
#if KLD_VECTOR_BYTES == 64
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif KLD_VECTOR_BYTES == 32
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vf_select(a < b, a, b);
#endif
}

/* a b + c, with one rounding where vectors have more than 16 bytes. What is exact only so asks for
 * it: the compiler fuses what it finds in one place, not a product that it moved to another. */
INLINE vf vf_fma(vf a, vf b, vf c) {
#if KLD_VECTOR_BYTES == 64
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KLD_VECTOR_BYTES == 32
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vi32 vi32_positive(vi32 x) {
#if KLD_VECTOR_BYTES == 64
    return (vi32)_mm512_max_epi32((__m512i)x, _mm512_setzero_si512());
#elif KLD_VECTOR_BYTES == 32
    return (vi32)_mm256_max_epi32((__m256i)x, _mm256_setzero_si256());
#else
    return x & (x > 0);
#endif
}

/* 2^r - 1 for |r| <= 1/2. Error 2e-8 of itself; brief: 5e-7. */
INLINE vf vf_power_less_one(vf r, bool brief) {
    vf p;
    if (brief) {
        p = vf_of(0.00133813021f);
        p = p * r + 0.00966636837f;
        p = p * r + 0.0555038117f;
        p = p * r + 0.240223497f;
        p = p * r + 0.693147182f;
    } else {
        p = vf_of(0.000154531634f);
        p = p * r + 0.00133908633f;
        p = p * r + 0.00961808302f;
        p = p * r + 0.0555035695f;
        p = p * r + 0.240226507f;
        p = p * r + 0.693147182f;
    }
    return p * r;
}

/* ln(y + low) for 0 < y <= 1, low its rounding. Error 2e-8. */
INLINE vf vf_log(vf y, vf low) {
    vu32 bits = (vu32)y;
    vi32 k = (vi32)(bits - 0x3f2aaaabu) >> 23; /* the rest is in [2/3, 4/3) */
    vf f = (vf)(bits - ((vu32)k << 23)) - 1.0f, p = vf_of(0.134257495f);
    f += low * (vf)(0x3f800000u - ((vu32)k << 23));
    p = p * f - 0.150407642f;
    p = p * f + 0.141183093f;
    p = p * f - 0.164830178f;
    p = p * f + 0.200037807f;
    p = p * f - 0.250041455f;
    p = p * f + 0.333333194f;
    p = p * f - 0.499999851f;
    return __builtin_convertvector(k, vf) * (float)LN2 + (f * f * p + f);
}

/* e^x = unit + unit rest for -2^18 < x < 8; 0 below -87.7. Error of rest 2e-8 of itself. */
INLINE vf vf_power_of_e(vf x, vf *ret_rest) {
    vf log2e = vf_of(1.44269502f), shifted = vf_fma(x, log2e, vf_of(SHIFTER));
    vf r = vf_fma(x, vf_of(1.92596303e-8f), vf_fma(x, log2e, SHIFTER - shifted));
    *ret_rest = vf_power_less_one(r, false);
    return (vf)(vi32_positive((vi32)((vu32)shifted - SHIFTER_BITS + 127u)) << 23);
}

INLINE vf vf_exp(vf x) {
    vf rest, unit = vf_power_of_e(x, &rest);
    return vf_fma(unit, rest, unit);
}

#endif
