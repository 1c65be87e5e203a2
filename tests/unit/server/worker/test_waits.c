/* test_waits.c - jobs that wait on the device for an event that does not come: of a client that is
 * gone, of one that has died, of one that lives and holds up others; over the double of the back
 * end. */
#include "server/worker/waits.h"

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

static void check_orphan(bool dead, bool waits) {
    rig_init(&rig);
    rig.orphan_ms = dead && waits ? 60000 : 700;
    rig.orphan_dead_ms = 100;
    rig_start(&rig);
    atomic_store(&rig.fake.waits, waits);
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
    ck_assert_int_eq(atomic_load(&rig.fake.asked) > 0, dead);
    ck_assert_msg(dead && waits ? took_ms >= 100 && took_ms < 5000 : took_ms >= 700, "%d ms",
                  (int)took_ms);
    close(other);
}

/* What a dead process has recorded never comes: no need to wait as long as for one that lives. */
START_TEST(a_dead_process_is_waited_for_less_long) { check_orphan(true, true); }
END_TEST
START_TEST(a_living_process_is_waited_for) { check_orphan(false, true); }
END_TEST
/* It is behind other work, or at work itself: that is no reason to end everybody else's. */
START_TEST(a_job_that_is_not_held_up_is_waited_for) { check_orphan(true, false); }
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

static void start_holding(bool waits) {
    rig_init(&rig);
    rig.config.event_hold_ms = 200;
    rig_start(&rig);
    atomic_store(&rig.fake.waits, waits);
    atomic_store(&rig.fake.hold, true);
}

static void still_serves(int fd) {
    usleep(500000);
    rig_plain(fd, KLD_FRAME_PING, 77);
    rig_expect(fd, 77, KLD_FRAME_PONG, NULL);
}

/* As long as it stops nobody it may take its time, also where several do, each for its own. */
START_TEST(an_event_may_take_its_time) {
    start_holding(true);
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
    start_holding(true);
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
    start_holding(true);
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
    start_holding(true);
    int other = rig_client(&rig), idle = rig_client(&rig), fd = patient_client(1);
    union kld_frame frame;
    kld_stats_set(rig.stats, KLD_STAT_pool_kept_bytes, 4096);
    atomic_store(&rig.fake.fail_status, KLD_NO_MEMORY);
    atomic_store(&rig.fake.fail_call, 1);
    rig_region_frame(&frame, 2, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(other, &frame);
    rig_expect(other, 2, KLD_FRAME_REGION, NULL);
    ck_assert_uint_eq(atomic_load(&rig.stats->pool_wanted), 1);
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
    start_holding(false);
    int other = rig_client(&rig), idle = rig_client(&rig), fd = patient_client(1);
    rig_submit(other, 2, device_region(other));
    still_serves(idle);
    close(other);
    still_serves(idle); /* and has noticed by now that nobody else waits */
    atomic_store(&rig.fake.waits, true);
    still_serves(idle);
    atomic_store(&rig.fake.hold, false);
    close(fd);
    close(idle);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

UNIT_MAIN("server/worker/waits", a_job_that_waits_for_the_dead_ends_the_worker,
          a_dead_process_is_waited_for_less_long, a_living_process_is_waited_for,
          a_job_that_is_not_held_up_is_waited_for, an_event_may_take_its_time,
          an_event_that_holds_up_a_request_ends_the_worker,
          an_event_that_holds_up_a_registration_ends_the_worker,
          a_registration_that_is_tried_again_is_awaited_once, work_that_takes_long_is_no_wait)
