/* short_logits.h - a KL, either way or both, of short rows of logits of 16 and 32 bits: as short.h
 * a row in each lane and in double, but with exponentials that are no better than they need be, and
 * one pass for masses, sums and terms. Rows that hold infinities or NaN, or are as far apart that a
 * mass would underflow, are left to short.h. Included once by each kernel_*.c; runs on the threads
 * of the team. What a row yields does not depend on its lane or on the rows beside it.
 *
 * With a = e^((zq - max zq) / T), b the same of p, and e = ln(b / a), all comes of the larger of
 * the two and of |e|. Of their sums A and B and of D = B - A, KL(p, q) is
 * sum(b e - b + a) / B + D / B - ln(B / A); q - p is a D / (A B) - (b - a) / B; and p (ln p/q - KL)
 * is b / B (e - sum(b e) / B). Nothing cancels there that is not small against the largest of the
 * row: so what a mass is off by, 1e-9 of itself and the same for a and b, is off a result by little
 * more.
 */
#ifndef KLD_KERNELS_CPU_SHORT_LOGITS_H
#define KLD_KERNELS_CPU_SHORT_LOGITS_H

#include "kernels/cpu/short.h"

#define LOG2E 1.44269504088896340736
#define LN_OF_2 0.693147180559945309417
#define RANGE_MOST 1000.0 /* of the logits of a row, powers of two: a mass is a normal number */

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

struct short_sums {
    vd max[2];
    vd mass, apart; /* A, D */
    vd term[2];     /* KL(q, p) and KL(p, q) */
    vi64 fine;
};

INLINE bool short_logits_fits(const struct kld_cpu_work *work) {
    double scale = work->inverse_temperature;
    return work->rule.kind == KLD_RULE_KL && is_balanced(work) &&
           work->dtype[0] != KLD_DTYPE_FP64 && work->dtype[1] != KLD_DTYPE_FP64 &&
           scale >= 0x1p-20 && scale <= 0x1p20;
}

/* The largest logits, and which rows are for here. */
static void short_logits_range(const struct short_rows *rows, struct short_sums *sums) {
    vd max[2], min[2];
    for (int side = 0; side < 2; side++) {
        max[side] = vd_of(-INFINITY);
        min[side] = vd_of(-INFINITY);
    }
    for (uint64_t b = 0; b < rows->blocks; b++)
        for (uint64_t i = 0, m = short_entries(rows, b); i < m; i += DOUBLES)
            for (int side = 0; side < 2; side++) {
                vd z = vd_load(rows->columns[b].raw[side] + i);
                max[side] = vd_max(z, max[side]);
                min[side] = vd_max(-z, min[side]);
            }
    double scale = rows->work->inverse_temperature;
    vd between = (max[KLD_CPU_P] - max[KLD_CPU_Q]) * scale;
    sums->fine = (between >= -NEAR_SIDES) & (between <= NEAR_SIDES);
    for (int side = 0; side < 2; side++) {
        sums->max[side] = max[side];
        sums->fine &= (max[side] + min[side]) * (scale * LOG2E) <= RANGE_MOST / 2;
    }
}

/* Masses, in their place e in that of the predictions and b - a in that of the targets. */
INLINE void short_logits_sums(struct short_rows *rows, bool of_q, bool of_p,
                              struct short_sums *sums) {
    double inverse = rows->work->inverse_temperature, scale = inverse * LOG2E;
    vd mass = vd_of(0), apart = vd_of(0), term[2] = {vd_of(0), vd_of(0)}, zero = vd_of(0);
    vd top = sums->max[KLD_CPU_Q], between = sums->max[KLD_CPU_P] - top;
    vu64 sign = (vu64)vd_of(-0.0);
    for (uint64_t k = 0; k < rows->blocks; k++) {
        struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES) {
            vd zq = vd_load(at->raw[KLD_CPU_Q] + i), zp = vd_load(at->raw[KLD_CPU_P] + i);
            vd gap = (zp - zq) - between, e = gap * inverse, up = gap * scale;
            struct power x = power_of_two((zq - top) * scale + vd_max(up, zero), true);
            vd larger = x.unit + x.unit * (x.rest * (x.square * x.rest + LN_OF_2));
            struct power y = power_of_two((vd)((vu64)up | sign), false);
            vd part = y.rest * (y.square * y.rest + LN_OF_2), n = (vd)((vu64)e & ~sign);
            vd ratio = y.unit * part + y.unit, less = (1.0 - y.unit) - y.unit * part;
            vd more = larger * less, smaller = larger * ratio;
            vd a = vd_if_negative(e, larger, smaller), b = vd_if_negative(e, smaller, larger);
            vd difference = (vd)((vu64)more ^ ((vu64)e & sign));
            /* n - less, and of the smaller mass less - n ratio */
            vd excess = vd_select(y.whole == 0.0, y.rest * y.rest * y.square, n - less);
            vd high = larger * excess, low = more * n - high;
            mass += a;
            apart += difference;
            if (of_q)
                term[KLD_CPU_Q] += vd_if_negative(e, high, low);
            if (of_p)
                term[KLD_CPU_P] += vd_if_negative(e, low, high);
            vd_store(at->raw[KLD_CPU_Q] + i, e);
            vd_store(at->raw[KLD_CPU_P] + i, difference);
            vd_store(at->mass[KLD_CPU_Q] + i, a);
            vd_store(at->mass[KLD_CPU_P] + i, b);
        }
    }
    sums->mass = mass;
    sums->apart = apart;
    sums->term[KLD_CPU_Q] = term[KLD_CPU_Q];
    sums->term[KLD_CPU_P] = term[KLD_CPU_P];
}

