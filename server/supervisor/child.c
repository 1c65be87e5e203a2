/* child.c - one child over all its lives: spawn, its report, its death, the pause before the next.
 * It does not decide whether a child is wanted (supervisor.c does). Supervisor's loop thread. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"

#define SERVED_MS 5000      /* after serving that long a death is news, not a habit */
#define FIRST_PAUSE_MS 100  /* the second restart in a row; the first comes at once */
#define WORDS_MAX 16        /* packets of a child that has ended, most of which are signs of life */
#define SILENT_DEATHS_MAX 5 /* before a first report; then it is not going to work */

static void pause_then_start(struct kld_watched *child);

/* By its descriptor: libuv waits for all that have ended before it says of the first that it has,
 * and from then on their numbers may be those of strangers. */
static void signal_life(struct kld_life *life, int signal_number) {
    if (life->pidfd < 0 || (pidfd_send_signal(life->pidfd, signal_number, NULL, 0) != 0 &&
                            (errno == ENOSYS || errno == EPERM)))
        uv_process_kill(&life->process, signal_number);
}

static void control_close(struct kld_life *life) {
    if (!life->control_open)
        return;
    life->control_open = false;
    uv_poll_stop(&life->control);
}

static void on_process_closed(uv_handle_t *handle) {
    struct kld_life *life = handle->data;
    struct kld_watched *child = life->child;
    bool newest = child->life == life;
    struct kld_life **link = &child->lives;
    while (*link != life)
        link = &(*link)->next;
    *link = life->next;
    if (life->pidfd >= 0)
        close(life->pidfd);
    free(life);
    if (newest) {
        child->life = NULL;
        pause_then_start(child);
    } else {
        kld_supervisor_child_gone(child->supervisor, child);
    }
}

static void on_control_closed(uv_handle_t *handle) {
    struct kld_life *life = handle->data;
    close(life->control_fd);
    uv_close((uv_handle_t *)&life->process, on_process_closed);
}

static void close_handles(struct kld_life *life) {
    control_close(life);
    if (life->control_made)
        uv_close((uv_handle_t *)&life->control, on_control_closed);
    else
        on_control_closed((uv_handle_t *)&life->control);
}

static void on_pause_over(uv_timer_t *timer) {
    struct kld_watched *child = timer->data;
    kld_stats_add(child->stats, child->restarts, 1);
    kld_watched_start(child);
}

/* Before its next start. One that was only refused its device, as MPS does until the last process
 * that a fault hit has gone, asks again soon: that is no habit, and does not lengthen the pause. */
static uint64_t take_pause(struct kld_watched *child) {
    uint64_t pause_ms = child->pause_ms, longest_ms = child->supervisor->config.restart_ms_max;
    if (child->refused && child->refusals <= KLD_REFUSALS_IN_A_ROW)
        return longest_ms < FIRST_PAUSE_MS ? longest_ms : FIRST_PAUSE_MS;
    child->pause_ms = pause_ms ? 2 * pause_ms : FIRST_PAUSE_MS;
    if (child->pause_ms > longest_ms)
        child->pause_ms = longest_ms;
    return pause_ms;
}

/* Its process is gone, or as good as that. */
static void pause_then_start(struct kld_watched *child) {
    struct kld_supervisor *supervisor = child->supervisor;
    if (!kld_supervisor_wants(supervisor, child)) {
        child->state = KLD_CHILD_STOPPED;
        kld_supervisor_child_gone(supervisor, child);
        return;
    }
    child->state = KLD_CHILD_WAITING;
    uv_timer_start(&child->pause, on_pause_over, take_pause(child), 0);
    kld_supervisor_child_gone(supervisor, child);
}

/* The newest process serves no more. */
static void note_death(struct kld_watched *child) {
    struct kld_supervisor *supervisor = child->supervisor;
    /* What it can no longer set itself. */
    if (child != &supervisor->gateway)
        atomic_store(&supervisor->page->device[child->index].ready, 0);
    kld_stats_reset_role(child->stats, child->role);
    uint64_t now_ms = uv_now(&supervisor->loop);
    if (child->ready_ms && now_ms - child->ready_ms >= SERVED_MS)
        child->pause_ms = 0;
    child->died_ms = now_ms;
    child->ready_ms = 0;
    child->state = KLD_CHILD_STOPPED;
}

