/* worker.c - the worker's loop: accepts clients, keeps the timers, drains on SIGTERM, ends.
 * What a request goes through is in core.c, what a client says in frames.c. Worker process, loop
 * thread; wake() of completions is the only thing that another thread calls. */
#include "server/worker/worker.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "proto/cpus.h"
#include "server/host_memory.h"
#include "server/log.h"
#include "server/signals.h"
#include "server/uv_loop.h"
#include "server/uv_pool.h"
#include "server/worker/closer.h"
#include "server/worker/core.h"
#include "server/worker/health.h"
#include "server/worker/kept.h"
#include "server/worker/orders.h"
#include "server/worker/places.h"
#include "server/worker/quota.h"
#include "server/worker/waits.h"

#define ACCEPT_BURST 16
#define ACCEPT_AGAIN_MS 100
#define START_LOOK_MS 2   /* while other workers start */
#define LOST_FLUSH_MS 200 /* given to clients to take their last replies from a lost device */

uint64_t kld_worker_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- Clients come ---------------------------------------------------------------------------- */

static void turn_away(struct kld_worker *worker, int fd, const struct kld_error *error) {
    union kld_frame frame;
    kld_session_error_frame(&frame, 0, error);
    (void)!send(fd, &frame, frame.header.length, MSG_DONTWAIT | MSG_NOSIGNAL);
    kld_close_connection(worker, NULL, fd);
}

static void welcome(struct kld_worker *worker, int fd) {
    struct kld_error error = {.status = KLD_OK};
    struct ucred peer = {0};
    kld_orders_hear(worker); /* one may say who it is that connects */
    enum kld_status status = kld_peer_check(&worker->peers, &worker->gateway, fd, &peer, &error);
    if (status) {
        kld_stats_rejected(worker->stats, KLD_REJECT_unix_not_allowed);
    } else if ((status = kld_places_check(worker, fd, peer.uid, &error))) {
        kld_stats_rejected(worker->stats, KLD_REJECT_unix_clients_max);
    }
    if (!status && (status = kld_session_open(worker, fd, peer.uid, peer.pid, &error)))
        kld_stats_rejected(worker->stats, KLD_REJECT_unix_no_memory);
    if (!status)
        return;
    if (kld_failed_lines_take(&worker->failed_lines))
        kld_log(KLD_LOG_WARN, "client refused", "client_pid=%d uid=%u status=%s text=\"%s\"",
                (int)peer.pid, (unsigned)peer.uid, kld_status_name(status), error.text);
    turn_away(worker, fd, &error);
}

/* Connections that are not yet closed take room, too; while there are many of those, newcomers wait
 * in the backlog. */
static bool has_room(struct kld_worker *worker) {
    if (kld_strays_crowded(worker->strays))
        return false;
    worker->room_ns = kld_worker_now_ns();
    return worker->refusals < KLD_REFUSALS_MAX;
}

static void accept_again(uv_timer_t *timer) { kld_worker_accept(timer->data); }

static void pause_accept(struct kld_worker *worker, uint64_t again_ms) {
    uv_poll_stop(&worker->listener);
    worker->listening = false;
    if (again_ms)
        uv_timer_start(&worker->accept_again, accept_again, again_ms, 0);
}

static void listener_ready(uv_poll_t *poll, int status, int events) {
    struct kld_worker *worker = poll->data;
    (void)events;
    for (int i = 0; i < ACCEPT_BURST && status >= 0; i++) {
        if (!has_room(worker)) {
            pause_accept(worker, 0);
            kld_worker_accept(worker);
            return;
        }
        int fd = accept4(worker->options.listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            welcome(worker, fd);
            continue;
        }
        if (errno == EAGAIN)
            return;
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            if (kld_failed_lines_take(&worker->failed_lines))
                kld_log(KLD_LOG_WARN, "accept paused", "error=\"%s\"", strerror(errno));
            pause_accept(worker, ACCEPT_AGAIN_MS);
            return;
        }
    }
}

