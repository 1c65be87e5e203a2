/* kernel_avx512.c - the arithmetic of body.h for vectors of 64 bytes. Compiled with the instruction
 * set that its name says; called only after kernel.c saw that the processor has it. */
#if 64 == 16 || defined(__x86_64__)
#define KLD_VECTOR_BYTES 64
#define KERNELS kld_cpu_kernels_avx512
#define KERNELS_NAME "avx512"
#include "kernels/cpu/body.h"
#endif
