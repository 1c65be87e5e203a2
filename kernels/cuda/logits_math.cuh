/* logits_math.cuh - the arithmetic of one pair of logits, without memory or threads.
 *
 * Exponentials are powers of 2 against an integer reference c: 2^(z s - c) = 2^(k - c) (1 + w),
 * with s = log2(e) / T, k = round(z s) and w = 2^(z s - k) - 1. A sum over parts of a row that have
 * different references is put together without rounding. In FP32 the power 2^(k - c) and w stay
 * apart until they are added, so that a sum is good to 1e-8 and not to 1e-7; 16 bits take 2^x of
 * the hardware (2e-7).
 *
 * q - p is max(p, q) (1 - e^-|d|), up to its sign, with d = ln p - ln q taken from the difference
 * of the logits: nothing cancels, and one exponential serves the pair. */
#ifndef KLD_KERNELS_CUDA_LOGITS_MATH_CUH
#define KLD_KERNELS_CUDA_LOGITS_MATH_CUH

#include "kernels/cuda/math.cuh"
#include "kernels/rule.h"

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453

/* A double as two floats. */
struct two_floats {
    float high, low;
    __device__ __forceinline__ two_floats() {}
    /* has_low: else what the high part leaves is not wanted. */
    __device__ __forceinline__ explicit two_floats(double x, bool has_low = true) {
        high = (float)x;
        low = has_low ? (float)(x - (double)high) : 0.0f;
    }
};

/* log2(e) / T and 1 / T. */
struct temperature {
    two_floats scale, inverse;
    __device__ __forceinline__ temperature() {}
    __device__ __forceinline__ explicit temperature(double inverse_temperature)
        : scale(inverse_temperature * LOG2_E), inverse(inverse_temperature) {}
};

/* A number as part 2^power with |part| at most 1, also where it is less than 2^-40: masses that are
 * multiplied by the power of 2 are not to become 0 by it. */
struct split_factor {
    int power;
    double part;

    __device__ __forceinline__ explicit split_factor(double x) {
        power = min(max(((__double2hiint(x) >> 20) & 2047) - 1022, -40), 1000);
        part = x * __hiloint2double((1023 - power) << 20, 0);
    }
};

/* z s = k + r and 2^(z s) = 2^k (1 + w); k is a whole number. |z s| < 2^22, beyond that k is only
 * near. */
struct exp_parts {
    float k, r, w;
};

static __device__ __forceinline__ exp_parts exp_split(float z, const temperature &t) {
    const float round = 12582912.0f; /* 1.5 * 2^23 */
    exp_parts e;
    e.k = fmaf(z, t.scale.high, round) - round;
    float r = fmaf(z, t.scale.high, -e.k);
    r = fmaf(z, t.scale.low, r);
    /* (2^r - 1) / r on [-1/2, 1/2], minimax; 2^r is off by 2e-9 of itself */
    float y = fmaf(r, 0.0001535336196f, 0.001339887502f);
    y = fmaf(y, r, 0.009618436918f);
    y = fmaf(y, r, 0.05550332367f);
    y = fmaf(y, r, 0.2402264774f);
    y = fmaf(y, r, 0.6931471825f);
    e.r = r;
    e.w = y * r;
    return e;
}

/* 2^(z s - c) in one exponential of the hardware, with k the nearest whole number, and r the rest.
 * What is 2^-100 of the reference or less, -inf too, counts as that. Above 2^127 it is no number
 * to use, nor shows that it is none: spoil_if_above() of logits_merge.cuh. */
struct rough_side {
    float k, r, power;

    __device__ __forceinline__ rough_side(float z, float c, const temperature &t) {
        const float round = 12582912.0f - c; /* 1.5 * 2^23: its last bits are the whole number */
        z = max_nan(z, (c - 100.0f) * reciprocal(t.scale.high));
        k = fmaf(z, t.scale.high, round);
        r = fmaf(z, t.scale.high, -(k - round));
        r = fmaf(z, t.scale.low, r);
        power = __uint_as_float((__float_as_uint(k) << 23) + __float_as_uint(exp2_fast(r)));
    }
};
/* a - b exactly: high + low. Both finite. */
static __device__ __forceinline__ two_floats subtract(float a, float b) {
    two_floats u;
    u.high = a - b;
    float back = u.high - a;
    u.low = (a - (u.high - back)) - (b + back);
    return u;
}

