/* short_rules.h - what short_logits.h is made of: powers of two, logarithms and differences that
 * are good to 1e-10, and the second pass of the rules that need the masses' sums first, mixtures
 * and tv. In double, a row in each lane. Included once by each kernel_*.c; pure. */
#ifndef KLD_KERNELS_CPU_SHORT_RULES_H
#define KLD_KERNELS_CPU_SHORT_RULES_H

#include "kernels/cpu/short.h"

#define LOG2E 1.44269504088896340736
#define LN_OF_2 0.693147180559945309417
#define HALF_ROOT 0.707106781186547524401
#define RANGE_MOST 1000.0 /* of the logits of a row, powers of two: a mass is a normal number */
#define MASS_LEAST 1100.0 /* and this is none */

/* Where a product is used more than once it depends on what surrounds it whether the compiler makes
 * one instruction of it and its sum; a row's bits must not. */
INLINE vd vd_fma(vd a, vd b, vd c) {
#if KLD_VECTOR_BYTES == 64
    return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif KLD_VECTOR_BYTES == 32
    return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

INLINE vd vd_min(vd a, vd b) { return -vd_max(-a, -b); }

/* By the sign bit. */
INLINE vd vd_if_negative(vd x, vd yes, vd no) {
#if KLD_VECTOR_BYTES == 64
    return (vd)_mm512_mask_blend_pd(_mm512_movepi64_mask((__m512i)x), (__m512d)no, (__m512d)yes);
#elif KLD_VECTOR_BYTES == 32
    return (vd)_mm256_blendv_pd((__m256d)no, (__m256d)yes, (__m256d)x);
#else
    return vd_select(x < 0.0, yes, no);
#endif
}

/* 2^x = unit + unit (rest ln 2 + rest^2 square), |rest| <= 1/2. */
struct power {
    vd whole, unit, rest, square;
};

/* For -1000 <= x <= 0. square is off by 4e-11, brief: 7e-10. */
INLINE struct power power_of_two(vd x, bool brief) {
    vd shifted = x + ROUND_MAGIC;
    struct power at = {.whole = shifted - ROUND_MAGIC,
                       .unit = (vd)(((vu64)shifted << 52) + 0x3ff0000000000000u)};
    vd r = x - at.whole, s;
    if (brief) {
        s = vd_of(1.5290948549358506e-05);
        s = s * r + 0.00015453162945475044;
        s = s * r + 0.0013333522307610712;
        s = s * r + 0.009618082557276886;
        s = s * r + 0.055504108714600604;
        s = s * r + 0.24022650760568123;
    } else {
        s = vd_of(1.324638730161211e-06);
        s = s * r + 1.5297323780754e-05;
        s = s * r + 0.00015403491754205606;
        s = s * r + 0.0013333502386086177;
        s = s * r + 0.00961812911970483;
        s = s * r + 0.055504108839096844;
        s = s * r + 0.2402265069591007;
    }
    at.rest = r;
    at.square = s;
    return at;
}

#define SIGN 0x8000000000000000u

INLINE vd vd_abs(vd x) { return (vd)((vu64)x & ~SIGN); }
INLINE vd vd_with_sign(vd x, vd sign) { return (vd)((vu64)x ^ ((vu64)sign & SIGN)); }

/* Of two masses that are e^n apart, of the larger: the smaller, what it is less, and n less that.
 */
struct apart {
    vd n, ratio, less, excess;
};

/* up: e / ln 2; n is |e|. */
INLINE struct apart apart_of(vd up, vd e) {
    struct power y = power_of_two((vd)((vu64)up | SIGN), false);
    vd part = y.rest * vd_fma(y.square, y.rest, vd_of(LN_OF_2)), n = vd_abs(e);
    vd ratio = vd_fma(y.unit, part, y.unit), less = vd_fma(-y.unit, part, 1.0 - y.unit);
    vd excess = vd_select(y.whole == 0.0, y.rest * y.rest * y.square, n - less);
    return (struct apart){n, ratio, less, excess};
}

/* -ln(1 - u) - u, good to a part of itself; y = 1 - u, which is above 2^-1000. half: u <= 1/2. */
INLINE vd log_excess(vd u, vd y, bool half) {
    if (half) { /* 2 atanh(s), s <= 1/3 */
        vd s = u / (2.0 - u), z = s * s;
        vd p = vd_of(0.20787616979571868);
        p = p * z + 0.17464702428206305;
        p = p * z + 0.22264711212772784;
        p = p * z + 0.28570305721739103;
        p = p * z + 0.400000107699511;
        p = p * z + 0.6666666665002362;
        return s * vd_fma(z, p, u);
    }
    /* y = 2^k m, |s| < 0.172; k is 0 where y >= HALF_ROOT. */
    vu64 from = (vu64)y + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu); /* bits of HALF_ROOT */
    vd m = (vd)((vu64)y - (from & 0xfff0000000000000u) + 0x3ff0000000000000u);
    vd k = (vd)((from >> 52) + 0x4330000000000000u) - (0x1p52 + 1023), small = y - HALF_ROOT;
    vd s = vd_if_negative(small, 1.0 - m, u) / (1.0 + m), z = s * s;
    vd p = vd_of(0.19363040903284812);
    p = p * z + 0.22191380918439138;
    p = p * z + 0.28571754849099135;
    p = p * z + 0.3999999879580794;
    p = p * z + 0.6666666666737621;
    vd rest = vd_if_negative(small, vd_fma(k, vd_of(-LN_OF_2), -u), vd_of(0));
    return vd_fma(s, vd_fma(z, p, vd_if_negative(small, vd_of(2), u)), rest);
}

