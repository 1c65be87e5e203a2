/* short.h - rows of few classes, as many at a time as a vector has lanes, a row in each lane: sums
 * over a row are then sums of vectors, and what is computed once for a row is computed for all of
 * them at once. In double, by the steps of stages.h, every rule, form and data type but reduction
 * none; logits of 16 and 32 bits have a way of their own (short_logits.h). Included once by each
 * kernel_*.c; runs on the threads of the team.
 *
 * What a row yields does not depend on its lane or on the rows beside it. */
#ifndef KLD_KERNELS_CPU_SHORT_H
#define KLD_KERNELS_CPU_SHORT_H

#include "kernels/cpu/stages.h"

#define SHORT_BLOCK_CLASSES (BLOCK / DOUBLES)
#define SHORT_BLOCKS (KLD_CPU_SHORT_CLASSES / SHORT_BLOCK_CLASSES)
/* From row to row as numbers: not all of them in the same few places of a cache. */
#define SHORT_LINE (KLD_CPU_SHORT_CLASSES + 64 / sizeof(double))

struct short_rows {
    const struct kld_cpu_work *work;
    uint64_t classes, blocks;
    struct row_constants row;
    struct columns columns[SHORT_BLOCKS];
};

/* Entries of a block: classes times lanes. */
INLINE uint64_t short_entries(const struct short_rows *rows, uint64_t block) {
    uint64_t left = rows->classes - block * SHORT_BLOCK_CLASSES;
    return (left < SHORT_BLOCK_CLASSES ? left : SHORT_BLOCK_CLASSES) * DOUBLES;
}

/* One row as numbers, without a copy: a load that follows narrower stores waits for them. */
static void short_line(uint32_t dtype, const unsigned char *from, uint64_t n, double *to) {
    const float *x = (const float *)(const void *)from;
    uint64_t i = 0;
    switch (dtype) {
    case KLD_DTYPE_FP64: memcpy(to, from, n * sizeof *to); break;
    case KLD_DTYPE_FP32:
        for (; i + DOUBLES <= n; i += DOUBLES)
            vd_store(to + i, __builtin_convertvector(*(const vfh_any *)(x + i), vd));
        for (; i < n; i++)
            to[i] = (double)x[i];
        break;
    case KLD_DTYPE_FP16: halves_to_doubles(KLD_DTYPE_FP16, (const void *)from, n, to); break;
    default: halves_to_doubles(KLD_DTYPE_BF16, (const void *)from, n, to);
    }
}

/* From rows to lanes. Lanes without a row repeat the first. */
static void short_load(struct short_rows *rows, int side, const struct kld_cpu_span *span,
                       uint64_t count) {
    double line[DOUBLES][SHORT_LINE] ALIGNED;
    for (uint64_t r = 0; r < count; r++)
        short_line(rows->work->dtype[side], span[r].in[side], rows->classes, line[r]);
    const double *from[DOUBLES];
    for (uint64_t r = 0; r < DOUBLES; r++)
        from[r] = line[r < count ? r : 0];
    for (uint64_t b = 0, at = 0; b < rows->blocks; b++) {
        double *to = rows->columns[b].raw[side];
        uint64_t entries = short_entries(rows, b);
        for (uint64_t i = 0; i < entries; i += DOUBLES, at++)
            for (uint64_t r = 0; r < DOUBLES; r++)
                to[i + r] = from[r][at];
    }
}

/* And back, from the place of raw or from that of the masses. which: a bit for each row. */
static void short_store(const struct short_rows *rows, int side, bool masses,
                        const struct kld_cpu_span *span, uint64_t count, uint32_t which) {
    double line[DOUBLES][SHORT_LINE] ALIGNED;
    for (uint64_t b = 0, at = 0; b < rows->blocks; b++) {
        const struct columns *columns = &rows->columns[b];
        const double *from = masses ? columns->mass[side] : columns->raw[side];
        uint64_t entries = short_entries(rows, b);
        for (uint64_t i = 0; i < entries; i += DOUBLES, at++)
            for (uint64_t r = 0; r < DOUBLES; r++)
                line[r][at] = from[i + r];
    }
    uint32_t dtype = rows->work->dtype[side];
    for (uint64_t r = 0; r < count; r++)
        for (uint64_t i = 0; (which >> r & 1) && i < rows->classes; i += BLOCK)
            block_store(dtype, line[r] + i, rows->classes - i < BLOCK ? rows->classes - i : BLOCK,
                        span[r].gradient[side] + i * element_bytes(dtype));
}

/* Adds to a sum, and to `lost` what rounding takes off it: beside a class of next to 1 each of many
 * small ones may lose as much. */
INLINE void add_exactly(vd *sum, vd *lost, vd x) {
    vd next = *sum + x, part = next - *sum;
    *lost += (*sum - (next - part)) + (x - part);
    *sum = next;
}

