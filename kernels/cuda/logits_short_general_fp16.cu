/* logits_short_general_fp16.cu - short rows of FP16 logits: gradients that a sum over the row is
 * taken off, tv and the cross entropy. Enqueues only. */
#include "kernels/cuda/logits_short.cuh"

extern "C" cudaError_t kld_cuda_short_general_fp16(const kld_cuda_args *args, uint32_t groups,
                                                   cudaStream_t stream) {
    return logits_short::launch_general<__half>(*args, groups, stream);
}
