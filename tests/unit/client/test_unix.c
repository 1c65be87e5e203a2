/* test_unix.c - the Unix-socket connection against a worker that misbehaves on demand. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/client/fake_worker.h"

#define ROWS 4
#define CLASSES 8

static struct fake_worker worker;
static struct kld_connection *connection;
static struct kld_error error;

static void connect_with(const struct kld_connect_options *options) {
    char url[128];
    snprintf(url, sizeof url, "unix:%s", worker.path);
    enum kld_status status = kld_connect(url, options, &connection, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
}

static void setup(void) {
    fake_worker_open(&worker);
    connect_with(NULL);
}

static void teardown(void) {
    kld_close(connection);
    fake_worker_close(&worker);
}

static float q[ROWS * CLASSES], p[ROWS * CLASSES], gradient[ROWS * CLASSES];

static struct kld_request plain_request(void) {
    for (int i = 0; i < ROWS * CLASSES; i++) {
        q[i] = (float)(i + 1);
        p[i] = 1;
        gradient[i] = 0;
    }
    return small_request(ROWS, CLASSES, q, p, gradient);
}

#define LOSS (ROWS * CLASSES * (ROWS * CLASSES + 1) / 2 - ROWS * CLASSES)

static void check_answer(enum kld_status status, const struct kld_result *result) {
    ck_assert_msg(status == KLD_OK, "%d: %s", status, error.text);
    ck_assert(result->scalar && result->loss == LOSS);
    for (int i = 0; i < ROWS * CLASSES; i++)
        ck_assert(gradient[i] == 2 * q[i]);
}

static int open_fds(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

START_TEST(test_plain_memory) {
    setup();
    struct kld_server_info info;
    ck_assert_int_eq(kld_info(connection, &info, NULL), KLD_OK);
    ck_assert_str_eq(info.backend, "fake");
    ck_assert_str_eq(info.device, "fake device");
    struct kld_request request = plain_request();
    struct kld_result result;
    enum kld_status status = kld_run(connection, &request, &result, &error);
    check_answer(status, &result);
    ck_assert_uint_eq(result.attempts, 1);
    ck_assert_uint_eq(result.kernel_ns, 7);
    for (int i = 0; i < 100; i++)
        ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_added, 1); /* one staging region for all of them */
    teardown();
}
END_TEST

static void give_trace(struct kld_request *request) {
    for (int i = 0; i < 16; i++)
        request->trace.id[i] = (uint8_t)(0xa0 + i);
    for (int i = 0; i < 8; i++)
        request->trace.span[i] = (uint8_t)(i + 1);
    request->trace.flags = 1;
}

/* Told before its request, and again with a request that is sent again. */
#define CORKED 5

static void count_right(void *user, enum kld_status status, const struct kld_result *result,
                        const struct kld_error *problem) {
    *(int *)user += status == KLD_OK && result->loss == LOSS;
}

/* Of requests that are held back: how many packets they took. Each was answered. */
static int packets_of(int count, bool uncork) {
    struct kld_request request = plain_request();
    int right = 0, before = worker.packets, submits = worker.submits;
    kld_cork(connection);
    for (int i = 0; i < count; i++)
        ck_assert_int_eq(kld_submit(connection, &request, count_right, &right, NULL, &error),
                         KLD_OK);
    if (uncork)
        kld_uncork(connection);
    while (right < count)
        ck_assert_int_eq(kld_process(connection, -1, &error), KLD_OK);
    kld_uncork(connection);
    ck_assert_int_eq(worker.submits - submits, count);
    return worker.packets - before;
}

