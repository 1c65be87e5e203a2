/* quick_avx512.c - the passes of quick.h for vectors of 64 bytes. Compiled with the instruction set
 * that its name says; called only after kernel.c saw that the processor has it. */
#if defined(__x86_64__)
#define KLD_VECTOR_BYTES 64
#include "kernels/cpu/quick_write.h"

const struct kld_cpu_quick_kernels kld_cpu_quick_avx512 = {
    .scan = quick_scan,
    .refine = quick_refine,
    .value = quick_value,
    .write = quick_write,
};
#endif
