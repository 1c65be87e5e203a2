/* rows_fp16.cu - the row kernels whose two tensors are FP16 and of one form. Enqueues only. */
#include "kernels/cuda/rows.cuh"

extern "C" cudaError_t kld_cuda_rows_fp16(const kld_cuda_args *args, uint32_t groups,
                                          cudaStream_t stream) {
    return launch_rows<__half>(*args, groups, stream);
}
