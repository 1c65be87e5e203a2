/* test_event.c - events that a client shares with its worker, EARLY answers, priorities of streams;
 * over the double, which has events but no GPU behind them. */
#include "server/worker/event.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

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

static void drop_event(int fd, uint64_t request, uint64_t event) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_EVENT_DROP, request);
    frame.as_EVENT_DROP.event = event;
    rig_send(fd, &frame);
}

static uint64_t device_region(int fd) {
    union kld_frame frame;
    rig_region_frame(&frame, 911, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_expect(fd, 911, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

static void submit_early(int fd, uint64_t request, uint64_t region) {
    union kld_frame frame;
    rig_op(&frame, request, region);
    frame.as_SUBMIT.flags = KLD_SUBMIT_EARLY;
    rig_send(fd, &frame);
}

static void expect_early_done(int fd, uint64_t request) {
    union kld_frame frame;
    rig_expect(fd, request, KLD_FRAME_DONE, &frame);
    ck_assert_uint_eq(frame.as_DONE.scalar, 0);
    ck_assert(frame.as_DONE.loss == 0 && frame.as_DONE.kernel_ns == 0 && frame.as_DONE.bytes == 0);
}

START_TEST(events_are_checked) {
    start();
    int fd = rig_client(&rig), other = rig_client(&rig);
    union kld_frame frame;
    rig_event_frame(&frame, 1, 3);
    rig_send(fd, &frame);
    rig_expect_error(fd, 1, KLD_INVALID, "unknown event kind 3");
    rig_event_frame(&frame, 2, KLD_EVENT_READY);
    memset(frame.as_EVENT_ADD.ipc_handle, 0, KLD_WIRE_IPC_HANDLE_BYTES);
    rig_send(fd, &frame);
    rig_expect_error(fd, 2, KLD_INVALID, "expected a handle");
    rig_event_frame(&frame, 3, KLD_EVENT_DONE);
    frame.as_EVENT_ADD.ipc_handle[5] = 1;
    rig_send(fd, &frame);
    rig_expect_error(fd, 3, KLD_INVALID, "expected a handle");
    rig_event_frame(&frame, 4, KLD_EVENT_DONE);
    frame.as_EVENT_ADD.device_uuid[0] = 1;
    rig_send(fd, &frame);
    rig_expect_error(fd, 4, KLD_INVALID, "the event is on another device than the one of this");
    memcpy(rig.page->device[1].uuid, frame.as_EVENT_ADD.device_uuid, KLD_WIRE_UUID_BYTES);
    rig.page->workers = 2;
    rig_send(fd, &frame);
    rig_expect_error(fd, 4, KLD_INVALID, "the event is on device 1, this socket is that of");
    rig.page->workers = 1;
    atomic_store(&rig.fake.fail_status, KLD_INVALID);
    atomic_store(&rig.fake.fail_call, 1);
    rig_event_frame(&frame, 5, KLD_EVENT_READY);
    rig_send(fd, &frame);
    rig_expect_error(fd, 5, KLD_INVALID, "told to fail");

    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    uint64_t ready = rig_add_event(fd, KLD_EVENT_READY), done = rig_add_event(fd, KLD_EVENT_DONE);
    rig_op(&frame, 6, region);
    frame.as_SUBMIT.ready_event = done;
    rig_send(fd, &frame);
    rig_expect_error(fd, 6, KLD_INVALID, "ready_event: event");
    frame.as_SUBMIT.ready_event = 0;
    frame.as_SUBMIT.done_event = ready;
    rig_send(fd, &frame);
    rig_expect_error(fd, 6, KLD_INVALID, "done_event: event");
    frame.as_SUBMIT.done_event = done + (1 << KLD_EVENT_SLOT_BITS);
    rig_send(fd, &frame);
    rig_expect_error(fd, 6, KLD_NOT_FOUND, "no event");
    drop_event(other, 7, done);
    rig_expect_error(other, 7, KLD_NOT_FOUND, "no event");
    frame.as_SUBMIT.ready_event = ready;
    frame.as_SUBMIT.done_event = done;
    rig_send(fd, &frame); /* host memory does not mind */
    rig_expect(fd, 6, KLD_FRAME_DONE, &frame);
    ck_assert(frame.as_DONE.loss == FAKE_LOSS);
    drop_event(fd, 8, done);
    rig_expect(fd, 8, KLD_FRAME_DONE, NULL);
    drop_event(fd, 8, done);
    rig_expect_error(fd, 8, KLD_NOT_FOUND, "no event");
    rig_until_is(&rig.fake.events, 1);
    close(fd);
    rig_until_is(&rig.fake.events, 0);
    close(other);
    end();
}
END_TEST

START_TEST(events_have_a_limit_and_ids_of_their_own) {
    start();
    int fd = rig_client(&rig);
    uint64_t ids[KLD_SESSION_EVENTS_MAX];
    union kld_frame frame;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < KLD_SESSION_EVENTS_MAX; i++) {
            ids[i] = rig_add_event(fd, KLD_EVENT_DONE);
            ck_assert(ids[i] != 0 && (i == 0 || ids[i] != ids[i - 1]));
        }
        rig_event_frame(&frame, 20, KLD_EVENT_DONE);
        rig_send(fd, &frame);
        rig_expect_error(fd, 20, KLD_TOO_LARGE, "64 events");
        for (int i = 0; i < KLD_SESSION_EVENTS_MAX; i++) {
            drop_event(fd, 21, ids[i]);
            rig_expect(fd, 21, KLD_FRAME_DONE, NULL);
        }
        rig_until_is(&rig.fake.events, 0);
        usleep(20000); /* the loop hears of it a moment later */
    }
    close(fd);
    end();
}
END_TEST

START_TEST(an_event_stays_while_a_job_names_it) {
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    uint64_t region = device_region(fd);
    uint64_t ready = rig_add_event(fd, KLD_EVENT_READY), done = rig_add_event(fd, KLD_EVENT_DONE);
    atomic_store(&rig.fake.hold, true);
    rig_op(&frame, 10, region);
    frame.as_SUBMIT.ready_event = ready;
    frame.as_SUBMIT.done_event = done;
    rig_send(fd, &frame);
    rig_until(&rig.fake.jobs_started, 1);
    drop_event(fd, 11, ready);
    rig_expect(fd, 11, KLD_FRAME_DONE, NULL);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.events), 2);
    close(fd); /* the other one goes with its client */
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.events), 2);
    atomic_store(&rig.fake.hold, false);
    rig_until_is(&rig.fake.events, 0);
    end();
}
END_TEST

