/* core.c - the life of a request: admit, launch, complete, detach, answer, count, log.
 * The only writer of a request's state. Touches no socket (session.c sends) and maps no memory
 * (region.c). Worker process, loop thread. */
#include "server/worker/core.h"

#include <inttypes.h>
#include <string.h>

#include "server/log.h"
#include "server/worker/region.h"

/* ---- Ends ------------------------------------------------------------------------------------ */

static const char *kind_name(const struct kld_request *request) {
    return request->job.kind == KLD_JOB_OP ? kld_divergence_name(request->job.op.divergence)
                                           : "copy";
}

static uint64_t queue_ns(const struct kld_request *request) {
    uint64_t launch = request->job.launch_ns;
    return launch > request->arrival_ns ? launch - request->arrival_ns : 0;
}

static void reply_done(struct kld_request *request) {
    const struct kld_job *job = &request->job;
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_DONE, request->number);
    bool scalar = job->kind == KLD_JOB_OP && job->geometry.scalar;
    frame.as_DONE.scalar = scalar;
    frame.as_DONE.loss = scalar ? job->loss : 0;
    frame.as_DONE.queue_ns = queue_ns(request);
    frame.as_DONE.copy_ns = job->copy_ns;
    frame.as_DONE.kernel_ns = job->kernel_ns;
    frame.as_DONE.bytes = job->bytes;
    kld_session_reply(request->session, &frame);
}

/* What the device did, whether or not somebody still waits for it. */
static void count_work(const struct kld_request *request) {
    struct kld_worker *worker = request->session->worker;
    struct kld_stats *stats = worker->options.stats;
    const struct kld_job *job = &request->job;
    worker->kernel_ns_total += job->kernel_ns;
    worker->bytes_total += job->bytes;
    kld_stats_add(stats, KLD_STAT_kernel_ns_total, (int64_t)job->kernel_ns);
    kld_stats_add(stats, KLD_STAT_kernel_bytes_total, (int64_t)job->bytes);
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, queue_ns(request));
    kld_stats_observe(stats, KLD_HISTOGRAM_kernel, job->kernel_ns);
    if (job->copy_ns)
        kld_stats_observe(stats, KLD_HISTOGRAM_copy, job->copy_ns);
}

/* The one place where a request is counted and logged. `status`: what its client was, or would have
 * been, told. ran: the back end is through with it, so its times are there. */
static void account(struct kld_request *request, enum kld_status status, const char *text,
                    bool ran) {
    struct kld_worker *worker = request->session->worker;
    const struct kld_job *job = &request->job;
    uint64_t total_ns = kld_worker_now_ns() - request->arrival_ns;
    worker->requests_total++;
    worker->errors_total += status != KLD_OK;
    kld_stats_request(worker->options.stats, KLD_FRONT_UNIX, status);
    kld_stats_observe(worker->options.stats, KLD_HISTOGRAM_unix_request, total_ns);
    enum kld_log_level level = status ? KLD_LOG_INFO : KLD_LOG_DEBUG;
    if (kld_log_wants(level))
        kld_log(level, "request",
                "client=\"%s\" pid=%d request=%" PRIu64 " kind=%s status=%s total_us=%" PRIu64
                " kernel_us=%" PRIu64 " bytes=%" PRIu64 "%s%s%s",
                request->session->name, (int)request->session->pid, request->number,
                kind_name(request), kld_status_name(status), total_ns / 1000,
                ran ? job->kernel_ns / 1000 : 0, ran ? job->bytes : 0, status ? " text=\"" : "",
                status ? text : "", status ? "\"" : "");
}

/* QUEUED or RUNNING -> FREE. The request was answered, or its client is gone. */
static void retire(struct kld_request *request) {
    struct kld_session *session = request->session;
    struct kld_worker *worker = session->worker;
    kld_queue_unwatch(&worker->queue, request);
    for (uint32_t i = 0; i < request->regions_count; i++)
        kld_worker_region_release(request->regions[i]);
    TAILQ_REMOVE(&session->requests, request, in_session);
    session->requests_count--;
    request->state = KLD_REQUEST_FREE;
    kld_queue_release(&worker->queue, request);
    kld_stats_add(worker->options.stats, KLD_STAT_worker_requests_in_flight, -1);
}

/* Ends what the back end does not have (any more). Afterwards *request is the pool's. */
static void finish(struct kld_request *request, enum kld_status status,
                   const struct kld_error *error, bool ran) {
    if (ran)
        count_work(request);
    if (!request->answered) {
        request->answered = true;
        request->session->requests_waited--;
        account(request, status, error->text,
                ran); /* first, so that a client sees itself counted */
        if (status == KLD_OK)
            reply_done(request);
        else
            kld_session_reply_error(request->session, request->number, error);
    }
    retire(request);
}

