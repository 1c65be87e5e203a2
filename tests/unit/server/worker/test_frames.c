/* test_frames.c - the frames that are answered at once: HELLO and what must come after it, STATS,
 * PING, and frames that a client does not send. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/server/worker/lingering.h"
#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig; /* each test has its own process */
static atomic_bool stopped, stays;

static void start(void) {
    rig_init(&rig);
    rig_start(&rig);
}

static void end(void) {
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}

static void hello(union kld_frame *frame, uint64_t request) {
    kld_frame_init(frame, KLD_FRAME_HELLO, request);
    frame->as_HELLO.version_min = 1;
    frame->as_HELLO.version_max = 1;
}

START_TEST(hello_negotiates_or_says_why_not) {
    start();
    int fd = rig_connect(&rig);
    union kld_frame frame;
    rig_plain(fd, KLD_FRAME_PING, 3);
    rig_expect_error(fd, 3, KLD_INVALID, "first frame must be HELLO");
    hello(&frame, 4);
    frame.as_HELLO.version_min = 2;
    frame.as_HELLO.version_max = 5;
    rig_send(fd, &frame);
    rig_expect_error(fd, 4, KLD_VERSION, "speaks 1");
    hello(&frame, 5);
    frame.as_HELLO.reserved = 1;
    rig_send(fd, &frame);
    rig_expect_error(fd, 5, KLD_INVALID, "reserved");
    hello(&frame, 6);
    memset(frame.as_HELLO.client_name, 'x', KLD_WIRE_NAME_MAX); /* no NUL */
    rig_send(fd, &frame);
    rig_expect_error(fd, 6, KLD_INVALID, "printable ASCII");
    hello(&frame, 7);
    strcpy(frame.as_HELLO.client_name, "line\nbreak");
    rig_send(fd, &frame);
    rig_expect_error(fd, 7, KLD_INVALID, "printable ASCII");
    hello(&frame, 8);
    frame.as_HELLO.version_max = 9;
    strcpy(frame.as_HELLO.client_name, "a \"name\"");
    rig_send(fd, &frame);
    rig_expect(fd, 8, KLD_FRAME_WELCOME, &frame);
    const struct kld_frame_welcome *welcome = &frame.as_WELCOME;
    ck_assert_uint_eq(welcome->version, 1);
    ck_assert_uint_ne(welcome->epoch, 0);
    ck_assert_str_eq(welcome->backend, "fake");
    ck_assert_uint_eq(welcome->devices, 1);
    ck_assert_str_eq(welcome->device_list[0].name, "a double");
    ck_assert_uint_eq(welcome->device_list[0].uuid[15], 7);
    ck_assert_uint_eq(welcome->requests_max, rig.config.client_requests_max);
    ck_assert_uint_eq(welcome->pool_bytes_max, 1 << 30);
    hello(&frame, 9);
    rig_send(fd, &frame);
    rig_expect_error(fd, 9, KLD_INVALID, "HELLO came twice");
    rig_plain(fd, KLD_FRAME_PING, 10);
    rig_expect(fd, 10, KLD_FRAME_PONG, NULL);
    close(fd);
    end();
}
END_TEST

static size_t add(uint8_t *packet, size_t bytes, const union kld_frame *frame) {
    memcpy(packet + bytes, frame, frame->header.length);
    return bytes + frame->header.length;
}

/* SUBMITs numbered from `first` on. */
static size_t submits(uint8_t *packet, uint64_t first, int count, uint64_t region) {
    union kld_frame frame;
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        rig_op(&frame, first + (uint64_t)i, region);
        bytes = add(packet, bytes, &frame);
    }
    return bytes;
}

/* Takes replies until `count` frames have come: DONE of `first` to first + count - 1, in any order.
 * Returns the number of packets. */
