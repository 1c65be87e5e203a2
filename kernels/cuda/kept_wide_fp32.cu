/* kept_wide_fp32.cu - FP32 logits, a block or more a row: js and the skewed KL in FP64, of rows
 * that are kept in shared memory. */
#define KLD_CUDA_TEAM_KEPT
#include "kernels/cuda/kept_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(wide_fp32)(const kld_cuda_args *args, uint32_t groups,
                                                     cudaStream_t stream) {
    return logits_resident::launch_wide(args, groups, stream);
}
