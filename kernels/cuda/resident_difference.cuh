/* resident_difference.cuh - long rows of logits held in shared memory, the commonest case: q - p.
 * The body of the source file of an element type and a team, which has said which. Enqueues only.
 */
#include "kernels/cuda/logits_difference.cuh"
#include "kernels/cuda/resident_launch.cuh"

template <class T>
static cudaError_t launch_difference(const kld_cuda_args *args, uint32_t groups,
                                     cudaStream_t stream) {
    using namespace logits_resident;
    return args->rule.kind == KLD_RULE_CROSS_ENTROPY
               ? launch<difference_body<T, true>>(*args, groups, stream)
               : launch<difference_body<T, false>>(*args, groups, stream);
}
