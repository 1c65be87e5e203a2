/* resident_single_general_bf16.cu - BF16 logits, a single warp: every divergence and gradient. */
#define KLD_CUDA_TEAM_SINGLE
#include "kernels/cuda/resident_general.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(general_bf16)(const kld_cuda_args *args, uint32_t groups,
                                                        cudaStream_t stream) {
    return launch_general<__nv_bfloat16>(args, groups, stream);
}
