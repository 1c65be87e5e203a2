/* resident_single_general_fp16.cu - FP16 logits, a single warp: every divergence and gradient. */
#define KLD_CUDA_TEAM_SINGLE
#include "kernels/cuda/resident_general.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(general_fp16)(const kld_cuda_args *args, uint32_t groups,
                                                        cudaStream_t stream) {
    return launch_general<__half>(args, groups, stream);
}
