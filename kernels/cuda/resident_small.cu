/* resident_small.cu - the layout of the small team. */
#define KLD_CUDA_TEAM_SMALL
#include "kernels/cuda/resident_layout.cuh"