START_TEST(test_cork) {
    worker.flags = KLD_WELCOME_PACKETS;
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK); /* it has a region */
    ck_assert_int_eq(packets_of(CORKED, true), 1);
    ck_assert_int_eq(packets_of(CORKED, false), 1); /* libkld waits, so it sends */
    ck_assert_int_eq(packets_of(1, true), 1);
    ck_assert_int_eq(packets_of(40, true), 3); /* 16, 16, 8 */
    /* A call that waits sends first what was held back before it. */
    int right = 0, before = worker.packets;
    kld_cork(connection);
    ck_assert_int_eq(kld_submit(connection, &request, count_right, &right, NULL, &error), KLD_OK);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_int_eq(worker.packets - before, 1);
    ck_assert_int_eq(kld_process(connection, 0, &error), KLD_OK);
    ck_assert_int_eq(right, 1);
    /* Not sent, and given up. */
    uint64_t id;
    ck_assert_int_eq(kld_submit(connection, &request, count_right, &right, &id, &error), KLD_OK);
    kld_cancel(connection, id);
    before = worker.packets;
    ck_assert_int_eq(kld_process(connection, 0, &error), KLD_OK);
    ck_assert_int_eq(worker.packets - before, 0);
    /* Closed with requests that were never sent. */
    ck_assert_int_eq(kld_submit(connection, &request, count_right, &right, NULL, &error), KLD_OK);
    teardown();
}
END_TEST

/* A worker of before: a packet is a frame. */
START_TEST(test_cork_of_one_frame_each) {
    setup();
    struct kld_request request = plain_request();
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
    ck_assert_int_eq(packets_of(CORKED, true), CORKED);
    teardown();
}
END_TEST

START_TEST(test_trace_in_one_packet) {
    worker.flags = KLD_WELCOME_PACKETS;
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    int before = worker.packets;
    give_trace(&request);
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(worker.packets - before, 1);
    ck_assert_int_eq(worker.traced, 1);
    teardown();
}
END_TEST

/* As many as were asked for while nobody was there: each packet within its bounds. */
START_TEST(test_many_traced_at_once) {
    struct kld_connect_options options = {.lazy = true};
    char url[128];
    int right = 0;
    worker.flags = KLD_WELCOME_PACKETS;
    fake_worker_path(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_int_eq(kld_connect(url, &options, &connection, &error), KLD_OK);
    struct kld_request request = plain_request();
    give_trace(&request);
    for (int i = 0; i < 40; i++)
        ck_assert_int_eq(kld_submit(connection, &request, count_right, &right, NULL, &error),
                         KLD_OK);
    fake_worker_start(&worker);
    while (right < 40)
        ck_assert_int_eq(kld_process(connection, -1, &error), KLD_OK);
    ck_assert_int_eq(worker.traced, 40);
    ck_assert_int_lt(worker.packets, 20); /* HELLO and the region are among them */
    teardown();
}
END_TEST

START_TEST(test_trace) {
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(worker.traces, 0);
    give_trace(&request);
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(worker.traces, 1);
    ck_assert_int_eq(worker.traced, 1);
    ck_assert_mem_eq(worker.last_trace.id, request.trace.id, 16);
    ck_assert_mem_eq(worker.last_trace.span, request.trace.span, 8);
    ck_assert_uint_eq(worker.last_trace.flags, 1);
    worker.die_at_submit = 1;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_uint_eq(result.attempts, 2);
    ck_assert_int_eq(worker.traces, 3);
    memset(request.trace.span, 0, sizeof request.trace.span); /* half of one is none */
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(worker.traces, 3);
    teardown();
}
END_TEST

START_TEST(test_strided_plain_memory) {
    setup();
    struct kld_request request = plain_request();
    static float wide[ROWS * (CLASSES + 3)], out[ROWS * (CLASSES + 5)];
    memset(wide, 0x7f, sizeof wide);
    memset(out, 0x55, sizeof out);
    for (int row = 0; row < ROWS; row++)
        memcpy(wide + row * (CLASSES + 3), q + row * CLASSES, CLASSES * 4);
    request.bytes[KLD_SLOT_PREDICTIONS].data = wide;
    request.op.tensor[KLD_SLOT_PREDICTIONS].row_stride_bytes = (CLASSES + 3) * 4;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = out;
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].row_stride_bytes = (CLASSES + 5) * 4;
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert(result.loss == LOSS);
    unsigned untouched = 0x55555555;
    for (int i = 0; i < ROWS * (CLASSES + 5); i++) {
        int row = i / (CLASSES + 5), column = i % (CLASSES + 5);
        if (column < CLASSES)
            ck_assert(out[i] == 2 * q[row * CLASSES + column]);
        else
            ck_assert_mem_eq(&out[i], &untouched, 4);
    }
    teardown();
}
END_TEST