/* Maximum, masses and their sum of one side. */
static void short_statistics(struct short_rows *rows, int side) {
    struct row_constants *row = &rows->row;
    vd max = vd_of(-INFINITY), sum = vd_of(0), lost = vd_of(0);
    for (uint64_t b = 0; b < rows->blocks; b++)
        for (uint64_t i = 0, m = short_entries(rows, b); i < m; i += DOUBLES)
            max = vd_max(vd_load(rows->columns[b].raw[side] + i), max);
    /* Nothing but -inf (and NaN): no mass, and so no number below. */
    vd origin = vd_select(max == -(double)INFINITY, vd_of(0), max);
    for (uint64_t b = 0; b < rows->blocks; b++)
        for (uint64_t i = 0, m = short_entries(rows, b); i < m; i += DOUBLES) {
            vd x = (vd_load(rows->columns[b].raw[side] + i) - origin) *
                   rows->work->inverse_temperature;
            vd mass = vd_exp(x);
            add_exactly(&sum, &lost, mass);
            vd_store(rows->columns[b].mass[side] + i, mass);
        }
    sum += lost;
    sum = vd_select(sum == 0.0, vd_of(NAN), sum);
    row->max[side] = max;
    row->inverse_sum[side] = 1.0 / sum;
    row->log_sum[side] = vd_log_ratio(sum, vd_of(1));
    for (uint64_t b = 0; b < rows->blocks; b++)
        for (uint64_t i = 0, m = short_entries(rows, b); i < m; i += DOUBLES) {
            double *mass = rows->columns[b].mass[side] + i;
            vd_store(mass, vd_load(mass) * row->inverse_sum[side]);
        }
}

static void short_begin(struct short_rows *rows, const struct kld_cpu_work *work,
                        const struct kld_cpu_span *span, uint64_t count) {
    struct row_constants *row = &rows->row;
    rows->work = work;
    rows->classes = span->count;
    rows->blocks = (span->count + SHORT_BLOCK_CLASSES - 1) / SHORT_BLOCK_CLASSES;
    for (int side = 0; side < 2; side++) {
        bool logits = work->form[side] == KLD_FORM_LOGITS;
        short_load(rows, side, span, count);
        for (uint64_t r = 0; r < DOUBLES; r++) {
            const struct kld_cpu_span *of = &span[r < count ? r : 0];
            row->factor[side][r] = of->gradient_factor * (logits ? work->inverse_temperature : 1);
            row->dot[side][r] = of->dot[side];
        }
    }
}

static void short_init(struct short_rows *rows, const struct kld_cpu_work *work,
                       const struct kld_cpu_span *span, uint64_t count) {
    struct row_constants *row = &rows->row;
    short_begin(rows, work, span, count);
    for (int side = 0; side < 2; side++) {
        bool logits = work->form[side] == KLD_FORM_LOGITS;
        if (logits)
            short_statistics(rows, side);
        for (uint64_t b = 0; !logits && b < rows->blocks; b++)
            block_masses(work, row, side, &rows->columns[b], short_entries(rows, b));
    }
    if (!is_balanced(work))
        return;
    set_origins(row, work->inverse_temperature);
    row->log_sum_difference =
        vd_log_ratio(row->inverse_sum[KLD_CPU_Q], row->inverse_sum[KLD_CPU_P]);
}

/* Values and, in the place of raw, the derivatives. */
static vd short_rule(struct short_rows *rows) {
    struct block block;
    vd value = vd_of(0);
    for (uint64_t b = 0; b < rows->blocks; b++) {
        uint64_t m = short_entries(rows, b);
        block_rule(rows->work, &rows->row, &rows->columns[b], &block, m);
        value += block_sums(block.term, m);
    }
    return value;
}

/* From derivatives to a side's gradient. */
static void short_gradient(struct short_rows *rows, int side, bool dots) {
    if (dots && rows->work->form[side] == KLD_FORM_LOGITS) {
        vd dot = vd_of(0);
        for (uint64_t b = 0; b < rows->blocks; b++)
            dot += block_sums(rows->columns[b].raw[side], short_entries(rows, b));
        rows->row.dot[side] = dot;
    }
    for (uint64_t b = 0; b < rows->blocks; b++)
        block_gradient(rows->work, &rows->row, side, &rows->columns[b], short_entries(rows, b));
}

/* Rows that are not masked, DOUBLES of them at most: their values, and their gradients written.
 * dots: a gradient needs a sum over its row first. */
static __attribute__((noinline)) void short_any(const struct kld_cpu_work *work,
                                                const struct kld_cpu_span *span, uint64_t count,
                                                bool dots, double *ret_value) {
    struct short_rows rows;
    short_init(&rows, work, span, count);
    vd value = short_rule(&rows);
    for (int side = 0; side < 2; side++) {
        if (!span->gradient[side])
            continue;
        short_gradient(&rows, side, dots);
        short_store(&rows, side, false, span, count, ~0u);
    }
    for (uint64_t r = 0; r < count; r++)
        ret_value[r] = value[r];
}

#endif
