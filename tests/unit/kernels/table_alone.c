/* table_alone.c - rows of a case run each alone: one of many must have the bits that it has by
 * itself. Nothing here knows the truth. One thread. */
#include <stdlib.h>
#include <string.h>

#include "tests/unit/kernels/table.h"

#define FAILURE_MAX 256

/* What the gradients are divided by must be what it was among the others, to the last bit. */
static bool divide(struct table_truth *alone, const struct table_case *at) {
    struct kld_op *op = &alone->op;
    bool exact = !at->weights || at->weights_few;
    if (op->reduction != KLD_REDUCTION_MEAN && op->reduction != KLD_REDUCTION_BATCHMEAN &&
        op->reduction != KLD_REDUCTION_ROWMEAN)
        return true;
    if (alone->divisor <= 0 || (op->reduction == KLD_REDUCTION_ROWMEAN && !exact))
        return false;
    op->number[KLD_NUMBER_NORMALIZER] = (double)alone->divisor;
    op->given |= 1u << KLD_NUMBER_NORMALIZER;
    return true;
}

/* From the case's job to that of one row of it, whose inputs stay the case's. */
static bool pick(struct table_truth *alone, const struct table_case *at, uint64_t row,
                 char *failure) {
    struct kld_error err;
    uint64_t classes = alone->geometry.classes, kind = table_row_of(alone, row);
    uint64_t element = kld_dtype_bytes(at->grad_output_dtype);
    struct kld_op *op = &alone->op;
    op->rank = 2;
    memset(op->shape, 0, sizeof op->shape);
    op->shape[0] = 1;
    op->shape[1] = classes;
    op->tensor[KLD_SLOT_ROW_MASK].dtype = 0;
    alone->input[KLD_SLOT_ROW_MASK] = NULL;
    alone->distinct = 1;
    for (int side = 0; side < 2; side++)
        alone->input[side] += kind * classes * kld_dtype_bytes(at->dtype[side]);
    if (at->weights)
        alone->input[KLD_SLOT_ROW_WEIGHTS] += row * kld_dtype_bytes(KLD_DTYPE_FP32);
    if (at->grad_output_dtype && op->reduction == KLD_REDUCTION_NONE)
        alone->input[KLD_SLOT_GRAD_OUTPUT] += kind * classes * element;
    if (at->grad_output_dtype && op->reduction == KLD_REDUCTION_ROW)
        alone->input[KLD_SLOT_GRAD_OUTPUT] += row * element;
    if (kld_op_check(op, &alone->geometry, &err) == KLD_OK)
        return true;
    snprintf(failure, FAILURE_MAX, "kld_op_check: %.200s", err.text);
    return false;
}

static bool compare(const struct table_truth *truth, const struct table_outputs *among,
                    const struct table_outputs *alone, uint64_t row, char *failure) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        uint64_t bytes = truth->geometry.slot[slot].row_bytes;
        if (!among->at[slot] || (slot == KLD_SLOT_LOSS && truth->geometry.scalar) ||
            memcmp(among->at[slot] + row * bytes, alone->at[slot], bytes) == 0)
            continue;
        snprintf(failure, FAILURE_MAX, "%s of row %llu has other bits alone than among others",
                 kld_slot_name((uint32_t)slot), (unsigned long long)row);
        return false;
    }
    return true;
}

bool table_run_alone(struct kld_device *device, const struct table_truth *truth,
                     const struct table_case *at, const struct table_outputs *outputs,
                     uint32_t rows, char *failure) {
    struct table_case packed = *at;
    bool fine = true, *done = calloc(truth->distinct, sizeof *done);
    if (!done)
        abort();
    packed.strided = false;
    for (uint64_t row = 0; fine && rows > 0 && row < truth->geometry.rows; row++) {
        struct table_truth alone = *truth;
        struct table_outputs own = {0};
        const struct table_place place = {TABLE_POOL, (uint32_t)row % 3, false, 1};
        if (table_row_masked(truth, row) || done[table_row_of(truth, row)])
            continue;
        if (!divide(&alone, at))
            break;
        done[table_row_of(truth, row)] = true;
        rows--;
        fine = pick(&alone, at, row, failure) &&
               table_run(device, &alone, &packed, &place, &own, failure) &&
               compare(truth, outputs, &own, row, failure);
        table_outputs_done(&own);
    }
    free(done);
    return fine;
}
