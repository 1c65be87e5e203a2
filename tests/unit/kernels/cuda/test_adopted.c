/* test_adopted.c - local:cuda on a stream of the caller's, over a double of the runtime: early
 * answers without events, the order of the stream, who looks at what was answered early. */
#include "client/kld.h"

#include <poll.h>
#include <string.h>

#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "tests/unit/kernels/cuda/fake_kernels.h"

#define ROWS 16
#define CLASSES 32
#define STREAM 5
#define MANY 6000 /* more than a connection may have in flight */

static struct kld_connection *connection;
static struct kld_error err;
static struct fake_stream theirs;
static struct kld_region *regions[3];

/* Tensors in pool regions: in the double's device memory. */
static struct kld_request make_request(bool early) {
    static float none[1];
    struct kld_request request = small_request(ROWS, CLASSES, none, none, none);
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    for (int i = 0; i < 3; i++)
        request.bytes[slots[i]] = (struct kld_bytes){.region = regions[i]};
    request.stream = STREAM;
    request.early = early;
    return request;
}

static void setup(int us) {
    ck_assert_int_eq(kld_connect("local:cuda", NULL, &connection, &err), KLD_OK);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(kld_region_create_pool(connection, 1 << 16, &regions[i], &err), KLD_OK);
    memset(&theirs, 0, sizeof theirs);
    int before = atomic_load(&fake_streams);
    ck_assert_int_eq(kld_stream_adopt(connection, STREAM, &theirs, &err), KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_streams), before);
    ck_assert_int_eq(kld_stream_adopt(connection, 128, &theirs, &err), KLD_INVALID);
    ck_assert_int_eq(kld_stream_adopt(connection, STREAM, cudaStreamPerThread, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "cudaStreamPerThread"));
    atomic_store(&fake_us, us);
}

static void teardown(void) {
    kld_close(connection);
    ck_assert_int_eq(atomic_load(&fake_streams) + atomic_load(&fake_events), 0);
}

START_TEST(an_early_answer_waits_for_nothing) {
    const uint64_t job_ns = 600000000; /* so that an answer of a busy machine comes long before */
    setup((int)(job_ns / 1000));
    struct kld_request request = make_request(true);
    struct kld_result result;
    uint64_t before = fake_now_ns();
    ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
    ck_assert(fake_now_ns() - before < job_ns / 2 && result.attempts == 1);
    ck_assert(theirs.ready_ns >= before + job_ns); /* it runs on their stream */
    uint64_t until = theirs.ready_ns;
    request.stream += 128; /* streams_max: the same stream */
    ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
    ck_assert(theirs.ready_ns >= until + job_ns);
    /* One that is waited for comes behind it. */
    request = make_request(false);
    ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
    ck_assert(fake_now_ns() - before >= 2 * job_ns && result.loss == FAKE_LOSS);
    teardown();
}
END_TEST

/* More than fit the device at once; nobody asks how they went. */
START_TEST(many_early_ones_and_the_end) {
    setup(20);
    struct kld_server_stats stats;
    for (int i = 0; i < MANY; i++) {
        struct kld_request request = make_request(true);
        ck_assert_int_eq(kld_run(connection, &request, NULL, &err), KLD_OK);
    }
    ck_assert_int_eq(kld_stats(connection, &stats, &err), KLD_OK);
    ck_assert(stats.requests_total + stats.in_flight == MANY && stats.in_flight <= 130);
    /* Another stream for the number: what runs on the first is waited for. */
    struct fake_stream other = {0};
    ck_assert_int_eq(kld_stream_adopt(connection, STREAM, &other, &err), KLD_OK);
    ck_assert_int_eq(kld_stats(connection, &stats, &err), KLD_OK);
    ck_assert_uint_eq(stats.requests_total, MANY);
    struct kld_request request = make_request(true);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &err), KLD_OK);
    ck_assert(other.ready_ns > 0);
    teardown(); /* waits for the last one */
}
END_TEST

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *error) {
    ck_assert_int_eq(status, KLD_OK);
    ++*(int *)user;
}

/* Behind an early answer the back end's own thread has to look again for those who wait. */
START_TEST(early_and_asynchronous_together) {
    setup(3000);
    int ended = 0;
    struct kld_request late = make_request(false), early = make_request(true);
    late.stream = 1;
    ck_assert_int_eq(kld_submit(connection, &late, on_end, &ended, NULL, &err), KLD_OK);
    ck_assert_int_eq(kld_run(connection, &early, NULL, &err), KLD_OK);
    ck_assert_int_eq(kld_process(connection, 5000, &err), KLD_OK);
    ck_assert_int_eq(ended, 1);
    ck_assert_int_eq(kld_run(connection, &early, NULL, &err), KLD_OK);
    ck_assert_int_eq(kld_submit(connection, &late, on_end, &ended, NULL, &err), KLD_OK);
    ck_assert_int_eq(kld_submit(connection, &early, on_end, &ended, NULL, &err), KLD_OK);
    for (int i = 0; i < 1000 && ended < 3; i++)
        ck_assert_int_eq(kld_process(connection, 10, &err), KLD_OK);
    ck_assert_int_eq(ended, 3);
    teardown();
}
END_TEST

