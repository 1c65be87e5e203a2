/* visit.c - a caller's thread in here: it works in the device's context meanwhile, and in nobody's
 * capture of streams, and leaves in the context that it came with, or with none. By the driver and
 * not by cudaSetDevice(), which has no way back to none, makes a context on the card that it is
 * given, and is remembered by the runtime. Threads that are ours, or whose process is, settle once.
 * Any thread. */
#include "kernels/cuda/device.h"
#include "kernels/cuda/driver.h"

/* A look at an event, or an allocation, of a thread in the default mode ends the captures of all
 * others, and fails: nothing of ours belongs into anybody's graph. */
static bool relax(CUstreamCaptureMode *ret_before) {
    const struct cuda_driver *driver = cuda_driver_get(NULL);
    *ret_before = CU_STREAM_CAPTURE_MODE_RELAXED;
    return driver->exchange_capture_mode &&
           driver->exchange_capture_mode(ret_before) == CUDA_SUCCESS;
}

static cudaError_t enter_context(struct cuda_device *device, struct cuda_visit *visit) {
    const struct cuda_driver *driver = cuda_driver_get(NULL);
    CUcontext before = NULL;
    if (!device->context)
        return cudaSetDevice(device->ordinal);
    CUresult result = driver->get_current(&before);
    if (result || before == device->context)
        return (cudaError_t)result; /* numbered as the runtime's */
    if ((result = driver->set_current(device->context)))
        return (cudaError_t)result;
    visit->before = before;
    visit->changed = true;
    return cudaSuccess;
}

cudaError_t cuda_visit(struct cuda_device *device, struct cuda_visit *visit) {
    cudaError_t error = enter_context(device, visit);
    if (!error && !device->stays_current)
        visit->relaxed = relax(&visit->mode);
    return error;
}

void cuda_leave(struct cuda_visit *visit) {
    const struct cuda_driver *driver = cuda_driver_get(NULL);
    if (visit->relaxed)
        driver->exchange_capture_mode(&visit->mode);
    if (visit->changed)
        driver->set_current(visit->before);
}

cudaError_t cuda_settle(struct cuda_device *device) {
    CUstreamCaptureMode before;
    cudaError_t error = cudaSetDevice(device->ordinal);
    if (!error)
        relax(&before);
    return error;
}

void cuda_context_find(struct cuda_device *device) {
    const struct cuda_driver *driver = cuda_driver_get(NULL);
    if (!driver->get_current || !driver->set_current || driver->get_current(&device->context))
        device->context = NULL;
}

enum kld_status cuda_enter(struct cuda_device *device, struct cuda_visit *visit,
                           struct kld_error *err) {
    if (atomic_load(&device->lost))
        return kld_error_set(err, KLD_DEVICE_LOST, "the device has failed; its process must end");
    cudaError_t error = cuda_visit(device, visit);
    return error ? cuda_fail(device, error, "selecting the device", err) : KLD_OK;
}
