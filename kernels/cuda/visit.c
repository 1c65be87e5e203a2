/* visit.c - a caller's thread in here: it works in the device's context meanwhile and leaves in the
 * one that it came with, or with none. By the driver and not by cudaSetDevice(), which has no way
 * back to none, makes a context on the card that it is given, and is remembered by the runtime.
 * Threads that are ours, or whose process is, settle once. Any thread. */
#include "kernels/cuda/device.h"
#include "kernels/cuda/driver.h"

cudaError_t cuda_visit(struct cuda_device *device, struct cuda_visit *visit) {
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

void cuda_leave(struct cuda_visit *visit) {
    if (visit->changed)
        cuda_driver_get(NULL)->set_current(visit->before);
}

cudaError_t cuda_settle(struct cuda_device *device) { return cudaSetDevice(device->ordinal); }

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
