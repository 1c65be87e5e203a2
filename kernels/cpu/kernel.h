/* kernel.h - between the cutting of work (run.c) and the arithmetic (body.h, compiled once for each
 * vector width): what a piece of one row is, and the table of functions that work on it.
 *
 * All functions are pure apart from the outputs named in the span, and run on any thread of the
 * team. Side 0 is the predictions (q), side 1 the targets (p). */
#ifndef KLD_KERNELS_CPU_KERNEL_H
#define KLD_KERNELS_CPU_KERNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/rule.h"

enum kld_cpu_side { KLD_CPU_Q, KLD_CPU_P };

/* A row is worked on in blocks of this many classes, counted from its first: the order of every
 * sum follows from the number of classes alone. */
#define KLD_CPU_BLOCK 256

/* Rows of at most this many classes may be done several at a time: what they hold then should stay
 * in the second-level cache. 40 bytes for a class and a lane of it are on the stack. */
#define KLD_CPU_SHORT_CLASSES 1024
/* More than any width has lanes. */
#define KLD_CPU_LANES_MAX 8

/* What holds for a whole launch. */
struct kld_cpu_work {
    /* Whose formula this is: forward_kl also for js with beta 0. What a rule adds up is the same.
     */
    uint32_t divergence;
    struct kld_rule rule;
    uint32_t form[2], dtype[2];
    uint32_t grad_output_dtype; /* of the tensor with one value for each element; 0: none */
    uint32_t loss_dtype;        /* of the losses of reduction none; 0: not asked for */
    bool none;                  /* reduction none: terms as PyTorch writes them */
    bool gradient[2];           /* asked for */
    bool streaming[2];          /* outputs much larger than the caches: store around them */
    double inverse_temperature;
};

/* In a mixture less of the other side than this is wanted better than short_logits.h has it, where
 * nothing else is beside it. */
#define KLD_CPU_SHORT_OTHER 0x1p-5

/* Whether short rows are done by short_logits.h, those apart that hold what it cannot do. */
static inline bool kld_cpu_short_logits_fit(const struct kld_cpu_work *work) {
    const struct kld_rule *rule = &work->rule;
    double scale = work->inverse_temperature;
    for (int side = 0; side < 2; side++)
        if (work->form[side] != KLD_FORM_LOGITS || work->dtype[side] == KLD_DTYPE_FP64)
            return false;
    double least_share = rule->of_p == 0 ? KLD_CPU_SHORT_OTHER : KLD_RULE_SHARE_SMALL;
    double least_rest = rule->of_q == 0 ? KLD_CPU_SHORT_OTHER : KLD_RULE_SHARE_SMALL;
    if (rule->kind == KLD_RULE_MIXTURE && (rule->share < least_share || rule->rest < least_rest))
        return false;
    return !work->none && scale >= 0x1p-20 && scale <= 0x1p20;
}

/* Columns [0, count) of a piece of one row that starts at a multiple of KLD_CPU_BLOCK. */
struct kld_cpu_span {
    uint64_t count;
    const unsigned char *in[2];
    unsigned char *gradient[2];       /* NULL: not in this pass */
    unsigned char *loss;              /* reduction none, NULL: not in this pass */
    const unsigned char *grad_output; /* one for each element, or NULL */
    /* Of the row. */
    double loss_factor;     /* multiplies the losses of reduction none */
    double gradient_factor; /* multiplies the gradients */
    double max[2], sum[2];  /* logits: the maximum, and the sum of exp((z - max) / T) */
    double dot[2]; /* logits: the sum of x df/dx, what the softmax takes off the gradient */
};

/* What a pass over a span adds up. Folded in order of the spans. */
struct kld_cpu_partial {
    double value;                                 /* of the divergence */
    double dot[2];                                /* as in the span */
    double max[2], sum[2];                        /* logits, relative to this maximum */
    double square[2], cross, top[2];              /* quick.h only */
    double centre[2], unevenness[2], distance[2]; /* its refine() only */
};

struct kld_cpu_kernels {
    const char *name;
    /* max and sum of one side of a span. */
    void (*statistics)(const struct kld_cpu_work *work, enum kld_cpu_side side,
                       const unsigned char *in, uint64_t count, double *ret_max, double *ret_sum);
    /* value and dot of a span, and whatever outputs it names. */
    void (*pass)(const struct kld_cpu_work *work, const struct kld_cpu_span *span,
                 struct kld_cpu_partial *ret_partial);
    /* Whole rows of at most KLD_CPU_SHORT_CLASSES, `lanes` of them at most, none masked, each with
     * a gradient where the first has one: values, and gradients written. dots: a gradient needs a
     * sum over its row that the span does not hold. Not for reduction none. */
    uint32_t lanes;
    void (*rows)(const struct kld_cpu_work *work, const struct kld_cpu_span *span, uint64_t count,
                 bool dots, double *ret_value);
    /* For the ceilings: reads two arrays; with `to` also writes a third. bytes: a multiple of 64.
     * Returns something that depends on all that was read. */
    uint64_t (*stream)(const unsigned char *a, const unsigned char *b, unsigned char *to,
                       uint64_t bytes);
};

extern const struct kld_cpu_kernels kld_cpu_kernels_base;
#if defined(__x86_64__)
extern const struct kld_cpu_kernels kld_cpu_kernels_avx2;
extern const struct kld_cpu_kernels kld_cpu_kernels_avx512;
#endif

/* The widest that this processor can run. */
const struct kld_cpu_kernels *kld_cpu_kernels_choose(void);

#endif
