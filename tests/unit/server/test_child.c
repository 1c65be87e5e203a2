/* test_child.c - orders of the supervisor: what a child takes of a packet, and what of the
 * descriptors that came with it. */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/role.h"
#include "tests/unit/unit.h"

#define FDS_MAX 4

static int pair[2], null;

static void setup(void) {
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
}

static int open_fds(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static void send_order(const void *data, size_t bytes, size_t fds) {
    union {
        char space[CMSG_SPACE(sizeof(int) * FDS_MAX)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fds) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fds);
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int) * fds);
        for (size_t i = 0; i < fds; i++)
            memcpy(CMSG_DATA(head) + i * sizeof(int), &null, sizeof(int));
    }
    ck_assert_int_eq(sendmsg(pair[0], &message, 0), (ssize_t)bytes);
}

START_TEST(an_error_alone_is_not_the_end) {
    struct kld_child_order got;
    int fd = -1, no_socket[2];
    ck_assert_int_eq(pipe(no_socket), 0);
    ck_assert_int_eq(kld_child_hear(no_socket[0], &got, &fd), KLD_HEARD_NOTHING);
    close(no_socket[1]);
    ck_assert_int_eq(kld_child_hear(no_socket[0], &got, &fd), KLD_HEARD_END);
    close(no_socket[0]);
}
END_TEST

START_TEST(an_order_is_taken) {
    struct kld_child_order order = {.kind = KLD_ORDER_RELOAD, .log_level = "debug"}, got;
    int fd = -1;
    setup();
    ck_assert_int_eq(kld_child_hear(pair[1], &got, &fd), KLD_HEARD_NOTHING);
    send_order(&order, sizeof order, 1);
    ck_assert_int_eq(kld_child_hear(pair[1], &got, &fd), KLD_HEARD_ORDER);
    ck_assert(got.kind == KLD_ORDER_RELOAD && strcmp(got.log_level, "debug") == 0);
    ck_assert_int_ge(fd, 0);
    send_order("Lnoisyyyyyyyyyyyyyy", 19, 0);
    ck_assert_int_eq(kld_child_hear(pair[1], &got, &fd), KLD_HEARD_ORDER);
    ck_assert(memchr(got.log_level, 0, sizeof got.log_level) && fd == -1);
    close(pair[0]);
    ck_assert_int_eq(kld_child_hear(pair[1], &got, &fd), KLD_HEARD_END);
}
END_TEST

START_TEST(descriptors_that_are_not_wanted_do_not_stay) {
    struct kld_child_order order = {.kind = KLD_ORDER_RELOAD}, got;
    setup();
    int open = open_fds();
    for (size_t fds = 0; fds <= FDS_MAX; fds++) {
        int fd = -1;
        send_order(&order, sizeof order, fds);
        ck_assert_int_eq(kld_child_hear(pair[1], &got, &fd), KLD_HEARD_ORDER);
        ck_assert_int_eq(fd >= 0, fds > 0);
        if (fd >= 0)
            close(fd);
        send_order(&order, sizeof order, fds);
        ck_assert_int_eq(kld_child_hear(pair[1], &got, NULL), KLD_HEARD_ORDER);
        ck_assert_int_eq(open_fds(), open);
    }
}
END_TEST

UNIT_MAIN("server/child", an_error_alone_is_not_the_end, an_order_is_taken,
          descriptors_that_are_not_wanted_do_not_stay)
