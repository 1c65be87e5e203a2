/* test_links.c - which worker the gateway gives a call to, and what becomes of one whose worker
 * does not come back. */
#include "server/gateway/links.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/unit/client/fake_worker.h"
#include "tests/unit/unit.h"

#define CALLS 8
#define CLASSES 8

static struct fake_worker first, second;
static struct kld_stats_page page;
static struct kld_config config;
static struct kld_staging *staging;
static struct kld_links *links;
static uv_loop_t loop;
static uv_timer_t patience;
static struct kld_link_call calls[CALLS];
static enum kld_status outcome[CALLS];
static int ended, late_told;
static bool may_be_late;
static bool first_leaves; /* each time that it is asked */
static struct kld_error err;

static void done(struct kld_link_call *call, enum kld_status status,
                 const struct kld_result *result, const struct kld_error *error) {
    outcome[call - calls] = status;
    ended++;
    uv_stop(&loop); /* or a turn in whose timers the last one ended waits for `patience` */
    if (status == KLD_OK)
        ck_assert(result->loss == CLASSES); /* twos and ones, by the fake worker's operator */
}

static void late(struct kld_link_call *call) {
    ck_assert(may_be_late);
    late_told++;
}

static void too_long(uv_timer_t *timer) { ck_abort_msg("%d calls ended", ended); }

static void run_until(int count) {
    uv_timer_start(&patience, too_long, 20000, 0);
    while (ended < count) {
        first.leave_at_submit = first_leaves;
        uv_run(&loop, UV_RUN_ONCE);
    }
    uv_timer_stop(&patience);
}

static void submit(int i) {
    struct kld_op *op = &calls[i].request.op;
    kld_op_init(op);
    op->rank = 2;
    op->shape[0] = 1;
    op->shape[1] = CLASSES;
    op->tensor[KLD_SLOT_PREDICTIONS].dtype = op->tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_FP32;
    calls[i].request.bytes[KLD_SLOT_TARGETS].offset_bytes = CLASSES * sizeof(float);
    calls[i].deadline_ns = may_be_late ? uv_hrtime() + 100000000 : UINT64_MAX;
    calls[i].done = done;
    calls[i].late = late;
    kld_links_submit(links, &calls[i]);
}

static void setup(void) {
    first.devices = second.devices = 2;
    second.device = 1;
    fake_worker_open(&first);
    fake_worker_open_beside(&second, &first);
    strcpy(config.unix, first.path);
    page.workers = 2;
    page.device[0].ready = page.device[1].ready = 1;
    uv_loop_init(&loop);
    uv_timer_init(&loop, &patience);
    ck_assert_int_eq(kld_staging_open(1 << 16, NULL, &staging, &err), KLD_OK);
    float *values = kld_staging_at(staging, 0);
    for (int i = 0; i < CLASSES; i++) {
        values[i] = 2;
        values[CLASSES + i] = 1;
    }
    ck_assert_int_eq(kld_links_open(&loop, &config, &page, staging, &links, &err), KLD_OK);
    ck_assert_uint_eq(kld_links_count(links), 2);
}

static void do_not_mind(void *user) {}
static void links_closed(void *user) { uv_close((uv_handle_t *)&patience, NULL); }

