/* logits_short_bf16.cu - short rows of BF16 logits: the loss, and of a KL also the gradient q - p.
 * Enqueues only. */
#include "kernels/cuda/logits_short.cuh"

extern "C" cudaError_t kld_cuda_short_bf16(const kld_cuda_args *args, uint32_t groups,
                                           cudaStream_t stream) {
    return logits_short::launch_simple<__nv_bfloat16>(*args, groups, stream);
}
