/* cuda.h - the CUDA back end; only this folder includes CUDA headers.
 * What its functions do, their threads and errors: kernels/backend.h. */
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
