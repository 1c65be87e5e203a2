/* preload.c - loads kernels before they are wanted. The driver loads one at its first launch, and
 * waits until nothing on the device waits: a client whose work waits for the client itself would
 * hold up whoever is the first to ask for something of another kind. So a server's kernels are
 * loaded when its device is opened, in 0.2 s, or one by one while the device has nothing to do,
 * where clients wait for it to open. Knows no kernel's name: what nvcc puts into each object
 * registers its kernels before main(), by way of here where the linker was told so (Makefile:
 * --wrap); elsewhere there are none. */
#include "kernels/cuda/device.h"

#define KERNELS_MAX 4096

/* Written before main(), and constant from then on. */
static const void *kernels[KERNELS_MAX];
static uint32_t kernels_count;

/* The runtime's, of which nothing but the handle of a kernel is looked at.
 * NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming) */
void __real___cudaRegisterFunction(void **module, const char *host, char *device, const char *name,
                                   int threads_max, void *tid, void *bid, void *block, void *grid,
                                   int *warp) __attribute__((weak));
void __wrap___cudaRegisterFunction(void **module, const char *host, char *device, const char *name,
                                   int threads_max, void *tid, void *bid, void *block, void *grid,
                                   int *warp);

void __wrap___cudaRegisterFunction(void **module, const char *host, char *device, const char *name,
                                   int threads_max, void *tid, void *bid, void *block, void *grid,
                                   int *warp) {
    if (kernels_count < KERNELS_MAX)
        kernels[kernels_count++] = host;
    if (__real___cudaRegisterFunction)
        __real___cudaRegisterFunction(module, host, device, name, threads_max, tid, bid, block,
                                      grid, warp);
}
/* NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming) */

bool cuda_preload(struct cuda_device *device, uint32_t most) {
    for (; most > 0 && device->kernels_loaded < kernels_count; most--) {
        struct cudaFuncAttributes attributes; /* whoever asks for them has the kernel loaded */
        /* One that does not load here says so when it is launched, if ever. */
        if (cudaFuncGetAttributes(&attributes, kernels[device->kernels_loaded++]))
            cudaGetLastError();
    }
    return device->kernels_loaded < kernels_count;
}
