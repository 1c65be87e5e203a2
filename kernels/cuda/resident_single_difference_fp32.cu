/* resident_single_difference_fp32.cu - FP32 logits, a single warp: q - p. */
#define KLD_CUDA_TEAM_SINGLE
#include "kernels/cuda/resident_difference.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(difference_fp32)(const kld_cuda_args *args,
                                                           uint32_t groups, cudaStream_t stream) {
    return launch_difference<float>(args, groups, stream);
}
