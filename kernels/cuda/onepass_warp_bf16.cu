/* onepass_warp_bf16.cu - BF16 logits, a warp a row: values. */
#define KLD_CUDA_TEAM_ONEPASS_WARP
#include "kernels/cuda/onepass_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(bf16)(const kld_cuda_args *args, uint32_t groups,
                                                cudaStream_t stream) {
    return logits_resident::launch_onepass<__nv_bfloat16>(args, groups, stream);
}
