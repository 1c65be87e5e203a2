/* fake_runtime.h - a double of the CUDA runtime, for the host side of the CUDA back end on machines
 * without a GPU. Defines the functions themselves: for programs that include it, which then take
 * nothing from the real runtime. Kernels: fake_kernels.h.
 *
 * A stream is the time at which what was enqueued so far will have ended. Copies happen at once;
 * device memory is malloc's. */
#ifndef KLD_TESTS_FAKE_RUNTIME_H
#define KLD_TESTS_FAKE_RUNTIME_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define FAKE_ALLOCATION ((size_t)1 << 20) /* every allocation of another process */
#define FAKE_UNIT ((size_t)2 << 20)       /* granularity of VMM */
#define FAKE_CARD(i) (0x11b00u + (i))     /* PCI address of card i: 0001:1b:0i */
#ifndef FAKE_MAPPED_AT
#define FAKE_MAPPED_AT (1 << 30) /* from a host address to the device's of the same */
#endif
#ifndef FAKE_MULTIPROCESSORS
#define FAKE_MULTIPROCESSORS 132
#endif
#ifndef FAKE_SHARED_BYTES /* most of a block */
#define FAKE_SHARED_BYTES 200000
#endif

#define FAKE_PINNED_MAX 64 /* ranges of host memory that are remembered */

struct fake_stream {
    uint64_t ready_ns;
    int priority;
    bool wrote; /* a number, which no event was recorded behind */
};
struct fake_event {
    uint64_t at_ns;
    unsigned opened; /* by whoever made it and by handle */
};

static atomic_int fake_device_of_fd, fake_access_error, fake_reserve_error;
/* Open now. */
static atomic_int fake_streams, fake_events, fake_blocks, fake_imports, fake_maps, fake_handles,
    fake_ranges, fake_pinned;
static atomic_int fake_imports_total, fake_priority_sum;
static atomic_int fake_copy_error;  /* of the next copy */
static atomic_int fake_no_memory;   /* countdown: so many allocations of the pool fail */
static atomic_int fake_devices = 1; /* card 2 and those behind it are not connected to others */
static atomic_int fake_allocations; /* calls that make or pin anything, ever */
static atomic_int fake_open_us;     /* that opening a handle takes */
static atomic_int fake_opening;     /* handles, now */
static pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER; /* times */

/* The double's clock is so much ahead: work that is to take longer than any test looks at it, and
 * then be over, takes FAKE_LONG_US until that much is added here. */
#define FAKE_LONG_US 100000000
static atomic_ullong fake_ahead_ns;
static uint64_t fake_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + atomic_load(&fake_ahead_ns);
}
static inline void fake_skip_long(void) {
    atomic_fetch_add(&fake_ahead_ns, FAKE_LONG_US * 1000ull);
}

static uint64_t fake_later(uint64_t a, uint64_t b) { return a > b ? a : b; }

static _Atomic(cudaStream_t) fake_captured; /* one that is, into a graph of its owner's */
static atomic_int fake_captured_work;       /* what came into that graph */
static void fake_enqueue(cudaStream_t stream) {
    if (stream && stream == atomic_load(&fake_captured))
        atomic_fetch_add(&fake_captured_work, 1);
}

static cudaError_t fake_work(cudaStream_t stream, int us) {
    struct fake_stream *fake = (struct fake_stream *)stream;
    fake_enqueue(stream);
    pthread_mutex_lock(&fake_lock);
    fake->ready_ns = fake_later(fake->ready_ns, fake_now_ns()) + (uint64_t)us * 1000;
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}

static cudaError_t fake_passed(const uint64_t *at_ns) {
    pthread_mutex_lock(&fake_lock);
    bool passed = *at_ns <= fake_now_ns();
    pthread_mutex_unlock(&fake_lock);
    return passed ? cudaSuccess : cudaErrorNotReady;
}

/* ---- Device, errors -------------------------------------------------------------------------- */