static void check_early(bool directly) {
    start();
    atomic_store(&rig.fake.launches_directly, directly);
    int fd = rig_client(&rig);
    uint64_t region = device_region(fd);
    union kld_frame frame;
    rig_submit(fd, 1, region); /* opens the stream */
    rig_expect(fd, 1, KLD_FRAME_DONE, NULL);
    atomic_store(&rig.fake.hold, true);
    submit_early(fd, 10, region);
    expect_early_done(fd, 10);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_done), 1);
    rig_cancel(fd, 11, 10); /* nothing to cancel: it was answered */
    rig_expect_error(fd, 11, KLD_NOT_FOUND, "no request");
    if (directly) { /* the number is free, and the stream goes on in order */
        submit_early(fd, 10, region);
        expect_early_done(fd, 10);
    }
    atomic_store(&rig.fake.hold, false);
    rig_until(&rig.fake.jobs_done, directly ? 3 : 2);
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, 0);
    rig_plain(fd, KLD_FRAME_STATS, 12);
    rig_expect(fd, 12, KLD_FRAME_STATS_REPLY, &frame); /* and no second DONE before it */
    ck_assert_uint_eq(frame.as_STATS_REPLY.requests_total, directly ? 3 : 2);
    ck_assert_uint_eq(frame.as_STATS_REPLY.errors_total, 0);
    close(fd);
    end();
}

START_TEST(early_is_told_at_launch) { check_early(false); }
END_TEST

START_TEST(early_is_told_from_submit) { check_early(true); }
END_TEST

START_TEST(early_that_fails_to_launch_is_an_error) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.fail_launch, true);
    atomic_store(&rig.fake.fail_job, KLD_INVALID);
    submit_early(fd, 10, region);
    rig_expect_error(fd, 10, KLD_INVALID, "told to fail");
    close(fd);
    end();
}
END_TEST

START_TEST(early_needs_a_device_and_its_memory) {
    start();
    int fd = rig_client(&rig);
    submit_early(fd, 10, rig_region(fd, RIG_REGION_BYTES));
    rig_expect_error(fd, 10, KLD_INVALID, "predictions: lies in host memory");
    close(fd);
    end();

    rig_init(&rig);
    rig.fake.head.info.imports_cuda_ipc = false;
    rig_start(&rig);
    fd = rig_connect(&rig);
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
    frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
    rig_send(fd, &frame);
    rig_expect(fd, 1, KLD_FRAME_WELCOME, &frame);
    ck_assert_uint_eq(frame.as_WELCOME.events_max, 0);
    submit_early(fd, 10, device_region(fd));
    rig_expect_error(fd, 10, KLD_UNIMPLEMENTED, "EARLY needs the cuda back end");
    rig_event_frame(&frame, 11, KLD_EVENT_READY);
    rig_send(fd, &frame);
    rig_expect_error(fd, 11, KLD_UNIMPLEMENTED, "events need the cuda back end");
    close(fd);
    end();
}
END_TEST

