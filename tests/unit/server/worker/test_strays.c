/* test_strays.c - descriptors whose close takes as long as their sender likes: whom they hold up,
 * and whom they do not. close() is this file's own here: that of one file returns when the test
 * says so, as that of a file system that does not answer; and so is clock_gettime(), for a clock
 * that is set back. */
#include "server/worker/strays.h"

#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tests/unit/server/worker/lingering.h"
#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

#define WAIT_MS 10000

static struct kld_strays *strays;
static struct rig rig;
static _Atomic ino_t stuck_file; /* 0: none */

int close(int fd) {
    ino_t stuck = atomic_load(&stuck_file);
    struct stat info;
    if (stuck && fstat(fd, &info) == 0 && info.st_ino == stuck)
        while (atomic_load(&stuck_file) == stuck)
            usleep(1000);
    return (int)syscall(SYS_close, fd);
}

static atomic_int set_back_s; /* the time of day will be, by so much, once it was asked for */

int clock_gettime(clockid_t clock, struct timespec *ret_now) {
    int result = (int)syscall(SYS_clock_gettime, clock, ret_now);
    if (clock == CLOCK_REALTIME)
        ret_now->tv_sec += atomic_load(&set_back_s);
    return result;
}

static int stuck_open(void) {
    struct stat info;
    int fd = memfd_create("stuck", MFD_CLOEXEC);
    ck_assert_int_eq(fstat(fd, &info), 0);
    atomic_store(&stuck_file, info.st_ino);
    return fd;
}

static void stuck_let_go(void) { atomic_store(&stuck_file, 0); }

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
    int stuck = stuck_open();
    kld_strays_close(strays, 1, &stuck, 1);
    int own = close_pipe(1), others = close_pipe(2);
    ck_assert(is_closed_within(others, WAIT_MS));
    ck_assert(is_closed_within(close_pipe(3), WAIT_MS));
    ck_assert(!is_closed_within(own, 500));
    stuck_let_go();
    ck_assert(is_closed_within(own, WAIT_MS));
    until_all_are_closed();
    kld_strays_end(strays);
}
END_TEST

/* What lingers in the queue of another socket is not seen, and holds up not even its own. */
START_TEST(what_lingers_unseen_holds_up_nothing) {
    enum { COUNT = 3 };
    start();
    struct lingering lingering[COUNT];
    for (int i = 0; i < COUNT; i++) {
        lingering[i] = lingering_open();
        int hidden = lingering_hide(&lingering[i]);
        kld_strays_close(strays, 1, &hidden, 1);
    }
    ck_assert(is_closed_within(close_pipe(1), WAIT_MS));
    until_all_are_closed();
    for (int i = 0; i < COUNT; i++)
        lingering_let_go(&lingering[i]);
    kld_strays_end(strays);
}
END_TEST

static void close_duplicates(uid_t uid, int count) {
    int fds[KLD_STRAYS_USER_MAX];
    for (int i = 0; i < count; i++)
        ck_assert_int_ge(fds[i] = dup(0), 0);
    kld_strays_close(strays, uid, fds, (unsigned)count);
}

/* With that which a thread is about to close. */
START_TEST(how_many_may_wait_is_counted_by_uid) {
    start();
    int stuck = stuck_open();
    kld_strays_close(strays, 1, &stuck, 1);
    usleep(10000);
    close_duplicates(1, KLD_STRAYS_USER_MAX - 2);
    ck_assert(!kld_strays_full(strays, 1));
    close_duplicates(1, 1);
    ck_assert(kld_strays_full(strays, 1));
    ck_assert(!kld_strays_full(strays, 2));
    stuck_let_go();
    until_all_are_closed();
    ck_assert(!kld_strays_full(strays, 1));
    kld_strays_end(strays);
}
END_TEST

/* When all there may be are there, a uid has its next read once it has none. */
START_TEST(who_has_none_may_always_have_some) {
    start();
    int one = stuck_open(), two = dup(one);
    kld_strays_close(strays, 1, &one, 1);
    kld_strays_close(strays, 2, &two, 1);
    for (int i = 0; i < KLD_STRAYS_MAX / KLD_STRAYS_USER_MAX; i++)
        close_duplicates(1, KLD_STRAYS_USER_MAX);
    ck_assert(kld_strays_full(strays, 1));
    ck_assert(kld_strays_full(strays, 2));
    ck_assert(!kld_strays_full(strays, 3));
    ck_assert(!kld_strays_crowded(strays));
    stuck_let_go();
    until_all_are_closed();
    ck_assert(!kld_strays_full(strays, 2));
    kld_strays_end(strays);
}
END_TEST

/* With the end of it go its threads, but for one that does not come back. */
START_TEST(the_end_waits_for_nobody) {
    start();
    int stuck = stuck_open();
    kld_strays_close(strays, 1, &stuck, 1);
    ck_assert(is_closed_within(close_pipe(2), WAIT_MS));
    kld_strays_end(strays);
    stuck_let_go();
}
END_TEST

