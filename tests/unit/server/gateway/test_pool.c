/* test_pool.c - jobs for buffers on the device that nobody wants any more, and buffers that are
 * lost or kept. */
#include "server/gateway/pool.h"

#include <string.h>

#include "tests/unit/client/fake_worker.h"
#include "tests/unit/unit.h"

static struct fake_worker worker;
static struct kld_config config;
static struct kld_stats stats;
static struct kld_stats_device shown;
static struct kld_staging *staging;
static struct kld_pool *pool;
static struct kld_mail mail;
static uv_loop_t loop;
static uv_timer_t patience;
static struct kld_error err;
static int ended;

static void done(struct kld_pool_job *job) { ended++; }
static void speaks_again(uv_timer_t *timer) { worker.slow_regions = 0; }
static void too_long(uv_timer_t *timer) { ck_abort_msg("%d jobs ended", ended); }
static void mail_closed(struct kld_mail *closed) { uv_close((uv_handle_t *)&patience, NULL); }

static void run_until(int count) {
    uv_timer_start(&patience, too_long, 20000, 0);
    while (ended < count)
        uv_run(&loop, UV_RUN_ONCE);
    uv_timer_stop(&patience);
}

static void setup(void) {
    memset(&worker, 0, sizeof worker);
    shown.pool_bytes_max = 1000000;
    worker.requests_max = 1;
    worker.epoch = 7;
    ended = 0;
    fake_worker_open(&worker);
    strcpy(config.unix, worker.path);
    uv_loop_init(&loop);
    uv_timer_init(&loop, &patience);
    ck_assert_int_eq(kld_mail_open(&mail, &loop, &err), KLD_OK);
    ck_assert_int_eq(kld_staging_open(1 << 16, NULL, &staging, &err), KLD_OK);
    ck_assert_int_eq(kld_pool_open(&config, 0, staging, &stats, &shown, &pool, &err), KLD_OK);
}

