/* run.c - cuts one job into tasks for the team and folds their sums.
 * How it cuts depends on the shape only, and sums are folded in order of rows and columns: the same
 * bits come out for any number of threads, and a row's value does not depend on other rows. The
 * arithmetic is behind kernel.h. Runs on the device thread; tasks on all threads of the team. */
#include "kernels/cpu/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/quick.h"
#include "proto/sum.h"

#define SPAN_CLASSES_MIN 16384     /* a piece of a row: both sides in FP32 fit a second cache */
#define STREAMING_BYTES (8u << 20) /* gradients beyond this do not stay in a cache */

struct plan {
    const struct kld_job *job;
    const struct kld_geometry *geometry;
    struct kld_cpu_run *run;
    struct kld_cpu_team *team;
    struct kld_cpu_work work;
    struct kld_cpu_quick quick;        /* rows of logits in FP32 */
    unsigned char *at[KLD_SLOT_COUNT]; /* first byte of a slot, NULL if absent */
    uint64_t rows_per_chunk, chunks;
    uint64_t span_classes, spans; /* pieces of a row */
    double scale, divisor, grad_output;
    bool zero;       /* rowmean over weights that sum to 0: loss and gradients are 0 */
    bool statistics; /* a side is logits */
    bool short_rows; /* several at a time */
    bool dots;       /* a gradient needs a sum over its row first */
    int dot_known;   /* the side whose sum is -1 without being added up, or -1 */
    /* Of the row in pieces; written between runs of the team. */
    struct row {
        uint64_t index;
        bool masked;
        double weight;
        struct kld_cpu_span span; /* of the whole row */
    } row;
};

enum kld_status kld_cpu_run_init(struct kld_cpu_run *run, struct kld_error *err) {
    run->kernels = kld_cpu_kernels_choose();
    run->partial = calloc(KLD_CPU_SPANS_MAX, sizeof *run->partial);
    run->chunk = calloc(KLD_CPU_CHUNKS_MAX, sizeof *run->chunk);
    if (!run->partial || !run->chunk)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory for the scratch of a device");
    return KLD_OK;
}

void kld_cpu_run_done(struct kld_cpu_run *run) {
    free(run->partial);
    free(run->chunk);
}

static uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

static unsigned char *row_of(const struct plan *plan, enum kld_slot slot, uint64_t row) {
    const struct kld_slot_geometry *at = &plan->geometry->slot[slot];
    return plan->at[slot] ? plan->at[slot] + (at->rows > 1 ? row * at->stride_bytes : 0) : NULL;
}

static double read_float(const unsigned char *at, uint32_t dtype) {
    double wide;
    float single;
    uint16_t half;
    switch (dtype) {
    case KLD_DTYPE_FP64: memcpy(&wide, at, sizeof wide); return wide;
    case KLD_DTYPE_FP32: memcpy(&single, at, sizeof single); return single;
    case KLD_DTYPE_BF16: {
        memcpy(&half, at, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&single, &bits, sizeof single);
        return single;
    }
    default: {
        memcpy(&half, at, sizeof half);
        int exponent = half >> 10 & 31, mantissa = half & 1023;
        wide = exponent == 31 ? (mantissa ? NAN : INFINITY)
               : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                              : ldexp(mantissa, -24);
        return half >> 15 ? -wide : wide;
    }
    }
}

static void write_loss(unsigned char *at, uint32_t dtype, double value) {
    float single = (float)value;
    if (dtype == KLD_DTYPE_FP64)
        memcpy(at, &value, sizeof value);
    else
        memcpy(at, &single, sizeof single);
}

