/* quick.c - see quick.h: which jobs fit, the order of passes over a row, the value from its sums,
 * and which rows are too close for FP32. Runs on the device thread and the threads of the team. */
#include "kernels/cpu/quick.h"

#include <math.h>
#include <string.h>

#define LN2 0.693147180559945309417

/* Values below this are small differences of what FP32 sums up: they keep fewer than the digits
 * that were promised. */
#define CLOSE (1.0 / 32)

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

/* A mixture's gradient is x (ln(x/m) - centre) where the weights are the shares, as in js. */
static bool rule_fits(const struct kld_rule *rule, const bool gradient[2]) {
    switch (rule->kind) {
    case KLD_RULE_KL: return true;
    case KLD_RULE_CROSS_ENTROPY: return !gradient[KLD_CPU_Q] && !gradient[KLD_CPU_P];
    case KLD_RULE_MIXTURE:
        /* A mixture that is nearly its own side: what is left of the two logarithms is too little.
         */
        if (rule->of_p * (1 - rule->share) + rule->of_q * rule->share <
            0.06 * (rule->of_p + rule->of_q))
            return false;
        return (!gradient[0] && !gradient[1]) ||
               (rule->of_p == rule->share && rule->of_q == 1 - rule->share);
    default: return false;
    }
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
                  temperature <= 0x1p20 && rule_fits(&quick->rule, work->gradient);
    quick->half = is_half(work->dtype[0]) && is_half(work->dtype[1]);
    memcpy(quick->dtype, work->dtype, sizeof quick->dtype);
    memcpy(quick->gradient, work->gradient, sizeof quick->gradient);
    memcpy(quick->streaming, work->streaming, sizeof quick->streaming);
    const double of[2] = {quick->rule.of_q, quick->rule.of_p};
    for (int side = 0; side < 2; side++)
        quick->centred[side] =
            work->gradient[side] && of[side] != 0 && quick->rule.kind != KLD_RULE_CROSS_ENTROPY;
    quick->value = quick->rule.kind == KLD_RULE_MIXTURE || quick->centred[0] || quick->centred[1];
    double scale = work->inverse_temperature / LN2;
    quick->inverse_temperature = work->inverse_temperature;
    quick->scale = (float)scale;
    /* 16 bits do without the low part: then the temperature is a little another one, for all. */
    if (quick->half)
        quick->inverse_temperature = (double)quick->scale * LN2;
    else
        quick->scale_low = (float)(scale - (double)quick->scale);
    quick->limit = (float)(0x1p17 / scale);
    quick->span_classes = span_classes;
    quick->spans = spans;
}

