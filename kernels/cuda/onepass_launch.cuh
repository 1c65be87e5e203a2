/* onepass_launch.cuh - the kernels that read rows once, and their launch on a stream. The body of
 * the source file of an element type and a team, which has said which. Enqueues only. */
#ifndef KLD_KERNELS_CUDA_ONEPASS_LAUNCH_CUH
#define KLD_KERNELS_CUDA_ONEPASS_LAUNCH_CUH

#include "kernels/cuda/logits_values.cuh"
#include "kernels/cuda/resident_launch.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

template <class BODY, bool UNEVEN>
static __global__ void __launch_bounds__(resident::COMPUTING, KLD_CUDA_TEAM_BLOCKS)
    onepass_kernel(const __grid_constant__ kld_cuda_args args) {
    resident::open_block<rows<BODY>>(args);
    __syncthreads();
    if (resident::CLUSTER_MAX > 1 && args.cluster > 1)
        cluster_sync();
    value_rows<BODY, UNEVEN>::compute(args);
    if (resident::CLUSTER_MAX > 1 && args.cluster > 1)
        cluster_sync(); /* nobody leaves while another may write to its shared memory */
}

template <class BODY>
static cudaError_t launch_onepass(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    void (*function)(kld_cuda_args) = onepass_kernel<BODY, false>;
    if (!resident::is_even(args.p) || !resident::is_even(args.q))
        function = onepass_kernel<BODY, true>;
    return launch_kernel(function, sizeof(typename BODY::T), args, groups, resident::COMPUTING,
                         stream);
}

template <class T>
static cudaError_t launch_onepass(const kld_cuda_args *args, uint32_t groups, cudaStream_t stream) {
    if (args->rule.kind == KLD_RULE_CROSS_ENTROPY)
        return launch_onepass<value_body<T, logits_stats::ENTROPY>>(*args, groups, stream);
    if (args->rule.of_q != 0)
        return launch_onepass<value_body<T, logits_stats::REVERSE>>(*args, groups, stream);
    return launch_onepass<value_body<T, logits_stats::NOTHING>>(*args, groups, stream);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