static int take_done(int fd, uint64_t first, int count) {
    uint8_t packet[KLD_WIRE_PACKET_BYTES_MAX];
    struct kld_error err = {.status = KLD_OK};
    uint64_t seen = 0, request;
    int packets = 0;
    for (int taken = 0; taken < count; packets++) {
        ssize_t bytes = rig_recv(fd, packet, sizeof packet, 0);
        unsigned frames = 0;
        ck_assert_int_gt(bytes, 0);
        ck_assert_int_eq(kld_packet_check(packet, (size_t)bytes, 0, 0, &frames, &request, &err),
                         KLD_OK);
        for (size_t at = 0; at < (size_t)bytes; taken++) {
            struct kld_frame_header header;
            memcpy(&header, packet + at, sizeof header);
            ck_assert_uint_eq(header.type, KLD_FRAME_DONE);
            ck_assert(header.request >= first && header.request < first + (uint64_t)count);
            seen |= 1ull << (header.request - first);
            at += header.length;
        }
    }
    ck_assert_uint_eq(seen, (1ull << count) - 1);
    return packets;
}

static void stay(int signal) {
    (void)signal;
    atomic_store(&stays, true);
    while (atomic_load(&stopped))
        usleep(100);
}

/* These jobs end while the worker's thread does nothing: so they are found together, and not, as
 * the scheduler likes it, one by one. */
static void end_together(int jobs) {
    rig_until(&rig.fake.jobs_submitted, jobs);
    struct sigaction action = {.sa_handler = stay, .sa_flags = SA_RESTART};
    ck_assert_int_eq(sigaction(SIGUSR1, &action, NULL), 0);
    atomic_store(&stopped, true);
    ck_assert_int_eq(pthread_kill(rig.thread, SIGUSR1), 0);
    while (!atomic_load(&stays))
        usleep(100);
    rig.fake.hold = false;
    rig_until(&rig.fake.jobs_told, jobs);
    atomic_store(&stopped, false);
}

/* Each says which field it is. */
START_TEST(fields_that_a_region_has_no_use_for) {
    start();
    int fd = rig_client(&rig), memfd = rig_memfd(4096);
    static const char *const texts[] = {
        "a region of 0 bytes; expected at least 1", "kind 1: offset_bytes is not 0; expected 0",
        "kind 1: base_bytes is not 0", "kind 1: device_uuid is not 0",
        "kind 1: ipc_handle is not 0"};
    for (uint64_t i = 0; i < 5; i++) {
        union kld_frame frame;
        rig_region_frame(&frame, 10 + i, KLD_REGION_MEMFD, i != 0);
        frame.as_REGION_ADD.offset_bytes = i == 1;
        frame.as_REGION_ADD.base_bytes = i == 2;
        frame.as_REGION_ADD.device_uuid[15] = i == 3;
        frame.as_REGION_ADD.ipc_handle[63] = i == 4;
        rig_send_fds(fd, &frame, frame.header.length, &memfd, 1);
        rig_expect_error(fd, 10 + i, KLD_INVALID, texts[i]);
    }
    close(memfd);
    close(fd);
    end();
}
END_TEST

START_TEST(several_requests_in_a_packet) {
    start();
    int fd = rig_client(&rig), other = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES),
             others = rig_region(other, RIG_REGION_BYTES);
    uint8_t packet[KLD_WIRE_PACKET_BYTES_MAX + 1];
    rig.fake.hold = true;
    size_t bytes = submits(packet, 100, 16, region);
    rig_send_fds(fd, packet, bytes, NULL, 0);
    for (uint64_t i = 0; i < 8; i++)
        rig_submit(other, 200 + i, others);
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, 24);
    end_together(2 * KLD_LANE_DEPTH); /* the rest wait for their turn */
    int packets = take_done(fd, 100, 16);
    ck_assert_int_eq(take_done(other, 200, 8), 8); /* who sends one frame a packet gets one */
    ck_assert_int_lt(packets, 16);
    /* One of them is refused: that is its own business. */
    union kld_frame frame;
    bytes = submits(packet, 300, 2, region);
    rig_op(&frame, 302, region + 1000);
    bytes = add(packet, bytes, &frame);
    rig_send_fds(fd, packet, bytes, NULL, 0);
    bool refused = false;
    for (int taken = 0; taken < 3;) {
        ssize_t got = rig_recv(fd, packet, sizeof packet, 0);
        ck_assert_int_gt(got, 0);
        for (size_t at = 0; at < (size_t)got; taken++) {
            struct kld_frame_header header;
            memcpy(&header, packet + at, sizeof header);
            ck_assert_uint_eq(header.type,
                              header.request == 302 ? KLD_FRAME_ERROR : KLD_FRAME_DONE);
            refused = refused || header.request == 302;
            at += header.length;
        }
    }
    ck_assert(refused);
    close(fd);
    close(other);
    end();
}
END_TEST

