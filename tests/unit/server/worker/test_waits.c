/* test_waits.c - jobs that wait on the device for an event that does not come: of a client that is
 * gone, of one that has died, of one that lives and holds up others; over the double of the back
 * end. */
#include "server/worker/waits.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig;

static uint64_t device_region(int fd) {
    union kld_frame frame;
    rig_region_frame(&frame, 911, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_expect(fd, 911, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

/* A client dies whose event the device waits for: the worker makes way for another one. Not so for
 * a job that waits for nothing, however long it takes. */
START_TEST(a_job_that_waits_for_the_dead_ends_the_worker) {
    rig_init(&rig);
    rig.orphan_ms = 100;
    rig_start(&rig);
    int other = rig_client(&rig), patient = rig_client(&rig), fd = rig_client(&rig);
    union kld_frame frame;
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    rig_submit(patient, 9, device_region(patient));
    rig_until(&rig.fake.jobs_started, 1);
    close(patient);
    usleep(300000);
    rig_plain(other, KLD_FRAME_PING, 1);
    rig_expect(other, 1, KLD_FRAME_PONG, NULL);
    rig_op(&frame, 10, region);
    frame.as_SUBMIT.flags = KLD_SUBMIT_EARLY;
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    rig_send(fd, &frame);
    rig_until(&rig.fake.jobs_submitted, 2);
    rig_submit(other, 11, device_region(other));
    rig_until(&rig.fake.jobs_submitted, 3);
    close(fd);
    rig_expect_error(other, 11, KLD_DEVICE_LOST, "device failed");
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert_int_eq(atomic_load(&rig.fake.dead_told), 0); /* its successor waits for its end */
    close(other);
}
END_TEST

/* A connection that a process made which has ended since, handed over. */
static int connection_of_the_dead(void) {
    int pair[2], fd = -1;
    char byte = 'x', space[CMSG_SPACE(sizeof fd)];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    pid_t child = fork();
    if (child == 0) {
        fd = rig_connect(&rig);
        rig_send_fds(pair[1], &byte, 1, &fd, 1);
        _exit(0);
    }
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ck_assert_int_eq(recvmsg(pair[0], &message, 0), 1);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    close(pair[0]);
    close(pair[1]);
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
    frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
    rig_send(fd, &frame);
    rig_expect(fd, 1, KLD_FRAME_WELCOME, &frame);
    return fd;
}

static void check_orphan(bool dead) {
    rig_init(&rig);
    rig.orphan_ms = dead ? 60000 : 700;
    rig.orphan_dead_ms = 100;
    rig_start(&rig);
    atomic_store(&rig.fake.stage, KLD_JOB_WAITS);
    int other = rig_client(&rig), fd = dead ? connection_of_the_dead() : rig_client(&rig);
    union kld_frame frame;
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    rig_op(&frame, 10, region);
    frame.as_SUBMIT.flags = KLD_SUBMIT_EARLY;
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    rig_send(fd, &frame);
    rig_until(&rig.fake.jobs_submitted, 1);
    rig_submit(other, 11, device_region(other));
    rig_until(&rig.fake.jobs_submitted, 2);
    uint64_t closed_ns = kld_worker_now_ns();
    close(fd);
    rig_expect_error(other, 11, KLD_DEVICE_LOST, "device failed");
    uint64_t took_ms = (kld_worker_now_ns() - closed_ns) / 1000000;
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert_msg(dead ? took_ms >= 100 && took_ms < 50000 : took_ms >= 700, "%d ms", (int)took_ms);
    close(other);
}

/* What a dead process has recorded never comes: no need to wait as long as for one that lives. */
START_TEST(a_dead_process_is_waited_for_less_long) { check_orphan(true); }
END_TEST
START_TEST(a_living_process_is_waited_for) { check_orphan(false); }
END_TEST

/* Its client is gone, but it is behind other work, or at work itself: that is no reason to end
 * everybody else's. */
static void check_no_orphan(bool dead, enum kld_job_stage stage) {
    rig_init(&rig);
    rig.orphan_ms = rig.orphan_dead_ms = 100;
    rig_start(&rig);
    atomic_store(&rig.fake.stage, stage);
    atomic_store(&rig.fake.hold, true);
    int other = rig_client(&rig), fd = dead ? connection_of_the_dead() : rig_client(&rig);
    union kld_frame frame;
    rig_op(&frame, 10, device_region(fd));
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    rig_send(fd, &frame);
    rig_until(&rig.fake.jobs_submitted, 1);
    close(fd);
    usleep(500000);
    ck_assert_int_gt(atomic_load(&rig.fake.asked), 0);
    atomic_store(&rig.fake.hold, false);
    rig_submit(other, 11, device_region(other));
    rig_expect(other, 11, KLD_FRAME_DONE, NULL);
    close(other);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}

START_TEST(a_job_that_is_not_held_up_is_waited_for) {
    check_no_orphan(true, KLD_JOB_BEHIND);
    check_no_orphan(true, KLD_JOB_BEGUN);
    check_no_orphan(false, KLD_JOB_BEGUN);
}
END_TEST

/* A client of whose event nothing is known but that it has not come. */
static int patient_client(uint64_t request) {
    union kld_frame frame;
    int fd = rig_client(&rig), before = atomic_load(&rig.fake.jobs_submitted);
    rig_op(&frame, request, device_region(fd));
    frame.as_SUBMIT.flags = KLD_SUBMIT_EARLY;
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    rig_send(fd, &frame);
    rig_until(&rig.fake.jobs_submitted, before + 1);
    return fd;
}

static void start_holding(enum kld_job_stage stage) {
    rig_init(&rig);
    rig.config.event_hold_ms = 200;
    rig_start(&rig);
    atomic_store(&rig.fake.stage, stage);
    atomic_store(&rig.fake.stage_plain, KLD_JOB_BEHIND);
    atomic_store(&rig.fake.hold, true);
}

static void still_serves(int fd) {
    usleep(500000);
    rig_plain(fd, KLD_FRAME_PING, 77);
    rig_expect(fd, 77, KLD_FRAME_PONG, NULL);
}

/* As long as it stops nobody it may take its time, also where several do, each for its own. */
START_TEST(an_event_may_take_its_time) {
    start_holding(KLD_JOB_WAITS);
    int idle = rig_client(&rig), fd = patient_client(1), second = patient_client(2);
    union kld_frame frame;
    rig_op(&frame, 3, device_region(second)); /* behind its own */
    rig_send(second, &frame);
    rig_until(&rig.fake.jobs_submitted, 3);
    still_serves(idle);
    atomic_store(&rig.fake.hold, false);
    close(fd);
    close(second);
    close(idle);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

START_TEST(an_event_that_holds_up_a_request_ends_the_worker) {
    start_holding(KLD_JOB_WAITS);
    int other = rig_client(&rig), fd = patient_client(1);
    uint64_t region = device_region(other), start_ns = kld_worker_now_ns();
    rig_submit(other, 2, region);
    rig_expect_error(other, 2, KLD_DEVICE_LOST, "device failed");
    ck_assert_uint_ge(kld_worker_now_ns() - start_ns, 200000000);
    ck_assert_int_eq(rig_wait(&rig), 2);
    close(other);
    close(fd);
}
END_TEST

START_TEST(an_event_that_holds_up_a_registration_ends_the_worker) {
    start_holding(KLD_JOB_WAITS);
    int other = rig_client(&rig), fd = patient_client(1);
    union kld_frame frame;
    rig_region_frame(&frame, 2, KLD_REGION_POOL, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold_memory, true);
    rig_send(other, &frame);
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert_int_eq(rig_ended(other, 1000), 1);
    atomic_store(&rig.fake.hold_memory, false);
    close(other);
    close(fd);
}
END_TEST

/* One that found no memory and was tried again has ended once. */
START_TEST(a_registration_that_is_tried_again_is_awaited_once) {
    start_holding(KLD_JOB_WAITS);
    int other = rig_client(&rig), idle = rig_client(&rig), fd = patient_client(1);
    union kld_frame frame;
    kld_stats_set(rig.stats, KLD_STAT_pool_kept_bytes, 4096);
    atomic_store(&rig.fake.fail_status, KLD_NO_MEMORY);
    atomic_store(&rig.fake.fail_call, 1);
    rig_region_frame(&frame, 2, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(other, &frame);
    rig_expect(other, 2, KLD_FRAME_REGION, NULL);
    ck_assert_uint_eq(atomic_load(&rig.page->device[0].pool_wanted), 1);
    still_serves(idle);
    atomic_store(&rig.fake.hold, false);
    close(fd);
    close(other);
    close(idle);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

/* The event has come: what takes so long is the work. Nor is anybody held up who has left. */
START_TEST(work_that_takes_long_is_no_wait) {
    start_holding(KLD_JOB_BEGUN);
    int other = rig_client(&rig), idle = rig_client(&rig), fd = patient_client(1);
    rig_submit(other, 2, device_region(other));
    still_serves(idle);
    close(other);
    still_serves(idle); /* and has noticed by now that nobody else waits */
    atomic_store(&rig.fake.stage, KLD_JOB_WAITS);
    still_serves(idle);
    atomic_store(&rig.fake.hold, false);
    close(fd);
    close(idle);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

/* Which stage each request is at, by its number; 0: as the fake says. */
static atomic_int stages[8];
/* The number of one that says BEHIND once before that; 0: none. */
static atomic_int behind_once;

static enum kld_job_stage stage_by_number(const struct kld_job *job) {
    const struct kld_request *request = job->owner;
    int number = (int)(request->number % 8);
    if (atomic_compare_exchange_strong(&behind_once, &number, 0))
        return KLD_JOB_BEHIND;
    return (enum kld_job_stage)atomic_load(&stages[request->number % 8]);
}

static void start_numbered(void) {
    rig_init(&rig);
    rig.config.event_hold_ms = 200;
    rig.fake.stage_of = stage_by_number;
    rig_start(&rig);
    atomic_store(&rig.fake.hold, true);
}

static void end_well(int first, int second) {
    atomic_store(&rig.fake.hold, false);
    close(first);
    close(second);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}

/* It has waited for its own event longer than anybody may be held up, and then computes. */
START_TEST(who_has_waited_for_his_own_event_was_not_held_up) {
    start_numbered();
    atomic_store(&stages[1], KLD_JOB_WAITS);
    atomic_store(&stages[2], KLD_JOB_WAITS);
    int idle = rig_client(&rig), fd = patient_client(1), second = patient_client(2);
    still_serves(idle);
    atomic_store(&stages[2], KLD_JOB_BEGUN);
    usleep(250000);
    atomic_store(&behind_once, 2); /* its next chunk, at one look: for less than 200 ms */
    rig_until_is(&behind_once, 0);
    still_serves(idle);
    close(idle);
    end_well(fd, second);
}
END_TEST

/* Its event has come, and it does not begin for that of another. */
START_TEST(whose_event_has_come_may_be_held_up) {
    start_numbered();
    atomic_store(&stages[1], KLD_JOB_WAITS);
    atomic_store(&stages[2], KLD_JOB_WAITS);
    int idle = rig_client(&rig), fd = patient_client(1), second = patient_client(2);
    still_serves(idle);
    atomic_store(&stages[2], KLD_JOB_BEHIND);
    ck_assert_int_eq(rig_wait(&rig), 2);
    close(fd);
    close(second);
    close(idle);
}
END_TEST

/* One that computes for long holds up others, and the one that waits beside them has no part in
 * that; nor in that the back end cannot tell. */
START_TEST(who_waits_is_not_blamed_for_slow_work) {
    start_numbered();
    atomic_store(&stages[1], KLD_JOB_WAITS);
    atomic_store(&stages[3], KLD_JOB_BEGUN);
    atomic_store(&stages[4], KLD_JOB_UNKNOWN);
    int idle = rig_client(&rig), fd = patient_client(1), other = rig_client(&rig);
    uint64_t region = device_region(other);
    rig_submit(other, 3, region);
    still_serves(idle);
    rig_submit(other, 4, region); /* behind it */
    still_serves(idle);
    int third = rig_client(&rig);
    region = device_region(third);
    atomic_store(&stages[5], KLD_JOB_BEHIND);
    rig_submit(third, 5, region);
    still_serves(idle);
    atomic_store(&stages[5], KLD_JOB_UNKNOWN);
    close(third);
    close(idle);
    end_well(fd, other);
}
END_TEST

enum { STREAMS = 4, ALL = STREAMS * KLD_LANE_DEPTH };

/* A client whose `count` requests wait for an event, numbered from `first` on. */
static int waiting_client(uint64_t first, int count) {
    union kld_frame frame;
    int fd = rig_client(&rig);
    rig_op(&frame, first, device_region(fd));
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    for (int i = 0; i < count; i++) {
        frame.header.request = first + (uint64_t)i;
        frame.as_SUBMIT.stream = (uint32_t)i % STREAMS;
        rig_send(fd, &frame);
    }
    return fd;
}

/* All places are taken by those whose events do not come: who gets none is held up too. */
START_TEST(events_that_never_come_shut_nobody_out) {
    start_holding(KLD_JOB_WAITS);
    int first = waiting_client(100, ALL), second = waiting_client(100, ALL);
    rig_until(&rig.fake.jobs_submitted, KLD_WAITS_MAX);
    uint64_t start_ns = kld_worker_now_ns();
    int third = waiting_client(300, 1);
    rig_expect_error(third, 300, KLD_DEVICE_LOST, "device failed");
    ck_assert_uint_ge(kld_worker_now_ns() - start_ns, 200000000);
    ck_assert_int_eq(rig_wait(&rig), 2);
    close(first);
    close(second);
    close(third);
}
END_TEST

/* A cancelled one makes way for what need not wait. */
START_TEST(who_gave_up_his_turn_stops_nobody) {
    start_holding(KLD_JOB_BEGUN);
    int first = waiting_client(100, ALL), second = waiting_client(100, ALL);
    rig_until(&rig.fake.jobs_submitted, KLD_WAITS_MAX);
    int third = waiting_client(300, 1);
    uint64_t region = rig_region(third, RIG_REGION_BYTES);
    rig_submit(third, 304, region);
    rig_plain(third, KLD_FRAME_PING, 77);
    rig_expect(third, 77, KLD_FRAME_PONG, NULL);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_submitted), KLD_WAITS_MAX);
    rig_cancel(third, 78, 300);
    rig_until(&rig.fake.jobs_submitted, KLD_WAITS_MAX + 1);
    close(third);
    end_well(first, second);
}
END_TEST

/* One client leaves places to others, however many streams it has. */
START_TEST(a_client_has_its_share_of_the_places) {
    rig_init(&rig);
    rig.config.client_streams_max = 16;
    rig_start(&rig);
    atomic_store(&rig.fake.hold, true);
    int fd = rig_client(&rig);
    union kld_frame frame;
    rig_op(&frame, 1, device_region(fd));
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    for (uint64_t i = 0; i < 3 * KLD_CLIENT_WAITS_MAX; i++) {
        frame.header.request = 1 + i;
        frame.as_SUBMIT.stream = i % 16;
        rig_send(fd, &frame);
    }
    rig_until(&rig.fake.jobs_submitted, KLD_CLIENT_WAITS_MAX);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_submitted), KLD_CLIENT_WAITS_MAX);
    int other = waiting_client(300, ALL);
    rig_until(&rig.fake.jobs_submitted, KLD_CLIENT_WAITS_MAX + ALL);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_submitted), KLD_CLIENT_WAITS_MAX + ALL);
    atomic_store(&rig.fake.hold, false);
    for (int i = 0; i < 3 * KLD_CLIENT_WAITS_MAX; i++) {
        rig_receive(fd, &frame);
        ck_assert_int_eq(frame.header.type, KLD_FRAME_DONE);
    }
    end_well(fd, other);
    ck_assert_uint_eq(rig.worker.waits_running, 0);
}
END_TEST

/* Once the requests with events have ended, what keeps their streams busy has no place, and leaves
 * all to who wants one. */
static void check_that_events_pass(int fd, uint64_t region, uint64_t event) {
    const uint64_t lanes = KLD_CLIENT_WAITS_MAX / KLD_LANE_DEPTH, each = 12, late = 2000;
    union kld_frame frame;
    atomic_store(&rig.fake.job_us, 20000);
    for (uint64_t i = 0; i < lanes * each; i++) {
        rig_op(&frame, 1000 + i, region);
        frame.as_SUBMIT.stream = i % lanes;
        frame.as_SUBMIT.ready_event = i < lanes ? event : 0;
        rig_send(fd, &frame);
    }
    rig_op(&frame, late, region);
    frame.as_SUBMIT.stream = lanes;
    frame.as_SUBMIT.ready_event = event;
    rig_send(fd, &frame);
    uint64_t before = 0;
    for (uint64_t i = 0; i <= lanes * each; i++) {
        rig_receive(fd, &frame);
        ck_assert_int_eq(frame.header.type, KLD_FRAME_DONE);
        before = frame.header.request == late ? i : before;
    }
    ck_assert_uint_le(before, lanes * each * 3 / 4);
}

/* Nor by what comes behind an event in its streams, which waits as long. */
START_TEST(what_is_behind_an_event_has_a_place_too) {
    rig_init(&rig);
    rig.config.client_streams_max = 16;
    rig_start(&rig);
    atomic_store(&rig.fake.hold, true);
    int fd = rig_client(&rig);
    uint64_t region = device_region(fd), event = rig_add_event(fd, KLD_EVENT_READY);
    union kld_frame frame;
    for (uint64_t i = 0; i < 16 * KLD_LANE_DEPTH; i++) {
        rig_op(&frame, 1 + i, region);
        frame.as_SUBMIT.stream = i % 16;
        frame.as_SUBMIT.ready_event = i < 16 ? event : 0;
        rig_send(fd, &frame);
    }
    rig_until(&rig.fake.jobs_submitted, KLD_CLIENT_WAITS_MAX);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.jobs_submitted), KLD_CLIENT_WAITS_MAX);
    atomic_store(&rig.fake.hold, false);
    for (int i = 0; i < 16 * KLD_LANE_DEPTH; i++) {
        rig_receive(fd, &frame);
        ck_assert_int_eq(frame.header.type, KLD_FRAME_DONE);
    }
    check_that_events_pass(fd, region, event);
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    ck_assert_uint_eq(rig.worker.waits_running, 0);
    rig_done(&rig);
}
END_TEST

