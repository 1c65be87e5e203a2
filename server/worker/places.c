/* places.c - see places.h. Accepts nobody itself (worker.c) and does not decide who may connect at
 * all (peer.c). Worker process, loop thread. */
#include "server/worker/places.h"

#include <inttypes.h>

#include "server/log.h"
#include "server/worker/worker.h"

#define READ_BY_THEN_NS UINT64_C(100000000)

static uint64_t part(uint64_t all, uint64_t parts) { return all < parts ? 1 : all / parts; }

static uint64_t clients_and_kept(const struct kld_config *config) {
    return config->clients_max + part(config->clients_max, KLD_PLACES_KEPT_PART);
}

uint64_t kld_places_max(const struct kld_config *config) {
    return clients_and_kept(config) + KLD_GATEWAY_PLACES;
}

struct taken {
    uint64_t gateway;                    /* by it; the rest by clients: */
    uint64_t open, sessions;             /* sessions: with those whose client left */
    uint64_t users_open, users_sessions; /* of one user */
};

static struct taken count(const struct kld_worker *worker, uid_t uid) {
    struct taken taken = {0};
    const struct kld_session *session;
    TAILQ_FOREACH(session, &worker->sessions, in_worker) {
        bool open = session->state == KLD_SESSION_OPEN, his = session->uid == uid;
        if (session->is_gateway) {
            taken.gateway++;
            continue;
        }
        taken.sessions++;
        taken.open += open;
        taken.users_sessions += his;
        taken.users_open += his && open;
    }
    return taken;
}

bool kld_places_is_gateway(const struct kld_worker *worker, int fd) {
    return kld_peer_is_gateway(&worker->gateway, fd) &&
           count(worker, 0).gateway < KLD_GATEWAY_PLACES;
}

enum kld_status kld_places_check(const struct kld_worker *worker, int fd, uid_t uid,
                                 struct kld_error *err) {
    const struct kld_config *config = worker->options.config;
    struct taken taken = count(worker, uid);
    uint64_t users_max = config->user_clients_max ? config->user_clients_max : config->clients_max;
    bool few = taken.users_open < part(config->clients_max, KLD_USER_PLACES_PART);
    uint64_t all_max = few ? clients_and_kept(config) : config->clients_max;
    if (kld_places_is_gateway(worker, fd))
        return KLD_OK;
    if (taken.open >= all_max)
        return kld_error_set(err, KLD_BUSY, "%" PRIu64 " clients are connected, the most allowed",
                             taken.open);
    if (taken.users_open >= users_max)
        return kld_error_set(err, KLD_BUSY,
                             "%" PRIu64 " clients of this user are connected, the most allowed",
                             taken.users_open);
    /* What is left behind has room as well, half of it for anybody. */
    bool scarce = taken.sessions - taken.open >= part(clients_and_kept(config), 2);
    if ((scarce && taken.users_sessions >= 2 * users_max) ||
        taken.sessions >= 2 * clients_and_kept(config))
        return kld_error_set(err, KLD_BUSY,
                             "the work of %" PRIu64 " clients that left is not yet done, the most "
                             "allowed",
                             taken.sessions - taken.open);
    return KLD_OK;
}

/* ---- HELLO ----------------------------------------------------------------------------------- */

static void send_away(struct kld_session *session) {
    struct kld_worker *worker = session->worker;
    struct kld_error error;
    kld_error_set(&error, KLD_DEADLINE, "HELLO did not come within %" PRIu64 " ms (hello_ms)",
                  worker->options.config->hello_ms);
    if (kld_failed_lines_take(&worker->failed_lines))
        kld_log(KLD_LOG_WARN, "client refused", "client_pid=%d uid=%u status=%s text=\"%s\"",
                (int)session->pid, (unsigned)session->uid, kld_status_name(error.status),
                error.text);
    kld_session_reply_error(session, 0, &error);
    kld_session_close(session);
}

/* A loop that stood still has not read it yet, or it may not be read just now; but who goes on
 * sending something else has something unread at any time. */
static bool is_put_off(struct kld_session *session) {
    bool may_be_read, again = session->put_off;
    if (!kld_session_has_come(session, &may_be_read))
        return false;
    session->put_off = may_be_read;
    return !may_be_read || !again;
}

static void look(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    uint64_t now = kld_worker_now_ns(), next_ns = UINT64_MAX;
    uint64_t patience_ns = worker->options.config->hello_ms * UINT64_C(1000000);
    struct kld_session *session, *next;
    for (session = TAILQ_FIRST(&worker->sessions); session; session = next) {
        next = TAILQ_NEXT(session, in_worker);
        if (session->greeted || session->state != KLD_SESSION_OPEN)
            continue;
        uint64_t waited_ns = now - session->opened_ns;
        if (waited_ns < patience_ns) {
            if (patience_ns - waited_ns < next_ns)
                next_ns = patience_ns - waited_ns;
        } else if (is_put_off(session)) {
            next_ns = next_ns < READ_BY_THEN_NS ? next_ns : READ_BY_THEN_NS;
        } else {
            send_away(session);
        }
    }
    if (next_ns != UINT64_MAX && !worker->stopping)
        uv_timer_start(&worker->hello, look, next_ns / 1000000 + 1, 0);
}

void kld_places_init(struct kld_worker *worker) {
    uv_timer_init(&worker->loop, &worker->hello);
    worker->hello.data = worker;
}

void kld_places_watch(struct kld_worker *worker) {
    if (!uv_is_active((uv_handle_t *)&worker->hello))
        uv_timer_start(&worker->hello, look, worker->options.config->hello_ms, 0);
}
