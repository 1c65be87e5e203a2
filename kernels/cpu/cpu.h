/* cpu.h - the CPU back end: vectorised and threaded. See kernels/backend.h for everything. */
#ifndef KLD_KERNELS_CPU_CPU_H
#define KLD_KERNELS_CPU_CPU_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const struct kld_backend kld_backend_cpu;

#ifdef __cplusplus
}
#endif
#endif
