/* logits_short_fp16.cu - short rows of FP16 logits: the loss, and of a KL also the gradient q - p.
 * Enqueues only. */
#include "kernels/cuda/logits_short.cuh"

extern "C" cudaError_t kld_cuda_short_fp16(const kld_cuda_args *args, uint32_t groups,
                                           cudaStream_t stream) {
    return logits_short::launch_simple<__half>(*args, groups, stream);
}
