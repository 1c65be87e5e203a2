/* rows_any.cu - the row kernel for everything that has no kernel of its own; its body, in FP64, is
 * any.cuh. Enqueues only. */
#include "kernels/cuda/any.cuh"

static __global__ void __launch_bounds__(512)
    any_kernel(const __grid_constant__ kld_cuda_args args) {
    do_group<any_body>(args);
}

extern "C" cudaError_t kld_cuda_rows_any(const kld_cuda_args *args, uint32_t groups,
                                         cudaStream_t stream) {
    uint32_t threads = args->team > 32 ? args->team : 256;
    return start(any_kernel, groups, threads, 0, stream, *args);
}
