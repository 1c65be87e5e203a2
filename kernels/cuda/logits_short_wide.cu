/* logits_short_wide.cu - short rows of FP32 logits: gradients that a sum over the row is taken off.
 * Enqueues only. */
#include "kernels/cuda/launch.h"

#define KLD_CUDA_SHORT_WIDE 1
#include "kernels/cuda/logits_short.cuh"
#include "kernels/cuda/logits_short_wide.cuh"

extern "C" cudaError_t kld_cuda_short_wide(const kld_cuda_args *args, uint32_t groups,
                                           cudaStream_t stream) {
    using namespace logits_short;
    switch (args->rule.kind) {
    case KLD_RULE_MIXTURE: return launch_row<wide_row<KLD_RULE_MIXTURE>>(*args, groups, stream);
    case KLD_RULE_TV: return launch_row<wide_row<KLD_RULE_TV>>(*args, groups, stream);
    case KLD_RULE_CROSS_ENTROPY:
        return launch_row<wide_row<KLD_RULE_CROSS_ENTROPY>>(*args, groups, stream);
    default: return launch_row<wide_row<KLD_RULE_KL>>(*args, groups, stream);
    }
}
