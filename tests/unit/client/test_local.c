/* test_local.c - the connection without a server, on the CPU back end. */
#include "tests/unit/client/close_in_child.h"
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/kld.h"

#define ROWS 16
#define CLASSES 300
#define COUNT (ROWS * CLASSES)

static struct kld_connection *connection;
static struct kld_error error;
static float q[COUNT], p[COUNT], gradient[COUNT];

static void setup(void) {
    struct kld_connect_options options = {.threads = 2};
    enum kld_status status = kld_connect("local:cpu", &options, &connection, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    for (int i = 0; i < COUNT; i++) {
        q[i] = 1.0f / CLASSES;
        p[i] = (float)(i % CLASSES + 1) * 2 / (CLASSES * (CLASSES + 1));
    }
}

static struct kld_request make_request(void) {
    return small_request(ROWS, CLASSES, q, p, gradient);
}

static double truth(void) {
    double sum = 0;
    for (int i = 0; i < COUNT; i++)
        sum += (double)p[i] * log((double)p[i] / (double)q[i]);
    return sum / ROWS;
}

START_TEST(test_run) {
    setup();
    struct kld_request request = make_request();
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_double_eq_tol(result.loss, truth(), 1e-6);
    ck_assert_double_eq_tol((double)gradient[5], -(double)p[5] / (double)q[5] / ROWS, 1e-6);
    ck_assert(result.scalar && result.attempts == 1 && result.kernel_ns > 0 && result.bytes > 0);
    struct kld_server_info info;
    struct kld_server_stats stats;
    ck_assert_int_eq(kld_info(connection, &info, &error), KLD_OK);
    ck_assert_str_eq(info.backend, "cpu");
    ck_assert_int_eq(kld_stats(connection, &stats, &error), KLD_OK);
    ck_assert_uint_eq(stats.requests_total, 1);
    ck_assert_uint_eq(stats.errors_total, 0);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    request.timeout_ns = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEADLINE);
    /* What is a GPU's: a stream of its own; early, which on a CPU is when the work has ended. */
    ck_assert_int_eq(kld_stream_adopt(connection, 0, NULL, &error), KLD_UNIMPLEMENTED);
    request.timeout_ns = 0;
    request.early = true;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_double_eq_tol(result.loss, truth(), 1e-6);
    request.op.shape[1] = 0;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    kld_close(connection);
}
END_TEST

/* Its device's threads are not there. */
START_TEST(test_closed_in_a_child) {
    setup();
    struct kld_request request = make_request();
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    close_in_child(connection);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    kld_close(connection);
}
END_TEST

START_TEST(test_regions_of_every_kind) {
    setup();
    struct kld_region *plain, *shared, *pool;
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, sizeof p), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    ck_assert_int_eq(kld_region_create(connection, sizeof q, &plain, &error), KLD_OK);
    ck_assert_int_eq(kld_region_import_memfd(connection, fd, sizeof p, &shared, &error), KLD_OK);
    ck_assert_int_eq(kld_region_create_pool(connection, sizeof p, &pool, &error), KLD_OK);
    close(fd);
    memcpy(kld_region_data(plain), q, sizeof q);
    memcpy(kld_region_data(shared), p, sizeof p);
    ck_assert_int_eq(kld_copy(connection, pool, 0, shared, 0, sizeof p, &error), KLD_OK);
    ck_assert_int_eq(kld_copy(connection, pool, 4, shared, 0, sizeof p, &error), KLD_INVALID);
    ck_assert_int_eq(kld_copy(connection, pool, 0, pool, 64, 128, &error), KLD_INVALID);
    struct kld_request request = make_request();
    struct kld_result first, second;
    ck_assert_int_eq(kld_run(connection, &request, &first, &error), KLD_OK);
    request.bytes[KLD_SLOT_PREDICTIONS] = (struct kld_bytes){.region = plain};
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = pool};
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS] = (struct kld_bytes){.region = plain}; /* in place */
    ck_assert_int_eq(kld_run(connection, &request, &second, &error), KLD_OK);
    ck_assert(first.loss == second.loss);
    ck_assert_mem_eq(kld_region_data(plain), gradient, sizeof gradient);
    uint8_t handle[64] = {0}, uuid[16] = {0};
    ck_assert_int_eq(
        kld_region_import_cuda_ipc(connection, handle, uuid, 4096, 0, 4096, &pool, &error),
        KLD_UNIMPLEMENTED);
    kld_region_drop(pool);
    kld_close(connection);
}
END_TEST

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *failed) {
    int *count = user;
    ck_assert_msg(status == KLD_OK, "%s", failed->text);
    ck_assert_double_eq_tol(result->loss, truth(), 1e-6);
    ++*count;
}