static void teardown(void) {
    kld_links_close(links, links_closed, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    kld_staging_close(staging);
    fake_worker_close(&second);
    fake_worker_close(&first);
}

START_TEST(the_one_with_the_least_in_flight) {
    setup();
    first.hold = 1;
    for (int i = 0; i < 4; i++) { /* the first of them stays where it is */
        submit(i);
        run_until(i);
    }
    while (first.submits < 1) /* its connection may have taken longer */
        uv_run(&loop, UV_RUN_ONCE);
    ck_assert_int_eq(first.submits, 1);
    ck_assert_int_eq(second.submits, 3);
    first.hold = 0;
    run_until(4);
    submit(4); /* equals get their turn */
    submit(5);
    run_until(6);
    ck_assert_int_eq(first.submits, 2);
    ck_assert_int_eq(second.submits, 4);
    for (int i = 0; i < 6; i++)
        ck_assert_int_eq(outcome[i], KLD_OK);
    teardown();
}
END_TEST

START_TEST(one_that_serves_unless_the_caller_names_another) {
    setup();
    page.device[0].ready = 0;
    for (int i = 0; i < 3; i++)
        submit(i);
    run_until(3);
    ck_assert_int_eq(first.submits, 0);
    ck_assert_int_eq(second.submits, 3);
    calls[3].pinned = true;
    calls[3].device = 0;
    submit(3);
    run_until(4);
    ck_assert_int_eq(first.submits, 1);
    teardown();
}
END_TEST

START_TEST(a_worker_that_never_takes_it_is_left) {
    setup();
    first_leaves = true;
    first.leave_at_submit = 1;
    submit(0);
    run_until(1);
    ck_assert_int_eq(outcome[0], KLD_OK);
    ck_assert_int_gt(first.submits, 1);
    ck_assert_int_eq(second.submits, 1);
    calls[1].pinned = true; /* this one is not to be computed elsewhere */
    submit(1);
    run_until(2);
    ck_assert_int_eq(outcome[1], KLD_UNAVAILABLE);
    ck_assert_int_eq(second.submits, 1);
    teardown();
}
END_TEST

START_TEST(what_kills_a_device_is_not_given_to_the_next) {
    setup();
    first.poison_rows = second.poison_rows = 1;
    submit(0);
    run_until(1);
    ck_assert_int_eq(outcome[0], KLD_DEVICE_LOST);
    ck_assert_int_eq(first.submits + second.submits, 2);
    ck_assert(first.submits == 0 || second.submits == 0);
    first.poison_rows = second.poison_rows = 0;
    submit(1);
    run_until(2);
    ck_assert_int_eq(outcome[1], KLD_OK);
    teardown();
}
END_TEST

START_TEST(one_that_is_late_is_not_moved) {
    setup();
    submit(0); /* so that the link is connected, and the next call begins before its deadline */
    run_until(1);
    ck_assert_int_eq(first.submits, 1);
    may_be_late = first_leaves = true;
    first.leave_at_submit = 1;
    page.device[1].ready = 0;
    submit(1);
    page.device[1].ready = 1;
    run_until(2);
    ck_assert_int_eq(outcome[1], KLD_UNAVAILABLE);
    ck_assert_int_eq(late_told, 1);
    ck_assert_int_eq(second.submits, 0);
    teardown();
}
END_TEST

static void until_up(bool up) {
    uv_timer_start(&patience, too_long, 20000, 0);
    while (kld_links_up(links) != up)
        uv_run(&loop, UV_RUN_ONCE);
    uv_timer_stop(&patience);
}

START_TEST(up_is_who_was_greeted_by_the_worker_of_now) {
    setup();
    ck_assert(!kld_links_up(links));
    until_up(true);
    for (int i = 0; i < 2; i++) { /* and both have been greeted */
        calls[i].pinned = true;
        calls[i].device = (uint32_t)i;
        submit(i);
    }
    run_until(2);
    page.device[0].ready = page.device[1].ready = 0;
    ck_assert(!kld_links_up(links));
    page.device[0].ready = page.device[1].ready = 1;
    ck_assert(kld_links_up(links));
    first.refuse_hello = second.refuse_hello = KLD_BUSY; /* successors that have no room */
    first.hang_up = second.hang_up = 1;
    page.worker[0].value[KLD_STAT_worker_restarts_total]++;
    page.worker[1].value[KLD_STAT_worker_restarts_total]++;
    uint64_t refused_until = uv_hrtime() + 100000000;
    submit(2); /* its tick lets the loop turn */
    while (uv_hrtime() < refused_until) {
        uv_run(&loop, UV_RUN_ONCE);
        ck_assert(!kld_links_up(links));
    }
    second.refuse_hello = 0;
    until_up(true);
    first.refuse_hello = 0;
    run_until(3);
    teardown();
}
END_TEST

/* The first of several loops' links must not take the threads that JSON and shared memory need. */
static uv_work_t work[16];
static int worked;

static void do_nothing(uv_work_t *one) {}
static void count_work(uv_work_t *one, int status) { worked++; }

START_TEST(a_worker_that_does_not_answer_holds_up_no_thread) {
    struct kld_links *others[4];
    fake_worker_open(&first);
    int silent = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "/tmp/kld-silent-%d", (int)getpid());
    ck_assert_int_eq(bind(silent, (struct sockaddr *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(silent, 16), 0);
    strcpy(config.unix, address.sun_path);
    page.workers = 1;
    uv_loop_init(&loop);
    ck_assert_int_eq(kld_staging_open(1 << 16, NULL, &staging, &err), KLD_OK);
    uint64_t begin = uv_hrtime();
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(kld_links_open(&loop, &config, &page, staging, &others[i], &err), KLD_OK);
    for (int i = 0; i < 16; i++)
        ck_assert_int_eq(uv_queue_work(&loop, &work[i], do_nothing, count_work), 0);
    while (worked < 16)
        uv_run(&loop, UV_RUN_ONCE);
    ck_assert_uint_lt(uv_hrtime() - begin, UINT64_C(700000000));
    uv_timer_init(&loop, &patience);
    for (int i = 0; i < 4; i++)
        kld_links_close(others[i], i ? do_not_mind : links_closed, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    kld_staging_close(staging);
    fake_worker_close(&first);
    close(silent);
    unlink(address.sun_path);
}
END_TEST

UNIT_MAIN("server/gateway/links", the_one_with_the_least_in_flight,
          one_that_serves_unless_the_caller_names_another, a_worker_that_never_takes_it_is_left,
          what_kills_a_device_is_not_given_to_the_next, one_that_is_late_is_not_moved,
          up_is_who_was_greeted_by_the_worker_of_now,
          a_worker_that_does_not_answer_holds_up_no_thread)
