/* watchdog.c - signs of life for the service manager: at half of the time that it waits for one,
 * every child is asked, and when all that serve have answered, it is told. A child whose loop hangs
 * answers nothing, so after the manager's time it ends the server and starts it anew. A worker that
 * is being replaced holds nothing up as long as another one serves. Supervisor's loop thread. */
#include "server/supervisor/supervisor.h"

static void ask(struct kld_watched *child) {
    child->answered = false;
    if (child->state == KLD_CHILD_READY)
        (void)kld_watched_order(child, KLD_ORDER_ALIVE, "", -1);
}

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

static void on_due(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    supervisor->watchdog_due = true;
    ask(&supervisor->gateway);
    for (uint32_t i = 0; i < supervisor->workers; i++)
        ask(&supervisor->worker[i]);
    tell(supervisor);
}

void kld_watchdog_ready(struct kld_watched *child) {
    if (child->supervisor->watchdog_due)
        ask(child);
}

void kld_watchdog_answered(struct kld_watched *child) {
    child->answered = true;
    tell(child->supervisor);
}

void kld_watchdog_start(struct kld_supervisor *supervisor) {
    uint64_t half_ms = supervisor->notify.watchdog_ms / 2;
    uv_timer_init(&supervisor->loop, &supervisor->watchdog);
    supervisor->watchdog.data = supervisor;
    if (supervisor->notify.watchdog_ms)
        uv_timer_start(&supervisor->watchdog, on_due, half_ms, half_ms ? half_ms : 1);
}
