/* waits.c - see waits.h. Worker process, loop thread. */
#include "server/worker/waits.h"

#include "server/worker/core.h"
#include "server/worker/peer.h"

struct limits {
    uint64_t gone_ns, dead_ns, hold_ns, look_ns;
};

/* ---- Looking --------------------------------------------------------------------------------- */

/* Asks the back end, of what is with it for a while, how far it is. What cannot be told just now
 * leaves what was known. */
static void look(struct kld_request *request, uint64_t now, const struct limits *limits) {
    const struct kld_worker *worker = request->session->worker;
    const struct kld_backend *backend = worker->options.backend;
    enum kld_job_stage stage = KLD_JOB_UNKNOWN;
    if (now - request->running_ns < limits->look_ns)
        return;
    if (backend->stage)
        stage = backend->stage(worker->device, &request->job);
    if (!request->stage_ns || (stage != KLD_JOB_UNKNOWN && stage != request->stage)) {
        request->stage = stage;
        request->stage_ns = now;
    }
}

/* For how long the request is known to be there. */
static uint64_t since_ns(const struct kld_request *request, enum kld_job_stage stage,
                         uint64_t now) {
    return request->stage_ns && request->stage == stage ? now - request->stage_ns : 0;
}

/* Its client is gone for too long, and its event has not come. Less long is enough where its
 * process has died; where a back end never tells how far a job is, it is taken to wait. */
static bool is_orphan(const struct kld_request *request, uint64_t now,
                      const struct limits *limits) {
    const struct kld_session *session = request->session;
    if (session->state != KLD_SESSION_CLOSING || !request->ready || !request->stage_ns)
        return false;
    uint64_t gone_ns = now - session->closed_ns;
    if (request->stage == KLD_JOB_WAITS)
        return gone_ns >= limits->gone_ns ||
               (gone_ns >= limits->dead_ns && kld_peer_is_dead(session->pidfd, session->pid));
    return gone_ns >= limits->gone_ns && since_ns(request, KLD_JOB_UNKNOWN, now) >= limits->gone_ns;
}

/* No place for its next request, which waits for an event? */
static bool is_held(const struct kld_lane *lane, uint64_t now, uint64_t limit_ns) {
    const struct kld_request *next = TAILQ_FIRST(&lane->queued);
    return lane->held && next && next->ready && now - lane->held_ns >= limit_ns &&
           now - next->arrival_ns >= limit_ns;
}

/* A request that waits for its own event, or is at work, does not stand still; nor does one behind
 * such a one in its lane. */
static bool stands_still(const struct kld_session *session, uint64_t now, uint64_t limit_ns) {
    if (session->state != KLD_SESSION_OPEN)
        return false; /* nobody is kept waiting */
    if (session->awaited && now - session->awaited_ns >= limit_ns)
        return true;
    for (uint64_t i = 0; i < session->worker->options.config->client_streams_max; i++) {
        const struct kld_lane *lane = &session->lanes[i];
        const struct kld_request *oldest = TAILQ_FIRST(&lane->running);
        if (is_held(lane, now, limit_ns) ||
            (oldest && since_ns(oldest, KLD_JOB_BEHIND, now) >= limit_ns))
            return true;
    }
    return false;
}

/* Streams share the queues of the device, and the driver frees, unpins and closes memory, and at
 * times opens streams, only when the device has come to rest: one client's event that does not come
 * can stop the others. */
static bool holds_up_others(const struct kld_request *request, uint64_t now, uint64_t limit_ns) {
    const struct kld_session *session;
    if (!request->ready || since_ns(request, KLD_JOB_WAITS, now) < limit_ns)
        return false;
    TAILQ_FOREACH(session, &request->session->worker->sessions, in_worker)
    if (session != request->session && stands_still(session, now, limit_ns))
        return true;
    return false;
}

/* Looks at the oldest job of each lane: the others are behind it. Sets *ret_slow: one has been at
 * work for so long that what stands still may do so for it. */
static void look_at_all(struct kld_worker *worker, uint64_t now, const struct limits *limits,
                        bool *ret_slow) {
    struct kld_session *session;
    *ret_slow = false;
    TAILQ_FOREACH(session, &worker->sessions, in_worker)
    for (uint64_t i = 0; i < worker->options.config->client_streams_max; i++) {
        struct kld_request *oldest = TAILQ_FIRST(&session->lanes[i].running);
        if (!oldest)
            continue;
        look(oldest, now, limits);
        *ret_slow = *ret_slow || since_ns(oldest, KLD_JOB_BEGUN, now) >= limits->hold_ns;
    }
}

