/* test_connection.c - a request on a warm connection allocates nothing in libkld, whatever memory
 * its tensors are in. */
#include "client/connection.h"

#include <stdio.h>

#include "tests/unit/allocations.h"
#include "tests/unit/client/fake_worker.h"
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#define ROWS 4
#define CLASSES 8

static struct fake_worker worker;
static struct kld_error error;

/* Check's own assertions allocate. */
static void require(bool truth, const char *what) {
    if (!truth)
        ck_abort_msg("%s: %s", what, error.text);
}

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *failed) {
    require(status == KLD_OK, "the answer");
    ++*(int *)user;
}

/* Blocking, and four at a time without. */
static void work(struct kld_connection *connection, const struct kld_request *requests, int kinds) {
    for (int i = 0; i < 100; i++) {
        const struct kld_request *request = &requests[i % kinds];
        require(kld_run(connection, request, NULL, &error) == KLD_OK, "kld_run");
        int ended = 0;
        for (int j = 0; j < 4; j++)
            require(kld_submit(connection, request, on_end, &ended, NULL, &error) == KLD_OK,
                    "kld_submit");
        while (ended < 4)
            require(kld_process(connection, 100, &error) == KLD_OK, "kld_process");
    }
}

START_TEST(warm_requests_allocate_nothing) {
    static float q[ROWS * CLASSES], p[ROWS * CLASSES], gradient[ROWS * CLASSES];
    struct kld_connection *connection, *teacher;
    struct kld_region *region, *logits, *attached;
    char url[128];
    fake_worker_open(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_int_eq(kld_connect(url, NULL, &connection, &error), KLD_OK);
    ck_assert_int_eq(kld_connect(url, NULL, &teacher, &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(connection, 3 * sizeof q, &region, &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(teacher, sizeof p, &logits, &error), KLD_OK);
    struct kld_tensor_view view = {.dtype = KLD_DTYPE_FP32, .rank = 2, .shape = {ROWS, CLASSES}};
    ck_assert_int_eq(kld_publish(teacher, "t", logits, &view, NULL, 0, &error), KLD_OK);
    ck_assert_int_eq(kld_attach(connection, "t", 0, &attached, &view, &error), KLD_OK);

    /* Plain memory, regions, and another's tensor. */
    struct kld_request requests[3];
    for (int i = 0; i < 3; i++)
        requests[i] = small_request(ROWS, CLASSES, q, p, gradient);
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    for (uint64_t i = 0; i < 3; i++)
        requests[1].bytes[slots[i]] = requests[2].bytes[slots[i]] =
            (struct kld_bytes){.region = region, .offset_bytes = i * sizeof q};
    requests[2].bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = attached};

    work(connection, requests, 3);
    counted = pthread_self();
    atomic_store(&counting, true);
    work(connection, requests, 3);
    ck_assert_int_eq(atomic_load(&allocations), 0);
    ck_assert_int_eq(kld_region_create(connection, 4096, &region, &error), KLD_OK);
    ck_assert_int_eq(atomic_load(&allocations) > 0, COUNTS); /* so the counter counts */
    atomic_store(&counting, false);
    kld_close(connection);
    kld_close(teacher);
    fake_worker_close(&worker);
}
END_TEST

UNIT_MAIN("client/connection", warm_requests_allocate_nothing)
