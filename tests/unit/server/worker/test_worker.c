/* test_worker.c - the loop's own part: accepting under a shortage of descriptors or memory,
 * draining, the end of the supervisor and that of the device. */
#include "server/worker/worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"
#include "server/role.h"
#include "tests/unit/allocations.h"
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

START_TEST(term_answers_what_is_in_flight_and_refuses_the_rest) {
    start();
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < 10; i++)
        rig_submit(fd, 100 + i, region);
    rig_until_stat(&rig, KLD_STAT_worker_requests_in_flight, 10);
    close(rig.control[0]); /* the supervisor's end: the same as SIGTERM */
    rig.control[0] = -1;
    usleep(20000);
    rig_submit(fd, 300, region);
    rig_expect_error(fd, 300, KLD_UNAVAILABLE, "going away");
    rig_plain(fd, KLD_FRAME_PING, 301);
    rig_expect(fd, 301, KLD_FRAME_PONG, NULL);
    atomic_store(&rig.fake.hold, false);
    for (uint64_t i = 0; i < 10; i++)
        rig_expect(fd, 100 + i, KLD_FRAME_DONE, NULL);
    ck_assert(rig_ended(fd, 5000));
    ck_assert_int_eq(rig_wait(&rig), 0);
    rig_done(&rig);
    close(fd);
}
END_TEST

START_TEST(drain_does_not_wait_longer_than_told) {
    rig_init(&rig);
    rig.config.drain_ms = 50;
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    rig_submit(fd, 100, region);
    rig_until(&rig.fake.jobs_started, 1);
    ck_assert_int_eq(rig_end(&rig), 0);
    ck_assert(rig.worker.cut_short);
}
END_TEST

static uint64_t cpu_ms(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
           (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
}

/* A connection that cannot be accepted stays readable for the poll: that must not become a spin. */
START_TEST(accept_without_descriptors_waits) {
    start();
    int spare[64], count = 0;
    struct rlimit limit = {.rlim_cur = 64, .rlim_max = 64};
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    while (count < 64 && (spare[count] = open("/dev/null", O_RDONLY)) >= 0)
        count++;
    ck_assert_int_gt(count, 1);
    close(spare[--count]); /* for our own end */
    int fd = rig_connect(&rig);
    uint64_t before = cpu_ms();
    usleep(300000);
    ck_assert_uint_lt(cpu_ms() - before, 150);
    ck_assert_uint_eq(atomic_load(&rig.stats->value[KLD_STAT_unix_clients]), 0);
    while (count)
        close(spare[--count]);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 1);
    close(fd);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    end();
}
END_TEST

START_TEST(wrong_lists_are_told_at_start) {
    rig_init(&rig);
    rig.config.allow_uids[0] = 'x';
    struct kld_worker_options options = {.config = &rig.config,
                                         .page = rig.page,
                                         .backend = &fake_backend,
                                         .device = &rig.fake.head,
                                         .listen_fd = rig.listen_fd,
                                         .control_fd = -1};
    struct kld_error err;
    ck_assert_int_eq(kld_worker_init(&rig.worker, &options, &err), KLD_INVALID);
    fake_backend.device_close(&rig.fake.head);
}
END_TEST

/* How often threads but this one have slept. */
static long others_slept(void) {
    DIR *tasks = opendir("/proc/self/task");
    ck_assert_ptr_nonnull(tasks);
    long slept = 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300], line[200];
        int thread = atoi(task->d_name); /* 0: no thread */
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        FILE *file = !thread || thread == gettid() ? NULL : fopen(path, "r");
        for (long times; file && fgets(line, sizeof line, file);)
            if (sscanf(line, "voluntary_ctxt_switches: %ld", &times) == 1)
                slept += times;
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return slept;
}

static void compute_without_a_thread(uint32_t cpus) {
    rig_init(&rig);
    rig.fake.head.info.offloads = false;
    atomic_store(&rig.fake.when_polled, true);
    rig.config.spin_us = 20000000;
    rig.cpus = cpus;
    rig_start(&rig);
}

