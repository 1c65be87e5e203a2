/* oracle.c - see oracle.h. Plain loops over long double; slow on purpose.
 *
 * A divergence is a list of at most two terms a ln(a/b), each with a weight; b is the other side or
 * a mixture of both. tv and cross_entropy are written out. Zeros: a term whose own mass a is 0 is
 * 0, and so are its derivatives. */
#include "tests/unit/kernels/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define Q 0
#define P 1
#define TOO_CLOSE 3e-7L   /* |ln p - ln q| at which FP32 arithmetic may take p for q */
#define TOO_SMALL 1e-307L /* masses that FP64 arithmetic may take for 0 */

/* One class: mass and logarithm of each side. */
struct class {
    long double mass[2], log_mass[2];
};

/* weight * a ln(a/b) with a = mass[own]; b = share * mass[own] + rest * mass[other]. Of share and
 * rest, whose sum is 1, each is formed by itself: a small one would be lost in 1 less the other. */
struct kl {
    int own;
    long double weight, share, rest;
};

/* What a class adds: the term, the sum of the absolute values of its parts, d/dmass, and
 * mass * d/dmass. */
struct addition {
    long double term, parts, slope[2], moment[2];
};

static int kls_of(const struct oracle_row *row, struct kl kl[2]) {
    long double beta = row->beta, weight = row->weight, skew = row->skew;
    struct kl forward = {P, 1, 0, 1}, reverse = {Q, 1, 0, 1};
    kl[0] = forward;
    kl[1] = reverse;
    switch (row->divergence) {
    case KLD_DIVERGENCE_FORWARD_KL: return 1;
    case KLD_DIVERGENCE_REVERSE_KL: kl[0] = reverse; return 1;
    case KLD_DIVERGENCE_JEFFREYS: return 2;
    case KLD_DIVERGENCE_MIXED_KL:
        kl[0].weight = weight;
        kl[1].weight = 1 - weight;
        return 2;
    case KLD_DIVERGENCE_JS: /* at its ends it is the KL that it tends to, divided by beta */
        if (beta == 0)
            return 1;
        if (beta == 1) {
            kl[0] = reverse;
            return 1;
        }
        kl[0] = (struct kl){P, beta, beta, 1 - beta};
        kl[1] = (struct kl){Q, 1 - beta, 1 - beta, beta};
        return 2;
    case KLD_DIVERGENCE_SKEW_KL: kl[0] = (struct kl){P, 1, skew, 1 - skew}; return 1;
    case KLD_DIVERGENCE_SKEW_REVERSE_KL: kl[0] = (struct kl){Q, 1, skew, 1 - skew}; return 1;
    default: return 0;
    }
}

/* Probability and its logarithm for each class. */
static void side_masses(const struct oracle_row *row, int side, long double *mass,
                        long double *log_mass) {
    const long double *x = row->x[side];
    long double max = -INFINITY, sum = 0;
    for (uint64_t i = 0; i < row->classes; i++)
        if (x[i] > max)
            max = x[i];
    for (uint64_t i = 0; i < row->classes; i++)
        sum += expl((x[i] - max) / row->temperature);
    for (uint64_t i = 0; i < row->classes; i++) {
        switch (row->form[side]) {
        case KLD_FORM_PROBS:
            mass[i] = x[i] < 0 || isinf(x[i]) ? NAN : fabsl(x[i]); /* -0 is a 0 */
            log_mass[i] = logl(mass[i]);
            break;
        case KLD_FORM_LOGPROBS:
            log_mass[i] = x[i] == INFINITY ? NAN : x[i]; /* a mass of +inf, which is none */
            mass[i] = expl(log_mass[i]);
            break;
        default:
            log_mass[i] = (x[i] - max) / row->temperature - logl(sum);
            mass[i] = expl(log_mass[i]);
        }
    }
}

/* ln(1 + w (e^x - 1)) for x <= 0, with v = 1 - w for where little is left of the 1. */
static long double log_mean(long double w, long double v, long double x) {
    long double less = w * expm1l(x);
    return less < -0.5L ? logl(v + w * expl(x)) : log1pl(less);
}

/* ln(a / (share a + rest b)) of ln a and ln b, of which at most one is -inf. */
static long double log_ratio_of(const struct kl *kl, long double la, long double lb) {
    if (kl->share == 0)
        return la - lb;
    if (la == lb)
        return 0;
    return la > lb ? -log_mean(kl->rest, kl->share, lb - la)
                   : la - lb - log_mean(kl->share, kl->rest, la - lb);
}

