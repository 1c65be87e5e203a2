/* watchdog.c - signs of life: who gives none is replaced, and the service manager is told of those
 * that there are.
 *
 * Workers and gateway are looked at now and then. One that was asked again and again for stuck_ms
 * and did not answer, that answered twice in a row that its threads stand still, or that was
 * started and has not said for start_ms (stuck_ms, if that is more) that it serves, is killed;
 * child.c starts the next. Looks are counted, not time: one that comes late, because this process,
 * the machine or its clock stood still, is one look.
 *
 * At half of the time that the service manager waits for a sign of life every child is asked, and
 * when all that serve have answered, it is told. A child whose loop hangs answers nothing, so after
 * the manager's time it ends the server and starts it anew. A worker that is being replaced holds
 * nothing up as long as another one serves. Supervisor's loop thread. */
#include <inttypes.h>
#include <signal.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"

#define LOOKS_MIN 2 /* in a row, before a child is killed; so many suffice if it says why */
#define LOOK_MS_MIN 100
#define LOOK_MS_MAX 1000

static void ask(struct kld_watched *child) {
    if (child->state == KLD_CHILD_READY)
        (void)kld_watched_order(child, KLD_ORDER_ALIVE, "", -1);
}

/* ---- Who gives none -------------------------------------------------------------------------- */

static uint64_t look_ms(const struct kld_supervisor *supervisor) {
    uint64_t part = supervisor->config.stuck_ms / 4;
    return part < LOOK_MS_MIN ? LOOK_MS_MIN : part > LOOK_MS_MAX ? LOOK_MS_MAX : part;
}

static const char *text_of(enum kld_ill ill) {
    return ill == KLD_ILL_STARTS  ? "it has not said that it serves"
           : ill == KLD_ILL_STUCK ? "its threads take no work; what they do does not end"
                                  : "its loop gives no sign of life";
}

static bool has_start_ms(const struct kld_config *config, enum kld_ill ill) {
    return ill == KLD_ILL_STARTS && config->start_ms > config->stuck_ms;
}

static void end_stuck(const struct kld_supervisor *supervisor, struct kld_watched *child) {
    const struct kld_config *config = &supervisor->config;
    bool gateway = child == &supervisor->gateway, start = has_start_ms(config, child->ill);
    if (child->life->stuck)
        return;
    child->life->stuck = true;
    kld_log(KLD_LOG_ERROR, gateway ? "gateway replaced" : "worker replaced",
            "child=%s child_pid=%d %s=%" PRIu64 " looks=%u text=\"%s\"", child->name,
            (int)child->life->process.pid, start ? "start_ms" : "stuck_ms",
            start ? config->start_ms : config->stuck_ms, child->looks, text_of(child->ill));
    kld_stats_add(child->stats,
                  gateway ? KLD_STAT_gateway_stuck_total : KLD_STAT_worker_stuck_total, 1);
    kld_watched_signal(child, SIGKILL);
}

/* The first look asks, and what was said while this process stood still may be unread at the next:
 * so there is one more than the time asks for. */
static uint32_t looks_max(const struct kld_supervisor *supervisor, enum kld_ill ill) {
    const struct kld_config *config = &supervisor->config;
    uint64_t silent_ms = has_start_ms(config, ill) ? config->start_ms : config->stuck_ms;
    if (ill == KLD_ILL_STARTS && !config->start_ms)
        return UINT32_MAX; /* 100 ms apart: no start takes as long */
    uint64_t silent = silent_ms / look_ms(supervisor) + 1;
    return ill == KLD_ILL_STUCK || silent < LOOKS_MIN ? LOOKS_MIN : (uint32_t)silent;
}

static enum kld_ill find(const struct kld_watched *child) {
    if (child->state == KLD_CHILD_STARTING)
        return KLD_ILL_STARTS;
    if (child->state != KLD_CHILD_READY)
        return KLD_ILL_NOT;
    return !child->seen_alive ? KLD_ILL_SILENT : child->says_stuck ? KLD_ILL_STUCK : KLD_ILL_NOT;
}

