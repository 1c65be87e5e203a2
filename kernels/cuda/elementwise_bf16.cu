/* elementwise_bf16.cu - the kernels of two BF16 tensors of probs or logprobs. Enqueues only. */
#include "kernels/cuda/elementwise_launch.cuh"

extern "C" cudaError_t kld_cuda_elementwise_bf16(const kld_cuda_args *args, uint32_t groups,
                                                 cudaStream_t s) {
    return launch_elementwise<__nv_bfloat16>(args, groups, s);
}