static atomic_int fake_refusal; /* of the runtime, to whoever asks for the device */
static atomic_int fake_calls;   /* of those that are the first in a process */
cudaError_t cudaGetDeviceCount(int *count) {
    atomic_fetch_add(&fake_calls, 1);
    *count = atomic_load(&fake_devices);
    return (cudaError_t)atomic_load(&fake_refusal);
}
static atomic_int fake_loads; /* of kernels */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    atomic_fetch_add(&fake_loads, 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device < 2 && peer < 2;
    return cudaSuccess;
}
/* A context is the place of its device among these; what works without one takes device 0's. */
#define FAKE_DEVICES_MAX 8
static atomic_int fake_contexts[FAKE_DEVICES_MAX]; /* times that the device was made current */
static _Thread_local CUcontext fake_context;       /* current; NULL: none */
static atomic_int fake_switches;                   /* of what is current, by the driver */
static CUcontext fake_context_at(int device) {
    return device < 0 ? NULL : (CUcontext)(void *)&fake_contexts[device];
}
static atomic_int fake_signalled; /* times that by a thread which takes signals */
cudaError_t cudaSetDevice(int device) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    if (!sigismember(&blocked, SIGTERM) || sigismember(&blocked, SIGSEGV))
        atomic_fetch_add(&fake_signalled, 1);
    atomic_fetch_add(&fake_calls, 1);
    atomic_fetch_add(&fake_contexts[device], 1);
    fake_context = fake_context_at(device);
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = fake_context ? (int)((atomic_int *)(void *)fake_context - fake_contexts) : 0;
    return cudaSuccess;
}
static void fake_need_context(void) {
    if (!fake_context)
        cudaSetDevice(0);
}
/* A stream is captured in some thread. What is not for such times says so, and ends the capture, in
 * a thread whose mode is not relaxed. */
static atomic_bool fake_capturing;
static atomic_int fake_captures_ended;
static _Thread_local CUstreamCaptureMode fake_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static CUresult fake_exchange_mode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode before = fake_mode;
    fake_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
static cudaError_t fake_unsafe(void) {
    fake_need_context();
    if (!atomic_load(&fake_capturing) || fake_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return cudaSuccess;
    atomic_fetch_add(&fake_captures_ended, 1);
    return cudaErrorStreamCaptureUnsupported;
}
static atomic_int fake_is_capturing_error; /* of the next question */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = stream && stream == atomic_load(&fake_captured) ? cudaStreamCaptureStatusActive
                                                              : cudaStreamCaptureStatusNone;
    return (cudaError_t)atomic_exchange(&fake_is_capturing_error, 0);
}
static CUresult fake_get_current(CUcontext *context) {
    *context = fake_context;
    return CUDA_SUCCESS;
}
static CUresult fake_set_current(CUcontext context) {
    atomic_fetch_add(&fake_switches, 1);
    fake_context = context;
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "a double");
    properties->uuid.bytes[0] = (char)device;
    properties->pciDeviceID = device;
    properties->pciBusID = 0x1b;
    properties->pciDomainID = 1;
    properties->totalGlobalMem = (size_t)1 << 36;
    properties->major = 9;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrMultiProcessorCount                ? FAKE_MULTIPROCESSORS
             : attribute == cudaDevAttrSingleToDoublePrecisionPerfRatio ? 2
                                                                        : FAKE_SHARED_BYTES;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "the double was told to fail"; }

/* ---- Streams, events ------------------------------------------------------------------------- */

