/* error.c - every CUDA error becomes a kld_status here, in one of five classes: the request, a
 * peer's handle, memory, a capture in this process, or the device. The last is for good: the
 * context cannot be mended in its process. Any thread; logs nothing. */
#include "kernels/cuda/device.h"

bool cuda_is_of_capture(cudaError_t error) {
    return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

static enum kld_status class_of(cudaError_t error) {
    if (cuda_is_of_capture(error))
        return KLD_BUSY;
    switch (error) {
    case cudaErrorMemoryAllocation: return KLD_NO_MEMORY;
    /* The request, or a peer's handle. */
    case cudaErrorInvalidValue:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidPitchValue:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
    case cudaErrorMapBufferObjectFailed:
    case cudaErrorUnmapBufferObjectFailed:
    case cudaErrorAlreadyMapped:
    case cudaErrorNotMapped:
    case cudaErrorDeviceUninitialized: return KLD_INVALID;
    /* No device to begin with. */
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorSystemNotReady:
    case cudaErrorInitializationError: return KLD_UNAVAILABLE;
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorPeerAccessUnsupported: return KLD_UNIMPLEMENTED;
    /* This library's own mistake: the context lives. */
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidKernelImage:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorMissingConfiguration: return KLD_INTERNAL;
    /* Faults of kernels, of other clients under MPS, of the hardware; and what is not known. */
    default: return KLD_DEVICE_LOST;
    }
}

enum kld_status cuda_fail(struct cuda_device *device, cudaError_t error, const char *doing,
                          struct kld_error *err) {
    enum kld_status status = class_of(error);
    cudaGetLastError(); /* what is not sticky must not surface at the next launch */
    if (status == KLD_DEVICE_LOST && device)
        atomic_store(&device->lost, true);
    return kld_error_set(err, status, "%s: %s", doing, cudaGetErrorString(error));
}

bool cuda_is_refusal(struct cuda_device *device, cudaError_t error) {
    cudaGetLastError();
    if (error == cudaErrorMemoryAllocation || atomic_load(&device->lost))
        return false;
    cudaError_t alive = cudaStreamQuery(device->setup);
    cudaGetLastError();
    return alive == cudaSuccess || alive == cudaErrorNotReady;
}

/* Those errors that CUDA documents as the end of the context: every later call returns them. */
static bool ends_context(cudaError_t error) {
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable: return true;
    default: return false;
    }
}

enum kld_status cuda_check(struct kld_device *base, struct kld_error *err) {
    struct cuda_device *device = (struct cuda_device *)base;
    struct cuda_visit visit CUDA_LEAVES = {0};
    enum kld_status status = cuda_enter(device, &visit, err);
    if (status)
        return status;
    pthread_mutex_lock(&device->setup_mutex);
    cudaError_t error =
        cudaMemcpyAsync(&device->results[CUDA_FLIGHTS_MAX], device->flights[0].scratch,
                        sizeof(double), cudaMemcpyDeviceToHost, device->setup);
    if (!error)
        error = cudaStreamSynchronize(device->setup);
    pthread_mutex_unlock(&device->setup_mutex);
    return error ? cuda_fail(device, error, "looking whether the device works", err) : KLD_OK;
}

bool cuda_is_dead(struct kld_device *base) {
    struct cuda_device *device = (struct cuda_device *)base;
    struct cuda_visit visit CUDA_LEAVES = {0};
    cuda_visit(device, &visit);
    cudaGetLastError(); /* an older one that is not sticky must not answer instead */
    bool dead = ends_context(cudaStreamQuery(device->setup));
    cudaGetLastError();
    return dead;
}