void kld_worker_accept(struct kld_worker *worker) {
    if (worker->listening || worker->draining || worker->stopping)
        return;
    if (uv_is_active((uv_handle_t *)&worker->accept_again))
        return; /* it rests, whoever has just left */
    if (!has_room(worker)) {
        kld_health_let_in_soon(worker);
        return;
    }
    /* At the server's start: WELCOME lists all devices, so clients wait until all are known. */
    if (!kld_stats_described(worker->options.page)) {
        uv_timer_start(&worker->accept_again, accept_again, START_LOOK_MS, 0);
        return;
    }
    worker->listening = true;
    uv_poll_start(&worker->listener, UV_READABLE, listener_ready);
}

/* ---- Timers, completions --------------------------------------------------------------------- */

static void deadline_due(uv_timer_t *timer) { kld_core_expire(timer->data); }

void kld_worker_watch_deadlines(struct kld_worker *worker) {
    const struct kld_request *request = kld_queue_earliest(&worker->queue);
    if (!request) {
        uv_timer_stop(&worker->deadline);
        return;
    }
    uint64_t now = kld_worker_now_ns();
    uint64_t wait_ns = request->deadline_ns > now ? request->deadline_ns - now : 0;
    uv_update_time(&worker->loop);
    uv_timer_start(&worker->deadline, deadline_due, (wait_ns + 999999) / 1000000, 0);
}

void kld_worker_pool_counted(struct kld_worker *worker) {
    const struct kld_backend *backend = worker->options.backend;
    uint64_t bytes = backend->pool_bytes(worker->device);
    kld_stats_set(worker->stats, KLD_STAT_pool_bytes, bytes);
    atomic_store(&worker->shown->pool_bytes, bytes);
    uint64_t made = backend->pool_allocations ? backend->pool_allocations(worker->device) : 0;
    kld_stats_add(worker->stats, KLD_STAT_pool_allocations_total,
                  (int64_t)(made - worker->pool_allocations));
    worker->pool_allocations = made;
}

void kld_worker_shares_card(struct kld_worker *worker) {
    if (worker->told_turns || !worker->device->info.takes_turns)
        return;
    worker->told_turns = true;
    kld_log(
        KLD_LOG_WARN, "no MPS", "text=\"%s\"",
        "clients use this GPU too: while they compute, a small request takes some 0.3 ms instead "
        "of 0.03; run the server and its clients under nvidia-cuda-mps-control");
}

void kld_worker_handle_came(struct kld_worker *worker) {
    const struct kld_backend *backend = worker->options.backend;
    if (worker->told_handles || !backend->handles_unread ||
        !backend->handles_unread(worker->device))
        return;
    worker->told_handles = true;
    kld_log(KLD_LOG_WARN, "CUDA handles unread", "text=\"%s\"",
            "this driver's IPC handles do not name their card where it is looked for: memory of "
            "another card that is sent under this one's UUID is not refused");
}

static void completed(uv_async_t *async) { kld_core_completed(async->data); }

/* more: again at the loop's next turn. */
static void poll_device(struct kld_worker *worker, bool more) {
    const struct kld_backend *backend = worker->options.backend;
    atomic_store(&worker->completions.polled, more);
    if (backend->poll)
        backend->poll(worker->device, more);
}

static void polled(uv_idle_t *idle) {
    struct kld_worker *worker = idle->data;
    bool more = kld_worker_now_ns() < worker->poll_until_ns;
    poll_device(worker, more);
    if (kld_completions_waiting(&worker->completions))
        kld_core_completed(worker); /* after which there may be reason to go on */
    else if (more)
        sched_yield();
    else
        uv_idle_stop(idle);
}

#define SMALL_TURNS_MAX 16 /* then other events have theirs, ... */
#define SMALL_NS 200000u   /* ... as when this has passed */
#define AWAKE_CPUS_MIN 4   /* with fewer we would be in the way of those who send the next one */

/* Where our processor is what computes, what is small is computed here, before the loop sleeps: to
 * wake a thread for it, and to be woken, takes longer. Who sent it mostly sends the next one once
 * it has the reply, and to wake us would take longer than all the rest. */