static atomic_int fake_greatest = -5; /* priority of a stream; the least is 0 */
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = atomic_load(&fake_greatest);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    fake_need_context();
    struct fake_stream *fake = calloc(1, sizeof *fake);
    fake->priority = priority;
    atomic_fetch_add(&fake_allocations, 1);
    atomic_fetch_add(&fake_streams, 1);
    atomic_fetch_add(&fake_priority_sum, priority);
    *stream = (cudaStream_t)fake;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    fake_need_context();
    atomic_fetch_sub(&fake_streams, 1);
    free(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (fake_unsafe())
        return cudaErrorStreamCaptureUnsupported;
    return fake_passed(&((struct fake_stream *)stream)->ready_ns);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t error;
    while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady)
        usleep(10);
    return error;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    struct fake_stream *fake = (struct fake_stream *)stream;
    pthread_mutex_lock(&fake_lock);
    fake->ready_ns = fake_later(fake->ready_ns, ((struct fake_event *)event)->at_ns);
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    fake_need_context();
    struct fake_event *fake = calloc(1, sizeof *fake);
    fake->opened = 1;
    atomic_fetch_add(&fake_allocations, 1);
    atomic_fetch_add(&fake_events, 1);
    *event = (cudaEvent_t)fake;
    return cudaSuccess;
}
cudaError_t(cudaEventCreate)(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    fake_need_context();
    atomic_fetch_sub(&fake_events, 1);
    if (--((struct fake_event *)event)->opened == 0)
        free(event);
    return cudaSuccess;
}
static atomic_int fake_not_recorded; /* countdown: so many records fail, as in a capture */
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    fake_need_context();
    if (atomic_load(&fake_not_recorded) > 0 && atomic_fetch_sub(&fake_not_recorded, 1) > 0)
        return cudaErrorStreamCaptureImplicit;
    fake_enqueue(stream);
    pthread_mutex_lock(&fake_lock);
    ((struct fake_stream *)stream)->wrote = false;
    ((struct fake_event *)event)->at_ns =
        fake_later(((struct fake_stream *)stream)->ready_ns, fake_now_ns());
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}
static atomic_int fake_query_us;    /* that looking at an event takes */
static atomic_int fake_query_error; /* of the next look */
cudaError_t cudaEventQuery(cudaEvent_t event) {
    int error = atomic_exchange(&fake_query_error, 0);
    if (error || fake_unsafe())
        return error ? (cudaError_t)error : cudaErrorStreamCaptureUnsupported;
    if (atomic_load(&fake_query_us))
        usleep((unsigned)atomic_load(&fake_query_us));
    return fake_passed(&((struct fake_event *)event)->at_ns);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cudaError_t error;
    while ((error = cudaEventQuery(event)) == cudaErrorNotReady)
        usleep(10);
    return error;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t until) {
    fake_need_context();
    pthread_mutex_lock(&fake_lock);
    *ms = (float)(((struct fake_event *)until)->at_ns - ((struct fake_event *)from)->at_ns) * 1e-6f;
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}
/* A handle that begins with "bad" is nobody's. */
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &event, sizeof event);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    if (memcmp(&handle, "bad", 3) == 0)
        return cudaErrorUnknown;
    memcpy(event, &handle, sizeof *event);
    ((struct fake_event *)*event)->opened++;
    atomic_fetch_add(&fake_events, 1);
    return cudaSuccess;
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static cudaError_t fake_take(void **at, size_t bytes, atomic_int *count) {
    if (fake_unsafe())
        return cudaErrorStreamCaptureUnsupported;
    *at = calloc(1, bytes);
    atomic_fetch_add(count, 1);
    atomic_fetch_add(&fake_allocations, 1);
    return cudaSuccess;
}
static cudaError_t fake_give(void *at, atomic_int *count) {
    if (fake_unsafe())
        return cudaErrorStreamCaptureUnsupported;
    free(at);
    atomic_fetch_sub(count, 1);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned flags) {
    return fake_take(at, bytes, &fake_blocks);
}
cudaError_t cudaFreeHost(void *at) { return fake_give(at, &fake_blocks); }
static atomic_bool fake_no_pinning, fake_no_unpinning;
static atomic_uint fake_pinned_as; /* flags */
static struct {
    const char *at;
    size_t bytes;                     /* 0: none */
} fake_pinned_range[FAKE_PINNED_MAX]; /* under fake_lock */
static void fake_note_pinned(void *at, size_t bytes) {
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < FAKE_PINNED_MAX; i++)
        if (!fake_pinned_range[i].bytes || fake_pinned_range[i].at == (char *)at) {
            fake_pinned_range[i].at = (const char *)at;
            fake_pinned_range[i].bytes = bytes;
            break;
        }
    pthread_mutex_unlock(&fake_lock);
}
cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) {
    if (fake_unsafe())
        return cudaErrorStreamCaptureUnsupported;
    if (atomic_load(&fake_no_pinning))
        return cudaErrorMemoryAllocation;
    atomic_store(&fake_pinned_as, flags);
    atomic_fetch_add(&fake_pinned, 1);
    atomic_fetch_add(&fake_allocations, 1);
    fake_note_pinned(at, bytes);
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = (char *)host + FAKE_MAPPED_AT;
    return atomic_load(&fake_pinned_as) & cudaHostRegisterMapped ? cudaSuccess
                                                                 : cudaErrorInvalidValue;
}
cudaError_t cudaHostUnregister(void *at) {
    if (fake_unsafe())
        return cudaErrorStreamCaptureUnsupported;
    if (atomic_load(&fake_no_unpinning))
        return cudaErrorInvalidValue;
    atomic_fetch_sub(&fake_pinned, 1);
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < FAKE_PINNED_MAX; i++)
        if (fake_pinned_range[i].at == (char *)at)
            fake_pinned_range[i].bytes = 0;
    pthread_mutex_unlock(&fake_lock);
    return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
    *pool = (cudaMemPool_t)&fake_lock; /* any address */
    return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *to) {
    return cudaSuccess;
}
static _Atomic size_t fake_free_bytes = (size_t)1 << 36; /* of the card */
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    *unused = atomic_load(&fake_free_bytes);
    *total = (size_t)1 << 36;
    return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *to) {
    *(uint64_t *)to = attribute == cudaMemPoolAttrReservedMemCurrent ? 3 << 20 : 2 << 20;
    return cudaSuccess;
}
static _Atomic size_t fake_trimmed_to;
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    atomic_store(&fake_trimmed_to, bytes);
    return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void **at, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream) {
    if (atomic_load(&fake_no_memory) > 0 && atomic_fetch_sub(&fake_no_memory, 1) > 0)
        return cudaErrorMemoryAllocation;
    fake_enqueue(stream);
    return fake_take(at, bytes, &fake_blocks);
}
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) {
    cudaStreamSynchronize(stream);
    return fake_give(at, &fake_blocks);
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    fake_need_context();
    memset(at, value, bytes);
    return cudaSuccess;
}
/* Of a megabyte that is not pinned: who enqueues a copy there waits for what is before it. NULL: no
 * such memory. */
