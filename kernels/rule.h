/* rule.h - the nine divergences as four formulas with numbers in them, so that a kernel has four
 * cases and not nine. p is the targets' probability of a class, q the predictions'; a row's value
 * is the sum over its classes.
 *
 *     KL             of_p p ln(p/q) + of_q q ln(q/p)
 *     MIXTURE        of_p p ln(p/m) + of_q q ln(q/m),  m = share p + rest q
 *     TV             |p - q| / 2
 *     CROSS_ENTROPY  -p ln q
 *
 * Where the limit of one is another (js with beta 0 or 1, a skew of 0), it is the other: kernels
 * see mixtures of both sides only. share + rest is 1, and each is as good as the parameter itself:
 * 1 less the one has little or nothing of the other where that is small. Pure; any thread. */
#ifndef KLD_KERNELS_RULE_H
#define KLD_KERNELS_RULE_H

#include "proto/op.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kld_rule_kind {
    KLD_RULE_KL,
    KLD_RULE_MIXTURE,
    KLD_RULE_TV,
    KLD_RULE_CROSS_ENTROPY,
};

/* A share so small that ln(smaller/m) is wanted by itself where the larger has it: as the larger's
 * less |d| nothing would be left of it. */
#define KLD_RULE_SHARE_SMALL 0x1p-10

struct kld_rule {
    uint32_t kind;     /* enum kld_rule_kind */
    double of_p, of_q; /* >= 0; KL and MIXTURE */
    double share;      /* of p in the mixture, in (0, 1]; MIXTURE only */
    double rest;       /* of q, in (0, 1]: 1 where it rounds to that, as share is */
    double most;       /* the largest value, of sides that have nothing in common; MIXTURE only */
};

/* Of an op that passed kld_op_check(). */
struct kld_rule kld_rule_of(const struct kld_op *op);

/* The same divergence with the names p and q exchanged; KL, MIXTURE and TV only. */
struct kld_rule kld_rule_swapped(struct kld_rule rule);

#ifdef __cplusplus
}
#endif
#endif