/* Mask, weight, pointers and factors of a row. Reads nothing of a masked row. */
static void row_begin(const struct plan *plan, uint64_t index, struct row *row) {
    const struct kld_op *op = &plan->job->op;
    memset(row, 0, sizeof *row);
    row->index = index;
    const unsigned char *mask = row_of(plan, KLD_SLOT_ROW_MASK, index);
    row->masked = mask && *mask == 0;
    if (row->masked)
        return;
    const unsigned char *weight = row_of(plan, KLD_SLOT_ROW_WEIGHTS, index);
    row->weight = weight ? read_float(weight, KLD_DTYPE_FP32) : 1;
    struct kld_cpu_span *span = &row->span;
    span->count = plan->geometry->classes;
    span->in[KLD_CPU_Q] = row_of(plan, KLD_SLOT_PREDICTIONS, index);
    span->in[KLD_CPU_P] = row_of(plan, KLD_SLOT_TARGETS, index);
    span->gradient[KLD_CPU_Q] = row_of(plan, KLD_SLOT_GRAD_PREDICTIONS, index);
    span->gradient[KLD_CPU_P] = row_of(plan, KLD_SLOT_GRAD_TARGETS, index);
    if (plan->dot_known >= 0)
        span->dot[plan->dot_known] = -1;
    span->loss_factor = row->weight * plan->scale;
    span->gradient_factor = row->weight * plan->scale / plan->divisor;
    if (plan->work.none) {
        span->loss = row_of(plan, KLD_SLOT_LOSS, index);
        span->grad_output = row_of(plan, KLD_SLOT_GRAD_OUTPUT, index);
    } else if (plan->at[KLD_SLOT_GRAD_OUTPUT]) {
        span->gradient_factor *= read_float(row_of(plan, KLD_SLOT_GRAD_OUTPUT, index),
                                            op->tensor[KLD_SLOT_GRAD_OUTPUT].dtype);
    } else {
        span->gradient_factor *= plan->grad_output;
    }
}

/* The part of a row's span that is its k-th piece. */
static struct kld_cpu_span piece(const struct plan *plan, const struct kld_cpu_span *row,
                                 uint64_t k) {
    struct kld_cpu_span span = *row;
    uint64_t start = k * plan->span_classes, left = row->count - start;
    const struct kld_cpu_work *work = &plan->work;
    span.count = left < plan->span_classes ? left : plan->span_classes;
    for (int side = 0; side < 2; side++) {
        uint64_t skip = start * kld_dtype_bytes(work->dtype[side]);
        span.in[side] += skip;
        if (span.gradient[side])
            span.gradient[side] += skip;
    }
    if (span.loss)
        span.loss += start * kld_dtype_bytes(work->loss_dtype);
    if (span.grad_output)
        span.grad_output += start * kld_dtype_bytes(work->grad_output_dtype);
    return span;
}

/* The three passes over a piece of a row. A pass reads what the one before left in row->span. */
static void pass_statistics(const struct plan *plan, const struct row *row, uint64_t k,
                            struct kld_cpu_partial *ret_partial) {
    struct kld_cpu_span span = piece(plan, &row->span, k);
    for (int side = 0; side < 2; side++)
        if (plan->work.form[side] == KLD_FORM_LOGITS)
            plan->run->kernels->statistics(&plan->work, (enum kld_cpu_side)side, span.in[side],
                                           span.count, &ret_partial->max[side],
                                           &ret_partial->sum[side]);
}

static void pass_value(const struct plan *plan, const struct row *row, uint64_t k,
                       struct kld_cpu_partial *ret_partial) {
    struct kld_cpu_span span = piece(plan, &row->span, k);
    if (plan->dots)
        span.gradient[0] = span.gradient[1] = NULL;
    plan->run->kernels->pass(&plan->work, &span, ret_partial);
}

static void pass_gradient(const struct plan *plan, const struct row *row, uint64_t k,
                          struct kld_cpu_partial *ret_partial) {
    struct kld_cpu_span span = piece(plan, &row->span, k);
    span.loss = NULL;
    plan->run->kernels->pass(&plan->work, &span, ret_partial);
}

/* Joins two pieces' maximum and sum of exponentials. A piece of -inf only has sum 0, or NaN if it
 * holds a NaN. */
