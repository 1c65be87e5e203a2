/* kept_launch.cuh - the kernels that keep rows in shared memory until their gradient is written,
 * and their launch on a stream. The body of the source file of an element type. Enqueues only. */
#ifndef KLD_KERNELS_CUDA_KEPT_LAUNCH_CUH
#define KLD_KERNELS_CUDA_KEPT_LAUNCH_CUH

#include "kernels/cuda/kept_wide.cuh"
#include "kernels/cuda/logits_shannon.cuh"
#include "kernels/cuda/resident_launch.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What takes the rows of a BODY. */
template <class BODY, bool UNEVEN> struct takers { typedef kept_rows<BODY, UNEVEN> type; };
template <bool EVEN, bool WRITES, bool UNEVEN> struct takers<wide_body<EVEN, WRITES>, UNEVEN> {
    typedef kept_wide_rows<wide_body<EVEN, WRITES>, UNEVEN, WRITES> type;
};

template <class BODY, bool UNEVEN>
static __global__ void __launch_bounds__(resident::COMPUTING, KLD_CUDA_TEAM_BLOCKS)
    kept_kernel(const __grid_constant__ kld_cuda_args args) {
#if __CUDA_ARCH__ >= 900 || !defined(__CUDACC__)
    resident::open_block<rows<BODY>>(args);
    __syncthreads();
    if (args.cluster > 1)
        cluster_sync();
    takers<BODY, UNEVEN>::type::compute(args);
    __syncwarp();
    if (args.cluster > 1)
        cluster_sync(); /* nobody leaves while another may write to its shared memory */
#endif
}

/* A third of a multiprocessor's shared memory: what the system takes of it, what the kernel has of
 * its own, and of rows that start at multiples of 16 bytes as many classes as a block takes. */
template <class BODY> constexpr bool fits_three_times() {
    typedef kept_rows<BODY, false> kept;
    constexpr size_t LINE = KLD_CUDA_LINE_BYTES;
    constexpr size_t OWN = sizeof(typename kept::state) + sizeof(typename rows<BODY>::shared_type) +
                           resident::WARPS * sizeof(row_aside) + sizeof(typename BODY::aside) +
                           sizeof(team_shared);
    return 1024 + (OWN + LINE - 1) / LINE * LINE + sizeof(resident::block_shared) +
               2 * KLD_CUDA_KEPT_SLICE_BYTES + resident::KEPT_SAMPLES * 2 * 32 * 16 <=
           228 * 1024 / KLD_CUDA_TEAM_BLOCKS;
}

template <class BODY>
static cudaError_t launch_kept(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    static_assert(fits_three_times<BODY>(), "see KLD_CUDA_KEPT_SLICE_BYTES");
    const size_t element = sizeof(typename BODY::T);
    if (resident::is_even(args.p) && resident::is_even(args.q))
        return launch_kernel(kept_kernel<BODY, false>, element, args, groups, resident::COMPUTING,
                             stream);
    /* Numbers of its own in the table (see rule_of()), and others for as many classes as a block
     * takes, of which two fit a multiprocessor. */
    kld_cuda_args own = args;
    if (own.active_clusters)
        own.active_clusters += KLD_CUDA_CLUSTER_SIZES;
    if (own.active_clusters && resident::kept_steps(args.slice, element) ==
                                   KLD_CUDA_KEPT_SLICE_BYTES / (16 * resident::GROUP_THREADS))
        own.active_clusters += KLD_CUDA_CLUSTER_SIZES / 2;
    return launch_kernel(kept_kernel<BODY, true>, element, own, groups, resident::COMPUTING,
                         stream);
}

/* The gradient of mixtures is p's: where q's is wanted the two change places. */
static inline kld_cuda_args by_p(const kld_cuda_args &args) {
    kld_cuda_args own = args;
    if (own.grad_q.dtype) {
        own.rule = kld_rule_swapped(own.rule);
        own.p = args.q;
        own.q = args.p;
        own.grad_p = args.grad_q;
        own.grad_q = args.grad_p;
    }
    return own;
}
template <class T>
static cudaError_t launch_shannon(const kld_cuda_args *args, uint32_t groups, cudaStream_t stream) {
    return launch_kept<shannon_body<T>>(by_p(*args), groups, stream);
}

template <class T>
static cudaError_t launch_kept(const kld_cuda_args *args, uint32_t groups, cudaStream_t stream) {
    if (args->rule.kind == KLD_RULE_CROSS_ENTROPY)
        return launch_kept<difference_body<T, true>>(*args, groups, stream);
    if (args->grad_p.dtype)
        return launch_kept<centred_body<T>>(*args, groups, stream);
    return launch_kept<difference_body<T, false>>(*args, groups, stream);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
