/* bench_data.h - numbers for `kld bench`: rows of random probabilities, their logarithms, or
 * logits, in any dtype; the same on every run. Pure. */
#ifndef KLD_CLIENT_CLI_BENCH_DATA_H
#define KLD_CLIENT_CLI_BENCH_DATA_H

#include <stdint.h>

#include "proto/op.h"

void kld_bench_fill(void *to, enum kld_dtype dtype, enum kld_form form, uint64_t rows,
                    uint64_t classes, uint64_t seed);

#endif
