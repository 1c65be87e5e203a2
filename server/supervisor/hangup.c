/* hangup.c - what a SIGHUP means: that somebody changed the configuration, or, to a server that was
 * started from a terminal, that the terminal is gone. The first reloads; the second ends the server
 * in order, as it does with every program, unless SIGHUP was ignored at start (nohup), which asks
 * for just that not to happen. A reload can be asked for under nohup too.
 *
 * Nobody else looks at SIGHUP: it is blocked from the first line of main() on and read from a
 * signalfd, so that one that comes early waits, and many are one. Supervisor's loop thread. */
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"

static bool terminal_is_there(void) {
    int fd = open("/dev/tty", O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    close(fd);
    return true;
}

/* The kernel says so itself, or the shell that leads the session passes it on; and it is true. A
 * terminal that went earlier, from a server that was disowned, is no news. */
static bool lost_terminal(const struct kld_hangup *hangup, const struct signalfd_siginfo *info) {
    bool by_kernel = info->ssi_code == SI_KERNEL, by_shell = (pid_t)info->ssi_pid == getsid(0);
    return hangup->has_terminal && (by_kernel || by_shell) && !terminal_is_there();
}

static void on_hangup(uv_poll_t *poll, int status, int events) {
    struct kld_supervisor *supervisor = poll->data;
    struct signalfd_siginfo info;
    while (read(supervisor->hangup.fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (lost_terminal(&supervisor->hangup, &info)) {
            kld_supervisor_drain(supervisor, SIGHUP);
        } else if (!supervisor->draining) {
            kld_log(KLD_LOG_INFO, "reloading", "signal=%d", SIGHUP);
            kld_reload_want(supervisor);
        }
    }
}

void kld_hangup_open(struct kld_supervisor *supervisor, bool ignored) {
    struct kld_hangup *hangup = &supervisor->hangup;
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGHUP);
    hangup->has_terminal = !ignored && terminal_is_there();
    /* Ignored, one would be dropped whatever waits for it. */
    signal(SIGHUP, SIG_DFL);
    hangup->fd = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
    if (hangup->fd < 0 || uv_poll_init(&supervisor->loop, &hangup->poll, hangup->fd) != 0) {
        kld_log(KLD_LOG_WARN, "no reloads", "reason=\"SIGHUP cannot be watched\"");
        return;
    }
    hangup->poll.data = supervisor;
    uv_poll_start(&hangup->poll, UV_READABLE, on_hangup);
}

void kld_hangup_close(struct kld_supervisor *supervisor) {
    if (supervisor->hangup.fd >= 0)
        close(supervisor->hangup.fd);
    supervisor->hangup.fd = -1;
}
