/* core.c - the life of a request: admit, launch, complete, detach, answer, count, log.
 * The only writer of a request's state. What a frame asks for is checked in admit.c; touches no
 * socket (session.c sends) and maps no memory (region.c). Worker process, loop thread. */
#include "server/worker/core.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "server/log.h"
#include "server/worker/event.h"
#include "server/worker/quota.h"
#include "server/worker/waits.h"

/* ---- Ends ------------------------------------------------------------------------------------ */

static enum kld_asked asked_of(const struct kld_request *request) {
    return request->job.kind == KLD_JOB_OP ? (enum kld_asked)request->job.op.divergence
                                           : KLD_ASKED_COPY;
}

static enum kld_access access_of(const struct kld_op *op) {
    return op->tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype || op->tensor[KLD_SLOT_GRAD_TARGETS].dtype ||
                   op->reduction == KLD_REDUCTION_NONE
               ? KLD_ACCESS_READ_WRITE
               : KLD_ACCESS_READ;
}

static uint64_t queue_ns(const struct kld_request *request) {
    uint64_t launch = request->job.launch_ns;
    return launch > request->arrival_ns ? launch - request->arrival_ns : 0;
}

static void reply_done(struct kld_request *request) {
    const struct kld_job *job = &request->job;
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_DONE, request->number);
    frame.as_DONE.fence_number = job->record_number;
    if (request->early) { /* how it went nobody knows yet */
        frame.as_DONE.queue_ns = queue_ns(request);
        kld_session_reply(request->session, &frame);
        return;
    }
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
    struct kld_stats *stats = worker->stats;
    const struct kld_job *job = &request->job;
    worker->kernel_ns_total += job->kernel_ns;
    worker->bytes_total += job->bytes;
    if (job->kind == KLD_JOB_OP) {
        kld_stats_add(stats, KLD_STAT_kernel_ns_total, (int64_t)job->kernel_ns);
        kld_stats_add(stats, KLD_STAT_kernel_bytes_total, (int64_t)job->bytes);
        kld_stats_work(stats, asked_of(request), access_of(&job->op), job->bytes, job->kernel_ns);
    } else {
        kld_stats_add(stats, KLD_STAT_copied_bytes_total, (int64_t)job->bytes);
    }
    kld_stats_fault(stats, job->status);
    kld_worker_pool_counted(worker);
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, queue_ns(request));
    kld_stats_observe(stats, KLD_HISTOGRAM_kernel, job->kernel_ns);
    if (job->copy_ns)
        kld_stats_observe(stats, KLD_HISTOGRAM_copy, job->copy_ns);
}

/* " shape=2x1000 dtype=BF16"; of a copy nothing. */
static void describe(const struct kld_request *request, char *ret_text, size_t capacity) {
    const struct kld_op *op = &request->job.op;
    const struct kld_geometry *geometry = &request->job.geometry;
    uint32_t predictions = op->tensor[KLD_SLOT_PREDICTIONS].dtype;
    uint32_t targets = op->tensor[KLD_SLOT_TARGETS].dtype;
    ret_text[0] = '\0';
    if (request->job.kind == KLD_JOB_OP)
        snprintf(ret_text, capacity, " shape=%" PRIu64 "x%" PRIu64 " dtype=%s%s%s", geometry->rows,
                 geometry->classes, kld_dtype_name(predictions), predictions == targets ? "" : ",",
                 predictions == targets ? "" : kld_dtype_name(targets));
}

#define TRACE_TEXT_MAX 96

static char *put_hex(char *at, const uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        at += sprintf(at, "%02x", bytes[i]);
    return at;
}

/* " trace_id=... span=... sampled=1", as the gateway's line has it, or nothing. */
static void describe_trace(const struct kld_request_trace *trace, char ret_text[TRACE_TEXT_MAX]) {
    char *at = ret_text;
    *at = '\0';
    if (!trace->is_there)
        return;
    at = put_hex(stpcpy(at, " trace_id="), trace->id, sizeof trace->id);
    at = put_hex(stpcpy(at, " span="), trace->span, sizeof trace->span);
    sprintf(at, " sampled=%u", trace->flags & 1u);
}

#define REQUEST_LINE                                                                               \
    "transport=unix client=\"%s\" client_pid=%d request=%" PRIu64 " op=%s%s status=%s"             \
    " total_us=%" PRIu64 " queue_us=%" PRIu64 " copy_us=%" PRIu64 " kernel_us=%" PRIu64            \
    " bytes=%" PRIu64 "%s"

/* The one place where a request is counted and logged. `status`: what its client was, or would have
 * been, told. ran: the back end is through with it, so its times are there. */