static struct kld_request region_request(struct kld_region *region, bool in_place) {
    struct kld_request request = plain_request();
    char *data = kld_region_data(region);
    memcpy(data, q, sizeof q);
    memcpy(data + 4096, p, sizeof p);
    memset(request.bytes, 0, sizeof request.bytes);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (request.op.tensor[slot].dtype)
            request.bytes[slot].region = region;
    request.bytes[KLD_SLOT_TARGETS].offset_bytes = 4096;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = in_place ? 0 : 8192;
    return request;
}

START_TEST(test_regions) {
    setup();
    struct kld_region *region;
    ck_assert_int_eq(kld_region_create(connection, 12288, &region, &error), KLD_OK);
    ck_assert_uint_eq(kld_region_bytes(region), 12288);
    struct kld_request request = region_request(region, false);
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert(result.loss == LOSS);
    ck_assert_mem_eq(kld_region_data(region), q, sizeof q);
    float *out = (float *)((char *)kld_region_data(region) + 8192);
    ck_assert(out[5] == 2 * q[5]);

    request.bytes[KLD_SLOT_TARGETS].offset_bytes = 12288 - 64;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    request.bytes[KLD_SLOT_TARGETS].offset_bytes = UINT64_MAX - 3;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    request.bytes[KLD_SLOT_TARGETS].offset_bytes = 4098;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    /* An output over another tensor is seen even when one is named as memory, one by region. */
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.data = out};
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "overlaps"));
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){0};
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.data = p, .region = region};
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    teardown();
}
END_TEST

struct ended {
    int count, ok;
    enum kld_status last;
    uint32_t attempts;
    double loss;
};

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *failed) {
    struct ended *ended = user;
    ended->count++;
    ended->ok += status == KLD_OK;
    ended->last = status;
    ended->attempts = result->attempts;
    ended->loss = result->loss;
    ck_assert_int_eq(status, failed->status);
}

static void process_until(struct ended *ended, int count) {
    for (int i = 0; i < TRIES_MAX && ended->count < count; i++) {
        struct pollfd polled = {kld_fd(connection), POLLIN, 0};
        poll(&polled, 1, 10);
        ck_assert_int_eq(kld_process(connection, 0, &error), KLD_OK);
    }
    ck_assert_int_eq(ended->count, count);
}

START_TEST(test_many_in_flight) {
    worker.requests_max = 16;
    setup();
    struct kld_request request = plain_request();
    struct ended ended = {0};
    uint64_t id;
    worker.hold = 1;
    for (int i = 0; i < 16; i++)
        ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, &id, &error), KLD_OK);
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, &id, &error), KLD_BUSY);
    ck_assert_int_eq(kld_process(connection, 20, &error), KLD_OK);
    ck_assert_int_eq(ended.count, 0);
    worker.hold = 0;
    process_until(&ended, 16);
    ck_assert_int_eq(ended.ok, 16);
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, &id, &error), KLD_OK);
    process_until(&ended, 17);
    teardown();
}
END_TEST

START_TEST(test_run_keeps_callbacks_for_process) {
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    struct ended ended = {0};
    for (int i = 0; i < 5; i++)
        ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(ended.count, 0);
    struct pollfd polled = {kld_fd(connection), POLLIN, 0};
    ck_assert_int_eq(poll(&polled, 1, 1000), 1);
    process_until(&ended, 5);
    teardown();
}
END_TEST

