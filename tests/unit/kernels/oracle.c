/* oracle.c - see oracle.h. Plain loops over long double; slow on purpose. */
#include "tests/unit/kernels/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
            mass[i] = x[i] < 0 ? NAN : x[i];
            log_mass[i] = logl(mass[i]);
            break;
        case KLD_FORM_LOGPROBS:
            mass[i] = expl(x[i]);
            log_mass[i] = x[i];
            break;
        default:
            log_mass[i] = (x[i] - max) / row->temperature - logl(sum);
            mass[i] = expl(log_mass[i]);
        }
    }
}

/* a (ln a - ln b), the limit where a is 0. */
static long double kl_term(long double a, long double b, long double la, long double lb) {
    if (isnan(a) || isnan(b))
        return NAN;
    return a == 0 ? 0 : a * (la - lb);
}

/* By its own mass: d/da of a (ln a - ln b), and a times that. */
static long double kl_slope_own(long double a, long double b, long double la, long double lb) {
    if (isnan(a) || isnan(b))
        return NAN;
    return a == 0 ? 0 : la - lb + 1;
}

static long double kl_slope_other(long double a, long double b) {
    if (isnan(a) || isnan(b))
        return NAN;
    return a == 0 ? 0 : -a / b;
}

struct masses {
    long double *mass[2], *log_mass[2];
};

/* The size of what a term is the difference of. */
static long double term_parts(const struct oracle_row *row, const struct masses *at, uint64_t i) {
    int own = row->divergence == KLD_DIVERGENCE_FORWARD_KL ? 1 : 0;
    long double size = fabsl(at->log_mass[0][i]) + fabsl(at->log_mass[1][i]);
    for (int side = 0; side < 2; side++)
        if (row->form[side] == KLD_FORM_LOGITS)
            size += fabsl(row->x[side][i] / row->temperature);
    size *= at->mass[own][i];
    return isfinite(size) ? size : 0;
}

static void side_gradient(struct oracle_row *row, const struct masses *at, int side) {
    int own = row->divergence == KLD_DIVERGENCE_FORWARD_KL ? 1 : 0, other = 1 - own;
    long double *out = row->gradient[side], dot = 0;
    for (uint64_t i = 0; i < row->classes; i++) {
        long double a = at->mass[own][i], b = at->mass[other][i];
        long double la = at->log_mass[own][i], lb = at->log_mass[other][i];
        long double slope = side == own ? kl_slope_own(a, b, la, lb) : kl_slope_other(a, b);
        long double moment = side == own    ? (a == 0 && !isnan(b) ? 0 : a * slope)
                             : isnan(a + b) ? (long double)NAN
                                            : -a;
        out[i] = row->form[side] == KLD_FORM_PROBS ? slope : moment;
        if (row->grad_output)
            out[i] *= row->grad_output[i];
        dot += out[i];
        long double part = term_parts(row, at, i);
        if (part > row->parts[side])
            row->parts[side] = part;
    }
    if (row->form[side] != KLD_FORM_LOGITS)
        return;
    for (uint64_t i = 0; i < row->classes; i++) {
        long double mass = at->mass[side][i];
        if (isfinite(mass * dot) && fabsl(mass * dot) > row->parts[side])
            row->parts[side] = fabsl(mass * dot);
        out[i] = (out[i] - (mass == 0 ? 0 : mass * dot)) / row->temperature;
    }
}

void oracle_row_run(struct oracle_row *row) {
    uint64_t n = row->classes;
    long double *space = malloc(n * 4 * sizeof *space);
    if (!space)
        abort();
    struct masses at = {{space, space + n}, {space + 2 * n, space + 3 * n}};
    int own = row->divergence == KLD_DIVERGENCE_FORWARD_KL ? 1 : 0, other = 1 - own;
    for (int side = 0; side < 2; side++)
        side_masses(row, side, at.mass[side], at.log_mass[side]);
    row->value = row->magnitude = row->value_parts = row->parts[0] = row->parts[1] = 0;
    for (uint64_t i = 0; i < n; i++) {
        row->term[i] =
            kl_term(at.mass[own][i], at.mass[other][i], at.log_mass[own][i], at.log_mass[other][i]);
        row->value += row->term[i];
        row->magnitude += fabsl(row->term[i]);
        row->value_parts = fmaxl(row->value_parts, term_parts(row, &at, i));
    }
    for (int side = 0; side < 2; side++)
        if (row->gradient[side])
            side_gradient(row, &at, side);
    free(space);
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
    copy.gradient[0] = copy.gradient[1] = NULL;
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
