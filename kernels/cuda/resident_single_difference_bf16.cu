/* resident_single_difference_bf16.cu - BF16 logits, a single warp: q - p. */
#define KLD_CUDA_TEAM_SINGLE
#include "kernels/cuda/resident_difference.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(difference_bf16)(const kld_cuda_args *args,
                                                           uint32_t groups, cudaStream_t stream) {
    return launch_difference<__nv_bfloat16>(args, groups, stream);
}
