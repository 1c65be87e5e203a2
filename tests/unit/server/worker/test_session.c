/* test_session.c - a connection: replies to a client that does not read, several at once, the end
 * in every state, and the limit on clients. */
#include "server/worker/session.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/role.h"
#include "server/worker/places.h"
#include "server/worker/quota.h"
#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig;

static void start(void) {
    rig_init(&rig);
    rig_start(&rig);
}

static void end(void) {
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}

/* Fills the socket's buffer with answers that nobody reads while all requests that may be in flight
 * are, then lets them end: each reply has its place. */
static void keep_replies_to_silent_client(uint64_t requests) {
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    union kld_frame frame;
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < requests; i++)
        rig_submit(fd, 1000 + i, region);
    uint64_t pings = 0;
    kld_frame_init(&frame, KLD_FRAME_PING, 0);
    for (int idle = 0; idle < 50;) {
        frame.header.request = 100000 + pings;
        if (send(fd, &frame, frame.header.length, MSG_DONTWAIT) > 0) {
            pings++;
            idle = 0;
        } else {
            idle++;
            usleep(1000);
        }
    }
    ck_assert_uint_gt(pings, 10);
    atomic_store(&rig.fake.hold, false);
    rig_until(&rig.fake.jobs_done, (int)requests);
    uint64_t dones = 0, pongs = 0;
    while (dones + pongs < requests + pings) {
        rig_receive(fd, &frame);
        if (frame.header.type == KLD_FRAME_PONG)
            ck_assert_uint_eq(frame.header.request, 100000 + pongs++);
        else
            ck_assert_uint_eq(frame.header.request, 1000 + dones++);
    }
    ck_assert_uint_eq(dones, requests);
    rig_plain(fd, KLD_FRAME_PING, 7);
    rig_expect(fd, 7, KLD_FRAME_PONG, NULL);
    close(fd);
    end();
}

START_TEST(every_reply_to_a_silent_client_is_kept) {
    rig_init(&rig);
    keep_replies_to_silent_client(rig.config.client_requests_max);
}
END_TEST

/* A client that may have more than there is costs no room for it. */
START_TEST(every_reply_is_kept_where_the_worker_has_fewer_requests) {
    rig_init(&rig);
    rig.config.client_requests_max = UINT32_MAX;
    rig.config.requests_max = 8;
    rig.config.user_share = 100;
    keep_replies_to_silent_client(8);
}
END_TEST

START_TEST(silent_client_that_dies_leaves_nothing) {
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_STATS, 5);
    for (int idle = 0; idle < 50;) {
        if (send(fd, &frame, frame.header.length, MSG_DONTWAIT) > 0)
            idle = 0;
        else {
            idle++;
            usleep(1000);
        }
    }
    close(fd);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    end();
}
END_TEST

START_TEST(client_leaves_while_its_stream_opens) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold_memory, true);
    rig_submit(fd, 10, region);
    rig_until(&rig.fake.calls, 2);
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, 1);
    close(fd);
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, 0);
    atomic_store(&rig.fake.hold_memory, false);
    rig_until_is(&rig.fake.memories, 0);
    rig_until_is(&rig.fake.streams, 0);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_started), 0);
    end();
}
END_TEST

START_TEST(clients_max_is_answered_by_busy) {
    rig_init(&rig);
    rig.config.clients_max = 3;
    rig_start(&rig);
    int fds[3];
    for (int i = 0; i < 3; i++)
        fds[i] = rig_client(&rig);
    int refused = rig_connect(&rig);
    rig_expect_error(refused, 0, KLD_BUSY, "3 clients are connected");
    ck_assert(rig_ended(refused, 5000));
    close(refused);
    close(fds[1]);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 2);
    fds[1] = rig_client(&rig);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
    end();
}
END_TEST

/* Four clients leave their work behind, one after the other; then there is no place until it ends.
 */
static void four_leave_work(void) {
    atomic_store(&rig.fake.hold, true);
    for (int i = 0; i < 4; i++) {
        int fd = rig_client(&rig);
        rig_submit(fd, 10, rig_region(fd, RIG_REGION_BYTES));
        rig_until(&rig.fake.jobs_submitted, i + 1);
        close(fd);
        rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    }
    int refused = rig_connect(&rig);
    rig_expect_error(refused, 0, KLD_BUSY, "the work of 4 clients that left is not yet done");
    close(refused);
    atomic_store(&rig.fake.hold, false);
    rig_until_is(&rig.fake.streams, 0);
    close(rig_client(&rig));
    end();
}

/* Sessions whose work outlives them are bounded too. */
START_TEST(dead_clients_with_work_do_not_pile_up) {
    rig_init(&rig);
    rig.config.clients_max = 2;
    rig_start(&rig);
    four_leave_work();
}
END_TEST

/* Who may have one client only, and starts it again and again: others have not left as much. Four
 * are half of nine places. */
START_TEST(who_may_have_few_may_leave_as_long_as_there_is_room) {
    rig_init(&rig);
    rig.config.clients_max = 8;
    rig.config.user_clients_max = 1;
    rig_start(&rig);
    four_leave_work();
}
END_TEST

