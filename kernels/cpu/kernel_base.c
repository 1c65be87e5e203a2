/* kernel_base.c - the arithmetic of body.h for vectors of 16 bytes, in what every processor of the
 * architecture has. Correct everywhere; fast nowhere. */
#define KLD_VECTOR_BYTES 16
#define KERNELS kld_cpu_kernels_base
#define KERNELS_NAME "base"
#include "kernels/cpu/body.h"
