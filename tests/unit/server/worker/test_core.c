/* test_core.c - the life of a request over the double: done, failed, cancelled, late, detached, and
 * the end of the device; each time the memory must outlive the job. */
#include "server/worker/core.h"

#include <signal.h>
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

static uint64_t stat_of(enum kld_stat stat) { return atomic_load(&rig.stats->value[stat]); }

START_TEST(submit_is_answered_by_done) {
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    rig_submit(fd, 10, region);
    rig_expect(fd, 10, KLD_FRAME_DONE, &frame);
    ck_assert_uint_eq(frame.as_DONE.scalar, 1);
    ck_assert_double_eq(frame.as_DONE.loss, FAKE_LOSS);
    ck_assert_uint_eq(frame.as_DONE.bytes, 1000);
    ck_assert_uint_eq(stat_of(KLD_STAT_kernel_bytes_total), 1000);
    ck_assert_uint_eq(kld_stats_requests_of(rig.stats, KLD_FRONT_UNIX, KLD_OK), 1);

    kld_frame_init(&frame, KLD_FRAME_COPY, 11);
    frame.as_COPY.destination = frame.as_COPY.source = region;
    frame.as_COPY.source_offset_bytes = RIG_TENSOR_BYTES;
    frame.as_COPY.bytes = RIG_TENSOR_BYTES;
    rig_send(fd, &frame);
    rig_expect(fd, 11, KLD_FRAME_DONE, &frame);
    ck_assert_uint_eq(frame.as_DONE.scalar, 0);
    ck_assert_uint_eq(stat_of(KLD_STAT_kernel_bytes_total), 1000); /* a copy is none of kernels */
    ck_assert_uint_eq(stat_of(KLD_STAT_copied_bytes_total), 1000);
    ck_assert_uint_eq(atomic_load(&rig.stats->requests[KLD_FRONT_UNIX][KLD_ASKED_COPY][KLD_OK]), 1);
    ck_assert_uint_gt(atomic_load(&rig.stats->device_worked_ns), 0);

    frame.header.request = 12;
    kld_frame_init(&frame, KLD_FRAME_STATS, 12);
    rig_send(fd, &frame);
    rig_expect(fd, 12, KLD_FRAME_STATS_REPLY, &frame);
    ck_assert_uint_eq(frame.as_STATS_REPLY.requests_total, 2);
    ck_assert_uint_eq(frame.as_STATS_REPLY.errors_total, 0);
    ck_assert_uint_eq(frame.as_STATS_REPLY.regions, 1);
    ck_assert_uint_eq(frame.as_STATS_REPLY.region_bytes, RIG_REGION_BYTES);
    ck_assert_uint_eq(frame.as_STATS_REPLY.bytes_total, 2000);
    close(fd);
    end();
}
END_TEST

START_TEST(failure_of_a_job_is_its_own) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.fail_job, KLD_NO_MEMORY);
    rig_submit(fd, 10, region);
    rig_expect_error(fd, 10, KLD_NO_MEMORY, "told to fail");
    atomic_store(&rig.fake.fail_job, KLD_OK);
    rig_submit(fd, 11, region);
    rig_expect(fd, 11, KLD_FRAME_DONE, NULL);
    close(fd);
    end();
}
END_TEST

START_TEST(one_stream_runs_in_order) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    for (uint64_t i = 0; i < 60; i++)
        rig_submit(fd, 100 + i, region);
    for (uint64_t i = 0; i < 60; i++)
        rig_expect(fd, 100 + i, KLD_FRAME_DONE, NULL);
    close(fd);
    end();
}
END_TEST

