/* test_strays.c - descriptors whose close takes as long as their sender likes: whom they hold up,
 * and whom they do not. */
#include "server/worker/strays.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/unit/server/worker/lingering.h"
#include "tests/unit/unit.h"

#define WAIT_MS 10000

static struct kld_strays *strays;

static void start(void) {
    struct kld_error err;
    ck_assert_int_eq(kld_strays_start(&strays, &err), KLD_OK);
}

/* The end of the pipe comes when its last writer is gone. */
static bool is_closed_within(int read_end, int ms) {
    struct pollfd poll_fd = {.fd = read_end, .events = POLLIN};
    for (; ms >= 0; ms -= 20) {
        if (poll(&poll_fd, 1, 20) == 1)
            return true;
        kld_strays_look(strays);
    }
    return false;
}

static int close_pipe(uid_t uid) {
    int pipes[2];
    ck_assert_int_eq(pipe(pipes), 0);
    kld_strays_close(strays, uid, &pipes[1], 1);
    return pipes[0];
}

static void until_all_are_closed(void) {
    for (int i = 0; i < WAIT_MS && kld_strays_count(strays); i++)
        usleep(1000);
    ck_assert_uint_eq(kld_strays_count(strays), 0);
}

START_TEST(what_is_to_be_closed_is) {
    start();
    int fd = close_pipe(1);
    ck_assert(is_closed_within(fd, WAIT_MS));
    until_all_are_closed();
    kld_strays_end(strays);
}
END_TEST

START_TEST(a_socket_does_not_linger) {
    start();
    struct lingering lingering = lingering_open();
    kld_strays_close(strays, 1, &lingering.fd, 1);
    ck_assert(is_closed_within(close_pipe(1), WAIT_MS));
    lingering_let_go(&lingering);
    kld_strays_end(strays);
}
END_TEST

START_TEST(a_uid_holds_up_its_own_only) {
    start();
    struct lingering lingering = lingering_open();
    int hidden = lingering_hide(&lingering);
    kld_strays_close(strays, 1, &hidden, 1);
    int own = close_pipe(1), others = close_pipe(2);
    ck_assert(is_closed_within(others, WAIT_MS));
    ck_assert(is_closed_within(close_pipe(3), WAIT_MS));
    ck_assert(!is_closed_within(own, 500));
    lingering_let_go(&lingering);
    ck_assert(is_closed_within(own, WAIT_MS));
    until_all_are_closed();
    kld_strays_end(strays);
}
END_TEST

START_TEST(how_many_may_wait_is_counted_by_uid) {
    start();
    struct lingering lingering = lingering_open();
    int hidden = lingering_hide(&lingering), fds[KLD_STRAYS_USER_MAX];
    kld_strays_close(strays, 1, &hidden, 1);
    for (int i = 0; i < KLD_STRAYS_USER_MAX; i++)
        ck_assert_int_ge(fds[i] = dup(0), 0);
    kld_strays_close(strays, 1, fds, KLD_STRAYS_USER_MAX - 1);
    ck_assert(!kld_strays_full(strays, 1));
    kld_strays_close(strays, 1, fds + KLD_STRAYS_USER_MAX - 1, 1);
    ck_assert(kld_strays_full(strays, 1));
    ck_assert(!kld_strays_full(strays, 2));
    lingering_let_go(&lingering);
    until_all_are_closed();
    ck_assert(!kld_strays_full(strays, 1));
    kld_strays_end(strays);
}
END_TEST

/* With the end of it go its threads, but for one that does not come back. */
START_TEST(the_end_waits_for_nobody) {
    start();
    struct lingering lingering = lingering_open();
    int hidden = lingering_hide(&lingering);
    kld_strays_close(strays, 1, &hidden, 1);
    ck_assert(is_closed_within(close_pipe(2), WAIT_MS));
    kld_strays_end(strays);
    lingering_let_go(&lingering);
}
END_TEST

/* A packet of no bytes is not the end of what a connection holds. */
START_TEST(all_of_a_connection_is_discarded) {
    start();
    int pair[2], pipes[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    ck_assert_int_eq(pipe(pipes), 0);
    ck_assert_int_eq(send(pair[0], "", 0, 0), 0);
    lingering_send_fd(pair[0], pipes[1]);
    ck_assert_int_eq(send(pair[0], "", 0, 0), 0);
    lingering_send_fd(pair[0], pipes[1]);
    close(pipes[1]);
    shutdown(pair[1], SHUT_RD);
    ck_assert(kld_strays_discard(strays, 1, pair[1]));
    ck_assert(is_closed_within(pipes[0], WAIT_MS));
    kld_strays_end(strays);
}
END_TEST

UNIT_MAIN("server/worker/strays", what_is_to_be_closed_is, a_socket_does_not_linger,
          a_uid_holds_up_its_own_only, how_many_may_wait_is_counted_by_uid,
          the_end_waits_for_nobody, all_of_a_connection_is_discarded)