/* How far a side's mean of e lies from `mean`, which is rounded at its own size: in a row that is
 * sure of its class e less the mean is much smaller there. */
static vd short_logits_rest(const struct short_rows *rows, int side, vd mean, vd mass) {
    vd rest = vd_of(0);
    for (uint64_t k = 0; k < rows->blocks; k++) {
        const struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES)
            rest += vd_load(at->mass[side] + i) * (vd_load(at->raw[KLD_CPU_Q] + i) - mean);
    }
    return rest / mass;
}

/* What a row's gradients are made with: of a, of the difference, and of each side's mass times e
 * less the mean. */
static void short_logits_gradients(struct short_rows *rows, const struct short_sums *sums) {
    const struct kld_cpu_work *work = rows->work;
    const struct kld_rule *rule = &work->rule;
    vd q = sums->mass, p = sums->mass + sums->apart;
    vd mean_q = (sums->apart - sums->term[KLD_CPU_Q]) / q;
    vd mean_p = (sums->apart + sums->term[KLD_CPU_P]) / p;
    vd rest_q = vd_of(0), rest_p = vd_of(0);
    if (rule->of_q != 0 && work->gradient[KLD_CPU_Q])
        rest_q = short_logits_rest(rows, KLD_CPU_Q, mean_q, q);
    if (rule->of_p != 0 && work->gradient[KLD_CPU_P])
        rest_p = short_logits_rest(rows, KLD_CPU_P, mean_p, p);
    vd factor_q = rows->row.factor[KLD_CPU_Q], factor_p = rows->row.factor[KLD_CPU_P];
    vd apart = sums->apart / (q * p), inverse_q = 1.0 / q, inverse_p = 1.0 / p;
    for (uint64_t k = 0; k < rows->blocks; k++) {
        struct columns *at = &rows->columns[k];
        for (uint64_t i = 0, m = short_entries(rows, k); i < m; i += DOUBLES) {
            vd e = vd_load(at->raw[KLD_CPU_Q] + i), a = vd_load(at->mass[KLD_CPU_Q] + i);
            vd b = vd_load(at->mass[KLD_CPU_P] + i);
            vd less = a * apart - vd_load(at->raw[KLD_CPU_P] + i) * inverse_p; /* q - p */
            vd of_q = rule->of_p * less, of_p = -rule->of_q * less;
            if (rule->of_q != 0)
                of_q += rule->of_q * (a * inverse_q * (rest_q - (e - mean_q)));
            if (rule->of_p != 0)
                of_p += rule->of_p * (b * inverse_p * ((e - mean_p) - rest_p));
            vd_store(at->raw[KLD_CPU_Q] + i, of_q * factor_q);
            vd_store(at->raw[KLD_CPU_P] + i, of_p * factor_p);
        }
    }
}

static vd short_logits_value(const struct kld_rule *rule, const struct short_sums *sums) {
    vd q = sums->mass, p = sums->mass + sums->apart, x = sums->apart / q, zero = vd_of(0);
    vd log = vd_select((x < 0.3) & (x > -0.3), log1p_near(x), vd_log_ratio(p, q));
    vd value = zero;
    if (rule->of_p != 0)
        value += rule->of_p * vd_max(sums->term[KLD_CPU_P] / p + (sums->apart / p - log), zero);
    if (rule->of_q != 0)
        value += rule->of_q * vd_max(sums->term[KLD_CPU_Q] / q - (x - log), zero);
    return value;
}

/* -> which rows were done, a bit each; nothing is written of the others. */
static __attribute__((noinline)) uint32_t short_logits(const struct kld_cpu_work *work,
                                                       const struct kld_cpu_span *span,
                                                       uint64_t count, double *ret_value) {
    struct short_rows rows;
    struct short_sums sums;
    uint32_t done = 0;
    short_begin(&rows, work, span, count);
    short_logits_range(&rows, &sums);
    for (uint64_t r = 0; r < count; r++)
        done |= (uint32_t)(sums.fine[r] & 1) << r;
    if (done == 0)
        return 0;
    if (work->rule.of_q == 0)
        short_logits_sums(&rows, false, true, &sums);
    else if (work->rule.of_p == 0)
        short_logits_sums(&rows, true, false, &sums);
    else
        short_logits_sums(&rows, true, true, &sums);
    vd whole = sums.mass + sums.apart + sums.term[0] + sums.term[1];
    vd value = short_logits_value(&work->rule, &sums);
    sums.fine = whole < (double)INFINITY; /* no NaN among them */
    for (uint64_t r = 0; r < count; r++) {
        if (!sums.fine[r])
            done &= ~(1u << r);
        ret_value[r] = value[r];
    }
    if (!work->gradient[0] && !work->gradient[1])
        return done;
    short_logits_gradients(&rows, &sums);
    for (int side = 0; side < 2; side++)
        if (span->gradient[side])
            short_store(&rows, side, span, count, done);
    return done;
}

/* Rows that are not masked, DOUBLES of them at most; of any rule.
 * dots: a gradient needs a sum over its row first. */
static void short_rows(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                       uint64_t count, bool dots, double *ret_value) {
    struct kld_cpu_span left[DOUBLES];
    double value[DOUBLES];
    uint64_t from[DOUBLES], others = 0;
    uint32_t done = short_logits_fits(work) ? short_logits(work, span, count, ret_value) : 0;
    for (uint64_t r = 0; r < count; r++)
        if (!(done >> r & 1)) {
            from[others] = r;
            left[others++] = span[r];
        }
    if (others == 0)
        return;
    short_any(work, left, others, dots, value);
    for (uint64_t k = 0; k < others; k++)
        ret_value[from[k]] = value[k];
}

#endif