/* As another user; of this thread only. */
static int connect_as(uid_t uid) {
    ck_assert_int_eq(syscall(SYS_setresuid, -1, uid, -1), 0);
    int fd = rig_connect(&rig);
    ck_assert_int_eq(syscall(SYS_setresuid, -1, 0, -1), 0);
    return fd;
}

static bool is_let_in(int fd) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_PING, 5); /* refused for what it is, or the connection was */
    (void)!send(fd, &frame, frame.header.length, MSG_NOSIGNAL);
    rig_receive(fd, &frame);
    ck_assert_uint_eq(frame.header.type, KLD_FRAME_ERROR);
    ck_assert(frame.as_ERROR.status == KLD_BUSY || frame.as_ERROR.status == KLD_INVALID);
    return frame.as_ERROR.status == KLD_INVALID;
}

/* Who is alone has every place; then a part is left to those who have none. */
START_TEST(users_do_not_shut_each_other_out) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    rig_init(&rig);
    rig.config.clients_max = 8;
    rig_start(&rig);
    int fds[9];
    for (int i = 0; i < 8; i++)
        ck_assert(is_let_in(fds[i] = connect_as(1000)));
    ck_assert(!is_let_in(connect_as(1000)));
    ck_assert(is_let_in(fds[8] = connect_as(1001)));
    ck_assert(!is_let_in(connect_as(1001)));
    ck_assert(!is_let_in(connect_as(1002))); /* of eight places one is kept */
    close(fds[8]);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 8);
    ck_assert(!is_let_in(connect_as(1000)));
    ck_assert(is_let_in(connect_as(1003)));
    end();
    rig_init(&rig);
    rig.config.clients_max = 8;
    rig.config.user_clients_max = 3;
    rig_start(&rig);
    for (int i = 0; i < 3; i++)
        ck_assert(is_let_in(connect_as(1000)));
    rig_expect_error(connect_as(1000), 0, KLD_BUSY, "3 clients of this user are connected");
    for (int i = 0; i < 3; i++)
        ck_assert(is_let_in(connect_as(1001)));
    end();
}
END_TEST

/* Clients are another process, the gateway is this one. */
START_TEST(the_gateway_has_places_of_its_own) {
    struct kld_child_order order = {.kind = KLD_ORDER_GATEWAY, .pid = getpid()};
    int gate[2], byte;
    rig_init(&rig);
    rig.config.clients_max = 2;
    rig_start(&rig);
    ck_assert_int_eq(pipe(gate), 0);
    pid_t child = fork();
    if (child == 0) {
        close(gate[1]);
        for (int i = 0; i < 2; i++)
            connect(socket(AF_UNIX, SOCK_SEQPACKET, 0), (struct sockaddr *)&rig.address,
                    rig.address_bytes);
        _exit(read(gate[0], &byte, 1) != 0);
    }
    rig_until_stat(&rig, KLD_STAT_unix_clients, 2);
    rig_expect_error(rig_connect(&rig), 0, KLD_BUSY, "2 clients are connected");
    ck_assert_int_eq(send(rig.control[0], &order, sizeof order, 0), sizeof order);
    for (int i = 0; i < KLD_GATEWAY_PLACES; i++)
        rig_client(&rig);
    rig_expect_error(rig_connect(&rig), 0, KLD_BUSY, "2 clients are connected");
    close(gate[1]);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    rig_until_stat(&rig, KLD_STAT_unix_clients, KLD_GATEWAY_PLACES);
    rig_client(&rig); /* a client like others, from here on */
    rig_client(&rig);
    rig_expect_error(rig_connect(&rig), 0, KLD_BUSY, "2 clients are connected");
    end();
}
END_TEST

/* Those are for one client each; how many regions it has is bounded all the same. */
START_TEST(the_gateway_has_limits_of_its_own) {
    struct kld_child_order order = {.kind = KLD_ORDER_GATEWAY, .pid = getpid()};
    union kld_frame frame;
    rig_init(&rig);
    rig.config.client_regions_max = 1;
    rig.config.region_bytes_max = rig.config.client_region_bytes_max = 4096;
    rig.config.tensors_max = rig.config.http_regions_max = rig.config.http_requests_max = 1;
    rig_start(&rig);
    int early = rig_client(&rig);
    rig_region_frame(&frame, 10, KLD_REGION_POOL, 8192);
    rig_send(early, &frame);
    rig_expect_error(early, 10, KLD_TOO_LARGE, "at most 4096 are allowed");
    ck_assert_int_eq(send(rig.control[0], &order, sizeof order, 0), sizeof order);
    int late = rig_client(&rig);
    rig_region(early, 8192);
    rig_region(early, 4096);
    const int most = 3 + KLD_GATEWAY_REGIONS_BESIDE;
    for (int i = 0; i < most; i++) {
        rig_region_frame(&frame, 11, KLD_REGION_POOL, i ? 1 : 8192);
        rig_send(late, &frame);
        rig_expect(late, 11, KLD_FRAME_REGION, NULL);
    }
    rig_region_frame(&frame, 12, KLD_REGION_POOL, 1);
    rig_send(late, &frame);
    rig_expect_error(late, 12, KLD_TOO_LARGE, "the most allowed");
    int client = rig_connect(&rig);
    kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
    frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
    rig_send(client, &frame);
    rig_expect(client, 1, KLD_FRAME_WELCOME, &frame);
    ck_assert_uint_eq(frame.as_WELCOME.regions_max, (uint32_t)most);
    ck_assert_uint_eq(frame.as_WELCOME.region_bytes_max, UINT64_MAX);
    end();
}
END_TEST

