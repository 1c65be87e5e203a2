/* op.h - the operator: what one request asks for, whichever way it came in.
 *
 * One struct kld_op is decoded (from a wire frame, from Open Inference JSON, from libkld's caller),
 * checked by kld_op_check(), queued and launched. It holds plain numbers only: no pointer, no file
 * descriptor, nothing to free; copying it is an assignment. kld_op_check() is pure: it allocates
 * nothing, reads no tensor and never overflows, whatever the fields hold.
 *
 * Tensors. `predictions` (q) and `targets` (p) have one shape of rank 1 to 8. The last dimension is
 * the C classes, all leading dimensions together the N rows. Any thread. */
#ifndef KLD_PROTO_OP_H
#define KLD_PROTO_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* part of libkld's interface */

#define KLD_RANK_MAX 8
#define KLD_ELEMENTS_MAX ((uint64_t)1 << 40) /* N * C */

/* X(NAME, name on the wire, number, bytes of an element). 0 means: no such tensor. */
#define KLD_DTYPE_MAP(X)                                                                           \
    X(FP32, "FP32", 1, 4)                                                                          \
    X(FP64, "FP64", 2, 8)                                                                          \
    X(FP16, "FP16", 3, 2)                                                                          \
    X(BF16, "BF16", 4, 2)                                                                          \
    X(UINT8, "UINT8", 5, 1)                                                                        \
    X(BOOL, "BOOL", 6, 1)

/* X(NAME, name, number) */
#define KLD_FORM_MAP(X)                                                                            \
    X(PROBS, "probs", 0)       /* x is the probability, not renormalised */                        \
    X(LOGPROBS, "logprobs", 1) /* x is its natural logarithm */                                    \
    X(LOGITS, "logits", 2)     /* softmax(x / temperature) is the probability */

/* X(NAME, name, number). b is the parameter beta. */
#define KLD_DIVERGENCE_MAP(X)                                                                      \
    X(FORWARD_KL, "forward_kl", 0)           /* sum p (ln p - ln q) */                             \
    X(REVERSE_KL, "reverse_kl", 1)           /* sum q (ln q - ln p) */                             \
    X(JEFFREYS, "jeffreys", 2)               /* forward + reverse */                               \
    X(MIXED_KL, "mixed_kl", 3)               /* weight forward + (1 - weight) reverse */           \
    X(JS, "js", 4)                           /* b KL(p, m) + (1-b) KL(q, m), m = b p + (1-b) q */  \
    X(SKEW_KL, "skew_kl", 5)                 /* KL(p, skew p + (1 - skew) q) */                    \
    X(SKEW_REVERSE_KL, "skew_reverse_kl", 6) /* KL(q, (1 - skew) p + skew q) */                    \
    X(TV, "tv", 7)                           /* sum |p - q| / 2 */                                 \
    X(CROSS_ENTROPY, "cross_entropy", 8)     /* - sum p ln q */

/* X(NAME, name, number) */
#define KLD_REDUCTION_MAP(X)                                                                       \
    X(BATCHMEAN, "batchmean", 0) /* sum / size of dimension 0 */                                   \
    X(NONE, "none", 1)           /* one value an element: the shape of the inputs */               \
    X(ROW, "row", 2)             /* one value a row: the leading dimensions */                     \
    X(SUM, "sum", 3)                                                                               \
    X(MEAN, "mean", 4)       /* sum / (N * C) */                                                   \
    X(ROWMEAN, "rowmean", 5) /* sum of w_i row_i / sum of w_i over unmasked rows; 0 if that is 0   \
                              */

/* X(NAME, name, 1 if an output). The order is the order on the wire. */
#define KLD_SLOT_MAP(X)                                                                            \
    X(PREDICTIONS, "predictions", 0)                                                               \
    X(TARGETS, "targets", 0)                                                                       \
    X(ROW_WEIGHTS, "row_weights", 0) /* FP32 [N] */                                                \
    X(ROW_MASK, "row_mask", 0)       /* BOOL or UINT8 [N]; 0 leaves the row out */                 \
    X(GRAD_OUTPUT, "grad_output",                                                                  \
      0)                       /* float; [1], or [N] for row, or the inputs' shape for none */     \
    X(LOSS, "loss", 1)         /* the reduced value; dtype kld_geometry.loss_dtype */              \
    X(ROW_LOSS, "row_loss", 1) /* [N]: what reduction row would give; FP64 too */                  \
    X(GRAD_PREDICTIONS, "grad_predictions", 1) /* shape and dtype of predictions */                \
    X(GRAD_TARGETS, "grad_targets", 1)         /* shape and dtype of targets */

/* X(NAME, name, default). The numeric parameters; their ranges are checked by kld_op_check(). */
#define KLD_NUMBER_MAP(X)                                                                          \
    X(TEMPERATURE, "temperature", 1.0) /* > 0; needs a logits tensor */                            \
    X(BETA, "beta", 0.5)               /* [0, 1]; js only */                                       \
    X(SKEW, "skew", 0.0)               /* [0, 1); skew_kl, skew_reverse_kl: must be given there */ \
    X(WEIGHT, "weight", 0.5)           /* [0, 1]; mixed_kl: must be given there */                 \
    X(SCALE, "scale", 1.0)             /* finite; multiplies loss and gradients */                 \
    X(NORMALIZER, "normalizer", 0.0)   /* > 0; replaces mean's, batchmean's, rowmean's divisor */  \
    X(GRAD_OUTPUT, "grad_output", 1.0) /* finite scalar; reductions to a scalar only */