static void check(struct kld_worker *worker, const struct limits *limits) {
    uint64_t now = kld_worker_now_ns();
    bool slow;
    look_at_all(worker, now, limits, &slow);
    struct kld_session *session;
    TAILQ_FOREACH(session, &worker->sessions, in_worker)
    for (uint64_t i = 0; i < worker->options.config->client_streams_max; i++) {
        const struct kld_request *oldest = TAILQ_FIRST(&session->lanes[i].running);
        struct kld_error error;
        if (!oldest)
            continue;
        if (is_orphan(oldest, now, limits))
            kld_error_set(&error, KLD_DEVICE_LOST,
                          "a job waits for an event of a client that is gone");
        else if (!slow && holds_up_others(oldest, now, limits->hold_ns))
            kld_error_set(&error, KLD_DEVICE_LOST,
                          "a job waits for an event of the client with pid %d, which does not "
                          "come, and holds up others",
                          (int)session->pid);
        else
            continue;
        kld_core_device_lost(worker, &error);
        return;
    }
}

/* ---- The timer ------------------------------------------------------------------------------- */

static uint64_t orphan_ms(const struct kld_worker *worker) {
    return worker->options.orphan_ms ? worker->options.orphan_ms : KLD_ORPHAN_MS;
}

static uint64_t orphan_dead_ms(const struct kld_worker *worker) {
    uint32_t wanted = worker->options.orphan_dead_ms;
    return wanted ? wanted : KLD_ORPHAN_DEAD_MS;
}

/* Between two looks: a tenth of the shortest time after which something follows from one. */
static uint64_t look_ms(const struct kld_worker *worker) {
    uint64_t least = orphan_ms(worker), hold = worker->options.config->event_hold_ms;
    least = orphan_dead_ms(worker) < least ? orphan_dead_ms(worker) : least;
    least = hold < least ? hold : least;
    return least / 10 + 1;
}

static void due(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    const struct limits limits = {
        .gone_ns = orphan_ms(worker) * 1000000,
        .dead_ns = orphan_dead_ms(worker) * 1000000,
        .hold_ns = worker->options.config->event_hold_ms * 1000000,
        .look_ns = look_ms(worker) * 1000000,
    };
    check(worker, &limits);
    if (!worker->waits_running)
        uv_timer_stop(timer);
}

void kld_waits_init(struct kld_worker *worker) {
    TAILQ_INIT(&worker->lanes_held);
    uv_timer_init(&worker->loop, &worker->waits);
    worker->waits.data = worker;
}

static void watch(struct kld_worker *worker) {
    if (worker->stopping || uv_is_active((uv_handle_t *)&worker->waits))
        return;
    uv_update_time(&worker->loop);
    uv_timer_start(&worker->waits, due, look_ms(worker), look_ms(worker));
}

/* ---- Places ---------------------------------------------------------------------------------- */

bool kld_waits_take(struct kld_lane *lane) {
    struct kld_session *session = lane->session;
    struct kld_worker *worker = session->worker;
    if (session->waits_running >= KLD_CLIENT_WAITS_MAX)
        return false;
    if (worker->waits_running >= KLD_WAITS_MAX ||
        (worker->lane_turn != lane && !TAILQ_EMPTY(&worker->lanes_held))) {
        if (!lane->held) {
            lane->held = true;
            lane->held_ns = kld_worker_now_ns();
            TAILQ_INSERT_TAIL(&worker->lanes_held, lane, in_held);
        }
        return false;
    }
    worker->lane_turn = NULL;
    worker->waits_running++;
    session->waits_running++;
    watch(worker);
    return true;
}

bool kld_waits_give(struct kld_session *session) {
    session->worker->waits_running--;
    return session->waits_running-- == KLD_CLIENT_WAITS_MAX;
}

void kld_waits_forget(struct kld_lane *lane) {
    if (lane->held)
        TAILQ_REMOVE(&lane->session->worker->lanes_held, lane, in_held);
    lane->held = false;
}

struct kld_lane *kld_waits_next(struct kld_worker *worker) {
    struct kld_lane *lane = TAILQ_FIRST(&worker->lanes_held);
    worker->lane_turn = worker->waits_running < KLD_WAITS_MAX ? lane : NULL;
    if (worker->lane_turn)
        kld_waits_forget(lane);
    return worker->lane_turn;
}
