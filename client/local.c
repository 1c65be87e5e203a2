/* local.c - a connection without a server: the back ends of kernels/ in the caller's own process.
 * Knows only kernels/backend.h; which back ends there are is their list's business. The thread that
 * owns the connection, but for job_done(), which runs on the device's thread and hands finished
 * calls over under `lock`. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/connection.h"
#include "kernels/backend.h"

#define STREAMS_MAX 128 /* PyTorch, for one, has up to 33 of a priority */
#define SPIN_US 20      /* the device thread polls so long before it sleeps */
#define TAG_FINISHED KLD_TAG_TRANSPORT

struct local_call {
    struct kld_call base;
    struct kld_job job;                         /* the device's between submit() and job_done() */
    struct kld_memory *wrapped[KLD_SLOT_COUNT]; /* plain pointers; owned */
    struct local_connection *owner;             /* for job_done() */
    struct local_call *next_finished, *next_launched; /* under lock */
    bool told; /* ended early: the device has the work, and the job goes on */
};

struct local_region {
    struct kld_region base;
    struct kld_memory *memory; /* owned; NULL once the device is closed */
    void *pages;               /* anonymous memory of ours; NULL otherwise */
};

struct local_connection {
    struct kld_connection base;
    const struct kld_backend *backend;
    struct kld_device *device;
    struct kld_stream *streams[STREAMS_MAX]; /* opened when first used */
    enum kld_priority priorities[STREAMS_MAX];
    struct kld_call_list running;
    uint64_t opened_ns;
    struct kld_server_stats stats; /* the totals */
    int finished_fd;               /* eventfd: `finished` is not empty */
    pthread_mutex_t lock;
    struct local_call *finished, *finished_last; /* under lock */
    struct local_call *launched;                 /* under lock: early ones to be told, any order */
    bool polling;     /* `poller` is inside local_poll(); under lock, as poller */
    pthread_t poller; /* and takes in by itself what it hears there */
};

static struct local_connection *local_of(struct kld_connection *connection) {
    return (struct local_connection *)connection;
}

static struct local_connection *owner_of(const struct kld_region *region) {
    return local_of(region->connection);
}

/* ---- Completion -------------------------------------------------------------------------------
 */

/* Under the lock: once that is free, the connection may be closed. Not for what local_poll() hears
 * of itself. */
static void notify(struct local_connection *local) {
    if (local->polling && pthread_equal(local->poller, pthread_self()))
        return;
    kld_eventfd_raise(local->finished_fd);
}

static void job_launched(struct kld_job *job) {
    struct local_call *call = job->owner;
    struct local_connection *local = call->owner;
    pthread_mutex_lock(&local->lock);
    call->next_launched = local->launched;
    local->launched = call;
    notify(local);
    pthread_mutex_unlock(&local->lock);
}

static void job_done(struct kld_job *job) {
    struct local_call *call = job->owner;
    struct local_connection *local = call->owner;
    pthread_mutex_lock(&local->lock);
    call->next_finished = NULL;
    bool first = !local->finished;
    if (first)
        local->finished = call;
    else
        local->finished_last->next_finished = call;
    local->finished_last = call;
    if (first)
        notify(local);
    pthread_mutex_unlock(&local->lock);
}

static void call_free_memory(struct local_connection *local, struct local_call *call) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (call->wrapped[slot])
            local->backend->memory_free(call->wrapped[slot]);
        call->wrapped[slot] = NULL;
    }
}

static void call_finish(struct local_connection *local, struct local_call *call) {
    const struct kld_job *job = &call->job;
    struct kld_result *result = &call->base.result;
    result->loss = job->loss;
    result->scalar = job->kind == KLD_JOB_OP && call->base.geometry.scalar;
    result->queue_ns =
        job->launch_ns > call->base.started_ns ? job->launch_ns - call->base.started_ns : 0;
    result->copy_ns = job->copy_ns;
    result->kernel_ns = job->kernel_ns;
    result->bytes = job->bytes;
    result->attempts = 1;
    local->stats.requests_total++;
    local->stats.errors_total += job->status != KLD_OK;
    local->stats.kernel_ns_total += job->kernel_ns;
    local->stats.bytes_total += job->bytes;

    struct kld_error error = job->error;
    enum kld_status status = job->status;
    /* A deadline is only told here, when the device has let go of the caller's memory. */
    if (!status && kld_now_ns() > call->base.deadline_ns)
        status = kld_error_set(&error, KLD_DEADLINE, "deadline passed while the request ran");
    call_free_memory(local, call);
    kld_call_unlink(&call->base);
    kld_call_drop_regions(&call->base);
    if (!call->told)
        kld_call_end(&local->base, &call->base, status, &error);
    kld_call_release(&local->base, &call->base);
}