/* R1: DONE was sent, the client is gone, and the kernel still writes. */
START_TEST(memory_stays_for_what_was_told_early) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    submit_early(fd, 10, region);
    expect_early_done(fd, 10);
    close(fd);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 1);
    atomic_store(&rig.fake.hold, false);
    rig_until_is(&rig.fake.memories, 0);
    end();
}
END_TEST

START_TEST(a_lost_device_is_not_told_to_whoever_has_an_answer) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    atomic_store(&rig.fake.fail_job, KLD_DEVICE_LOST);
    submit_early(fd, 10, region);
    expect_early_done(fd, 10);
    rig_submit(fd, 11, region);
    rig_until(&rig.fake.jobs_submitted, 2);
    atomic_store(&rig.fake.hold, false);
    rig_expect_error(fd, 11, KLD_DEVICE_LOST, "device failed");
    ck_assert_int_eq(rig_wait(&rig), 2);
    union kld_frame frame; /* none about request 10, only the end */
    ck_assert_int_eq(recv(fd, &frame, sizeof frame, MSG_DONTWAIT), 0);
    close(fd);
}
END_TEST

/* Clients whose events do not come have at most so many jobs with the back end; others pass. */
START_TEST(those_who_wait_leave_room) {
    start();
    enum { CLIENTS = 3, STREAMS = 4 };
    int fds[CLIENTS], other = rig_client(&rig);
    uint64_t plain = device_region(other);
    union kld_frame frame;
    atomic_store(&rig.fake.hold, true);
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = rig_client(&rig);
        rig_op(&frame, 1, device_region(fds[i]));
        frame.as_SUBMIT.ready_event = rig_add_event(fds[i], KLD_EVENT_READY);
        for (uint64_t j = 0; j < STREAMS * KLD_LANE_DEPTH; j++) {
            frame.header.request = 100 + j;
            frame.as_SUBMIT.stream = j % STREAMS;
            rig_send(fds[i], &frame);
        }
    }
    rig_until(&rig.fake.jobs_submitted, KLD_WAITS_MAX);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_submitted), KLD_WAITS_MAX);
    rig_submit(other, 50, plain);
    rig_until(&rig.fake.jobs_submitted, KLD_WAITS_MAX + 1);
    close(fds[0]); /* what it had queued goes, what runs stays */
    atomic_store(&rig.fake.hold, false);
    rig_expect(other, 50, KLD_FRAME_DONE, NULL);
    for (int i = 1; i < CLIENTS; i++) {
        for (uint64_t j = 0; j < STREAMS * KLD_LANE_DEPTH; j++) {
            rig_receive(fds[i], &frame);
            ck_assert_int_eq(frame.header.type, KLD_FRAME_DONE);
        }
        close(fds[i]);
    }
    close(other);
    end();
    ck_assert_uint_eq(rig.worker.waits_running, 0);
}
END_TEST

START_TEST(priorities_are_those_of_streams) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    union kld_frame frame, stream;
    const int32_t priorities[] = {KLD_PRIORITY_HIGH, KLD_PRIORITY_LOW, KLD_PRIORITY_NORMAL};
    kld_frame_init(&stream, KLD_FRAME_STREAM, 30);
    for (uint32_t i = 0; i < 3; i++) {
        stream.as_STREAM.stream = i;
        stream.as_STREAM.priority = priorities[i];
        rig_send(fd, &stream);
        rig_expect(fd, 30, KLD_FRAME_DONE, NULL);
        rig_op(&frame, 31, region);
        frame.as_SUBMIT.stream = i;
        rig_send(fd, &frame);
        rig_expect(fd, 31, KLD_FRAME_DONE, NULL);
        ck_assert_int_eq(atomic_load(&rig.fake.last_priority), priorities[i]);
        ck_assert_uint_eq(atomic_load(&rig.fake.last_owner), 1 + (uint64_t)geteuid());
    }
    rig_send(fd, &stream);
    rig_expect_error(fd, 30, KLD_INVALID, "is in use");
    stream.as_STREAM.stream = 3;
    stream.as_STREAM.priority = 2;
    rig_send(fd, &stream);
    rig_expect_error(fd, 30, KLD_INVALID, "priority 2");
    stream.as_STREAM.stream = 4;
    rig_send(fd, &stream);
    rig_expect_error(fd, 30, KLD_INVALID, "below 4");
    close(fd);
    end();
}
END_TEST

UNIT_MAIN("server/worker/event", events_are_checked, events_have_a_limit_and_ids_of_their_own,
          an_event_stays_while_a_job_names_it, early_is_told_at_launch, early_is_told_from_submit,
          early_that_fails_to_launch_is_an_error, early_needs_a_device_and_its_memory,
          memory_stays_for_what_was_told_early, a_lost_device_is_not_told_to_whoever_has_an_answer,
          those_who_wait_leave_room, priorities_are_those_of_streams)