/* R1: the client has its answer, or is gone; memory stays pinned until the back end is through. */
static void give_up(struct kld_request *request, const struct kld_error *error) {
    if (request->answered)
        return;
    kld_stats_add(request->session->worker->options.stats, KLD_STAT_requests_detached_total, 1);
    if (request->state == KLD_REQUEST_QUEUED) {
        TAILQ_REMOVE(&request->lane->queued, request, in_lane);
        finish(request, error->status, error, false);
        return;
    }
    request->answered = true;
    request->session->requests_waited--;
    kld_queue_unwatch(&request->session->worker->queue, request);
    account(request, error->status, error->text, false);
    kld_session_reply_error(request->session, request->number, error);
}

/* ---- Launch ---------------------------------------------------------------------------------- */

static void launch(struct kld_lane *lane) {
    struct kld_worker *worker = lane->session->worker;
    while (lane->state == KLD_LANE_OPEN && lane->running < KLD_LANE_DEPTH && !worker->lost) {
        struct kld_request *request = TAILQ_FIRST(&lane->queued);
        if (!request)
            break;
        TAILQ_REMOVE(&lane->queued, request, in_lane);
        request->state = KLD_REQUEST_RUNNING;
        lane->running++;
        worker->options.backend->submit(lane->stream, &request->job);
        kld_worker_poll(worker);
    }
    if (lane->session->state == KLD_SESSION_CLOSING && lane->state == KLD_LANE_OPEN &&
        lane->running == 0)
        kld_lane_close(lane);
}

void kld_core_lane_opened(struct kld_lane *lane) {
    struct kld_worker *worker = lane->session->worker;
    if (lane->status == KLD_DEVICE_LOST) {
        kld_core_device_lost(worker, &lane->error);
        return;
    }
    while (lane->status != KLD_OK && !TAILQ_EMPTY(&lane->queued)) {
        struct kld_request *request = TAILQ_FIRST(&lane->queued);
        TAILQ_REMOVE(&lane->queued, request, in_lane);
        finish(request, lane->status, &lane->error, false);
    }
    launch(lane);
    kld_worker_progress(worker);
}

static void job_done(struct kld_job *job) {
    struct kld_request *request = job->owner;
    /* The session stays while its requests do; its worker never changes: safe on this thread. */
    kld_completions_push(&request->session->worker->completions, request);
}

void kld_core_completed(struct kld_worker *worker) {
    struct kld_request *next, *request = kld_completions_take(&worker->completions);
    for (; request && !worker->lost; request = next) {
        next = request->next;
        struct kld_lane *lane = request->lane;
        struct kld_session *session = request->session;
        if (request->job.status == KLD_DEVICE_LOST) {
            kld_core_device_lost(worker, &request->job.error);
            return;
        }
        lane->running--;
        finish(request, request->job.status, &request->job.error, true);
        launch(lane);
        kld_session_collect(session);
    }
    kld_worker_poll(worker);
    kld_worker_progress(worker);
}

/* ---- Admission ------------------------------------------------------------------------------- */

static struct kld_request *find(struct kld_session *session, uint64_t number) {
    struct kld_request *request;
    TAILQ_FOREACH(request, &session->requests, in_session)
    if (request->number == number && !request->answered)
        return request;
    return NULL;
}

static enum kld_status admit(struct kld_session *session, uint64_t number, uint32_t stream,
                             struct kld_request **ret_request, struct kld_error *err) {
    struct kld_worker *worker = session->worker;
    const struct kld_config *config = worker->options.config;
    if (worker->draining)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server is going away; connect again");
    if (stream >= config->client_streams_max)
        return kld_error_set(err, KLD_INVALID, "stream %u; expected a number below %" PRIu64,
                             stream, config->client_streams_max);
    if (find(session, number))
        return kld_error_set(err, KLD_INVALID,
                             "request number %" PRIu64 " is in flight on this connection", number);
    /* Those that it gave up do not count; of them at most KLD_LANE_DEPTH a stream still run. */
    if (session->requests_waited >= config->client_requests_max)
        return kld_error_set(err, KLD_THROTTLED,
                             "%u requests of this connection are in flight, the most allowed",
                             session->requests_waited);
    struct kld_request *request = kld_queue_acquire(&worker->queue);
    if (!request)
        return kld_error_set(err, KLD_BUSY, "%u requests are in flight, the most allowed",
                             worker->queue.in_use);
    request->session = session;
    request->number = number;
    request->lane = &session->lanes[stream];
    request->arrival_ns = kld_worker_now_ns();
    *ret_request = request;
    return KLD_OK;
}

