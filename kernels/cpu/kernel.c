/* kernel.c - which of the compiled vector widths this processor runs. Decided once, when a device
 * opens; it computes nothing. Any thread. */
#include "kernels/cpu/kernel.h"

const struct kld_cpu_kernels *kld_cpu_kernels_choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &kld_cpu_kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return &kld_cpu_kernels_avx2;
#endif
    return &kld_cpu_kernels_base;
}
