/* cuda.h - the CUDA back end: the only folder that includes CUDA headers. See kernels/backend.h for everything. */
#ifndef KLD_KERNELS_CUDA_CUDA_H
#define KLD_KERNELS_CUDA_CUDA_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const struct kld_backend kld_backend_cuda;

#ifdef __cplusplus
}
#endif
#endif
