/* quick.c - see quick.h: which jobs fit, the order of passes over a row, the value from its sums,
 * and which rows are too close for FP32. Runs on the device thread and the threads of the team. */
#include "kernels/cpu/quick_passes.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define LN2 0.693147180559945309417

/* Values below this are small differences of what FP32 sums up: they keep fewer than the digits
 * that were promised. */
#define CLOSE (1.0 / 32)
#define AGREE 0.1
#define PIVOT_MOST 60.0
#define PIVOT_LEAST 1e-6 /* of e^-y */
#define LITTLE 0.2       /* of what the heaviest class could have at most, a gradient of js */
#define HEAVY_CENTRE (1.0 / 16)
#define VALUE_MOST 1e30 /* what is centred there is beyond FP32 */

#define COARSE 1.5e-8 /* T = 1 and the powers of 2 have 1.3e-8 */

static bool is_half(uint32_t dtype) { return dtype == KLD_DTYPE_FP16 || dtype == KLD_DTYPE_BF16; }

static const struct kld_cpu_quick_kernels *kernels_of(const char *width) {
#if defined(__x86_64__)
    if (strcmp(width, "avx512") == 0)
        return &kld_cpu_quick_avx512;
    if (strcmp(width, "avx2") == 0)
        return &kld_cpu_quick_avx2;
#endif
    (void)width;
    return NULL;
}

/* Below this 16-bit gradients show what FP32 leaves of a small share: from 1e-5 on, in tests. */
#define SHARE_LEAST 0x1p-12

static bool rule_fits(const struct kld_rule *rule) {
    /* A mixture that is nearly its own side: what is left of the two logarithms is too little. */
    return rule->kind != KLD_RULE_MIXTURE ||
           (fmin(rule->share, rule->rest) >= SHARE_LEAST &&
            rule->of_p * rule->rest + rule->of_q * rule->share >= 0.06 * (rule->of_p + rule->of_q));
}

/* Which gradients need a sum over the row before them. Of KL(own, other) the other's is a
 * difference of the masses, of a cross entropy the predictions'. */
static void plan_centres(struct kld_cpu_quick *quick) {
    const struct kld_rule *rule = &quick->rule;
    const double of[2] = {rule->of_q, rule->of_p};
    for (int side = 0; side < 2; side++) {
        bool centred = true;
        if (rule->kind == KLD_RULE_KL)
            centred = of[side] != 0;
        else if (rule->kind == KLD_RULE_CROSS_ENTROPY)
            centred = side == KLD_CPU_P;
        quick->centred[side] = quick->gradient[side] && centred;
    }
    bool gradient = quick->centred[0] || quick->centred[1];
    bool js = rule->of_p == rule->share && rule->of_q == rule->rest;
    quick->pivoted = rule->kind == KLD_RULE_MIXTURE && js && gradient && !quick->half;
    quick->squares =
        (rule->kind == KLD_RULE_KL && gradient) || quick->pivoted ||
        (rule->kind == KLD_RULE_CROSS_ENTROPY && (quick->gradient[0] || quick->gradient[1]));
}

void kld_cpu_quick_init(struct kld_cpu_quick *quick, const char *width,
                        const struct kld_cpu_work *work, uint64_t span_classes, uint64_t spans) {
    memset(quick, 0, sizeof *quick);
    double temperature = 1 / work->inverse_temperature;
    quick->kernels = kernels_of(width);
    quick->rule = work->rule;
    quick->fits = quick->kernels && !work->none && work->form[0] == KLD_FORM_LOGITS &&
                  work->form[1] == KLD_FORM_LOGITS && work->dtype[0] != KLD_DTYPE_FP64 &&
                  work->dtype[1] != KLD_DTYPE_FP64 && temperature >= 0x1p-20 &&
                  temperature <= 0x1p20 && rule_fits(&quick->rule);
    quick->half = is_half(work->dtype[0]) && is_half(work->dtype[1]);
    memcpy(quick->dtype, work->dtype, sizeof quick->dtype);
    memcpy(quick->gradient, work->gradient, sizeof quick->gradient);
    memcpy(quick->streaming, work->streaming, sizeof quick->streaming);
    plan_centres(quick);
    double scale = work->inverse_temperature / LN2;
    quick->inverse_temperature = work->inverse_temperature;
    quick->scale = (float)scale;
    /* 16 bits do without the low part where it is little: then the temperature is a little another
     * one, for all. What is 2^-t of its row's largest is off by t ln 2 times as much. */
    double low = scale - (double)quick->scale;
    quick->coarse = quick->half && fabs(low) <= COARSE * scale;
    if (quick->coarse)
        quick->inverse_temperature = (double)quick->scale * LN2;
    else
        quick->scale_low = (float)low;
    quick->limit = (float)(0x1p17 / scale);
    quick->span_classes = span_classes;
    quick->spans = spans;
}

