/* driver.c - see driver.h. Calls none of what it finds. Any thread. */
#include "kernels/cuda/driver.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>

static struct cuda_driver found_functions;
static bool all_of_vmm;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* As it was in that release of CUDA; an older runtime than 12.5 finds what its own release has. */
static bool look_up_of(const char *name, unsigned release, void *ret_function) {
    (void)release;
    void *entry = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &entry, release, cudaEnableDefault, &result);
#elif CUDART_VERSION >= 12000
    cudaError_t error = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &result);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault);
    result = entry ? cudaDriverEntryPointSuccess : result;
#endif
    if (error || result != cudaDriverEntryPointSuccess || !entry) {
        cudaGetLastError();
        return false;
    }
    memcpy(ret_function, &entry, sizeof entry);
    return true;
}

/* There since CUDA 11.2, the oldest that has cudaMemPool. */
static bool look_up(const char *name, void *ret_function) {
    return look_up_of(name, 11020, ret_function);
}

static void look_up_all(void) {
    struct cuda_driver *f = &found_functions;
    /* The first, which has the same name, was there from CUDA 8 on and is not to be used. */
    look_up_of("cuStreamWriteValue32", 11070, &f->write_value);
    look_up("cuCtxGetCurrent", &f->get_current);
    look_up("cuCtxSetCurrent", &f->set_current);
    look_up("cuThreadExchangeStreamCaptureMode", &f->exchange_capture_mode);
    look_up("cuMemGetAddressRange", &f->address_range);
    all_of_vmm = look_up("cuMemImportFromShareableHandle", &f->import_handle) &&
                 look_up("cuMemGetAllocationPropertiesFromHandle", &f->handle_properties) &&
                 look_up("cuMemGetAllocationGranularity", &f->granularity) &&
                 look_up("cuMemRelease", &f->release_handle) &&
                 look_up("cuMemAddressReserve", &f->reserve) &&
                 look_up("cuMemAddressFree", &f->unreserve) && look_up("cuMemMap", &f->map) &&
                 look_up("cuMemUnmap", &f->unmap) && look_up("cuMemSetAccess", &f->set_access);
}

const struct cuda_driver *cuda_driver_get(bool *ret_mappable) {
    pthread_once(&once, look_up_all);
    if (ret_mappable)
        *ret_mappable = all_of_vmm;
    return &found_functions;
}