/* From here on the request cannot fail to be admitted: FREE -> QUEUED. */
static void enter(struct kld_request *request, uint64_t timeout_ns) {
    struct kld_session *session = request->session;
    struct kld_worker *worker = session->worker;
    struct kld_lane *lane = request->lane;
    struct kld_job *job = &request->job;
    job->done = job_done;
    job->owner = request;
    job->status = KLD_OK;
    job->error.status = KLD_OK;
    job->error.text[0] = 0;
    job->loss = 0;
    job->launch_ns = job->copy_ns = job->kernel_ns = job->bytes = 0;
    request->state = KLD_REQUEST_QUEUED;
    TAILQ_INSERT_TAIL(&session->requests, request, in_session);
    session->requests_count++;
    session->requests_waited++;
    TAILQ_INSERT_TAIL(&lane->queued, request, in_lane);
    kld_stats_add(worker->options.stats, KLD_STAT_worker_requests_in_flight, 1);
    if (timeout_ns &&
        !__builtin_add_overflow(request->arrival_ns, timeout_ns, &request->deadline_ns)) {
        kld_queue_watch(&worker->queue, request);
        kld_worker_watch_deadlines(worker);
    }
    if (lane->state == KLD_LANE_CLOSED)
        kld_lane_open(lane);
    launch(lane);
}

static void pin(struct kld_request *request, struct kld_region *region) {
    kld_worker_region_acquire(region);
    request->regions[request->regions_count++] = region;
}

/* The same op, with each tensor named by its memory instead of by its region: two regions may show
 * the same bytes, and kld_op_check() is to see that. */
static enum kld_status to_spaces(struct kld_op *op, struct kld_region *const *regions,
                                 struct kld_error *err) {
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!regions[slot])
            continue;
        op->tensor[slot].region = regions[slot]->space;
        if (__builtin_add_overflow(op->tensor[slot].offset_bytes, regions[slot]->space_offset,
                                   &op->tensor[slot].offset_bytes))
            return kld_error_set(err, KLD_INVALID, "%s: offset overflows 64 bits",
                                 kld_slot_name(slot));
    }
    return KLD_OK;
}

static enum kld_status look_up(struct kld_session *session, struct kld_op *op,
                               struct kld_geometry *geometry, struct kld_region **regions,
                               struct kld_error *err) {
    enum kld_status status;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        regions[slot] = NULL;
        if (op->tensor[slot].dtype == KLD_DTYPE_ABSENT)
            continue;
        regions[slot] =
            kld_worker_region_find(session, op->tensor[slot].region, kld_slot_name(slot), err);
        if (!regions[slot])
            return err->status;
        if ((status =
                 kld_op_check_bounds(op, geometry, (enum kld_slot)slot, regions[slot]->bytes, err)))
            return status;
    }
    if (!session->aliased)
        return KLD_OK;
    if ((status = to_spaces(op, regions, err)))
        return status;
    return kld_op_check(op, geometry, err);
}

enum kld_status kld_core_submit(struct kld_session *session, const struct kld_frame_submit *frame,
                                struct kld_error *err) {
    struct kld_op op;
    struct kld_geometry geometry;
    struct kld_region *regions[KLD_SLOT_COUNT];
    uint64_t offsets[KLD_SLOT_COUNT];
    struct kld_request *request = NULL;
    enum kld_status status;
    if ((status = kld_submit_decode(frame, &op, err)) ||
        (status = kld_op_check(&op, &geometry, err)))
        return status;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++)
        offsets[slot] = op.tensor[slot].offset_bytes;
    if ((status = look_up(session, &op, &geometry, regions, err)) ||
        (status = admit(session, frame->header.request, frame->stream, &request, err)))
        return status;
    request->job.kind = KLD_JOB_OP;
    request->job.op = op;
    request->job.geometry = geometry;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        request->job.place[slot] = (struct kld_place){0};
        if (!regions[slot])
            continue;
        pin(request, regions[slot]);
        request->job.place[slot] =
            (struct kld_place){.memory = regions[slot]->memory, .offset_bytes = offsets[slot]};
    }
    enter(request, frame->timeout_ns);
    return KLD_OK;
}

static enum kld_status copy_bounds(const struct kld_region *region, const char *what,
                                   uint64_t offset, uint64_t bytes, struct kld_error *err) {
    if (offset > region->bytes || bytes > region->bytes - offset)
        return kld_error_set(err, KLD_INVALID,
                             "%s: %" PRIu64 " bytes at offset %" PRIu64
                             " do not fit a region of %" PRIu64 " bytes",
                             what, bytes, offset, region->bytes);
    return KLD_OK;
}

