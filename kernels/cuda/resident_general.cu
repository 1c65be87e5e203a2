/* resident_general.cu - the layout of the general team. */
#define KLD_CUDA_TEAM_GENERAL
#include "kernels/cuda/resident_layout.cuh"