/* An early answer: the device has the work, behind which its stream goes on. */
static void call_tell(struct local_connection *local, struct local_call *call) {
    call->told = true;
    call->base.result.attempts = 1;
    kld_call_end(&local->base, &call->base, KLD_OK, NULL);
}

static void take_in(struct local_connection *local, bool notified) {
    pthread_mutex_lock(&local->lock);
    if (notified)
        kld_counter_drain(local->finished_fd);
    local->polling = false;
    struct local_call *call = local->finished, *launched = local->launched;
    local->finished = local->finished_last = local->launched = NULL;
    pthread_mutex_unlock(&local->lock);
    for (; launched; launched = launched->next_launched) /* before any of them is released */
        call_tell(local, launched);
    while (call) {
        struct local_call *next = call->next_finished;
        call_finish(local, call);
        call = next;
    }
}

static void local_event(struct kld_connection *connection, uint64_t tag, uint32_t events) {
    take_in(local_of(connection), true);
}

/* ---- Opening and closing ----------------------------------------------------------------------
 */

/* "", "cpu", "cuda:1". */
static enum kld_status parse_device(const char *text, char ret_name[16], uint32_t *ret_device,
                                    struct kld_error *err) {
    size_t length = strcspn(text, ":");
    *ret_device = 0;
    if (length >= 16)
        return kld_error_set(err, KLD_INVALID,
                             "no such back end; expected local:, local:cpu, "
                             "local:cuda or local:cuda:N");
    snprintf(ret_name, 16, "%.*s", (int)length, length ? text : "auto");
    if (length == 0)
        snprintf(ret_name, 16, "auto");
    if (text[length] == '\0')
        return KLD_OK;
    char *end;
    unsigned long number = strtoul(text + length + 1, &end, 10);
    if (text[length + 1] < '0' || text[length + 1] > '9' || *end || number > 1023)
        return kld_error_set(err, KLD_INVALID,
                             "the device of local:BACKEND:N is a number from 0 to 1023");
    *ret_device = (uint32_t)number;
    return KLD_OK;
}

static enum kld_status local_open(struct kld_connection *connection, const char *url,
                                  struct kld_error *err) {
    struct local_connection *local = local_of(connection);
    pthread_mutex_init(&local->lock, NULL);
    local->opened_ns = kld_now_ns();
    local->finished_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (local->finished_fd < 0)
        return kld_error_set(err, KLD_NO_MEMORY, "no file descriptors left for a connection");
    char name[16];
    struct kld_device_options options = {.threads = connection->options.threads,
                                         .pool_bytes_max = connection->options.pool_bytes_max,
                                         .spin_us = SPIN_US};
    enum kld_status status =
        parse_device(url + strlen(connection->transport->prefix), name, &options.device, err);
    if (!status)
        status = kld_connection_watch(connection, local->finished_fd, TAG_FINISHED, EPOLLIN, err);
    if (!status)
        status = kld_backend_find(name, &local->backend, err);
    if (!status)
        status = local->backend->device_open(&options, &local->device, err);
    connection->offloaded = !status && local->device->info.offloads;
    return status;
}

static void local_close(struct kld_connection *connection) {
    struct local_connection *local = local_of(connection);
    if (local->device && local->backend->poll)
        local->backend->poll(local->device, false); /* nobody but its own thread looks any more */
    /* The memory of running jobs is the caller's from the moment we return. */
    while (local->running.count > 0 && kld_connection_step(connection, KLD_NEVER, NULL) == KLD_OK)
        ;
    for (struct kld_region *base = connection->regions; base; base = base->next) {
        struct local_region *region = (struct local_region *)base;
        if (region->memory)
            local->backend->memory_free(region->memory);
        region->memory = NULL;
    }
    for (int i = 0; i < STREAMS_MAX; i++)
        if (local->streams[i])
            local->backend->stream_close(local->streams[i]);
    if (local->device)
        local->backend->device_close(local->device);
    if (local->finished_fd >= 0)
        close(local->finished_fd);
    pthread_mutex_destroy(&local->lock);
}

/* ---- Regions ----------------------------------------------------------------------------------
 */

static enum kld_status local_region_create(struct kld_region *base, struct kld_error *err) {
    struct local_region *region = (struct local_region *)base;
    struct local_connection *local = owner_of(base);
    void *pages =
        mmap(NULL, base->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a region of %llu bytes",
                             (unsigned long long)base->bytes);
    region->pages = base->data = pages;
    return local->backend->memory_wrap(local->device, pages, base->bytes, &region->memory, err);
}

static enum kld_status from_memory(enum kld_status status, struct local_region *region) {
    if (!status)
        region->base.data = region->memory->host;
    return status;
}

