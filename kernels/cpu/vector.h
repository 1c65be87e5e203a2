/* vector.h - vector types of one width, exp and log on them, and the conversions between tensors
 * and blocks of numbers. Included once by each kernel_*.c, which sets KLD_VECTOR_BYTES; everything
 * is static. Accuracy of vd_exp and vd_log_ratio: about 1 ulp, ratios near 1 included.
 *
 * exp: Cody and Waite reduction, Taylor polynomial. log(a/b): both are brought within a factor of
 * 1.5 by powers of two, then 2 atanh((a - b) / (a + b)); a - b is exact there, so nothing is lost
 * where a and b agree. Signed overflow cannot happen: bits are handled as unsigned numbers. */
#ifndef KLD_KERNELS_CPU_VECTOR_H
#define KLD_KERNELS_CPU_VECTOR_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/cpu/kernel.h"

#define BLOCK KLD_CPU_BLOCK
#define DOUBLES (KLD_VECTOR_BYTES / 8)
#define FLOATS (KLD_VECTOR_BYTES / 4)
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef double vd __attribute__((vector_size(KLD_VECTOR_BYTES)));
typedef int64_t vi64 __attribute__((vector_size(KLD_VECTOR_BYTES)));
typedef uint64_t vu64 __attribute__((vector_size(KLD_VECTOR_BYTES)));
typedef float vf __attribute__((vector_size(KLD_VECTOR_BYTES)));
typedef int32_t vi32 __attribute__((vector_size(KLD_VECTOR_BYTES)));
typedef uint32_t vu32 __attribute__((vector_size(KLD_VECTOR_BYTES)));
typedef float vfh __attribute__((vector_size(KLD_VECTOR_BYTES / 2)));
typedef uint16_t vu16h __attribute__((vector_size(KLD_VECTOR_BYTES / 2)));
/* The same at any address. */
typedef float vf_any __attribute__((vector_size(KLD_VECTOR_BYTES), aligned(1), may_alias));
typedef float vfh_any __attribute__((vector_size(KLD_VECTOR_BYTES / 2), aligned(1), may_alias));
typedef vu16h vu16h_any __attribute__((aligned(1), may_alias));

INLINE vd vd_of(double x) { return x - (vd){0}; }
INLINE vd vd_load(const double *at) { return *(const vd *)at; }
INLINE void vd_store(double *at, vd x) { *(vd *)at = x; }
INLINE vf vf_of(float x) { return x - (vf){0}; }

INLINE vd vd_select(vi64 mask, vd yes, vd no) {
    return (vd)(((vi64)yes & mask) | ((vi64)no & ~mask));
}
INLINE vf vf_select(vi32 mask, vf yes, vf no) {
    return (vf)(((vi32)yes & mask) | ((vi32)no & ~mask));
}

/* Keeps the compiler from making a copy of a few vectors a `rep movs`, which takes longer to start
 * than they do. */
INLINE vf vf_as_is(vf x) {
#if defined(__x86_64__)
    __asm__("" : "+x"(x));
#endif
    return x;
}

INLINE vf vf_abs(vf x) { return (vf)((vu32)x & 0x7fffffffu); }

/* For loops that run through a tensor: what they will want next but some. The processor's own
 * prefetchers stop at the end of a page, and memory that processes share is mapped in pages of 4
 * KiB: so two pages ahead, which has the next page's address looked up in time, too. Beyond the end
 * of a tensor it is nothing. */
#define AHEAD_BYTES 8192

INLINE void read_ahead(const void *at) {
    __builtin_prefetch((const void *)((uintptr_t)at + AHEAD_BYTES), 0, 3);
}

INLINE void vf_store_streaming(float *at, vf x) {
#if KLD_VECTOR_BYTES == 64
    _mm512_stream_ps(at, (__m512)x);
#elif KLD_VECTOR_BYTES == 32
    _mm256_stream_ps(at, (__m256)x);
#else
    *(vf_any *)at = x;
#endif
}

INLINE double vd_sum(vd x) {
    double sum = 0;
    for (int i = 0; i < DOUBLES; i++)
        sum += x[i];
    return sum;
}

/* Any lane set? */
INLINE int vi32_any(vi32 mask) {
#if KLD_VECTOR_BYTES == 64
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif KLD_VECTOR_BYTES == 32
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    int any = 0;
    for (int i = 0; i < FLOATS; i++)
        any |= mask[i];
    return any != 0;
#endif
}