static void fold_statistics(const struct plan *plan, struct kld_cpu_span *row,
                            const struct kld_cpu_partial *partial, bool first) {
    for (int side = 0; side < 2; side++) {
        if (plan->work.form[side] != KLD_FORM_LOGITS)
            continue;
        double max = row->max[side], sum = row->sum[side];
        if (first) {
            max = partial->max[side];
            sum = partial->sum[side];
        } else if (partial->max[side] > max) {
            sum = sum * exp((max - partial->max[side]) * plan->work.inverse_temperature) +
                  partial->sum[side];
            max = partial->max[side];
        } else if (partial->max[side] < max) {
            sum += partial->sum[side] *
                   exp((partial->max[side] - max) * plan->work.inverse_temperature);
        } else {
            sum += partial->sum[side];
        }
        row->max[side] = max;
        row->sum[side] = sum;
    }
}

static void write_zeros(const struct plan *plan, enum kld_slot slot, uint64_t index) {
    if (plan->at[slot])
        memset(row_of(plan, slot, index), 0, plan->geometry->slot[slot].row_bytes);
}

/* Writes a row's own outputs; returns its term of the sum (proto/sum.h). */
static double row_end(const struct plan *plan, const struct row *row, double value) {
    double term = row->masked ? 0 : value * row->weight * plan->scale;
    if (row->masked || plan->zero) { /* the row was read: a gradient may lie over it */
        write_zeros(plan, KLD_SLOT_GRAD_PREDICTIONS, row->index);
        write_zeros(plan, KLD_SLOT_GRAD_TARGETS, row->index);
    }
    if (row->masked && !plan->geometry->scalar)
        write_zeros(plan, KLD_SLOT_LOSS, row->index);
    if (plan->at[KLD_SLOT_ROW_LOSS])
        write_loss(row_of(plan, KLD_SLOT_ROW_LOSS, row->index),
                   plan->job->op.tensor[KLD_SLOT_ROW_LOSS].dtype, term);
    if (plan->at[KLD_SLOT_LOSS] && plan->job->op.reduction == KLD_REDUCTION_ROW)
        write_loss(row_of(plan, KLD_SLOT_LOSS, row->index), plan->geometry->loss_dtype, term);
    return term;
}

/* A whole row on one thread: all passes while it is in the cache. */
static double run_row(const struct plan *plan, uint64_t index) {
    struct row row;
    row_begin(plan, index, &row);
    if (row.masked)
        return row_end(plan, &row, 0);
    double value = 0, dot[2] = {0, 0};
    if (plan->quick.fits && kld_cpu_quick_run(&plan->quick, NULL, NULL, &row.span, &value))
        return row_end(plan, &row, value);
    struct kld_cpu_partial partial;
    if (plan->spans == 1 && !plan->statistics) { /* no copy of a span that was just written */
        plan->run->kernels->pass(&plan->work, &row.span, &partial);
        return row_end(plan, &row, partial.value);
    }
    if (plan->statistics) {
        for (uint64_t k = 0; k < plan->spans; k++) {
            pass_statistics(plan, &row, k, &partial);
            fold_statistics(plan, &row.span, &partial, k == 0);
        }
    }
    for (uint64_t k = 0; k < plan->spans; k++) {
        pass_value(plan, &row, k, &partial);
        value += partial.value;
        dot[0] += partial.dot[0];
        dot[1] += partial.dot[1];
    }
    if (plan->dots) {
        memcpy(row.span.dot, dot, sizeof dot);
        for (uint64_t k = 0; k < plan->spans; k++)
            pass_gradient(plan, &row, k, &partial);
    }
    return row_end(plan, &row, value);
}

/* Short rows, as many at a time as the kernels have lanes. */
static double run_short_rows(const struct plan *plan, uint64_t index, uint64_t end) {
    struct kld_cpu_span span[KLD_CPU_LANES_MAX];
    struct row row[KLD_CPU_LANES_MAX];
    double value[KLD_CPU_LANES_MAX], total = 0;
    uint64_t lanes = plan->run->kernels->lanes, count = 0;
    for (; index < end; index++) {
        row_begin(plan, index, &row[count]);
        span[count] = row[count].span;
        if (row[count].masked)
            row_end(plan, &row[count], 0);
        else
            count++;
        if (count < lanes && (index + 1 < end || count == 0))
            continue;
        plan->run->kernels->rows(&plan->work, span, count, plan->dots, value);
        for (uint64_t i = 0; i < count; i++)
            total += row_end(plan, &row[i], value[i]);
        count = 0;
    }
    return total;
}