static _Atomic(const char *) fake_pageable;
static void fake_wait_for_copy(const void *to, const void *from, cudaStream_t stream) {
    const char *at = atomic_load(&fake_pageable), *ends[] = {(const char *)to, (const char *)from};
    for (int i = 0; i < 2 && at; i++)
        if (ends[i] >= at && ends[i] < at + (1 << 20))
            cudaStreamSynchronize(stream);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    int error = atomic_exchange(&fake_copy_error, 0);
    if (error)
        return (cudaError_t)error;
    fake_wait_for_copy(to, from, stream);
    memcpy(to, from, bytes);
    return fake_work(stream, 1);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_stride, const void *from, size_t from_stride,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
    fake_wait_for_copy(to, from, stream);
    for (size_t i = 0; i < height; i++)
        memcpy((char *)to + i * to_stride, (const char *)from + i * from_stride, width);
    return fake_work(stream, 1);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *at) {
    fake_need_context();
    memset(attributes, 0, sizeof *attributes);
    return cudaSuccess;
}
/* As an H200's driver writes it (580): a pointer, process, bytes, pages, PCI address, ... */
static void fake_handle(uint8_t handle[64], uint32_t pid, uint64_t bytes, uint32_t card) {
    memset(handle, 0, 64);
    memcpy(handle, "\x60\xcd\x35\x0a", 4);
    memcpy(handle + 8, &pid, sizeof pid);
    memcpy(handle + 16, &bytes, sizeof bytes);
    memcpy(handle + 32, &card, sizeof card);
    handle[37] = 0xff;
}
static atomic_bool fake_other_handles = true; /* as of a driver that is not known */
cudaError_t cudaMalloc(void **at, size_t bytes) { return fake_take(at, bytes, &fake_blocks); }
cudaError_t cudaFree(void *at) { return fake_give(at, &fake_blocks); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at) {
    fake_handle((uint8_t *)handle, (uint32_t)getpid() + atomic_load(&fake_other_handles), 2 << 20,
                FAKE_CARD(0));
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **at, cudaIpcMemHandle_t handle, unsigned flags) {
    if (memcmp(&handle, "bad", 3) == 0)
        return cudaErrorUnknown;
    atomic_fetch_add(&fake_opening, 1);
    usleep((unsigned)atomic_load(&fake_open_us));
    atomic_fetch_sub(&fake_opening, 1);
    atomic_fetch_add(&fake_imports_total, 1);
    return fake_take(at, FAKE_ALLOCATION, &fake_imports);
}
cudaError_t cudaIpcCloseMemHandle(void *at) { return fake_give(at, &fake_imports); }

/* ---- The driver's part ----------------------------------------------------------------------- */