static void run_small(uv_prepare_t *prepare) {
    struct kld_worker *worker = prepare->data;
    uint64_t until = kld_worker_now_ns() + SMALL_NS;
    uv_prepare_stop(prepare);
    for (int i = 0; i < SMALL_TURNS_MAX && (i == 0 || kld_worker_now_ns() < until); i++) {
        poll_device(worker, true);
        atomic_store(&worker->completions.polled, false);
        if (!kld_completions_waiting(&worker->completions)) {
            if (i && worker->awake_ns && !worker->queue.in_use)
                kld_uv_loop_stay_awake(&worker->loop, worker->awake_ns);
            return;
        }
        kld_core_completed(worker); /* which may launch what waited behind it */
    }
    poll_device(worker, false); /* what is left is its thread's */
    if (kld_completions_waiting(&worker->completions))
        uv_async_send(&worker->completions.wake);
}

void kld_worker_poll(struct kld_worker *worker) {
    if (worker->stopping)
        return;
    if (!worker->device->info.offloads) {
        if (worker->options.backend->poll && worker->queue.in_use)
            uv_prepare_start(&worker->small, run_small);
        return;
    }
    uint64_t polls_ns =
        worker->queue.in_use ? KLD_POLL_NS : worker->options.config->spin_us * UINT64_C(1000);
    worker->poll_until_ns = kld_worker_now_ns() + polls_ns;
    if (!atomic_load(&worker->completions.polled))
        poll_device(worker, true);
    uv_idle_start(&worker->poll, polled);
}

/* ---- The end --------------------------------------------------------------------------------- */

static bool all_said(const struct kld_worker *worker) {
    const struct kld_session *session;
    if (worker->queue.in_use)
        return false;
    TAILQ_FOREACH(session, &worker->sessions, in_worker)
    if (session->out_tail && !session->broken)
        return false;
    return true;
}

/* Closes every handle but the wake-up; the loop ends when the sessions are through. */
static void stop(struct kld_worker *worker) {
    if (worker->stopping)
        return;
    worker->stopping = true;
    atomic_store(&worker->shown->ready, 0);
    uv_close((uv_handle_t *)&worker->listener, NULL);
    kld_signals_block(NULL);
    uv_close((uv_handle_t *)&worker->terminate, NULL);
    uv_close((uv_handle_t *)&worker->fault, NULL);
    if (atomic_load(&worker->completions.polled) || worker->options.backend->poll)
        poll_device(worker, false);
    uv_close((uv_handle_t *)&worker->poll, NULL);
    uv_close((uv_handle_t *)&worker->small, NULL);
    uv_close((uv_handle_t *)&worker->deadline, NULL);
    uv_close((uv_handle_t *)&worker->accept_again, NULL);
    uv_close((uv_handle_t *)&worker->drain, NULL);
    uv_close((uv_handle_t *)&worker->waits, NULL);
    kld_health_close(worker);
    uv_close((uv_handle_t *)&worker->hello, NULL);
    kld_failed_lines_close(&worker->failed_lines);
    if (worker->options.control_fd >= 0)
        uv_close((uv_handle_t *)&worker->control, NULL);
    kld_kept_close(worker);
    struct kld_session *session, *next;
    for (session = TAILQ_FIRST(&worker->sessions); session; session = next) {
        next = TAILQ_NEXT(session, in_worker);
        kld_session_close(session);
    }
    uv_unref((uv_handle_t *)&worker->completions.wake);
}

void kld_worker_progress(struct kld_worker *worker) {
    if (worker->draining && !worker->stopping && !worker->lost && all_said(worker))
        stop(worker);
}

static void drain_over(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    kld_log(KLD_LOG_WARN, "drain cut short", "in_flight=%u", worker->queue.in_use);
    worker->cut_short = true;
    uv_stop(&worker->loop);
}

void kld_worker_drain(struct kld_worker *worker) {
    if (worker->draining)
        return;
    worker->draining = true;
    kld_log(KLD_LOG_INFO, "draining", "in_flight=%u clients=%u", worker->queue.in_use,
            worker->clients);
    if (worker->listening)
        pause_accept(worker, 0);
    uv_timer_stop(&worker->accept_again);
    uv_timer_start(&worker->drain, drain_over, worker->options.config->drain_ms, 0);
    kld_worker_progress(worker);
}

static void terminated(uv_signal_t *signal, int number) {
    (void)number;
    kld_worker_drain(signal->data);
}

