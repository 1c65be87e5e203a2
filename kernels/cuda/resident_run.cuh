/* resident_run.cuh - a block from its first barrier to its last: which warp does what. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_RUN_CUH
#define KLD_KERNELS_CUDA_RESIDENT_RUN_CUH

#include "kernels/cuda/resident_exchange.cuh"
#include "kernels/cuda/resident_slice.cuh"

namespace resident {
inline namespace KLD_CUDA_TEAM {

/* What a block knows before its first row. */
template <class BODY> static __device__ __forceinline__ void open_block(const kld_cuda_args &args) {
    typedef typename BODY::T T;
    block_shared &block = here();
    if (threadIdx.x < CHUNKS_MAX) {
        barrier_init(&block.full[2 * threadIdx.x], 2 * WARP_ARRIVALS);
        barrier_init(&block.full[2 * threadIdx.x + 1], 2 * WARP_ARRIVALS);
        barrier_init(&block.empty[threadIdx.x], GROUP_WARPS * WARP_ARRIVALS);
    }
    if (threadIdx.x < RING_MAX) {
        barrier_init(&block.ready[threadIdx.x], WARP_ARRIVALS);
        barrier_init(&block.found[threadIdx.x], GROUP_WARPS * WARP_ARRIVALS);
        barrier_init(&block.arrived[threadIdx.x], 1);
        barrier_init(&block.settled[threadIdx.x], WARP_ARRIVALS);
    }
    if (threadIdx.x < GROUPS) {
        barrier_init(&block.extra_arrived[threadIdx.x][0], 1);
        barrier_init(&block.extra_arrived[threadIdx.x][1], 1);
        block.extra_exchanges[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        find_place<T>(args, block.place);
        block.feed.walk.start(block.place);
        block.feed.next = {0, 0};
        barrier_init(&block.added, 1);
        block.group = UINT64_MAX;
        BODY::prepare(args);
    }
    barrier_init_done();
}

/* A kernel of BODY: its first warps compute, one copies, one is the scout, the others settle.
 * ALONE: all compute. */
template <class BODY> static __device__ __forceinline__ void run(const kld_cuda_args &args) {
    typedef typename BODY::T T;
    open_block<BODY>(args);
    if constexpr (ALONE) {
        __syncthreads();
        BODY::compute_alone(args);
        return;
    }
    cluster_sync();
    if (threadIdx.x < COMPUTING)
        BODY::compute(args);
    else if (threadIdx.x < COMPUTING + 32)
        copy_rows<T>(args);
    else if (threadIdx.x < COMPUTING + 64)
        BODY::scout();
    else
        BODY::settle(args);
    __syncwarp();
    cluster_sync(); /* nobody leaves while another may write to its shared memory */
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace resident */
#endif