#define ROUND_MAGIC 6755399441055744.0 /* 1.5 * 2^52: adding it rounds to an integer */

/* With a NaN the result is that NaN. */
INLINE vd vd_clamp(vd x, double low, double high) {
#if KLD_VECTOR_BYTES == 64
    return (vd)_mm512_max_pd((__m512d)vd_of(low), _mm512_min_pd((__m512d)vd_of(high), (__m512d)x));
#elif KLD_VECTOR_BYTES == 32
    return (vd)_mm256_max_pd((__m256d)vd_of(low), _mm256_min_pd((__m256d)vd_of(high), (__m256d)x));
#else
    x = vd_select(x > high, vd_of(high), x);
    return vd_select(x < low, vd_of(low), x);
#endif
}

/* With a NaN in a: b. */
INLINE vd vd_max(vd a, vd b) {
#if KLD_VECTOR_BYTES == 64
    return (vd)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif KLD_VECTOR_BYTES == 32
    return (vd)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return vd_select(a > b, a, b);
#endif
}

INLINE vd vd_exp(vd x) {
    x = vd_clamp(x, -746.0, 710.0);
    vd shifted = x * 1.4426950408889634 + ROUND_MAGIC;
    vd n = shifted - ROUND_MAGIC;
    vd r = x - n * 6.93147180369123816490e-01;
    r = r - n * 1.90821492927058770002e-10;
    vd p = vd_of(1.0 / 6227020800.0);
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * (r * r) + r;
    p = p + 1.0;
#if KLD_VECTOR_BYTES == 64
    return (vd)_mm512_scalef_pd((__m512d)p, (__m512d)n);
#else
    /* 2^n in two factors, so that the ends of the range come out as denormals and inf. */
    vu64 whole = (vu64)shifted - 0x4338000000000000u + 2048u;
    vu64 half = whole >> 1;
    vu64 first = (half - 1024u + 1023u) << 52, second = (whole - half - 1024u + 1023u) << 52;
    return p * (vd)first * (vd)second;
#endif
}

/* ln(a) - ln(b). One of them 0: the infinity of the right sign; both 0: 0. A NaN, an infinity or a
 * number below 0: NaN. */