START_TEST(test_lost_worker) {
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    worker.die_at_submit = 1;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_uint_eq(result.attempts, 2);
    ck_assert_int_eq(worker.accepted, 2);
    worker.lost_at_submit = 1;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_uint_eq(result.attempts, 2);

    struct ended ended = {0};
    worker.die_at_submit = 20;
    for (int i = 0; i < 40; i++)
        ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    process_until(&ended, 40);
    ck_assert_int_eq(ended.ok, 40);
    struct kld_server_info info;
    ck_assert_int_eq(kld_info(connection, &info, NULL), KLD_OK);
    ck_assert_uint_eq(info.epoch, 4);
    worker.garbage = 1;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    teardown();
}
END_TEST

START_TEST(test_not_sent_twice) {
    setup();
    struct kld_region *region, *pool;
    ck_assert_int_eq(kld_region_create(connection, 12288, &region, &error), KLD_OK);
    struct kld_request request = region_request(region, true);
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    worker.die_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_UNAVAILABLE);
    worker.lost_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEVICE_LOST);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);

    /* In plain memory the caller's copy stays, so that it may run again. */
    request = plain_request();
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = q;
    worker.die_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert(result.loss == LOSS && q[3] == 8);

    ck_assert_int_eq(kld_region_create_pool(connection, 4096, &pool, &error), KLD_OK);
    ck_assert_ptr_null(kld_region_data(pool));
    request = region_request(region, false);
    ck_assert_int_eq(kld_copy(connection, pool, 0, region, 4096, 128, &error), KLD_OK);
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = pool};
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert(result.loss == LOSS);
    worker.die_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_UNAVAILABLE);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEVICE_LOST);
    ck_assert_ptr_nonnull(strstr(error.text, "pool region"));
    teardown();
}
END_TEST

START_TEST(test_waits_for_a_server) {
    fake_worker_path(&worker);
    char url[128];
    snprintf(url, sizeof url, "unix:%s", worker.path);
    struct kld_connect_options options = {.connect_timeout_ns = 100000000};
    ck_assert_int_eq(kld_connect(url, &options, &connection, &error), KLD_UNAVAILABLE);
    ck_assert_ptr_null(strstr(error.text, worker.path));

    options.lazy = true;
    ck_assert_int_eq(kld_connect(url, &options, &connection, &error), KLD_OK);
    struct kld_request request = plain_request();
    struct ended ended = {0};
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    request.timeout_ns = 50000000;
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEADLINE);
    fake_worker_start(&worker);
    process_until(&ended, 1);
    ck_assert_int_eq(ended.ok, 1);
    teardown();
}
END_TEST

START_TEST(test_refused) {
    fake_worker_open(&worker);
    char url[128];
    snprintf(url, sizeof url, "unix:%s", worker.path);
    worker.refuse_hello = KLD_FORBIDDEN;
    ck_assert_int_eq(kld_connect(url, NULL, &connection, &error), KLD_FORBIDDEN);
    ck_assert_int_eq(kld_connect("unix:", NULL, &connection, &error), KLD_INVALID);
    ck_assert_int_eq(kld_connect("ftp://x", NULL, &connection, &error), KLD_INVALID);
    ck_assert_int_eq(kld_connect(NULL, NULL, &connection, &error), KLD_INVALID);
    worker.refuse_hello = 0;
    connect_with(NULL);
    struct kld_request request = plain_request();
    struct kld_result result;
    worker.refuse_regions = KLD_NO_MEMORY;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_NO_MEMORY);
    worker.refuse_regions = 0;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    worker.busy_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_BUSY);
    teardown();
}
END_TEST

