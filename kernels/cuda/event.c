/* event.c - events that two processes share: opened by a handle, or made here and handed out.
 * Waiting for them and recording them is enqueued by job.c. Any thread but the device's own. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"

static enum kld_status event_new(struct cuda_device *device, struct cuda_event **ret_event,
                                 struct kld_error *err) {
    enum kld_status status = cuda_enter(device, err);
    if (status)
        return status;
    struct cuda_event *event = calloc(1, sizeof *event);
    if (!event)
        return kld_error_set(err, KLD_NO_MEMORY, "no host memory for an event");
    event->base.device = &device->base;
    *ret_event = event;
    return KLD_OK;
}

enum kld_status cuda_event_import(struct kld_device *base, const uint8_t handle[64],
                                  struct kld_gpu_event **ret_event, struct kld_error *err) {
    struct cuda_device *device = (struct cuda_device *)base;
    struct cuda_event *event = NULL;
    enum kld_status status = event_new(device, &event, err);
    if (status)
        return status;
    cudaIpcEventHandle_t ipc;
    _Static_assert(sizeof ipc == 64, "a CUDA IPC handle has 64 bytes");
    memcpy(&ipc, handle, sizeof ipc);
    cudaError_t error = cudaIpcOpenEventHandle(&event->event, ipc);
    if (!error) {
        *ret_event = &event->base;
        return KLD_OK;
    }
    free(event);
    if (cuda_is_refusal(device, error))
        return kld_error_set(err, KLD_INVALID,
                             "the event's handle cannot be opened: no live interprocess event of "
                             "another process on this device has it");
    return cuda_fail(device, error, "opening an event's handle", err);
}

enum kld_status cuda_event_create(struct kld_device *base, struct kld_gpu_event **ret_event,
                                  uint8_t ret_handle[64], struct kld_error *err) {
    struct cuda_device *device = (struct cuda_device *)base;
    struct cuda_event *event = NULL;
    enum kld_status status = event_new(device, &event, err);
    if (status)
        return status;
    cudaIpcEventHandle_t ipc;
    cudaError_t error =
        cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming | cudaEventInterprocess);
    if (!error && (error = cudaIpcGetEventHandle(&ipc, event->event)))
        cudaEventDestroy(event->event);
    if (error) {
        free(event);
        return cuda_fail(device, error, "making an event", err);
    }
    memcpy(ret_handle, &ipc, sizeof ipc);
    *ret_event = &event->base;
    return KLD_OK;
}

void cuda_event_free(struct kld_gpu_event *base) {
    if (!base)
        return;
    struct cuda_event *event = (struct cuda_event *)base;
    struct cuda_device *device = (struct cuda_device *)base->device;
    if (!atomic_load(&device->lost)) {
        cudaSetDevice(device->ordinal);
        cudaEventDestroy(event->event);
        cudaGetLastError();
    }
    free(event);
}