static void log_death(const struct kld_life *life, int64_t exit_status, int signal_number) {
    const struct kld_watched *child = life->child;
    bool fine = exit_status == 0 && signal_number == 0 && child->supervisor->draining;
    if (signal_number)
        kld_log(KLD_LOG_WARN, "child died", "child=%s child_pid=%d signal=%d reason=\"%s\"",
                child->name, (int)life->process.pid, signal_number, strsignal(signal_number));
    else
        kld_log(fine ? KLD_LOG_INFO : KLD_LOG_WARN, "child exited",
                "child=%s child_pid=%d status=%d", child->name, (int)life->process.pid,
                (int)exit_status);
}

static void hear(struct kld_life *life, bool all) {
    for (int i = 0; kld_watched_hear(life) && all && i < WORDS_MAX; i++)
        ;
}

static void on_death(uv_process_t *process, int64_t exit_status, int signal_number) {
    struct kld_life *life = process->data;
    struct kld_watched *child = life->child;
    life->running = false;
    hear(life, true); /* its last words may still be in the socket */
    log_death(life, exit_status, signal_number);
    if (child->life == life) {
        bool silent = child->ready_ms == 0 && !child->ever_ready;
        note_death(child);
        if (silent && ++child->failures >= SILENT_DEATHS_MAX && !child->supervisor->failed)
            kld_supervisor_fail(child->supervisor, child, "it keeps dying before it serves");
    }
    close_handles(life);
}

/* Its device is lost: whoever comes next need not wait until its process has been taken apart. */
static void succeed(struct kld_watched *child) {
    if (child->state != KLD_CHILD_READY)
        return;
    note_death(child);
    child->life = NULL;
    pause_then_start(child);
}

/* A child that serves has nothing more to say but that its device is lost. */
static void take_report(struct kld_watched *child, const struct kld_child_report *report) {
    if (child->state == KLD_CHILD_READY && report->status != KLD_DEVICE_LOST)
        return;
    if (report->status == KLD_OK) {
        child->state = KLD_CHILD_READY;
        child->ready_ms = uv_now(&child->supervisor->loop);
        child->ever_ready = true;
        child->refusals = 0;
        kld_supervisor_child_ready(child->supervisor, child, report);
    } else if (report->status == KLD_DEVICE_LOST && child->ready_ms &&
               child != &child->supervisor->gateway) { /* which has none */
        succeed(child);
    } else if (!child->ever_ready) {
        kld_supervisor_fail(child->supervisor, child, report->text);
    } else {
        kld_log(KLD_LOG_ERROR, "child cannot start", "child=%s reason=\"%s\"", child->name,
                report->text);
        /* KLD_BUSY: by MPS. */
        if ((report->status == KLD_UNAVAILABLE || report->status == KLD_BUSY) && !child->ready_ms) {
            child->refused = true;
            child->refusals++;
        }
    }
}

/* ECONNRESET, once, is of what the child had not read when it ended; its own words are behind. */
static ssize_t receive(struct kld_life *life, struct kld_child_report *report) {
    ssize_t bytes = recv(life->control_fd, report, sizeof *report, MSG_DONTWAIT | MSG_TRUNC);
    if (bytes < 0 && errno == ECONNRESET)
        bytes = recv(life->control_fd, report, sizeof *report, MSG_DONTWAIT | MSG_TRUNC);
    return bytes;
}

bool kld_watched_hear(struct kld_life *life) {
    struct kld_child_report report;
    if (!life->control_open)
        return false;
    ssize_t bytes = receive(life, &report);
    char alive;
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (bytes == 1) { /* a sign of life */
        memcpy(&alive, &report, sizeof alive);
        if (life->child->life == life)
            kld_watchdog_answered(life->child, (enum kld_alive)alive);
        return true;
    }
    if (bytes != (ssize_t)sizeof report) {
        life->unheard = bytes == 0 ? ECONNRESET : bytes < 0 ? errno : EPROTO;
        control_close(life);
        return false;
    }
    report.backend[sizeof report.backend - 1] = '\0';
    report.text[sizeof report.text - 1] = '\0';
    if (life->child->life != life)
        return true;
    if (report.about == KLD_ABOUT_RELOAD)
        kld_reload_answered(life->child->supervisor, &report);
    else
        take_report(life->child, &report);
    return true;
}

/* What it says is lost, and it may be waited for for ever: another one takes its place. At the end
 * of its socket it has mostly ended, which on_death() tells, and which no signal changes any more.
 */
