/* elementwise_fp32.cu - the kernels of two FP32 tensors of probs or logprobs. Enqueues only. */
#include "kernels/cuda/elementwise_launch.cuh"

extern "C" cudaError_t kld_cuda_elementwise_fp32(const kld_cuda_args *args, uint32_t groups,
                                                 cudaStream_t s) {
    return launch_elementwise<float>(args, groups, s);
}
