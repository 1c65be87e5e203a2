/* kept_wide_fp32.cu - FP32 logits, a block or more a row: js and the skewed KL in FP64, of rows
 * that are kept in shared memory. */
#define KLD_CUDA_TEAM_KEPT
#include "kernels/cuda/kept_launch.cuh"

/* Here and not in a header: what is no template is compiled, with the kernels that it names, by
 * every file that includes it. */
extern "C" cudaError_t KLD_CUDA_TEAM_NAME(wide_fp32)(const kld_cuda_args *args, uint32_t groups,
                                                     cudaStream_t stream) {
    using namespace logits_resident;
    const kld_cuda_args own = by_p(*args);
    const bool even = kld_cuda_is_even(&own.rule);
    if (own.grad_p.dtype)
        return even ? launch_kept<wide_body<true, true>>(own, groups, stream)
                    : launch_kept<wide_body<false, true>>(own, groups, stream);
    return even ? launch_kept<wide_body<true, false>>(own, groups, stream)
                : launch_kept<wide_body<false, false>>(own, groups, stream);
}
