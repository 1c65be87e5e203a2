/* supervisor.c - start, ready line, restart policy and the orderly end of the whole server.
 * It never reads a byte that a client sent. One thread, the libuv loop. */
#include "server/supervisor/supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/log.h"

#define REAP_DELAY_MS 50    /* libuv collects its own children first */
#define DRAIN_GRACE_MS 1000 /* past drain_ms, when children answer what is left and end */

static bool is_running(const struct kld_watched *child) {
    return child->state == KLD_CHILD_STARTING || child->state == KLD_CHILD_READY;
}

static bool is_active(const struct kld_supervisor *supervisor) {
    for (size_t i = 0; i < KLD_WATCHED_COUNT; i++)
        if (supervisor->child[i].state != KLD_CHILD_STOPPED || supervisor->child[i].process_open)
            return true;
    return false;
}

static void close_handle(uv_handle_t *handle, void *unused) {
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

/* ---- the end --------------------------------------------------------------------------------- */

static void kill_all(struct kld_supervisor *supervisor) {
    for (size_t i = 0; i < KLD_WATCHED_COUNT; i++)
        kld_watched_signal(&supervisor->child[i], SIGKILL);
}

static void on_drain_over(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    kld_log(KLD_LOG_WARN, "drain time over", "drain_ms=%llu",
            (unsigned long long)supervisor->config.drain_ms);
    supervisor->killing = true;
    kill_all(supervisor);
}

/* The gateway first: what it has in flight needs the worker. */
static void drain_next(struct kld_supervisor *supervisor) {
    struct kld_watched *gateway = &supervisor->child[KLD_WATCHED_GATEWAY];
    struct kld_watched *worker = &supervisor->child[KLD_WATCHED_WORKER];
    if (supervisor->killing)
        kill_all(supervisor);
    if (is_running(gateway))
        kld_watched_signal(gateway, SIGTERM);
    else if (gateway->state == KLD_CHILD_WAITING)
        kld_watched_retire(gateway);
    else if (is_running(worker))
        kld_watched_signal(worker, SIGTERM);
    else if (worker->state == KLD_CHILD_WAITING)
        kld_watched_retire(worker);
    else if (!is_active(supervisor))
        uv_walk(&supervisor->loop, close_handle, NULL);
}

static void drain_begin(struct kld_supervisor *supervisor) {
    if (supervisor->draining)
        return;
    supervisor->draining = true;
    atomic_store(&supervisor->stats->draining, 1);
    uv_timer_start(&supervisor->drain, on_drain_over, supervisor->config.drain_ms + DRAIN_GRACE_MS,
                   0);
    drain_next(supervisor);
}

static void on_stop_signal(uv_signal_t *handle, int signal_number) {
    struct kld_supervisor *supervisor = handle->data;
    bool impatient = supervisor->draining && signal_number == SIGINT;
    kld_log(KLD_LOG_INFO, impatient ? "stopping at once" : "draining", "signal=%d", signal_number);
    if (impatient) { /* a second ^C */
        supervisor->killing = true;
        kill_all(supervisor);
    }
    drain_begin(supervisor);
}

void kld_supervisor_fail(struct kld_supervisor *supervisor, const struct kld_watched *child,
                         const char *reason) {
    if (supervisor->failed || supervisor->draining)
        return;
    supervisor->failed = true;
    kld_log(KLD_LOG_ERROR, "cannot start", "child=%s reason=\"%s\"", child->role, reason);
    drain_begin(supervisor);
}

/* ---- children -------------------------------------------------------------------------------- */

bool kld_supervisor_wants(const struct kld_supervisor *supervisor,
                          const struct kld_watched *child) {
    if (supervisor->failed || supervisor->killing)
        return false;
    if (!supervisor->draining)
        return true;
    /* A worker that dies while the gateway still answers is needed to the end. */
    return child == &supervisor->child[KLD_WATCHED_WORKER] &&
           is_running(&supervisor->child[KLD_WATCHED_GATEWAY]);
}

void kld_supervisor_child_gone(struct kld_supervisor *supervisor, struct kld_watched *child) {
    if (supervisor->draining && child->state == KLD_CHILD_STOPPED)
        drain_next(supervisor);
}

static void announce(struct kld_supervisor *supervisor) {
    struct kld_watched *worker = &supervisor->child[KLD_WATCHED_WORKER];
    struct kld_watched *gateway = &supervisor->child[KLD_WATCHED_GATEWAY];
    bool http = supervisor->http.fd >= 0;
    if (supervisor->announced || supervisor->draining || worker->state != KLD_CHILD_READY ||
        (http && gateway->state != KLD_CHILD_READY))
        return;
    supervisor->announced = true;
    printf("ready http=%s unix=%s backend=%s\n", supervisor->http.address, supervisor->config.unix,
           supervisor->config.backend);
    fflush(stdout);
}

void kld_supervisor_child_ready(struct kld_supervisor *supervisor, struct kld_watched *child,
                                const struct kld_child_report *report) {
    uint64_t now_ms = uv_now(&supervisor->loop);
    uint64_t gap_ms = child->died_ms ? now_ms - child->died_ms : 0;
    kld_log(KLD_LOG_INFO, "child ready", "child=%s child_pid=%d backend=%s gap_ms=%llu",
            child->role, (int)child->process.pid, report->backend[0] ? report->backend : "-",
            (unsigned long long)gap_ms);
    /* "auto" is decided once: a worker that comes back must not answer from another back end. */
    if (child == &supervisor->child[KLD_WATCHED_WORKER] && report->backend[0])
        snprintf(supervisor->config.backend, sizeof supervisor->config.backend, "%s",
                 report->backend);
    announce(supervisor);
}

/* ---- PID 1 ------------------------------------------------------------------------------------
 */

static bool is_ours(const struct kld_supervisor *supervisor, pid_t pid) {
    for (size_t i = 0; i < KLD_WATCHED_COUNT; i++)
        if (supervisor->child[i].process_open && supervisor->child[i].process.pid == pid)
            return true;
    return false;
}

/* Children that we did not start are handed to PID 1 of a container. Ours are left to libuv; while
 * one of them stands first in line the rest wait for the next look. */
static void on_reap(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    siginfo_t info = {.si_pid = 0};
    while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
        if (is_ours(supervisor, info.si_pid)) {
            uv_timer_start(&supervisor->reaping, on_reap, REAP_DELAY_MS, 0);
            return;
        }
        waitpid(info.si_pid, NULL, 0);
        info.si_pid = 0;
    }
}

