/* child.c - what a child and the supervisor tell each other over the control socket, the child's
 * side. One packet each time; the supervisor's side is supervisor/child.c. Main thread of a child.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"
#include "server/role.h"

static void send_report(enum kld_report_about about, enum kld_status status, const char *backend,
                        uint32_t devices, const char *text) {
    struct kld_child_report report;
    memset(&report, 0, sizeof report);
    report.about = (uint32_t)about;
    report.status = (uint32_t)status;
    report.devices = devices;
    snprintf(report.backend, sizeof report.backend, "%s", backend ? backend : "");
    snprintf(report.text, sizeof report.text, "%s", text ? text : "");
    ssize_t sent;
    do
        sent = send(KLD_FD_CONTROL, &report, sizeof report, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent == (ssize_t)sizeof report)
        return;
    kld_log(KLD_LOG_ERROR, "supervisor not told", "reason=\"%s\"", strerror(errno));
    _exit(EXIT_FAILURE);
}

void kld_child_report_send(enum kld_status status, const char *backend, uint32_t devices,
                           const char *text) {
    send_report(KLD_ABOUT_START, status, backend, devices, text);
}

void kld_child_reload_send(enum kld_status status, const char *text) {
    send_report(KLD_ABOUT_RELOAD, status, "", 0, text);
}

void kld_child_alive_send(int control_fd, enum kld_alive alive) {
    const char byte = (char)alive;
    (void)!send(control_fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* There is room for one descriptor, and for none where none is wanted: what else came the kernel
 * has closed. */
static int take_fd(struct msghdr *message) {
    struct cmsghdr *part = CMSG_FIRSTHDR(message);
    int fd = -1;
    if (part && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS &&
        part->cmsg_len == CMSG_LEN(sizeof fd))
        memcpy(&fd, CMSG_DATA(part), sizeof fd);
    return fd;
}

/* An error alone does not say so: there may have been no memory for a moment. */
static bool has_gone(int control_fd) {
    struct pollfd poll_fd = {.fd = control_fd, .events = POLLRDHUP};
    return poll(&poll_fd, 1, 0) != 0;
}

enum kld_heard kld_child_hear(int control_fd, struct kld_child_order *ret_order, int *ret_fd) {
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } room;
    struct iovec part = {.iov_base = ret_order, .iov_len = sizeof *ret_order};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = ret_fd ? &room : NULL,
                             .msg_controllen = ret_fd ? CMSG_LEN(sizeof(int)) : 0};
    memset(ret_order, 0, sizeof *ret_order);
    memset(&room, 0, sizeof room);
    ssize_t got = recvmsg(control_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (ret_fd)
        *ret_fd = got > 0 ? take_fd(&message) : -1;
    ret_order->log_level[sizeof ret_order->log_level - 1] = '\0';
    if (got > 0)
        return KLD_HEARD_ORDER;
    return got < 0 && (errno == EAGAIN || errno == EINTR || !has_gone(control_fd))
               ? KLD_HEARD_NOTHING
               : KLD_HEARD_END;
}