static void fault_wanted(uv_signal_t *signal, int number) {
    struct kld_worker *worker = signal->data;
    (void)number;
    kld_log(KLD_LOG_WARN, "fault", "%s", "text=\"a test asked for it: the next operator fails\"");
    worker->options.backend->fail_next(worker->device);
}

/* As long as kernels of ours may run they may write into memory of clients, to whom a successor
 * would then answer the same request. */
static void tell_dead(struct kld_worker *worker) {
    const struct kld_worker_options *options = &worker->options;
    if (options->device_dead && options->backend->is_dead &&
        options->backend->is_dead(worker->device))
        options->device_dead(options);
}

/* Returns at the socket's first refusal from `until` on. */
static void flush_until(struct kld_session *session, uint64_t until) {
    while (session->out_tail && !session->broken) {
        uint64_t now = kld_worker_now_ns();
        int wait_ms = now < until ? (int)((until - now + 999999) / 1000000) : 0;
        struct pollfd poll_fd = {.fd = session->fd, .events = POLLOUT};
        if (poll(&poll_fd, 1, wait_ms) <= 0)
            return;
        kld_session_flush(session);
    }
}

/* A lost device: whoever does not take its last reply in time loses it. After that nobody is to
 * write to a process that does not read any more and may take seconds to end; frames that it never
 * read are discarded, because with some a socket's end costs the client its replies. */
static void part_with_all(struct kld_worker *worker) {
    uint64_t until = kld_worker_now_ns() + LOST_FLUSH_MS * UINT64_C(1000000);
    struct kld_session *session;
    TAILQ_FOREACH(session, &worker->sessions, in_worker) {
        if (session->state != KLD_SESSION_OPEN)
            continue;
        flush_until(session, until);
        shutdown(session->fd, SHUT_RDWR);
    }
    TAILQ_FOREACH(session, &worker->sessions, in_worker)
    if (session->state == KLD_SESSION_OPEN)
        kld_strays_discard_at_end(session->fd);
}

/* ---- Init, run, done ------------------------------------------------------------------------- */

static enum kld_status handles_init(struct kld_worker *worker, struct kld_error *err) {
    int listen_fd = worker->options.listen_fd;
    uv_loop_t *loop = &worker->loop;
    /* A failure of the first leaves nothing behind, one of the last what ends with the process. */
    if (uv_poll_init(loop, &worker->listener, listen_fd) != 0)
        return kld_error_set(err, KLD_INTERNAL, "the listening socket cannot be polled");
    uv_async_init(loop, &worker->completions.wake, completed);
    uv_idle_init(loop, &worker->poll);
    uv_unref((uv_handle_t *)&worker->poll);
    uv_prepare_init(loop, &worker->small);
    worker->small.data = worker;
    uv_timer_init(loop, &worker->deadline);
    uv_timer_init(loop, &worker->accept_again);
    uv_timer_init(loop, &worker->drain);
    kld_waits_init(worker);
    kld_failed_lines_open(&worker->failed_lines, &worker->loop);
    kld_health_init(worker);
    kld_kept_init(worker);
    kld_places_init(worker);
    uv_signal_init(loop, &worker->terminate);
    uv_signal_init(loop, &worker->fault);
    worker->completions.wake.data = worker->deadline.data = worker->accept_again.data = worker;
    worker->poll.data = worker->drain.data = worker->terminate.data = worker->listener.data =
        worker;
    worker->fault.data = worker;
    uv_signal_start(&worker->terminate, terminated, SIGTERM);
    if (worker->options.test_faults)
        uv_signal_start(&worker->fault, fault_wanted, SIGUSR2);
    return kld_orders_init(worker, err);
}

/* For /metrics, and for the other workers' WELCOME. */
static void describe(struct kld_worker *worker) {
    const struct kld_device_info *info = &worker->device->info;
    struct kld_stats_device *shown = worker->shown;
    if (atomic_load(&shown->described))
        return; /* by the worker that this one replaces: the same */
    memcpy(shown->backend, info->backend, sizeof shown->backend);
    memcpy(shown->name, info->name, sizeof shown->name);
    memcpy(shown->uuid, info->uuid, sizeof shown->uuid);
    atomic_store(&shown->described, 1);
}

