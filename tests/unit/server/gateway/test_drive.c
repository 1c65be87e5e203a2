/* test_drive.c - how long a loop stays awake (drive.h). */
#include "server/gateway/drive.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/unit/unit.h"

#define LATER_US 20000
#define LONG_NS UINT64_C(20000000000)
#define SHORT_NS UINT64_C(5000000)

static uv_loop_t loop;
static uv_poll_t handle;
static int ends[2];
static int heard;

static void readable(uv_poll_t *poll, int status, int events) {
    char byte;
    heard += status == 0 && read(ends[0], &byte, 1) == 1;
}

static void setup(void) {
    heard = 0;
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    ck_assert_int_eq(uv_poll_init(&loop, &handle, ends[0]), 0);
    ck_assert_int_eq(uv_poll_start(&handle, UV_READABLE, readable), 0);
    uv_run(&loop, UV_RUN_NOWAIT);
}

static void teardown(void) {
    uv_close((uv_handle_t *)&handle, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    close(ends[0]);
    close(ends[1]);
}

static void *say(void *unused) {
    usleep(LATER_US);
    return write(ends[1], "x", 1) == 1 ? unused : NULL;
}

static long sleeps(void) {
    struct rusage usage;
    ck_assert_int_eq(getrusage(RUSAGE_THREAD, &usage), 0);
    return usage.ru_nvcsw;
}

/* It ends with what it waited for, which it leaves to the loop, and never slept. */
START_TEST(awake_until_there_is_something) {
    pthread_t thread;
    setup();
    ck_assert_int_eq(pthread_create(&thread, NULL, say, NULL), 0);
    const uint64_t began = uv_hrtime();
    const long before = sleeps();
    kld_drive_stay_awake(&loop, LONG_NS);
    const long after = sleeps();
    ck_assert_uint_lt(uv_hrtime() - began, LONG_NS);
    ck_assert_int_eq(after, before);
    ck_assert_int_eq(heard, 0);
    uv_run(&loop, UV_RUN_NOWAIT);
    ck_assert_int_eq(heard, 1);
    pthread_join(thread, NULL);
    teardown();
}
END_TEST

START_TEST(awake_no_longer_than_told) {
    setup();
    const uint64_t began = uv_hrtime();
    kld_drive_stay_awake(&loop, SHORT_NS);
    ck_assert_uint_ge(uv_hrtime() - began, SHORT_NS);
    teardown();
}
END_TEST

UNIT_MAIN("server/gateway/drive", awake_until_there_is_something, awake_no_longer_than_told)
