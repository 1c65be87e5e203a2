/* test_region.c - memory of the caller's, memfds above all, over every kind of connection alike. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/client/fake_http.h"
#include "tests/unit/client/fake_worker.h"

#define ROWS 3
#define CLASSES 50
#define COUNT (ROWS * CLASSES)
#define BYTES 65536u

static struct fake_http server;
static struct fake_worker worker;
static struct kld_connection *connection;
static struct kld_error error;
static float targets[COUNT];

enum kind { LOCAL, SPLIT, HTTP, UNIX, KINDS };

static void setup(int kind) {
    char url[128] = "";
    memset(&server, 0, sizeof server);
    memset(&worker, 0, sizeof worker);
    fake_http_open(&server);
    fake_worker_open(&worker);
    const char *urls[KINDS] = {"local:cpu", "split:local:cpu,local:cpu", server.url, url};
    snprintf(url, sizeof url, "unix:%s", worker.path);
    const struct kld_connect_options options = {.threads = 1, .part_bytes_max = 1};
    enum kld_status status = kld_connect(urls[kind], &options, &connection, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
}

static void teardown(void) {
    kld_close(connection);
    fake_worker_close(&worker);
    fake_http_close(&server);
}

static int sealed(int seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, BYTES), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static struct kld_region *import(int fd, uint64_t bytes) {
    struct kld_region *region = NULL;
    enum kld_status status = kld_region_import_memfd(connection, fd, bytes, &region, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    return region;
}

/* The gradient in `to`, over the predictions in `from` at offset 0. */
static struct kld_request request_over(struct kld_region *from, struct kld_region *to,
                                       uint64_t at) {
    struct kld_request request = small_request(ROWS, CLASSES, NULL, targets, NULL);
    request.bytes[KLD_SLOT_PREDICTIONS] = (struct kld_bytes){.region = from};
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS] = (struct kld_bytes){NULL, to, at};
    return request;
}

static void fill(float *predictions) {
    for (int i = 0; i < COUNT; i++)
        predictions[i] = targets[i] = (float)(i % CLASSES + 1) / (CLASSES * (CLASSES + 1) / 2);
}

static void check_two_imports(int kind) {
    setup(kind);
    int fd = sealed(F_SEAL_SHRINK), other = sealed(F_SEAL_SHRINK);
    struct kld_region *one = import(fd, BYTES), *two = import(fd, BYTES / 2);
    struct kld_region *apart = import(other, BYTES);
    static float gradient[COUNT];
    fill(kld_region_data(one));
    struct kld_request request = request_over(one, apart, 0);
    ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
    memcpy(gradient, kld_region_data(apart), sizeof gradient);

    struct kld_region *pairs[2][2] = {{one, two}, {two, one}};
    for (int i = 0; i < 2; i++) {
        request = request_over(pairs[i][0], pairs[i][1], 4 * CLASSES);
        ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_INVALID);
        ck_assert_msg(strstr(error.text, "grad_predictions overlaps predictions"), "%s",
                      error.text);
        ck_assert_int_eq(kld_copy(connection, pairs[i][0], 0, pairs[i][1], 64, 128, &error),
                         KLD_INVALID);
        ck_assert_str_eq(error.text, "copy overlaps itself");
        request = request_over(pairs[i][0], pairs[i][1], 4 * COUNT); /* behind each other */
        ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
    }
    request = request_over(one, two, 0); /* exactly over it */
    ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
    ck_assert_mem_eq(kld_region_data(one), gradient, sizeof gradient);
    ck_assert_int_eq(kld_copy(connection, apart, 0, two, 0, 128, &error), KLD_OK);
    close(fd);
    close(other);
    teardown();
}

START_TEST(two_imports_of_one_memfd) {
    for (int kind = 0; kind < KINDS; kind++)
        check_two_imports(kind);
}
END_TEST

/* A reply that breaks off has written over what another try would read. */
START_TEST(one_memfd_in_place_is_sent_once) {
    setup(HTTP);
    int fd = sealed(F_SEAL_SHRINK);
    struct kld_region *one = import(fd, BYTES), *two = import(fd, BYTES);
    fill(kld_region_data(one));
    struct kld_request request = request_over(one, two, 0);
    server.mode = FAKE_HTTP_CUT;
    server.times = 1;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_UNAVAILABLE);
    ck_assert_int_eq(server.requests, 1);
    close(fd);
    teardown();
}
END_TEST

