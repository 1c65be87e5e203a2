/* stream.c - streams: two of the driver's for each of ours, of neighbouring priorities, so that a
 * small job need not wait for the end of somebody's large one; jobs of one stream of ours run in
 * order all the same. Launches nothing. Opening and closing: any thread but the device's own. */
#include <stdlib.h>

#include "kernels/cuda/device.h"

/* Of the numbers that the device has, downwards from the least: two neighbours for each priority,
 * as far as there are so many. */
static void numbers_of(enum kld_priority priority, int least, int greatest,
                       int ret_number[CUDA_SIZES]) {
    int last = least - greatest;
    int large = priority == KLD_PRIORITY_LOW ? 0 : (last - 1) / 2, small = large + 1;
    if (priority == KLD_PRIORITY_HIGH)
        large = last > 1 ? last - 1 : last, small = last;
    if (small > last || (last == 1 && priority == KLD_PRIORITY_LOW))
        small = large;
    ret_number[CUDA_SMALL] = least - small;
    ret_number[CUDA_LARGE] = least - large;
}

static cudaError_t create_streams(enum kld_priority priority, cudaStream_t ret_stream[CUDA_SIZES]) {
    int least = 0, greatest = 0, number[CUDA_SIZES];
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    numbers_of(priority, least, greatest, number);
    for (int size = 0; size < CUDA_SIZES && !error; size++) {
        error =
            cudaStreamCreateWithPriority(&ret_stream[size], cudaStreamNonBlocking, number[size]);
        if (error && size != CUDA_SMALL)
            cudaStreamDestroy(ret_stream[CUDA_SMALL]);
    }
    return error;
}

enum kld_status cuda_stream_open(struct kld_device *base, const struct kld_stream_options *options,
                                 struct kld_stream **ret_stream, struct kld_error *err) {
    struct cuda_device *device = (struct cuda_device *)base;
    struct cuda_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return kld_error_set(err, KLD_NO_MEMORY, "no host memory for a stream");
    stream->base.device = base;
    struct cuda_visit visit CUDA_LEAVES = {0};
    cudaError_t error = cuda_visit(device, &visit);
    if (!error)
        error = create_streams(options ? options->priority : KLD_PRIORITY_NORMAL, stream->stream);
    if (error) {
        free(stream);
        return cuda_fail(device, error, "opening a stream", err);
    }
    *ret_stream = &stream->base;
    return KLD_OK;
}

enum kld_status cuda_stream_adopt(struct kld_device *base, void *native,
                                  struct kld_stream **ret_stream, struct kld_error *err) {
    /* What the device's thread enqueues there would be in that thread's own. */
    if (native == (void *)cudaStreamPerThread)
        return kld_error_set(err, KLD_INVALID,
                             "cudaStreamPerThread is another stream in each thread; expected one "
                             "that was made, or the default stream");
    struct cuda_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return kld_error_set(err, KLD_NO_MEMORY, "no host memory for a stream");
    stream->base.device = base;
    stream->stream[CUDA_SMALL] = stream->stream[CUDA_LARGE] = native;
    stream->adopted = true;
    *ret_stream = &stream->base;
    return KLD_OK;
}

void cuda_stream_close(struct kld_stream *base) {
    if (!base)
        return;
    struct cuda_stream *stream = (struct cuda_stream *)base;
    struct cuda_device *device = (struct cuda_device *)base->device;
    if (!stream->adopted && !atomic_load(&device->lost)) {
        struct cuda_visit visit CUDA_LEAVES = {0};
        cuda_visit(device, &visit);
        for (int size = 0; size < CUDA_SIZES; size++)
            cudaStreamDestroy(stream->stream[size]);
        cudaGetLastError();
    }
    free(stream);
}

/* What comes behind a large job stays on that job's stream until nothing is in flight: a small one
 * that waited elsewhere could hold up those of others. */
void cuda_stream_choose(struct cuda_flight *flight, uint64_t bytes) {
    const struct cuda_flight *before = flight->stream->newest;
    flight->size = bytes > CUDA_LARGE_BYTES || (before && before->size == CUDA_LARGE) ? CUDA_LARGE
                                                                                      : CUDA_SMALL;
}

cudaError_t cuda_stream_enter(const struct cuda_flight *flight) {
    const struct cuda_flight *before = flight->stream->newest;
    if (!before || before->size == flight->size || flight->stream->adopted)
        return cudaSuccess;
    return cudaStreamWaitEvent(cuda_stream_of(flight), before->mark[MARK_END], 0);
}

/* What is enqueued in a stream that is captured does not run, and what is allocated there is the
 * graph's. The default stream says so while one that waits for it is captured: to this question, of
 * all, without an end of that capture. */
cudaError_t cuda_stream_captured(const struct cuda_flight *flight) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (!flight->stream->adopted)
        return cudaSuccess;
    cudaError_t error = cudaStreamIsCapturing(cuda_stream_of(flight), &status);
    return error || status == cudaStreamCaptureStatusNone ? error
                                                          : cudaErrorStreamCaptureUnsupported;
}

cudaStream_t cuda_stream_of(const struct cuda_flight *flight) {
    return flight->stream->stream[flight->size];
}
