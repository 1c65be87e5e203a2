/* onepass_launch.cuh - the kernels that read rows once, and their launch on a stream. The body of
 * the source file of an element type and a team, which has said which. Enqueues only. */
#ifndef KLD_KERNELS_CUDA_ONEPASS_LAUNCH_CUH
#define KLD_KERNELS_CUDA_ONEPASS_LAUNCH_CUH

#include "kernels/cuda/logits_onepass.cuh"
#include "kernels/cuda/resident_launch.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

template <class BODY>
static __global__ void __launch_bounds__(resident::COMPUTING, KLD_CUDA_TEAM_BLOCKS)
    onepass_kernel(const __grid_constant__ kld_cuda_args args) {
    resident::open_block<rows<BODY>>(args);
    __syncthreads();
    if (resident::CLUSTER_MAX > 1 && args.cluster > 1)
        cluster_sync();
    onepass_rows<BODY>::compute(args);
    if (resident::CLUSTER_MAX > 1 && args.cluster > 1)
        cluster_sync(); /* nobody leaves while another may write to its shared memory */
}

template <class T>
static cudaError_t launch_onepass(const kld_cuda_args *args, uint32_t groups, cudaStream_t stream) {
    if (args->rule.kind == KLD_RULE_CROSS_ENTROPY)
        return launch_kernel(onepass_kernel<value_body<T, logits_stats::ENTROPY>>, sizeof(T), *args,
                             groups, resident::COMPUTING, stream);
    if (args->rule.of_q != 0)
        return launch_kernel(onepass_kernel<value_body<T, logits_stats::REVERSE>>, sizeof(T), *args,
                             groups, resident::COMPUTING, stream);
    return launch_kernel(onepass_kernel<value_body<T, logits_stats::NOTHING>>, sizeof(T), *args,
                         groups, resident::COMPUTING, stream);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
