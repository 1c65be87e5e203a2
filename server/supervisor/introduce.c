/* introduce.c - tells each worker which process the gateway is, as soon as either of them is
 * started: a worker knows it by that and not by whose child it is, because orphans become the
 * children of a supervisor that is PID 1. What the worker then grants it is the worker's.
 * Supervisor's loop thread. */
#include <errno.h>

#include "server/supervisor/supervisor.h"

#define AGAIN_MS 20

static void on_again(uv_timer_t *timer);

static bool is_due(const struct kld_supervisor *supervisor) {
    for (uint32_t i = 0; i < supervisor->workers; i++)
        if (supervisor->worker[i].gateway_due)
            return true;
    return false;
}

/* One that has ended is not told: its successor is, at its start. */
static void tell(struct kld_supervisor *supervisor) {
    const struct kld_watched *gateway = &supervisor->gateway;
    bool runs = gateway->state == KLD_CHILD_STARTING || gateway->state == KLD_CHILD_READY;
    if (!runs || !gateway->life || !is_due(supervisor))
        return;
    struct kld_child_order order = {.kind = KLD_ORDER_GATEWAY, .pid = gateway->life->process.pid};
    for (uint32_t i = 0; i < supervisor->workers; i++) {
        struct kld_watched *worker = &supervisor->worker[i];
        if (worker->gateway_due)
            worker->gateway_due =
                !kld_watched_send(worker, &order, gateway->life->pidfd) && errno != EPIPE;
    }
    if (is_due(supervisor))
        uv_timer_start(&supervisor->introduce_again, on_again, AGAIN_MS, 0);
}

static void on_again(uv_timer_t *timer) { tell(timer->data); }

void kld_introduce(struct kld_watched *started) {
    struct kld_supervisor *supervisor = started->supervisor;
    started->gateway_due = started != &supervisor->gateway;
    for (uint32_t i = 0; i < supervisor->workers && started == &supervisor->gateway; i++)
        supervisor->worker[i].gateway_due = true;
    tell(supervisor);
}

void kld_introduce_init(struct kld_supervisor *supervisor) {
    uv_timer_init(&supervisor->loop, &supervisor->introduce_again);
    supervisor->introduce_again.data = supervisor;
}
