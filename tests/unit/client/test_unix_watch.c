/* test_unix_watch.c - done fences over the Unix socket: their numbers, and who sets their words
 * free when the worker is lost, without a call of ours. The double writes numbers as a device
 * would; the test itself where one does so late. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/client/fake_worker.h"

#define ROWS 2
#define CLASSES 8
#define BYTES (ROWS * CLASSES * sizeof(float))

static struct fake_worker worker;
static struct kld_connection *connection;
static struct kld_region *tensors;
static struct kld_event *ready, *fence;
static struct kld_error error;
static _Atomic uint32_t *word;

static int threads(void) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(tasks));)
        count += entry->d_name[0] != '.';
    closedir(tasks);
    return count;
}

static enum kld_status create(struct kld_event **ret_fence, _Atomic uint32_t **ret_word) {
    uint32_t *at = NULL;
    enum kld_status status = kld_fence_create(connection, &at, ret_fence, &error);
    *ret_word = (_Atomic uint32_t *)(void *)at;
    return status;
}

static void setup_without_fence(void) {
    static const uint8_t uuid[16] = {7}, handle[64] = {9};
    char url[128];
    fake_worker_open(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_msg(kld_connect(url, NULL, &connection, &error) == KLD_OK, "%s", error.text);
    ck_assert_int_eq(kld_region_create(connection, 2 * BYTES, &tensors, &error), KLD_OK);
    ck_assert_int_eq(kld_event_import(connection, handle, uuid, &ready, &error), KLD_OK);
}

static void setup(void) {
    setup_without_fence();
    ck_assert_msg(create(&fence, &word) == KLD_OK, "%s", error.text);
    ck_assert_uint_eq(atomic_load(word), 0);
}

static void teardown(void) {
    kld_close(connection);
    fake_worker_close(&worker);
}

static struct kld_request request_with(struct kld_event *record, bool early) {
    struct kld_request request = small_request(ROWS, CLASSES, NULL, NULL, NULL);
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    request.bytes[KLD_SLOT_PREDICTIONS].region = tensors;
    request.bytes[KLD_SLOT_TARGETS].region = tensors;
    request.bytes[KLD_SLOT_TARGETS].offset_bytes = BYTES;
    request.wait = ready;
    request.record = record;
    request.early = early;
    return request;
}

static uint32_t run(bool early) {
    struct kld_request request = request_with(fence, early);
    struct kld_result result;
    ck_assert_msg(kld_run(connection, &request, &result, &error) == KLD_OK, "%s", error.text);
    return result.fence_number;
}

static void expect_lost(void) {
    struct kld_request request = request_with(fence, true);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_DEVICE_LOST);
    ck_assert_ptr_nonnull(strstr(error.text, "the done fence of the request was lost"));
    ck_assert_ptr_nonnull(strstr(error.text, "create another"));
}

/* As a stream waits for a number, with a limit. */
static bool goes_on(uint32_t number, int ms) {
    for (int i = 0; i < ms && (int32_t)(atomic_load(word) - number) < 0; i++)
        usleep(1000);
    return (int32_t)(atomic_load(word) - number) >= 0;
}

START_TEST(numbers_are_told_and_reached) {
    setup_without_fence();
    int before = threads();
    ck_assert_int_eq(create(&fence, &word), KLD_OK);
    ck_assert_uint_eq((uintptr_t)word % KLD_FENCE_BYTES, 0);
    ck_assert_int_eq(threads(), before + 1);
    ck_assert(!kld_fence_passed(fence, 1));
    for (uint32_t i = 1; i <= 3; i++) {
        ck_assert_uint_eq(run(i == 2), i);
        ck_assert_uint_eq(atomic_load(word), i);
        ck_assert(kld_fence_passed(fence, i) && !kld_fence_passed(fence, i + 1));
    }
    struct kld_request plain = request_with(NULL, false);
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &plain, &result, &error), KLD_OK);
    ck_assert_uint_eq(result.fence_number, 0);

    struct kld_event *second;
    _Atomic uint32_t *other;
    ck_assert_int_eq(create(&second, &other), KLD_OK);
    ck_assert_ptr_ne(other, word);
    ck_assert_int_eq(threads(), before + 1);
    struct kld_request request = request_with(second, true);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_uint_eq(result.fence_number, 1);
    ck_assert_uint_eq(atomic_load(word), 3);
    kld_event_drop(second);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.events_dropped, 1);
    ck_assert_int_eq(worker.regions_now, 2);
    kld_close(connection);
    ck_assert_int_eq(threads(), before);
    fake_worker_close(&worker);
}
END_TEST