START_TEST(limits_are_errors_not_growth) {
    rig_init(&rig);
    rig.config.client_requests_max = 6;
    rig.config.requests_max = 8;
    rig.config.user_share = 100;
    rig_start(&rig);
    atomic_store(&rig.fake.hold, true);
    int first = rig_client(&rig), second = rig_client(&rig);
    uint64_t region = rig_region(first, RIG_REGION_BYTES);
    for (uint64_t i = 0; i < 6; i++)
        rig_submit(first, 100 + i, region);
    rig_submit(first, 106, region);
    rig_expect_error(first, 106, KLD_THROTTLED, "6 requests of this connection");
    uint64_t other = rig_region(second, RIG_REGION_BYTES);
    for (uint64_t i = 0; i < 3; i++)
        rig_submit(second, 200 + i, other);
    rig_expect_error(second, 202, KLD_BUSY, "8 requests are in flight");
    /* The lane keeps back what the device need not have yet. */
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, 8);
    rig_until_stat(&rig, KLD_STAT_worker_requests_queued, 6 - KLD_LANE_DEPTH);
    ck_assert_uint_eq(rig.stats->rejected[KLD_REJECT_unix_client_requests_max], 1);
    ck_assert_uint_eq(rig.stats->rejected[KLD_REJECT_unix_requests_max], 1);
    rig_submit(first, 103, region);
    rig_expect_error(first, 103, KLD_INVALID, "is in flight");
    atomic_store(&rig.fake.hold, false);
    for (uint64_t i = 0; i < 6; i++)
        rig_expect(first, 100 + i, KLD_FRAME_DONE, NULL);
    rig_expect(second, 200, KLD_FRAME_DONE, NULL);
    rig_expect(second, 201, KLD_FRAME_DONE, NULL);
    close(first);
    close(second);
    end();
}
END_TEST

START_TEST(what_was_given_up_does_not_count) {
    rig_init(&rig);
    rig.config.client_requests_max = 2;
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t round = 0; round < 3; round++) {
        for (uint64_t i = 100; i < 102; i++)
            rig_submit(fd, i, region);
        rig_submit(fd, 102, region);
        rig_expect_error(fd, 102, KLD_THROTTLED, "2 requests of this connection");
        for (uint64_t i = 100; i < 102; i++) {
            rig_cancel(fd, 20, i);
            rig_expect_error(fd, i, KLD_CANCELLED, "cancelled");
            rig_expect(fd, 20, KLD_FRAME_DONE, NULL);
        }
    }
    rig_submit(fd, 200, region);
    atomic_store(&rig.fake.hold, false);
    rig_expect(fd, 200, KLD_FRAME_DONE, NULL);
    ck_assert_int_le(atomic_load(&rig.fake.jobs_done), KLD_LANE_DEPTH + 1);
    close(fd);
    end();
}
END_TEST

START_TEST(cancel_answers_at_once_and_pins_until_the_job_ends) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < KLD_LANE_DEPTH + 2; i++)
        rig_submit(fd, 100 + i, region);
    rig_until(&rig.fake.jobs_started, 1);
    /* One that runs, and one that still waits in its lane. */
    rig_cancel(fd, 20, 100);
    rig_expect_error(fd, 100, KLD_CANCELLED, "cancelled");
    rig_expect(fd, 20, KLD_FRAME_DONE, NULL);
    rig_cancel(fd, 21, 101 + KLD_LANE_DEPTH);
    rig_expect_error(fd, 101 + KLD_LANE_DEPTH, KLD_CANCELLED, "cancelled");
    rig_expect(fd, 21, KLD_FRAME_DONE, NULL);
    rig_cancel(fd, 22, 100);
    rig_expect_error(fd, 22, KLD_NOT_FOUND, "no request 100");
    rig_drop(fd, 23, region);
    rig_expect(fd, 23, KLD_FRAME_DONE, NULL);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 1);
    atomic_store(&rig.fake.hold, false);
    for (uint64_t i = 1; i < KLD_LANE_DEPTH + 1; i++)
        rig_expect(fd, 100 + i, KLD_FRAME_DONE, NULL);
    rig_until_is(&rig.fake.memories, 0);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_done), KLD_LANE_DEPTH + 1);
    ck_assert_uint_eq(stat_of(KLD_STAT_requests_detached_total), 2);
    /* What the device did is counted, whoever waited for it. */
    ck_assert_uint_eq(stat_of(KLD_STAT_kernel_bytes_total), 1000 * (KLD_LANE_DEPTH + 1));
    close(fd);
    end();
}
END_TEST

START_TEST(deadlines_pass_for_waiting_and_running) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    union kld_frame frame;
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < KLD_LANE_DEPTH + 1; i++) {
        rig_op(&frame, 100 + i, region);
        frame.as_SUBMIT.timeout_ns = (20 + 10 * i) * 1000000;
        rig_send(fd, &frame);
    }
    rig_op(&frame, 200, region);
    frame.as_SUBMIT.timeout_ns = UINT64_MAX; /* overflows the clock: no deadline */
    rig_send(fd, &frame);
    for (uint64_t i = 0; i < KLD_LANE_DEPTH + 1; i++)
        rig_expect_error(fd, 100 + i, KLD_DEADLINE, "deadline passed");
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_done), 0);
    atomic_store(&rig.fake.hold, false);
    rig_expect(fd, 200, KLD_FRAME_DONE, NULL); /* and no second answer to the others before it */
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_done), KLD_LANE_DEPTH + 1);
    close(fd);
    end();
}
END_TEST

