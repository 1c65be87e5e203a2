/* test_frames.c - the frames that are answered at once: HELLO and what must come after it, STATS,
 * PING, and frames that a client does not send. */
#include <string.h>
#include <unistd.h>

#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig; /* each test has its own process */

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

UNIT_MAIN("server/worker/frames", hello_negotiates_or_says_why_not,
          frames_of_the_worker_are_refused, stray_descriptors_are_closed)
