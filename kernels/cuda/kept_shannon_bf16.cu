/* kept_shannon_bf16.cu - BF16 logits, a block or more a row: js, of rows that are kept in shared
 * memory.
 */
#define KLD_CUDA_TEAM_KEPT
#include "kernels/cuda/kept_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(shannon_bf16)(const kld_cuda_args *args, uint32_t groups,
                                                        cudaStream_t stream) {
    return logits_resident::launch_shannon<__nv_bfloat16>(args, groups, stream);
}