INLINE vd vd_log_ratio(vd a, vd b) {
    vi64 a_zero = a == 0.0, b_zero = b == 0.0;
    vi64 wrong = ~((a >= 0.0) & (b >= 0.0) & (a < (double)INFINITY) & (b < (double)INFINITY));
    vi64 a_tiny = a < 0x1p-1022, b_tiny = b < 0x1p-1022;
    vu64 abits = (vu64)vd_select(a_tiny, a * 0x1p54, a);
    vu64 bbits = (vu64)vd_select(b_tiny, b * 0x1p54, b);
    /* k: the power of two nearest to a/b, as a biased number so that the shift is unsigned. */
    vu64 k = (abits - bbits + 0x4008000000000000u) >> 52;
    vu64 aexp = abits >> 52;
    vd x = (vd)((abits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
    vd y = (vd)(bbits + ((k - 1024u - aexp + 1023u) << 52));
    vd s = (x - y) / (x + y), z = s * s;
    vd p = vd_of(2.0 / 23);
    p = p * z + 2.0 / 21;
    p = p * z + 2.0 / 19;
    p = p * z + 2.0 / 17;
    p = p * z + 2.0 / 15;
    p = p * z + 2.0 / 13;
    p = p * z + 2.0 / 11;
    p = p * z + 2.0 / 9;
    p = p * z + 2.0 / 7;
    p = p * z + 2.0 / 5;
    p = p * z + 2.0 / 3;
    vd n = (vd)(k + 0x4330000000000000u) - 4503599627371520.0; /* 2^52 + 1024 */
    n = n - vd_select(a_tiny, vd_of(54), vd_of(0)) + vd_select(b_tiny, vd_of(54), vd_of(0));
    vd d = (2.0 * s + p * z * s) + n * 1.90821492927058770002e-10;
    d = d + n * 6.93147180369123816490e-01;
    d = vd_select(a_zero, vd_of(-INFINITY), d);
    d = vd_select(b_zero, vd_of(INFINITY), d);
    d = vd_select(a_zero & b_zero, vd_of(0), d);
    return vd_select(wrong, vd_of(NAN), d);
}

#define NEAR 0.35 /* |d| below which differences are series */

INLINE vi64 is_near(vd d) { return (d < NEAR) & (d > -NEAR); }

/* d - 1 + exp(-d) = d^2 (1/2 - d/6 + d^2/24 - ...) for |d| < NEAR. */
INLINE vd excess(vd d) {
    vd s = vd_of(1.0 / 87178291200.0); /* (-1)^n / n!, n from 14 down to 2 */
    s = s * d - 1.0 / 6227020800.0;
    s = s * d + 1.0 / 479001600.0;
    s = s * d - 1.0 / 39916800.0;
    s = s * d + 1.0 / 3628800.0;
    s = s * d - 1.0 / 362880.0;
    s = s * d + 1.0 / 40320.0;
    s = s * d - 1.0 / 5040.0;
    s = s * d + 1.0 / 720.0;
    s = s * d - 1.0 / 120.0;
    s = s * d + 1.0 / 24.0;
    s = s * d - 1.0 / 6.0;
    s = s * d + 0.5;
    return s * d * d;
}

/* ln(1 + x) = 2 atanh(x / (2 + x)) for -0.3 < x < 0.42, to a part of itself. */
INLINE vd log1p_near(vd x) {
    vd s = x / (x + 2.0), z = s * s;
    vd p = vd_of(2.0 / 23);
    p = p * z + 2.0 / 21;
    p = p * z + 2.0 / 19;
    p = p * z + 2.0 / 17;
    p = p * z + 2.0 / 15;
    p = p * z + 2.0 / 13;
    p = p * z + 2.0 / 11;
    p = p * z + 2.0 / 9;
    p = p * z + 2.0 / 7;
    p = p * z + 2.0 / 5;
    p = p * z + 2.0 / 3;
    return 2.0 * s + p * z * s;
}

/* ---- tensors to blocks of floats and back: FP16 and BF16 ------------------------------------- */

INLINE float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float value;
    if (rest >= 0x7c00)
        bits = sign | 0x7f800000u | (rest & 0x3ff) << 13;
    else if (rest >= 0x0400)
        bits = sign | ((rest << 13) + (112u << 23));
    else {
        float tiny = (float)rest * 0x1p-24f;
        memcpy(&bits, &tiny, sizeof bits);
        bits |= sign;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t float_to_half(float value) {
    uint32_t bits, rest;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return sign | 0x7e00;
    if (rest >= 0x477ff000) /* rounds to 2^16 or more */
        return sign | 0x7c00;
    if (rest < 0x38800000) { /* a denormal: the sum with 1/2 rounds it in place */
        float magnitude;
        memcpy(&magnitude, &rest, sizeof magnitude);
        magnitude += 0.5f;
        memcpy(&rest, &magnitude, sizeof rest);
        return sign | (uint16_t)(rest - 0x3f000000);
    }
    rest += 0xfff + (rest >> 13 & 1);
    return sign | (uint16_t)((rest - (112u << 23)) >> 13);
}

/* A vector of 16-bit numbers as FP32. */
INLINE vf vf_of_halves(uint32_t dtype, vu16h x) {
    if (dtype == KLD_DTYPE_BF16)
        return (vf)(__builtin_convertvector(x, vu32) << 16);
#if KLD_VECTOR_BYTES == 64
    return (vf)_mm512_cvtph_ps((__m256i)x);
#elif KLD_VECTOR_BYTES == 32
    return (vf)_mm256_cvtph_ps((__m128i)x);
#else
    vf y;
    for (int i = 0; i < FLOATS; i++)
        y[i] = half_to_float(x[i]);
    return y;
#endif
}

INLINE vu16h vf_to_halves(uint32_t dtype, vf x) {
    if (dtype == KLD_DTYPE_BF16) {
        vu32 bits = (vu32)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        vu32 nan = (vu32)(x != x);
        bits = (rounded & ~nan) | (((bits >> 16) | 0x40u) & nan);
        return __builtin_convertvector(bits, vu16h);
    }
#if KLD_VECTOR_BYTES == 64
    return (vu16h)_mm512_cvtps_ph((__m512)x, 0);
#elif KLD_VECTOR_BYTES == 32
    return (vu16h)_mm256_cvtps_ph((__m256)x, 0);
#else
    vu16h y;
    for (int i = 0; i < FLOATS; i++)
        y[i] = float_to_half(x[i]);
    return y;
#endif
}

/* The lanes below n. */
INLINE vi32 vi32_below(uint64_t n) {
    static const int32_t lane[16] ALIGNED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const vi32 *)lane < (int32_t)n;
}

/* The end of a row, n numbers of a vector, at most all but one; nothing beyond them is touched, and
 * what else is in the vector is 0. No detour by memory: a load that follows narrower stores waits
 * for them. */
INLINE vf vf_load_first(const float *at, uint64_t n) {
    vf x = {0};
#if KLD_VECTOR_BYTES == 64
    x = (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), at);
#elif KLD_VECTOR_BYTES == 32
    x = (vf)_mm256_maskload_ps(at, (__m256i)vi32_below(n));
#else
    for (uint64_t i = 0; i < n; i++)
        x[i] = at[i];
#endif
    return x;
}

/* n < 4 numbers of 16 bits as one of 64. */
INLINE uint64_t bits_of_halves(const uint16_t *at, uint64_t n) {
    uint64_t bits = n > 0 ? at[0] : 0;
    bits |= n > 1 ? (uint64_t)at[1] << 16 : 0;
    return bits | (n > 2 ? (uint64_t)at[2] << 32 : 0);
}

INLINE vu16h halves_load_first(const uint16_t *at, uint64_t n) {
#if KLD_VECTOR_BYTES == 64
    return (vu16h)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), at);
