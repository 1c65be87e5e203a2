/* logits_short_fp32.cu - short rows of FP32 logits: the loss, and of a KL also the gradient q - p.
 * Enqueues only. */
#include "kernels/cuda/logits_short.cuh"

extern "C" cudaError_t kld_cuda_short_fp32(const kld_cuda_args *args, uint32_t groups,
                                           cudaStream_t stream) {
    return logits_short::launch_simple<float>(*args, groups, stream);
}
