/* stages.h - the steps from the numbers of a block of classes to its terms and gradients: masses
 * and differences of logarithms by form, the rule, the way back from df/dx to the gradient of a
 * form. In double; each step is a loop over arrays of the first-level cache and knows nothing of
 * the others. A block is 256 classes of one row (body.h), or fewer classes of as many rows as a
 * vector has lanes (short.h): what holds for a row is a vector either way. Included once by each
 * kernel_*.c; pure. */
#ifndef KLD_KERNELS_CPU_STAGES_H
#define KLD_KERNELS_CPU_STAGES_H

#include "kernels/cpu/rules.h"
#include "kernels/cpu/vector.h"

/* What a block holds once it is loaded. */
struct columns {
    double raw[2][BLOCK] ALIGNED; /* behind the rule: derivatives, then gradients */
    double mass[2][BLOCK] ALIGNED;
};

/* What is made of it. */
struct block {
    double d[BLOCK] ALIGNED; /* ln p - ln q, or ln q */
    double term[BLOCK] ALIGNED;
};

/* What the steps need of a row: the same in every lane, or of a row in each. */
struct row_constants {
    vd max[2], log_sum[2], inverse_sum[2]; /* logits: of exp((z - max) / T) */
    vd origin[2];          /* logits on both sides: comes off before they are subtracted, */
    vd origin_difference;  /* and this, p less q, behind it */
    vd log_sum_difference; /* p less q */
    vd dot[2];             /* logits: the sum of x df/dx */
    vd factor[2];          /* of the gradients */
};

/* A value whose probability is 0 in each form: it adds nothing to any sum. */
INLINE double padding(uint32_t form) { return form == KLD_FORM_PROBS ? 0 : -(double)INFINITY; }

INLINE bool is_balanced(const struct kld_cpu_work *work) {
    return work->form[0] == KLD_FORM_LOGITS && work->form[1] == KLD_FORM_LOGITS && !work->none;
}

static enum want wanted(const struct kld_cpu_work *work, int side) {
    if (!work->gradient[side])
        return WANT_NOTHING;
    if (work->form[side] == KLD_FORM_PROBS)
        return WANT_SLOPE;
    return work->form[side] == KLD_FORM_LOGITS && !work->none ? WANT_CENTRED : WANT_MOMENT;
}

static void block_masses(const struct kld_cpu_work *work, const struct row_constants *row, int side,
                         struct columns *at, uint64_t m) {
    double *x = at->raw[side];
    double *mass = at->mass[side];
    switch (work->form[side]) {
    case KLD_FORM_PROBS:
        for (uint64_t i = 0; i < m; i += DOUBLES)
            vd_store(mass + i, vd_load(x + i) + 0.0); /* of -0 it makes a 0 */
        break;
    case KLD_FORM_LOGPROBS:
        for (uint64_t i = 0; i < m; i += DOUBLES) { /* of +inf, which is no mass, it makes NaN */
            vd log = vd_load(x + i);
            log = vd_select(log == (double)INFINITY, vd_of(NAN), log);
            vd_store(x + i, log);
            vd_store(mass + i, vd_exp(log));
        }
        break;
    default:
        for (uint64_t i = 0; i < m; i += DOUBLES)
            vd_store(mass + i,
                     vd_exp((vd_load(x + i) - row->max[side]) * work->inverse_temperature) *
                         row->inverse_sum[side]);
    }
}

INLINE vd log_of(const struct kld_cpu_work *work, const struct row_constants *row, int side, vd x) {
    switch (work->form[side]) {
    case KLD_FORM_PROBS: return vd_log_ratio(x, vd_of(1));
    case KLD_FORM_LOGPROBS: return x;
    default: return (x - row->max[side]) * work->inverse_temperature - row->log_sum[side];
    }
}

/* Up to this, in units of T, a constant between the sides comes off behind the subtraction. */
#define NEAR_SIDES 32.0

/* zp - zq is rounded at the size of what lies between the sides: of sides that are near it is exact
 * where logits agree, however large both are. Of sides that are not, each first loses its own
 * maximum, which is exact for the classes next to it. A maximum that is no number is far. */
