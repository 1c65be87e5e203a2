/* reread_block_bf16.cu - BF16 logits, a block a row: one gradient, of rows that are read again. */
#define KLD_CUDA_TEAM_REREAD_BLOCK
#include "kernels/cuda/reread_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(bf16)(const kld_cuda_args *args, uint32_t groups,
                                                cudaStream_t stream) {
    return logits_resident::launch_reread<__nv_bfloat16>(args, groups, stream);
}