START_TEST(a_memfd_that_nobody_may_write) {
    const int seals[] = {F_SEAL_WRITE, F_SEAL_FUTURE_WRITE};
    for (int kind = 0; kind < KINDS; kind++) {
        struct kld_region *region;
        setup(kind);
        for (int i = 0; i < 3; i++) {
            char path[64];
            int fd = sealed(F_SEAL_SHRINK | (i < 2 ? seals[i] : 0)), read_only = -1;
            snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
            if (i == 2)
                ck_assert_int_ge(read_only = open(path, O_RDONLY | O_CLOEXEC), 0);
            ck_assert_int_eq(
                kld_region_import_memfd(connection, i == 2 ? read_only : fd, 4096, &region, &error),
                KLD_INVALID);
            ck_assert_msg(strstr(error.text, "the memfd cannot be written"), "%d: %s", kind,
                          error.text);
            close(fd);
            close(read_only);
        }
        teardown();
    }
}
END_TEST

/* Predictions, targets and gradient side by side, and a column that is nobody's. */
START_TEST(columns_of_one_buffer) {
    enum { WIDE = 3 * CLASSES + 1 };
    static float packed[COUNT], gradient[COUNT], wide[ROWS * WIDE];
    for (int kind = 0; kind < KINDS; kind++) {
        setup(kind);
        fill(packed);
        struct kld_request request = small_request(ROWS, CLASSES, packed, targets, gradient);
        ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
        for (int i = 0; i < ROWS * WIDE; i++) {
            int from = i / WIDE * CLASSES + i % WIDE % CLASSES;
            wide[i] = i % WIDE < CLASSES       ? packed[from]
                      : i % WIDE < 2 * CLASSES ? targets[from]
                                               : -7;
        }
        request = small_request(ROWS, CLASSES, wide, wide + CLASSES, wide + 2 * CLASSES);
        for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
            request.op.tensor[slot].row_stride_bytes = WIDE * sizeof *wide;
        ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
        for (int row = 0; row < ROWS; row++) {
            const float *at = wide + row * WIDE;
            ck_assert_mem_eq(at, packed + row * CLASSES, CLASSES * sizeof *wide);
            ck_assert_mem_eq(at + CLASSES, targets + row * CLASSES, CLASSES * sizeof *wide);
            ck_assert_mem_eq(at + 2 * CLASSES, gradient + row * CLASSES, CLASSES * sizeof *wide);
            ck_assert(at[WIDE - 1] == -7);
        }
        teardown();
    }
}
END_TEST

/* A want of descriptors is no want of memory. */
START_TEST(descriptors_run_out) {
    struct kld_region *region;
    const uint8_t uuid[16] = {0};
    setup(UNIX);
    int fd = sealed(F_SEAL_SHRINK);
    struct rlimit none = {(rlim_t)fd + 1, (rlim_t)fd + 1};
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    while (dup(fd) >= 0) /* those below it that are free */
        ;
    for (int kind = 0; kind < 3; kind++) {
        enum kld_status status =
            kind == 0 ? kld_region_create(connection, 4096, &region, &error)
            : kind == 1
                ? kld_region_import_memfd(connection, fd, 4096, &region, &error)
                : kld_region_import_cuda_fd(connection, fd, uuid, 4096, 0, 4096, &region, &error);
        ck_assert_int_eq(status, KLD_NO_MEMORY);
        ck_assert_msg(strstr(error.text, "no file descriptors left"), "%d: %s", kind, error.text);
    }
    teardown();
}
END_TEST

/* Memory that is shared is a file, and one that grows beyond the limit is told by a signal, which
 * ends a process. Staging keeps to what there is. */
START_TEST(files_may_not_be_large) {
    static float large[ROWS * (BYTES / 4)], gradient[COUNT], predictions[COUNT];
    struct kld_region *region;
    setup(UNIX);
    struct rlimit before, small;
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){BYTES + 1, before.rlim_max};
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    fill(predictions);
    struct kld_request request = small_request(ROWS, CLASSES, predictions, targets, gradient);
    ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
    request = small_request(ROWS, BYTES / 4, large, large, NULL);
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_NO_MEMORY);
    ck_assert_msg(strstr(error.text, " 393216 bytes") &&
                      strstr(error.text, " 65537 (RLIMIT_FSIZE)"),
                  "%s", error.text);
    ck_assert_int_eq(kld_region_create(connection, BYTES + 1, &region, &error), KLD_NO_MEMORY);
    ck_assert_msg(strstr(error.text, " 69632 bytes") && strstr(error.text, " 65537 (RLIMIT_FSIZE)"),
                  "%s", error.text);
    ck_assert_int_eq(kld_region_create(connection, BYTES, &region, &error), KLD_OK);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
    ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
    teardown();
}
END_TEST

UNIT_MAIN("client/region", two_imports_of_one_memfd, one_memfd_in_place_is_sent_once,
          a_memfd_that_nobody_may_write, columns_of_one_buffer, descriptors_run_out,
          files_may_not_be_large)