/* WELCOME does not say how much memory of the host a connection may share. */
START_TEST(test_staging_is_no_larger_than_the_server_lets_it) {
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    struct ended ended = {0};
    worker.shared_bytes_max = 65536;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(worker.regions_added, 2);
    kld_close(connection);
    connect_with(NULL);
    for (int i = 0; i < 3; i++) /* all in one stage */
        ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    process_until(&ended, 3);
    ck_assert_int_eq(ended.ok, 3);
    kld_close(connection);
    worker.shared_bytes_max = 1;
    connect_with(NULL);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_TOO_LARGE);
    struct kld_region *region;
    ck_assert_int_eq(kld_region_create(connection, 12288, &region, &error), KLD_OK);
    struct kld_request other = region_request(region, false);
    ck_assert_int_eq(kld_run(connection, &other, &result, &error), KLD_TOO_LARGE);
    worker.shared_bytes_max = 0;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(kld_run(connection, &other, &result, &error), KLD_OK); /* asked for again */
    teardown();
}
END_TEST

START_TEST(test_deadline_and_cancel) {
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    request = plain_request();
    worker.hold = 1;
    request.timeout_ns = 200000000; /* it is with the worker by then, or there is no cancel */
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEADLINE);
    ck_assert(gradient[0] == 0);
    struct ended ended = {0};
    uint64_t id;
    request.timeout_ns = 0;
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, &id, &error), KLD_OK);
    kld_cancel(connection, id);
    kld_cancel(connection, id);
    kld_cancel(connection, 12345);
    process_until(&ended, 1);
    ck_assert_int_eq(ended.last, KLD_CANCELLED);
    ck_assert_int_eq(worker.cancels, 2); /* one of them from the deadline */
    worker.hold = 0;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    teardown();
}
END_TEST

START_TEST(test_staging_limits) {
    fake_worker_open(&worker);
    struct kld_connect_options options = {.staging_bytes_max = 8 << 20};
    connect_with(&options);
    struct kld_request request = plain_request();
    size_t count = 1 << 20;
    float *large = calloc(count, 4), *other = calloc(count, 4);
    request.op.shape[0] = 1;
    request.op.shape[1] = count;
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = 0;
    request.bytes[KLD_SLOT_PREDICTIONS].data = large;
    request.bytes[KLD_SLOT_TARGETS].data = other;
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    struct ended ended = {0};
    worker.hold = 1;
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_BUSY);
    worker.hold = 0;
    process_until(&ended, 1);
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_FP32;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = calloc(count, 4);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_TOO_LARGE);
    ck_assert_ptr_nonnull(strstr(error.text, "staging_bytes_max"));
    free(request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data);
    free(large);
    free(other);
    teardown();
}
END_TEST

START_TEST(test_region_dropped_in_use) {
    setup();
    struct kld_region *region;
    struct ended ended = {0};
    worker.hold = 1;
    ck_assert_int_eq(kld_region_create(connection, 12288, &region, &error), KLD_OK);
    struct kld_request request = region_request(region, false);
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    kld_region_drop(region);
    kld_region_drop(region);
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_INVALID);
    ck_assert_int_eq(kld_process(connection, 20, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_dropped, 0);
    worker.hold = 0;
    process_until(&ended, 1);
    ck_assert_int_eq(ended.ok, 1);
    ck_assert(ended.loss == LOSS);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_dropped, 1);
    ck_assert_int_eq(worker.regions_now, 0);
    teardown();
}
END_TEST

/* Calls that end in a row, each the last user of its region. */
START_TEST(test_ends_in_a_row) {
    setup();
    struct kld_region *regions[20];
    struct ended ended = {0};
    worker.hold = 1;
    for (int round = 0; round < 2; round++) {
        worker.refuse_regions = round ? KLD_NO_MEMORY : 0;
        for (int i = 0; i < 20; i++) {
            ck_assert_int_eq(kld_region_create(connection, 12288, &regions[i], &error), KLD_OK);
            struct kld_request request = region_request(regions[i], false);
            request.timeout_ns = round ? 0 : 20000000;
            ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error),
                             KLD_OK);
            kld_region_drop(regions[i]);
        }
        process_until(&ended, 20 * (round + 1));
        ck_assert_int_eq(ended.last, round ? KLD_NO_MEMORY : KLD_DEADLINE);
    }
    worker.hold = worker.refuse_regions = 0;
    for (int i = 0; i < TRIES_MAX && worker.regions_now > 0; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_now, 0);
    teardown();
}
END_TEST