START_TEST(test_many_in_flight) {
    setup();
    struct kld_request request = make_request();
    struct kld_region *region;
    int count = 0;
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = 0;
    ck_assert_int_eq(kld_region_create(connection, sizeof q, &region, &error), KLD_OK);
    memcpy(kld_region_data(region), q, sizeof q);
    request.bytes[KLD_SLOT_PREDICTIONS] = (struct kld_bytes){.region = region};
    for (int i = 0; i < 200; i++) {
        uint64_t id;
        request.stream = (uint32_t)i;
        ck_assert_int_eq(kld_submit(connection, &request, on_end, &count, &id, &error), KLD_OK);
        kld_cancel(connection, id); /* cannot be taken back: its result comes */
    }
    kld_region_drop(region);
    while (count < 200) {
        struct pollfd polled = {kld_fd(connection), POLLIN, 0};
        ck_assert_int_eq(poll(&polled, 1, 10000), 1);
        ck_assert_int_eq(kld_process(connection, 0, &error), KLD_OK);
    }
    request = make_request();
    for (int i = 0; i < 50; i++) /* closed with these in flight: close waits for the memory */
        ck_assert_int_eq(kld_submit(connection, &request, on_end, &count, NULL, &error), KLD_OK);
    kld_close(connection);
    memset(gradient, 0, sizeof gradient);
    ck_assert_int_eq(count, 200);
}
END_TEST

START_TEST(test_names) {
    static const struct {
        const char *url;
        enum kld_status status;
    } cases[] = {
        {"local:", KLD_OK},
        {"local:cpu:0", KLD_OK},
        {"local:auto", KLD_OK},
        {"local:cpu:", KLD_INVALID},
        {"local:cpu:x", KLD_INVALID},
        {"local:cpu:-1", KLD_INVALID},
        {"local:cpu:99999999999", KLD_INVALID},
        {"local:abcdefghijklmnopqrst", KLD_INVALID},
        {"local:tpu", KLD_NOT_FOUND},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        connection = NULL;
        enum kld_status status = kld_connect(cases[i].url, NULL, &connection, &error);
        ck_assert_msg(status == cases[i].status, "%s: %d %s", cases[i].url, status, error.text);
        kld_close(connection);
    }
    ck_assert_int_ne(kld_connect("local:cpu:1", NULL, &connection, &error), KLD_OK);
}
END_TEST

START_TEST(test_misaligned_memory_is_refused_without_its_address) {
    setup();
    struct kld_request request = make_request();
    char address[32];
    request.op.shape[0] = ROWS - 1;
    request.bytes[KLD_SLOT_TARGETS].data = (char *)p + 1;
    snprintf(address, sizeof address, "%llu", (unsigned long long)(uintptr_t)p + 1);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_INVALID);
    ck_assert_ptr_null(strstr(error.text, address));
    ck_assert_ptr_nonnull(strstr(error.text, "targets: its data is not aligned"));
    kld_close(connection);
}
END_TEST

UNIT_MAIN("client/local", test_misaligned_memory_is_refused_without_its_address,
          test_closed_in_a_child, test_run, test_regions_of_every_kind, test_many_in_flight,
          test_names)