/* Nobody else looks while kld_process() sleeps, or the caller's own loop on kld_fd(). */
START_TEST(waiting_after_an_early_answer) {
    setup(20000);
    struct kld_request request = make_request(true);
    struct kld_server_stats stats;
    for (int loop = 0; loop < 2; loop++) {
        ck_assert_int_eq(kld_run(connection, &request, NULL, &err), KLD_OK);
        uint64_t before = fake_now_ns();
        if (loop) {
            struct pollfd ready = {.fd = kld_fd(connection), .events = POLLIN};
            ck_assert_int_eq(kld_process(connection, 0, &err), KLD_OK);
            ck_assert_int_eq(poll(&ready, 1, 10000), 1);
        }
        ck_assert_int_eq(kld_process(connection, 10000, &err), KLD_OK);
        ck_assert_uint_lt(fake_now_ns() - before, 5000000000);
    }
    ck_assert_int_eq(kld_stats(connection, &stats, &err), KLD_OK);
    ck_assert(stats.requests_total == 2 && stats.in_flight == 0);
    teardown();
}
END_TEST

START_TEST(a_launch_that_fails_is_no_early_answer) {
    setup(5);
    struct kld_request request = make_request(true);
    atomic_store(&fake_launch_error, cudaErrorInvalidConfiguration);
    ck_assert_int_ne(kld_run(connection, &request, NULL, &err), KLD_OK);
    teardown();
}
END_TEST

/* Their owner's graph has nothing of ours in it, and no memory of the graph's is kept as staging;
 * nor does anything go into the default stream while another that waits for it is captured. */
START_TEST(a_stream_that_is_captured_takes_no_request) {
    setup(5);
    static float p[ROWS * CLASSES], q[ROWS * CLASSES], gradient[ROWS * CLASSES];
    struct kld_result result;
    for (int i = 0; i < 8; i++) {
        struct kld_request request = make_request(i & 1);
        if (i & 2)
            request = small_request(ROWS, CLASSES, p, q, gradient);
        request.stream = STREAM;
        int allocations = atomic_load(&fake_allocations);
        uint64_t ready_ns = theirs.ready_ns;
        if (i & 4)
            atomic_store(&fake_is_capturing_error, cudaErrorStreamCaptureImplicit);
        else
            atomic_store(&fake_captured, (cudaStream_t)&theirs);
        ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_BUSY);
        ck_assert_ptr_nonnull(strstr(err.text, "captured"));
        ck_assert_int_eq(atomic_load(&fake_captured_work), 0);
        ck_assert_int_eq(atomic_load(&fake_allocations), allocations);
        ck_assert_uint_eq(theirs.ready_ns, ready_ns);
        atomic_store(&fake_captured, NULL);
        request.early = false;
        ck_assert_int_eq(kld_run(connection, &request, &result, &err), KLD_OK);
        ck_assert(result.loss == FAKE_LOSS);
    }
    teardown();
}
END_TEST

/* Slices of a wait: as often as the caller likes, and the outcome comes once. */
START_TEST(a_wait_in_slices) {
    setup(60000);
    struct kld_request request = make_request(false);
    struct kld_result result = {0};
    uint64_t id = 0, wrong = 12345;
    ck_assert_int_eq(kld_run_slice(connection, &request, 5, &id, &result, &err), KLD_OK);
    ck_assert(id != 0 && result.attempts == 0);
    int slices = 0;
    for (; id; slices++)
        ck_assert_int_eq(kld_wait_slice(connection, &id, 5, &result, &err), KLD_OK);
    ck_assert(slices > 3 && slices < 40);
    ck_assert(result.scalar && result.loss == FAKE_LOSS);
    ck_assert_int_eq(kld_wait_slice(connection, &wrong, 5, &result, &err), KLD_NOT_FOUND);
    atomic_store(&fake_us, 5);
    ck_assert_int_eq(kld_run_slice(connection, &request, 5000, &id, &result, &err), KLD_OK);
    ck_assert_uint_eq(id, 0);
    request.op.shape[1] = 0;
    ck_assert_int_eq(kld_run_slice(connection, &request, 5, &id, &result, &err), KLD_INVALID);
    request = make_request(false);
    atomic_store(&fake_us, 20000);
    ck_assert_int_eq(kld_run_slice(connection, &request, 1, &id, NULL, &err), KLD_OK);
    teardown(); /* with one that nobody waits for any more */
}
END_TEST

UNIT_MAIN("kernels/cuda/adopted", a_stream_that_is_captured_takes_no_request, a_wait_in_slices,
          an_early_answer_waits_for_nothing, many_early_ones_and_the_end,
          early_and_asynchronous_together, waiting_after_an_early_answer,
          a_launch_that_fails_is_no_early_answer)

#else

START_TEST(built_without_cuda) {
    struct kld_error err;
    struct kld_connection *connection;
    ck_assert_int_eq(kld_connect("local:cuda", NULL, &connection, &err), KLD_NOT_FOUND);
}
END_TEST

UNIT_MAIN("kernels/cuda/adopted", built_without_cuda)

#endif
