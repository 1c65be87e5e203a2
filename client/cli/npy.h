/* npy.h - NumPy's .npy files, versions 1 to 3: their headers. Pure: bytes in, description out; no
 * I/O, no allocation. Format: numpy/lib/format.py. */
#ifndef KLD_CLIENT_CLI_NPY_H
#define KLD_CLIENT_CLI_NPY_H

#include <stddef.h>
#include <stdint.h>

#include "proto/op.h"
#include "proto/status.h"

/* A tensor in a file, or in memory that will become one. */
struct kld_array {
    enum kld_dtype dtype;
    uint32_t rank; /* 0: one value */
    uint64_t shape[KLD_RANK_MAX];
    uint64_t offset_bytes; /* where its values start in the file */
    uint64_t bytes;        /* of the values */
};

/* Reads the header at `data`; `bytes` is the size of the whole file. */
enum kld_status kld_npy_parse(const void *data, uint64_t bytes, struct kld_array *ret_array,
                              struct kld_error *err);

#define KLD_NPY_HEADER_BYTES 256
/* A version 1 header of array's dtype and shape; how many of the bytes are used. 0: NumPy has no
 * such dtype (BF16). */
size_t kld_npy_header(const struct kld_array *array, char ret_header[KLD_NPY_HEADER_BYTES]);

/* bytes = product of shape * element, refusing what overflows or has over 2^40 elements. */
enum kld_status kld_array_size(struct kld_array *array, struct kld_error *err);

#endif
