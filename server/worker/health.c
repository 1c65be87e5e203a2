/* health.c - see health.h. Worker process, loop thread; look() and nothing() run on uv's pool. */
#include "server/worker/health.h"

#include "server/log.h"
#include "server/worker/core.h"

#define LOOK_MS_MAX 1000 /* between two questions to the pool */
#define LET_IN_MS 10

/* ---- The device ------------------------------------------------------------------------------ */

static void look(uv_work_t *work) {
    struct kld_worker *worker = work->data;
    worker->health_status = worker->options.backend->check(worker->device, &worker->health_error);
}

static void looked(uv_work_t *work, int cancelled) {
    struct kld_worker *worker = work->data;
    (void)cancelled; /* never asked for */
    worker->health_looks = false;
    if (worker->health_status == KLD_DEVICE_LOST)
        kld_core_device_lost(worker, &worker->health_error);
    else if (!worker->health_status)
        atomic_store(&worker->stats->device_worked_ns, kld_worker_now_ns());
}

/* Whoever has work finds out by it. */
static void due(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    if (worker->health_looks || worker->queue.in_use || worker->lost)
        return;
    worker->health_looks = true;
    uv_queue_work(&worker->loop, &worker->health_work, look, looked);
}

/* ---- The pool -------------------------------------------------------------------------------- */

static uint64_t stuck_ms(const struct kld_worker *worker) {
    uint64_t configured = worker->options.config->stuck_ms;
    if (worker->options.stuck_ms)
        return worker->options.stuck_ms;
    return configured ? configured : KLD_STUCK_MS;
}

static uint64_t look_ms(const struct kld_worker *worker) {
    uint64_t quarter = stuck_ms(worker) / 4;
    return quarter < 1 ? 1 : quarter < LOOK_MS_MAX ? quarter : LOOK_MS_MAX;
}

/* Behind whatever else the pool was given, so it is for who gave it nothing else. */
static void nothing(uv_work_t *work) { (void)work; }

static bool is_stuck(const struct kld_worker *worker) {
    uint64_t then = worker->pool_ns < worker->room_ns ? worker->pool_ns : worker->room_ns;
    return kld_worker_now_ns() - then >= stuck_ms(worker) * 1000000;
}

static bool waits_for_event(const struct kld_session *session) {
    for (uint64_t i = 0; i < session->worker->options.config->client_streams_max; i++) {
        const struct kld_request *oldest = TAILQ_FIRST(&session->lanes[i].running);
        if (oldest && oldest->ready && oldest->stage_ns && oldest->stage == KLD_JOB_WAITS)
            return true;
    }
    return false;
}

/* While a job waits for its client's event, the driver may keep who unpins or frees memory; for how
 * long a client may take its time is for waits.c to say. But not if those who have left cannot be
 * let go for it: they would pile up. */
static bool is_for_event(const struct kld_worker *worker) {
    const struct kld_session *session;
    uint64_t now = kld_worker_now_ns();
    bool any = false;
    TAILQ_FOREACH(session, &worker->sessions, in_worker) {
        any = any || waits_for_event(session);
        if (session->state == KLD_SESSION_CLOSING &&
            now - session->closed_ns >= stuck_ms(worker) * 1000000)
            return false;
    }
    return any;
}

static void set_stuck(struct kld_worker *worker, bool stuck) {
    if (worker->stuck == stuck || worker->stopping)
        return;
    worker->stuck = stuck;
    atomic_store(&worker->shown->ready, !stuck);
    if (stuck)
        kld_log(KLD_LOG_ERROR, "worker stuck", "for_ms=%llu unclosed=%u text=\"%s\"",
                (unsigned long long)stuck_ms(worker), kld_strays_count(worker->strays),
                "its threads take no work; what they do does not end");
    else
        kld_log(KLD_LOG_INFO, "worker no longer stuck", "%s", "");
}

void kld_health_pool_took(struct kld_worker *worker) {
    worker->pool_ns = kld_worker_now_ns();
    set_stuck(worker, is_stuck(worker));
}

static void pool_took(uv_work_t *work, int cancelled) {
    struct kld_worker *worker = work->data;
    (void)cancelled; /* never asked for */
    worker->pool_asked = false;
    kld_health_pool_took(worker);
}

/* Those that were not read, or not let in, while too much waited to be closed. */
static void let_in(struct kld_worker *worker) {
    struct kld_session *session;
    TAILQ_FOREACH(session, &worker->sessions, in_worker)
    kld_session_poll(session);
    kld_worker_accept(worker);
}

static void let_in_due(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    kld_strays_look(worker->strays);
    let_in(worker);
}

void kld_health_let_in_soon(struct kld_worker *worker) {
    if (!worker->stopping && !uv_is_active((uv_handle_t *)&worker->let_in))
        uv_timer_start(&worker->let_in, let_in_due, LET_IN_MS, 0);
}

/* What this process stood still, for a signal, a debugger or with its machine, is nobody's. */
static void take_off_standstill(struct kld_worker *worker) {
    uint64_t now = kld_worker_now_ns(), since = now - worker->pool_looked_ns;
    uint64_t usual = 2 * look_ms(worker) * UINT64_C(1000000);
    worker->pool_looked_ns = now;
    if (since <= usual)
        return;
    /* What was seen in this turn of the loop was seen after it. */
    worker->pool_ns = worker->pool_ns + since - usual < now ? worker->pool_ns + since - usual : now;
    worker->room_ns = worker->room_ns + since - usual < now ? worker->room_ns + since - usual : now;
}

static void pool_due(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    if (worker->lost)
        return;
    take_off_standstill(worker);
    kld_strays_look(worker->strays);
    if (!kld_strays_crowded(worker->strays))
        worker->room_ns = kld_worker_now_ns();
    if (!worker->stuck && is_for_event(worker))
        worker->pool_ns = kld_worker_now_ns();
    if (is_stuck(worker))
        set_stuck(worker, true);
    if (worker->pool_asked)
        return;
    worker->pool_asked = true;
    uv_queue_work(&worker->loop, &worker->pool_work, nothing, pool_took);
}

/* ---- Both ------------------------------------------------------------------------------------ */

void kld_health_init(struct kld_worker *worker) {
    uv_timer_init(&worker->loop, &worker->health);
    uv_unref((uv_handle_t *)&worker->health);
    worker->health.data = worker->health_work.data = worker;
    uv_timer_init(&worker->loop, &worker->pool_watch);
    uv_unref((uv_handle_t *)&worker->pool_watch);
    worker->pool_watch.data = worker->pool_work.data = worker;
    uv_timer_init(&worker->loop, &worker->let_in);
    uv_unref((uv_handle_t *)&worker->let_in);
    worker->let_in.data = worker;
}

void kld_health_close(struct kld_worker *worker) {
    uv_close((uv_handle_t *)&worker->health, NULL);
    uv_close((uv_handle_t *)&worker->pool_watch, NULL);
    uv_close((uv_handle_t *)&worker->let_in, NULL);
}

void kld_health_start(struct kld_worker *worker) {
    const struct kld_device_info *info = &worker->device->info;
    uint64_t every = worker->options.health_ms ? worker->options.health_ms : KLD_HEALTH_MS;
    if (worker->options.backend->check && info->offloads && !info->takes_turns)
        uv_timer_start(&worker->health, due, every, every);
    uint64_t look = look_ms(worker);
    worker->pool_ns = worker->room_ns = worker->pool_looked_ns = kld_worker_now_ns();
    uv_timer_start(&worker->pool_watch, pool_due, look, look);
}