/* To another reference and offset. Sums of 0 stay 0, whatever the distance. */
static void move(struct kld_cpu_partial *sums, const double reference[2], double offset) {
    double by = sums->value - offset;
    double apart = (sums->max[1] - sums->max[0]) - (reference[1] - reference[0]);
    sums->cross += apart * sums->sum[KLD_CPU_P];
    for (int side = 0; side < 2; side++) {
        double distance = sums->max[side] - reference[side];
        double factor = distance == 0 ? 1 : exp2(distance);
        if (by != 0) {
            sums->square[side] += by * (2 * sums->dot[side] + by * sums->sum[side]);
            sums->dot[side] += by * sums->sum[side];
        }
        sums->sum[side] *= factor;
        sums->dot[side] *= factor;
        sums->square[side] *= factor;
        sums->max[side] = reference[side];
        if (side == KLD_CPU_P)
            sums->cross *= factor;
    }
    sums->value = offset;
}

void kld_cpu_quick_fold(const struct kld_cpu_quick *quick, struct kld_cpu_partial *total,
                        const struct kld_cpu_partial *part) {
    double reference[2];
    bool same = true;
    for (int side = 0; side < 2; side++) {
        reference[side] = fmax(total->max[side], part->max[side]);
        same = same && total->max[side] == part->max[side];
    }
    struct kld_cpu_partial moved = *part;
    if (!same) {
        double offset = reference[KLD_CPU_Q];
        if (quick->rule.kind != KLD_RULE_CROSS_ENTROPY)
            offset = reference[KLD_CPU_P] - offset;
        move(total, reference, offset);
        move(&moved, reference, offset);
    }
    kld_cpu_quick_add(total, &moved);
}

/* false: sums of nothing, or of something that is no number. */
static bool row_init(struct task *task, const struct kld_cpu_partial *sums) {
    struct kld_cpu_quick_row *row = &task->row;
    double log2_mass[2];
    for (int side = 0; side < 2; side++) {
        if (!(sums->sum[side] > 0 && sums->sum[side] < (double)INFINITY))
            return false;
        if (!(fabs(sums->top[side]) < (double)task->quick->limit))
            return false;
        log2_mass[side] = log2(sums->sum[side]);
        row->reference[side] = sums->max[side];
        row->log_mass[side] = (sums->max[side] + log2_mass[side]) * LN2;
        row->inverse_mass[side] = 1 / sums->sum[side];
    }
    row->apart = (sums->max[1] - sums->max[0]) + (log2_mass[1] - log2_mass[0]);
    row->close = false;
    row->factor = task->whole->gradient_factor * task->quick->inverse_temperature;
    for (int side = 0; side < 2; side++) {
        double norm = fabs(row->inverse_mass[side] * row->factor);
        if (task->whole->gradient[side] && norm != 0 && !(norm >= FLT_MIN && norm <= FLT_MAX))
            return false; /* FP32 has no such number, though it may have the gradients */
    }
    return true;
}

/* KL(p, q) and KL(q, p) of a row that is close, the mean squares of their logarithms, and what
 * their gradients centre. */
struct refined {
    double divergence[2], square[2], centre[2];
};

/* What FP32 leaves of a sum over the row is about 1e-7 of the root of the sum of its terms'
 * squares, and some of all of them: on the class with the largest mass that must not show beside
 * the largest of the gradients. */
static bool shows(double squares, double terms, double mass, double largest, double gradient) {
    return !(largest * (2 * sqrt(squares) + 0.3 * terms) <= gradient * mass);
}

#define CAUTION 0.4 /* where double is the other way, and not the stages */

/* Is the centre of a side, or the difference of the masses, too little for its gradient? */
static bool is_too_little(const struct task *task, const struct kld_cpu_partial *sums,
                          const double mass[2], bool centred) {
    const struct kld_cpu_quick *quick = task->quick;
    const double of[2] = {quick->rule.of_q, quick->rule.of_p};
    double least = centred && !task->row.exact ? CAUTION : 1;
    bool little = false;
    for (int side = 0; side < 2; side++) {
        if (!task->whole->gradient[side])
            continue;
        if (!centred || of[1 - side] != 0)
            little = little || shows(sums->sum[KLD_CPU_P], sums->cross, mass[KLD_CPU_Q],
                                     sums->max[KLD_CPU_Q], least * sums->max[KLD_CPU_P]);
        if (centred && quick->centred[side] && !task->row.exact)
            little = little || shows(sums->unevenness[side], sums->distance[side], mass[side],
                                     sums->max[KLD_CPU_Q], sums->top[side]);
    }
    return little;
}