static void add_kl(const struct kl *kl, const struct class *at, struct addition *to) {
    int own = kl->own, other = 1 - own;
    long double a = at->mass[own], b = at->mass[other], la = at->log_mass[own];
    if (a == 0 || kl->weight == 0)
        return;
    long double log_ratio = log_ratio_of(kl, la, at->log_mass[other]);
    long double mixture = kl->share == 0 ? b : kl->share * a + kl->rest * b;
    if (kl->share != 0 && mixture == 0) /* a is next to the least number there is */
        return;
    long double other_part = kl->share == 0 ? 1 : kl->rest * b / mixture;
    long double term = kl->weight * a * log_ratio;
    to->term += term;
    to->parts += fabsl(term);
    to->slope[own] += kl->weight * (log_ratio + other_part);
    to->moment[own] += term + kl->weight * a * other_part;
    to->slope[other] -= kl->weight * kl->rest * a / mixture;
    to->moment[other] -= kl->weight * a * other_part;
}

static void add_tv(const struct class *at, struct addition *to) {
    long double difference = at->mass[P] - at->mass[Q];
    long double sign = at->log_mass[P] > at->log_mass[Q]   ? 0.5L
                       : at->log_mass[P] < at->log_mass[Q] ? -0.5L
                                                           : 0;
    to->term = to->parts = fabsl(difference) / 2;
    to->slope[P] = sign;
    to->slope[Q] = -sign;
    to->moment[P] = sign * at->mass[P];
    to->moment[Q] = -sign * at->mass[Q];
}

static void add_cross_entropy(const struct class *at, struct addition *to) {
    if (at->mass[P] == 0)
        return;
    to->term = -at->mass[P] * at->log_mass[Q];
    to->parts = fabsl(to->term);
    to->slope[P] = -at->log_mass[Q];
    to->slope[Q] = -at->mass[P] / at->mass[Q];
    to->moment[P] = to->term;
    to->moment[Q] = -at->mass[P];
}

static struct addition add(const struct oracle_row *row, const struct class *at) {
    struct addition sum = {0};
    if (isnan(at->mass[P]) || isnan(at->mass[Q])) {
        struct addition none = {NAN, NAN, {NAN, NAN}, {NAN, NAN}};
        return none;
    }
    if (row->divergence == KLD_DIVERGENCE_TV)
        add_tv(at, &sum);
    if (row->divergence == KLD_DIVERGENCE_CROSS_ENTROPY)
        add_cross_entropy(at, &sum);
    struct kl kl[2];
    for (int i = 0, n = kls_of(row, kl); i < n; i++)
        add_kl(&kl[i], at, &sum);
    return sum;
}

/* The size of what a term is the difference of: masses times logarithms, and the logits whose
 * difference those are, as far from 0 as row->far. Where the other side of a mixture has no mass
 * there is but the one. */
static long double term_parts(const struct oracle_row *row, const struct class *at, uint64_t i) {
    long double log_size = fabsl(at->log_mass[0]) + fabsl(at->log_mass[1]), size = 0;
    for (int side = 0; side < 2; side++)
        if (row->form[side] == KLD_FORM_LOGITS)
            log_size += fminl(fabsl(row->x[side][i] / row->temperature), row->far);
    struct kl kl[2];
    for (int k = 0, n = kls_of(row, kl); k < n; k++) {
        int own = kl[k].own;
        long double log_ratio = log_ratio_of(&kl[k], at->log_mass[own], at->log_mass[1 - own]);
        long double log = isinf(log_size) ? fabsl(log_ratio) : log_size;
        size += at->mass[own] == 0 ? 0 : kl[k].weight * at->mass[own] * log;
    }
    if (row->divergence == KLD_DIVERGENCE_TV)
        size = (at->mass[P] + at->mass[Q]) * (1 + log_size);
    if (row->divergence == KLD_DIVERGENCE_CROSS_ENTROPY)
        size = at->mass[P] * log_size;
    return isfinite(size) ? size : 0;
}

static struct class class_of(const struct oracle_row *row, const long double *masses, uint64_t i) {
    uint64_t n = row->classes;
    struct class at = {{masses[i], masses[n + i]}, {masses[2 * n + i], masses[3 * n + i]}};
    return at;
}

/* Where tv may go to either side of its jump: its own part of the gradient, and what the softmax
 * hands to all others. */
