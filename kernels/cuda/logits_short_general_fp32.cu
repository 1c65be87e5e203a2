/* logits_short_general_fp32.cu - short rows of FP32 logits: gradients that a sum over the row is
 * taken off, tv and the cross entropy. Enqueues only. */
#include "kernels/cuda/logits_short.cuh"

extern "C" cudaError_t kld_cuda_short_general_fp32(const kld_cuda_args *args, uint32_t groups,
                                                   cudaStream_t stream) {
    return logits_short::launch_general<float>(*args, groups, stream);
}