static void account(struct kld_request *request, enum kld_status status, const char *text,
                    bool ran) {
    struct kld_worker *worker = request->session->worker;
    const struct kld_job *job = &request->job;
    uint64_t now_ns = kld_worker_now_ns(), total_ns = now_ns - request->arrival_ns;
    worker->requests_total++;
    worker->errors_total += status != KLD_OK;
    kld_stats_request(worker->stats, KLD_FRONT_UNIX, asked_of(request), status);
    kld_stats_duration(worker->stats, KLD_FRONT_UNIX, asked_of(request), total_ns);
    if (ran && !status)
        atomic_store_explicit(&worker->stats->device_worked_ns, now_ns, memory_order_relaxed);
    enum kld_log_level level = status ? KLD_LOG_INFO : KLD_LOG_DEBUG;
    char asked[96], traced[TRACE_TEXT_MAX];
    if (!kld_log_wants(level) || (status && !kld_failed_lines_take(&worker->failed_lines)))
        return;
    describe(request, asked, sizeof asked);
    describe_trace(&request->trace, traced);
    kld_log(level, "request", status ? REQUEST_LINE " text=\"%s\"" : REQUEST_LINE "%s",
            request->session->name, (int)request->session->pid, request->number,
            kld_asked_name(asked_of(request)), asked, kld_status_name(status), total_ns / 1000,
            ran ? queue_ns(request) / 1000 : 0, ran ? job->copy_ns / 1000 : 0,
            ran ? job->kernel_ns / 1000 : 0, ran ? job->bytes : 0, traced, status ? text : "");
}

/* QUEUED or RUNNING -> FREE. The request was answered, or its client is gone. */
static void retire(struct kld_request *request) {
    struct kld_session *session = request->session;
    struct kld_worker *worker = session->worker;
    kld_queue_unwatch(&worker->queue, request);
    for (uint32_t i = 0; i < request->regions_count; i++)
        kld_worker_region_release(request->regions[i]);
    if (request->ready)
        kld_worker_event_release(request->ready);
    if (request->finished)
        kld_worker_event_release(request->finished);
    TAILQ_REMOVE(&session->requests, request, in_session);
    session->requests_count--;
    session->user->requests--;
    request->state = KLD_REQUEST_FREE;
    kld_queue_release(&worker->queue, request);
    kld_stats_add(worker->stats, KLD_STAT_worker_requests_in_flight, -1);
}

/* QUEUED -> out of its lane. */
static void dequeue(struct kld_request *request) {
    struct kld_worker *worker = request->session->worker;
    TAILQ_REMOVE(&request->lane->queued, request, in_lane);
    kld_stats_set(worker->stats, KLD_STAT_worker_requests_queued, --worker->queued);
}

/* Ends what the back end does not have (any more). Afterwards *request is the pool's. */
static void finish(struct kld_request *request, enum kld_status status,
                   const struct kld_error *error, bool ran) {
    if (ran)
        count_work(request);
    if (!request->answered) {
        request->answered = true;
        request->session->requests_waited -= !request->told;
        account(request, status, error->text,
                ran); /* first, so that a client sees itself counted */
        if (request->told)
            (void)0; /* it has its DONE */
        else if (status == KLD_OK)
            reply_done(request);
        else
            kld_session_reply_error(request->session, request->number, error);
    }
    retire(request);
}

/* EARLY: all of the work is with the device. */
static void tell_launched(struct kld_request *request) {
    if (!request->early || request->told || request->answered)
        return;
    request->told = true;
    request->session->requests_waited--;
    kld_queue_unwatch(&request->session->worker->queue, request);
    reply_done(request);
}

