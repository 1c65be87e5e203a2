/* test_local.c - libkld's local:cuda over a double of the runtime: early answers, which there are
 * of device memory alone; answers that come when the caller stops looking for them itself. A build
 * without CUDA has none of it. */
#include "kernels/backend.h"
#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include <fcntl.h>
#include <poll.h>

#include "client/connection.h"
#include "client/kld.h"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/kernels/cuda/fake_kernels.h"

#define REGION_BYTES 8192

static struct kld_connection *connection;
static struct kld_error err;

static struct kld_request request_of(struct kld_region *region) {
    struct kld_request request;
    memset(&request, 0, sizeof request);
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = 16;
    request.op.shape[1] = 32;
    request.early = true;
    for (uint32_t slot = 0; slot < 2; slot++) {
        request.op.tensor[slot].dtype = KLD_DTYPE_FP32;
        request.bytes[slot].region = region;
        request.bytes[slot].offset_bytes = slot * (REGION_BYTES / 2);
    }
    return request;
}

/* An early answer has no loss. */
START_TEST(an_early_answer_is_of_device_memory) {
    struct kld_region *device_region, *host_region;
    struct kld_result result;
    int fd = memfd_create("test", MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, REGION_BYTES), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    ck_assert_int_eq(kld_connect("local:cuda", NULL, &connection, &err), KLD_OK);
    ck_assert_int_eq(kld_region_create_pool(connection, REGION_BYTES, &device_region, &err),
                     KLD_OK);
    ck_assert_int_eq(kld_region_import_memfd(connection, fd, REGION_BYTES, &host_region, &err),
                     KLD_OK);
    atomic_store(&fake_us, 20000);
    struct kld_request request = request_of(device_region);
    ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
    ck_assert(result.loss == 0);
    request = request_of(host_region);
    ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
    ck_assert(result.loss == FAKE_LOSS);
    /* A loss in host memory, of tensors on the device. */
    float *loss = kld_region_data(host_region);
    request = request_of(device_region);
    request.op.tensor[KLD_SLOT_LOSS].dtype = KLD_DTYPE_FP32;
    request.bytes[KLD_SLOT_LOSS].region = host_region;
    *loss = 0;
    ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
    ck_assert(*loss == (float)FAKE_LOSS);
    kld_close(connection);
    close(fd);
}
END_TEST

/* A look takes 2 ms, so the one with which the caller stops looking, after 5 ms, begins at 6: it
 * hears what ended at 7, and nobody else does. */
START_TEST(what_the_last_look_hears_is_not_waited_for) {
    struct kld_region *region;
    struct kld_result result;
    ck_assert_uint_eq(KLD_POLL_NS, 5000000);
    ck_assert_int_eq(kld_connect("local:cuda", NULL, &connection, &err), KLD_OK);
    ck_assert_int_eq(kld_region_create_pool(connection, REGION_BYTES, &region, &err), KLD_OK);
    struct kld_request request = request_of(region);
    request.early = false;
    atomic_store(&fake_us, 7000);
    atomic_store(&fake_query_us, 2000);
    for (int i = 0; i < 20; i++) {
        ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
        ck_assert(result.loss == FAKE_LOSS);
    }
    kld_close(connection);
}
END_TEST

static void count(void *user, enum kld_status status, const struct kld_result *result,
                  const struct kld_error *failed) {
    ck_assert_int_eq(status, KLD_OK);
    ++*(int *)user;
}

/* Nobody looks after an early answer, until somebody asks for what is left. */
START_TEST(what_ended_behind_an_early_answer_is_not_waited_for) {
    struct kld_region *region, *large;
    struct kld_result result;
    const struct kld_connect_options options = {.pool_bytes_max = 8u << 20};
    ck_assert_int_eq(kld_connect("local:cuda", &options, &connection, &err), KLD_OK);
    ck_assert_int_eq(kld_region_create_pool(connection, REGION_BYTES, &region, &err), KLD_OK);
    struct kld_request request = request_of(region);
    for (int i = 0; i < 20; i++) {
        ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
        usleep(5000);
        ck_assert_int_eq(kld_process(connection, -1, &err), KLD_OK);
    }
    kld_region_drop(region);
    /* Nor is its memory held. */
    ck_assert_int_eq(kld_region_create_pool(connection, 6u << 20, &large, &err), KLD_OK);
    request = request_of(large);
    ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
    kld_region_drop(large);
    usleep(5000);
    ck_assert_int_eq(kld_region_create_pool(connection, 6u << 20, &large, &err), KLD_OK);
    kld_close(connection);
}
END_TEST

START_TEST(a_stream_of_the_callers_leaves_callbacks_to_process) {
    struct kld_region *region;
    struct pollfd poll_fd = {.events = POLLIN};
    cudaStream_t native;
    int ended = 0;
    ck_assert_int_eq(kld_connect("local:cuda", NULL, &connection, &err), KLD_OK);
    ck_assert_int_eq(kld_region_create_pool(connection, REGION_BYTES, &region, &err), KLD_OK);
    struct kld_request request = request_of(region);
    request.early = false;
    atomic_store(&fake_us, 20000);
    ck_assert_int_eq(kld_submit(connection, &request, count, &ended, NULL, &err), KLD_OK);
    ck_assert_int_eq(cudaStreamCreateWithPriority(&native, 0, 0), cudaSuccess);
    ck_assert_int_eq(kld_stream_adopt(connection, 0, native, &err), KLD_OK);
    poll_fd.fd = kld_fd(connection);
    ck_assert_int_eq(poll(&poll_fd, 1, 5000), 1);
    ck_assert_int_eq(kld_process(connection, 0, &err), KLD_OK);
    ck_assert_int_eq(ended, 1);
    kld_close(connection);
    ck_assert_int_eq(cudaStreamDestroy(native), cudaSuccess); /* the caller's it is to the end */
}
END_TEST

UNIT_MAIN("kernels/cuda/local", an_early_answer_is_of_device_memory,
          what_the_last_look_hears_is_not_waited_for,
          what_ended_behind_an_early_answer_is_not_waited_for,
          a_stream_of_the_callers_leaves_callbacks_to_process)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/local", built_without_cuda)

#endif
