/* fake_device.c - the worker tests' double of a back end. One thread completes all jobs in order of
 * submission, which is in particular the order within each stream. */
#include "tests/unit/server/worker/fake_device.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

struct fake_memory {
    struct kld_memory head;
    atomic_int jobs; /* that name it now */
    bool space;
    atomic_ullong grown_bytes; /* of a space: that have memory */
    atomic_int pieces;
};
struct fake_stream {
    struct kld_stream head;
    atomic_int jobs;
};
struct fake_event {
    struct kld_gpu_event head;
    atomic_int jobs;
    struct fake_memory *memory; /* of a fence; else NULL */
    _Atomic uint32_t *word;
};

static struct fake_device *fake_of(struct kld_device *device) {
    return (struct fake_device *)device;
}

static void nap(int us) {
    if (us == 0)
        return;
    struct timespec time = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000L};
    nanosleep(&time, NULL);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void count_memory(struct kld_memory *memory, int amount) {
    if (memory)
        atomic_fetch_add(&((struct fake_memory *)memory)->jobs, amount);
}

static void count_event(struct kld_gpu_event *event, int amount) {
    if (event)
        atomic_fetch_add(&((struct fake_event *)event)->jobs, amount);
}

/* A device that is lost writes no more. */
static void write_number(const struct kld_job *job) {
    const struct fake_event *event = (const struct fake_event *)job->record;
    if (event && event->word && job->status != KLD_DEVICE_LOST)
        atomic_store(event->word, job->record_number);
}

static void count_job(struct kld_job *job, int amount) {
    count_event(job->wait, amount);
    count_event(job->record, amount);
    if (job->kind == KLD_JOB_COPY) {
        count_memory(job->copy_to.memory, amount);
        count_memory(job->copy_from.memory, amount);
        return;
    }
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        count_memory(job->place[slot].memory, amount);
}

static bool has_memory(const struct kld_place *place, uint64_t bytes) {
    const struct fake_memory *memory = (const struct fake_memory *)place->memory;
    return !memory || !memory->space ||
           place->offset_bytes + bytes <= atomic_load(&memory->grown_bytes);
}

static void check_memory(struct fake_device *fake, const struct kld_job *job) {
    bool good = job->kind != KLD_JOB_COPY || (has_memory(&job->copy_to, job->copy_bytes) &&
                                              has_memory(&job->copy_from, job->copy_bytes));
    for (int slot = 0; slot < KLD_SLOT_COUNT && job->kind == KLD_JOB_OP; slot++)
        good = good && has_memory(&job->place[slot], job->geometry.slot[slot].span_bytes);
    if (!good)
        atomic_store(&fake->order_broken, 1);
}

static void run(struct fake_device *fake, struct kld_job *job) {
    bool directly = atomic_load(&fake->launches_directly);
    uint64_t started_ns = now_ns();
    if (!directly)
        job->launch_ns = started_ns;
    atomic_fetch_add(&fake->jobs_started, 1);
    if (job->launched && !atomic_load(&fake->fail_launch) && !directly)
        job->launched(job);
    while (atomic_load(&fake->hold))
        nap(200);
    nap(atomic_load(&fake->job_us));
    job->status = (enum kld_status)atomic_load(&fake->fail_job);
    if (job->status)
        kld_error_set(&job->error, job->status, "the double was told to fail");
    else if (job->kind == KLD_JOB_OP && job->geometry.scalar)
        job->loss = FAKE_LOSS;
    job->kernel_ns = now_ns() - started_ns;
    job->bytes = 1000;
    struct fake_stream *stream = (struct fake_stream *)(uintptr_t)job->backend_private[0];
    write_number(job);
    count_job(job, -1);
    atomic_fetch_sub(&stream->jobs, 1);
    atomic_fetch_add(&fake->jobs_done, 1);
    pthread_mutex_lock(&fake->telling); /* what ended before is told before */
    pthread_mutex_lock(&fake->lock);
    bool watched = fake->watched;
    if (watched) {
        job->next = NULL;
        *fake->ended_last = job;
        fake->ended_last = &job->next;
    }
    pthread_mutex_unlock(&fake->lock);
    if (!watched)
        job->done(job);
    pthread_mutex_unlock(&fake->telling);
    atomic_fetch_add(&fake->jobs_told, 1);
}

/* In the worker's thread: a test may hold that in a signal's handler, but not while it has this
 * lock; so jobs_submitted says what is queued. */
