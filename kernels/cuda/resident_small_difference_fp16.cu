/* resident_small_difference_fp16.cu - FP16 logits, the small team: q - p. */
#define KLD_CUDA_TEAM_SMALL
#include "kernels/cuda/resident_difference.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(difference_fp16)(const kld_cuda_args *args,
                                                           uint32_t groups, cudaStream_t stream) {
    return launch_difference<__half>(args, groups, stream);
}
