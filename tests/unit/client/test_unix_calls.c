/* test_unix_calls.c - whoever asks the worker something and waits for the answer, and the callbacks
 * of requests that end meanwhile. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/client/fake_worker.h"

#define ROWS 1
#define CLASSES 4
#define LOSS 6.0 /* of the double */

static struct fake_worker worker;
static struct kld_connection *connection;
static struct kld_error error;
static float q[CLASSES] = {1, 2, 3, 4}, p[CLASSES] = {1, 1, 1, 1}, gradient[CLASSES];

static void setup(void) {
    char url[128];
    fake_worker_open(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_msg(kld_connect(url, NULL, &connection, &error) == KLD_OK, "%s", error.text);
}

static void teardown(void) {
    kld_close(connection);
    fake_worker_close(&worker);
}

static struct kld_request plain_request(void) {
    return small_request(ROWS, CLASSES, q, p, gradient);
}

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *failed) {
    ++*(int *)user;
}

static bool is_readable(int ms) {
    struct pollfd poll_fd = {kld_fd(connection), POLLIN, 0};
    return poll(&poll_fd, 1, ms) > 0;
}

/* Who waits for a callback on kld_fd() hears of it also where a blocking question took in the
 * answer, or what woke him. */
START_TEST(test_a_question_leaves_callbacks_to_process) {
    setup();
    struct kld_request request = plain_request();
    int ended = 0;
    uint64_t id;
    worker.hold = 1;
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    while (!worker.submits)
        kld_process(connection, 10, &error);
    worker.hold = 0;
    ck_assert(is_readable(5000)); /* answered, and not read */
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(ended, 0);
    ck_assert(is_readable(5000));
    kld_process(connection, 0, &error);
    ck_assert_int_eq(ended, 1);
    kld_cork(connection);
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, &id, &error), KLD_OK);
    kld_cancel(connection, id);
    struct kld_region *region;
    ck_assert_int_eq(kld_region_create_pool(connection, 4096, &region, &error), KLD_OK);
    ck_assert(is_readable(5000));
    kld_process(connection, 0, &error);
    ck_assert_int_eq(ended, 2);
    teardown();
}
END_TEST

/* A request in slices whose outcome has come is nothing that kld_process() could wait for. */
START_TEST(test_process_does_not_wait_for_who_fetches_himself) {
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    uint64_t id;
    worker.hold = 1;
    ck_assert_int_eq(kld_run_slice(connection, &request, 10, &id, &result, &error), KLD_OK);
    ck_assert_uint_ne(id, 0);
    worker.hold = 0;
    ck_assert(is_readable(5000));
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(kld_process(connection, -1, &error), KLD_OK);
    ck_assert_int_eq(kld_wait_slice(connection, &id, 1000, &result, &error), KLD_OK);
    ck_assert_uint_eq(id, 0);
    ck_assert(result.scalar && result.loss == LOSS);
    ck_assert_int_eq(kld_process(connection, -1, &error), KLD_OK);
    teardown();
}
END_TEST

/* The worker may hang for ever with a request that has ended here. */
START_TEST(test_process_does_not_wait_for_what_was_given_up) {
    setup();
    struct kld_request request = plain_request();
    int ended = 0;
    request.timeout_ns = 20000000;
    worker.hold = 1;
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &ended, NULL, &error), KLD_OK);
    while (!ended)
        ck_assert_int_eq(kld_process(connection, -1, &error), KLD_OK);
    ck_assert_int_eq(kld_process(connection, -1, &error), KLD_OK);
    worker.hold = 0;
    teardown();
}
END_TEST

/* Nobody reads here but who makes regions. */
START_TEST(test_regions_that_were_dropped_leave) {
    worker.regions_max = 8;
    setup();
    struct kld_region *region;
    for (int i = 0; i < 100; i++) {
        ck_assert_msg(kld_region_create(connection, 4096, &region, &error) == KLD_OK, "%d: %s", i,
                      error.text);
        kld_region_drop(region);
        usleep(1000);
    }
    teardown();
}
END_TEST

static void *answer_soon(void *unused) {
    usleep(50000);
    worker.slow_regions = 0;
    return unused;
}

/* What the server has yet to answer counts until it does: that is waited for. */
START_TEST(test_a_region_waits_for_those_that_leave) {
    pthread_t thread;
    worker.regions_max = 3;
    setup();
    struct kld_region *regions[4];
    worker.slow_regions = 1;
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(kld_region_create(connection, 4096, &regions[i], &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(connection, 4096, &regions[3], &error), KLD_TOO_LARGE);
    kld_region_drop(regions[0]);
    ck_assert_int_eq(pthread_create(&thread, NULL, answer_soon, NULL), 0);
    ck_assert_msg(kld_region_create(connection, 4096, &regions[3], &error) == KLD_OK, "%s",
                  error.text);
    pthread_join(thread, NULL);
    teardown();
}
END_TEST

/* As is a stage, for plain memory, where nobody may wait. */
START_TEST(test_a_stage_comes_behind_those_that_leave) {
    pthread_t thread;
    worker.regions_max = 3;
    setup();
    struct kld_request request = plain_request();
    struct kld_result result;
    struct kld_region *regions[3];
    worker.slow_regions = 1;
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(kld_region_create(connection, 4096, &regions[i], &error), KLD_OK);
    for (int i = 0; i < 3; i++)
        kld_region_drop(regions[i]);
    ck_assert_int_eq(pthread_create(&thread, NULL, answer_soon, NULL), 0);
    ck_assert_msg(kld_run(connection, &request, &result, &error) == KLD_OK, "%s", error.text);
    pthread_join(thread, NULL);
    ck_assert(result.scalar && result.loss == LOSS);
    teardown();
}
END_TEST

START_TEST(test_a_timeout_of_for_ever) {
    const struct kld_connect_options options = {.connect_timeout_ns = UINT64_MAX,
                                                .part_timeout_ns = UINT64_MAX};
    char url[128];
    fake_worker_open(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_msg(kld_connect(url, &options, &connection, &error) == KLD_OK, "%s", error.text);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    teardown();
}
END_TEST

UNIT_MAIN("client/unix_calls", test_a_question_leaves_callbacks_to_process,
          test_process_does_not_wait_for_who_fetches_himself,
          test_process_does_not_wait_for_what_was_given_up, test_regions_that_were_dropped_leave,
          test_a_region_waits_for_those_that_leave, test_a_stage_comes_behind_those_that_leave,
          test_a_timeout_of_for_ever)
