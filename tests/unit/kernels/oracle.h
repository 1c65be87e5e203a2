/* oracle.h - what the numbers must be: every divergence and its gradients in long double, written
 * from the definitions, one row at a time. It shares no code with the back ends, nor the four
 * formulas that they compute. Pure; any thread. */
#ifndef KLD_TESTS_ORACLE_H
#define KLD_TESTS_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/op.h"

struct oracle_row {
    uint32_t divergence;
    long double beta, skew, weight; /* what the divergence takes; the others are not looked at */
    uint32_t form[2];               /* predictions, targets */
    long double temperature;
    long double far; /* in units of T: a logit that is further from 0 counts as that in the parts */
    uint64_t classes;
    const long double *x[2];        /* [classes] as the tensors hold them */
    const long double *grad_output; /* [classes] for reduction none, else NULL: 1 each */
    /* Out; the caller's arrays. */
    long double value;     /* of the divergence */
    long double magnitude; /* sum of |parts| of the terms: of jeffreys |p d| + |q d| */
    long double *term;     /* [classes] */
    /* [classes], or NULL: of each term the sum of |parts|, and the size of the numbers whose
     * difference it is. */
    long double *term_magnitude, *term_parts;
    /* The largest of the numbers whose differences the value, and each side's gradient, are. Double
     * arithmetic cannot do better than some 1e-16 of it. */
    long double value_parts, parts[2];
    long double *gradient[2]; /* [classes], of the sum of grad_output * term; NULL: not wanted */
    /* [classes], or NULL: how far off a gradient may be because tv jumps where p = q and the two
     * are closer there than FP32 arithmetic can tell. */
    long double *slack[2];
};

void oracle_row_run(struct oracle_row *row);

/* The derivative by x[side][at], by a central difference. */
long double oracle_row_difference(const struct oracle_row *row, int side, uint64_t at);

#endif
