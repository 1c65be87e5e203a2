/* notify.c - the service manager's environment: NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS. It
 * decides nothing: what to say and when is up to supervisor.c and watchdog.c. Supervisor's thread.
 */
#include "server/supervisor/notify.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/log.h"

#define FIRST_FD 3  /* SD_LISTEN_FDS_START */
#define AGAIN_MS 20 /* after the manager had no room; twice as long each time, up to ... */
#define AGAIN_MS_MAX 1000

/* A number of the environment; 0 if it is none, or if `pid_name` names another process. */
static uint64_t number_for_us(const char *name, const char *pid_name) {
    const char *text = getenv(name), *pid = getenv(pid_name);
    char *end = NULL;
    if (!text || (pid && strtoull(pid, NULL, 10) != (unsigned long long)getpid()))
        return 0;
    uint64_t number = strtoull(text, &end, 10);
    return *text && *end == '\0' ? number : 0;
}

/* ---- up -------------------------------------------------------------------------------------- */

/* A path, or "@name" in the abstract namespace. */
static bool set_address(struct kld_notify *notify, const char *text) {
    size_t bytes = strlen(text);
    if ((*text != '/' && *text != '@') || bytes < 2 || bytes >= sizeof notify->address.sun_path)
        return false;
    notify->address.sun_family = AF_UNIX;
    memcpy(notify->address.sun_path, text, bytes);
    if (*text == '@')
        notify->address.sun_path[0] = '\0';
    notify->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes);
    return true;
}

void kld_notify_open(struct kld_notify *notify) {
    memset(notify, 0, sizeof *notify);
    notify->fd = -1;
    const char *text = getenv("NOTIFY_SOCKET");
    bool named = text && *text;
    if (named && set_address(notify, text))
        notify->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (named && notify->fd < 0)
        kld_log(KLD_LOG_WARN, "manager not told", "reason=\"NOTIFY_SOCKET cannot be used\"");
    if (notify->fd >= 0)
        notify->watchdog_ms = number_for_us("WATCHDOG_USEC", "WATCHDOG_PID") / 1000;
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
}

static bool is_full(int error) { return error == EAGAIN || error == ENOBUFS; }

static bool say(const struct kld_notify *notify, const char *text) {
    return sendto(notify->fd, text, strlen(text), MSG_NOSIGNAL,
                  (const struct sockaddr *)&notify->address, notify->address_bytes) >= 0;
}

static void not_told(const char *text, int error) {
    kld_log(KLD_LOG_WARN, "manager not told", "what=\"%s\" reason=\"%s\"", text, strerror(error));
}

static void forget_first(struct kld_notify *notify) {
    free(notify->due[0]);
    memmove(notify->due, notify->due + 1, --notify->due_count * sizeof notify->due[0]);
}

static void on_again(uv_timer_t *timer) {
    struct kld_notify *notify = timer->data;
    while (notify->due_count) {
        if (!say(notify, notify->due[0])) {
            if (is_full(errno))
                break;
            not_told(notify->due[0], errno);
        }
        forget_first(notify);
    }
    notify->again_ms = 2 * notify->again_ms < AGAIN_MS_MAX ? 2 * notify->again_ms : AGAIN_MS_MAX;
    if (notify->due_count)
        uv_timer_start(timer, on_again, notify->again_ms, 0);
}

/* In order, behind what waits already; a sign of life that does stands for this one, too. */
static bool keep(struct kld_notify *notify, const char *text) {
    if (notify->due_count && strcmp(notify->due[notify->due_count - 1], text) == 0)
        return true;
    char *copy = notify->due_count < KLD_NOTIFY_DUE_MAX ? strdup(text) : NULL;
    if (!copy)
        return false;
    notify->due[notify->due_count++] = copy;
    if (!uv_is_active((uv_handle_t *)&notify->again)) {
        notify->again_ms = AGAIN_MS;
        uv_timer_start(&notify->again, on_again, AGAIN_MS, 0);
    }
    return true;
}

void kld_notify_start(struct kld_notify *notify, uv_loop_t *loop) {
    uv_timer_init(loop, &notify->again);
    notify->again.data = notify;
}

void kld_notify_send(struct kld_notify *notify, const char *text) {
    if (notify->fd < 0 || (!notify->due_count && say(notify, text)))
        return;
    int error = notify->due_count ? EAGAIN : errno;
    if (!is_full(error) || !keep(notify, text))
        not_told(text, error);
}

void kld_notify_close(struct kld_notify *notify) {
    while (notify->due_count) {
        if (!say(notify, notify->due[0]))
            not_told(notify->due[0], errno);
        forget_first(notify);
    }
    if (notify->fd >= 0)
        close(notify->fd);
    notify->fd = -1;
}

/* ---- down ------------------------------------------------------------------------------------ */

/* name: of LISTEN_FDNAMES, `bytes` long. */
static enum kld_status take_one(struct kld_inherited *inherited, int fd, const char *name,
                                size_t bytes, struct kld_error *err) {
    struct sockaddr_storage address = {.ss_family = AF_UNSPEC};
    socklen_t address_bytes = sizeof address, option_bytes = sizeof(int);
    int type = 0, listens = 0, *slot = NULL;
    if (getsockname(fd, (struct sockaddr *)&address, &address_bytes) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &option_bytes) == 0)
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &option_bytes);
    bool tcp =
        (address.ss_family == AF_INET || address.ss_family == AF_INET6) && type == SOCK_STREAM;
    bool path = address.ss_family == AF_UNIX && type == SOCK_SEQPACKET &&
                ((struct sockaddr_un *)(void *)&address)->sun_path[0] == '/';
    if (listens && tcp)
        slot =
            bytes == 7 && memcmp(name, "metrics", 7) == 0 ? &inherited->metrics : &inherited->http;
    for (uint32_t i = 0; listens && path && i < KLD_DEVICES_MAX && !slot; i++)
        if (inherited->unix_socket[i] < 0)
            slot = &inherited->unix_socket[i];
    if (!slot)
        return kld_error_set(err, KLD_INVALID,
                             "LISTEN_FDS: descriptor %d ('%.*s') is not a listening socket of TCP, "
                             "or of SOCK_SEQPACKET at a path",
                             fd, (int)(bytes < 40 ? bytes : 40), name);
    if (*slot >= 0)
        return kld_error_set(err, KLD_INVALID,
                             "LISTEN_FDS: descriptor %d is a second socket for %s; one of them may "
                             "be named metrics",
                             fd, slot == &inherited->metrics ? "metrics" : "HTTP");
    fcntl(fd, F_SETFD, FD_CLOEXEC); /* children get theirs at a number of their own */
    *slot = fd;
    return KLD_OK;
}

enum kld_status kld_inherited_take(struct kld_inherited *ret_inherited, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    const char *names = getenv("LISTEN_FDNAMES");
    /* Unlike the watchdog's, this is for nobody unless it says for whom. */
    uint64_t count = getenv("LISTEN_PID") ? number_for_us("LISTEN_FDS", "LISTEN_PID") : 0;
    ret_inherited->http = ret_inherited->metrics = -1;
    for (uint32_t i = 0; i < KLD_DEVICES_MAX; i++)
        ret_inherited->unix_socket[i] = -1;
    if (!names)
        names = "";
    for (uint64_t i = 0; i < count && status == KLD_OK; i++) {
        size_t bytes = strcspn(names, ":");
        status = take_one(ret_inherited, FIRST_FD + (int)i, names, bytes, err);
        names += bytes + (names[bytes] == ':');
    }
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDS");
    unsetenv("LISTEN_FDNAMES");
    return status;
}