/* To another reference and offset. Sums of 0 stay 0, whatever the distance. */
static void move(struct kld_cpu_partial *sums, const double reference[2], double offset) {
    for (int side = 0; side < 2; side++) {
        double distance = sums->max[side] - reference[side];
        double factor = distance == 0 ? 1 : exp2(distance);
        if (offset != sums->value)
            sums->dot[side] += (sums->value - offset) * sums->sum[side];
        sums->sum[side] *= factor;
        sums->dot[side] *= factor;
        sums->max[side] = reference[side];
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
    for (int side = 0; side < 2; side++) {
        total->sum[side] += moved.sum[side];
        total->dot[side] += moved.dot[side];
    }
}

struct task {
    const struct kld_cpu_quick *quick;
    const struct kld_cpu_span *whole;
    struct kld_cpu_quick_row row;
    struct kld_cpu_partial *scratch;
};

static struct kld_cpu_span piece(const struct task *task, uint64_t k) {
    const struct kld_cpu_quick *quick = task->quick;
    struct kld_cpu_span span = *task->whole;
    uint64_t start = k * quick->span_classes, left = span.count - start;
    span.count = left < quick->span_classes ? left : quick->span_classes;
    for (int side = 0; side < 2; side++) {
        uint64_t skip = start * kld_dtype_bytes(quick->dtype[side]);
        span.in[side] += skip;
        if (span.gradient[side])
            span.gradient[side] += skip;
    }
    return span;
}

static void task_scan(void *context, uint64_t k) {
    struct task *task = context;
    struct kld_cpu_span span = piece(task, k);
    task->quick->kernels->scan(task->quick, &span, &task->scratch[k]);
}
static void task_value(void *context, uint64_t k) {
    struct task *task = context;
    struct kld_cpu_span span = piece(task, k);
    task->quick->kernels->value(task->quick, &task->row, &span, &task->scratch[k]);
}
static void task_write(void *context, uint64_t k) {
    struct task *task = context;
    struct kld_cpu_span span = piece(task, k);
    task->quick->kernels->write(task->quick, &task->row, &span);
}

static void scan(struct task *task, struct kld_cpu_team *team, struct kld_cpu_partial *ret_sums) {
    struct kld_cpu_partial here;
    if (team)
        kld_cpu_team_run(team, task->quick->spans, task_scan, task);
    for (uint64_t k = 0; k < task->quick->spans; k++) {
        if (!team) {
            struct kld_cpu_span span = piece(task, k);
            task->quick->kernels->scan(task->quick, &span, &here);
        }
        const struct kld_cpu_partial *part = team ? &task->scratch[k] : &here;
        if (k == 0)
            *ret_sums = *part;
        else
            kld_cpu_quick_fold(task->quick, ret_sums, part);
    }
}

static void value(struct task *task, struct kld_cpu_team *team, struct kld_cpu_partial *ret_sums) {
    struct kld_cpu_partial here;
    *ret_sums = (struct kld_cpu_partial){0};
    if (team)
        kld_cpu_team_run(team, task->quick->spans, task_value, task);
    for (uint64_t k = 0; k < task->quick->spans; k++) {
        if (!team) {
            struct kld_cpu_span span = piece(task, k);
            task->quick->kernels->value(task->quick, &task->row, &span, &here);
        }
        const struct kld_cpu_partial *part = team ? &task->scratch[k] : &here;
        ret_sums->value += part->value;
        ret_sums->dot[0] += part->dot[0];
        ret_sums->dot[1] += part->dot[1];
        ret_sums->sum[0] += part->sum[0];
        ret_sums->sum[1] += part->sum[1];
    }
}

/* A gradient x (l - centre), l = ln(x/y) or ln(x/m), is small against both where l is much the same
 * for all the mass: by so much are the digits fewer. */
static bool is_centred_away(const struct kld_cpu_quick *quick, const struct kld_cpu_partial *sums) {
    double least = quick->half ? 1e-3 : 0.03;
    for (int side = 0; side < 2; side++) {
        double square = sums->dot[side] * sums->dot[side];
        if (quick->centred[side] && !(sums->sum[side] - square >= least * sums->sum[side]))
            return true;
    }
    return false;
}

/* false: sums of nothing, or of something that is no number. */
static bool row_init(struct task *task, const struct kld_cpu_partial *sums) {
    struct kld_cpu_quick_row *row = &task->row;
    for (int side = 0; side < 2; side++) {
        if (!(sums->sum[side] > 0 && sums->sum[side] < (double)INFINITY))
            return false;
        row->reference[side] = sums->max[side];
        row->log2_mass[side] = log2(sums->sum[side]);
        row->log_mass[side] = (row->reference[side] + row->log2_mass[side]) * LN2;
        row->inverse_mass[side] = 1 / sums->sum[side];
    }
    row->factor = task->whole->gradient_factor * task->quick->inverse_temperature;
    return true;
}

/* The value from the sums of the scan, and the least that FP32 may be trusted with. */
static double value_of_sums(struct task *task, const struct kld_cpu_partial *sums,
                            double *ret_least) {
    struct kld_cpu_quick_row *row = &task->row;
    const struct kld_rule *rule = &task->quick->rule;
    if (rule->kind == KLD_RULE_CROSS_ENTROPY) {
        *ret_least = CLOSE;
        return LN2 * (row->log2_mass[KLD_CPU_Q] - sums->dot[KLD_CPU_P] / sums->sum[KLD_CPU_P]);
    }
    double shift = row->log2_mass[KLD_CPU_P] - row->log2_mass[KLD_CPU_Q], total = 0;
    *ret_least = (rule->of_p + rule->of_q) * CLOSE;
    if (rule->of_p != 0)
        total += rule->of_p * (sums->dot[KLD_CPU_P] / sums->sum[KLD_CPU_P] - shift);
    if (rule->of_q != 0)
        total += rule->of_q * (shift - sums->dot[KLD_CPU_Q] / sums->sum[KLD_CPU_Q]);
    return LN2 * total;
}

bool kld_cpu_quick_run(const struct kld_cpu_quick *quick, struct kld_cpu_team *team,
                       struct kld_cpu_partial *scratch, const struct kld_cpu_span *row,
                       double *ret_value) {
    struct task task = {.quick = quick, .whole = row, .scratch = scratch};
    struct kld_cpu_partial sums = {0};
    double total, least;
    scan(&task, team, &sums);
    if (!row_init(&task, &sums))
        return false;
    if (quick->value) {
        const struct kld_rule *rule = &quick->rule;
        value(&task, team, &sums);
        total = sums.value;
        least = (rule->of_p + rule->of_q) * CLOSE;
        if (rule->kind == KLD_RULE_MIXTURE)
            least = (rule->of_p * (1 - rule->share) + rule->of_q * rule->share) * CLOSE;
        memcpy(task.row.centre, sums.dot, sizeof sums.dot);
        if (is_centred_away(quick, &sums))
            return false;
    } else {
        total = value_of_sums(&task, &sums, &least);
    }
    if (!(total >= least && total < (double)INFINITY))
        return false;
    if (row->gradient[0] || row->gradient[1]) {
        if (team) {
            kld_cpu_team_run(team, quick->spans, task_write, &task);
        } else {
            for (uint64_t k = 0; k < quick->spans; k++)
                task_write(&task, k);
        }
    }
    *ret_value = total;
    return true;
}