/* An event is no fence, wherever it comes from. */
START_TEST(other_events_have_no_numbers) {
    setup();
    struct kld_event *done;
    struct kld_result result;
    uint8_t handle[64];
    ck_assert_int_eq(kld_event_create(connection, handle, &done, &error), KLD_OK);
    struct kld_request request = request_with(done, true);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_uint_eq(result.fence_number, 0);
    ck_assert(!kld_fence_passed(done, 0) && !kld_fence_passed(ready, 0));
    struct kld_connection *local;
    uint32_t *at;
    ck_assert_int_eq(kld_connect("local:cpu", NULL, &local, &error), KLD_OK);
    ck_assert_int_eq(kld_fence_create(local, &at, &done, &error), KLD_UNIMPLEMENTED);
    kld_close(local);
    teardown();
}
END_TEST

START_TEST(what_cannot_be_made_is_told) {
    setup_without_fence();
    worker.refuse_fences = KLD_UNIMPLEMENTED;
    ck_assert_int_eq(create(&fence, &word), KLD_UNIMPLEMENTED);
    worker.refuse_fences = 0;
    worker.refuse_regions_once = KLD_TOO_LARGE;
    ck_assert_int_eq(create(&fence, &word), KLD_TOO_LARGE);
    ck_assert_int_eq(create(&fence, &word), KLD_OK);
    ck_assert_uint_eq(run(true), 1);
    ck_assert_int_eq(worker.regions_now, 2);
    teardown();
}
END_TEST

/* Nobody calls libkld: whoever waits goes on all the same. */
static void lose_and_wait(uint32_t number) {
    worker.hang_up = 1;
    struct timespec from, until;
    clock_gettime(CLOCK_MONOTONIC, &from);
    ck_assert(goes_on(number, 5000));
    clock_gettime(CLOCK_MONOTONIC, &until);
    ck_assert_int_le(until.tv_sec - from.tv_sec, 2);
}

START_TEST(who_waits_for_a_lost_worker_goes_on) {
    setup();
    ck_assert_uint_eq(run(true), 1);
    worker.stuck = 1;
    ck_assert_uint_eq(run(true), 2);
    ck_assert_uint_eq(run(true), 3);
    ck_assert(!goes_on(2, 50));
    lose_and_wait(3);
    ck_assert(goes_on(4096, 0)); /* and whatever else it may have asked for */
    ck_assert(kld_fence_passed(fence, 1));
    ck_assert(!kld_fence_passed(fence, 2) && !kld_fence_passed(fence, 3));
    expect_lost();
    worker.stuck = 0;
    for (int round = 0; round < 3; round++) { /* the next connection is watched as well */
        kld_event_drop(fence);
        ck_assert_int_eq(create(&fence, &word), KLD_OK);
        ck_assert_uint_eq(run(true), 1);
        usleep(20000); /* the end of the socket before does not count for this one */
        ck_assert_uint_eq(atomic_load(word), 1);
        lose_and_wait(2);
        ck_assert(kld_fence_passed(fence, 1) && !kld_fence_passed(fence, 2));
        expect_lost();
    }
    teardown();
}
END_TEST

/* Seen in a call first: by a request that names it not. */
START_TEST(a_loss_that_a_call_sees_sets_free_too) {
    setup();
    worker.stuck = 1;
    ck_assert_uint_eq(run(true), 1);
    worker.die_at_submit = 1;
    struct kld_request plain = request_with(NULL, false);
    ck_assert_int_eq(kld_run(connection, &plain, NULL, &error), KLD_OK);
    ck_assert(goes_on(1, 0));
    ck_assert(!kld_fence_passed(fence, 1));
    expect_lost();
    teardown();
}
END_TEST

