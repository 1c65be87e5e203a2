/* run.h - runs one job of a CPU device on its team. Private to kernels/cpu; called by the device
 * thread only. */
#ifndef KLD_KERNELS_CPU_RUN_H
#define KLD_KERNELS_CPU_RUN_H

#include "kernels/backend.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/team.h"
#include "proto/sum.h"

/* The scratch of a device, allocated once. */
struct kld_cpu_run {
    const struct kld_cpu_kernels *kernels;
    struct kld_cpu_partial *partial; /* [KLD_CPU_SPANS_MAX], for one row in pieces */
    struct kld_cpu_chunk_sum {
        double value, weight; /* sums over a chunk of rows */
        uint64_t rows;        /* unmasked */
    } * chunk;                /* [KLD_CPU_CHUNKS_MAX] */
};

#define KLD_CPU_SPANS_MAX 16384
#define KLD_CPU_CHUNKS_MAX KLD_SUM_GROUPS_MAX

enum kld_status kld_cpu_run_init(struct kld_cpu_run *run, struct kld_error *err);
void kld_cpu_run_done(struct kld_cpu_run *run);

/* Sets what the job reports, except its times. */
void kld_cpu_run_op(struct kld_cpu_run *run, struct kld_cpu_team *team, struct kld_job *job);

#endif