static void side_slack(struct oracle_row *row, const long double *masses, int side) {
    long double *out = row->slack[side], sum = 0;
    for (uint64_t i = 0; i < row->classes; i++) {
        struct class at = class_of(row, masses, i);
        long double size = row->form[side] == KLD_FORM_PROBS ? 1 : at.mass[side];
        bool same = row->form[P] == row->form[Q] && row->form[P] != KLD_FORM_LOGITS &&
                    row->x[P][i] == row->x[Q][i];
        bool small = at.mass[P] < TOO_SMALL && at.mass[Q] < TOO_SMALL;
        bool close = row->divergence == KLD_DIVERGENCE_TV && !same &&
                     (small || fabsl(at.log_mass[P] - at.log_mass[Q]) <= TOO_CLOSE);
        out[i] = close ? size * fabsl(row->grad_output ? row->grad_output[i] : 1) : 0;
        sum += out[i];
    }
    for (uint64_t i = 0; row->form[side] == KLD_FORM_LOGITS && i < row->classes; i++)
        out[i] = (out[i] + masses[(uint64_t)side * row->classes + i] * sum) / row->temperature;
}

static void side_gradient(struct oracle_row *row, const long double *masses, int side) {
    long double *out = row->gradient[side], dot = 0;
    for (uint64_t i = 0; i < row->classes; i++) {
        struct class at = class_of(row, masses, i);
        struct addition addition = add(row, &at);
        out[i] = row->form[side] == KLD_FORM_PROBS ? addition.slope[side] : addition.moment[side];
        if (row->grad_output)
            out[i] *= row->grad_output[i];
        dot += out[i];
        long double whole = row->form[side] == KLD_FORM_PROBS ? 1 : at.mass[side];
        row->parts[side] = fmaxl(row->parts[side], fmaxl(whole, term_parts(row, &at, i)));
    }
    if (row->form[side] != KLD_FORM_LOGITS)
        return;
    for (uint64_t i = 0; i < row->classes; i++) {
        long double mass = class_of(row, masses, i).mass[side];
        if (isfinite(mass * dot))
            row->parts[side] = fmaxl(row->parts[side], fabsl(mass * dot));
        out[i] = (out[i] - (mass == 0 ? 0 : mass * dot)) / row->temperature;
    }
    row->parts[side] /= row->temperature;
}

void oracle_row_run(struct oracle_row *row) {
    uint64_t n = row->classes;
    long double *masses = malloc(n * 4 * sizeof *masses);
    if (!masses)
        abort();
    for (uint64_t side = 0; side < 2; side++)
        side_masses(row, (int)side, masses + side * n, masses + (2 + side) * n);
    row->value = row->magnitude = row->value_parts = row->parts[0] = row->parts[1] = 0;
    for (uint64_t i = 0; i < n; i++) {
        struct class at = class_of(row, masses, i);
        struct addition addition = add(row, &at);
        row->term[i] = addition.term;
        row->value += addition.term;
        row->magnitude += addition.parts;
        row->value_parts = fmaxl(row->value_parts, term_parts(row, &at, i));
        if (row->term_magnitude)
            row->term_magnitude[i] = addition.parts;
        if (row->term_parts)
            row->term_parts[i] = term_parts(row, &at, i);
    }
    for (int side = 0; side < 2; side++) {
        if (row->gradient[side])
            side_gradient(row, masses, side);
        if (row->slack[side])
            side_slack(row, masses, side);
    }
    free(masses);
}

/* Sum of grad_output * term. */
static long double weighted_value(struct oracle_row *row) {
    oracle_row_run(row);
    long double sum = 0;
    for (uint64_t i = 0; i < row->classes; i++)
        sum += row->term[i] * (row->grad_output ? row->grad_output[i] : 1);
    return sum;
}

long double oracle_row_difference(const struct oracle_row *row, int side, uint64_t at) {
    struct oracle_row copy = *row;
    uint64_t n = row->classes;
    long double *x = malloc(n * 2 * sizeof *x);
    if (!x)
        abort();
    memcpy(x, row->x[side], n * sizeof *x);
    copy.x[side] = x;
    copy.term = x + n;
    copy.term_magnitude = copy.term_parts = NULL;
    copy.gradient[0] = copy.gradient[1] = NULL;
    copy.slack[0] = copy.slack[1] = NULL;
    /* A probability may not leave the positive numbers, nor move by more than a part of itself. */
    long double step = row->form[side] == KLD_FORM_PROBS ? x[at] * 1e-6L : 1e-6L;
    long double low = x[at] - step, high = x[at] + step;
    x[at] = low;
    long double below = weighted_value(&copy);
    x[at] = high;
    long double above = weighted_value(&copy);
    free(x);
    return (above - below) / (high - low);
}
