/* resident_fp16.cu - long rows of FP16 logits, held in shared memory. Enqueues only. */
#include "kernels/cuda/logits_resident.cuh"

extern "C" cudaError_t kld_cuda_resident_fp16(const kld_cuda_args *args, uint32_t groups,
                                              cudaStream_t stream) {
    return logits_resident::launch_rows<__half>(*args, groups, stream);
}