/* Makes row.apart good to a part of the row's differences, and so the centres. Where FP32 will not
 * do for those, once more in double. false: too little for the gradients, or there is no number. */
static bool refine(struct task *task, struct refined *ret_refined) {
    struct kld_cpu_quick_row *row = &task->row;
    const struct kld_cpu_quick *quick = task->quick;
    struct kld_cpu_partial sums;
    bool centred =
        quick->rule.kind == KLD_RULE_KL && !quick->half && (quick->centred[0] || quick->centred[1]);
    /* The ratio as it will be multiplied with. */
    row->ratio = (float)(row->inverse_mass[KLD_CPU_P] / row->inverse_mass[KLD_CPU_Q]);
    row->apart = row->reference[KLD_CPU_P] - row->reference[KLD_CPU_Q] - log2((double)row->ratio);
    run_pass(task, pass_refine, &sums);
    double x = sums.dot[KLD_CPU_P] / sums.sum[KLD_CPU_Q], log = log1p(x);
    if (!(x > -0.5 && x < 0.5 && sums.value + sums.dot[KLD_CPU_Q] < (double)INFINITY))
        return false;
    const double mass[2] = {sums.sum[KLD_CPU_Q], sums.sum[KLD_CPU_Q] * (1 + x)};
    if (is_too_little(task, &sums, mass, centred)) {
        if (!centred || row->exact)
            return false;
        row->exact = true;
        return refine(task, ret_refined);
    }
    ret_refined->divergence[KLD_CPU_P] = sums.value / mass[KLD_CPU_P] + (x / (1 + x) - log);
    ret_refined->divergence[KLD_CPU_Q] = sums.dot[KLD_CPU_Q] / mass[KLD_CPU_Q] - (x - log);
    for (int side = 0; side < 2; side++) {
        ret_refined->square[side] = sums.square[side] / mass[side] * (LN2 * LN2);
        ret_refined->centre[side] = ret_refined->divergence[side];
        if (!centred || row->exact || !quick->centred[side])
            continue;
        double mean = (sums.centre[side] / mass[side] + row->near[side]) * LN2 - log;
        ret_refined->centre[side] = side == KLD_CPU_P ? mean : -mean;
    }
    row->apart += log / LN2;
    row->close = true;
    return true;
}

/* The largest masses of both sides are the same but for little: where the rest of the row differs
 * more, what is left of the differences' ratio shows in their gradients. */
static bool heaviest_agree(const struct task *task, const struct kld_cpu_partial *sums) {
    double d = (sums->top[KLD_CPU_P] - sums->top[KLD_CPU_Q]) * task->quick->inverse_temperature -
               task->row.apart * LN2;
    return (task->whole->gradient[0] || task->whole->gradient[1]) && fabs(d) < AGREE;
}

/* A gradient x (l - centre) is small against both where l is much the same for all the mass: by so
 * much are the digits fewer. square: the mean of l^2. */
static bool is_centred_away(const struct kld_cpu_quick *quick, double square, double centre) {
    double least = quick->half ? 4e-3 : 0.03;
    if (quick->rule.kind == KLD_RULE_CROSS_ENTROPY)
        least = 0.01; /* ln q lies far from 0, and only its sum suffers from that */
    return !(square - centre * centre >= least * square);
}

/* Below this the variance of l is too little for what is known of centre and apart without
 * refine(). */
#define VARIANCE_LEAST 0.02

