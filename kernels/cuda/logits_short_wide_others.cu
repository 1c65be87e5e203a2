/* logits_short_wide_others.cu - short rows of FP32 logits in FP64: gradients of mixtures, tv and
 * the cross entropy. Enqueues only. */
#include "kernels/cuda/logits_short_wide_launch.cuh"

extern "C" cudaError_t kld_cuda_short_wide_others(const kld_cuda_args *args, uint32_t groups,
                                                  cudaStream_t stream) {
    using namespace logits_short;
    switch (args->rule.kind) {
    case KLD_RULE_MIXTURE: return launch_wide<KLD_RULE_MIXTURE>(*args, groups, stream);
    case KLD_RULE_TV: return launch_wide<KLD_RULE_TV>(*args, groups, stream);
    case KLD_RULE_CROSS_ENTROPY: return launch_wide<KLD_RULE_CROSS_ENTROPY>(*args, groups, stream);
    default: return cudaErrorInvalidValue;
    }
}
