/* resident_fp16.cu - long rows of FP16 logits, held in shared memory: the commonest case, q - p.
 * Enqueues only. */
#include "kernels/cuda/logits_difference.cuh"

extern "C" cudaError_t kld_cuda_resident_fp16(const kld_cuda_args *args, uint32_t groups,
                                              cudaStream_t stream) {
    using namespace logits_resident;
    return args->rule.kind == KLD_RULE_CROSS_ENTROPY
               ? launch<difference_body<__half, true>, KLD_CUDA_RESIDENT_BLOCKS_MANY>(*args, groups,
                                                                                      stream)
               : launch<difference_body<__half, false>, KLD_CUDA_RESIDENT_BLOCKS_MANY>(
                     *args, groups, stream);
}
