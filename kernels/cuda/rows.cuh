/* rows.cuh - the kernels of one element type, and the choice among them. Included once by each
 * rows_*.cu, so that they compile side by side. */
#ifndef KLD_KERNELS_CUDA_ROWS_CUH
#define KLD_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/logits.cuh"

#define KLD_CUDA_SMALL_BLOCK 256u /* threads of a block whose teams are a warp or less */

template <class BODY, int THREADS>
static __global__ void __launch_bounds__(THREADS) rows_kernel(const kld_cuda_args args) {
    do_group<BODY>(args);
}

template <class BODY, int THREADS>
static cudaError_t launch_body(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    uint32_t threads = args.team > 32 ? args.team : KLD_CUDA_SMALL_BLOCK;
    size_t shared = (size_t)args.cached * 2 * 16 * threads;
    if (shared > 48 * 1024) { /* more has to be asked for */
        cudaError_t error = cudaFuncSetAttribute(
            rows_kernel<BODY, THREADS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (error)
            return error;
    }
    rows_kernel<BODY, THREADS><<<groups, threads, shared, stream>>>(args);
    return cudaGetLastError();
}

template <class T>
static cudaError_t launch_rows(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    bool gradient = args.grad_p.at || args.grad_q.at;
    switch (args.p.form) {
    case KLD_FORM_PROBS:
        return gradient
                   ? launch_body<elementwise<T, KLD_FORM_PROBS, true>, 512>(args, groups, stream)
                   : launch_body<elementwise<T, KLD_FORM_PROBS, false>, 512>(args, groups, stream);
    case KLD_FORM_LOGPROBS:
        return gradient
                   ? launch_body<elementwise<T, KLD_FORM_LOGPROBS, true>, 512>(args, groups, stream)
                   : launch_body<elementwise<T, KLD_FORM_LOGPROBS, false>, 512>(args, groups,
                                                                                stream);
    default:
        return gradient ? launch_body<logits<T, true>, 1024>(args, groups, stream)
                        : launch_body<logits<T, false>, 1024>(args, groups, stream);
    }
}

#endif