/* A packet that is not whole is refused whole: nothing of it is computed. */
START_TEST(bad_packets_do_nothing) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    uint8_t packet[KLD_WIRE_PACKET_BYTES_MAX + 512];
    size_t bytes = submits(packet, 100, 3, region);
    rig_send_fds(fd, packet, bytes - 1, NULL, 0);
    rig_expect_error(fd, 100, KLD_INVALID, "frame 3 of its packet");
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_PING, 103);
    rig_send_fds(fd, packet, add(packet, bytes, &frame), NULL, 0);
    rig_expect_error(fd, 100, KLD_INVALID, "PING must be alone");
    int null[] = {dup(fd)};
    rig_send_fds(fd, packet, bytes, null, 1);
    rig_expect_error(fd, 100, KLD_INVALID, "file descriptors");
    close(null[0]);
    bytes = submits(packet, 100, 18, region); /* more than a packet may have */
    ck_assert_uint_gt(bytes, KLD_WIRE_PACKET_BYTES_MAX);
    rig_send_fds(fd, packet, bytes, NULL, 0);
    rig_expect_error(fd, 100, KLD_INVALID, "cut");
    ck_assert_int_eq(rig.fake.jobs_submitted, 0);
    rig_submit(fd, 500, region);
    rig_expect(fd, 500, KLD_FRAME_DONE, NULL);
    close(fd);
    end();
}
END_TEST

START_TEST(frames_of_the_worker_are_refused) {
    start();
    int fd = rig_client(&rig);
    const enum kld_frame_type types[] = {KLD_FRAME_WELCOME,     KLD_FRAME_REGION, KLD_FRAME_DONE,
                                         KLD_FRAME_STATS_REPLY, KLD_FRAME_PONG,   KLD_FRAME_ERROR};
    for (uint64_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        rig_plain(fd, types[i], 20 + i);
        rig_expect_error(fd, 20 + i, KLD_INVALID, "is not a frame that a client sends");
    }
    close(fd);
    end();
}
END_TEST

/* Descriptors that came along are closed, whatever becomes of the frame. */
/* Errors are the longest of what may share a packet. */
START_TEST(many_failures_at_once) {
    enum { COUNT = 16, ALL = 2 * COUNT };
    rig_init(&rig);
    rig.config.client_streams_max = COUNT;
    rig_start(&rig);
    int fd = rig_client(&rig), taken = 0, most = 0;
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    uint8_t packet[KLD_WIRE_PACKET_BYTES_MAX + 1];
    union kld_frame frame;
    rig.fake.hold = true;
    rig.fake.fail_job = KLD_INTERNAL;
    for (uint64_t first = 100; first < 100 + ALL; first += COUNT) {
        size_t bytes = 0;
        for (uint64_t i = 0; i < COUNT; i++) {
            rig_op(&frame, first + i, region);
            frame.as_SUBMIT.stream = (uint32_t)i;
            bytes = add(packet, bytes, &frame);
        }
        rig_send_fds(fd, packet, bytes, NULL, 0);
    }
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, ALL);
    end_together(ALL);
    while (taken < ALL) {
        ssize_t bytes = rig_recv(fd, packet, sizeof packet, MSG_TRUNC);
        struct kld_error err = {.status = KLD_OK};
        unsigned frames = 0;
        uint64_t request;
        ck_assert_int_gt(bytes, 0);
        ck_assert_int_le(bytes, KLD_WIRE_PACKET_BYTES_MAX);
        ck_assert_int_eq(kld_packet_check(packet, (size_t)bytes, 0, 0, &frames, &request, &err),
                         KLD_OK);
        taken += (int)frames;
        most = (int)frames > most ? (int)frames : most;
    }
    ck_assert_uint_eq(most, KLD_WIRE_PACKET_BYTES_MAX / sizeof(struct kld_frame_error));
    close(fd);
    end();
}
END_TEST

