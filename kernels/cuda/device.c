/* device.c - opening and closing a device: context, pool, events, scratch and thread; and the table
 * that makes all of it a back end. Everything that a job needs is allocated here, once. Any thread
 * but the device's own. */
#include "kernels/cuda/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/thread.h"

#define NO_THREAD "the device thread cannot be started"

/* cudaErrorMpsConnectionFailed to cudaErrorMpsClientTerminated, which older headers do not name. */
static bool is_of_mps(cudaError_t error) { return (int)error >= 805 && (int)error <= 810; }

static enum kld_status device_count(uint32_t *ret_count, struct kld_error *err) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error) {
        cudaGetLastError();
        if (is_of_mps(error))
            return kld_error_set(err, KLD_BUSY,
                                 "the GPU's MPS daemon does not let this process in: %s",
                                 cudaGetErrorString(error));
        return kld_error_set(err, KLD_UNAVAILABLE, "no CUDA device: %s", cudaGetErrorString(error));
    }
    if (count < 1)
        return kld_error_set(err, KLD_UNAVAILABLE, "no CUDA device");
    *ret_count = (uint32_t)count;
    return KLD_OK;
}

/* Asked by its number, which older headers do not name; older drivers do not know it. */
static bool without_mps(int ordinal) {
    int mps = 1;
    if (cudaDeviceGetAttribute(&mps, (enum cudaDeviceAttr)133 /* cudaDevAttrMpsEnabled */, ordinal))
        cudaGetLastError();
    return mps == 0;
}

static cudaError_t fill_info(struct cuda_device *device, const struct kld_device_options *options) {
    struct kld_device_info *info = &device->base.info;
    struct cudaDeviceProp properties;
    int shared = 0, processors = 0, ratio = 0;
    cudaError_t error;
    if ((error = cudaGetDeviceProperties(&properties, device->ordinal)) ||
        (error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                        device->ordinal)) ||
        (error = cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio,
                                        device->ordinal)) ||
        (error =
             cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device->ordinal)))
        return error;
    strcpy(info->backend, "cuda");
    snprintf(info->name, sizeof info->name, "%.63s", properties.name);
    memcpy(info->uuid, &properties.uuid, sizeof info->uuid);
    info->memory_bytes = properties.totalGlobalMem;
    info->pool_bytes_max =
        options->pool_bytes_max ? options->pool_bytes_max : info->memory_bytes / 2;
    info->threads = (uint32_t)processors;
    info->imports_cuda_ipc = true;
    info->offloads = true;
    info->takes_turns = without_mps(device->ordinal);
    device->spin_us = options->spin_us;
    /* What the kernels' own static shared memory takes is kept back. */
    device->shared_bytes_max = (uint32_t)shared - 2048;
    device->has_fp64 = ratio <= 2;
    device->begins_early = kld_cuda_begins_early();
    return properties.major >= 8 ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}

static cudaError_t open_pool(struct cuda_device *device) {
    struct cudaMemPoolProps properties;
    memset(&properties, 0, sizeof properties);
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device->ordinal;
#if CUDART_VERSION >= 12020
    /* Reservations bound what callers take; this bounds what the driver takes for them: scratch,
     * rounding and the room between buffers. */
    uint64_t most = device->base.info.pool_bytes_max, slack = most / 8 + ((uint64_t)256 << 20);
    if (most + slack < device->base.info.memory_bytes)
        properties.maxSize = most + slack;
#endif
    cudaError_t error = cudaMemPoolCreate(&device->pool, &properties);
    if (error)
        return error;
    uint64_t keep = UINT64_MAX; /* memory stays with the pool between jobs */
    return cudaMemPoolSetAttribute(device->pool, cudaMemPoolAttrReleaseThreshold, &keep);
}

/* The driver loads a kernel when it is first launched. Small jobs do without this one, and the
 * first large one is not to find that there is no memory for it just then. */
