/* split_job.c - one request over several servers (split.h): what each part of it asks for, and how
 * the whole comes together from the parts. Knows no server. The thread that owns the connection. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/split.h"
#include "proto/sum.h"

static bool is_gradient(uint32_t slot) {
    return slot == KLD_SLOT_GRAD_PREDICTIONS || slot == KLD_SLOT_GRAD_TARGETS;
}

/* Has the slot a row for each row of the inputs? */
static bool is_tall(const struct split_call *call, uint32_t slot) {
    return slot != KLD_SLOT_GRAD_OUTPUT || !call->scalar;
}

static bool is_masked(const struct split_call *call, uint64_t row) {
    const struct kld_slot_geometry *at = &call->base.geometry.slot[KLD_SLOT_ROW_MASK];
    const char *mask = call->at[KLD_SLOT_ROW_MASK];
    return mask && mask[row * at->stride_bytes] == 0;
}

static float weight_of(const struct split_call *call, uint64_t row) {
    const struct kld_slot_geometry *at = &call->base.geometry.slot[KLD_SLOT_ROW_WEIGHTS];
    float weight = 1;
    if (call->at[KLD_SLOT_ROW_WEIGHTS])
        memcpy(&weight, call->at[KLD_SLOT_ROW_WEIGHTS] + row * at->stride_bytes, sizeof weight);
    return weight;
}

/* What one server would divide by. Uses the room for the terms. */
static double divisor_of(struct split_call *call) {
    const struct kld_geometry *geometry = &call->base.geometry;
    if (geometry->divisor != 0)
        return geometry->divisor;
    if (!call->at[KLD_SLOT_ROW_WEIGHTS] && !call->at[KLD_SLOT_ROW_MASK])
        return (double)geometry->rows;
    for (uint64_t row = 0; row < geometry->rows; row++)
        call->terms[row] = is_masked(call, row) ? 0 : (double)weight_of(call, row);
    return kld_sum_terms(call->terms, geometry->rows, geometry->classes);
}

/* Each part is told the divisor of the whole, so that its gradients are those of the whole. Where
 * that is 0 they are asked for as well, as without them a row's loss may have other bits;
 * kld_split_finish() writes zeros over them. */
static enum kld_status plan_scalar(struct split_call *call, struct kld_error *err) {
    struct kld_op *op = &call->part.op;
    const struct kld_geometry *geometry = &call->base.geometry;
    call->terms = geometry->rows <= SIZE_MAX / 8 ? malloc(geometry->rows * 8) : NULL;
    if (!call->terms)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for the losses of %llu rows",
                             (unsigned long long)geometry->rows);
    double divisor = divisor_of(call);
    if (!isfinite(divisor))
        return kld_error_set(err, KLD_INVALID,
                             "row_weights sum to %g; over several servers their sum is finite",
                             divisor);
    call->zero = divisor == 0;
    call->negative = divisor < 0;
    call->divisor = call->zero ? 1 : fabs(divisor);
    if (op->reduction != KLD_REDUCTION_SUM) {
        op->number[KLD_NUMBER_NORMALIZER] = call->divisor;
        op->given |= 1u << KLD_NUMBER_NORMALIZER;
    }
    if (call->negative) {
        op->number[KLD_NUMBER_SCALE] = -op->number[KLD_NUMBER_SCALE];
        op->given |= 1u << KLD_NUMBER_SCALE;
    }
    op->tensor[KLD_SLOT_LOSS].dtype = KLD_DTYPE_ABSENT;
    op->tensor[KLD_SLOT_ROW_LOSS] = (struct kld_tensor){.dtype = KLD_DTYPE_FP64};
    return KLD_OK;
}

enum kld_status kld_split_plan(struct split_call *call, uint32_t servers, uint64_t part_bytes_max,
                               struct kld_error *err) {
    const struct kld_op *whole = &call->base.request.op;
    const struct kld_geometry *geometry = &call->base.geometry;
    struct kld_op *op = &call->part.op;
    uint64_t row_bytes = 0;
    call->scalar = geometry->scalar;
    call->part.stream = call->base.request.stream;
    call->part.trace = call->base.request.trace;
    *op = *whole;
    op->rank = 2;
    memset(op->shape, 0, sizeof op->shape);
    op->shape[1] = geometry->classes;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!whole->tensor[slot].dtype)
            continue;
        /* place_tensors() has written addresses there; every region is memory of this process. */
        call->at[slot] = (char *)(uintptr_t)whole->tensor[slot].offset_bytes;
        op->tensor[slot].region = op->tensor[slot].offset_bytes = 0;
        op->tensor[slot].row_stride_bytes = geometry->slot[slot].stride_bytes;
        row_bytes += geometry->slot[slot].row_bytes;
    }
    enum kld_status status = call->scalar ? plan_scalar(call, err) : KLD_OK;
    uint64_t fitting = part_bytes_max / row_bytes;
    uint64_t even = geometry->rows / ((uint64_t)servers * SPLIT_PARTS_WANTED);
    call->part_rows = kld_split_smaller(fitting, even);
    if (call->part_rows == 0)
        call->part_rows = 1;
    if (call->zero && !call->at[KLD_SLOT_ROW_LOSS]) /* nothing to ask for */
        call->next_row = call->done_rows = geometry->rows;
    return status;
}

