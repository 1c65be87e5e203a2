/* onepass_warp_fp32.cu - FP32 logits, a warp a row: values. */
#define KLD_CUDA_TEAM_ONEPASS_WARP
#include "kernels/cuda/onepass_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(fp32)(const kld_cuda_args *args, uint32_t groups,
                                                cudaStream_t stream) {
    return logits_resident::launch_onepass<float>(args, groups, stream);
}
