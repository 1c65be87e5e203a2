/* copy.h - runs one copy of a CPU device on its team. Private to kernels/cpu; called by the device
 * thread only. */
#ifndef KLD_KERNELS_CPU_COPY_H
#define KLD_KERNELS_CPU_COPY_H

#include "kernels/backend.h"
#include "kernels/cpu/team.h"

/* streaming: what is written does not stay in a cache, so it goes past them, which neither reads
 * the old lines first nor drives out what others have there. Sets what the job reports, except its
 * times. */
void kld_cpu_run_copy(struct kld_cpu_team *team, struct kld_job *job, bool streaming);

#endif