enum kld_status kld_core_copy(struct kld_session *session, const struct kld_frame_copy *frame,
                              struct kld_error *err) {
    struct kld_request *request = NULL;
    enum kld_status status;
    if (frame->reserved != 0)
        return kld_error_set(err, KLD_INVALID, "COPY: reserved field is not 0");
    if (frame->bytes == 0)
        return kld_error_set(err, KLD_INVALID, "COPY of 0 bytes");
    struct kld_region *to = kld_worker_region_find(session, frame->destination, "destination", err);
    struct kld_region *from =
        to ? kld_worker_region_find(session, frame->source, "source", err) : NULL;
    if (!from)
        return err->status;
    uint64_t to_offset = frame->destination_offset_bytes, from_offset = frame->source_offset_bytes;
    if ((status = copy_bounds(to, "destination", to_offset, frame->bytes, err)) ||
        (status = copy_bounds(from, "source", from_offset, frame->bytes, err)))
        return status;
    /* Offsets in the space cannot overflow: regions lie inside their allocations. */
    uint64_t to_first = to->space_offset + to_offset, from_first = from->space_offset + from_offset;
    if (to->space == from->space && to_first < from_first + frame->bytes &&
        from_first < to_first + frame->bytes)
        return kld_error_set(err, KLD_INVALID, "source and destination of a COPY overlap");
    if ((status = admit(session, frame->header.request, frame->stream, &request, err)))
        return status;
    request->job.kind = KLD_JOB_COPY;
    request->job.copy_to = (struct kld_place){.memory = to->memory, .offset_bytes = to_offset};
    request->job.copy_from =
        (struct kld_place){.memory = from->memory, .offset_bytes = from_offset};
    request->job.copy_bytes = frame->bytes;
    pin(request, to);
    pin(request, from);
    enter(request, 0);
    return KLD_OK;
}

void kld_core_refused(struct kld_session *session, const struct kld_frame_header *header,
                      const struct kld_error *error) {
    struct kld_worker *worker = session->worker;
    worker->requests_total++;
    worker->errors_total++;
    kld_stats_request(worker->options.stats, KLD_FRONT_UNIX, error->status);
    kld_log(KLD_LOG_INFO, "refused",
            "client=\"%s\" pid=%d request=%" PRIu64 " status=%s text=\"%s\"", session->name,
            (int)session->pid, header->request, kld_status_name(error->status), error->text);
}

/* ---- Ways out before the end ----------------------------------------------------------------- */

enum kld_status kld_core_cancel(struct kld_session *session, uint64_t target,
                                struct kld_error *err) {
    struct kld_request *request = find(session, target);
    if (!request)
        return kld_error_set(err, KLD_NOT_FOUND,
                             "no request %" PRIu64 " of this connection is in flight", target);
    struct kld_error error;
    kld_error_set(&error, KLD_CANCELLED, "cancelled by the client");
    give_up(request, &error);
    return KLD_OK;
}

void kld_core_detach(struct kld_session *session) {
    struct kld_error error;
    kld_error_set(&error, KLD_CANCELLED, "the client left");
    struct kld_request *request, *next;
    for (request = TAILQ_FIRST(&session->requests); request; request = next) {
        next = TAILQ_NEXT(request, in_session);
        give_up(request, &error);
    }
    for (uint64_t i = 0; i < session->worker->options.config->client_streams_max; i++)
        launch(&session->lanes[i]); /* closes the idle ones */
}

void kld_core_expire(struct kld_worker *worker) {
    uint64_t now = kld_worker_now_ns();
    struct kld_request *request;
    while ((request = kld_queue_earliest(&worker->queue)) && request->deadline_ns <= now) {
        struct kld_error error;
        kld_error_set(&error, KLD_DEADLINE, "the deadline passed after %" PRIu64 " ms",
                      (now - request->arrival_ns) / 1000000);
        give_up(request, &error);
    }
    kld_worker_watch_deadlines(worker);
    kld_worker_progress(worker);
}

void kld_core_device_lost(struct kld_worker *worker, const struct kld_error *cause) {
    if (worker->lost)
        return;
    worker->lost = true;
    kld_stats_add(worker->options.stats, KLD_STAT_device_lost_total, 1);
    kld_log(KLD_LOG_ERROR, "device lost", "in_flight=%u text=\"%s\"", worker->queue.in_use,
            cause->text);
    struct kld_error error;
    kld_error_set(&error, KLD_DEVICE_LOST, "the device failed while the request was in flight");
    struct kld_session *session;
    TAILQ_FOREACH(session, &worker->sessions, in_worker) {
        struct kld_request *request;
        TAILQ_FOREACH(request, &session->requests, in_session) {
            if (request->answered)
                continue;
            request->answered = true;
            kld_queue_unwatch(&worker->queue, request);
            account(request, KLD_DEVICE_LOST, cause->text, false);
            kld_session_reply_error(session, request->number, &error);
        }
    }
    uv_stop(&worker->loop);
}
