/* resident_general_bf16.cu - long rows of BF16 logits, held in shared memory: every divergence
 * and gradient. Enqueues only. */
#include "kernels/cuda/logits_general.cuh"

extern "C" cudaError_t kld_cuda_resident_general_bf16(const kld_cuda_args *args, uint32_t groups,
                                                      cudaStream_t stream) {
    using namespace logits_resident;
    switch (args->rule.kind) {
    case KLD_RULE_MIXTURE:
        return launch<general_body<__nv_bfloat16, KLD_RULE_MIXTURE>, KLD_CUDA_RESIDENT_BLOCKS_FEW>(
            *args, groups, stream);
    case KLD_RULE_TV:
        return launch<general_body<__nv_bfloat16, KLD_RULE_TV>, KLD_CUDA_RESIDENT_BLOCKS_FEW>(
            *args, groups, stream);
    case KLD_RULE_CROSS_ENTROPY:
        return launch<general_body<__nv_bfloat16, KLD_RULE_CROSS_ENTROPY>,
                      KLD_CUDA_RESIDENT_BLOCKS_FEW>(*args, groups, stream);
    default:
        return launch<general_body<__nv_bfloat16, KLD_RULE_KL>, KLD_CUDA_RESIDENT_BLOCKS_FEW>(
            *args, groups, stream);
    }
}