START_TEST(test_nothing_leaks) {
    fake_worker_open(&worker);
    int before = open_fds();
    for (int round = 0; round < 20; round++) {
        connect_with(NULL);
        struct kld_region *region, *unused;
        ck_assert_int_eq(kld_region_create(connection, 12288, &region, &error), KLD_OK);
        ck_assert_int_eq(kld_region_create(connection, 4096, &unused, &error), KLD_OK);
        kld_region_drop(unused);
        struct kld_request request = region_request(region, false);
        struct kld_result result;
        ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
        worker.hold = 1; /* closed with requests in flight */
        for (int i = 0; i < 3; i++)
            ck_assert_int_eq(kld_submit(connection, &request, NULL, NULL, NULL, &error), KLD_OK);
        kld_close(connection);
        worker.hold = 0;
    }
    for (int i = 0; i < TRIES_MAX && worker.regions_now > 0; i++)
        usleep(10000);
    ck_assert_int_eq(worker.regions_now, 0);
    for (int i = 0; i < TRIES_MAX && open_fds() != before; i++)
        usleep(10000);
    ck_assert_int_eq(open_fds(), before);
    fake_worker_close(&worker);
}
END_TEST

START_TEST(test_memfd_and_limits) {
    worker.regions_max = 3;
    worker.region_bytes_max = 1 << 20;
    setup();
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, 12288), 0);
    struct kld_region *region, *others[4];
    ck_assert_int_eq(kld_region_import_memfd(connection, fd, 12288, &region, &error), KLD_INVALID);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    ck_assert_int_eq(kld_region_import_memfd(connection, fd, 12289, &region, &error), KLD_INVALID);
    ck_assert_int_eq(kld_region_import_memfd(connection, fd, 12288, &region, &error), KLD_OK);
    close(fd);
    struct kld_request request = region_request(region, false);
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert(result.loss == LOSS);
    ck_assert_int_eq(kld_region_create(connection, 0, &others[0], &error), KLD_INVALID);
    ck_assert_int_eq(kld_region_create(connection, 1 << 21, &others[0], &error), KLD_TOO_LARGE);
    ck_assert_int_eq(kld_region_create(connection, 4096, &others[0], &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(connection, 4096, &others[1], &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(connection, 4096, &others[2], &error), KLD_TOO_LARGE);
    struct kld_server_stats stats;
    ck_assert_int_eq(kld_stats(connection, &stats, &error), KLD_OK);
    ck_assert_uint_eq(stats.requests_total, 42);
    teardown();
}
END_TEST

/* Who shows an error to a person has something to show. */
START_TEST(test_an_error_without_words_has_some) {
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    worker.wordless = 1;
    worker.busy_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_BUSY);
    ck_assert_str_eq(error.text, kld_status_text(KLD_BUSY));
    teardown();
}
END_TEST

UNIT_MAIN("client/unix", test_plain_memory, test_trace, test_cork, test_cork_of_one_frame_each,
          test_trace_in_one_packet, test_many_traced_at_once, test_strided_plain_memory,
          test_regions, test_many_in_flight, test_run_keeps_callbacks_for_process, test_lost_worker,
          test_not_sent_twice, test_waits_for_a_server, test_refused,
          test_staging_is_no_larger_than_the_server_lets_it, test_deadline_and_cancel,
          test_staging_limits, test_region_dropped_in_use, test_ends_in_a_row, test_nothing_leaks,
          test_memfd_and_limits, test_an_error_without_words_has_some)
