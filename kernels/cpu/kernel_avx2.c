/* kernel_avx2.c - the arithmetic of body.h for vectors of 32 bytes. Compiled with the instruction
 * set that its name says; called only after kernel.c saw that the processor has it. */
#if 32 == 16 || defined(__x86_64__)
#define KLD_VECTOR_BYTES 32
#define KERNELS kld_cpu_kernels_avx2
#define KERNELS_NAME "avx2"
#include "kernels/cpu/body.h"
#endif