START_TEST(who_does_not_say_hello_is_sent_away) {
    rig_init(&rig);
    rig.config.hello_ms = 1000; /* who says it has time to */
    rig_start(&rig);
    int client = rig_client(&rig), silent = rig_connect(&rig), babbles = rig_connect(&rig);
    rig_plain(babbles, KLD_FRAME_PING, 5);
    rig_expect_error(babbles, 5, KLD_INVALID, "the first frame must be HELLO");
    rig_expect_error(silent, 0, KLD_DEADLINE, "HELLO did not come within 1000 ms");
    rig_expect_error(babbles, 0, KLD_DEADLINE, "HELLO did not come within 1000 ms");
    ck_assert(rig_ended(silent, 5000) && rig_ended(babbles, 5000));
    int late = rig_connect(&rig);
    usleep(20000);
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
    frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
    rig_send(late, &frame);
    rig_expect(late, 1, KLD_FRAME_WELCOME, NULL);
    ck_assert(!rig_ended(client, 1200) && !rig_ended(late, 0));
    end();
}
END_TEST

/* Neither who takes no reply nor who always has something unread. */
START_TEST(who_says_anything_but_hello_is_sent_away) {
    union kld_frame frame;
    rig_init(&rig);
    rig.config.hello_ms = 300;
    rig_start(&rig);
    int deaf = rig_connect(&rig), babbles = rig_connect(&rig);
    kld_frame_init(&frame, KLD_FRAME_PING, 5);
    pid_t child = fork();
    while (child == 0) { /* more than are read in a row, then their replies */
        if (send(babbles, &frame, frame.header.length, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
            continue;
        if (errno != EAGAIN)
            _exit(0);
        union kld_frame reply;
        while (recv(babbles, &reply, sizeof reply, MSG_DONTWAIT) > 0)
            ;
    }
    for (int i = 0; i < 20; i++) {
        while (send(deaf, &frame, frame.header.length, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
            ;
        usleep(1000);
    }
    rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    close(deaf);
    ck_assert_int_eq(kill(child, SIGKILL), 0);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    close(babbles);
    end();
}
END_TEST

START_TEST(packet_of_no_bytes_is_not_the_end) {
    start();
    int fd = rig_client(&rig);
    ck_assert_int_eq(send(fd, "", 0, 0), 0);
    rig_expect_error(fd, 0, KLD_INVALID, "frame of 0 bytes");
    int memfd = rig_memfd(10);
    rig_send_fds(fd, "", 1, &memfd, 1);
    close(memfd);
    rig_expect_error(fd, 0, KLD_INVALID, "frame of 1 bytes");
    shutdown(fd, SHUT_WR);
    ck_assert(rig_ended(fd, 5000));
    close(fd);
    end();
}
END_TEST

/* An error's text was often written over another one, or over whatever the stack held. */
START_TEST(an_error_frame_holds_its_text_and_nothing_else) {
    struct kld_error error;
    union kld_frame frame;
    memset(&error, 'S', sizeof error); /* a secret */
    kld_error_set(&error, KLD_BUSY, "%s", "not now");
    kld_session_error_frame(&frame, 7, &error);
    ck_assert_uint_eq(frame.header.request, 7);
    ck_assert_uint_eq(frame.as_ERROR.status, KLD_BUSY);
    ck_assert_str_eq(frame.as_ERROR.text, "not now");
    for (size_t i = strlen("not now"); i < sizeof frame.as_ERROR.text; i++)
        ck_assert_int_eq(frame.as_ERROR.text[i], 0);
    memset(error.text, 'S', sizeof error.text); /* no end at all */
    kld_session_error_frame(&frame, 8, &error);
    ck_assert_uint_eq(strlen(frame.as_ERROR.text), sizeof error.text - 1);
}
END_TEST

UNIT_MAIN("server/worker/session", every_reply_is_kept_where_the_worker_has_fewer_requests,
          every_reply_to_a_silent_client_is_kept, silent_client_that_dies_leaves_nothing,
          client_leaves_while_its_stream_opens, clients_max_is_answered_by_busy,
          users_do_not_shut_each_other_out, the_gateway_has_places_of_its_own,
          the_gateway_has_limits_of_its_own, who_does_not_say_hello_is_sent_away,
          who_says_anything_but_hello_is_sent_away, dead_clients_with_work_do_not_pile_up,
          who_may_have_few_may_leave_as_long_as_there_is_room, packet_of_no_bytes_is_not_the_end,
          an_error_frame_holds_its_text_and_nothing_else)