/* 1 - e^-x for x >= 0, to 1 unit in the last place. */
static __device__ __forceinline__ float one_minus_exp(float x) {
    /* (1 - e^-x) / x on [0, 1], minimax, 2e-9 */
    float y = fmaf(x, 0.0001283807069f, -0.001298663672f);
    y = fmaf(y, x, 0.008273095824f);
    y = fmaf(y, x, -0.04164557904f);
    y = fmaf(y, x, 0.1666630954f);
    y = fmaf(y, x, -0.4999997616f);
    y = fmaf(y, x, 1.0f);
    float far = 1.0f - exp2_fast(x * -1.44269504f);
    return x < 1.0f ? y * x : far;
}

/* (e^v - 1 - v) / v^2 on |v| <= 1, minimax, 3e-9. */
static __device__ __forceinline__ float expm1_rest(float v) {
    float y = fmaf(v, 2.812654672e-6f, 2.535864491e-5f);
    y = fmaf(y, v, 0.000198369867f);
    y = fmaf(y, v, 0.001388539492f);
    y = fmaf(y, v, 0.00833334525f);
    y = fmaf(y, v, 0.04166673667f);
    y = fmaf(y, v, 0.1666666658f);
    return fmaf(y, v, 0.5f);
}

/* e^x and e^x - 1 for x in [-80, 80]; low is what x was rounded by. */
struct power_less {
    float power, less;

    __device__ __forceinline__ power_less(float x, float low) {
        const float round = 12582912.0f; /* 1.5 * 2^23: its last bits are the whole number */
        float at = fmaf(x, 1.44269504f, round), k = at - round;
        float r = fmaf(k, -0.693359375f, x);
        r = fmaf(k, 2.12194440e-4f, r) + low;
        /* (e^r - 1 - r) / r^2 on [-ln(2)/2, ln(2)/2], minimax, 1e-8 */
        float y = fmaf(r, 0.00139464973f, 0.00836661085f);
        y = fmaf(y, r, 0.0416662805f);
        y = fmaf(y, r, 0.166665435f);
        y = fmaf(y, r, 0.5f);
        y = fmaf(__fmul_rn(r, r), y, r);
        float scale = __int_as_float((__float_as_int(at) << 23) + 0x3f800000);
        less = fmaf(scale, y, __fadd_rn(scale, -1.0f));
        power = fmaf(scale, y, scale);
    }
};

/* mean = 1 + s = 2^n (1 + f) with f in [-1/4, 1/2), and what gives its logarithm, f - f^2 y beside
 * that of 2^n. Which of s and the mean is the better known: `rounded`: the mean. */
struct log_parts {
    float f, y, n, scale; /* scale: 2^-n */

    __device__ __forceinline__ log_parts(float s, float mean, bool rounded) {
        int k = (__float_as_int(mean) - 0x3f400000) & (int)0xff800000;
        scale = __int_as_float(0x3f800000 - k);
        f = rounded ? fmaf(mean, scale, -1.0f) : fmaf(s, scale, __fadd_rn(scale, -1.0f));
        /* (f - ln(1 + f)) / f^2, minimax, 5e-9 */
        y = fmaf(f, 0.0461981446f, -0.105925903f);
        y = fmaf(y, f, 0.131938815f);
        y = fmaf(y, f, -0.144681066f);
        y = fmaf(y, f, 0.16642867f);
        y = fmaf(y, f, -0.199909627f);
        y = fmaf(y, f, 0.250002325f);
        y = fmaf(y, f, -0.333334535f);
        y = fmaf(y, f, 0.5f);
        n = __int_as_float((k >> 23) + 0x4b400000) - 12582912.0f;
    }
    /* The logarithm, to 3 units in the last place. */
    __device__ __forceinline__ float log() const {
        return fmaf(n, 0.693147181f, fmaf(__fmul_rn(f, f), -y, f));
    }
    /* ln(1 + s) - s / (1 + s), ~ s^2 / 2, to some units in the last place; inverse: 1 / (1 + f). */
    __device__ __forceinline__ float log_less(float inverse) const {
        float whole = fmaf(n, 0.693147181f, __fadd_rn(scale, -1.0f));
        float part = n == 0.0f ? __fmul_rn(f, inverse) : fmaf(-scale, inverse, 1.0f);
        return fmaf(f, part, fmaf(__fmul_rn(f, f), -y, whole));
    }
};

/* 1 + w (e^x - 1) for 0 <= w <= 1, with v = 1 - w for where e^x is small beside it. */
struct mean_of_power {
    float s, mean; /* s: mean - 1 */
    bool rounded;  /* s is */

