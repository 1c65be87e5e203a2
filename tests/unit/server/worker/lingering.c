/* lingering.c - see lingering.h. TCP over the loopback address. */
#include "tests/unit/server/worker/lingering.h"

#include <arpa/inet.h>
#include <check.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINGER_S 3600

struct lingering lingering_open(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    const struct linger on = {.l_onoff = 1, .l_linger = LINGER_S};
    static const char bytes[65536];
    struct lingering lingering;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, size), 0);
    ck_assert_int_eq(listen(listener, 1), 0);
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    lingering.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(lingering.fd, (struct sockaddr *)&address, size), 0);
    lingering.peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    ck_assert_int_ge(lingering.peer, 0);
    close(listener);
    while (send(lingering.fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        ;
    ck_assert_int_eq(setsockopt(lingering.fd, SOL_SOCKET, SO_LINGER, &on, sizeof on), 0);
    return lingering;
}

void lingering_send_fd(int to, int fd) {
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    char byte = 'x';
    struct iovec part = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    control.align.cmsg_level = SOL_SOCKET;
    control.align.cmsg_type = SCM_RIGHTS;
    control.align.cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
    ck_assert_int_eq(sendmsg(to, &message, MSG_NOSIGNAL), 1);
}

int lingering_hide(struct lingering *lingering) {
    int pair[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    lingering_send_fd(pair[0], lingering->fd);
    close(lingering->fd);
    close(pair[0]);
    lingering->fd = -1;
    return pair[1];
}

void lingering_let_go(struct lingering *lingering) {
    const struct linger reset = {.l_onoff = 1};
    ck_assert_int_eq(setsockopt(lingering->peer, SOL_SOCKET, SO_LINGER, &reset, sizeof reset), 0);
    close(lingering->peer);
}
