/* child.c - one child over all its lives: spawn, its report, its death, the pause before the next.
 * It does not decide whether a child is wanted (supervisor.c does). Supervisor's loop thread. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"

#define SERVED_MS 5000      /* after serving that long a death is news, not a habit */
#define FIRST_PAUSE_MS 100  /* the second restart in a row; the first comes at once */
#define SILENT_DEATHS_MAX 5 /* before a first report; then it is not going to work */

static void pause_then_start(struct kld_watched *child);

static void control_close(struct kld_watched *child) {
    if (!child->control_open)
        return;
    child->control_open = false;
    uv_poll_stop(&child->control);
}

/* Only now may the handles be used again. */
static void on_process_closed(uv_handle_t *handle) {
    struct kld_watched *child = handle->data;
    child->process_open = false;
    pause_then_start(child);
}

static void on_control_closed(uv_handle_t *handle) {
    struct kld_watched *child = handle->data;
    close(child->control_fd);
    child->control_fd = -1;
    uv_close((uv_handle_t *)&child->process, on_process_closed);
}

static void on_pause_over(uv_timer_t *timer) {
    struct kld_watched *child = timer->data;
    kld_stats_add(child->supervisor->stats, child->restarts, 1);
    kld_watched_start(child);
}

/* The dead process is gone and its handles are closed. */
static void pause_then_start(struct kld_watched *child) {
    struct kld_supervisor *supervisor = child->supervisor;
    if (!kld_supervisor_wants(supervisor, child)) {
        child->state = KLD_CHILD_STOPPED;
        kld_supervisor_child_gone(supervisor, child);
        return;
    }
    uint64_t pause_ms = child->pause_ms, longest_ms = supervisor->config.restart_ms_max;
    child->pause_ms = pause_ms ? 2 * pause_ms : FIRST_PAUSE_MS;
    if (child->pause_ms > longest_ms)
        child->pause_ms = longest_ms;
    child->state = KLD_CHILD_WAITING;
    uv_timer_start(&child->pause, on_pause_over, pause_ms, 0);
    kld_supervisor_child_gone(supervisor, child);
}

static void log_death(const struct kld_watched *child, int64_t exit_status, int signal_number) {
    bool fine = exit_status == 0 && signal_number == 0 && child->supervisor->draining;
    if (signal_number)
        kld_log(KLD_LOG_WARN, "child died", "child=%s child_pid=%d signal=%d reason=\"%s\"",
                child->role, (int)child->process.pid, signal_number, strsignal(signal_number));
    else
        kld_log(fine ? KLD_LOG_INFO : KLD_LOG_WARN, "child exited",
                "child=%s child_pid=%d status=%d", child->role, (int)child->process.pid,
                (int)exit_status);
}

static void read_report(struct kld_watched *child);

static void on_death(uv_process_t *process, int64_t exit_status, int signal_number) {
    struct kld_watched *child = process->data;
    struct kld_supervisor *supervisor = child->supervisor;
    if (child->ready_ms == 0)
        read_report(child); /* its last words may still be in the socket */
    log_death(child, exit_status, signal_number);
    /* What it can no longer set itself. */
    if (strcmp(child->role, "worker") == 0)
        atomic_store(&supervisor->stats->worker_ready, 0);
    kld_stats_reset_role(supervisor->stats, child->role);

    uint64_t now_ms = uv_now(&supervisor->loop);
    if (child->ready_ms && now_ms - child->ready_ms >= SERVED_MS)
        child->pause_ms = 0;
    bool silent = child->ready_ms == 0 && !child->ever_ready;
    child->died_ms = now_ms;
    child->ready_ms = 0;
    child->state = KLD_CHILD_STOPPED;
    if (silent && ++child->failures >= SILENT_DEATHS_MAX && !supervisor->failed)
        kld_supervisor_fail(supervisor, child, "it keeps dying before it serves");
    control_close(child);
    uv_close((uv_handle_t *)&child->control, on_control_closed);
}