START_TEST(nor_for_a_clock_that_is_set_back) {
    struct timespec begun, ended;
    start();
    int stuck = stuck_open();
    kld_strays_close(strays, 1, &stuck, 1);
    atomic_store(&set_back_s, 3600);
    clock_gettime(CLOCK_MONOTONIC, &begun);
    kld_strays_end(strays);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    ck_assert_int_lt(ended.tv_sec - begun.tv_sec, WAIT_MS / 1000);
    stuck_let_go();
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
    ck_assert(!kld_strays_discard(pair[1]));
    ck_assert(!is_closed_within(pipes[0], 0));
    kld_strays_close_connection(strays, 1, pair[1]);
    ck_assert(is_closed_within(pipes[0], WAIT_MS));
    char byte;
    ck_assert_int_eq(recv(pair[0], &byte, 1, 0), 0); /* its end, and no reset */
    until_all_are_closed();
    close(pair[0]);
    kld_strays_end(strays);
}
END_TEST

START_TEST(a_connection_without_descriptors_is_read_away) {
    int pair[2];
    char byte;
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    ck_assert_int_eq(send(pair[0], "", 0, 0), 0);
    ck_assert_int_eq(send(pair[0], "ab", 2, 0), 2);
    shutdown(pair[1], SHUT_RD);
    ck_assert(kld_strays_discard(pair[1]));
    close(pair[1]);
    ck_assert_int_eq(recv(pair[0], &byte, 1, 0), 0);
    close(pair[0]);
}
END_TEST

/* A process that ends takes its descriptors along; its clients find their replies. */
START_TEST(at_the_end_descriptors_stay_open) {
    int pair[2], pipes[2];
    char byte;
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    ck_assert_int_eq(pipe(pipes), 0);
    lingering_send_fd(pair[0], pipes[1]);
    close(pipes[1]);
    shutdown(pair[1], SHUT_RD);
    kld_strays_discard_at_end(pair[1]);
    struct pollfd poll_fd = {.fd = pipes[0], .events = POLLIN};
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 0);
    close(pair[1]);
    ck_assert_int_eq(recv(pair[0], &byte, 1, 0), 0);
    close(pair[0]);
}
END_TEST

static void send_stray(int to, int fd) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_PING, 1);
    rig_send_fds(to, &frame, frame.header.length, &fd, 1);
}

static uint64_t heard_of(void) {
    return atomic_load(&rig.stats->value[KLD_STAT_unix_clients_total]) +
           atomic_load(&rig.stats->rejected[KLD_REJECT_unix_clients_max]);
}

/* Of a uid that has all it may, one of which does not close, connections come with descriptors and
 * go: whoever comes behind them is let in. When it has room again, it is read. */
START_TEST(who_leaves_descriptors_behind_keeps_out_nobody) {
    enum { LEAVE = KLD_STRAYS_MAX + KLD_STRAYS_CONNECTIONS_MAX + 32 };
    rig_init(&rig);
    rig_start(&rig);
    int fd = rig_client(&rig);
    send_stray(fd, stuck_open());
    rig_expect_error(fd, 1, KLD_INVALID, "");
    for (int i = 1; i < KLD_STRAYS_USER_MAX; i++) {
        send_stray(fd, 0);
        rig_expect_error(fd, 1, KLD_INVALID, "");
    }
    rig_plain(fd, KLD_FRAME_PING, 2);
    for (int i = 0; i < LEAVE; i++) {
        int other = rig_connect(&rig);
        send_stray(other, 0);
        close(other);
    }
    for (int i = 0; i < WAIT_MS && heard_of() < LEAVE + 1; i++)
        usleep(1000);
    ck_assert_uint_eq(heard_of(), LEAVE + 1);
    for (int i = 0; i < WAIT_MS && kld_strays_count(rig.worker.strays) > KLD_STRAYS_USER_MAX; i++)
        usleep(1000);
    ck_assert_uint_eq(kld_strays_count(rig.worker.strays), KLD_STRAYS_USER_MAX);
    stuck_let_go();
    rig_expect(fd, 2, KLD_FRAME_PONG, NULL);
    int newcomer = rig_client(&rig);
    close(newcomer);
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

UNIT_MAIN("server/worker/strays", what_is_to_be_closed_is, a_socket_does_not_linger,
          a_uid_holds_up_its_own_only, what_lingers_unseen_holds_up_nothing,
          how_many_may_wait_is_counted_by_uid, who_has_none_may_always_have_some,
          the_end_waits_for_nobody, nor_for_a_clock_that_is_set_back,
          all_of_a_connection_is_discarded, a_connection_without_descriptors_is_read_away,
          at_the_end_descriptors_stay_open, who_leaves_descriptors_behind_keeps_out_nobody)