static enum kld_status local_region_import_memfd(struct kld_region *base, int fd,
                                                 struct kld_error *err) {
    struct local_region *region = (struct local_region *)base;
    struct local_connection *local = owner_of(base);
    return from_memory(
        local->backend->memory_map(local->device, fd, base->bytes, &region->memory, err), region);
}

static void local_poll(struct kld_connection *connection, bool more);

/* What was dropped behind an early answer goes once somebody has seen its end. */
static enum kld_status local_region_create_pool(struct kld_region *base, struct kld_error *err) {
    struct local_region *region = (struct local_region *)base;
    struct local_connection *local = owner_of(base);
    enum kld_status status =
        local->backend->memory_alloc(local->device, base->bytes, &region->memory, err);
    if (status == KLD_NO_MEMORY && local->running.count > 0) {
        local_poll(&local->base, false);
        status = local->backend->memory_alloc(local->device, base->bytes, &region->memory, err);
    }
    return from_memory(status, region);
}

static void local_region_release(struct kld_region *base) {
    struct local_region *region = (struct local_region *)base;
    if (region->memory)
        owner_of(base)->backend->memory_free(region->memory);
    if (region->pages)
        munmap(region->pages, base->bytes);
    kld_region_free(base);
}

/* ---- Requests ---------------------------------------------------------------------------------
 */

static enum kld_status stream_of(struct local_connection *local, uint32_t number,
                                 struct kld_stream **ret_stream, struct kld_error *err) {
    struct kld_stream **stream = &local->streams[number % STREAMS_MAX];
    struct kld_stream_options options = {.priority = local->priorities[number % STREAMS_MAX]};
    enum kld_status status = KLD_OK;
    if (!*stream)
        status = local->backend->stream_open(local->device, &options, stream, err);
    *ret_stream = *stream;
    return status;
}

static enum kld_status local_stream_priority(struct kld_connection *connection, uint32_t stream,
                                             int priority, struct kld_error *err) {
    struct local_connection *local = local_of(connection);
    if (stream >= STREAMS_MAX)
        return kld_error_set(err, KLD_INVALID, "stream %u; expected a number below %d", stream,
                             STREAMS_MAX);
    if (local->streams[stream])
        return kld_error_set(err, KLD_INVALID,
                             "stream %u is in use; its priority is set before its first request",
                             stream);
    local->priorities[stream] = (enum kld_priority)priority;
    return KLD_OK;
}

/* The stream that the number had goes first, and with it all that runs there. */
static enum kld_status local_stream_adopt(struct kld_connection *connection, uint32_t stream,
                                          void *native, struct kld_error *err) {
    struct local_connection *local = local_of(connection);
    if (!local->backend->stream_adopt)
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "streams of the caller's: not with the back end '%s'",
                             local->device->info.backend);
    if (stream >= STREAMS_MAX)
        return kld_error_set(err, KLD_INVALID, "stream %u; expected a number below %d", stream,
                             STREAMS_MAX);
    enum kld_status status = KLD_OK;
    if (local->streams[stream] && local->backend->poll)
        local->backend->poll(local->device, false);
    while (local->streams[stream] && local->running.count > 0 && !status)
        status = kld_connection_step(connection, KLD_NEVER, err);
    kld_connection_waited(connection);
    struct kld_stream *adopted = NULL;
    if (!status)
        status = local->backend->stream_adopt(local->device, native, &adopted, err);
    if (status)
        return status;
    if (local->streams[stream])
        local->backend->stream_close(local->streams[stream]);
    local->streams[stream] = adopted;
    return KLD_OK;
}

static enum kld_status job_init(struct local_connection *local, struct local_call *call,
                                struct kld_error *err) {
    struct kld_job *job = &call->job;
    job->done = job_done;
    job->owner = call;
    const struct kld_copy_request *copy = &call->base.copy;
    if (copy->destination) {
        job->kind = KLD_JOB_COPY;
        job->copy_to = (struct kld_place){((struct local_region *)copy->destination)->memory,
                                          copy->destination_offset_bytes};
        job->copy_from = (struct kld_place){((struct local_region *)copy->source)->memory,
                                            copy->source_offset_bytes};
        job->copy_bytes = copy->bytes;
        return KLD_OK;
    }
    job->kind = KLD_JOB_OP;
    job->op = call->base.request.op;
    job->geometry = call->base.geometry;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_bytes *bytes = &call->base.request.bytes[slot];
        if (!job->op.tensor[slot].dtype)
            continue;
        if (bytes->region) {
            job->place[slot] = (struct kld_place){((struct local_region *)bytes->region)->memory,
                                                  bytes->offset_bytes};
            continue;
        }
        enum kld_status status = local->backend->memory_wrap(local->device, bytes->data,
                                                             job->geometry.slot[slot].span_bytes,
                                                             &call->wrapped[slot], err);
        if (status)
            return status;
        job->place[slot].memory = call->wrapped[slot];
    }
    return KLD_OK;
}

