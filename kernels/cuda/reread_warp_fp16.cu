/* reread_warp_fp16.cu - FP16 logits, a warp a row: one gradient, of rows that are read again. */
#define KLD_CUDA_TEAM_REREAD_WARP
#include "kernels/cuda/reread_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(fp16)(const kld_cuda_args *args, uint32_t groups,
                                                cudaStream_t stream) {
    return logits_resident::launch_reread<__half>(args, groups, stream);
}
