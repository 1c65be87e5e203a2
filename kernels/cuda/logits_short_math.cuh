/* logits_short_math.cuh - the arithmetic of one pair of logits of a short row, in FP32, without
 * memory or threads.
 *
 * Everything is made of d = ln p - ln q. Near (|d| < 1) what a class adds to a KL and q - p are
 * polynomials in d, times the mass: both keep all their digits however small d is. Far away they
 * are differences of masses that differ. A value is a sum of terms x ln(x/y) - x + y >= 0, for
 * which an error of the logarithm of the ratio of the sums is of second order: it need not be
 * exact. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_MATH_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_MATH_CUH

#include "kernels/cuda/logits_math.cuh"

namespace logits_short {

/* (d - 1 + e^-d) / d^2 on [-1, 1]: 1e-7 of it, PRECISE 5e-9. */
template <bool PRECISE> static __device__ __forceinline__ float excess(float d) {
    float y;
    if (PRECISE) {
        y = fmaf(d, -2.8062802564e-6f, 2.5358512245e-5f);
        y = fmaf(y, d, -1.983810197e-4f);
        y = fmaf(y, d, 1.3885396912e-3f);
        y = fmaf(y, d, -8.333339676e-3f);
        y = fmaf(y, d, 4.16667366e-2f);
        y = fmaf(y, d, -0.166666666f);
    } else {
        y = fmaf(d, 2.5288434902e-5f, -2.0329041909e-4f);
        y = fmaf(y, d, 1.388644775e-3f);
        y = fmaf(y, d, -8.330886169e-3f);
        y = fmaf(y, d, 4.16666972e-2f);
        y = fmaf(y, d, -0.166666973f);
    }
    return fmaf(y, d, 0.5f);
}

/* (x - 1 + e^-x) / x^2 on [0, 1], 2e-8 of it. */
static __device__ __forceinline__ float excess_positive(float x) {
    float y = fmaf(x, -1.3742419e-4f, 1.32481796e-3f);
    y = fmaf(y, x, -8.30117045e-3f);
    y = fmaf(y, x, 4.16592554e-2f);
    y = fmaf(y, x, -0.166666037f);
    return fmaf(y, x, 0.49999999f);
}

/* 1 / x to half a unit in the last place or so. */
static __device__ __forceinline__ float reciprocal_precise(float x) {
    float y = reciprocal(x);
    return fmaf(fmaf(-x, y, 1.0f), y, y);
}

/* u / T - shift, rounded about once; infinite where u is. */
static __device__ __forceinline__ float log_ratio_of(float u, float u_low, const two_floats &shift,
                                                     const temperature &t) {
    float d = fmaf(u, t.inverse.high, -shift.high);
    float rest = fmaf(u_low, t.inverse.high, fmaf(u, t.inverse.low, -shift.low));
    return pick(fabsf(d) < CUDART_INF_F, d + rest, d);
}

/* ln(1 + x) for x > -1 given 1 + x too: a unit in the last place where x is small; PRECISE
 * everywhere. */
template <bool PRECISE> static __device__ __forceinline__ float log_of(float x, float more) {
    bool close = x > -0.25f && x < 0.375f;
    float under = 2.0f + x, y = reciprocal(under), s = x * y;
    if (PRECISE)
        s = fmaf(fmaf(-s, under, x), y, s);
    float z = s * s, series = fmaf(z, 0.299647918f, 0.399787219f);
    series = fmaf(series, z, 0.666667145f);
    float near = fmaf(s, series * z, s + s);
    float far = PRECISE ? log_ratio_from<true>(more, 1.0f, x) : log2_fast(more) * 0.693147181f;
    return pick(close, near, far);
}

/* What two masses of one class are to each other, in units of p's sum: a = p A, b = q A. */
struct pair_terms {
    float forward;  /* a ln(p/q) - a + b */
    float backward; /* b ln(q/p) - b + a */
    float more;     /* b - a */
};