#elif KLD_VECTOR_BYTES == 32
    uint64_t bits = 0;
    if (n < 4)
        return (vu16h)_mm_set_epi64x(0, (long long)bits_of_halves(at, n));
    memcpy(&bits, at, sizeof bits);
    return (vu16h)_mm_set_epi64x((long long)bits_of_halves(at + 4, n - 4), (long long)bits);
#else
    uint64_t bits = bits_of_halves(at, n);
    vu16h x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

INLINE void store_part(unsigned char **to, const unsigned char **from, uint64_t n, uint64_t part) {
    if (!(n & part))
        return;
    memcpy(*to, *from, part);
    *to += part;
    *from += part;
}

/* The first n bytes, an even number, of fewer than `bytes`, 2, 4, .. 64. */
INLINE void store_first(void *to, const void *from, uint64_t n, uint64_t bytes) {
    unsigned char *at = to;
    const unsigned char *x = from;
    if (bytes > 32)
        store_part(&at, &x, n, 32);
    if (bytes > 16)
        store_part(&at, &x, n, 16);
    if (bytes > 8)
        store_part(&at, &x, n, 8);
    store_part(&at, &x, n, 4);
    store_part(&at, &x, n, 2);
}

INLINE void halves_to_floats(uint32_t dtype, const uint16_t *from, uint64_t n, float *to) {
    uint64_t i = 0;
    for (; i + FLOATS <= n; i += FLOATS) {
        read_ahead(from + i);
        *(vf *)(to + i) = vf_of_halves(dtype, *(const vu16h_any *)(from + i));
    }
    if (i < n)
        *(vf *)(to + i) = vf_of_halves(dtype, halves_load_first(from + i, n - i));
}

INLINE void floats_to_halves(uint32_t dtype, const float *from, uint64_t n, uint16_t *to) {
    uint64_t i = 0;
    for (; i + FLOATS <= n; i += FLOATS)
        *(vu16h_any *)(to + i) = vf_to_halves(dtype, *(const vf *)(from + i));
    if (i < n) {
        vu16h rest = vf_to_halves(dtype, *(const vf *)(from + i));
        store_first(to + i, &rest, (n - i) * sizeof *to, sizeof rest);
    }
}

/* To whole vectors of floats. */
INLINE void halves_to_doubles(uint32_t dtype, const uint16_t *from, uint64_t n, double *to) {
    for (uint64_t i = 0; i < n; i += FLOATS) {
        vfh half[2];
        vf x;
        read_ahead(from + i);
        if (i + FLOATS <= n)
            x = vf_of_halves(dtype, *(const vu16h_any *)(from + i));
        else
            x = vf_of_halves(dtype, halves_load_first(from + i, n - i));
        memcpy(half, &x, sizeof half);
        vd_store(to + i, __builtin_convertvector(half[0], vd));
        vd_store(to + i + DOUBLES, __builtin_convertvector(half[1], vd));
    }
}

