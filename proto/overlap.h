/* overlap.h - do two tensors in one memory share a byte? For the check of an op, and for what a
 * client may send again. */
#ifndef KLD_PROTO_OVERLAP_H
#define KLD_PROTO_OVERLAP_H

#include "proto/op.h"

/* Columns apart from each other, in rows of one stride, share none, though their spans overlap. */
static inline bool kld_columns_apart(uint64_t a, const struct kld_slot_geometry *x, uint64_t b,
                                     const struct kld_slot_geometry *y) {
    uint64_t stride = x->stride_bytes;
    if (stride != y->stride_bytes)
        return false;
    uint64_t back = a > b ? (a - b) % stride : 0;
    uint64_t at = a > b ? (back ? stride - back : 0) : (b - a) % stride; /* of y, in a row of x */
    return at >= x->row_bytes && y->row_bytes <= stride - at;
}

/* Of tensors that are there, at the offsets a and b. Strides that differ are not looked into: where
 * the spans of such tensors overlap they may share a byte. */
static inline bool kld_rows_overlap(uint64_t a, const struct kld_slot_geometry *x, uint64_t b,
                                    const struct kld_slot_geometry *y) {
    return a < b + y->span_bytes && b < a + x->span_bytes && !kld_columns_apart(a, x, b, y);
}

#endif