/* BACKWARD, MORE: are these wanted? d may be NaN or infinite where a mass is 0. */
template <bool PRECISE, bool BACKWARD, bool MORE>
static __device__ __forceinline__ pair_terms pair_of(float a, float b, float d) {
    pair_terms r;
    bool near = fabsf(d) < 1.0f;
    float slope = d * excess<PRECISE>(d), term = d * slope;
    float less = pick(a > 0.0f, d - 1.0f, 0.0f);
    r.forward = pick(near, a * term, fmaf(a, less, b));
    r.backward = r.more = 0.0f;
    if (BACKWARD) {
        float other = pick(b > 0.0f, -1.0f - d, 0.0f);
        r.backward = pick(near, a * fmaf(-term, 1.0f + d, d * d), fmaf(b, other, a));
    }
    if (MORE && PRECISE) { /* the larger mass times what the other lacks of it */
        float lacks = 1.0f - exp2_fast(fabsf(d) * -1.44269504f);
        float far = pick(d > 0.0f, -a, b) * lacks;
        r.more = pick(near, a * fmaf(d, slope, -d), pick(a + b > 0.0f, far, 0.0f));
    } else if (MORE) {
        r.more = pick(near, a * fmaf(d, slope, -d), b - a);
    }
    return r;
}

/* Of a mixture m, of one class: per mass of the larger side. */
struct mixture_terms_short {
    float log_large, log_small; /* ln(large/m), ln(small/m) */
    float large, small;         /* large ln(large/m) - large + m, and of the small one */
    float more;                 /* (large - small) / m */
    float whole;                /* the same, without a limit */
};

/* x = |d|; lost: what m loses against the larger mass, the share of the smaller side; kept is 1
 * less that. LIMITS: where `limit`, log_large and more are what is missing to what they are where
 * the small side is nothing, -ln kept and 1 / kept: classes that are nearly there differ little. */
template <bool PRECISE, bool LIMITS>
static __device__ __forceinline__ mixture_terms_short mixture_short(float x, float lost, float kept,
                                                                    bool limit) {
    mixture_terms_short r;
    bool near = x < 1.0f;
    float square = x * x * excess_positive(x);
    float far = exp2_fast(x * -1.44269504f);
    float change = pick(near, x - square, 1.0f - far); /* 1 - e^-x */
    float small = pick(near, 1.0f - change, far);      /* e^-x */
    float finite = fminf(x, 4194304.0f);
    /* 1 - e^-x - x e^-x */
    float rest = pick(near, fmaf(x, change, -square), fmaf(-finite, far, change));
    float y = lost * change, m = fmaf(lost, small, kept);
    bool close = y < 0.25f;
    float under = 2.0f - y, s = y * reciprocal(under);
    if (PRECISE)
        s = fmaf(fmaf(-s, under, y), 0.5f, s);
    float z = s * s, series = fmaf(z, 0.299647918f, 0.399787219f);
    series = fmaf(series, z, 0.666667145f);
    float excess_close = z * fmaf(s, series, under); /* -ln(1 - y) - y */
    float log = PRECISE ? log_ratio_from<true>(1.0f, m, y) : log2_fast(m) * -0.693147181f;
    r.log_large = pick(close, y + excess_close, log);
    r.large = pick(close, excess_close, log - y);
    r.log_small = r.log_large - x;
    r.small = fmaf(small, r.large, fmaf(-change, y, rest));
    float inverse = PRECISE ? reciprocal_precise(m) : reciprocal(m);
    r.more = r.whole = change * inverse;
    if (LIMITS) {
        float part = small * (PRECISE ? reciprocal_precise(kept) : reciprocal(kept));
        r.log_large =
            pick(limit, -log_of<PRECISE>(lost * part, fmaf(lost, part, 1.0f)), r.log_large);
        r.more = pick(limit, -part * inverse, r.more);
    }
    return r;
}

} /* namespace logits_short */
#endif
