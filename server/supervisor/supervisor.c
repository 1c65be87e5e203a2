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
#include "server/signals.h"
#include "server/uv_loop.h"
#include "server/uv_pool.h"

#define REAP_DELAY_MS 50    /* libuv collects its own children first */
#define DRAIN_GRACE_MS 5000 /* past drain_ms, when children answer what is left and end */

static bool is_running(const struct kld_watched *child) {
    return child->state == KLD_CHILD_STARTING || child->state == KLD_CHILD_READY;
}

static bool is_active(const struct kld_watched *child) {
    return child->state != KLD_CHILD_STOPPED || child->lives != NULL;
}

static bool any_active(const struct kld_supervisor *supervisor) {
    for (uint32_t i = 0; i < supervisor->workers; i++)
        if (is_active(&supervisor->worker[i]))
            return true;
    return is_active(&supervisor->gateway);
}

static void close_handle(uv_handle_t *handle, void *unused) {
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

/* ---- the end --------------------------------------------------------------------------------- */

static void kill_all(struct kld_supervisor *supervisor) {
    for (uint32_t i = 0; i < supervisor->workers; i++)
        kld_watched_kill(&supervisor->worker[i]);
    kld_watched_kill(&supervisor->gateway);
}

static void on_drain_over(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    kld_log(KLD_LOG_WARN, "drain time over", "drain_ms=%llu",
            (unsigned long long)supervisor->config.drain_ms);
    supervisor->killing = true;
    kill_all(supervisor);
}

/* Asks it to end. False: it has. Retiring may come back to drain_next(), which ends the rest. */
static bool drain_child(struct kld_watched *child) {
    if (is_running(child))
        kld_watched_ask(child);
    else
        kld_watched_retire(child);
    return child->state != KLD_CHILD_STOPPED;
}

/* The gateway first: what it has in flight needs the workers. */
static void drain_next(struct kld_supervisor *supervisor) {
    if (supervisor->killing)
        kill_all(supervisor);
    if (drain_child(&supervisor->gateway))
        return;
    for (uint32_t i = 0; i < supervisor->workers; i++)
        drain_child(&supervisor->worker[i]);
    if (any_active(supervisor))
        return;
    kld_signals_block(NULL); /* without children nothing is left to be told */
    uv_walk(&supervisor->loop, close_handle, NULL);
    if (supervisor->reload.readings) /* for which the loop would wait */
        uv_stop(&supervisor->loop);
}

static void drain_begin(struct kld_supervisor *supervisor) {
    if (supervisor->draining)
        return;
    supervisor->draining = true;
    kld_notify_send(&supervisor->notify, "STOPPING=1");
    uv_timer_start(&supervisor->drain, on_drain_over, supervisor->config.drain_ms + DRAIN_GRACE_MS,
                   0);
    drain_next(supervisor);
}

/* Who looks at the page learns that somebody wants it so, which one that fails does not say. */
void kld_supervisor_drain(struct kld_supervisor *supervisor, int signal_number) {
    kld_log(KLD_LOG_INFO, "draining", "signal=%d", signal_number);
    atomic_store(&supervisor->page->draining, 1);
    drain_begin(supervisor);
}

static void on_stop_signal(uv_signal_t *handle, int signal_number) {
    struct kld_supervisor *supervisor = handle->data;
    if (supervisor->draining && signal_number == SIGINT) { /* a second ^C */
        kld_log(KLD_LOG_INFO, "stopping at once", "signal=%d", signal_number);
        supervisor->killing = true;
        kill_all(supervisor);
    } else {
        kld_supervisor_drain(supervisor, signal_number);
    }
}

void kld_supervisor_fail(struct kld_supervisor *supervisor, const struct kld_watched *child,
                         const char *reason) {
    if (supervisor->failed || supervisor->draining)
        return;
    supervisor->failed = true;
    kld_log(KLD_LOG_ERROR, "cannot start", "child=%s reason=\"%s\"", child->name, reason);
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
    return child != &supervisor->gateway && is_running(&supervisor->gateway);
}

void kld_supervisor_child_gone(struct kld_supervisor *supervisor, struct kld_watched *child) {
    if (child == &supervisor->gateway)
        kld_reload_gateway_gone(supervisor);
    if (supervisor->draining && child->state == KLD_CHILD_STOPPED)
        drain_next(supervisor);
}

void kld_supervisor_tell_ready(struct kld_supervisor *supervisor, const char *problem) {
    char state[KLD_ADDRESS_TEXT_MAX + 2 * KLD_CONFIG_TEXT_MAX + KLD_ERROR_TEXT_MAX + 64];
    snprintf(state, sizeof state, "READY=1\nSTATUS=serves on %s %s, back end %s, devices %u%s%s",
             supervisor->http.address, supervisor->config.unix, supervisor->config.backend,
             supervisor->workers, problem ? "; " : "", problem ? problem : "");
    kld_notify_send(&supervisor->notify, state);
}

static void announce(struct kld_supervisor *supervisor) {
    bool ready = supervisor->workers == supervisor->workers_max &&
                 (supervisor->http.fd < 0 || supervisor->gateway.state == KLD_CHILD_READY);
    for (uint32_t i = 0; i < supervisor->workers; i++)
        ready = ready && supervisor->worker[i].state == KLD_CHILD_READY;
    if (supervisor->announced || supervisor->draining || !ready)
        return;
    supervisor->announced = true;
    kld_ready_line_say(&supervisor->ready_line, "ready http=%s unix=%s backend=%s devices=%u\n",
                       supervisor->http.address, supervisor->config.unix,
                       supervisor->config.backend, supervisor->workers);
    kld_supervisor_tell_ready(supervisor, NULL);
    kld_reload_proceed(supervisor);
}

/* The socket of worker i, and the worker; not yet started. */
static enum kld_status open_worker(struct kld_supervisor *supervisor, uint32_t i,
                                   struct kld_error *err) {
    const struct kld_config *config = &supervisor->config;
    char path[KLD_CONFIG_TEXT_MAX];
    enum kld_status status = kld_unix_socket_name(config->unix, i, path, err);
    int passed = supervisor->inherited.unix_socket[i];
    if (status == KLD_OK && passed >= 0)
        status = kld_unix_socket_adopt(passed, path, &supervisor->unix_socket[i], err);
    else if (status == KLD_OK)
        status =
            kld_unix_socket_open(path, (uint32_t)config->unix_mode, supervisor->make_folder,
                                 &supervisor->lock_waited_ns, &supervisor->unix_socket[i], err);
    if (status == KLD_OK)
        kld_watched_init(&supervisor->worker[i], supervisor, "worker", i,
                         supervisor->unix_socket[i].fd);
    supervisor->workers += status == KLD_OK;
    return status;
}

/* "all" becomes the numbers that there were: a card that goes does not give its number to another.
 */
static void settle_devices(struct kld_supervisor *supervisor, uint32_t found) {
    char *list = supervisor->config.device;
    size_t used = 0;
    if (found > KLD_DEVICES_MAX)
        kld_log(KLD_LOG_WARN, "more devices than workers", "devices=%u workers=%d", found,
                KLD_DEVICES_MAX);
    supervisor->workers_max = found > KLD_DEVICES_MAX ? KLD_DEVICES_MAX : found > 0 ? found : 1;
    for (uint32_t i = 0; i < supervisor->workers_max; i++)
        used += (size_t)snprintf(list + used, KLD_CONFIG_TEXT_MAX - used, i ? ",%u" : "%u", i);
}

static void start_gateway(struct kld_supervisor *supervisor) {
    if (supervisor->http.fd >= 0 && !supervisor->failed)
        kld_watched_start(&supervisor->gateway);
}

/* Those of the workers that are known by now. */
static enum kld_status open_workers(struct kld_supervisor *supervisor, struct kld_error *err) {
    uint32_t wanted = supervisor->workers_max ? supervisor->workers_max : 1;
    enum kld_status status = KLD_OK;
    while (status == KLD_OK && supervisor->workers < wanted)
        status = open_worker(supervisor, supervisor->workers, err);
    atomic_store(&supervisor->page->workers, supervisor->workers_max);
    return status;
}

/* What is invalid, or not allowed, is the settings' fault. */
static bool is_of_settings(enum kld_status status) {
    return status == KLD_INVALID || status == KLD_FORBIDDEN;
}

/* The first worker serves: what it chose and found holds for the others. */
static void start_others(struct kld_supervisor *supervisor, uint32_t found) {
    struct kld_error err = {.status = KLD_OK};
    if (supervisor->workers_max == 0)
        settle_devices(supervisor, found);
    enum kld_status status = open_workers(supervisor, &err);
    if (status != KLD_OK) {
        supervisor->settings_wrong = is_of_settings(status);
        kld_supervisor_fail(supervisor, &supervisor->worker[0], err.text);
        return;
    }
    for (uint32_t i = 1; i < supervisor->workers; i++)
        kld_watched_start(&supervisor->worker[i]);
    start_gateway(supervisor);
}

void kld_supervisor_child_ready(struct kld_supervisor *supervisor, struct kld_watched *child,
                                const struct kld_child_report *report) {
    uint64_t now_ms = uv_now(&supervisor->loop);
    uint64_t gap_ms = child->died_ms ? now_ms - child->died_ms : 0;
    kld_log(KLD_LOG_INFO, "child ready", "child=%s child_pid=%d backend=%s gap_ms=%llu",
            child->name, (int)child->life->process.pid, report->backend[0] ? report->backend : "-",
            (unsigned long long)gap_ms);
    /* "auto" is decided once: a worker that comes back must not answer from another back end. */
    if (child == &supervisor->worker[0] && report->backend[0])
        snprintf(supervisor->config.backend, sizeof supervisor->config.backend, "%s",
                 report->backend);
    if (child == &supervisor->worker[0] && supervisor->alone && !supervisor->draining) {
        supervisor->alone = false;
        start_others(supervisor, report->devices);
    }
    announce(supervisor);
    kld_watchdog_ready(child);
    kld_reload_proceed(supervisor);
}

/* ---- PID 1 ------------------------------------------------------------------------------------
 */

static bool is_life(const struct kld_watched *child, pid_t pid) {
    for (const struct kld_life *life = child->lives; life; life = life->next)
        if (life->process.pid == pid)
            return true;
    return false;
}

static bool is_ours(const struct kld_supervisor *supervisor, pid_t pid) {
    bool ours = is_life(&supervisor->gateway, pid);
    for (uint32_t i = 0; i < supervisor->workers && !ours; i++)
        ours = is_life(&supervisor->worker[i], pid);
    return ours;
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
    /* One that is due is not put off, which orphans could do for ever. */
    if (!uv_is_active((uv_handle_t *)&supervisor->reaping))
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
    kld_signals_unblock();
    if (getpid() == 1)
        uv_signal_start(&supervisor->on_child, on_child_signal, SIGCHLD);
    kld_reload_init(supervisor);
    kld_notify_start(&supervisor->notify, loop);
    kld_ready_line_open(&supervisor->ready_line, loop);
    kld_watchdog_start(supervisor);
    kld_introduce_init(supervisor);
    kld_usage_start(supervisor);
    kld_watched_init(&supervisor->gateway, supervisor, "gateway", 0, supervisor->http.fd);
    supervisor->gateway.metrics_fd = supervisor->metrics.fd;
}

/* TCP: as passed by a service manager, else as configured. */
static enum kld_status open_http(struct kld_supervisor *supervisor, const struct kld_config *config,
                                 struct kld_error *err) {
    bool insecure = config->insecure_bind || config->tokens[0];
    const struct kld_inherited *passed = &supervisor->inherited;
    enum kld_status status;
    if (passed->http >= 0)
        status = kld_http_socket_adopt("--http", passed->http, insecure, &supervisor->http, err);
    else
        status = kld_http_socket_open("--http", config->http, insecure, &supervisor->http, err);
    if (status == KLD_OK && passed->metrics >= 0)
        status = kld_http_socket_adopt("--metrics-http", passed->metrics, insecure,
                                       &supervisor->metrics, err);
    else if (status == KLD_OK)
        status = kld_http_socket_open("--metrics-http", config->metrics_http, insecure,
                                      &supervisor->metrics, err);
    /* The gateway reads there whether it has them. */
    if (passed->http >= 0)
        snprintf(supervisor->config.http, KLD_CONFIG_TEXT_MAX, "%s", supervisor->http.address);
    if (passed->metrics >= 0)
        snprintf(supervisor->config.metrics_http, KLD_CONFIG_TEXT_MAX, "%s",
                 supervisor->metrics.address);
    if (status == KLD_OK && supervisor->metrics.fd >= 0)
        kld_log(KLD_LOG_INFO, "metrics have an address", "http=%s", supervisor->metrics.address);
    return status;
}

/* Where the first worker's socket is: where it was passed, else as configured. */
static enum kld_status place_unix(struct kld_supervisor *supervisor,
                                  const struct kld_config *config, struct kld_error *err) {
    char passed[KLD_CONFIG_TEXT_MAX] = "";
    if (supervisor->inherited.unix_socket[0] >= 0 && !*config->unix)
        kld_unix_socket_where(supervisor->inherited.unix_socket[0], passed);
    supervisor->make_folder = !*config->unix && !*passed;
    return kld_unix_socket_path(*passed ? passed : config->unix, supervisor->config.unix, err);
}

static enum kld_status open_all(struct kld_supervisor *supervisor, const struct kld_config *config,
                                const struct kld_start *start, struct kld_error *err) {
    supervisor->config = *config;
    supervisor->http.fd = supervisor->metrics.fd = -1;
    supervisor->stats_fds = KLD_STATS_NO_FDS;
    supervisor->reload.secrets_fd = supervisor->hangup.fd = -1;
    for (uint32_t i = 0; i < KLD_DEVICES_MAX; i++)
        supervisor->unix_socket[i].fd = -1;
    supervisor->workers_max = kld_config_devices(config);
    supervisor->alone = supervisor->workers_max != 1;
    kld_notify_open(&supervisor->notify);
    enum kld_status status = kld_inherited_take(&supervisor->inherited, err);
    if (status == KLD_OK)
        status = kld_settings_check(config, &supervisor->inherited, err);
    if (status == KLD_OK)
        status = place_unix(supervisor, config, err);
    if (status == KLD_OK)
        status = kld_stats_create(&supervisor->page, &supervisor->stats_fds, err);
    if (status == KLD_OK)
        status = open_http(supervisor, config, err);
    if (status == KLD_OK && kld_reload_open(supervisor, config, start, err) != KLD_OK)
        status = KLD_UNAVAILABLE; /* what is at these paths may be another by the next start */
    if (status == KLD_OK)
        status = kld_uv_pool_try(err);
    if (status == KLD_OK && kld_uv_loop_open(&supervisor->loop) != 0)
        status = kld_error_set(err, KLD_NO_MEMORY, "cannot make an event loop");
    if (status != KLD_OK)
        return status;
    init_loop(supervisor);
    kld_hangup_open(supervisor, start->hangup_ignored);
    if ((status = open_workers(supervisor, err))) {
        uv_walk(&supervisor->loop, close_handle, NULL);
        uv_run(&supervisor->loop, UV_RUN_DEFAULT);
        uv_loop_close(&supervisor->loop);
    } else {
        kld_settings_tell(supervisor, config, start->environment);
        kld_uv_pool_start(&supervisor->loop);
    }
    return status;
}

static void close_all(struct kld_supervisor *supervisor) {
    for (uint32_t i = 0; i < KLD_DEVICES_MAX; i++) {
        char path[KLD_CONFIG_TEXT_MAX];
        if (kld_unix_socket_name(supervisor->config.unix, i, path, NULL) == KLD_OK)
            kld_unix_socket_close(&supervisor->unix_socket[i], path);
    }
    if (supervisor->http.fd >= 0)
        close(supervisor->http.fd);
    if (supervisor->metrics.fd >= 0)
        close(supervisor->metrics.fd);
    kld_stats_close(&supervisor->stats_fds);
    kld_hangup_close(supervisor);
    kld_reload_close(supervisor);
    kld_stats_detach(supervisor->page);
    kld_notify_close(&supervisor->notify);
    kld_ready_line_close(&supervisor->ready_line);
}

int kld_supervisor_main(const struct kld_config *config, const struct kld_start *start) {
    struct kld_supervisor *supervisor = calloc(1, sizeof *supervisor);
    struct kld_error err = {.status = KLD_OK};
    enum kld_status status;
    if (!supervisor)
        status = kld_error_set(&err, KLD_NO_MEMORY, "out of memory");
    else
        status = open_all(supervisor, config, start, &err);
    int result = is_of_settings(status) ? KLD_EXIT_SETTINGS : EXIT_FAILURE;
    if (status != KLD_OK) {
        kld_log(KLD_LOG_ERROR, "cannot start", "reason=\"%s\"", err.text);
    } else {
        kld_log_count_lost_in(&supervisor->page->common);
        kld_watched_start(&supervisor->worker[0]);
        if (!supervisor->alone)
            start_gateway(supervisor);
        uv_run(&supervisor->loop, UV_RUN_DEFAULT); /* returns when every handle is closed */
        uv_loop_close(&supervisor->loop);
        result = supervisor->settings_wrong ? KLD_EXIT_SETTINGS
                 : supervisor->failed       ? EXIT_FAILURE
                                            : EXIT_SUCCESS;
        kld_log(KLD_LOG_INFO, "stopped", "status=%d", result);
        kld_log_count_lost_in(NULL);
    }
    if (supervisor)
        close_all(supervisor);
    /* A thread that reads for a reload still has it, and exit() would wait for that one. */
    if (supervisor && supervisor->reload.readings)
        _exit(result);
    free(supervisor);
    return result;
}
