/* event.c - events that two processes share: opened by a handle, or made here and handed out; and
 * fences, words of host memory that the device writes numbers to. Waiting for events, and recording
 * any of them, is enqueued by job.c. Any thread but the device's own, except cuda_event_record().
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/driver.h"

static enum kld_status event_new(struct cuda_device *device, struct cuda_visit *visit,
                                 struct cuda_event **ret_event, struct kld_error *err) {
    enum kld_status status = cuda_enter(device, visit, err);
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
    struct cuda_visit visit CUDA_LEAVES = {0};
    enum kld_status status = event_new(device, &visit, &event, err);
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
    struct cuda_visit visit CUDA_LEAVES = {0};
    enum kld_status status = event_new(device, &visit, &event, err);
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

/* Sets the word to 0 the way that numbers will come: a driver that does not do so says it now. */
static cudaError_t first_write(struct cuda_device *device, const struct cuda_event *event) {
    pthread_mutex_lock(&device->setup_mutex);
    cudaError_t error = cuda_event_record(event, 0, device->setup);
    if (!error)
        error = cudaStreamSynchronize(device->setup);
    pthread_mutex_unlock(&device->setup_mutex);
    return error;
}

enum kld_status cuda_event_create_fence(struct kld_device *base, struct kld_memory *memory,
                                        uint64_t offset_bytes, struct kld_gpu_event **ret_event,
                                        struct kld_error *err) {
    struct cuda_device *device = (struct cuda_device *)base;
    const struct cuda_memory *host = (const struct cuda_memory *)memory;
    if (!cuda_driver_get(NULL)->write_value)
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "fences need a driver that writes values in streams (CUDA 11.7)");
    if (!host->base.pinned)
        return kld_error_set(err, KLD_NO_MEMORY, "the memory of a fence could not be pinned");
    struct cuda_event *event = NULL;
    struct cuda_visit visit CUDA_LEAVES = {0};
    enum kld_status status = event_new(device, &visit, &event, err);
    if (status)
        return status;
    void *at = NULL;
    cudaError_t error = cudaHostGetDevicePointer(&at, host->at, 0);
    event->word = (uintptr_t)at + offset_bytes;
    if (!error)
        error = first_write(device, event);
    if (error) {
        free(event);
        return cuda_fail(device, error, "making a fence", err);
    }
    *ret_event = &event->base;
    return KLD_OK;
}

/* What the stream has written is seen by everybody before the number is: the driver's default. */
cudaError_t cuda_event_record(const struct cuda_event *event, uint32_t number,
                              cudaStream_t stream) {
    if (event->event)
        return cudaEventRecord(event->event, stream);
    return (cudaError_t)cuda_driver_get(NULL)->write_value(stream, event->word, number, 0);
}

void cuda_event_free(struct kld_gpu_event *base) {
    if (!base)
        return;
    struct cuda_event *event = (struct cuda_event *)base;
    struct cuda_device *device = (struct cuda_device *)base->device;
    if (event->event && !atomic_load(&device->lost)) {
        struct cuda_visit visit CUDA_LEAVES = {0};
        cuda_visit(device, &visit);
        cudaEventDestroy(event->event);
        cudaGetLastError();
    }
    free(event);
}