START_TEST(client_that_dies_is_detached) {
    start();
    int fd = rig_client(&rig), other = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < KLD_LANE_DEPTH + 10; i++)
        rig_submit(fd, 100 + i, region);
    rig_until(&rig.fake.jobs_started, 1);
    rig_plain(fd, KLD_FRAME_PING, 50);
    rig_expect(fd, 50, KLD_FRAME_PONG, NULL); /* so all were read */
    close(fd);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 1);
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, KLD_LANE_DEPTH);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 1);
    atomic_store(&rig.fake.hold, false);
    rig_until_is(&rig.fake.memories, 0);
    rig_until_is(&rig.fake.streams, 0);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_done), KLD_LANE_DEPTH); /* the rest was spared */
    rig_plain(other, KLD_FRAME_PING, 60);
    rig_expect(other, 60, KLD_FRAME_PONG, NULL);
    close(other);
    end();
}
END_TEST

START_TEST(lost_device_answers_everything_and_ends_with_2) {
    start();
    int fd = rig_client(&rig), other = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES),
             second = rig_region(other, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < 8; i++)
        rig_submit(fd, 100 + i, region);
    rig_submit(other, 200, second);
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, 9);
    atomic_store(&rig.fake.dead, true);
    atomic_store(&rig.fake.fail_job, KLD_DEVICE_LOST);
    atomic_store(&rig.fake.hold, false);
    for (uint64_t i = 0; i < 8; i++)
        rig_expect_error(fd, 100 + i, KLD_DEVICE_LOST, "device failed");
    rig_expect_error(other, 200, KLD_DEVICE_LOST, "device failed");
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert(rig.worker.lost);
    ck_assert_int_eq(atomic_load(&rig.fake.dead_told), 1); /* the successor may come */
    ck_assert_uint_eq(stat_of(KLD_STAT_device_lost_total), 1);
    /* The process would _exit(2) here: what is left belongs to jobs that may still run. */
}
END_TEST

START_TEST(device_lost_while_adding_memory_ends_with_2) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    rig_submit(fd, 100, region);
    rig_until(&rig.fake.jobs_started, 1);
    atomic_store(&rig.fake.fail_status, KLD_DEVICE_LOST);
    atomic_store(&rig.fake.fail_call, 1);
    union kld_frame frame;
    rig_region_frame(&frame, 30, KLD_REGION_POOL, 100);
    rig_send(fd, &frame);
    rig_expect_error(fd, 30, KLD_DEVICE_LOST, "told to fail");
    rig_expect_error(fd, 100, KLD_DEVICE_LOST, "device failed");
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert_int_eq(atomic_load(&rig.fake.dead_told), 0); /* the job may run yet */
}
END_TEST

/* Nobody asks the device for anything afterwards. */
static void lose_it_with_a_region(bool leaves) {
    start();
    int fd = rig_client(&rig), other = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.stays_pinned, true);
    if (leaves) {
        close(fd);
    } else {
        union kld_frame frame;
        kld_frame_init(&frame, KLD_FRAME_REGION_DROP, 30);
        frame.as_REGION_DROP.region = region;
        rig_send(fd, &frame);
    }
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert(rig.worker.lost);
    ck_assert_uint_eq(stat_of(KLD_STAT_device_lost_total), 1);
    if (!leaves)
        close(fd);
    close(other);
}

static atomic_bool stay_on;
static atomic_int staying;

static void stay(int number) {
    (void)number;
    atomic_fetch_add(&staying, 1);
    while (atomic_load(&stay_on))
        usleep(100);
}