static void look_at(const struct kld_supervisor *supervisor, struct kld_watched *child) {
    enum kld_ill ill = find(child);
    child->looks = child->ill == ill ? child->looks + 1 : 1;
    child->ill = ill;
    if (ill != KLD_ILL_NOT && child->looks >= looks_max(supervisor, ill)) {
        end_stuck(supervisor, child);
        child->looks = 0;
    }
    child->seen_alive = false;
    ask(child);
}

/* Those whose device was lost, which were to end by themselves. They hold up nobody but the end of
 * the server, and the driver's memory. */
static void look_at_succeeded(const struct kld_supervisor *supervisor,
                              const struct kld_watched *child) {
    for (struct kld_life *life = child->lives; life; life = life->next) {
        if (life == child->life || life->stuck ||
            ++life->looks < looks_max(supervisor, KLD_ILL_SILENT))
            continue;
        life->stuck = true;
        kld_log(KLD_LOG_WARN, "lost worker killed",
                "child=%s child_pid=%d stuck_ms=%" PRIu64 " text=\"it does not end\"", child->name,
                (int)life->process.pid, supervisor->config.stuck_ms);
        kld_life_kill(life);
    }
}

static void on_look(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    if (supervisor->draining) /* has a time limit of its own */
        return;
    look_at(supervisor, &supervisor->gateway);
    for (uint32_t i = 0; i < supervisor->workers; i++) {
        look_at(supervisor, &supervisor->worker[i]);
        look_at_succeeded(supervisor, &supervisor->worker[i]);
    }
}

/* ---- The service manager --------------------------------------------------------------------- */

/* All that serve have answered, and they are enough to serve. */
static bool is_alive(const struct kld_supervisor *supervisor) {
    const struct kld_watched *gateway = &supervisor->gateway;
    uint32_t serving = 0;
    if (supervisor->draining) /* has a time limit of its own */
        return true;
    if (supervisor->http.fd >= 0 && !(gateway->state == KLD_CHILD_READY && gateway->answered))
        return false;
    for (uint32_t i = 0; i < supervisor->workers; i++) {
        const struct kld_watched *worker = &supervisor->worker[i];
        if (worker->state == KLD_CHILD_READY && !worker->answered)
            return false;
        serving += worker->state == KLD_CHILD_READY;
    }
    return serving > 0;
}

static void tell(struct kld_supervisor *supervisor) {
    if (!supervisor->watchdog_due || !is_alive(supervisor))
        return;
    supervisor->watchdog_due = false;
    kld_notify_send(&supervisor->notify, "WATCHDOG=1");
}

static void ask_for_manager(struct kld_watched *child) {
    child->answered = false;
    ask(child);
}

static void on_due(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    supervisor->watchdog_due = true;
    ask_for_manager(&supervisor->gateway);
    for (uint32_t i = 0; i < supervisor->workers; i++)
        ask_for_manager(&supervisor->worker[i]);
    tell(supervisor);
}

/* ---- Both ------------------------------------------------------------------------------------ */

void kld_watchdog_started(struct kld_watched *child) {
    child->looks = 0;
    child->ill = KLD_ILL_NOT;
}

void kld_watchdog_ready(struct kld_watched *child) {
    child->seen_alive = true;
    child->says_stuck = false;
    if (child->supervisor->watchdog_due)
        ask_for_manager(child);
}

void kld_watchdog_answered(struct kld_watched *child, enum kld_alive alive) {
    child->seen_alive = true;
    child->says_stuck = alive == KLD_ALIVE_STUCK;
    child->answered = child->answered || !child->says_stuck;
    tell(child->supervisor);
}

void kld_watchdog_start(struct kld_supervisor *supervisor) {
    uint64_t half_ms = supervisor->notify.watchdog_ms / 2;
    uv_timer_init(&supervisor->loop, &supervisor->watchdog);
    uv_timer_init(&supervisor->loop, &supervisor->stuck);
    supervisor->watchdog.data = supervisor->stuck.data = supervisor;
    if (supervisor->notify.watchdog_ms)
        uv_timer_start(&supervisor->watchdog, on_due, half_ms, half_ms ? half_ms : 1);
    if (supervisor->config.stuck_ms)
        uv_timer_start(&supervisor->stuck, on_look, look_ms(supervisor), look_ms(supervisor));
}