struct short_sums {
    vd max[2];
    vd mass[2], apart; /* A and B, D */
    vd term[2];
    vd mean[2]; /* of h */
    vi64 fine;
};

/* ln(B / A). */
INLINE vd short_sums_log(const struct short_sums *sums) {
    vd x = sums->apart / sums->mass[KLD_CPU_Q];
    return vd_select((x < 0.3) & (x > -0.3), log1p_near(x),
                     vd_log_ratio(sums->mass[KLD_CPU_P], sums->mass[KLD_CPU_Q]));
}

/* of_p p ln(p/m) + of_q q ln(q/m). Of a class in which g is the larger mass and of which m has the
 * share s, and `other` of the smaller: u = other (1 - e^-n), ln(g/m) = -ln(1 - u) = x + u, and what
 * is left of the smaller's logarithm, x - n + u, is x - excess - s less. The terms less own and m
 * on top are g x and g (ratio (x - excess) + s less^2).
 *
 * h in the places of raw: a derivative of the logits over the mass, less what it is where p and q
 * agree. half: js with a beta of 1/2. */
INLINE vd short_mixture_pass(struct short_rows *rows, struct short_sums *sums, bool half,
                             bool gradient) {
    const struct kld_rule *rule = &rows->work->rule;
    vd share = vd_of(half ? 0.5 : rule->share), remain = vd_of(half ? 0.5 : rule->rest);
    vd of_p = half ? share : vd_of(rule->of_p), of_q = half ? share : vd_of(rule->of_q);
    double cross = half ? 0 : rule->of_p * rule->rest - rule->of_q * rule->share;
    vd inverse_q = 1.0 / sums->mass[KLD_CPU_Q], inverse_p = 1.0 / sums->mass[KLD_CPU_P];
    bool to_q = rows->work->gradient[KLD_CPU_Q], to_p = rows->work->gradient[KLD_CPU_P];
    vd log = short_sums_log(sums), value = vd_of(0), mean_q = vd_of(0), mean_p = vd_of(0);
    bool plain = half || (rule->of_p == rule->share && rule->of_q == rule->rest);
    for (uint64_t k = 0; k < rows->blocks; k++) {
        struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES) {
            vd a = vd_load(at->mass[KLD_CPU_Q] + i), b = vd_load(at->mass[KLD_CPU_P] + i);
            vd d = vd_load(at->raw[KLD_CPU_Q] + i) - log;
            struct apart by = apart_of(d * LOG2E, d);
            vd g = vd_if_negative(d, a * inverse_q, b * inverse_p);
            vd s = half ? share : vd_if_negative(d, remain, share);
            vd other = half ? share : vd_if_negative(d, share, remain);
            vd own = half ? share : vd_if_negative(d, of_q, of_p);
            vd below = half ? share : vd_if_negative(d, of_p, of_q);
            vd u = other * by.less, y = vd_fma(other, by.ratio, s), x = log_excess(u, y, half);
            vd rest = vd_fma(s * by.less, by.less, -(by.ratio * by.excess));
            value = vd_fma(g, vd_fma(vd_fma(below, by.ratio, own), x, below * rest), value);
            if (!gradient)
                continue;
            vd high = own * vd_fma(other, by.less, x);
            vd low = below * vd_fma(-s, by.less, x - by.excess);
            if (!plain) { /* what the other mass is of m, less 1 */
                vd scale = vd_with_sign(cross / y, d);
                high = vd_fma(-scale, s * by.less, high);
                low = vd_fma(-scale, u, low);
            }
            if (to_q) {
                vd h = vd_if_negative(d, high, low);
                mean_q = vd_fma(a, h, mean_q);
                vd_store(at->raw[KLD_CPU_Q] + i, h);
            }
            if (to_p) {
                vd h = vd_if_negative(d, low, high);
                mean_p = vd_fma(b, h, mean_p);
                vd_store(at->raw[KLD_CPU_P] + i, h);
            }
        }
    }
    sums->mean[KLD_CPU_Q] = mean_q * inverse_q;
    sums->mean[KLD_CPU_P] = mean_p * inverse_p;
    return vd_max(value, vd_of(0));
}