static cudaError_t load_finish(struct cuda_device *device, struct kld_cuda_scratch *scratch) {
    struct kld_cuda_args args;
    memset(&args, 0, sizeof args);
    args.scratch = scratch;
    args.divisor = 1;
    return kld_cuda_launch_finish(&args, 0, true, true, KLD_DTYPE_FP32,
                                  &device->results[CUDA_FLIGHTS_MAX], device->setup);
}

static cudaError_t open_flights(struct cuda_device *device) {
    void *results = NULL, *sums = NULL, *scratch = NULL;
    cudaError_t error;
    if ((error =
             cudaHostAlloc(&results, (CUDA_FLIGHTS_MAX + 1) * sizeof(double), cudaHostAllocMapped)))
        return error;
    device->results = results;
    if ((error =
             cudaHostAlloc(&sums, CUDA_FLIGHTS_MAX * sizeof *device->sums, cudaHostAllocMapped)))
        return error;
    device->sums = sums;
    size_t bytes = CUDA_FLIGHTS_MAX * sizeof(struct kld_cuda_scratch);
    if ((error = cuda_pool_take(device, bytes, &scratch)))
        return error;
    device->flights[0].scratch = scratch; /* where release() finds it, whatever comes next */
    if ((error = cudaMemsetAsync(scratch, 0, bytes, device->setup)) ||
        (error = load_finish(device, scratch)) || (error = cudaStreamSynchronize(device->setup)))
        return error;
    for (int i = 0; i < CUDA_FLIGHTS_MAX; i++) {
        struct cuda_flight *flight = &device->flights[i];
        flight->result = &device->results[i];
        flight->sums = &device->sums[i];
        flight->scratch = (struct kld_cuda_scratch *)scratch + i;
        for (int which = 0; which < MARK_COUNT; which++)
            if ((error = cudaEventCreate(&flight->mark[which])))
                return error;
    }
    return cudaSuccess;
}

static void release(struct cuda_device *device) {
    if (!atomic_load(&device->lost)) {
        for (int i = 0; i < CUDA_FLIGHTS_MAX; i++)
            for (int which = 0; which < MARK_COUNT; which++)
                if (device->flights[i].mark[which])
                    cudaEventDestroy(device->flights[i].mark[which]);
        cuda_staging_forget(device);
        if (device->flights[0].scratch)
            cudaFreeAsync(device->flights[0].scratch, device->setup);
        if (device->setup) {
            cudaStreamSynchronize(device->setup);
            cudaStreamDestroy(device->setup);
        }
        if (device->pool)
            cudaMemPoolDestroy(device->pool);
        if (device->results)
            cudaFreeHost(device->results);
        if (device->sums)
            cudaFreeHost(device->sums);
        cudaGetLastError();
    }
    pthread_mutex_destroy(&device->setup_mutex);
    pthread_mutex_destroy(&device->work);
    pthread_mutex_destroy(&device->mutex);
    pthread_cond_destroy(&device->wake);
    free(device);
}

static void device_close(struct kld_device *base) {
    if (!base)
        return;
    struct cuda_device *device = (struct cuda_device *)base;
    atomic_store(&device->watched, false);
    pthread_mutex_lock(&device->mutex);
    device->stop = device->launched = true; /* what is in flight is waited for first */
    pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->mutex);
    pthread_join(device->thread, NULL);
    struct cuda_visit visit CUDA_LEAVES = {0};
    cuda_visit(device, &visit);
    release(device);
}

struct opening {
    struct cuda_device *device; /* released if it does not open */
    const struct kld_device_options *options;
    uint32_t count; /* of devices */
    enum kld_status status;
    struct kld_error err;
};

/* A thread for this alone, which settles on the device, as the caller's may not: there is no
 * context yet that it could visit. */