static bool row_of_kl(struct task *task, const struct kld_cpu_partial *sums, double *ret_value) {
    const struct kld_cpu_quick *quick = task->quick;
    const double of[2] = {quick->rule.of_q, quick->rule.of_p};
    double shift = task->row.apart - (sums->max[1] - sums->max[0]), total = 0;
    struct refined found = {{0}, {0}, {0}};
    bool close = false;
    for (int side = 0; side < 2; side++) {
        double mean = sums->dot[side] / sums->sum[side] - shift; /* of d */
        if (of[side] == 0)
            continue;
        found.divergence[side] = (side == KLD_CPU_P ? mean : -mean) * LN2;
        found.centre[side] = found.divergence[side];
        task->row.near[side] = mean;
        total += of[side] * found.divergence[side];
        if (!quick->centred[side])
            continue;
        double away = sums->dot[side] / sums->sum[side];
        double variance = (sums->square[side] / sums->sum[side] - away * away) * (LN2 * LN2);
        found.square[side] = variance + found.divergence[side] * found.divergence[side];
        close = close || !(variance >= VARIANCE_LEAST);
    }
    if (!(total < VALUE_MOST))
        return false;
    close = close || heaviest_agree(task, sums);
    if (close || !(total >= (of[0] + of[1]) * CLOSE)) {
        if (!refine(task, &found))
            return false;
        total = fmax(0, of[0] * found.divergence[0] + of[1] * found.divergence[1]);
    }
    for (int side = 0; side < 2; side++) {
        task->row.centre[side] = found.centre[side];
        if (quick->centred[side] &&
            is_centred_away(quick, found.square[side], found.divergence[side]))
            return false;
    }
    *ret_value = total;
    return true;
}

static bool row_of_cross_entropy(struct task *task, const struct kld_cpu_partial *sums,
                                 double *ret_value) {
    const struct kld_cpu_quick *quick = task->quick;
    double mass = sums->sum[KLD_CPU_P], mean = sums->dot[KLD_CPU_P] / mass;
    double total = LN2 * (log2(sums->sum[KLD_CPU_Q]) - mean);
    if (!(total >= CLOSE && total < VALUE_MOST))
        return false;
    if (quick->gradient[KLD_CPU_Q]) {
        double shift = task->row.apart - (sums->max[1] - sums->max[0]);
        struct refined ignored;
        bool close = !(LN2 * (sums->cross / mass - shift) >= CLOSE) || heaviest_agree(task, sums);
        if (close && !refine(task, &ignored))
            return false;
    }
    if (quick->gradient[KLD_CPU_P]) {
        double variance = (sums->square[KLD_CPU_P] / mass - mean * mean) * (LN2 * LN2);
        if (!(variance >= VARIANCE_LEAST) ||
            is_centred_away(quick, variance + total * total, total))
            return false;
    }
    task->row.centre[KLD_CPU_P] = total;
    *ret_value = total;
    return true;
}

static void set_pivot(struct task *task, int side, double y) {
    const double share[2] = {task->quick->rule.rest, task->quick->rule.share};
    double less = exp(-y), m = share[side] + share[1 - side] * less;
    task->row.pivot[side] = (struct kld_cpu_quick_pivot){
        .at = y,
        .height = -share[side] * log(m),
        .of = share[side],
        .weight = share[1 - side] * less / m,
        .lack = share[side] / m,
    };
}

/* Near to where h is its centre: from the mean and the variance of y, as far as a parabola goes. */
static double pivot_near(const struct task *task, int side, double mean, double variance) {
    const double share[2] = {task->quick->rule.rest, task->quick->rule.share};
    double part = share[1 - side] * exp(-mean), m = share[side] + part, weight = part / m;
    double less = m * exp(weight * (1 - weight) * variance / 2) - share[side];
    return less < share[1 - side] ? fmin(-log(less / share[1 - side]), mean) : 0;
}

/* From the means of ln p - ln q over both sides. */
static void find_pivots(struct task *task, const struct kld_cpu_partial *sums) {
    double shift = task->row.apart - (sums->max[1] - sums->max[0]);
    task->row.exact = task->row.rough = false;
    for (int side = 0; side < 2; side++) {
        double mean = sums->dot[side] / sums->sum[side];
        double variance = (sums->square[side] / sums->sum[side] - mean * mean) * (LN2 * LN2);
        mean = (mean - shift) * LN2;
        mean = fmin(fmax(side == KLD_CPU_P ? mean : -mean, 0), PIVOT_MOST);
        set_pivot(task, side, pivot_near(task, side, mean, variance));
        double top = sums->top[side] * task->quick->inverse_temperature - task->row.log_mass[side];
        task->top[side] = sums->top[side];
        task->row.exact = task->row.exact || !(top < log(HEAVY_CENTRE));
    }
}

/* To where h is its centre, so that what FP32 rounds off is a part of h less the centre and not of
 * h: a class that holds much may have next to none of it, and its row's largest gradient be small.
 * h is concave in y, and what it takes off a side's logarithm on average is no less than 0: so the
 * place lies between 0 and the mean of y. Where h hardly depends on y any more, it stays. */
static void move_pivot(struct task *task, int side) {
    const double share[2] = {task->quick->rule.rest, task->quick->rule.share};
    double height = task->row.pivot[side].height, *centre = &task->row.centre[side];
    double less = (exp(-(height + *centre) / share[side]) - share[side]) / share[1 - side];
    if (!(less > PIVOT_LEAST && less < 1 + PIVOT_LEAST))
        return;
    set_pivot(task, side, -log(less));
    *centre += height - task->row.pivot[side].height;
}