/* ---- Parts ------------------------------------------------------------------------------------
 */

/* A gradient over its own tensor, of which a reply that breaks off in the middle would leave
 * something else than the input to the next try. */
static bool is_in_place(const struct split_call *call, uint32_t slot) {
    uint32_t own = slot == KLD_SLOT_GRAD_PREDICTIONS ? KLD_SLOT_PREDICTIONS : KLD_SLOT_TARGETS;
    return is_gradient(slot) && call->at[slot] == call->at[own];
}

enum kld_status kld_split_part_make(struct split_part *part, struct kld_request *ret_request,
                                    struct kld_error *err) {
    const struct split_call *call = part->call;
    const struct kld_geometry *geometry = &call->base.geometry;
    *ret_request = call->part;
    ret_request->op.shape[0] = part->range.rows;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        struct kld_tensor *tensor = &ret_request->op.tensor[slot];
        const struct kld_slot_geometry *at = &geometry->slot[slot];
        char **data = (char **)&ret_request->bytes[slot].data;
        if (!tensor->dtype)
            continue;
        if (slot == KLD_SLOT_ROW_LOSS && call->scalar) {
            *data = (char *)(call->terms + part->range.first);
            continue;
        }
        *data = call->at[slot] + (is_tall(call, slot) ? part->range.first * at->stride_bytes : 0);
        if (!is_in_place(call, slot))
            continue;
        void **scratch = &part->scratch[slot == KLD_SLOT_GRAD_TARGETS];
        if (!*scratch && !(*scratch = malloc(part->range.rows * at->row_bytes)))
            return kld_error_set(err, KLD_NO_MEMORY, "no memory for the gradient of %llu rows",
                                 (unsigned long long)part->range.rows);
        *data = *scratch;
        tensor->row_stride_bytes = 0;
    }
    return KLD_OK;
}

/* The losses of rows that the caller wants, beside the terms. */
static void take_row_losses(struct split_call *call, const struct split_range *range) {
    const struct kld_slot_geometry *at = &call->base.geometry.slot[KLD_SLOT_ROW_LOSS];
    bool wide = call->base.request.op.tensor[KLD_SLOT_ROW_LOSS].dtype == KLD_DTYPE_FP64;
    for (uint64_t row = range->first; row < range->first + range->rows; row++) {
        double term = call->terms[row];
        if (call->negative)
            term = is_masked(call, row) ? 0 : -term;
        float single = (float)term;
        memcpy(call->at[KLD_SLOT_ROW_LOSS] + row * at->stride_bytes,
               wide ? (void *)&term : (void *)&single, wide ? sizeof term : sizeof single);
    }
}

void kld_split_part_take(struct split_part *part, const struct kld_result *result) {
    struct split_call *call = part->call;
    struct kld_result *whole = &call->base.result;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        void *scratch = part->scratch[slot == KLD_SLOT_GRAD_TARGETS];
        const struct kld_slot_geometry *at = &call->base.geometry.slot[slot];
        if (call->part.op.tensor[slot].dtype && is_in_place(call, slot))
            kld_rows_copy(call->at[slot] + part->range.first * at->stride_bytes, at->stride_bytes,
                          scratch, at->row_bytes, at->row_bytes, part->range.rows);
    }
    if (call->scalar && call->at[KLD_SLOT_ROW_LOSS])
        take_row_losses(call, &part->range);
    call->done_rows += part->range.rows;
    whole->queue_ns += result->queue_ns;
    whole->copy_ns += result->copy_ns;
    whole->kernel_ns += result->kernel_ns;
    whole->bytes += result->bytes;
    whole->attempts += result->attempts - 1; /* those of the member's own */
}

void kld_split_part_free(struct split_part *part) {
    free(part->scratch[0]);
    free(part->scratch[1]);
    part->scratch[0] = part->scratch[1] = NULL;
    part->call = NULL;
}

/* ---- The whole --------------------------------------------------------------------------------
 */

void kld_split_finish(struct split_call *call) {
    const struct kld_geometry *geometry = &call->base.geometry;
    const struct kld_op *op = &call->base.request.op;
    if (!call->scalar)
        return;
    double sum = call->zero ? 0 : kld_sum_terms(call->terms, geometry->rows, geometry->classes);
    /* Of negated terms the sum is the negated one, but for 0, which is +0 either way: one server's
     * over less than 0 is -0. */
    double loss = call->negative ? (0 - sum) / -call->divisor : sum / call->divisor;
    float single = (float)loss;
    bool wide = geometry->loss_dtype == KLD_DTYPE_FP64;
    call->base.result.scalar = true;
    call->base.result.loss = wide ? loss : (double)single;
    if (op->tensor[KLD_SLOT_LOSS].dtype)
        memcpy(call->at[KLD_SLOT_LOSS], wide ? (void *)&loss : (void *)&single,
               wide ? sizeof loss : sizeof single);
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT && call->zero; slot++)
        for (uint64_t row = 0; is_gradient(slot) && call->at[slot] && row < geometry->rows; row++)
            memset(call->at[slot] + row * geometry->slot[slot].stride_bytes, 0,
                   geometry->slot[slot].row_bytes);
}

void kld_split_call_free(struct split_call *call) {
    free(call->terms);
    call->terms = NULL;
}
