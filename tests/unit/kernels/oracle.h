/* oracle.h - what the numbers must be: forward and reverse KL and their gradients in long double,
 * written from the definitions, one row at a time. It shares no code with the back ends. Pure; any
 * thread. */
#ifndef KLD_TESTS_ORACLE_H
#define KLD_TESTS_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/op.h"

struct oracle_row {
    uint32_t divergence;
    uint32_t form[2]; /* predictions, targets */
    long double temperature;
    uint64_t classes;
    const long double *x[2];        /* [classes] as the tensors hold them */
    const long double *grad_output; /* [classes] for reduction none, else NULL: 1 each */
    /* Out; the caller's arrays. */
    long double value;     /* of the divergence */
    long double magnitude; /* sum of |terms| */
    long double *term;     /* [classes] */
    /* The largest of the numbers whose differences the value, and each side's gradient, are. Double
     * arithmetic cannot do better than some 1e-16 of it. */
    long double value_parts, parts[2];
    long double *gradient[2]; /* [classes], of the sum of grad_output * term; NULL: not wanted */
};

void oracle_row_run(struct oracle_row *row);

/* The derivative by x[side][at], by a central difference. */
long double oracle_row_difference(const struct oracle_row *row, int side, uint64_t at);

#endif