INLINE void set_origins(struct row_constants *row, double inverse_temperature) {
    vd between = row->max[KLD_CPU_P] - row->max[KLD_CPU_Q], least = vd_of(-NEAR_SIDES);
    vd scaled = between * inverse_temperature;
    vi64 near = (scaled >= least) & (scaled <= -least);
    for (int side = 0; side < 2; side++)
        row->origin[side] = vd_select(near, vd_of(0), row->max[side]);
    row->origin_difference = vd_select(near, between, vd_of(0));
}

/* d = ln p - ln q. Where both sides have one form it comes from the difference or the ratio of
 * what they hold, so that it is exact to rounding where they agree. */
static void block_differences(const struct kld_cpu_work *work, const struct row_constants *row,
                              const struct columns *at, double *d, uint64_t m) {
    const double *q = at->raw[KLD_CPU_Q], *p = at->raw[KLD_CPU_P];
    bool same = work->form[KLD_CPU_Q] == work->form[KLD_CPU_P];
    vd none = vd_of(-INFINITY);
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd x = vd_load(q + i), y = vd_load(p + i), difference;
        vi64 both = vd_load(at->mass[0] + i) == 0.0;
        both &= vd_load(at->mass[1] + i) == 0.0;
        if (same && work->form[KLD_CPU_Q] == KLD_FORM_PROBS) {
            difference = vd_log_ratio(y, x);
        } else {
            vd lq = x, lp = y;
            if (!same) {
                lq = log_of(work, row, KLD_CPU_Q, x);
                lp = log_of(work, row, KLD_CPU_P, y);
                difference = lp - lq;
            } else {
                bool logits = work->form[KLD_CPU_Q] == KLD_FORM_LOGITS;
                if (logits) { /* a class may be -inf only now: so far below the largest */
                    lq = x - row->origin[KLD_CPU_Q];
                    lp = y - row->origin[KLD_CPU_P];
                }
                difference = lp - lq;
                if (logits)
                    difference = (difference - row->origin_difference) * work->inverse_temperature -
                                 row->log_sum_difference;
            }
            difference = vd_select(both & (lq == none) & (lp == none), vd_of(0), difference);
        }
        vd_store(d + i, difference);
    }
}

/* ln q in the place of d. */
static void block_logs(const struct kld_cpu_work *work, const struct row_constants *row,
                       const struct columns *at, double *d, uint64_t m) {
    for (uint64_t i = 0; i < m; i += DOUBLES)
        vd_store(d + i, log_of(work, row, KLD_CPU_Q, vd_load(at->raw[KLD_CPU_Q] + i)));
}

/* Terms and, where wanted, derivatives, in the place of raw. */
static void block_rule(const struct kld_cpu_work *work, const struct row_constants *row,
                       struct columns *at, struct block *block, uint64_t m) {
    const struct rule_block rule = {
        .mass = {at->mass[0], at->mass[1]},
        .d = block->d,
        .term = block->term,
        .derivative = {at->raw[0], at->raw[1]},
        .want = {wanted(work, 0), wanted(work, 1)},
        .balanced = is_balanced(work),
    };
    if (work->rule.kind == KLD_RULE_CROSS_ENTROPY)
        block_logs(work, row, at, block->d, m);
    else
        block_differences(work, row, at, block->d, m);
    rule_run(&work->rule, &rule, m);
}

/* From derivatives to the gradient of one side, in their place. */
static void block_gradient(const struct kld_cpu_work *work, const struct row_constants *row,
                           int side, struct columns *at, uint64_t m) {
    bool logits = work->form[side] == KLD_FORM_LOGITS;
    vd dot = row->dot[side], factor = row->factor[side];
    for (uint64_t i = 0; i < m; i += DOUBLES) {
        vd x = vd_load(at->raw[side] + i), mass = vd_load(at->mass[side] + i);
        if (logits) /* a class of probability 0 takes nothing, even off an infinite sum */
            x = x - vd_select(mass == 0.0, vd_of(0), mass * dot);
        vd_store(at->raw[side] + i, x * factor);
    }
}

/* Of one row: its lanes added up. */
INLINE vd block_sums(const double *x, uint64_t m) {
    vd sum = vd_of(0);
    for (uint64_t i = 0; i < m; i += DOUBLES)
        sum += vd_load(x + i);
    return sum;
}

#endif
