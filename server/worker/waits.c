/* waits.c - see waits.h. Worker process, loop thread. */
#include "server/worker/waits.h"

#include "server/worker/core.h"
#include "server/worker/peer.h"

struct limits {
    uint64_t gone_ns, dead_ns, hold_ns;
};

/* Does the device wait for the event of the request's client, and for nothing else? */
static bool waits(const struct kld_request *request) {
    const struct kld_worker *worker = request->session->worker;
    const struct kld_backend *backend = worker->options.backend;
    return request->ready && backend->waits && backend->waits(worker->device, &request->job);
}

/* Its client is gone for too long. Less long is enough where its process has died, if nothing but
 * the event of that process holds the job up. */
static bool is_orphan(const struct kld_request *request, uint64_t now,
                      const struct limits *limits) {
    const struct kld_session *session = request->session;
    if (session->state != KLD_SESSION_CLOSING)
        return false;
    uint64_t gone_ns = now - session->closed_ns;
    return gone_ns >= limits->gone_ns ||
           (gone_ns >= limits->dead_ns && kld_peer_is_dead(session->pidfd, session->pid) &&
            waits(request));
}

/* Behind a job of its own client that waits? */
static bool waits_behind_own(const struct kld_request *request) {
    const struct kld_request *before;
    TAILQ_FOREACH(before, &request->session->requests, in_session) {
        if (before->lane == request->lane && before->state == KLD_REQUEST_RUNNING && waits(before))
            return true;
        if (before == request)
            return false;
    }
    return false;
}

static bool stands_still(const struct kld_session *session, uint64_t now, uint64_t limit_ns) {
    const struct kld_request *request;
    if (session->state != KLD_SESSION_OPEN)
        return false; /* nobody is kept waiting */
    if (session->awaited && now - session->awaited_ns >= limit_ns)
        return true;
    TAILQ_FOREACH(request, &session->requests, in_session)
    if (request->state == KLD_REQUEST_RUNNING && now - request->running_ns >= limit_ns &&
        !waits_behind_own(request))
        return true;
    return false;
}

/* Streams share the queues of the device, and the driver frees, unpins and closes memory, and at
 * times opens streams, only when the device has come to rest: one client's event that does not come
 * can stop the others. */
static bool holds_up_others(const struct kld_request *request, uint64_t now, uint64_t limit_ns) {
    const struct kld_session *session;
    if (now - request->running_ns < limit_ns || !waits(request))
        return false;
    TAILQ_FOREACH(session, &request->session->worker->sessions, in_worker)
    if (session != request->session && stands_still(session, now, limit_ns))
        return true;
    return false;
}

/* False: there are none. */
static bool check(struct kld_worker *worker, const struct limits *limits) {
    uint64_t now = kld_worker_now_ns();
    bool any = false;
    struct kld_session *session;
    TAILQ_FOREACH(session, &worker->sessions, in_worker) {
        struct kld_request *request;
        TAILQ_FOREACH(request, &session->requests, in_session) {
            struct kld_error error;
            if (request->state != KLD_REQUEST_RUNNING || !request->ready)
                continue;
            any = true;
            if (is_orphan(request, now, limits))
                kld_error_set(&error, KLD_DEVICE_LOST,
                              "a job waits for an event of a client that is gone");
            else if (holds_up_others(request, now, limits->hold_ns))
                kld_error_set(&error, KLD_DEVICE_LOST,
                              "a job waits for an event of the client with pid %d, which does not "
                              "come, and holds up others",
                              (int)session->pid);
            else
                continue;
            kld_core_device_lost(worker, &error);
            return false;
        }
    }
    return any;
}

static uint64_t orphan_ms(const struct kld_worker *worker) {
    return worker->options.orphan_ms ? worker->options.orphan_ms : KLD_ORPHAN_MS;
}

static uint64_t orphan_dead_ms(const struct kld_worker *worker) {
    uint32_t wanted = worker->options.orphan_dead_ms;
    return wanted ? wanted : KLD_ORPHAN_DEAD_MS;
}

static void due(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    const struct limits limits = {
        .gone_ns = orphan_ms(worker) * 1000000,
        .dead_ns = orphan_dead_ms(worker) * 1000000,
        .hold_ns = worker->options.config->event_hold_ms * 1000000,
    };
    if (!check(worker, &limits))
        uv_timer_stop(timer);
}

void kld_waits_init(struct kld_worker *worker) {
    uv_timer_init(&worker->loop, &worker->waits);
    worker->waits.data = worker;
}

void kld_waits_watch(struct kld_worker *worker) {
    if (worker->stopping || uv_is_active((uv_handle_t *)&worker->waits))
        return;
    uint64_t least = orphan_ms(worker), hold = worker->options.config->event_hold_ms;
    least = orphan_dead_ms(worker) < least ? orphan_dead_ms(worker) : least;
    least = hold < least ? hold : least;
    uv_update_time(&worker->loop);
    uv_timer_start(&worker->waits, due, least / 10 + 1, least / 10 + 1);
}