START_TEST(stray_descriptors_are_closed) {
    start();
    int fd = rig_client(&rig), pipes[2], fds[5];
    union kld_frame frame;
    ck_assert_int_eq(pipe(pipes), 0);
    for (int i = 0; i < 5; i++)
        fds[i] = pipes[1];
    kld_frame_init(&frame, KLD_FRAME_PING, 30);
    rig_send_fds(fd, &frame, frame.header.length, fds, 5);
    rig_expect_error(fd, 30, KLD_INVALID, "5 file descriptors; expected 0");
    rig_region_frame(&frame, 31, KLD_REGION_MEMFD, 4096);
    rig_send_fds(fd, &frame, frame.header.length, fds, 1);
    rig_expect_error(fd, 31, KLD_INVALID, "not a memfd");
    close(pipes[1]);
    char byte; /* the end of the pipe comes when its last writer is gone */
    ck_assert_int_eq(read(pipes[0], &byte, 1), 0);
    close(pipes[0]);
    close(fd);
    end();
}
END_TEST

/* More of them than uv's pool has threads, each of whose last close is the worker's: sockets, and
 * sockets in the queue of others, in packets that it reads, and in packets that it does not because
 * their sender has left. */
START_TEST(descriptors_that_do_not_close_stop_nobody) {
    enum { EACH = 5, KINDS = 4 };
    struct lingering lingering[KINDS * EACH];
    int fds[KINDS * EACH];
    union kld_frame frame;
    rig_init(&rig);
    for (int i = 0; i < KINDS * EACH; i++) {
        bool leaves = i % 2, hides = i % KINDS < 2;
        fds[i] = rig_connect(&rig);
        lingering[i] = lingering_open();
        int sent = hides ? lingering_hide(&lingering[i]) : lingering[i].fd;
        for (int pings = 0; leaves && pings <= KLD_SESSION_BURST; pings++)
            rig_plain(fds[i], KLD_FRAME_PING, 30);
        rig_region_frame(&frame, 31, KLD_REGION_MEMFD, 4096);
        rig_send_fds(fds[i], &frame, frame.header.length, &sent, 1);
        close(sent);
        if (leaves)
            close(fds[i]);
    }
    rig_start(&rig);
    int other = rig_client(&rig);
    rig_until_stat(&rig, KLD_STAT_unix_clients, KINDS * EACH / 2 + 1);
    for (int i = 0; i < KINDS * EACH; i += 2)
        rig_expect_error(fds[i], 31, KLD_INVALID, "before HELLO");
    uint64_t region = rig_region(other, RIG_REGION_BYTES);
    rig_submit(other, 40, region);
    rig_expect(other, 40, KLD_FRAME_DONE, NULL);
    close(other);
    end();
    for (int i = 0; i < KINDS * EACH; i++)
        lingering_let_go(&lingering[i]);
}
END_TEST

UNIT_MAIN("server/worker/frames", hello_negotiates_or_says_why_not, several_requests_in_a_packet,
          fields_that_a_region_has_no_use_for, bad_packets_do_nothing,
          frames_of_the_worker_are_refused, many_failures_at_once, stray_descriptors_are_closed,
          descriptors_that_do_not_close_stop_nobody)
