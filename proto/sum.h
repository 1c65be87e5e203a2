/* sum.h - the order in which rows become one loss, so that whoever has the rows' values can add
 * them as a server does, bit for bit: a job that was spread over several servers gives what one
 * gives. It adds numbers and does nothing else. Pure; any thread.
 *
 * A row's term is weight * value * scale, in FP64; 0 of a masked row. Rows are taken in groups of
 * kld_sum_group_rows(). Within a group terms are added in order of the rows, starting from 0, then
 * the groups' sums in order, starting from 0; the loss is that sum over the divisor, rounded to its
 * dtype. The weights that are rowmean's divisor are added in the same order. Nothing of this
 * depends on threads or on the machine. The CPU back end does it so; CUDA adds the same terms in
 * the order of its blocks (kernels/README.md). */
#ifndef KLD_PROTO_SUM_H
#define KLD_PROTO_SUM_H

#include <stdint.h>

#define KLD_SUM_GROUP_ELEMENTS                                                                     \
    32768u                        /* a group has as many rows as have about this many elements */
#define KLD_SUM_GROUPS_MAX 65536u /* more, where there would be more groups than this */

/* Rows of a group; the last may have fewer. rows and classes are at least 1. */
uint64_t kld_sum_group_rows(uint64_t rows, uint64_t classes);

/* The sum of one term a row. */
double kld_sum_terms(const double *terms, uint64_t rows, uint64_t classes);

#endif
