/* rows_bf16.cu - the row kernels whose two tensors are BF16 and of one form. Enqueues only. */
#include "kernels/cuda/rows.cuh"

extern "C" cudaError_t kld_cuda_rows_bf16(const kld_cuda_args *args, uint32_t groups,
                                          cudaStream_t stream) {
    return launch_rows<__nv_bfloat16>(*args, groups, stream);
}