static void end_unheard(struct kld_life *life, int error) {
    if (error != ECONNRESET)
        kld_log(KLD_LOG_ERROR, "child not heard", "child=%s child_pid=%d reason=\"%s\"",
                life->child->name, (int)life->process.pid, strerror(error));
    kld_life_kill(life);
}

static void on_control(uv_poll_t *control, int status, int events) {
    struct kld_life *life = control->data;
    hear(life, status < 0); /* then libuv polls no more */
    if (life->unheard)
        end_unheard(life, life->unheard);
}

/* "kld-server", the two hidden flags, every setting. NULL: out of memory. index: room for the
 * second. */
static char **arguments_of(const struct kld_watched *child, char **settings, char index[24]) {
    static char name[] = "kld-server", worker[] = "--role=worker", gateway[] = "--role=gateway";
    size_t count = 0;
    while (settings[count])
        count++;
    char **arguments = calloc(count + 4, sizeof *arguments);
    if (!arguments)
        return NULL;
    snprintf(index, 24, "--index=%u", child->index);
    arguments[0] = name;
    arguments[1] = strcmp(child->role, "worker") == 0 ? worker : gateway;
    arguments[2] = index;
    memcpy(arguments + 3, settings, count * sizeof *arguments);
    return arguments;
}

/* glibc's malloc() asks for large pages then, where the host has them for who asks: what belongs to
 * thousands of connections takes fewer entries of the processor's tables. And a thread keeps more
 * than seven freed pieces of a size, because requests come and go by as many as there are
 * connections. Who has set any such thing himself is not overruled. NULL: our own environment, as
 * it is. */
static char **environment_of_gateway(void) {
    static char tunables[] = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=128";
    size_t count = 0;
    while (environ[count])
        count++;
    char **environment = getenv("GLIBC_TUNABLES") ? NULL : calloc(count + 2, sizeof *environment);
    if (!environment)
        return NULL;
    memcpy(environment, environ, count * sizeof *environment);
    environment[count] = tunables;
    return environment;
}

/* *ret_open: the handle is the loop's and has to be closed; uv_spawn() opens it even where it
 * fails. */
static int spawn(struct kld_life *life, int childs_end, bool *ret_open) {
    struct kld_watched *child = life->child;
    struct kld_supervisor *supervisor = child->supervisor;
    char **settings = kld_config_arguments(&supervisor->config), index[24];
    char **arguments = settings ? arguments_of(child, settings, index) : NULL;
    bool gateway = child == &supervisor->gateway;
    int state_fd = gateway ? supervisor->stats_fds.state_read : supervisor->stats_fds.state;
    int secrets_fd = gateway ? supervisor->reload.secrets_fd : -1;
    uv_stdio_container_t stdio[] = {
        {.flags = UV_IGNORE}, /* standard input and output are not theirs: */
        {.flags = UV_IGNORE}, /* the output carries the ready line only */
        {.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO},
        {.flags = UV_INHERIT_FD, .data.fd = child->listen_fd},
        {.flags = UV_INHERIT_FD, .data.fd = supervisor->stats_fds.counters},
        {.flags = UV_INHERIT_FD, .data.fd = childs_end},
        {.flags = child->metrics_fd >= 0 ? UV_INHERIT_FD : UV_IGNORE, .data.fd = child->metrics_fd},
        {.flags = secrets_fd >= 0 ? UV_INHERIT_FD : UV_IGNORE, .data.fd = secrets_fd},
        {.flags = UV_INHERIT_FD, .data.fd = state_fd},
    };
    uv_process_options_t options = {
        .file = "/proc/self/exe", /* the very same program, even if its file was replaced */
        .args = arguments,
        .env = gateway ? environment_of_gateway() : NULL,
        .stdio = stdio,
        .stdio_count = sizeof stdio / sizeof stdio[0],
        .exit_cb = on_death,
    };
    int result = arguments ? uv_spawn(&supervisor->loop, &life->process, &options) : UV_ENOMEM;
    *ret_open = arguments != NULL;
    life->process.data = life;
    free(options.env);
    free(arguments);
    kld_config_arguments_free(settings);
    return result;
}

