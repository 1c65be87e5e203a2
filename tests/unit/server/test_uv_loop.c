/* Loops whose table of descriptors is there from the start: libuv asks for no memory when one is
 * watched, and so does not end the process for want of it. And how long a loop stays awake. */
#include "server/uv_loop.h"

#include <pthread.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <unistd.h>

#include "server/descriptors.h"
#include "server/log.h"
#include "tests/unit/unit.h"

static bool out_of_memory;

static void *give(size_t bytes) { return out_of_memory ? NULL : malloc(bytes); }
static void *give_again(void *old, size_t bytes) {
    return out_of_memory ? NULL : realloc(old, bytes);
}
static void *give_zeros(size_t count, size_t bytes) {
    return out_of_memory ? NULL : calloc(count, bytes);
}

static int heard;

static void hear(uv_poll_t *poll, int status, int events) {
    heard++;
    uv_poll_stop(poll);
}

/* Watches the descriptor with that number, which has something to say. */
static void watch(uv_loop_t *loop, int number) {
    int ends[2];
    uv_poll_t poll;
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(dup2(ends[0], number), number);
    ck_assert_int_eq(uv_poll_init(loop, &poll, number), 0);
    out_of_memory = true;
    ck_assert_int_eq(uv_poll_start(&poll, UV_READABLE, hear), 0);
    ck_assert_int_eq(write(ends[1], "x", 1), 1);
    heard = 0;
    uv_run(loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(heard, 1);
    out_of_memory = false;
    uv_close((uv_handle_t *)&poll, NULL);
    uv_run(loop, UV_RUN_DEFAULT);
    close(ends[0]);
    close(ends[1]);
    close(number);
}

static void open_loop(uv_loop_t *loop) {
    ck_assert_int_eq(uv_replace_allocator(give, give_again, give_zeros, free), 0);
    ck_assert_int_eq(kld_uv_loop_open(loop), 0);
    ck_assert_int_eq(uv_loop_alive(loop), 0);
}

START_TEST(descriptors_are_watched_without_memory) {
    uv_loop_t loop;
    open_loop(&loop);
    watch(&loop, 100);
    watch(&loop, KLD_DESCRIPTORS_OWN - 1);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
}
END_TEST

START_TEST(as_many_as_peers_may_bring) {
    struct kld_error err;
    uv_loop_t loop;
    ck_assert_int_eq(kld_log_init("worker0", "error", "text", &err), KLD_OK);
    kld_descriptors_raise(900);
    ck_assert_uint_eq(kld_descriptors_max(), 900);
    open_loop(&loop);
    watch(&loop, 899);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
}
END_TEST

static int lowest_free(void) {
    int fd = dup(STDERR_FILENO);
    ck_assert_int_ge(fd, 0);
    close(fd);
    return fd;
}

/* No more than the system lets there be, and a loop also where not one is to spare. */
START_TEST(fewer_than_wanted) {
    struct kld_error err;
    struct rlimit limit = {.rlim_cur = 300, .rlim_max = 300};
    uv_loop_t loop;
    ck_assert_int_eq(kld_log_init("worker0", "error", "text", &err), KLD_OK);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    kld_descriptors_raise(UINT64_C(1) << 40);
    ck_assert_uint_eq(kld_descriptors_max(), 300);
    open_loop(&loop);
    watch(&loop, 299);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    int need = -lowest_free();
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    need += lowest_free();
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    int last = -1;
    for (int fd; (fd = dup(STDERR_FILENO)) >= 0;)
        last = fd;
    while (need-- > 0)
        close(last--);
    open_loop(&loop);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
}
END_TEST

#define LATER_US 20000
#define LONG_NS UINT64_C(20000000000)
#define SHORT_NS UINT64_C(5000000)

static uv_loop_t loop;
static uv_poll_t handle;
static int ends[2];

static void readable(uv_poll_t *poll, int status, int events) {
    char byte;
    heard += status == 0 && read(ends[0], &byte, 1) == 1;
}

static void open_with_pipe(void) {
    heard = 0;
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    ck_assert_int_eq(uv_poll_init(&loop, &handle, ends[0]), 0);
    ck_assert_int_eq(uv_poll_start(&handle, UV_READABLE, readable), 0);
    uv_run(&loop, UV_RUN_NOWAIT);
}

static void close_with_pipe(void) {
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
    open_with_pipe();
    ck_assert_int_eq(pthread_create(&thread, NULL, say, NULL), 0);
    const uint64_t began = uv_hrtime();
    const long before = sleeps();
    kld_uv_loop_stay_awake(&loop, LONG_NS);
    const long after = sleeps();
    ck_assert_uint_lt(uv_hrtime() - began, LONG_NS);
    ck_assert_int_eq(after, before);
    ck_assert_int_eq(heard, 0);
    uv_run(&loop, UV_RUN_NOWAIT);
    ck_assert_int_eq(heard, 1);
    pthread_join(thread, NULL);
    close_with_pipe();
}
END_TEST

START_TEST(awake_no_longer_than_told) {
    open_with_pipe();
    const uint64_t began = uv_hrtime();
    kld_uv_loop_stay_awake(&loop, SHORT_NS);
    ck_assert_uint_ge(uv_hrtime() - began, SHORT_NS);
    close_with_pipe();
}
END_TEST

static void timer_fired(uv_timer_t *timer) { heard++; }

START_TEST(awake_no_longer_than_to_the_next_timer) {
    uv_timer_t timer;
    open_with_pipe();
    uv_timer_init(&loop, &timer);
    uv_timer_start(&timer, timer_fired, SHORT_NS / 1000000, 0);
    const uint64_t began = uv_hrtime();
    kld_uv_loop_stay_awake(&loop, LONG_NS);
    ck_assert_uint_lt(uv_hrtime() - began, LONG_NS);
    while (!heard)
        uv_run(&loop, UV_RUN_NOWAIT);
    uv_close((uv_handle_t *)&timer, NULL);
    close_with_pipe();
}
END_TEST

UNIT_MAIN("server/uv_loop", descriptors_are_watched_without_memory, as_many_as_peers_may_bring,
          fewer_than_wanted, awake_until_there_is_something, awake_no_longer_than_told,
          awake_no_longer_than_to_the_next_timer)
