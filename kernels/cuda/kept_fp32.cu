/* kept_fp32.cu - FP32 logits, a block or more a row: one gradient, of rows that are kept in shared
 * memory. */
#define KLD_CUDA_TEAM_KEPT
#include "kernels/cuda/kept_launch.cuh"

extern "C" cudaError_t KLD_CUDA_TEAM_NAME(fp32)(const kld_cuda_args *args, uint32_t groups,
                                                cudaStream_t stream) {
    if (args->rule.kind == KLD_RULE_MIXTURE)
        return kld_cuda_kept_team_wide_fp32(args, groups, stream);
    return logits_resident::launch_kept<float>(args, groups, stream);
}
