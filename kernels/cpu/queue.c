/* queue.c - streams of jobs and the thread that works on them: first in, first out within a
 * stream; owners of streams take turns, and so do the streams of one. It does not compute (run.c
 * does).
 * kld_cpu_submit() and kld_cpu_poll() run in a caller's thread, kld_cpu_device_main() is the device
 * thread. */
#include <stdlib.h>

#include "kernels/cpu/copy.h"
#include "kernels/cpu/device.h"

/* What a caller that polls runs itself: some 10 us at most, less than to wake a thread and to be
 * woken by it. */
#define SMALL_ELEMENTS 2048 /* a row counts as ROW_ELEMENTS more: [1024,1] takes 80 us */
#define ROW_ELEMENTS 8
#define SMALL_CLASSES 1024
#define SMALL_SPAN_BYTES (64 << 10) /* all tensors, with gaps: new pages cost time */
#define SMALL_COPY_BYTES (32 << 10)
#define STREAMED_COPY_BYTES (1 << 20)
#define STREAMED_BUFFER_BYTES (8 << 20) /* what is this large does not stay in a cache */
#define SMALL_NS 200000 /* of small jobs in one poll(); then the thread takes over */

/* Under the lock; NULL: no memory. */
static struct cpu_owner *find_owner(struct cpu_device *device, uint64_t number) {
    struct cpu_owner *owner;
    LIST_FOREACH(owner, &device->owners, of_device)
    if (owner->number == number)
        return owner;
    owner = calloc(1, sizeof *owner);
    if (!owner)
        return NULL;
    owner->number = number;
    STAILQ_INIT(&owner->ready);
    LIST_INSERT_HEAD(&device->owners, owner, of_device);
    return owner;
}

enum kld_status kld_cpu_stream_open(struct kld_device *head,
                                    const struct kld_stream_options *options,
                                    struct kld_stream **ret_stream, struct kld_error *err) {
    struct cpu_device *device = (struct cpu_device *)head;
    struct cpu_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory for a stream");
    stream->head.device = head;
    stream->last = &stream->first;
    pthread_mutex_lock(&device->lock);
    struct cpu_owner *owner = find_owner(device, options ? options->owner : 0);
    if (owner) {
        stream->owner = owner;
        LIST_INSERT_HEAD(&owner->streams, stream, of_owner);
    }
    pthread_mutex_unlock(&device->lock);
    if (!owner) {
        free(stream);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory for a stream's owner");
    }
    *ret_stream = &stream->head;
    return KLD_OK;
}

void kld_cpu_stream_close(struct kld_stream *head) {
    if (!head)
        return;
    struct cpu_stream *stream = (struct cpu_stream *)head;
    struct cpu_device *device = (struct cpu_device *)head->device;
    struct cpu_owner *owner = stream->owner;
    pthread_mutex_lock(&device->lock);
    LIST_REMOVE(stream, of_owner);
    if (LIST_EMPTY(&owner->streams)) { /* and so none is ready */
        LIST_REMOVE(owner, of_device);
        free(owner);
    }
    pthread_mutex_unlock(&device->lock);
    free(stream);
}

static bool is_small(const struct kld_job *job) {
    const struct kld_geometry *geometry = &job->geometry;
    uint64_t span = 0;
    if (job->kind == KLD_JOB_COPY)
        return job->copy_bytes <= SMALL_COPY_BYTES;
    if (geometry->rows > SMALL_ELEMENTS || geometry->classes > SMALL_CLASSES ||
        geometry->rows * (geometry->classes + ROW_ELEMENTS) > SMALL_ELEMENTS)
        return false;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (geometry->slot[slot].span_bytes > SMALL_SPAN_BYTES - span)
            return false;
        span += geometry->slot[slot].span_bytes;
    }
    return true;
}

bool kld_cpu_submit(struct kld_stream *head, struct kld_job *job) {
    struct cpu_stream *stream = (struct cpu_stream *)head;
    struct cpu_device *device = (struct cpu_device *)head->device;
    job->next = NULL;
    pthread_mutex_lock(&device->lock);
    if (!stream->first) {
        if (STAILQ_EMPTY(&stream->owner->ready))
            STAILQ_INSERT_TAIL(&device->ready, stream->owner, in_ready);
        STAILQ_INSERT_TAIL(&stream->owner->ready, stream, in_ready);
    }
    *stream->last = job;
    stream->last = &job->next;
    atomic_fetch_add_explicit(&device->submitted, 1, memory_order_release);
    if (device->sleeping && !(device->polled && is_small(job)))
        pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->lock);
    return false;
}

static enum kld_status no_events(struct kld_error *err) {
    return kld_error_set(err, KLD_UNIMPLEMENTED,
                         "events are a GPU's; this server computes on the CPU, where DONE tells "
                         "that the work has ended");
}

enum kld_status kld_cpu_event_import(struct kld_device *device, const uint8_t handle[64],
                                     struct kld_gpu_event **ret_event, struct kld_error *err) {
    return no_events(err);
}

enum kld_status kld_cpu_event_create(struct kld_device *device, struct kld_gpu_event **ret_event,
                                     uint8_t ret_handle[64], struct kld_error *err) {
    return no_events(err);
}

void kld_cpu_event_free(struct kld_gpu_event *event) {} /* there is none */

