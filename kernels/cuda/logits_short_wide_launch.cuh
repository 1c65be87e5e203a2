/* logits_short_wide_launch.cuh - starts the kernels that take short rows in FP64, by what a lane
 * has of a row. Enqueues only. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_LAUNCH_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_LAUNCH_CUH

#include "kernels/cuda/launch.h"

#include "kernels/cuda/logits_short.cuh"
#include "kernels/cuda/logits_short_wide.cuh"

namespace logits_short {

/* The kernels that there are: kld_cuda_short_layout() chooses among the same. */
template <int RULE>
static cudaError_t launch_wide(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    switch (16 * args.lane_width + args.lane_elements) {
    case 0: return launch_row<wide_row<RULE, 1, 4, false>>(args, groups, stream);
    case 0x13: return launch_row<wide_row<RULE, 1, 3, true>>(args, groups, stream);
    case 0x15: return launch_row<wide_row<RULE, 1, 5, true>>(args, groups, stream);
    case 0x18: return launch_row<wide_row<RULE, 1, 8, true>>(args, groups, stream);
    case 0x22: return launch_row<wide_row<RULE, 2, 2, true>>(args, groups, stream);
    case 0x26: return launch_row<wide_row<RULE, 2, 6, true>>(args, groups, stream);
    case 0x2a: return launch_row<wide_row<RULE, 2, 10, true>>(args, groups, stream);
    case 0x44: return launch_row<wide_row<RULE, 4, 4, true>>(args, groups, stream);
    case 0x48: return launch_row<wide_row<RULE, 4, 8, true>>(args, groups, stream);
    default: return cudaErrorInvalidValue;
    }
}

} /* namespace logits_short */
#endif
