/* logits_short_wide.cu - short rows of FP32 logits in FP64: gradients of a KL. Enqueues only. */
#include "kernels/cuda/logits_short_wide_launch.cuh"

extern "C" cudaError_t kld_cuda_short_wide(const kld_cuda_args *args, uint32_t groups,
                                           cudaStream_t stream) {
    return logits_short::launch_wide<KLD_RULE_KL>(*args, groups, stream);
}