static void lock_unheld(struct fake_device *fake, sigset_t *ret_before) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, ret_before);
    pthread_mutex_lock(&fake->lock);
}

static void unlock_unheld(struct fake_device *fake, const sigset_t *before) {
    pthread_mutex_unlock(&fake->lock);
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

static struct kld_job *take(struct fake_device *fake) { /* under the lock */
    struct kld_job *job = fake->first;
    if (job)
        fake->first = job->next;
    if (!fake->first)
        fake->last = &fake->first;
    return job;
}

static void run_polled(struct fake_device *fake) {
    struct kld_job *job;
    do {
        pthread_mutex_lock(&fake->lock);
        job = take(fake);
        pthread_mutex_unlock(&fake->lock);
        if (job)
            run(fake, job);
    } while (job);
}

/* While somebody polls, jobs end in its thread. */
static void poll_device(struct kld_device *device, bool more) {
    struct fake_device *fake = fake_of(device);
    atomic_fetch_add(&fake->polls, 1);
    if (atomic_load(&fake->when_polled))
        run_polled(fake);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_mutex_lock(&fake->telling);
    pthread_mutex_lock(&fake->lock);
    fake->watched = more;
    struct kld_job *next, *job = fake->ended;
    fake->ended = NULL;
    fake->ended_last = &fake->ended;
    pthread_mutex_unlock(&fake->lock);
    for (; job; job = next) {
        next = job->next;
        job->done(job);
    }
    pthread_mutex_unlock(&fake->telling);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void *thread_main(void *argument) {
    struct fake_device *fake = argument;
    pthread_mutex_lock(&fake->lock);
    for (;;) {
        while ((!fake->first || atomic_load(&fake->when_polled)) && !fake->ending)
            pthread_cond_wait(&fake->more, &fake->lock);
        struct kld_job *job = take(fake);
        if (!job)
            break;
        pthread_mutex_unlock(&fake->lock);
        run(fake, job);
        pthread_mutex_lock(&fake->lock);
    }
    pthread_mutex_unlock(&fake->lock);
    return NULL;
}

void fake_device_init(struct fake_device *fake) {
    memset(fake, 0, sizeof *fake);
    fake->head.backend = &fake_backend;
    strcpy(fake->head.info.backend, "fake");
    strcpy(fake->head.info.name, "a double");
    memset(fake->head.info.uuid, 7, sizeof fake->head.info.uuid);
    fake->head.info.pool_bytes_max = 1 << 30;
    fake->head.info.imports_cuda_ipc = true;
    fake->head.info.offloads = true;
    fake->last = &fake->first;
    fake->ended_last = &fake->ended;
    pthread_mutex_init(&fake->lock, NULL);
    pthread_mutex_init(&fake->telling, NULL);
    pthread_cond_init(&fake->more, NULL);
    pthread_create(&fake->thread, NULL, thread_main, fake);
}

static void device_close(struct kld_device *device) {
    struct fake_device *fake = fake_of(device);
    pthread_mutex_lock(&fake->lock);
    fake->ending = true;
    pthread_cond_signal(&fake->more);
    pthread_mutex_unlock(&fake->lock);
    pthread_join(fake->thread, NULL);
    pthread_cond_destroy(&fake->more);
    pthread_mutex_destroy(&fake->telling);
    pthread_mutex_destroy(&fake->lock);
}

static enum kld_status call(struct fake_device *fake, struct kld_error *err) {
    atomic_fetch_add(&fake->calls, 1);
    while (atomic_load(&fake->hold_memory))
        nap(200);
    if (atomic_load(&fake->memory_us))
        nap(atomic_load(&fake->memory_us));
    int left = atomic_load(&fake->fail_call);
    while (left > 0 && !atomic_compare_exchange_weak(&fake->fail_call, &left, left - 1))
        ;
    if (left != 1 && !atomic_load(&fake->fail_all))
        return KLD_OK;
    enum kld_status status = (enum kld_status)atomic_load(&fake->fail_status);
    return kld_error_set(err, status, "the double was told to fail");
}

static enum kld_status memory_new(struct kld_device *device, uint64_t bytes,
                                  struct kld_memory **ret_memory, struct kld_error *err) {
    enum kld_status status = call(fake_of(device), err);
    if (status)
        return status;
    struct fake_memory *memory = calloc(1, sizeof *memory);
    memory->head.device = device;
    memory->head.bytes = bytes;
    atomic_fetch_add(&fake_of(device)->memories, 1);
    *ret_memory = &memory->head;
    return KLD_OK;
}

static enum kld_status memory_map(struct kld_device *device, int fd, uint64_t bytes,
                                  struct kld_memory **ret_memory, struct kld_error *err) {
    enum kld_status status = memory_new(device, bytes, ret_memory, err);
    if (status)
        return status;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (*ret_memory)->host = at == MAP_FAILED ? NULL : at;
    (*ret_memory)->pinned = !atomic_load(&fake_of(device)->cannot_pin);
    return KLD_OK;
}

static enum kld_status memory_wrap(struct kld_device *device, void *address, uint64_t bytes,
                                   struct kld_memory **ret_memory, struct kld_error *err) {
    (void)address;
    return memory_new(device, bytes, ret_memory, err);
}

static enum kld_status memory_import_ipc(struct kld_device *device, const uint8_t handle[64],
                                         uint64_t base_bytes, uint64_t offset_bytes, uint64_t bytes,
                                         struct kld_memory **ret_memory, struct kld_error *err) {
    (void)handle, (void)base_bytes, (void)offset_bytes;
    return memory_new(device, bytes, ret_memory, err);
}

static enum kld_status memory_free(struct kld_memory *memory) {
    if (!memory)
        return KLD_OK;
    struct fake_device *fake = fake_of(memory->device);
    if (atomic_load(&((struct fake_memory *)memory)->jobs) != 0)
        atomic_store(&fake->order_broken, 1);
    atomic_fetch_sub(&fake->memories, 1);
    atomic_fetch_sub(&fake->pieces, atomic_load(&((struct fake_memory *)memory)->pieces));
    if (memory->host)
        munmap(memory->host, memory->bytes);
    free(memory);
    return atomic_load(&fake->stays_pinned) ? KLD_DEVICE_LOST : KLD_OK;
}

static enum kld_status memory_import_fd(struct kld_device *device, int fd, uint64_t base_bytes,
                                        uint64_t offset_bytes, uint64_t bytes,
                                        struct kld_memory **ret_memory, struct kld_error *err) {
    (void)fd, (void)base_bytes, (void)offset_bytes;
    return memory_new(device, bytes, ret_memory, err);
}

static enum kld_status memory_reserve(struct kld_device *device, uint64_t bytes,
                                      struct kld_memory **ret_memory, struct kld_error *err) {
    enum kld_status status = memory_new(device, bytes, ret_memory, err);
    if (!status)
        ((struct fake_memory *)*ret_memory)->space = true;
    return status;
}

static enum kld_status memory_grow_fd(struct kld_memory *memory, int fd, uint64_t offset_bytes,
                                      uint64_t bytes, struct kld_error *err) {
    struct fake_memory *space = (struct fake_memory *)memory;
    enum kld_status status = call(fake_of(memory->device), err);
    if (status)
        return status;
    if (fd < 0 || !space->space || offset_bytes != atomic_load(&space->grown_bytes) ||
        offset_bytes + bytes > memory->bytes)
        atomic_store(&fake_of(memory->device)->order_broken, 1);
    atomic_fetch_add(&space->grown_bytes, bytes);
    atomic_fetch_add(&space->pieces, 1);
    atomic_fetch_add(&fake_of(memory->device)->pieces, 1);
    return KLD_OK;
}

static enum kld_status event_import(struct kld_device *device, const uint8_t handle[64],
                                    struct kld_gpu_event **ret_event, struct kld_error *err) {
    (void)handle;
    enum kld_status status = call(fake_of(device), err);
    if (status)
        return status;
    struct fake_event *event = calloc(1, sizeof *event);
    event->head.device = device;
    atomic_fetch_add(&fake_of(device)->events, 1);
    *ret_event = &event->head;
    return KLD_OK;
}

static enum kld_status event_create(struct kld_device *device, struct kld_gpu_event **ret_event,
                                    uint8_t ret_handle[64], struct kld_error *err) {
    memset(ret_handle, 0x5a, 64);
    return event_import(device, ret_handle, ret_event, err);
}

/* The memory must stay as if a job named it. */
static enum kld_status event_create_fence(struct kld_device *device, struct kld_memory *memory,
                                          uint64_t offset_bytes, struct kld_gpu_event **ret_event,
                                          struct kld_error *err) {
    enum kld_status status = event_import(device, NULL, ret_event, err);
    if (status)
        return status;
    struct fake_event *event = (struct fake_event *)*ret_event;
    event->memory = (struct fake_memory *)memory;
    event->word = (_Atomic uint32_t *)(void *)((char *)memory->host + offset_bytes);
    count_memory(memory, 1);
    atomic_store(event->word, 0);
    return KLD_OK;
}

static void event_free(struct kld_gpu_event *event) {
    if (!event)
        return;
    struct fake_device *fake = fake_of(event->device);
    count_memory((struct kld_memory *)((struct fake_event *)event)->memory, -1);
    if (atomic_load(&((struct fake_event *)event)->jobs) != 0)
        atomic_store(&fake->order_broken, 1);
    atomic_fetch_sub(&fake->events, 1);
    free(event);
}

static enum kld_status stream_open(struct kld_device *device,
                                   const struct kld_stream_options *options,
                                   struct kld_stream **ret_stream, struct kld_error *err) {
    enum kld_status status = call(fake_of(device), err);
    if (status)
        return status;
    struct fake_stream *stream = calloc(1, sizeof *stream);
    stream->head.device = device;
    atomic_store(&fake_of(device)->last_priority, options->priority);
    atomic_store(&fake_of(device)->last_owner, options->owner);
    atomic_fetch_add(&fake_of(device)->streams, 1);
    *ret_stream = &stream->head;
    return KLD_OK;
}

static void stream_close(struct kld_stream *stream) {
    if (!stream)
        return;
    struct fake_device *fake = fake_of(stream->device);
    if (atomic_load(&((struct fake_stream *)stream)->jobs) != 0)
        atomic_store(&fake->order_broken, 1);
    atomic_fetch_sub(&fake->streams, 1);
    free(stream);
}

static bool submit(struct kld_stream *stream, struct kld_job *job) {
    struct fake_device *fake = fake_of(stream->device);
    job->next = NULL;
    job->backend_private[0] = (uint64_t)(uintptr_t)stream;
    count_job(job, 1);
    check_memory(fake, job);
    atomic_fetch_add(&((struct fake_stream *)stream)->jobs, 1);
    bool directly = atomic_load(&fake->launches_directly);
    if (directly)
        job->launch_ns = now_ns();
    sigset_t before;
    lock_unheld(fake, &before);
    atomic_fetch_add(&fake->jobs_submitted, 1);
    *fake->last = job;
    fake->last = &job->next;
    if (!atomic_load(&fake->when_polled))
        pthread_cond_signal(&fake->more);
    unlock_unheld(fake, &before);
    return directly;
}

static enum kld_job_stage stage(struct kld_device *device, const struct kld_job *job) {
    struct fake_device *fake = fake_of(device);
    atomic_fetch_add(&fake->asked, 1);
    if (fake->stage_of)
        return fake->stage_of(job);
    return (enum kld_job_stage)atomic_load(job->wait ? &fake->stage : &fake->stage_plain);
}

static bool handles_unread(struct kld_device *device) {
    return atomic_load(&fake_of(device)->handles_unread);
}

static bool is_dead(struct kld_device *device) { return atomic_load(&fake_of(device)->dead); }

static enum kld_status check(struct kld_device *device, struct kld_error *err) {
    atomic_fetch_add(&fake_of(device)->checks, 1);
    return is_dead(device) ? kld_error_set(err, KLD_DEVICE_LOST, "dead") : KLD_OK;
}

static uint64_t pool_bytes(struct kld_device *device) { return 0; }

static bool reaches(struct kld_device *device, const uint8_t uuid[16]) {
    return atomic_load(&((struct fake_device *)device)->peers) && uuid[0] == 9;
}

const struct kld_backend fake_backend = {
    .name = "fake",
    .device_close = device_close,
    .memory_map = memory_map,
    .memory_wrap = memory_wrap,
    .memory_import_ipc = memory_import_ipc,
    .memory_import_fd = memory_import_fd,
    .memory_reserve = memory_reserve,
    .memory_grow_fd = memory_grow_fd,
    .reaches = reaches,
    .handles_unread = handles_unread,
    .memory_alloc = memory_new,
    .memory_free = memory_free,
    .stream_open = stream_open,
    .event_import = event_import,
    .event_create = event_create,
    .event_create_fence = event_create_fence,
    .event_free = event_free,
    .stream_close = stream_close,
    .submit = submit,
    .poll = poll_device,
    .stage = stage,
    .is_dead = is_dead,
    .check = check,
    .pool_bytes = pool_bytes,
};
