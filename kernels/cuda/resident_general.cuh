/* resident_general.cuh - long rows of logits held in shared memory: every divergence and gradient.
 * The body of the source file of an element type and a team, which has said which. Enqueues only.
 */
#include "kernels/cuda/logits_general.cuh"
#include "kernels/cuda/resident_launch.cuh"

template <class T>
static cudaError_t launch_general(const kld_cuda_args *args, uint32_t groups, cudaStream_t stream) {
    using namespace logits_resident;
    switch (args->rule.kind) {
    case KLD_RULE_MIXTURE: return launch<general_body<T, KLD_RULE_MIXTURE>>(*args, groups, stream);
    case KLD_RULE_TV: return launch<general_body<T, KLD_RULE_TV>>(*args, groups, stream);
    case KLD_RULE_CROSS_ENTROPY:
        return launch<general_body<T, KLD_RULE_CROSS_ENTROPY>>(*args, groups, stream);
    default: return launch<general_body<T, KLD_RULE_KL>>(*args, groups, stream);
    }
}