/* Its thread sleeps neither before the next job comes nor behind that. */
START_TEST(a_loop_that_computes_stays_awake_for_the_next_job) {
    compute_without_a_thread(4);
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES), request = 1;
    bool awake = false;
    for (int i = 0; i < 300 && !awake; i++) { /* its timers wake it too, now and then */
        rig_submit(fd, request, region);
        rig_expect(fd, request++, KLD_FRAME_DONE, NULL);
        long before = others_slept();
        usleep(20000);
        rig_submit(fd, request, region);
        rig_expect(fd, request++, KLD_FRAME_DONE, NULL);
        usleep(20000);
        awake = others_slept() == before;
    }
    ck_assert(awake);
    close(fd);
    end();
}
END_TEST

START_TEST(with_few_cpus_it_sleeps) {
    compute_without_a_thread(3);
    ck_assert_uint_eq(rig.worker.awake_ns, 0);
    end();
}
END_TEST

/* The loop completes jobs itself while it polls, and leaves them to the device's thread after; no
 * answer is lost on the way from one to the other. */
START_TEST(jobs_end_whether_or_not_the_loop_polls) {
    rig_init(&rig);
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    for (uint64_t i = 0; i < 300; i++) {
        /* From no time at all to longer than the loop polls. */
        atomic_store(&rig.fake.job_us, i % 30 ? (int)(i % 3) * 40 : 8000);
        if (i % 7 == 0)
            usleep(200); /* the loop sleeps when the next one comes */
        rig_submit(fd, 1000 + i, region);
        rig_expect(fd, 1000 + i, KLD_FRAME_DONE, NULL);
    }
    rig_until(&rig.fake.polls, 300);
    int before, polls = -1, looks = 0;
    do { /* it may not have had its turn yet */
        before = polls;
        usleep(20000);
        polls = atomic_load(&rig.fake.polls);
    } while (polls != before && ++looks < 100);
    ck_assert_int_eq(polls, before); /* and it stops when nothing is to do */
    ck_assert(!atomic_load(&rig.fake.watched));
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

#define LOSSES 8

/* A client with work in flight that has not taken its replies: some wait in the worker. */
static int clogged_client(void) {
    int fd = rig_client(&rig);
    union kld_frame frame;
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    for (uint64_t i = 0; i < LOSSES; i++)
        rig_submit(fd, 100 + i, region);
    kld_frame_init(&frame, KLD_FRAME_PING, 50);
    /* It reads no more from whoever does not take its replies; then this fills up as well. */
    for (int idle = 0; idle < 5; idle++, usleep(10000))
        while (send(fd, &frame, frame.header.length, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
            idle = 0;
    return fd;
}

/* Reads to the end of the connection: how many requests were answered with device_lost. */
static int losses_told(int fd) {
    union kld_frame frame;
    int losses = 0;
    ssize_t bytes;
    while ((bytes = rig_recv(fd, &frame, sizeof frame, 0)) > 0)
        losses += frame.header.type == KLD_FRAME_ERROR &&
                  frame.as_ERROR.status == (uint32_t)KLD_DEVICE_LOST;
    ck_assert_int_eq(bytes, 0); /* the end, and in good order */
    return losses;
}

/* Who does not read costs nobody else the replies; and the worker leaves no connection open on
 * which somebody might wait for it. */
START_TEST(a_lost_device_is_told_to_those_behind_one_who_does_not_read) {
    start();
    atomic_store(&rig.fake.hold, true);
    int deaf = clogged_client(), fd = clogged_client(), idle = rig_client(&rig);
    atomic_store(&rig.fake.fail_job, KLD_DEVICE_LOST);
    atomic_store(&rig.fake.hold, false);
    rig_until_stat(&rig, KLD_STAT_device_lost_total, 1);
    ck_assert_int_eq(losses_told(fd), LOSSES);
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert(rig_ended(idle, 0));
    ck_assert_int_lt(losses_told(deaf), LOSSES);
    const int fds[] = {deaf, fd, idle};
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(send(fds[i], "", 1, MSG_NOSIGNAL), -1);
        ck_assert_int_eq(errno, EPIPE);
    }
    /* What it never read would, at its end, cost this client the replies. */
    int left = -1;
    const struct kld_session *session = TAILQ_FIRST(&rig.worker.sessions);
    ck_assert_int_eq(ioctl(session->fd, FIONREAD, &left), 0);
    ck_assert_int_eq(left, 0);
}
END_TEST

/* Under MPS a context can die of others while its worker has nothing to do. */
START_TEST(an_idle_worker_notices_that_its_device_is_lost) {
    rig_init(&rig);
    rig.health_ms = 10;
    rig_start(&rig);
    int idle = rig_client(&rig);
    rig_until(&rig.fake.checks, 3);
    ck_assert(!rig_ended(idle, 0));
    atomic_store(&rig.fake.dead, true);
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert(rig_ended(idle, 0));
}
END_TEST

START_TEST(a_device_of_ones_own_is_not_asked) {
    rig_init(&rig);
    rig.health_ms = 1;
    rig.fake.head.info.takes_turns = true; /* no MPS */
    rig_start(&rig);
    int fd = rig_client(&rig);
    usleep(50000);
    ck_assert_int_eq(atomic_load(&rig.fake.checks), 0);
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

/* The level first: its order has no answer, and the sign of life comes after it. */
START_TEST(orders_of_the_supervisor) {
    struct kld_child_order level = {.kind = KLD_ORDER_LOG_LEVEL, .log_level = "debug"};
    struct kld_child_order alive = {.kind = KLD_ORDER_ALIVE};
    char answer[8];
    start();
    bool before = kld_log_wants(KLD_LOG_DEBUG);
    ck_assert_int_eq(send(rig.control[0], &level, sizeof level, 0), sizeof level);
    ck_assert_int_eq(send(rig.control[0], &alive, sizeof alive, 0), sizeof alive);
    ck_assert_int_eq(recv(rig.control[0], answer, sizeof answer, 0), 1);
    ck_assert(!before && kld_log_wants(KLD_LOG_DEBUG));
    end();
}
END_TEST

static bool is_alive(void) {
    struct kld_child_order alive = {.kind = KLD_ORDER_ALIVE};
    struct pollfd poll_fd = {.fd = rig.control[0], .events = POLLIN};
    char answer[8];
    ck_assert_int_eq(send(rig.control[0], &alive, sizeof alive, 0), sizeof alive);
    ck_assert_int_eq(poll(&poll_fd, 1, 10000), 1);
    ck_assert_int_eq(recv(rig.control[0], answer, sizeof answer, 0), 1);
    ck_assert(answer[0] == KLD_ALIVE || answer[0] == KLD_ALIVE_STUCK);
    return answer[0] == KLD_ALIVE;
}

static void until_ready_is(uint32_t ready) {
    for (int i = 0; i < 10000 && atomic_load(&rig.page->device[0].ready) != ready; i++)
        usleep(1000);
    ck_assert_uint_eq(atomic_load(&rig.page->device[0].ready), ready);
}

/* Every thread of uv's pool is at something that does not end. */
START_TEST(a_worker_whose_pool_takes_nothing_is_not_ready) {
    rig_init(&rig);
    rig.stuck_ms = 200;
    rig_start(&rig);
    int fd = rig_client(&rig);
    union kld_frame frame;
    ck_assert(is_alive());
    atomic_store(&rig.fake.hold_memory, true);
    for (uint64_t i = 0; i < 4; i++) {
        rig_region_frame(&frame, 20 + i, KLD_REGION_POOL, 4096);
        rig_send(fd, &frame);
    }
    until_ready_is(0);
    ck_assert(!is_alive());
    atomic_store(&rig.fake.hold_memory, false);
    until_ready_is(1);
    ck_assert(is_alive());
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

/* However long it has to: what is asked of it last is answered last. */
START_TEST(a_pool_that_goes_on_is_not_stuck) {
    rig_init(&rig);
    rig.stuck_ms = 300;
    rig_start(&rig);
    int fd = rig_client(&rig);
    union kld_frame frame;
    atomic_store(&rig.fake.memory_us, 50000);
    for (uint64_t i = 0; i < 60; i++) {
        rig_region_frame(&frame, 20 + i, KLD_REGION_POOL, 4096);
        rig_send(fd, &frame);
    }
    for (int i = 0; i < 60; i++) {
        ck_assert(is_alive());
        rig_receive(fd, &frame);
        ck_assert_uint_eq(frame.header.type, KLD_FRAME_REGION);
    }
    atomic_store(&rig.fake.memory_us, 0);
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

/* The driver may hold them until a client's event has come, which may take its time. */
START_TEST(a_pool_that_is_held_by_an_event_is_not_stuck) {
    union kld_frame frame;
    rig_init(&rig);
    rig.stuck_ms = 600; /* several looks of waits.c */
    rig_start(&rig);
    atomic_store(&rig.fake.stage, KLD_JOB_WAITS);
    atomic_store(&rig.fake.hold, true);
    int fd = rig_client(&rig);
    rig_region_frame(&frame, 10, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_expect(fd, 10, KLD_FRAME_REGION, &frame);
    rig_op(&frame, 11, frame.as_REGION.region);
    frame.as_SUBMIT.flags = KLD_SUBMIT_EARLY;
    frame.as_SUBMIT.ready_event = rig_add_event(fd, KLD_EVENT_READY);
    rig_send(fd, &frame);
    rig_until(&rig.fake.jobs_submitted, 1);
    atomic_store(&rig.fake.hold_memory, true);
    for (uint64_t i = 0; i < 4; i++) {
        rig_region_frame(&frame, 20 + i, KLD_REGION_POOL, 4096);
        rig_send(fd, &frame);
    }
    usleep(1500000);
    ck_assert(is_alive());
    ck_assert_uint_eq(atomic_load(&rig.page->device[0].ready), 1);
    atomic_store(&rig.fake.stage, KLD_JOB_BEGUN); /* and it is held all the same */
    until_ready_is(0);
    atomic_store(&rig.fake.hold_memory, false);
    until_ready_is(1);
    atomic_store(&rig.fake.hold, false);
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

static bool is_refused(int fd) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    while (poll(&poll_fd, 1, 1) == 0)
        if (atomic_load(&rig.stats->value[KLD_STAT_unix_clients]))
            return false;
    return true;
}

/* Whichever of the allocations fails that a connection costs. */
START_TEST(who_comes_is_told_that_there_is_no_memory) {
    start();
    counted = rig.thread;
    int refused = 0, fd;
    for (;; refused++, close(fd)) {
        atomic_store(&allocations, 0);
        atomic_store(&failing, refused + 1);
        atomic_store(&counting, true);
        fd = rig_connect(&rig);
        if (!is_refused(fd))
            break;
        rig_expect_error(fd, 0, KLD_NO_MEMORY, "no memory for another connection");
        ck_assert(rig_ended(fd, 5000));
        atomic_store(&counting, false);
    }
    atomic_store(&counting, false);
    /* The session, its replies, its user, its lanes; those of a sanitizer do not fail. */
    ck_assert_int_ge(refused, COUNTS ? 4 : 0);
    ck_assert_uint_eq(atomic_load(&rig.stats->rejected[KLD_REJECT_unix_no_memory]), refused);
    close(fd);
    end();
}
END_TEST

UNIT_MAIN("server/worker/worker", orders_of_the_supervisor,
          a_pool_that_is_held_by_an_event_is_not_stuck,
          a_worker_whose_pool_takes_nothing_is_not_ready, a_pool_that_goes_on_is_not_stuck,
          an_idle_worker_notices_that_its_device_is_lost, a_device_of_ones_own_is_not_asked,
          term_answers_what_is_in_flight_and_refuses_the_rest, drain_does_not_wait_longer_than_told,
          accept_without_descriptors_waits, who_comes_is_told_that_there_is_no_memory,
          wrong_lists_are_told_at_start, jobs_end_whether_or_not_the_loop_polls,
          a_loop_that_computes_stays_awake_for_the_next_job, with_few_cpus_it_sleeps,
          a_lost_device_is_told_to_those_behind_one_who_does_not_read)
