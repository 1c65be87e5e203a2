/* logits_short_general_bf16.cu - short rows of BF16 logits: gradients that a sum over the row is
 * taken off, tv and the cross entropy. Enqueues only. */
#include "kernels/cuda/logits_short.cuh"

extern "C" cudaError_t kld_cuda_short_general_bf16(const kld_cuda_args *args, uint32_t groups,
                                                   cudaStream_t stream) {
    return logits_short::launch_general<__nv_bfloat16>(*args, groups, stream);
}