    __device__ __forceinline__ mean_of_power(float w, float v, const power_less &e) {
        s = __fmul_rn(w, e.less);
        rounded = s < -0.5f;
        mean = rounded ? fmaf(w, e.power, v) : __fadd_rn(s, 1.0f);
    }
    __device__ __forceinline__ float log() const { return log_parts(s, mean, rounded).log(); }
};

/* ---- FP64, where FP32 is not enough and the library's functions would take their time
 * ------------
 */

/* 1 / x for x within the range of FP32, to 1e-13 of it. */
static __device__ __forceinline__ double wide_reciprocal(double x) {
    double y = (double)reciprocal((float)x);
    y = fma(fma(-x, y, 1.0), y, y);
    return fma(fma(-x, y, 1.0), y, y);
}

/* 2^x to 1e-10 of it; 0 below 2^-1000, 2^1000 beyond that, NaN of NaN. */
static __device__ __forceinline__ double wide_exp2(double exponent) {
    double x = fmin(fmax(exponent, -1000.0), 1000.0), k = rint(x), r = (x - k) * LN_2;
    double y = fma(r, 1.0 / 40320, 1.0 / 5040);
    y = fma(y, r, 1.0 / 720);
    y = fma(y, r, 1.0 / 120);
    y = fma(y, r, 1.0 / 24);
    y = fma(y, r, 1.0 / 6);
    y = fma(y, r, 0.5);
    y = fma(y, r, 1.0);
    y = fma(y, r, 1.0);
    y *= __hiloint2double((1023 + (int)k) << 20, 0);
    return exponent > -1000.0 ? y : isnan(exponent) ? exponent : 0.0;
}

/* ln x for normal x > 0, to 1e-10 of it; less: x - 1, as exactly as it is known. */
static __device__ __forceinline__ double wide_log(double x, double less) {
    int k = (__double2hiint(x) - 0x3fe80000) >> 20; /* x in 2^k [3/4, 3/2) */
    x *= __hiloint2double((1023 - k) << 20, 0);
    double s = (k == 0 ? less : x - 1.0) * wide_reciprocal(x + 1.0), z = s * s;
    /* 2 atanh(s) / s, |s| <= 1/5 */
    double y = fma(z, 2.0 / 13, 2.0 / 11);
    y = fma(y, z, 2.0 / 9);
    y = fma(y, z, 2.0 / 7);
    y = fma(y, z, 2.0 / 5);
    y = fma(y, z, 2.0 / 3);
    y = fma(y, z, 2.0);
    return fma((double)k, LN_2, s * y);
}

/* ln(p/m), ln(q/m), (q - p)/m. */
template <class REAL> struct mixture_terms { REAL log_p, log_q, more; };

/* 1 - e^-x for x >= 0, to 1e-10 of it, and e^-x likewise. */
static __device__ __forceinline__ double wide_one_minus_exp(double x, double &power) {
    x = fmin(x, 700.0);
    double k = rint(x * -LOG2_E), r = fma(k, -LN_2, -x);
    double y = fma(r, 1.0 / 362880, 1.0 / 40320);
    y = fma(y, r, 1.0 / 5040);
    y = fma(y, r, 1.0 / 720);
    y = fma(y, r, 1.0 / 120);
    y = fma(y, r, 1.0 / 24);
    y = fma(y, r, 1.0 / 6);
    y = fma(y, r, 0.5);
    y = fma(y, r, 1.0) * r; /* e^r - 1 */
    double scale = __hiloint2double((1023 + (int)k) << 20, 0);
    power = fma(scale, y, scale);
    return (1.0 - scale) - scale * y;
}
static __device__ __forceinline__ double wide_one_minus_exp(double x) {
    double unused;
    return wide_one_minus_exp(x, unused);
}

/* In FP64, of d: a gradient is mass (ln(p/m) - its mean), and what FP32 leaves of that difference
 * is not enough. With E = 1 - e^-|d| and `other` of the smaller side's mass missing, m is the
 * larger mass times 1 - other E, which is own + other e^-|d|: a small `own` is nothing beside
 * the 1. */
static __device__ __forceinline__ mixture_terms<double> mixture_of(const kld_rule &rule, double d) {
    mixture_terms<double> r;
    double own = d < 0 ? rule.rest : rule.share, other = d < 0 ? rule.share : rule.rest;
    double power, e = wide_one_minus_exp(fabs(d), power), m = fma(other, power, own);
    double log_large = -wide_log(m, -other * e), log_small = log_large - fmin(fabs(d), 1e30);
    double more = e * wide_reciprocal(m);
    r.log_p = d < 0 ? log_small : log_large;
    r.log_q = d < 0 ? log_large : log_small;
    r.more = d < 0 ? more : -more;
    return r;
}

#endif