static void on_child_signal(uv_signal_t *handle, int signal_number) {
    struct kld_supervisor *supervisor = handle->data;
    uv_timer_start(&supervisor->reaping, on_reap, REAP_DELAY_MS, 0);
}

/* ---- start ----------------------------------------------------------------------------------- */

static void init_loop(struct kld_supervisor *supervisor) {
    uv_loop_t *loop = &supervisor->loop;
    uv_signal_init(loop, &supervisor->on_term);
    uv_signal_init(loop, &supervisor->on_int);
    uv_signal_init(loop, &supervisor->on_child);
    uv_timer_init(loop, &supervisor->drain);
    uv_timer_init(loop, &supervisor->reaping);
    supervisor->on_term.data = supervisor->on_int.data = supervisor->on_child.data = supervisor;
    supervisor->drain.data = supervisor->reaping.data = supervisor;
    uv_signal_start(&supervisor->on_term, on_stop_signal, SIGTERM);
    uv_signal_start(&supervisor->on_int, on_stop_signal, SIGINT);
    if (getpid() == 1)
        uv_signal_start(&supervisor->on_child, on_child_signal, SIGCHLD);
    kld_watched_init(&supervisor->child[KLD_WATCHED_WORKER], supervisor, "worker",
                     supervisor->unix_socket.fd, KLD_STAT_worker_restarts_total);
    kld_watched_init(&supervisor->child[KLD_WATCHED_GATEWAY], supervisor, "gateway",
                     supervisor->http.fd, KLD_STAT_gateway_restarts_total);
}

static enum kld_status open_all(struct kld_supervisor *supervisor, const struct kld_config *config,
                                struct kld_error *err) {
    supervisor->config = *config;
    supervisor->http.fd = supervisor->unix_socket.fd = supervisor->stats_fd = -1;
    enum kld_status status = kld_unix_socket_path(config->unix, supervisor->config.unix, err);
    if (status == KLD_OK)
        status = kld_stats_create(&supervisor->stats, &supervisor->stats_fd, err);
    if (status == KLD_OK)
        status = kld_http_socket_open(config->http, config->insecure_bind || config->tokens[0],
                                      &supervisor->http, err);
    if (status == KLD_OK)
        status = kld_unix_socket_open(supervisor->config.unix, (uint32_t)config->unix_mode,
                                      !*config->unix, &supervisor->unix_socket, err);
    return status;
}

int kld_supervisor_main(const struct kld_config *config) {
    struct kld_supervisor *supervisor = calloc(1, sizeof *supervisor);
    struct kld_error err = {.status = KLD_OK};
    enum kld_status status;
    if (!supervisor)
        status = kld_error_set(&err, KLD_NO_MEMORY, "out of memory");
    else
        status = open_all(supervisor, config, &err);
    if (status == KLD_OK && uv_loop_init(&supervisor->loop) != 0)
        status = kld_error_set(&err, KLD_NO_MEMORY, "cannot make an event loop");
    bool failed = status != KLD_OK;
    if (failed) {
        kld_log(KLD_LOG_ERROR, "cannot start", "reason=\"%s\"", err.text);
    } else {
        kld_log_count_lost_in(supervisor->stats);
        init_loop(supervisor);
        kld_watched_start(&supervisor->child[KLD_WATCHED_WORKER]);
        if (supervisor->http.fd >= 0 && !supervisor->failed)
            kld_watched_start(&supervisor->child[KLD_WATCHED_GATEWAY]);
        uv_run(&supervisor->loop, UV_RUN_DEFAULT); /* returns when every handle is closed */
        uv_loop_close(&supervisor->loop);
        failed = supervisor->failed;
        kld_log(KLD_LOG_INFO, "stopped", "status=%d", failed);
        kld_log_count_lost_in(NULL);
    }
    if (supervisor) {
        kld_unix_socket_close(&supervisor->unix_socket, supervisor->config.unix);
        if (supervisor->http.fd >= 0)
            close(supervisor->http.fd);
        if (supervisor->stats_fd >= 0)
            close(supervisor->stats_fd);
        kld_stats_detach(supervisor->stats);
    }
    free(supervisor);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