static void task_chunk(void *context, uint64_t chunk) {
    const struct plan *plan = context;
    uint64_t row = chunk * plan->rows_per_chunk, end = row + plan->rows_per_chunk;
    if (end > plan->geometry->rows)
        end = plan->geometry->rows;
    double value = plan->short_rows ? run_short_rows(plan, row, end) : 0;
    for (; row < end && !plan->short_rows; row++)
        value += run_row(plan, row);
    plan->run->chunk[chunk].value = value;
}

static void task_statistics(void *context, uint64_t k) {
    const struct plan *plan = context;
    pass_statistics(plan, &plan->row, k, &plan->run->partial[k]);
}
static void task_value(void *context, uint64_t k) {
    const struct plan *plan = context;
    pass_value(plan, &plan->row, k, &plan->run->partial[k]);
}
static void task_gradient(void *context, uint64_t k) {
    const struct plan *plan = context;
    pass_gradient(plan, &plan->row, k, &plan->run->partial[k]);
}

/* One long row on the whole team, a barrier after each pass; folds as run_row() does. */
static double run_row_in_pieces(struct plan *plan, uint64_t index) {
    struct row *row = &plan->row;
    const struct kld_cpu_partial *partial = plan->run->partial;
    row_begin(plan, index, row);
    if (row->masked)
        return row_end(plan, row, 0);
    double value = 0, dot[2] = {0, 0};
    if (plan->quick.fits &&
        kld_cpu_quick_run(&plan->quick, plan->team, plan->run->partial, &row->span, &value))
        return row_end(plan, row, value);
    if (plan->statistics) {
        kld_cpu_team_run(plan->team, plan->spans, task_statistics, plan);
        for (uint64_t k = 0; k < plan->spans; k++)
            fold_statistics(plan, &row->span, &partial[k], k == 0);
    }
    kld_cpu_team_run(plan->team, plan->spans, task_value, plan);
    for (uint64_t k = 0; k < plan->spans; k++) {
        value += partial[k].value;
        dot[0] += partial[k].dot[0];
        dot[1] += partial[k].dot[1];
    }
    if (plan->dots) {
        memcpy(row->span.dot, dot, sizeof dot);
        kld_cpu_team_run(plan->team, plan->spans, task_gradient, plan);
    }
    return row_end(plan, row, value);
}

/* Unmasked rows and their weights. */
static void task_count(void *context, uint64_t chunk) {
    const struct plan *plan = context;
    uint64_t row = chunk * plan->rows_per_chunk, end = row + plan->rows_per_chunk;
    if (end > plan->geometry->rows)
        end = plan->geometry->rows;
    struct kld_cpu_chunk_sum sum = {0};
    for (; row < end; row++) {
        const unsigned char *mask = row_of(plan, KLD_SLOT_ROW_MASK, row);
        const unsigned char *weight = row_of(plan, KLD_SLOT_ROW_WEIGHTS, row);
        if (mask && *mask == 0)
            continue;
        sum.rows++;
        sum.weight += weight ? read_float(weight, KLD_DTYPE_FP32) : 1;
    }
    plan->run->chunk[chunk] = sum;
}

/* The bytes of the job, and the divisor of rowmean. */
static void count_rows(struct plan *plan, struct kld_job *job) {
    uint64_t rows = plan->geometry->rows;
    double weight = (double)rows;
    if (plan->at[KLD_SLOT_ROW_MASK] || plan->at[KLD_SLOT_ROW_WEIGHTS]) {
        kld_cpu_team_run(plan->team, plan->chunks, task_count, plan);
        rows = 0;
        weight = 0;
        for (uint64_t i = 0; i < plan->chunks; i++) {
            rows += plan->run->chunk[i].rows;
            weight += plan->run->chunk[i].weight;
        }
    }
    plan->divisor = plan->geometry->divisor;
    if (plan->divisor == 0) {
        /* Gradients are computed, and zeros written over them, also where their factor is 0: the
         * value of a row may have other bits without them, and does not depend on the divisor. */
        plan->zero = weight == 0;
        plan->divisor = plan->zero ? 1 : weight;
    }
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *at = &plan->geometry->slot[slot];
        bool masked = !kld_slot_is_output((uint32_t)slot) && slot != KLD_SLOT_ROW_MASK;
        if (plan->at[slot])
            job->bytes += at->row_bytes * (masked && at->rows > 1 ? rows : at->rows);
    }
}

