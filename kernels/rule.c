/* rule.c - see rule.h. Sources: jeffreys: Kullback and Leibler 1951; js: Lin 1991, with beta as in
 * the generalised divergence of Agarwal et al. 2024 (GKD); skew: Ko et al. 2024 (DistiLLM). */
#include "kernels/rule.h"

#include <math.h>

static struct kld_rule kl(double of_p, double of_q) {
    return (struct kld_rule){.kind = KLD_RULE_KL, .of_p = of_p, .of_q = of_q};
}

static struct kld_rule mixture(double of_p, double of_q, double share, double rest) {
    double most = -(of_p * log(share) + of_q * log(rest));
    struct kld_rule rule = {KLD_RULE_MIXTURE, of_p, of_q, share, rest, most};
    return rule;
}

struct kld_rule kld_rule_of(const struct kld_op *op) {
    double beta = op->number[KLD_NUMBER_BETA], skew = op->number[KLD_NUMBER_SKEW];
    double weight = op->number[KLD_NUMBER_WEIGHT];
    switch (op->divergence) {
    case KLD_DIVERGENCE_REVERSE_KL: return kl(0, 1);
    case KLD_DIVERGENCE_JEFFREYS: return kl(1, 1);
    case KLD_DIVERGENCE_MIXED_KL: return kl(weight, 1 - weight);
    case KLD_DIVERGENCE_JS:
        return beta == 0   ? kl(1, 0)
               : beta == 1 ? kl(0, 1)
                           : mixture(beta, 1 - beta, beta, 1 - beta);
    case KLD_DIVERGENCE_SKEW_KL: return skew == 0 ? kl(1, 0) : mixture(1, 0, skew, 1 - skew);
    case KLD_DIVERGENCE_SKEW_REVERSE_KL:
        return skew == 0 ? kl(0, 1) : mixture(0, 1, 1 - skew, skew);
    case KLD_DIVERGENCE_TV: return (struct kld_rule){.kind = KLD_RULE_TV};
    case KLD_DIVERGENCE_CROSS_ENTROPY: return (struct kld_rule){.kind = KLD_RULE_CROSS_ENTROPY};
    default: return kl(1, 0);
    }
}

struct kld_rule kld_rule_swapped(struct kld_rule rule) {
    struct kld_rule swapped = rule;
    swapped.of_p = rule.of_q;
    swapped.of_q = rule.of_p;
    swapped.share = rule.rest;
    swapped.rest = rule.share;
    return swapped;
}
