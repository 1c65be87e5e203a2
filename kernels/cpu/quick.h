/* quick.h - rows of logits in FP32 arithmetic, between the order of passes (quick.c) and the
 * arithmetic (quick_scan.h, quick_write.h, compiled once for each vector width): what holds for a
 * job, and the passes over a piece of a row. Rows that FP32 cannot do well are left to the stages
 * in double. No allocation; any thread of the team.
 *
 * Everything is in base 2. With t = z log2(e) / T a mass is 2^t = 2^k (1 + w), k the nearest
 * integer; masses are held against an integer reference near the largest t, so that changing it is
 * exact and one pass over memory finds reference and sums together. */
#ifndef KLD_KERNELS_CPU_QUICK_H
#define KLD_KERNELS_CPU_QUICK_H

#include "kernels/cpu/kernel.h"
#include "kernels/cpu/team.h"
#include "kernels/rule.h"

#define KLD_CPU_QUICK_NOTHING (-0x1p30) /* reference of a piece without any mass */

struct kld_cpu_quick {
    bool fits; /* else nothing below is set */
    const struct kld_cpu_quick_kernels *kernels;
    struct kld_rule rule;
    bool half;   /* both sides have 16 bits: shorter polynomials, less in double for accuracy */
    bool coarse; /* and the scale goes without its low part */
    uint32_t dtype[2];
    bool gradient[2], streaming[2];
    bool centred[2]; /* the gradient needs a sum over the row first */
    bool squares;    /* the scan adds up squares, too: how far apart are the things centred */
    bool pivoted;    /* js: what is centred is counted from a pivot: FP32 logits */
    double inverse_temperature;
    float scale, scale_low; /* log2(e) / T */
    float limit;            /* logits at or beyond it, either sign, are for double */
    uint64_t span_classes, spans;
};

/* Of one side of js: h, what its gradient centres, is counted from where y, the logarithm of own
 * over other, has its mean over the side. With x that mean less y,
 *     h - height = -of ln(1 + w (e^x - 1))
 * where nothing cancels. */
struct kld_cpu_quick_pivot {
    double at, height;       /* y, h */
    double of, weight, lack; /* weight: w; lack: 1 - w */
};

/* A row after the scan. */
struct kld_cpu_quick_row {
    double reference[2];
    double log_mass[2];     /* of the sum of exp(z / T) */
    double inverse_mass[2]; /* of the sum of 2^t against the reference */
    double apart;           /* log2 of the masses' ratio, p over q */
    float ratio;       /* of the sums against the references, q over p; for refine() apart has it */
    bool close;        /* apart is good to a part of the row's differences, not of the masses */
    double centre[2];  /* the sum of x df/dx as far as it is not a multiple of the mass */
    double step[2][3]; /* tv: what a class takes of its mass where d < 0, d = 0 and d > 0 */
    double factor;     /* of the gradients, 1 / T in it */
    double near[2];    /* of a KL, for refine(): about where d has its mean, base 2 */
    bool exact, rough; /* the centres, and if pivoted the gradients, are for double */
    struct kld_cpu_quick_pivot pivot[2]; /* if pivoted */
};

struct kld_cpu_quick_kernels {
    /* The sums of a piece. In *ret_partial: max holds the references (integers), sum the masses
     * against 2^reference, dot the sums of mass times d (KL: of the sides that weigh it;
     * cross_entropy: of the targets), square those of mass times d^2, if asked for. d is the
     * difference of the sides' t, for a cross_entropy the predictions' t, less `value`; cross, of a
     * cross_entropy with squares: the targets' mass times the difference less that of the
     * references; top: the largest logits. */
    void (*scan)(const struct kld_cpu_quick *quick, const struct kld_cpu_span *span,
                 struct kld_cpu_partial *ret_partial);
    /* What a row that is close needs: with x the class's mass of q against its reference and y that
     * of p times row->ratio, which is 2^d x with d the difference of the t less row->apart. value:
     * the sum of y ln(y/x) - y
     * + x, dot[Q] of x ln(x/y) - x + y, dot[P] of y - x, sum[Q] of x, square of mass times d^2,
     * sum[P] of (y - x)^2 and cross of |y - x|, in FP32; max[Q] the largest of x and y, max[P] of
     * |y - x|. Of a side that a KL centres, unless row->exact: with z its mass times d less
     * row->near, centre: the sum of z; unevenness of z^2 and distance of |z|, in FP32; top the
     * largest of |z|. */
    void (*refine)(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                   const struct kld_cpu_span *span, struct kld_cpu_partial *ret_partial);
    /* MIXTURE: the value, in dot the centres (from the pivot, if any), in square the sums of mass
     * times the square of what is centred, and if pivoted in max the largest of mass times that.
     * TV: the value, and each side's mass where it is the larger (dot), the smaller (sum), and
     * where both are the same (square). */
    void (*value)(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                  const struct kld_cpu_span *span, struct kld_cpu_partial *ret_partial);
    /* The gradients that the span names. */
    void (*write)(const struct kld_cpu_quick *quick, const struct kld_cpu_quick_row *row,
                  const struct kld_cpu_span *span);
};

#if defined(__x86_64__)
extern const struct kld_cpu_quick_kernels kld_cpu_quick_avx2, kld_cpu_quick_avx512;
#endif

/* For one job. width is kld_cpu_kernels.name; a width without a fused multiply-add fits nothing. */
void kld_cpu_quick_init(struct kld_cpu_quick *quick, const char *width,
                        const struct kld_cpu_work *work, uint64_t span_classes, uint64_t spans);

/* One row: its value, and its gradients written. team: cuts the row over it, with `spans` elements
 * of scratch; NULL: this thread; same bits. false: nothing was written, take the stages. */
bool kld_cpu_quick_run(const struct kld_cpu_quick *quick, struct kld_cpu_team *team,
                       struct kld_cpu_partial *scratch, const struct kld_cpu_span *row,
                       double *ret_value);

static inline void kld_cpu_quick_add(struct kld_cpu_partial *total,
                                     const struct kld_cpu_partial *part) {
    for (int side = 0; side < 2; side++) {
        total->sum[side] += part->sum[side];
        total->dot[side] += part->dot[side];
        total->square[side] += part->square[side];
        total->top[side] = part->top[side] > total->top[side] ? part->top[side] : total->top[side];
    }
    total->cross += part->cross;
}

/* Joins the sums of two pieces' scans; also used within a piece. */
void kld_cpu_quick_fold(const struct kld_cpu_quick *quick, struct kld_cpu_partial *total,
                        const struct kld_cpu_partial *part);

#endif