static vd short_mixture(struct short_rows *rows, struct short_sums *sums, bool gradient) {
    const struct kld_rule *rule = &rows->work->rule;
    if (rule->of_p == 0.5 && rule->share == 0.5)
        return gradient ? short_mixture_pass(rows, sums, true, true)
                        : short_mixture_pass(rows, sums, true, false);
    return gradient ? short_mixture_pass(rows, sums, false, true)
                    : short_mixture_pass(rows, sums, false, false);
}

/* |p - q| / 2; h is the sign of p - q. */
INLINE vd short_tv_pass(struct short_rows *rows, struct short_sums *sums, bool gradient) {
    vd inverse_q = 1.0 / sums->mass[KLD_CPU_Q], inverse_p = 1.0 / sums->mass[KLD_CPU_P];
    vd value = vd_of(0), mean_q = vd_of(0), mean_p = vd_of(0), zero = vd_of(0);
    vd apart = sums->apart / (sums->mass[KLD_CPU_Q] * sums->mass[KLD_CPU_P]);
    for (uint64_t k = 0; k < rows->blocks; k++) {
        struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES) {
            vd a = vd_load(at->mass[KLD_CPU_Q] + i);
            vd difference = vd_load(at->raw[KLD_CPU_P] + i) * inverse_p;
            difference = vd_fma(-apart, a, difference);
            value += vd_abs(difference);
            if (!gradient)
                continue;
            vd h = vd_select(difference == zero, zero, vd_with_sign(vd_of(1), difference));
            mean_q = vd_fma(a, h, mean_q);
            mean_p = vd_fma(vd_load(at->mass[KLD_CPU_P] + i), h, mean_p);
            vd_store(at->raw[KLD_CPU_Q] + i, h);
        }
    }
    sums->mean[KLD_CPU_Q] = mean_q * inverse_q;
    sums->mean[KLD_CPU_P] = mean_p * inverse_p;
    return 0.5 * value;
}

static vd short_tv(struct short_rows *rows, struct short_sums *sums, bool gradient) {
    return gradient ? short_tv_pass(rows, sums, true) : short_tv_pass(rows, sums, false);
}

#endif
