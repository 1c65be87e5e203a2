/* plan.h - what a job means to the kernels: which tensor has which role, what they are told, and
 * whether rows matter. Private to job.c; no CUDA call, no state. */
#ifndef KLD_KERNELS_CUDA_PLAN_H
#define KLD_KERNELS_CUDA_PLAN_H

#include "kernels/cuda/device.h"

static inline bool cuda_slot_is_present(const struct kld_job *job, int slot) {
    return job->op.tensor[slot].dtype != KLD_DTYPE_ABSENT;
}

/* Does the slot have a row for each row of the inputs? */
static inline bool cuda_slot_is_tall(const struct kld_job *job, int slot) {
    return job->geometry.slot[slot].rows == job->geometry.rows &&
           (slot != KLD_SLOT_GRAD_OUTPUT || !job->geometry.scalar) &&
           (slot != KLD_SLOT_LOSS || !job->geometry.scalar);
}

static inline char *cuda_address_of(const struct kld_place *place) {
    return ((struct cuda_memory *)place->memory)->at + place->offset_bytes;
}

static inline bool cuda_is_on_device(const struct kld_place *place) {
    return ((struct cuda_memory *)place->memory)->on_device;
}

/* copy.c: rows [first, first + rows) of a staged slot, to the device or back. */
cudaError_t cuda_copy_slot(const struct cuda_flight *flight, int slot, uint64_t first,
                           uint64_t rows, bool back);
/* Fills flight->args for the whole job, with the addresses of what lies on the device. */
void cuda_plan_args(struct cuda_device *device, struct cuda_flight *flight);
/* A slot's tensor in them. */
struct kld_cuda_tensor *cuda_plan_tensor(struct cuda_flight *flight, int slot);
/* What the job is cut into launches by: its rows, or its tiles. */
uint64_t cuda_plan_rows(const struct cuda_flight *flight);
/* Bytes of such a row of a slot, one after the other; of a flat job a row is a tile. */
uint64_t cuda_plan_row_bytes(const struct cuda_flight *flight, int slot);

#endif