static void *opening_main(void *argument) {
    struct opening *opening = argument;
    struct cuda_device *device = opening->device;
    const struct kld_device_options *options = opening->options;
    cudaError_t error;
    if ((error = cuda_settle(device)) || (error = fill_info(device, options)) ||
        (error = cudaStreamCreateWithFlags(&device->setup, cudaStreamNonBlocking)) ||
        (error = open_pool(device)) || (error = open_flights(device))) {
        enum kld_status status = cuda_fail(device, error, "opening the CUDA device", &opening->err);
        release(device);
        /* A device that does not open is not lost: nothing was in flight. */
        opening->status = opening->err.status =
            status == KLD_DEVICE_LOST ? KLD_UNAVAILABLE : status;
        return NULL;
    }
    cuda_context_find(device);
    if (options->kernels_load == KLD_KERNELS_AT_OPEN)
        cuda_preload(device, UINT32_MAX);
    device->loads_when_idle = options->kernels_load == KLD_KERNELS_WHEN_IDLE;
    if (options->peer_access)
        cuda_peers_find(device, opening->count);
    device->card = cuda_card_number(device->ordinal);
    if (kld_thread_start(&device->thread, cuda_thread_main, device) != 0) {
        release(device);
        opening->status = kld_error_set(&opening->err, KLD_UNAVAILABLE, "%s", NO_THREAD);
    }
    return NULL;
}

static enum kld_status device_open(const struct kld_device_options *options,
                                   struct kld_device **ret_device, struct kld_error *err) {
    uint32_t count = 0;
    enum kld_status status = device_count(&count, err);
    if (status)
        return status;
    if (options->device >= count)
        return kld_error_set(err, KLD_INVALID, "no CUDA device %u; there are %u", options->device,
                             count);
    struct cuda_device *device = calloc(1, sizeof *device);
    if (!device)
        return kld_error_set(err, KLD_NO_MEMORY, "no host memory for a device");
    device->base.backend = &kld_backend_cuda;
    device->ordinal = (int)options->device;
    device->stays_current = options->stays_current;
    device->heir_until_ns = cuda_now_ns() + CUDA_HEIR_NS;
    pthread_mutex_init(&device->setup_mutex, NULL);
    pthread_mutex_init(&device->work, NULL);
    pthread_mutex_init(&device->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&device->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    struct opening opening = {.device = device, .options = options, .count = count};
    pthread_t thread;
    if (kld_thread_start(&thread, opening_main, &opening) != 0) {
        release(device);
        return kld_error_set(err, KLD_UNAVAILABLE, "%s", NO_THREAD);
    }
    pthread_join(thread, NULL);
    if (opening.status) {
        if (err)
            *err = opening.err;
        return opening.status;
    }
    if (device->stays_current)
        cuda_settle(device); /* if that fails, it is a guest at each call */
    *ret_device = &device->base;
    return KLD_OK;
}

const struct kld_backend kld_backend_cuda = {
    .name = "cuda",
    .device_count = device_count,
    .device_open = device_open,
    .device_close = device_close,
    .memory_map = cuda_memory_map,
    .memory_wrap = cuda_memory_wrap,
    .memory_import_ipc = cuda_memory_import_ipc,
    .memory_import_fd = cuda_memory_import_fd,
    .memory_reserve = cuda_memory_reserve,
    .memory_grow_fd = cuda_memory_grow_fd,
    .reaches = cuda_reaches,
    .handles_unread = cuda_handles_unread,
    .memory_alloc = cuda_memory_alloc,
    .memory_free = cuda_memory_free,
    .stream_open = cuda_stream_open,
    .stream_adopt = cuda_stream_adopt,
    .stream_close = cuda_stream_close,
    .event_import = cuda_event_import,
    .event_create = cuda_event_create,
    .event_create_fence = cuda_event_create_fence,
    .event_free = cuda_event_free,
    .submit = cuda_submit,
    .poll = cuda_poll,
    .stage = cuda_stage,
    .fail_next = cuda_fail_next,
    .is_dead = cuda_is_dead,
    .check = cuda_check,
    .pool_bytes = cuda_pool_bytes,
    .pool_allocations = cuda_pool_allocations,
    .measure_ceiling = cuda_measure_ceiling,
};
