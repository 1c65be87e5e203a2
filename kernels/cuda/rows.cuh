/* rows.cuh - the kernels of one element type, and the choice among them. Included once by each
 * rows_*.cu, so that they compile side by side. */
#ifndef KLD_KERNELS_CUDA_ROWS_CUH
#define KLD_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/logits.cuh"

#define KLD_CUDA_SMALL_BLOCK 256u /* threads of a block whose teams are a warp or less */

/* BLOCKS: of THREADS threads on one multiprocessor, to overlap the end of a row with others. */
template <class BODY, int THREADS, int BLOCKS>
static __global__ void __launch_bounds__(THREADS, BLOCKS) rows_kernel(const kld_cuda_args args) {
    do_group<BODY>(args);
}

template <class BODY, int THREADS, int BLOCKS>
static cudaError_t launch_body(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    uint32_t threads = args.team > 32 ? args.team : KLD_CUDA_SMALL_BLOCK;
    size_t shared = (size_t)args.cached * 2 * 16 * threads;
    if (shared > 40 * 1024) { /* beyond 48 KiB, static included, it has to be asked for */
        cudaError_t error =
            cudaFuncSetAttribute(rows_kernel<BODY, THREADS, BLOCKS>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (error)
            return error;
    }
    return start(rows_kernel<BODY, THREADS, BLOCKS>, groups, threads, shared, stream, args);
}

template <class T>
static cudaError_t launch_rows(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    return args.grad_p.at || args.grad_q.at
               ? launch_body<logits<T, true>, 512, 2>(args, groups, stream)
               : launch_body<logits<T, false>, 512, 2>(args, groups, stream);
}

#endif