/* The job whose turn it is; NULL if there is none. Under the lock, as the next. */
static struct kld_job *next_job(const struct cpu_device *device) {
    const struct cpu_owner *owner = STAILQ_FIRST(&device->ready);
    return owner ? STAILQ_FIRST(&owner->ready)->first : NULL;
}

/* The same, its stream put behind the owner's others and the owner behind the others. */
static struct kld_job *take_job(struct cpu_device *device) {
    struct cpu_owner *owner = STAILQ_FIRST(&device->ready);
    if (!owner)
        return NULL;
    struct cpu_stream *stream = STAILQ_FIRST(&owner->ready);
    struct kld_job *job = stream->first;
    STAILQ_REMOVE_HEAD(&device->ready, in_ready);
    STAILQ_REMOVE_HEAD(&owner->ready, in_ready);
    stream->first = job->next;
    if (stream->first)
        STAILQ_INSERT_TAIL(&owner->ready, stream, in_ready);
    else
        stream->last = &stream->first;
    if (!STAILQ_EMPTY(&owner->ready))
        STAILQ_INSERT_TAIL(&device->ready, owner, in_ready);
    return job;
}

/* Polls for a submit() after the `seen`-th, for spin_us at most. */
static void poll_submitted(struct cpu_device *device, uint64_t seen) {
    if (device->spin_us == 0)
        return;
    uint64_t until = kld_cpu_now_ns() + (uint64_t)device->spin_us * 1000;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(&device->submitted, memory_order_acquire) != seen)
                return;
            kld_cpu_relax();
        }
    } while (kld_cpu_poll_on(until));
}

static struct kld_job *wait_job(struct cpu_device *device) {
    pthread_mutex_lock(&device->lock);
    struct kld_job *job = take_job(device);
    if (!job && !device->stop) {
        uint64_t seen = atomic_load_explicit(&device->submitted, memory_order_relaxed);
        pthread_mutex_unlock(&device->lock);
        poll_submitted(device, seen);
        pthread_mutex_lock(&device->lock);
        /* What a caller is at work on comes before all that is left. */
        while (device->helped || (!(job = take_job(device)) && !device->stop)) {
            device->sleeping = true;
            pthread_cond_wait(&device->wake, &device->lock);
            device->sleeping = false;
        }
    }
    pthread_mutex_unlock(&device->lock);
    return job;
}

/* Pieces of what fills a large buffer of the pool. Other memory may be a ring, as the gateway's
 * staging is, whose reader is to find it in the caches. */
static bool is_streaming(const struct kld_job *job) {
    const struct cpu_memory *to = (const struct cpu_memory *)job->copy_to.memory;
    return job->copy_bytes >= STREAMED_COPY_BYTES && to->pool_bytes >= STREAMED_BUFFER_BYTES;
}

static void run_job(struct cpu_device *device, struct kld_job *job) {
    job->status = KLD_OK;
    job->error.status = KLD_OK;
    job->error.text[0] = '\0';
    job->loss = 0;
    job->copy_ns = job->kernel_ns = job->bytes = 0;
    if (job->kind == KLD_JOB_OP && atomic_exchange(&device->fail_next, false)) {
        job->launch_ns = kld_cpu_now_ns();
        job->status =
            kld_error_set(&job->error, KLD_DEVICE_LOST, "the device failed, as a test asked");
        job->done(job);
        return;
    }
    pthread_mutex_lock(&device->team_lock);
    job->launch_ns = kld_cpu_now_ns();
    if (job->kind == KLD_JOB_COPY)
        kld_cpu_run_copy(&device->team, job, is_streaming(job));
    else
        kld_cpu_run_op(&device->run, &device->team, job);
    uint64_t spent_ns = kld_cpu_now_ns() - job->launch_ns;
    pthread_mutex_unlock(&device->team_lock);
    *(job->kind == KLD_JOB_COPY ? &job->copy_ns : &job->kernel_ns) = spent_ns;
    job->done(job); /* the job may be gone after this */
}

/* Runs what comes next as long as it is small and the thread sleeps, for SMALL_NS at most. The
 * thread may be woken meanwhile, by a larger job: it takes none before the one in hand has ended
 * (device->helped), so that the jobs of a stream keep their order. Holds no lock while a job runs,
 * since its done() may submit the next one. */
void kld_cpu_poll(struct kld_device *head, bool more) {
    struct cpu_device *device = (struct cpu_device *)head;
    uint64_t until = kld_cpu_now_ns() + SMALL_NS;
    bool late = !more;
    pthread_mutex_lock(&device->lock);
    while (!late && device->sleeping && !device->helped && next_job(device) &&
           is_small(next_job(device))) {
        struct kld_job *job = take_job(device);
        device->helped = true;
        pthread_mutex_unlock(&device->lock);
        run_job(device, job);
        late = kld_cpu_now_ns() >= until;
        pthread_mutex_lock(&device->lock);
        device->helped = false;
    }
    device->polled = more;
    bool left = next_job(device) && (late || !is_small(next_job(device)));
    if (device->sleeping && (left || device->stop))
        pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->lock);
}

void kld_cpu_fail_next(struct kld_device *device) {
    atomic_store(&((struct cpu_device *)device)->fail_next, true);
}

/* Ends when stop is set and nothing waits any more. */
void *kld_cpu_device_main(void *argument) {
    struct cpu_device *device = argument;
    struct kld_job *job;
    while ((job = wait_job(device)))
        run_job(device, job);
    return NULL;
}