/* Takes the life over: it is the child's newest, or gone if not even its handle was opened. */
static int begin_life(struct kld_watched *child, struct kld_life *life) {
    int pair[2];
    bool open = false;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
        free(life);
        return uv_translate_sys_error(errno);
    }
    life->child = child;
    life->control_fd = life->pidfd = -1;
    int result = spawn(life, pair[1], &open);
    close(pair[1]);
    if (result != 0)
        close(pair[0]);
    if (!open) {
        free(life);
        return result;
    }
    child->life = life;
    life->next = child->lives;
    child->lives = life;
    if (result != 0)
        return result;
    life->running = true;
    life->pidfd = pidfd_open(life->process.pid, 0); /* nobody has waited for it yet */
    life->control_fd = pair[0];
    life->control.data = life;
    result = uv_poll_init(&child->supervisor->loop, &life->control, life->control_fd);
    life->control_open = life->control_made = result == 0;
    if (result == 0)
        uv_poll_start(&life->control, UV_READABLE | UV_DISCONNECT, on_control);
    else
        end_unheard(life, -result);
    return 0;
}

void kld_watched_start(struct kld_watched *child) {
    struct kld_life *life = calloc(1, sizeof *life);
    int result = life ? begin_life(child, life) : UV_ENOMEM;
    child->ready_ms = 0;
    child->refused = false;
    if (result == 0) {
        child->state = KLD_CHILD_STARTING;
        kld_watchdog_started(child);
        kld_log(KLD_LOG_INFO, "child started", "child=%s child_pid=%d", child->name,
                (int)child->life->process.pid);
        kld_introduce(child);
        return;
    }
    kld_log(KLD_LOG_ERROR, "child not started", "child=%s reason=\"%s\"", child->name,
            uv_strerror(result));
    if (!child->ever_ready)
        kld_supervisor_fail(child->supervisor, child, uv_strerror(result));
    if (child->life)
        uv_close((uv_handle_t *)&child->life->process, on_process_closed);
    else
        pause_then_start(child);
}

void kld_watched_init(struct kld_watched *child, struct kld_supervisor *supervisor,
                      const char *role, uint32_t index, int listen_fd) {
    bool worker = strcmp(role, "worker") == 0;
    memset(child, 0, sizeof *child);
    child->supervisor = supervisor;
    child->role = role;
    child->index = index;
    if (worker)
        snprintf(child->name, sizeof child->name, "worker%u", index);
    else
        snprintf(child->name, sizeof child->name, "%s", role);
    child->listen_fd = listen_fd;
    child->metrics_fd = -1;
    child->stats = worker ? &supervisor->page->worker[index] : &supervisor->page->common;
    child->restarts = worker ? KLD_STAT_worker_restarts_total : KLD_STAT_gateway_restarts_total;
    uv_timer_init(&supervisor->loop, &child->pause);
    child->pause.data = child;
}

void kld_watched_signal(struct kld_watched *child, int signal_number) {
    if (child->life && (child->state == KLD_CHILD_STARTING || child->state == KLD_CHILD_READY))
        signal_life(child->life, signal_number);
}

void kld_life_kill(struct kld_life *life) {
    if (life->running)
        signal_life(life, SIGKILL);
}

void kld_watched_kill(struct kld_watched *child) {
    for (struct kld_life *life = child->lives; life; life = life->next)
        kld_life_kill(life);
}

bool kld_watched_order(struct kld_watched *child, enum kld_order_kind kind, const char *log_level,
                       int fd) {
    struct kld_child_order order = {.kind = (char)kind};
    snprintf(order.log_level, sizeof order.log_level, "%s", log_level);
    return kld_watched_send(child, &order, fd);
}

bool kld_watched_send(struct kld_watched *child, const struct kld_child_order *order, int fd) {
    struct kld_child_order sent_order = *order;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } room;
    struct iovec part = {.iov_base = &sent_order, .iov_len = sizeof sent_order};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (!child->life || !child->life->control_open) {
        errno = EPIPE;
        return false;
    }
    if (fd >= 0) {
        memset(&room, 0, sizeof room);
        room.head.cmsg_level = SOL_SOCKET;
        room.head.cmsg_type = SCM_RIGHTS;
        room.head.cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(&room.head), &fd, sizeof fd);
        message.msg_control = &room;
        message.msg_controllen = sizeof room;
    }
    ssize_t sent;
    do
        sent = sendmsg(child->life->control_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof sent_order;
}

void kld_watched_ask(struct kld_watched *child) {
    if (!child->life || child->life->asked)
        return;
    child->life->asked = true;
    kld_watched_signal(child, SIGTERM);
}

void kld_watched_retire(struct kld_watched *child) {
    if (child->state != KLD_CHILD_WAITING)
        return;
    uv_timer_stop(&child->pause);
    child->state = KLD_CHILD_STOPPED;
    kld_supervisor_child_gone(child->supervisor, child);
}
