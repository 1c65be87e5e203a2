/* quick_passes.h - a pass of quick.h over a whole row: its pieces, one after the other or on the
 * team, and their sums folded in order. Which passes a row takes is quick.c, which alone includes
 * this. Runs on the device thread and the threads of the team. */
#ifndef KLD_KERNELS_CPU_QUICK_PASSES_H
#define KLD_KERNELS_CPU_QUICK_PASSES_H

#include <math.h>

#include "kernels/cpu/quick.h"

struct task;
typedef void pass_function(const struct task *task, const struct kld_cpu_span *span,
                           struct kld_cpu_partial *ret_partial);

struct task {
    const struct kld_cpu_quick *quick;
    const struct kld_cpu_span *whole;
    struct kld_cpu_team *team; /* NULL: this thread alone */
    struct kld_cpu_partial *scratch;
    pass_function *pass;
    struct kld_cpu_quick_row row;
    double top[2]; /* if pivoted: the largest logits */
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

static void pass_scan(const struct task *task, const struct kld_cpu_span *span,
                      struct kld_cpu_partial *ret_partial) {
    task->quick->kernels->scan(task->quick, span, ret_partial);
}
static void pass_refine(const struct task *task, const struct kld_cpu_span *span,
                        struct kld_cpu_partial *ret_partial) {
    task->quick->kernels->refine(task->quick, &task->row, span, ret_partial);
}
static void pass_value(const struct task *task, const struct kld_cpu_span *span,
                       struct kld_cpu_partial *ret_partial) {
    task->quick->kernels->value(task->quick, &task->row, span, ret_partial);
}
static void pass_write(const struct task *task, const struct kld_cpu_span *span,
                       struct kld_cpu_partial *ret_partial) {
    (void)ret_partial;
    task->quick->kernels->write(task->quick, &task->row, span);
}

static void task_pass(void *context, uint64_t k) {
    struct task *task = context;
    struct kld_cpu_span span = piece(task, k);
    task->pass(task, &span, &task->scratch[k]);
}

static void fold(const struct task *task, struct kld_cpu_partial *total,
                 const struct kld_cpu_partial *part) {
    if (task->pass == pass_scan) {
        kld_cpu_quick_fold(task->quick, total, part);
        return;
    }
    kld_cpu_quick_add(total, part);
    total->value += part->value;
    for (int side = 0; side < 2; side++) {
        total->max[side] = fmax(total->max[side], part->max[side]);
        total->centre[side] += part->centre[side];
        total->unevenness[side] += part->unevenness[side];
        total->distance[side] += part->distance[side];
    }
}

/* One pass over the row; its sums, folded in order of the pieces. */
static void run_pass(struct task *task, pass_function *pass, struct kld_cpu_partial *ret_sums) {
    task->pass = pass;
    if (task->team)
        kld_cpu_team_run(task->team, task->quick->spans, task_pass, task);
    for (uint64_t k = 0; k < task->quick->spans; k++) {
        struct kld_cpu_partial here = {0};
        if (!task->team) {
            struct kld_cpu_span span = piece(task, k);
            pass(task, &span, &here);
        }
        const struct kld_cpu_partial *part = task->team ? &task->scratch[k] : &here;
        if (pass == pass_write)
            continue;
        if (k == 0)
            *ret_sums = *part;
        else
            fold(task, ret_sums, part);
    }
}

#endif