/* The side whose mass weighs all terms, of KL(own, other) and a cross entropy; -1: both do. */
static int own_side(const struct kld_rule *rule) {
    if (rule->kind == KLD_RULE_CROSS_ENTROPY || (rule->kind == KLD_RULE_KL && rule->of_q == 0))
        return KLD_CPU_P;
    return rule->kind == KLD_RULE_KL && rule->of_p == 0 ? KLD_CPU_Q : -1;
}

/* Which sums over a row must be known before a gradient can be written. Through a softmax each
 * class takes its share of the sum of x df/dx; for the side in the denominator that sum is minus
 * the numerator's mass, which is 1 where that is a softmax too, and the row needs one pass less. */
static void plan_dots(struct plan *plan) {
    struct kld_cpu_work *work = &plan->work;
    bool logits[2] = {work->form[0] == KLD_FORM_LOGITS, work->form[1] == KLD_FORM_LOGITS};
    int own = own_side(&work->rule);
    plan->dot_known = own >= 0 && logits[own] && !work->none ? 1 - own : -1;
    plan->statistics = logits[0] || logits[1];
    for (int side = 0; side < 2; side++)
        plan->dots |= work->gradient[side] && logits[side] && side != plan->dot_known;
}

/* The divergence that a rule is, where that is one KL; else the one asked for. */
static uint32_t plain_divergence(const struct kld_op *op, const struct kld_rule *rule) {
    bool one = rule->kind == KLD_RULE_KL && rule->of_p + rule->of_q == 1;
    return one && rule->of_q == 0   ? KLD_DIVERGENCE_FORWARD_KL
           : one && rule->of_p == 0 ? KLD_DIVERGENCE_REVERSE_KL
                                    : op->divergence;
}

/* Up to so many classes they are faster than what there is otherwise. */
#define SHORT_PROBS 16
#define SHORT_LOGPROBS_TV 32
#define SHORT_ROWS 256
#define SHORT_LOGITS 512 /* of 16 and 32 bits */

/* Rows of so many classes are done several at a time. */
static uint64_t short_classes(const struct kld_cpu_work *work) {
    bool mixture = work->rule.kind == KLD_RULE_MIXTURE;
    bool gradient = work->gradient[0] || work->gradient[1];
    uint32_t form = work->form[0], q = work->dtype[0], p = work->dtype[1];
    bool logits = form == KLD_FORM_LOGITS;
    if (form != work->form[1])
        return SHORT_ROWS;
    if (q == KLD_DTYPE_FP64 || p == KLD_DTYPE_FP64)
        return logits ? KLD_CPU_SHORT_CLASSES : SHORT_ROWS;
    if (form == KLD_FORM_LOGPROBS && work->rule.kind == KLD_RULE_TV)
        return SHORT_LOGPROBS_TV;
    if (form == KLD_FORM_PROBS || (form == KLD_FORM_LOGPROBS && !mixture))
        return SHORT_PROBS;
    /* With FP32 the passes over long rows are in double, too. */
    if (logits && mixture && gradient && (q == KLD_DTYPE_FP32 || p == KLD_DTYPE_FP32))
        return KLD_CPU_SHORT_CLASSES;
    return logits && kld_cpu_short_logits_fit(work) ? SHORT_LOGITS : SHORT_ROWS;
}

