/* reread_launch.cuh - the kernels that read rows again from the caches, and their launch on a
 * stream. The body of the source file of an element type and a team, which has said which. Enqueues
 * only. */
#ifndef KLD_KERNELS_CUDA_REREAD_LAUNCH_CUH
#define KLD_KERNELS_CUDA_REREAD_LAUNCH_CUH

#include "kernels/cuda/logits_reread.cuh"
#include "kernels/cuda/resident_launch.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

template <class BODY>
static __global__ void __launch_bounds__(resident::COMPUTING, KLD_CUDA_TEAM_BLOCKS)
    reread_kernel(const __grid_constant__ kld_cuda_args args) {
    resident::open_block<rows<BODY>>(args);
    __syncthreads();
    reread_rows<BODY>::compute(args);
}

template <class T>
static cudaError_t launch_reread(const kld_cuda_args *args, uint32_t groups, cudaStream_t stream) {
    if (args->rule.kind == KLD_RULE_CROSS_ENTROPY)
        return launch_kernel(reread_kernel<difference_body<T, true>>, sizeof(T), *args, groups,
                             resident::COMPUTING, stream);
    if (args->grad_p.dtype)
        return launch_kernel(reread_kernel<centred_body<T>>, sizeof(T), *args, groups,
                             resident::COMPUTING, stream);
    return launch_kernel(reread_kernel<difference_body<T, false>>, sizeof(T), *args, groups,
                         resident::COMPUTING, stream);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
