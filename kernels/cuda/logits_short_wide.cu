/* logits_short_wide.cu - short rows of FP32 logits: gradients that a sum over the row is taken off.
 * Enqueues only. */
#include "kernels/cuda/launch.h"

#define KLD_CUDA_SHORT_WIDE 1
#include "kernels/cuda/logits_short.cuh"
#include "kernels/cuda/logits_short_wide.cuh"

namespace logits_short {

/* The kernels that there are: kld_cuda_short_layout() chooses among the same. */
template <int RULE>
static cudaError_t launch_wide(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    return args.lane_elements == 4 ? launch_row<wide_row<RULE, 4>>(args, groups, stream)
                                   : launch_row<wide_row<RULE, 0>>(args, groups, stream);
}

} /* namespace logits_short */

extern "C" cudaError_t kld_cuda_short_wide(const kld_cuda_args *args, uint32_t groups,
                                           cudaStream_t stream) {
    using namespace logits_short;
    switch (args->rule.kind) {
    case KLD_RULE_MIXTURE: return launch_wide<KLD_RULE_MIXTURE>(*args, groups, stream);
    case KLD_RULE_TV: return launch_wide<KLD_RULE_TV>(*args, groups, stream);
    case KLD_RULE_CROSS_ENTROPY: return launch_wide<KLD_RULE_CROSS_ENTROPY>(*args, groups, stream);
    default: return launch_wide<KLD_RULE_KL>(*args, groups, stream);
    }
}
