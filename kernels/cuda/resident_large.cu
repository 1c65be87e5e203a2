/* resident_large.cu - the layout of the large team. */
#include "kernels/cuda/resident_layout.cuh"
