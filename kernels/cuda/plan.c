/* plan.c - see plan.h. Under device->work. */
#include "kernels/cuda/plan.h"

#include <math.h>
#include <string.h>

static struct kld_cuda_tensor tensor_of(const struct kld_job *job, int slot) {
    struct kld_cuda_tensor tensor = {0};
    if (!cuda_slot_is_present(job, slot))
        return tensor;
    tensor.dtype = job->op.tensor[slot].dtype;
    tensor.stride_bytes = job->geometry.slot[slot].stride_bytes;
    if (cuda_is_on_device(&job->place[slot]))
        tensor.at = cuda_address_of(&job->place[slot]);
    return tensor;
}

/* Kernels are written for a p that weighs terms: where only q does, the two change places. */
static bool roles_swapped(const struct kld_op *op) {
    struct kld_rule rule = kld_rule_of(op);
    return (rule.kind == KLD_RULE_KL || rule.kind == KLD_RULE_MIXTURE) && rule.of_p == 0;
}

/* Are the rows of every tensor of them one after the other? Says the job's shape, not where it
 * lies: the bits of a flat job are others than of the same job row by row. */
static bool is_packed(const struct kld_job *job) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *at = &job->geometry.slot[slot];
        if (cuda_slot_is_present(job, slot) && cuda_slot_is_tall(job, slot) &&
            job->geometry.rows > 1 && at->stride_bytes != at->row_bytes)
            return false;
    }
    return true;
}

void cuda_plan_args(struct cuda_device *device, struct cuda_flight *flight) {
    const struct kld_job *job = flight->job;
    const struct kld_op *op = &job->op;
    struct kld_cuda_args *args = &flight->args;
    memset(args, 0, sizeof *args);
    bool reverse = roles_swapped(op);
    args->rule = reverse ? kld_rule_swapped(kld_rule_of(op)) : kld_rule_of(op);
    int p = reverse ? KLD_SLOT_PREDICTIONS : KLD_SLOT_TARGETS;
    int q = reverse ? KLD_SLOT_TARGETS : KLD_SLOT_PREDICTIONS;
    int grad_p = reverse ? KLD_SLOT_GRAD_PREDICTIONS : KLD_SLOT_GRAD_TARGETS;
    int grad_q = reverse ? KLD_SLOT_GRAD_TARGETS : KLD_SLOT_GRAD_PREDICTIONS;
    args->p = tensor_of(job, p);
    args->q = tensor_of(job, q);
    args->p.form = reverse ? op->predictions_form : op->targets_form;
    args->q.form = reverse ? op->targets_form : op->predictions_form;
    args->grad_p = tensor_of(job, grad_p);
    args->grad_q = tensor_of(job, grad_q);
    args->weights = tensor_of(job, KLD_SLOT_ROW_WEIGHTS);
    args->mask = tensor_of(job, KLD_SLOT_ROW_MASK);
    args->grad_output = tensor_of(job, KLD_SLOT_GRAD_OUTPUT);
    args->loss = tensor_of(job, KLD_SLOT_LOSS);
    args->row_loss = tensor_of(job, KLD_SLOT_ROW_LOSS);
    uint32_t extent = op->reduction == KLD_REDUCTION_NONE  ? KLD_CUDA_ELEMENTS
                      : op->reduction == KLD_REDUCTION_ROW ? KLD_CUDA_ROWS
                                                           : KLD_CUDA_SCALAR;
    args->grad_output_extent =
        cuda_slot_is_present(job, KLD_SLOT_GRAD_OUTPUT) ? extent : KLD_CUDA_SCALAR;
    args->loss_extent = extent;
    args->classes = job->geometry.classes;
    args->inverse_temperature = 1.0 / op->number[KLD_NUMBER_TEMPERATURE];
    const double exponents = args->inverse_temperature * M_LOG2E;
    args->stretch = exponents / (double)(float)exponents;
    args->scale = op->number[KLD_NUMBER_SCALE];
    args->gradient_scale =
        args->scale * (job->geometry.scalar ? op->number[KLD_NUMBER_GRAD_OUTPUT] : 1.0);
    args->divisor = job->geometry.divisor;
    if (args->divisor == 0 && !cuda_slot_is_present(job, KLD_SLOT_ROW_WEIGHTS) &&
        !cuda_slot_is_present(job, KLD_SLOT_ROW_MASK))
        args->divisor = (double)job->geometry.rows;
    args->scratch = flight->scratch;
    args->active_clusters = device->active_clusters;
    args->multiprocessors = device->base.info.threads;
    args->has_fp64 = device->has_fp64;
    args->begins_early = device->begins_early;
    if (kld_cuda_can_be_flat(args) && is_packed(job))
        args->elements = job->geometry.rows * job->geometry.classes;
    kld_cuda_layout(args, job->geometry.rows, device->shared_bytes_max);
    /* A segment is one group of rows at least: there is room for its bits, as rows that blocks
     * share are too long for groups of so many. */
    if (cuda_slot_is_present(job, KLD_SLOT_ROW_MASK) && args->cluster > 1 &&
        args->group_rows <= KLD_CUDA_MASK_ROWS)
        args->masked = flight->scratch->masked;
}

struct kld_cuda_tensor *cuda_plan_tensor(struct cuda_flight *flight, int slot) {
    struct kld_cuda_args *args = &flight->args;
    bool reverse = roles_swapped(&flight->job->op);
    switch (slot) {
    case KLD_SLOT_PREDICTIONS: return reverse ? &args->p : &args->q;
    case KLD_SLOT_TARGETS: return reverse ? &args->q : &args->p;
    case KLD_SLOT_GRAD_PREDICTIONS: return reverse ? &args->grad_p : &args->grad_q;
    case KLD_SLOT_GRAD_TARGETS: return reverse ? &args->grad_q : &args->grad_p;
    case KLD_SLOT_ROW_WEIGHTS: return &args->weights;
    case KLD_SLOT_ROW_MASK: return &args->mask;
    case KLD_SLOT_GRAD_OUTPUT: return &args->grad_output;
    case KLD_SLOT_LOSS: return &args->loss;
    default: return &args->row_loss;
    }
}

uint64_t cuda_plan_rows(const struct cuda_flight *flight) {
    const struct kld_cuda_args *args = &flight->args;
    return args->elements ? (args->elements + args->classes - 1) / args->classes
                          : flight->job->geometry.rows;
}

uint64_t cuda_plan_row_bytes(const struct cuda_flight *flight, int slot) {
    const struct kld_job *job = flight->job;
    if (flight->args.elements && cuda_slot_is_tall(job, slot))
        return flight->args.classes * kld_dtype_bytes(job->op.tensor[slot].dtype);
    return job->geometry.slot[slot].row_bytes;
}