enum kld_status kld_worker_init(struct kld_worker *worker, const struct kld_worker_options *options,
                                struct kld_error *err) {
    memset(worker, 0, sizeof *worker);
    worker->options = *options;
    worker->device = options->device;
    worker->stats = &options->page->worker[options->index];
    worker->shown = &options->page->device[options->index];
    worker->started_ns = kld_worker_now_ns();
    worker->host_bytes = options->host_bytes ? options->host_bytes : kld_host_memory_bytes();
    uint32_t cpus = options->cpus ? options->cpus : kld_cpus_usable();
    worker->awake_ns = cpus < AWAKE_CPUS_MIN ? 0 : options->config->spin_us * 1000;
    worker->mapped_max = kld_quota_mappings_max(options->config, kld_host_mappings());
    worker->gateway.pidfd = -1;
    TAILQ_INIT(&worker->sessions);
    TAILQ_INIT(&worker->unsent);
    TAILQ_INIT(&worker->publications);
    do
        if (getrandom(&worker->epoch, sizeof worker->epoch, 0) != sizeof worker->epoch)
            worker->epoch = worker->started_ns;
    while (worker->epoch == 0);
    enum kld_status status;
    if ((status = kld_uv_pool_try(err)) ||
        (status = kld_peers_init(&worker->peers, options->config, err)) ||
        (status = kld_users_init(&worker->users, err)))
        return status;
    status = kld_queue_init(
        &worker->queue,
        (uint32_t)options->config->requests_max + kld_quota_gateway_requests(options->config), err);
    if (status) {
        kld_users_done(&worker->users);
        return status;
    }
    if (kld_uv_loop_open(&worker->loop) != 0) {
        kld_queue_done(&worker->queue);
        kld_users_done(&worker->users);
        return kld_error_set(err, KLD_INTERNAL, "no event loop");
    }
    status = kld_mappings_init(&worker->mappings, options->backend, options->device, &worker->users,
                               err);
    if (!status &&
        ((status = kld_strays_start(&worker->strays, err)) || (status = handles_init(worker, err))))
        kld_mappings_done(&worker->mappings);
    if (status) {
        kld_strays_end(worker->strays);
        uv_loop_close(&worker->loop);
        kld_queue_done(&worker->queue);
        kld_users_done(&worker->users);
        return status;
    }
    kld_stats_reset_role(worker->stats, "worker");
    worker->mappings.stats = worker->stats;
    kld_stats_set(worker->stats, KLD_STAT_pool_bytes_max, options->device->info.pool_bytes_max);
    atomic_store(&worker->shown->pool_bytes_max, options->device->info.pool_bytes_max);
    atomic_store(&worker->shown->pool_bytes, 0);
    kld_stats_set(worker->stats, KLD_STAT_device_memory_bytes, options->device->info.memory_bytes);
    atomic_store(&worker->stats->device_worked_ns, worker->started_ns);
    describe(worker);
    kld_worker_accept(worker);
    kld_health_start(worker);
    kld_uv_pool_start(&worker->loop);
    /* Before anybody is told so: who connects from here on is served once the loop runs. */
    atomic_store(&worker->shown->ready, 1);
    return KLD_OK;
}

int kld_worker_run(struct kld_worker *worker) {
    uv_run(&worker->loop, UV_RUN_DEFAULT);
    atomic_store(&worker->shown->ready, 0);
    if (!worker->lost)
        return 0;
    tell_dead(worker);
    part_with_all(worker);
    return 2;
}

void kld_worker_done(struct kld_worker *worker) {
    /* First the device: afterwards none of its threads can be on its way to the wake-up. */
    worker->options.backend->device_close(worker->device);
    uv_close((uv_handle_t *)&worker->completions.wake, NULL);
    uv_run(&worker->loop, UV_RUN_DEFAULT);
    uv_loop_close(&worker->loop);
    kld_orders_done(worker);
    kld_strays_end(worker->strays);
    kld_mappings_done(&worker->mappings);
    kld_users_done(&worker->users);
    kld_queue_done(&worker->queue);
}