enum kld_dtype {
    KLD_DTYPE_ABSENT = 0,
#define X(NAME, name, number, bytes) KLD_DTYPE_##NAME = number,
    KLD_DTYPE_MAP(X)
#undef X
};
enum kld_form {
#define X(NAME, name, number) KLD_FORM_##NAME = number,
    KLD_FORM_MAP(X)
#undef X
};
enum kld_divergence {
#define X(NAME, name, number) KLD_DIVERGENCE_##NAME = number,
    KLD_DIVERGENCE_MAP(X)
#undef X
};
enum kld_reduction {
#define X(NAME, name, number) KLD_REDUCTION_##NAME = number,
    KLD_REDUCTION_MAP(X)
#undef X
};
enum kld_slot {
#define X(NAME, name, output) KLD_SLOT_##NAME,
    KLD_SLOT_MAP(X)
#undef X
        KLD_SLOT_COUNT
};
enum kld_number {
#define X(NAME, name, value) KLD_NUMBER_##NAME,
    KLD_NUMBER_MAP(X)
#undef X
        KLD_NUMBER_COUNT
};

/* Where a tensor lies. region 0 is the address space of the process that launches (libkld's
 * `local:` and tests), offset then being the address; it never comes from a wire. */
struct kld_tensor {
    uint32_t dtype;    /* enum kld_dtype; 0: the request has no such tensor */
    uint32_t reserved; /* 0 */
    uint64_t region;
    uint64_t offset_bytes;
    uint64_t row_stride_bytes; /* from one row to the next; 0: rows follow each other */
};

struct kld_op {
    uint32_t divergence;                     /* enum kld_divergence */
    uint32_t reduction;                      /* enum kld_reduction */
    uint32_t predictions_form, targets_form; /* enum kld_form */
    uint32_t rank;
    uint32_t given;               /* bit 1 << enum kld_number: the caller set that number */
    uint64_t shape[KLD_RANK_MAX]; /* shape[0 .. rank-1]; the rest 0 */
    double number[KLD_NUMBER_COUNT];
    struct kld_tensor tensor[KLD_SLOT_COUNT];
};

/* What follows from an op that passed kld_op_check(). Sizes of tensors in bytes. */
struct kld_geometry {
    uint64_t rows;             /* N */
    uint64_t classes;          /* C */
    uint64_t elements;         /* N * C */
    enum kld_dtype loss_dtype; /* FP64 where predictions or targets are FP64, else FP32 */
    bool scalar;               /* the reduction gives one number */
    /* What the sum is divided by: normalizer, N*C, shape[0], or 1. 0 for rowmean without a
     * normalizer: the divisor is then the sum of the weights of unmasked rows (1 each without
     * row_weights). */
    double divisor;
    struct kld_slot_geometry {
        uint64_t rows;         /* of this tensor; 0: absent */
        uint64_t row_bytes;    /* bytes of one row that are read or written */
        uint64_t stride_bytes; /* from row to row, resolved (never 0 when present) */
        uint64_t span_bytes;   /* from the first byte of the first row past the last of the last */
    } slot[KLD_SLOT_COUNT];
};

/* Everything to its default; no tensor, rank 0. */
void kld_op_init(struct kld_op *op);

/* The single gate: is this op one that both back ends can launch? On KLD_OK *ret_geometry is set.
 * KLD_INVALID: the request is wrong. KLD_TOO_LARGE: beyond KLD_ELEMENTS_MAX. Outputs may not
 * overlap any tensor, but a gradient may lie exactly over its own tensor (same region, offset and
 * stride). Columns of rows of one stride, apart from each other, do not overlap; tensors whose
 * strides differ do where their spans do. */
enum kld_status kld_op_check(const struct kld_op *op, struct kld_geometry *ret_geometry,
                             struct kld_error *err);

/* Does `slot` of a checked op lie inside a region of region_bytes, aligned to its element? */
enum kld_status kld_op_check_bounds(const struct kld_op *op, const struct kld_geometry *geometry,
                                    enum kld_slot slot, uint64_t region_bytes,
                                    struct kld_error *err);

/* True if running the op twice could read what the first run wrote (a gradient over its tensor):
 * such a request must not be sent again after a lost worker. */
bool kld_op_in_place(const struct kld_op *op);

/* Set one named parameter. `divergence`, `reduction`, `predictions_form`, `targets_form` take text,
 * the KLD_NUMBER_MAP ones a number; an unknown name or value is KLD_INVALID with a text that lists
 * the known ones. */
enum kld_status kld_op_set_text(struct kld_op *op, const char *name, const char *value,
                                struct kld_error *err);
enum kld_status kld_op_set_number(struct kld_op *op, const char *name, double value,
                                  struct kld_error *err);
/* 1: takes text, 2: takes a number, 0: no such parameter. */
int kld_op_parameter_kind(const char *name);
/* "divergence, predictions_form, ...": for error texts and help. */
const char *kld_op_parameter_list(void);

/* Names, or "unknown". Lookups return false and leave *ret_… alone if there is no such name. */
const char *kld_dtype_name(uint32_t dtype);
uint32_t kld_dtype_bytes(uint32_t dtype); /* 0 if unknown */
bool kld_dtype_is_float(uint32_t dtype);
bool kld_dtype_from_name(const char *name, enum kld_dtype *ret_dtype);
const char *kld_form_name(uint32_t form);
const char *kld_divergence_name(uint32_t divergence);
const char *kld_reduction_name(uint32_t reduction);
const char *kld_slot_name(uint32_t slot);
const char *kld_number_name(uint32_t number);
bool kld_slot_is_output(uint32_t slot);
bool kld_slot_from_name(const char *name, enum kld_slot *ret_slot);
/* "a, b, c": every divergence, every form, every reduction, every dtype of a tensor. */
const char *kld_divergence_list(void);
const char *kld_form_list(void);
const char *kld_reduction_list(void);
const char *kld_dtype_list(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