/* What is there for the host is there when the work has ended, and no sooner. */
static bool lies_on_device(const struct kld_job *job) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (job->place[slot].memory && job->place[slot].memory->host)
            return false;
    return true;
}

static enum kld_status local_submit(struct kld_connection *connection, struct kld_call *base,
                                    struct kld_error *err) {
    struct local_connection *local = local_of(connection);
    struct local_call *call = (struct local_call *)base;
    struct kld_stream *stream;
    call->owner = local;
    enum kld_status status = stream_of(
        local, base->copy.destination ? base->copy.stream : base->request.stream, &stream, err);
    if (!status)
        status = job_init(local, call, err);
    if (status) {
        call_free_memory(local, call);
        return status;
    }
    bool early = !base->copy.destination && base->request.early && lies_on_device(&call->job);
    call->job.launched = early && local->device->info.imports_cuda_ipc ? job_launched : NULL;
    kld_call_hold_regions(base);
    kld_call_append(&local->running, base);
    if (local->backend->submit(stream, &call->job) && call->job.launched)
        call_tell(local, call);
    return KLD_OK;
}

static void local_poll(struct kld_connection *connection, bool more) {
    struct local_connection *local = local_of(connection);
    if (!local->backend->poll)
        return;
    pthread_mutex_lock(&local->lock);
    local->polling = true;
    local->poller = pthread_self();
    pthread_mutex_unlock(&local->lock);
    local->backend->poll(local->device, more);
    take_in(local, false);
}

/* A job that the device has cannot be taken back: its result comes. */
static void local_cancel(struct kld_connection *connection, struct kld_call *call) {}

/* ---- Questions --------------------------------------------------------------------------------
 */

static enum kld_status local_info(struct kld_connection *connection,
                                  struct kld_server_info *ret_info, struct kld_error *err) {
    const struct local_connection *local = local_of(connection);
    memset(ret_info, 0, sizeof *ret_info);
    memcpy(ret_info->backend, local->device->info.backend, sizeof ret_info->backend);
    memcpy(ret_info->device, local->device->info.name, sizeof ret_info->device);
    ret_info->requests_max = KLD_CALLS_MAX;
    ret_info->streams_max = STREAMS_MAX;
    memcpy(ret_info->device_uuid, local->device->info.uuid, sizeof ret_info->device_uuid);
    snprintf(ret_info->version, sizeof ret_info->version, "%s", kld_version());
    return KLD_OK;
}

static enum kld_status local_ping(struct kld_connection *connection, struct kld_error *err) {
    return KLD_OK;
}

static enum kld_status local_stats(struct kld_connection *connection,
                                   struct kld_server_stats *ret_stats, struct kld_error *err) {
    const struct local_connection *local = local_of(connection);
    *ret_stats = local->stats;
    ret_stats->uptime_ns = kld_now_ns() - local->opened_ns;
    ret_stats->in_flight = local->running.count;
    ret_stats->clients = 1;
    ret_stats->regions = connection->region_count;
    for (const struct kld_region *region = connection->regions; region; region = region->next)
        ret_stats->region_bytes += region->bytes;
    ret_stats->pool_bytes = local->backend->pool_bytes(local->device);
    ret_stats->pool_bytes_max = local->device->info.pool_bytes_max;
    return KLD_OK;
}

static enum kld_status local_measure_ceiling(struct kld_connection *connection, uint64_t bytes,
                                             double *ret_read_per_s, double *ret_read_write_per_s,
                                             struct kld_error *err) {
    const struct local_connection *local = local_of(connection);
    return local->backend->measure_ceiling(local->device, bytes, ret_read_per_s,
                                           ret_read_write_per_s, err);
}

const struct kld_transport kld_transport_local = {
    .prefix = "local:",
    .name = "local",
    .connection_bytes = sizeof(struct local_connection),
    .call_bytes = sizeof(struct local_call),
    .region_bytes = sizeof(struct local_region),
    .open = local_open,
    .close = local_close,
    .info = local_info,
    .ping = local_ping,
    .region_create = local_region_create,
    .region_import_memfd = local_region_import_memfd,
    .region_create_pool = local_region_create_pool,
    .region_release = local_region_release,
    .runs_here = true,
    .stream_priority = local_stream_priority,
    .stream_adopt = local_stream_adopt,
    .submit = local_submit,
    .cancel = local_cancel,
    .poll = local_poll,
    .event = local_event,
    .stats = local_stats,
    .measure_ceiling = local_measure_ceiling,
};
