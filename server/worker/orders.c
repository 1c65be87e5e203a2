/* orders.c - follows what the supervisor says over the control socket: the log level, a sign of
 * life, which process the gateway is. The gateway may have connected before that is known here:
 * then it is a client like others until it is. Worker process, loop thread. */
#include "server/worker/orders.h"

#include <unistd.h>

#include "server/log.h"
#include "server/role.h"
#include "server/worker/places.h"
#include "server/worker/quota.h"
#include "server/worker/worker.h"

static void recognise(struct kld_session *session) {
    struct kld_worker *worker = session->worker;
    if (session->is_gateway || session->fd < 0 || !kld_places_is_gateway(worker, session->fd))
        return;
    kld_quota_recognise(session);
}

/* pidfd is taken over. Connections of the one before end with it. */
static void meet_gateway(struct kld_worker *worker, pid_t pid, int pidfd) {
    struct kld_session *session;
    kld_orders_done(worker);
    worker->gateway = (struct kld_gateway_process){.pid = pid, .pidfd = pidfd};
    TAILQ_FOREACH(session, &worker->sessions, in_worker) recognise(session);
}

static void follow(struct kld_worker *worker, const struct kld_child_order *order, int fd) {
    switch (order->kind) {
    case KLD_ORDER_LOG_LEVEL: kld_log_set_level(order->log_level); break;
    case KLD_ORDER_GATEWAY: meet_gateway(worker, order->pid, fd); return;
    default:
        kld_child_alive_send(worker->options.control_fd,
                             worker->stuck ? KLD_ALIVE_STUCK : KLD_ALIVE);
    }
    if (fd >= 0)
        close(fd);
}

bool kld_orders_hear(struct kld_worker *worker) {
    struct kld_child_order order;
    enum kld_heard heard;
    int fd = -1;
    if (worker->options.control_fd < 0)
        return true;
    while ((heard = kld_child_hear(worker->options.control_fd, &order, &fd)) == KLD_HEARD_ORDER)
        follow(worker, &order, fd);
    return heard == KLD_HEARD_NOTHING;
}

static void control_ready(uv_poll_t *poll, int status, int events) {
    struct kld_worker *worker = poll->data;
    (void)events;
    if (kld_orders_hear(worker) && status >= 0)
        return;
    uv_poll_stop(poll);
    kld_log(KLD_LOG_WARN, "supervisor gone", "%s", "");
    kld_worker_drain(worker);
}

enum kld_status kld_orders_init(struct kld_worker *worker, struct kld_error *err) {
    if (worker->options.control_fd < 0)
        return KLD_OK;
    if (uv_poll_init(&worker->loop, &worker->control, worker->options.control_fd) != 0)
        return kld_error_set(err, KLD_INTERNAL, "the supervisor cannot be heard");
    worker->control.data = worker;
    uv_poll_start(&worker->control, UV_READABLE | UV_DISCONNECT, control_ready);
    return KLD_OK;
}

void kld_orders_done(struct kld_worker *worker) {
    if (worker->gateway.pidfd >= 0)
        close(worker->gateway.pidfd);
    worker->gateway.pidfd = -1;
}