/* R1: the client has its answer, or is gone; memory stays pinned until the back end is through. */
static void give_up(struct kld_request *request, const struct kld_error *error) {
    if (request->answered || request->told)
        return;
    kld_stats_add(request->session->worker->stats, KLD_STAT_requests_detached_total, 1);
    if (request->state == KLD_REQUEST_QUEUED) {
        dequeue(request);
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

/* For an event, its own or that of one before it that has not ended: on the device it waits as
 * long. */
static bool waits(const struct kld_lane *lane, const struct kld_request *request) {
    const struct kld_request *before;
    if (request->ready)
        return true;
    TAILQ_FOREACH(before, &lane->running, in_lane)
    if (before->ready)
        return true;
    return false;
}

static void launch(struct kld_lane *lane) {
    struct kld_worker *worker = lane->session->worker;
    while (lane->state == KLD_LANE_OPEN && lane->running_count < KLD_LANE_DEPTH && !worker->lost) {
        struct kld_request *request = TAILQ_FIRST(&lane->queued);
        bool place = request && waits(lane, request);
        if (!request || (place && !kld_waits_take(lane)))
            break;
        dequeue(request);
        request->waits = place;
        request->state = KLD_REQUEST_RUNNING;
        request->running_ns = kld_worker_now_ns();
        request->stage = KLD_JOB_UNKNOWN;
        request->stage_ns = 0;
        TAILQ_INSERT_TAIL(&lane->running, request, in_lane);
        lane->running_count++;
        kld_worker_poll(worker);
        if (worker->options.backend->submit(lane->stream, &request->job))
            tell_launched(request);
    }
    if (lane->session->state == KLD_SESSION_CLOSING && lane->state == KLD_LANE_OPEN &&
        lane->running_count == 0)
        kld_lane_close(lane);
}

static void launch_all(struct kld_session *session) {
    for (uint64_t i = 0; i < session->worker->options.config->client_streams_max; i++)
        launch(&session->lanes[i]);
}

void kld_core_lane_opened(struct kld_lane *lane) {
    struct kld_worker *worker = lane->session->worker;
    if (lane->status == KLD_DEVICE_LOST) {
        kld_core_device_lost(worker, &lane->error);
        return;
    }
    while (lane->status != KLD_OK && !TAILQ_EMPTY(&lane->queued)) {
        struct kld_request *request = TAILQ_FIRST(&lane->queued);
        dequeue(request);
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

static void job_launched(struct kld_job *job) {
    struct kld_request *request = job->owner;
    kld_completions_push_launched(&request->session->worker->completions, request);
}

static void completed(struct kld_worker *worker) {
    struct kld_request *next, *request = kld_completions_take(&worker->completions);
    struct kld_request *launched = kld_completions_take_launched(&worker->completions);
    for (; launched && !worker->lost; launched = launched->next_launched)
        tell_launched(launched);
    for (; request && !worker->lost; request = next) {
        next = request->next;
        struct kld_lane *lane = request->lane;
        struct kld_session *session = request->session;
        if (request->job.status == KLD_DEVICE_LOST) {
            kld_core_device_lost(worker, &request->job.error);
            return;
        }
        TAILQ_REMOVE(&lane->running, request, in_lane);
        lane->running_count--;
        bool freed = request->waits && kld_waits_give(session);
        finish(request, request->job.status, &request->job.error, true);
        if (freed)
            launch_all(session);
        else
            launch(lane);
        kld_session_collect(session);
    }
    struct kld_lane *held;
    while ((held = kld_waits_next(worker)))
        launch(held);
    kld_worker_poll(worker);
}

/* What has ended by now is told together: a packet costs its two ends more than a small job. */
void kld_core_completed(struct kld_worker *worker) {
    kld_session_hold(worker);
    completed(worker);
    kld_session_release(worker);
    kld_worker_progress(worker);
}

/* ---- Admission ------------------------------------------------------------------------------- */

static struct kld_request *find(struct kld_session *session, uint64_t number) {
    struct kld_request *request;
    TAILQ_FOREACH(request, &session->requests, in_session)
    if (request->number == number && !request->answered && !request->told)
        return request;
    return NULL;
}

enum kld_status kld_core_admit(struct kld_session *session, uint64_t number, uint32_t stream,
                               struct kld_request **ret_request, struct kld_error *err) {
    struct kld_worker *worker = session->worker;
    const struct kld_config *config = worker->options.config;
    if (worker->draining) {
        kld_stats_rejected(worker->stats, KLD_REJECT_unix_draining);
        return kld_error_set(err, KLD_UNAVAILABLE, "the server is going away; connect again");
    }
    if (stream >= config->client_streams_max)
        return kld_error_set(err, KLD_INVALID, "stream %u; expected a number below %" PRIu64,
                             stream, config->client_streams_max);
    if (find(session, number))
        return kld_error_set(err, KLD_INVALID,
                             "request number %" PRIu64 " is in flight on this connection", number);
    /* Those that it gave up do not count; of them at most KLD_LANE_DEPTH a stream still run. */
    if (session->requests_waited >= config->client_requests_max) {
        kld_stats_rejected(worker->stats, KLD_REJECT_unix_client_requests_max);
        return kld_error_set(err, KLD_THROTTLED,
                             "%u requests of this connection are in flight, the most allowed",
                             session->requests_waited);
    }
    enum kld_status status = kld_quota_check_request(session, err);
    struct kld_request *request = status ? NULL : kld_queue_acquire(&worker->queue);
    if (!request) {
        kld_stats_rejected(worker->stats, KLD_REJECT_unix_requests_max);
        return status ? status
                      : kld_error_set(err, KLD_BUSY, "%u requests are in flight, the most allowed",
                                      worker->queue.in_use);
    }
    request->session = session;
    request->number = number;
    request->lane = &session->lanes[stream];
    request->arrival_ns = kld_worker_now_ns();
    *ret_request = request;
    return KLD_OK;
}

/* From here on the request cannot fail to be admitted: FREE -> QUEUED. */
void kld_core_enter(struct kld_request *request, uint64_t timeout_ns) {
    struct kld_session *session = request->session;
    struct kld_worker *worker = session->worker;
    struct kld_lane *lane = request->lane;
    struct kld_job *job = &request->job;
    job->done = job_done;
    job->launched = request->early ? job_launched : NULL;
    job->wait = request->ready ? request->ready->gpu : NULL;
    job->record = request->finished ? request->finished->gpu : NULL;
    job->owner = request;
    job->status = KLD_OK;
    job->error.status = KLD_OK;
    job->error.text[0] = 0;
    job->loss = 0;
    job->launch_ns = job->copy_ns = job->kernel_ns = job->bytes = 0;
    request->state = KLD_REQUEST_QUEUED;
    TAILQ_INSERT_TAIL(&session->requests, request, in_session);
    session->requests_count++;
    session->user->requests++;
    session->requests_waited++;
    TAILQ_INSERT_TAIL(&lane->queued, request, in_lane);
    kld_stats_add(worker->stats, KLD_STAT_worker_requests_in_flight, 1);
    kld_stats_set(worker->stats, KLD_STAT_worker_requests_queued, ++worker->queued);
    if (timeout_ns &&
        !__builtin_add_overflow(request->arrival_ns, timeout_ns, &request->deadline_ns)) {
        kld_queue_watch(&worker->queue, request);
        kld_worker_watch_deadlines(worker);
    }
    if (lane->state == KLD_LANE_CLOSED)
        kld_lane_open(lane);
    launch(lane);
}

void kld_core_refused(struct kld_session *session, const struct kld_frame_header *header,
                      const struct kld_error *error) {
    struct kld_worker *worker = session->worker;
    worker->requests_total++;
    worker->errors_total++;
    enum kld_asked asked = header->type == KLD_FRAME_COPY ? KLD_ASKED_COPY : KLD_ASKED_UNKNOWN;
    kld_stats_request(worker->stats, KLD_FRONT_UNIX, asked, error->status);
    if (!kld_log_wants(KLD_LOG_INFO) || !kld_failed_lines_take(&worker->failed_lines))
        return;
    kld_log(KLD_LOG_INFO, "refused",
            "client=\"%s\" client_pid=%d request=%" PRIu64 " status=%s text=\"%s\"", session->name,
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
    struct kld_lane *lane = request->lane;
    give_up(request, &error);
    launch(lane); /* it may have waited there for its turn, before one that need not */
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
        kld_waits_forget(&session->lanes[i]);
    launch_all(session); /* closes the idle ones */
}

void kld_core_expire(struct kld_worker *worker) {
    uint64_t now = kld_worker_now_ns();
    struct kld_request *request;
    while ((request = kld_queue_earliest(&worker->queue)) && request->deadline_ns <= now) {
        struct kld_error error;
        kld_error_set(&error, KLD_DEADLINE, "the deadline passed after %" PRIu64 " ms",
                      (now - request->arrival_ns) / 1000000);
        struct kld_lane *lane = request->lane;
        give_up(request, &error);
        launch(lane); /* as in kld_core_cancel() */
    }
    kld_worker_watch_deadlines(worker);
    kld_worker_progress(worker);
}

/* What had ended before the loss is all there; its client is not to run it again, which may be too
 * late: a gradient can lie where its logits were. */
static void tell_ended(struct kld_worker *worker) {
    struct kld_request *next, *request = kld_completions_take(&worker->completions);
    for (; request; request = next) {
        next = request->next;
        if (request->job.status == KLD_DEVICE_LOST)
            continue; /* it is in flight to who asks */
        TAILQ_REMOVE(&request->lane->running, request, in_lane);
        request->lane->running_count--;
        if (request->waits)
            kld_waits_give(request->session);
        finish(request, request->job.status, &request->job.error, true);
    }
}

void kld_core_device_lost(struct kld_worker *worker, const struct kld_error *cause) {
    if (worker->lost)
        return;
    worker->lost = true;
    tell_ended(worker);
    kld_stats_add(worker->stats, KLD_STAT_device_lost_total, 1);
    kld_stats_fault(worker->stats, KLD_DEVICE_LOST);
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
            if (!request->told)
                kld_session_reply_error(session, request->number, &error);
        }
    }
    kld_failed_lines_tell(&worker->failed_lines);
    uv_stop(&worker->loop);
}