/* Its deadline passes while its client has no place left: what is behind it need not wait. */
START_TEST(who_is_late_stops_nobody) {
    const uint64_t late = 500, behind = 501;
    rig_init(&rig);
    rig.config.client_streams_max = 16;
    rig_start(&rig);
    atomic_store(&rig.fake.hold, true);
    int fd = rig_client(&rig);
    uint64_t region = device_region(fd);
    union kld_frame frame;
    rig_op(&frame, 1, region);
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    for (uint64_t i = 0; i < KLD_CLIENT_WAITS_MAX; i++) {
        frame.header.request = 1 + i;
        frame.as_SUBMIT.stream = i % 8;
        rig_send(fd, &frame);
    }
    rig_until(&rig.fake.jobs_submitted, KLD_CLIENT_WAITS_MAX);
    frame.header.request = late;
    frame.as_SUBMIT.stream = 9;
    frame.as_SUBMIT.timeout_ns = 50000000;
    rig_send(fd, &frame);
    rig_op(&frame, behind, region);
    frame.as_SUBMIT.stream = 9;
    rig_send(fd, &frame);
    rig_expect_error(fd, late, KLD_DEADLINE, "deadline");
    rig_until(&rig.fake.jobs_submitted, KLD_CLIENT_WAITS_MAX + 1);
    atomic_store(&rig.fake.hold, false);
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

/* Two clients that keep all places busy, and a third that wants one of them: it gets the next that
 * is free after those who asked before it. */
START_TEST(places_are_given_in_turn) {
    rig_init(&rig);
    rig_start(&rig);
    atomic_store(&rig.fake.job_us, 300);
    int fds[3], answers = 0;
    uint64_t next[2];
    for (int i = 0; i < 2; i++)
        fds[i] = waiting_client(1, 3 * ALL);
    next[0] = next[1] = 1 + 3 * ALL;
    rig_until(&rig.fake.jobs_submitted, 2 * ALL);
    fds[2] = waiting_client(1, 1);
    for (bool served = false; !served;) {
        struct pollfd poll_fds[3];
        for (int i = 0; i < 3; i++)
            poll_fds[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
        ck_assert_int_gt(poll(poll_fds, 3, 10000), 0);
        served = poll_fds[2].revents != 0;
        for (int i = 0; i < 2; i++) {
            union kld_frame frame;
            if (!poll_fds[i].revents)
                continue;
            rig_receive(fds[i], &frame);
            ck_assert_int_eq(frame.header.type, KLD_FRAME_DONE);
            rig_op(&frame, next[i], UINT64_C(1) << 20);
            frame.as_SUBMIT.ready_event = UINT64_C(1) << 8;
            frame.as_SUBMIT.stream = next[i]++ % STREAMS;
            rig_send(fds[i], &frame);
            answers++;
        }
        ck_assert_msg(answers < 1000, "not served after %d of others", answers);
    }
    rig_expect(fds[2], 1, KLD_FRAME_DONE, NULL);
    close(fds[2]);
    end_well(fds[0], fds[1]);
}
END_TEST

UNIT_MAIN("server/worker/waits", a_job_that_waits_for_the_dead_ends_the_worker,
          a_dead_process_is_waited_for_less_long, a_living_process_is_waited_for,
          a_job_that_is_not_held_up_is_waited_for, an_event_may_take_its_time,
          an_event_that_holds_up_a_request_ends_the_worker,
          an_event_that_holds_up_a_registration_ends_the_worker,
          a_registration_that_is_tried_again_is_awaited_once, work_that_takes_long_is_no_wait,
          who_has_waited_for_his_own_event_was_not_held_up, whose_event_has_come_may_be_held_up,
          who_waits_is_not_blamed_for_slow_work, events_that_never_come_shut_nobody_out,
          who_gave_up_his_turn_stops_nobody, who_is_late_stops_nobody,
          what_is_behind_an_event_has_a_place_too, a_client_has_its_share_of_the_places,
          places_are_given_in_turn)
