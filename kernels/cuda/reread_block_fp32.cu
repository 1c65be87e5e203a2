/* reread_block_fp32.cu - FP32 logits, a block a row: one gradient, of rows that are read again. */
#define KLD_CUDA_TEAM_REREAD_BLOCK
#include "kernels/cuda/reread_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(fp32)(const kld_cuda_args *args, uint32_t groups,
                                                cudaStream_t stream) {
    return logits_resident::launch_reread<float>(args, groups, stream);
}