static CUresult fake_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
    *base = at;
    *bytes = FAKE_ALLOCATION;
    return CUDA_SUCCESS;
}
/* Descriptor 99 is no allocation; each of the others has one of FAKE_UNIT bytes. */
static CUresult fake_import(CUmemGenericAllocationHandle *handle, void *fd,
                            CUmemAllocationHandleType type) {
    if ((intptr_t)fd == 99)
        return CUDA_ERROR_UNKNOWN;
    *handle = 5;
    atomic_fetch_add(&fake_handles, 1);
    return CUDA_SUCCESS;
}
static CUresult fake_properties(CUmemAllocationProp *properties,
                                CUmemGenericAllocationHandle handle) {
    memset(properties, 0, sizeof *properties);
    properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties->location.id = atomic_load(&fake_device_of_fd);
    return CUDA_SUCCESS;
}
static CUresult fake_granularity(size_t *bytes, const CUmemAllocationProp *properties,
                                 CUmemAllocationGranularity_flags option) {
    *bytes = FAKE_UNIT;
    return CUDA_SUCCESS;
}
static CUresult fake_release(CUmemGenericAllocationHandle handle) {
    atomic_fetch_sub(&fake_handles, 1);
    return CUDA_SUCCESS;
}
static CUresult fake_reserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    void *block = NULL;
    if (atomic_load(&fake_reserve_error))
        return (CUresult)atomic_load(&fake_reserve_error);
    fake_take(&block, bytes, &fake_ranges);
    *at = (CUdeviceptr)(uintptr_t)block;
    return CUDA_SUCCESS;
}
/* What is mapped, whole: the driver unmaps nothing else, and keeps addresses that are in use. */
#define FAKE_MAPS_MAX 16
static struct {
    CUdeviceptr at;
    size_t bytes;
} fake_mapped[FAKE_MAPS_MAX];
static int fake_mapping_in(CUdeviceptr at, size_t bytes) {
    int i = 0;
    while (i < FAKE_MAPS_MAX &&
           (at >= fake_mapped[i].at + fake_mapped[i].bytes || fake_mapped[i].at >= at + bytes))
        i++;
    return i;
}
static CUresult fake_unreserve(CUdeviceptr at, size_t bytes) {
    if (fake_mapping_in(at, bytes) < FAKE_MAPS_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    fake_give((void *)(uintptr_t)at, &fake_ranges);
    return CUDA_SUCCESS;
}
static CUresult fake_map(CUdeviceptr at, size_t bytes, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags) {
    int i = 0;
    if (bytes > FAKE_UNIT || fake_mapping_in(at, bytes) < FAKE_MAPS_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    while (i < FAKE_MAPS_MAX && fake_mapped[i].bytes)
        i++;
    if (i == FAKE_MAPS_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake_mapped[i].at = at;
    fake_mapped[i].bytes = bytes;
    atomic_fetch_add(&fake_maps, 1);
    return CUDA_SUCCESS;
}
static CUresult fake_unmap(CUdeviceptr at, size_t bytes) {
    int i = fake_mapping_in(at, bytes);
    if (i == FAKE_MAPS_MAX || fake_mapped[i].at != at || fake_mapped[i].bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    fake_mapped[i].at = fake_mapped[i].bytes = 0;
    atomic_fetch_sub(&fake_maps, 1);
    return CUDA_SUCCESS;
}
static CUresult fake_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access,
                            size_t count) {
    return (CUresult)atomic_load(&fake_access_error);
}

static atomic_bool fake_no_writes; /* a driver of before CUDA 11.7 */
static atomic_int fake_write_error, fake_writes;
static CUresult fake_write(CUstream stream, CUdeviceptr at, cuuint32_t number, unsigned flags) {
    if (atomic_load(&fake_write_error))
        return (CUresult)atomic_load(&fake_write_error);
    atomic_fetch_add(&fake_writes, 1);
    pthread_mutex_lock(&fake_lock);
    ((struct fake_stream *)stream)->wrote = true;
    pthread_mutex_unlock(&fake_lock);
    atomic_store((_Atomic uint32_t *)(uintptr_t)(at - FAKE_MAPPED_AT), number);
    return CUDA_SUCCESS;
}

static cudaError_t fake_entry(const char *name, void **function,
                              enum cudaDriverEntryPointQueryResult *result) {
    static const struct {
        const char *name;
        void *function;
    } entries[] = {{"cuThreadExchangeStreamCaptureMode", (void *)fake_exchange_mode},
                   {"cuCtxGetCurrent", (void *)fake_get_current},
                   {"cuCtxSetCurrent", (void *)fake_set_current},
                   {"cuMemGetAddressRange", (void *)fake_address_range},
                   {"cuMemImportFromShareableHandle", (void *)fake_import},
                   {"cuMemGetAllocationPropertiesFromHandle", (void *)fake_properties},
                   {"cuMemGetAllocationGranularity", (void *)fake_granularity},
                   {"cuMemRelease", (void *)fake_release},
                   {"cuMemAddressReserve", (void *)fake_reserve},
                   {"cuMemAddressFree", (void *)fake_unreserve},
                   {"cuMemMap", (void *)fake_map},
                   {"cuMemUnmap", (void *)fake_unmap},
                   {"cuMemSetAccess", (void *)fake_access},
                   {"cuStreamWriteValue32", (void *)fake_write}};
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        bool none = entries[i].function == (void *)fake_write && atomic_load(&fake_no_writes);
        if (strcmp(entries[i].name, name) != 0 || none)
            continue;
        *function = entries[i].function;
        *result = cudaDriverEntryPointSuccess;
        return cudaSuccess;
    }
    *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorSymbolNotFound;
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    return fake_entry(name, function, result);
}
#elif CUDART_VERSION >= 12000
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
    return fake_entry(name, function, result);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags) {
    enum cudaDriverEntryPointQueryResult result;
    return fake_entry(name, function, &result);
}
#endif

#endif