START_TEST(what_a_dying_device_writes_late_holds_nobody_up) {
    setup();
    worker.stuck = 1;
    for (uint32_t i = 1; i <= 3; i++)
        ck_assert_uint_eq(run(true), i);
    lose_and_wait(3);
    atomic_store(word, 1);
    ck_assert(goes_on(3, 1000));
    ck_assert(kld_fence_passed(fence, 1) && !kld_fence_passed(fence, 2));
    usleep(1100000); /* it is looked at less often by now */
    atomic_store(word, 2);
    ck_assert(kld_fence_passed(fence, 2) && !kld_fence_passed(fence, 3)); /* mends it, too */
    ck_assert(goes_on(3, 0));
    atomic_store(word, 3);
    ck_assert(goes_on(4, 1000));
    ck_assert(kld_fence_passed(fence, 3) && !kld_fence_passed(fence, 4));
    expect_lost();
    teardown();
}
END_TEST

/* Numbers go round: ahead of all is ahead there too. */
START_TEST(numbers_that_go_round_are_freed) {
    setup();
    worker.stuck = 1;
    ck_assert_uint_eq(run(true), 1);
    atomic_store(word, UINT32_MAX - 1);
    ck_assert(kld_fence_passed(fence, UINT32_MAX - 1) && !kld_fence_passed(fence, 1));
    lose_and_wait(5);
    ck_assert(kld_fence_passed(fence, UINT32_MAX - 1) && !kld_fence_passed(fence, 1));
    teardown();
}
END_TEST

/* It ends what it has: whoever waits is to see that, and not the end of our connection. */
START_TEST(a_worker_that_shuts_down_is_given_time) {
    setup();
    worker.stuck = 1;
    ck_assert_uint_eq(run(true), 1);
    worker.leave_at_submit = 1;
    struct kld_request plain = request_with(NULL, false);
    ck_assert_int_eq(kld_run(connection, &plain, NULL, &error), KLD_OK);
    ck_assert(!goes_on(1, 300));
    atomic_store(word, 1);
    ck_assert(kld_fence_passed(fence, 1) && !kld_fence_passed(fence, 2));
    expect_lost();
    ck_assert(goes_on(2, 4000)); /* and if it does not come, not for good */
    ck_assert(kld_fence_passed(fence, 1) && !kld_fence_passed(fence, 2));
    teardown();
}
END_TEST

/* A child made by fork() has no such thread, and its mutex may be taken for good: closing what it
 * inherited is all it may do, and who asks is not held up. */
START_TEST(a_child_closes_what_it_inherited) {
    setup();
    ck_assert_uint_eq(run(true), 1);
    pid_t child = fork();
    if (child == 0) {
        bool told = kld_fence_passed(fence, 1);
        kld_close(connection);
        _exit(told);
    }
    int status = -1;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    ck_assert_uint_eq(run(true), 2);
    ck_assert_uint_eq(atomic_load(word), 2);
    worker.stuck = 1;
    ck_assert_uint_eq(run(true), 3);
    lose_and_wait(3);
    teardown();
}
END_TEST

/* Each line of SigBlk in /proc: how many threads have them blocked, but those of their own faults.
 */
static int threads_without_signals(void) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(tasks));) {
        char path[300], line[128];
        unsigned long long blocked = 0;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
        while (file && fgets(line, sizeof line, file))
            sscanf(line, "SigBlk: %llx", &blocked);
        if (file)
            fclose(file);
        count += (blocked >> (SIGTERM - 1) & 1) && (blocked >> (SIGUSR1 - 1) & 1) &&
                 !(blocked >> (SIGBUS - 1) & 1);
    }
    closedir(tasks);
    return count;
}

START_TEST(signals_are_not_for_its_thread) {
    setup_without_fence();
    int before = threads_without_signals();
    sigset_t mask;
    ck_assert_int_eq(create(&fence, &word), KLD_OK);
    for (int i = 0; i < TRIES_MAX && threads_without_signals() == before; i++)
        usleep(1000); /* pthread_create() returns while all are blocked there */
    ck_assert_int_eq(threads_without_signals(), before + 1);
    pthread_sigmask(SIG_SETMASK, NULL, &mask); /* and ours is what it was */
    ck_assert(!sigismember(&mask, SIGUSR1) && !sigismember(&mask, SIGTERM));
    teardown();
}
END_TEST

UNIT_MAIN("client/unix_watch", numbers_are_told_and_reached, other_events_have_no_numbers,
          what_cannot_be_made_is_told, who_waits_for_a_lost_worker_goes_on,
          a_loss_that_a_call_sees_sets_free_too, what_a_dying_device_writes_late_holds_nobody_up,
          numbers_that_go_round_are_freed, a_worker_that_shuts_down_is_given_time,
          a_child_closes_what_it_inherited, signals_are_not_for_its_thread)