INLINE void floats_to_doubles(uint64_t m, const float *from, double *to) {
    for (uint64_t i = 0; i < m; i += DOUBLES)
        vd_store(to + i, __builtin_convertvector(*(const vfh_any *)(from + i), vd));
}

INLINE void doubles_to_floats(uint64_t m, const double *from, float *to) {
    for (uint64_t i = 0; i < m; i += DOUBLES)
        *(vfh *)(to + i) = __builtin_convertvector(vd_load(from + i), vfh);
}

INLINE uint64_t element_bytes(uint32_t dtype) {
    return dtype == KLD_DTYPE_FP64 ? 8 : dtype == KLD_DTYPE_FP32 ? 4 : 2;
}

/* Loops over a block run to here: a multiple of every vector length. */
INLINE uint64_t whole_vectors(uint64_t n) { return (n + 15) / 16 * 16; }

/* n elements of a tensor as a block of doubles or floats, filled up with `pad` to whole vectors.
 * FP64 cannot be loaded as float. Reads nothing beyond the n elements. */
static inline void block_load_floats(uint32_t dtype, const unsigned char *from, uint64_t n,
                                     float pad, float *to) {
    const void *source = from;
    uint64_t i = 0;
    if (dtype == KLD_DTYPE_FP16)
        halves_to_floats(KLD_DTYPE_FP16, source, n, to);
    else if (dtype == KLD_DTYPE_BF16)
        halves_to_floats(KLD_DTYPE_BF16, source, n, to);
    else {
        for (; i + FLOATS <= n; i += FLOATS) {
            read_ahead((const float *)source + i);
            *(vf *)(to + i) = *(const vf_any *)((const float *)source + i);
        }
        if (i < n)
            *(vf *)(to + i) = vf_load_first((const float *)source + i, n - i);
    }
    i = n / FLOATS * FLOATS;
    if (i < n) {
        *(vf *)(to + i) = vf_select(vi32_below(n - i), *(vf *)(to + i), vf_of(pad));
        i += FLOATS;
    }
    for (uint64_t m = whole_vectors(n); i < m; i += FLOATS)
        *(vf *)(to + i) = vf_of(pad);
}

static inline void block_load(uint32_t dtype, const unsigned char *from, uint64_t n, double pad,
                              double *to) {
    uint64_t m = whole_vectors(n);
    float single[BLOCK] ALIGNED;
    if (dtype == KLD_DTYPE_FP64) {
        memcpy(to, from, n * 8);
        for (uint64_t i = n; i < m; i++)
            to[i] = pad;
        return;
    }
    const float *source = single;
    if (dtype == KLD_DTYPE_FP32 && n == m)
        source = (const float *)(const void *)from;
    else
        block_load_floats(dtype, from, n, (float)pad, single);
    floats_to_doubles(m, source, to);
}

/* The first n numbers of a block into a tensor; writes nothing beyond them. */
static inline void block_store_floats(uint32_t dtype, const float *from, uint64_t n,
                                      unsigned char *to) {
    void *target = to;
    if (dtype == KLD_DTYPE_FP16)
        floats_to_halves(KLD_DTYPE_FP16, from, n, target);
    else if (dtype == KLD_DTYPE_BF16)
        floats_to_halves(KLD_DTYPE_BF16, from, n, target);
    else {
        uint64_t i = 0;
        for (; i + FLOATS <= n; i += FLOATS)
            *(vf_any *)((float *)target + i) = vf_as_is(*(const vf *)(from + i));
        store_first((float *)target + i, from + i, (n - i) * sizeof *from, KLD_VECTOR_BYTES);
    }
}

static inline void block_store(uint32_t dtype, const double *from, uint64_t n, unsigned char *to) {
    float single[BLOCK] ALIGNED;
    if (dtype == KLD_DTYPE_FP64) {
        memcpy(to, from, n * 8);
        return;
    }
    doubles_to_floats(whole_vectors(n), from, single);
    block_store_floats(dtype, single, n, to);
}

#endif