/* The sums' ratio is known to some 1e-8, and so are what is centred and its centre: too little for
 * a class that weighs much where no gradient of the row is large beside that. Of a class that is
 * all there is both go by the little that it is not. */
static bool is_little(const struct task *task, int side, const struct kld_cpu_partial *sums,
                      double variance) {
    double z = task->top[side] * task->quick->inverse_temperature - task->row.log_mass[side];
    double top = exp(z), least = sums->max[side] - top * fabs(sums->dot[side]);
    return !(least >= LITTLE * top * (1 - top) * sqrt(variance));
}

static bool row_of_mixture(struct task *task, const struct kld_cpu_partial *scanned,
                           double *ret_value) {
    const struct kld_cpu_quick *quick = task->quick;
    const struct kld_rule *rule = &quick->rule;
    struct kld_cpu_partial sums;
    struct refined ignored;
    if (quick->pivoted)
        find_pivots(task, scanned);
    run_pass(task, pass_value, &sums);
    if (!(sums.value < VALUE_MOST))
        return false;
    if (!(sums.value >= (rule->of_p * rule->rest + rule->of_q * rule->share) * CLOSE)) {
        if (!refine(task, &ignored))
            return false;
        run_pass(task, pass_value, &sums);
        sums.value = fmax(0, sums.value);
    }
    for (int side = 0; side < 2; side++) {
        task->row.centre[side] = sums.dot[side];
        double centre = sums.dot[side] * sums.dot[side], variance = sums.square[side] - centre;
        bool little = quick->half && !task->row.close && !(variance >= 1e-4);
        if (!quick->centred[side])
            continue;
        if (quick->pivoted && is_little(task, side, &sums, variance))
            return false;
        if (quick->pivoted)
            task->row.rough = task->row.rough || !(variance >= 0.5 * sums.square[side]);
        else if (little || is_centred_away(quick, sums.square[side], sums.dot[side]))
            return false;
    }
    if (task->row.rough && !task->row.exact) {
        struct kld_cpu_partial exact;
        task->row.exact = true;
        run_pass(task, pass_value, &exact);
        memcpy(task->row.centre, exact.dot, sizeof exact.dot);
    }
    for (int side = 0; quick->pivoted && !task->row.rough && side < 2; side++)
        move_pivot(task, side);
    *ret_value = sums.value;
    return true;
}

/* What a softmax takes off +-1/2 is one less a sum of masses: made of the others' masses. */
static bool row_of_tv(struct task *task, double *ret_value) {
    struct kld_cpu_partial sums;
    struct refined ignored;
    run_pass(task, pass_value, &sums);
    if (!(sums.value < VALUE_MOST))
        return false;
    if (!(sums.value >= CLOSE / 2)) {
        if (!refine(task, &ignored))
            return false;
        run_pass(task, pass_value, &sums);
    }
    for (int side = 0; side < 2; side++) {
        double above = sums.dot[side], below = sums.sum[side], same = sums.square[side];
        double *step = task->row.step[side];
        step[side == KLD_CPU_P ? 2 : 0] = below + same / 2;
        step[1] = (below - above) / 2;
        step[side == KLD_CPU_P ? 0 : 2] = -(above + same / 2);
    }
    *ret_value = sums.value;
    return true;
}

bool kld_cpu_quick_run(const struct kld_cpu_quick *quick, struct kld_cpu_team *team,
                       struct kld_cpu_partial *scratch, const struct kld_cpu_span *row,
                       double *ret_value) {
    struct task task = {.quick = quick, .whole = row, .team = team, .scratch = scratch};
    struct kld_cpu_partial sums = {0};
    double total = 0;
    bool fine = false;
    run_pass(&task, pass_scan, &sums);
    if (!row_init(&task, &sums))
        return false;
    switch (quick->rule.kind) {
    case KLD_RULE_KL: fine = row_of_kl(&task, &sums, &total); break;
    case KLD_RULE_CROSS_ENTROPY: fine = row_of_cross_entropy(&task, &sums, &total); break;
    case KLD_RULE_MIXTURE: fine = row_of_mixture(&task, &sums, &total); break;
    default: fine = row_of_tv(&task, &total);
    }
    if (!fine)
        return false;
    if (row->gradient[0] || row->gradient[1])
        run_pass(&task, pass_write, &sums);
    *ret_value = total;
    return true;
}