/* The loop hears of both at once, and of the loss first. */
START_TEST(what_had_ended_before_the_loss_is_done) {
    struct sigaction action = {.sa_handler = stay, .sa_flags = SA_RESTART};
    start();
    int fd = rig_client(&rig), other = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    rig_submit(fd, 9, region);
    rig_expect(fd, 9, KLD_FRAME_DONE, NULL);
    atomic_store(&rig.fake.hold, true);
    rig_submit(fd, 10, region);
    rig_submit(fd, 11, region);
    atomic_store(&rig.fake.hold_memory, true);
    atomic_store(&rig.fake.fail_status, KLD_DEVICE_LOST);
    atomic_store(&rig.fake.fail_all, true);
    int calls = atomic_load(&rig.fake.calls);
    union kld_frame frame;
    rig_region_frame(&frame, 20, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(other, &frame);
    rig_until(&rig.fake.calls, calls + 1);
    rig_until(&rig.fake.jobs_submitted, 3);
    usleep(2 * KLD_POLL_NS / 1000); /* the loop sleeps */
    ck_assert_int_eq(sigaction(SIGUSR1, &action, NULL), 0);
    atomic_store(&stay_on, true);
    ck_assert_int_eq(pthread_kill(rig.thread, SIGUSR1), 0);
    rig_until(&staying, 1);
    atomic_store(&rig.fake.hold_memory, false);
    usleep(20000);
    atomic_store(&rig.fake.hold, false);
    rig_until(&rig.fake.jobs_told, 3);
    atomic_store(&stay_on, false);
    rig_expect(fd, 10, KLD_FRAME_DONE, NULL);
    rig_expect(fd, 11, KLD_FRAME_DONE, NULL);
    rig_expect_error(other, 20, KLD_DEVICE_LOST, "told to fail");
    ck_assert_int_eq(rig_wait(&rig), 2);
    close(fd);
    close(other);
}
END_TEST

START_TEST(device_lost_while_dropping_a_region_ends_with_2) { lose_it_with_a_region(false); }
END_TEST

START_TEST(device_lost_while_a_client_leaves_ends_with_2) { lose_it_with_a_region(true); }
END_TEST

START_TEST(what_cannot_be_pinned_is_served_and_not_counted) {
    start();
    int fd = rig_client(&rig);
    rig_region(fd, RIG_REGION_BYTES);
    ck_assert_uint_eq(stat_of(KLD_STAT_pinned_bytes), RIG_REGION_BYTES);
    atomic_store(&rig.fake.cannot_pin, true);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    ck_assert_uint_eq(stat_of(KLD_STAT_pinned_bytes), RIG_REGION_BYTES);
    union kld_frame frame;
    rig_submit(fd, 10, region);
    rig_expect(fd, 10, KLD_FRAME_DONE, &frame);
    close(fd);
    end();
    ck_assert(rig.worker.mappings.told_slow); /* in the log, once */
}
END_TEST

/* Every call to the device fails once, at every place, and nothing is left over. */
START_TEST(fail_the_nth_call) {
    bool failed = true;
    for (int n = 1; failed; n++) {
        start();
        int fd = rig_client(&rig);
        union kld_frame frame;
        atomic_store(&rig.fake.fail_status, KLD_NO_MEMORY);
        atomic_store(&rig.fake.fail_call, n);
        uint64_t regions[3] = {0};
        int errors = 0;
        for (int i = 0; i < 3; i++) {
            rig_region_frame(&frame, 10 + (uint64_t)i, KLD_REGION_POOL, RIG_REGION_BYTES);
            rig_send(fd, &frame);
            rig_receive(fd, &frame);
            errors += frame.header.type == KLD_FRAME_ERROR;
            regions[i] = frame.header.type == KLD_FRAME_REGION ? frame.as_REGION.region : 0;
        }
        for (uint32_t i = 0; i < 4; i++) {
            rig_op(&frame, 20 + i, regions[0] ? regions[0] : regions[1]);
            frame.as_SUBMIT.stream = i;
            rig_send(fd, &frame);
            rig_receive(fd, &frame);
            errors += frame.header.type == KLD_FRAME_ERROR;
        }
        failed = n <= 7;
        ck_assert_int_eq(errors, failed);
        rig_op(&frame, 30, regions[2] ? regions[2] : regions[1]); /* again, now without fault */
        frame.as_SUBMIT.stream = 3;
        rig_send(fd, &frame);
        rig_expect(fd, 30, KLD_FRAME_DONE, NULL);
        close(fd);
        end();
    }
}
END_TEST

UNIT_MAIN("server/worker/core", submit_is_answered_by_done, failure_of_a_job_is_its_own,
          one_stream_runs_in_order, limits_are_errors_not_growth, what_was_given_up_does_not_count,
          cancel_answers_at_once_and_pins_until_the_job_ends,
          deadlines_pass_for_waiting_and_running, client_that_dies_is_detached,
          lost_device_answers_everything_and_ends_with_2,
          device_lost_while_adding_memory_ends_with_2, what_had_ended_before_the_loss_is_done,
          device_lost_while_dropping_a_region_ends_with_2,
          device_lost_while_a_client_leaves_ends_with_2,
          what_cannot_be_pinned_is_served_and_not_counted, fail_the_nth_call)