static void read_report(struct kld_watched *child) {
    struct kld_child_report report;
    ssize_t bytes = recv(child->control_fd, &report, sizeof report, MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    control_close(child); /* one report a life; the end is seen by on_death() */
    if (bytes != (ssize_t)sizeof report)
        return;
    report.backend[sizeof report.backend - 1] = '\0';
    report.text[sizeof report.text - 1] = '\0';
    if (report.status == KLD_OK) {
        child->state = KLD_CHILD_READY;
        child->ready_ms = uv_now(&child->supervisor->loop);
        child->ever_ready = true;
        kld_supervisor_child_ready(child->supervisor, child, &report);
    } else if (!child->ever_ready) {
        kld_supervisor_fail(child->supervisor, child, report.text);
    } else {
        kld_log(KLD_LOG_ERROR, "child cannot start", "child=%s reason=\"%s\"", child->role,
                report.text);
    }
}

static void on_control(uv_poll_t *control, int status, int events) { read_report(control->data); }

/* "kld-server", the two hidden flags, every setting. NULL: out of memory. */
static char **arguments_of(const struct kld_watched *child, char **settings) {
    static char name[] = "kld-server", worker[] = "--role=worker", gateway[] = "--role=gateway",
                index[] = "--index=0";
    size_t count = 0;
    while (settings[count])
        count++;
    char **arguments = calloc(count + 4, sizeof *arguments);
    if (!arguments)
        return NULL;
    arguments[0] = name;
    arguments[1] = strcmp(child->role, "worker") == 0 ? worker : gateway;
    arguments[2] = index;
    memcpy(arguments + 3, settings, count * sizeof *arguments);
    return arguments;
}

static int spawn(struct kld_watched *child, int childs_end) {
    struct kld_supervisor *supervisor = child->supervisor;
    char **settings = kld_config_arguments(&supervisor->config);
    char **arguments = settings ? arguments_of(child, settings) : NULL;
    uv_stdio_container_t stdio[] = {
        {.flags = UV_IGNORE}, /* standard input and output are not theirs: */
        {.flags = UV_IGNORE}, /* the output carries the ready line only */
        {.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO},
        {.flags = UV_INHERIT_FD, .data.fd = child->listen_fd},
        {.flags = UV_INHERIT_FD, .data.fd = supervisor->stats_fd},
        {.flags = UV_INHERIT_FD, .data.fd = childs_end},
    };
    uv_process_options_t options = {
        .file = "/proc/self/exe", /* the very same program, even if its file was replaced */
        .args = arguments,
        .stdio = stdio,
        .stdio_count = sizeof stdio / sizeof stdio[0],
        .exit_cb = on_death,
    };
    int result = arguments ? uv_spawn(&supervisor->loop, &child->process, &options) : UV_ENOMEM;
    child->process_open = arguments != NULL; /* uv_spawn() opens the handle even where it fails */
    child->process.data = child;
    free(arguments);
    kld_config_arguments_free(settings);
    return result;
}

void kld_watched_start(struct kld_watched *child) {
    struct kld_supervisor *supervisor = child->supervisor;
    int pair[2] = {-1, -1}, result;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        result = uv_translate_sys_error(errno);
    else
        result = spawn(child, pair[1]);
    if (pair[1] >= 0)
        close(pair[1]);
    if (result == 0) {
        child->control_fd = pair[0];
        child->control.data = child;
        child->ready_ms = 0;
        child->state = KLD_CHILD_STARTING;
        /* These two cannot fail with a fresh socket of our own. */
        uv_poll_init(&supervisor->loop, &child->control, child->control_fd);
        uv_poll_start(&child->control, UV_READABLE | UV_DISCONNECT, on_control);
        child->control_open = true;
        kld_log(KLD_LOG_INFO, "child started", "child=%s child_pid=%d", child->role,
                (int)child->process.pid);
        return;
    }
    if (pair[0] >= 0)
        close(pair[0]);
    kld_log(KLD_LOG_ERROR, "child not started", "child=%s reason=\"%s\"", child->role,
            uv_strerror(result));
    if (!child->ever_ready)
        kld_supervisor_fail(supervisor, child, uv_strerror(result));
    if (child->process_open)
        uv_close((uv_handle_t *)&child->process, on_process_closed);
    else
        pause_then_start(child);
}

void kld_watched_init(struct kld_watched *child, struct kld_supervisor *supervisor,
                      const char *role, int listen_fd, enum kld_stat restarts) {
    memset(child, 0, sizeof *child);
    child->supervisor = supervisor;
    child->role = role;
    child->listen_fd = listen_fd;
    child->restarts = restarts;
    child->control_fd = -1;
    uv_timer_init(&supervisor->loop, &child->pause);
    child->pause.data = child;
}

void kld_watched_signal(struct kld_watched *child, int signal_number) {
    if (child->state == KLD_CHILD_STARTING || child->state == KLD_CHILD_READY)
        uv_process_kill(&child->process, signal_number);
}

void kld_watched_retire(struct kld_watched *child) {
    if (child->state != KLD_CHILD_WAITING)
        return;
    uv_timer_stop(&child->pause);
    child->state = KLD_CHILD_STOPPED;
    kld_supervisor_child_gone(child->supervisor, child);
}