static void teardown(void) {
    kld_pool_stop(pool);
    kld_mail_close(&mail, mail_closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    kld_pool_close(pool);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    kld_staging_close(staging);
    fake_worker_close(&worker);
}

static void run(struct kld_pool_job *job) {
    struct kld_op *op = &job->request.op;
    job->kind = KLD_POOL_RUN;
    kld_op_init(op);
    op->rank = 2;
    op->shape[0] = 1;
    op->shape[1] = 8;
    op->tensor[KLD_SLOT_PREDICTIONS].dtype = op->tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_FP32;
    job->request.bytes[KLD_SLOT_TARGETS].offset_bytes = 8 * sizeof(float);
    job->deadline_ns = UINT64_MAX;
    job->done = done;
    kld_pool_submit(pool, &mail, job);
}

START_TEST(what_nobody_wants_is_not_computed) {
    static struct kld_pool_job first, second, third, open;
    setup();
    worker.hold = 1;
    run(&first);
    while (worker.submits < 1)
        uv_run(&loop, UV_RUN_NOWAIT);
    run(&second);
    run(&third);
    kld_pool_unwant(&second);
    run_until(1); /* at once: it does not wait for the one before it */
    ck_assert_int_eq(second.status, KLD_CANCELLED);
    kld_pool_unwant(&first); /* the worker has it: it ends as it ends */
    worker.hold = 0;
    run_until(3);
    ck_assert_int_eq(first.status, KLD_OK);
    ck_assert_int_eq(third.status, KLD_OK);
    ck_assert_int_eq(worker.submits, 2);
    int regions = worker.regions_added;
    open = (struct kld_pool_job){.kind = KLD_POOL_OPEN, .bytes = 4096, .done = done};
    worker.hold = 1;
    run(&first);
    run(&second);
    kld_pool_submit(pool, &mail, &open);
    kld_pool_unwant(&open);
    run_until(4);
    ck_assert_int_eq(open.status, KLD_CANCELLED);
    ck_assert_ptr_null(open.buffer);
    worker.hold = 0;
    run_until(6);
    ck_assert_int_eq(worker.regions_added, regions);
    teardown();
}
END_TEST

static struct kld_pool_buffer *open_buffer(uint64_t bytes) {
    struct kld_pool_job job = {.kind = KLD_POOL_OPEN, .bytes = bytes, .done = done};
    int before = ended;
    kld_pool_submit(pool, &mail, &job);
    run_until(before + 1);
    ck_assert_int_eq(job.status, KLD_OK);
    ck_assert_uint_eq(job.buffer->bytes, bytes);
    return job.buffer;
}

START_TEST(what_was_dropped_is_used_again_for_a_while) {
    config.keep_buffer_bytes = 100000;
    config.keep_buffer_ms = 2000; /* all of this is quicker */
    setup();
    struct kld_pool_buffer *first = open_buffer(50000), *second = open_buffer(60000);
    int made = worker.regions_added;
    kld_pool_drop(first);
    kld_pool_drop(second); /* more than are kept: it goes at once */
    ck_assert_ptr_eq(open_buffer(45000), first);
    ck_assert_int_eq(worker.regions_added, made);
    kld_pool_drop(first);
    second = open_buffer(30000); /* too small for that one's room */
    ck_assert_ptr_ne(second, first);
    ck_assert_int_eq(worker.regions_added, made + 1);
    struct kld_pool_buffer *third = open_buffer(50001);
    ck_assert_ptr_ne(third, first);
    uint64_t begin = uv_hrtime();
    while (worker.regions_dropped < 2) { /* the first two by now */
        ck_assert_uint_lt(uv_hrtime() - begin, UINT64_C(10000000000));
        uv_run(&loop, UV_RUN_NOWAIT);
    }
    ck_assert_uint_gt(uv_hrtime() - begin, UINT64_C(500000000));
    kld_pool_drop(second);
    kld_pool_drop(third);
    teardown();
    for (int none = 0; none < 2; none++) {
        config.keep_buffer_bytes = none ? 0 : 100000;
        config.keep_buffer_ms = none ? 500 : 0;
        setup();
        kld_pool_drop(open_buffer(50000));
        open_buffer(50000);
        ck_assert_int_eq(worker.regions_dropped, 1);
        teardown();
    }
}
END_TEST

static void until_dropped(int count) {
    uint64_t begin = uv_hrtime();
    while (worker.regions_dropped < count) {
        ck_assert_uint_lt(uv_hrtime() - begin, UINT64_C(10000000000));
        uv_run(&loop, UV_RUN_NOWAIT);
        uv_sleep(1);
    }
}

START_TEST(few_are_kept_and_the_largest) {
    struct kld_pool_buffer *buffer[KLD_POOL_KEPT_MAX + 1];
    const uint64_t least = KLD_POOL_KEPT_BYTES_MIN;
    config.keep_buffer_bytes = UINT64_C(1) << 30;
    config.keep_buffer_ms = 60000;
    setup();
    shown.pool_bytes_max = UINT64_C(1) << 40;
    kld_pool_drop(open_buffer(least - 1)); /* too small */
    until_dropped(1);
    for (uint64_t i = 0; i <= KLD_POOL_KEPT_MAX; i++)
        buffer[i] = open_buffer(least + i * least / 2);
    for (int i = 0; i <= KLD_POOL_KEPT_MAX; i++)
        kld_pool_drop(buffer[i]);
    until_dropped(2); /* the smallest made room for the last */
    int made = worker.regions_added;
    for (int i = KLD_POOL_KEPT_MAX; i >= KLD_POOL_KEPT_MAX - 1; i--) {
        struct kld_pool_buffer *again = open_buffer(buffer[i]->room_bytes);
        ck_assert_int_eq(worker.regions_added, made);
        kld_pool_drop(again);
    }
    kld_pool_drop(open_buffer(least)); /* smaller than all that are kept */
    until_dropped(3);
    ck_assert_int_eq(worker.regions_added, made + 1);
    teardown();
}
END_TEST

START_TEST(what_is_kept_goes_where_the_worker_takes_no_more_regions) {
    config.keep_buffer_bytes = 200000;
    config.keep_buffer_ms = 60000;
    setup();
    kld_pool_drop(open_buffer(50000));
    struct kld_pool_buffer *other = open_buffer(100000);
    worker.refuse_regions_once = KLD_TOO_LARGE;
    kld_pool_drop(open_buffer(70000)); /* it waits, and gets some */
    ck_assert_int_eq(worker.regions_dropped, 1);
    kld_pool_drop(other);
    teardown();
    setup();
    struct kld_pool_job job = {.kind = KLD_POOL_OPEN, .bytes = 70000, .done = done};
    worker.refuse_regions = KLD_TOO_LARGE;
    kld_pool_submit(pool, &mail, &job);
    run_until(1); /* nothing is kept: it is told */
    ck_assert_int_eq(job.status, KLD_TOO_LARGE);
    teardown();
}
END_TEST

START_TEST(who_wants_more_than_his_share_is_passed_where_there_is_no_room) {
    static struct kld_pool_job large, small, another;
    const char *one = "one", *two = "two";
    config.keep_buffer_ms = 0;
    setup();
    kld_pool_drop(open_buffer(4096)); /* it is connected, and has registered staging */
    int before = ended, made = worker.regions_added;
    shown.pool_bytes = 200000; /* of a million */
    worker.refuse_regions_once = KLD_NO_MEMORY;
    large =
        (struct kld_pool_job){.kind = KLD_POOL_OPEN, .bytes = 900000, .owner = one, .done = done};
    kld_pool_submit(pool, &mail, &large);
    another = small =
        (struct kld_pool_job){.kind = KLD_POOL_OPEN, .bytes = 400000, .owner = two, .done = done};
    kld_pool_submit(pool, &mail, &small);
    run_until(before + 1);
    ck_assert_int_eq(small.status, KLD_OK);
    ck_assert_ptr_nonnull(small.buffer);
    kld_pool_submit(pool, &mail, &another); /* is over his share by now, too */
    while (!atomic_load(&another.starved))
        uv_sleep(1);
    uv_sleep(50);
    ck_assert_int_eq(worker.regions_added, made + 2); /* the refused one, and the small one */
    shown.pool_bytes = 0;
    run_until(before + 3);
    ck_assert(!large.status && !another.status);
    kld_pool_drop(small.buffer);
    kld_pool_drop(large.buffer);
    kld_pool_drop(another.buffer);
    teardown();
}
END_TEST

static enum kld_status run_with(struct kld_pool_buffer *predictions,
                                struct kld_pool_buffer *targets) {
    static struct kld_pool_job job;
    int before = ended;
    job = (struct kld_pool_job){0};
    job.slot[KLD_SLOT_PREDICTIONS] = predictions;
    job.slot[KLD_SLOT_TARGETS] = targets;
    run(&job);
    run_until(before + 1);
    return job.status;
}

/* Its connections; it serves on. */
static void break_connection(void) {
    int before = worker.accepted;
    uint64_t begin = uv_hrtime();
    worker.hang_up = 1;
    while (worker.accepted == before) {
        ck_assert_uint_lt(uv_hrtime() - begin, UINT64_C(10000000000));
        uv_sleep(1);
    }
}

START_TEST(what_was_made_on_a_connection_is_lost_with_it_and_nothing_else) {
    config.keep_buffer_bytes = 100000;
    config.keep_buffer_ms = 500;
    setup();
    struct kld_pool_buffer *old = open_buffer(4096), *kept = open_buffer(50000);
    ck_assert_int_eq(run_with(old, old), KLD_OK);
    kld_pool_drop(kept);
    break_connection();
    uint64_t begin = uv_hrtime();
    while (!atomic_load(&old->lost)) /* though nobody asks for it */
        ck_assert_uint_lt(uv_hrtime() - begin, UINT64_C(2000000000));
    /* The last is not what was kept, or no request could use it. */
    struct kld_pool_buffer *young = open_buffer(4096), *other = open_buffer(50000);
    ck_assert_int_eq(run_with(young, young), KLD_OK);
    ck_assert_int_eq(run_with(old, young), KLD_DEVICE_LOST);
    ck_assert_int_eq(run_with(other, old), KLD_DEVICE_LOST);
    ck_assert(!atomic_load(&young->lost) && !atomic_load(&other->lost));
    ck_assert_int_eq(run_with(young, other), KLD_OK);
    kld_pool_drop(other);
    ck_assert_ptr_eq(open_buffer(50000), other); /* kept beside one that was lost before */
    teardown();
}
END_TEST

/* Longer than libkld's own 5 s: who is let go of it then had 6 s of them. */
START_TEST(a_silent_worker_is_waited_for_as_long_as_is_set) {
    static struct kld_pool_job job;
    config.worker_wait_ms = 20; /* for the connection, which is greeted, and then for the buffer */
    setup();
    worker.slow_regions = 1;
    job = (struct kld_pool_job){.kind = KLD_POOL_OPEN, .bytes = 4096, .done = done};
    kld_pool_submit(pool, &mail, &job);
    run_until(1);
    ck_assert_int_eq(job.status, KLD_UNAVAILABLE);
    ck_assert_str_eq(job.error.text, "the worker is not ready; try again");
    worker.slow_regions = 0;
    teardown();
    config.worker_wait_ms = 120000;
    setup();
    worker.slow_regions = 1;
    job = (struct kld_pool_job){.kind = KLD_POOL_OPEN, .bytes = 4096, .done = done};
    kld_pool_submit(pool, &mail, &job);
    uv_timer_start(&patience, speaks_again, 6000, 0);
    while (ended < 1)
        uv_run(&loop, UV_RUN_ONCE);
    ck_assert_int_eq(job.status, KLD_OK);
    teardown();
}
END_TEST

UNIT_MAIN("server/gateway/pool", a_silent_worker_is_waited_for_as_long_as_is_set,
          what_nobody_wants_is_not_computed, what_was_dropped_is_used_again_for_a_while,
          few_are_kept_and_the_largest, what_is_kept_goes_where_the_worker_takes_no_more_regions,
          who_wants_more_than_his_share_is_passed_where_there_is_no_room,
          what_was_made_on_a_connection_is_lost_with_it_and_nothing_else)