static void plan_init(struct plan *plan, struct kld_cpu_run *run, struct kld_cpu_team *team,
                      const struct kld_job *job) {
    const struct kld_op *op = &job->op;
    const struct kld_geometry *geometry = &job->geometry;
    memset(plan, 0, sizeof *plan);
    plan->job = job;
    plan->geometry = geometry;
    plan->run = run;
    plan->team = team;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (op->tensor[slot].dtype)
            plan->at[slot] =
                (unsigned char *)job->place[slot].memory->host + job->place[slot].offset_bytes;
    struct kld_rule rule = kld_rule_of(op);
    plan->work = (struct kld_cpu_work){
        .divergence = plain_divergence(op, &rule),
        .rule = rule,
        .form = {op->predictions_form, op->targets_form},
        .dtype = {op->tensor[KLD_SLOT_PREDICTIONS].dtype, op->tensor[KLD_SLOT_TARGETS].dtype},
        .none = op->reduction == KLD_REDUCTION_NONE,
        .gradient = {plan->at[KLD_SLOT_GRAD_PREDICTIONS] != NULL,
                     plan->at[KLD_SLOT_GRAD_TARGETS] != NULL},
        .inverse_temperature = 1 / op->number[KLD_NUMBER_TEMPERATURE],
    };
    if (plan->work.none) {
        plan->work.loss_dtype = plan->at[KLD_SLOT_LOSS] ? geometry->loss_dtype : 0;
        plan->work.grad_output_dtype = op->tensor[KLD_SLOT_GRAD_OUTPUT].dtype;
    }
    for (int side = 0; side < 2; side++) {
        int gradient = side ? KLD_SLOT_GRAD_TARGETS : KLD_SLOT_GRAD_PREDICTIONS;
        int input = side ? KLD_SLOT_TARGETS : KLD_SLOT_PREDICTIONS;
        plan->work.streaming[side] = plan->at[gradient] && plan->at[gradient] != plan->at[input] &&
                                     geometry->slot[gradient].span_bytes >= STREAMING_BYTES;
    }
    plan->scale = op->number[KLD_NUMBER_SCALE];
    plan->grad_output = op->number[KLD_NUMBER_GRAD_OUTPUT];
    plan_dots(plan);
    /* Also what a thread takes at a time. */
    plan->rows_per_chunk = kld_sum_group_rows(geometry->rows, geometry->classes);
    plan->chunks = divide_up(geometry->rows, plan->rows_per_chunk);
    uint64_t classes = divide_up(geometry->classes, KLD_CPU_SPANS_MAX);
    classes = divide_up(classes, KLD_CPU_BLOCK) * KLD_CPU_BLOCK;
    plan->span_classes = classes > SPAN_CLASSES_MIN ? classes : SPAN_CLASSES_MIN;
    plan->spans = divide_up(geometry->classes, plan->span_classes);
    plan->short_rows = geometry->classes <= short_classes(&plan->work) && !plan->work.none;
    kld_cpu_quick_init(&plan->quick, run->kernels->name, &plan->work, plan->span_classes,
                       plan->spans);
}

void kld_cpu_run_op(struct kld_cpu_run *run, struct kld_cpu_team *team, struct kld_job *job) {
    struct plan plan;
    plan_init(&plan, run, team, job);
    count_rows(&plan, job);
    uint64_t threads = team->helpers + 1;
    if (plan.spans > 1 && threads > 1 && plan.geometry->rows < 4 * threads) {
        for (uint64_t i = 0; i < plan.chunks; i++)
            run->chunk[i].value = 0;
        for (uint64_t row = 0; row < plan.geometry->rows; row++)
            run->chunk[row / plan.rows_per_chunk].value += run_row_in_pieces(&plan, row);
    } else {
        kld_cpu_team_run(team, plan.chunks, task_chunk, &plan);
    }
    if (!plan.geometry->scalar)
        return;
    double sum = 0;
    for (uint64_t i = 0; i < plan.chunks; i++)
        sum += run->chunk[i].value;
    double loss = plan.zero ? 0 : sum / plan.divisor;
    job->loss = plan.geometry->loss_dtype == KLD_DTYPE_FP64 ? loss : (double)(float)loss;
    if (plan.at[KLD_SLOT_LOSS])
        write_loss(plan.at[KLD_SLOT_LOSS], plan.geometry->loss_dtype, loss);
}
