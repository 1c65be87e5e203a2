/* test_visit.c - callers' threads: what was current in them, or that nothing was, is so after each
 * call, and no card has a context that nobody asked for; captures of streams in other threads. A
 * build without CUDA has none of it. */
#include "kernels/backend.h"
#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include <fcntl.h>

#include "client/kld.h"
#include "tests/unit/client/small_request.h"
#include "tests/unit/kernels/cuda/fixture.h"

#define ROWS 16
#define CLASSES 32
#define OURS 1 /* the device of all tests, of two */

static _Thread_local CUcontext before;
static void begin_with(int ordinal) { fake_context = before = fake_context_at(ordinal); }

#define LEAVES(call)                                                                               \
    do {                                                                                           \
        ck_assert_int_eq((int)(call), 0);                                                          \
        ck_assert_msg(fake_context == before, "%s leaves another context", #call);                 \
        ck_assert_int_eq(fake_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);                                \
    } while (0)
#define LEAVES_VOID(call) LEAVES(((call), 0))

static void look_after(struct kld_connection *connection, struct kld_request *request,
                       double loss) {
    struct kld_result result;
    LEAVES(kld_run(connection, request, &result, &err));
    ck_assert(result.loss == loss);
}

/* All that a program does with local:cuda:1, in a thread that has something else current. */
static void use_locally(void) {
    static float p[ROWS * CLASSES], q[ROWS * CLASSES], gradient[ROWS * CLASSES];
    struct kld_connection *connection;
    struct kld_region *region, *mapped;
    double read_per_s, both_per_s;
    int fd = memfd_create("test", MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, 1 << 16), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    LEAVES(kld_connect("local:cuda:1", NULL, &connection, &err));
    LEAVES(kld_region_create_pool(connection, 1 << 16, &region, &err));
    LEAVES(kld_region_import_memfd(connection, fd, 1 << 16, &mapped, &err));
    LEAVES(kld_measure_ceiling(connection, 4096, &read_per_s, &both_per_s, &err));
    struct kld_request request = small_request(ROWS, CLASSES, p, q, gradient); /* staged */
    look_after(connection, &request, FAKE_LOSS);
    for (int i = 0; i < 2; i++) { /* the second one is not waited for */
        request = small_request(ROWS, CLASSES, p, q, gradient);
        for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
            if (request.op.tensor[slot].dtype)
                request.bytes[slot] = (struct kld_bytes){.region = i ? region : mapped};
        request.bytes[KLD_SLOT_TARGETS].offset_bytes = 4096;
        request.bytes[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = 8192;
        request.early = i;
        look_after(connection, &request, i ? 0 : FAKE_LOSS);
    }
    LEAVES(kld_process(connection, -1, &err));
    LEAVES_VOID(kld_region_drop(region));
    LEAVES_VOID(kld_region_drop(mapped));
    LEAVES_VOID(kld_close(connection));
    close(fd);
}

START_TEST(a_program_finds_its_own_device_current) {
    atomic_store(&fake_devices, 2);
    atomic_store(&fake_us, 300);
    begin_with(-1);
    use_locally();
    ck_assert_int_eq(atomic_load(&fake_contexts[0]), 0);
    begin_with(0);
    use_locally();
    begin_with(OURS);
    int switches = atomic_load(&fake_switches);
    use_locally();
    ck_assert_int_eq(atomic_load(&fake_switches), switches);
    ck_assert_int_eq(atomic_load(&fake_contexts[0]), 0); /* by none of these */
}
END_TEST

/* What libkld's local: has no use for. */
START_TEST(every_function_leaves_what_it_finds) {
    struct kld_gpu_event *ours, *theirs, *fence;
    struct kld_memory *imported, *mapped, *space;
    uint8_t handle[64], other[64] = "other";
    atomic_store(&fake_devices, 2);
    atomic_store(&fake_device_of_fd, OURS);
    atomic_store(&fake_capturing, true);
    const struct kld_device_options options = {.device = OURS, .pool_bytes_max = 1 << 30};
    for (int ordinal = -1; ordinal < 1; ordinal++) {
        int fd = memfd_create("test", 0);
        ck_assert_int_eq(ftruncate(fd, 1 << 16), 0);
        begin_with(ordinal);
        LEAVES(cuda->device_open(&options, &device, &err));
        LEAVES(cuda->memory_map(device, fd, 1 << 16, &host, &err));
        LEAVES(cuda->memory_alloc(device, 1 << 20, &pool, &err));
        LEAVES(cuda->event_create(device, &ours, handle, &err));
        LEAVES(cuda->event_import(device, handle, &theirs, &err));
        LEAVES(cuda->event_create_fence(device, host, 0, &fence, &err));
        LEAVES(cuda->memory_import_ipc(device, other, FAKE_ALLOCATION, 0, 4096, &imported, &err));
        LEAVES(cuda->memory_import_fd(device, 7, FAKE_UNIT, 0, 4096, &mapped, &err));
        LEAVES(cuda->memory_reserve(device, 2 * FAKE_UNIT, &space, &err));
        LEAVES(cuda->memory_grow_fd(space, 7, 0, FAKE_UNIT, &err));
        LEAVES(cuda->stream_open(device, NULL, &streams[0], &err));
        LEAVES(cuda->check(device, &err));
        LEAVES(cuda->is_dead(device));
        atomic_store(&fake_us, 20000);
        prepare(&records[0], pool, false);
        records[0].job.wait = theirs;
        records[0].job.record = ours;
        LEAVES(!submit(&records[0], 0));
        LEAVES(cuda->stage(device, &records[0].job) == KLD_JOB_UNKNOWN);
        LEAVES((wait_for(&records[0], true), records[0].job.status));
        LEAVES_VOID(cuda->poll(device, false));
        LEAVES_VOID(cuda->event_free(fence));
        LEAVES_VOID(cuda->event_free(theirs));
        LEAVES_VOID(cuda->event_free(ours));
        LEAVES_VOID(cuda->stream_close(streams[0]));
        struct kld_memory *const all[] = {imported, mapped, space, pool, host};
        for (int i = 0; i < 5; i++)
            LEAVES(cuda->memory_free(all[i]));
        LEAVES_VOID(cuda->device_close(device));
        close(fd);
    }
    ck_assert_int_eq(atomic_load(&fake_contexts[0]) + atomic_load(&fake_captures_ended), 0);
    ck_assert_int_eq(atomic_load(&fake_blocks) + atomic_load(&fake_streams), 0);
}
END_TEST

/* A server's thread has its device, and each submit() is a look at that. */
START_TEST(a_device_stays_current_where_that_is_wanted) {
    const struct kld_device_options options = {
        .device = OURS, .pool_bytes_max = 1 << 30, .stays_current = true};
    int ordinal = 0;
    atomic_store(&fake_devices, 2);
    ck_assert_int_eq(cuda->device_open(&options, &device, &err), KLD_OK);
    ck_assert_int_eq(cudaGetDevice(&ordinal), cudaSuccess);
    ck_assert_int_eq(ordinal, OURS);
    ck_assert_int_eq(cuda->memory_alloc(device, 1 << 20, &pool, &err), KLD_OK);
    ck_assert_int_eq(cuda->stream_open(device, NULL, &streams[0], &err), KLD_OK);
    prepare(&records[0], pool, false);
    submit(&records[0], 0);
    wait_for(&records[0], true);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    cuda->stream_close(streams[0]);
    cuda->memory_free(pool);
    cuda->device_close(device);
    ck_assert_int_eq(atomic_load(&fake_switches), 0);
    ck_assert_int_eq(atomic_load(&fake_contexts[0]), 0);
}
END_TEST

/* Looking at jobs and allocating, in the caller's thread and in the device's, end no capture, nor
 * does the capture end the device. */
START_TEST(a_capture_in_another_thread_goes_on) {
    atomic_store(&fake_devices, 2);
    atomic_store(&fake_us, 300);
    atomic_store(&fake_capturing, true);
    begin_with(-1);
    use_locally();
    ck_assert_int_eq(atomic_load(&fake_captures_ended), 0);
}
END_TEST

static void *compute(void *unused) {
    of_check = true;
    begin_with(-1);
    prepare(&records[0], pool, false);
    LEAVES(!submit(&records[0], 0));
    LEAVES((wait_for(&records[0], true), records[0].job.status));
    return NULL;
}

START_TEST(a_thread_that_has_none_has_none_afterwards) {
    pthread_t thread;
    setup();
    ck_assert_int_eq(pthread_create(&thread, NULL, compute, NULL), 0);
    pthread_join(thread, NULL);
    teardown();
}
END_TEST

UNIT_MAIN("kernels/cuda/visit", a_program_finds_its_own_device_current,
          a_capture_in_another_thread_goes_on, every_function_leaves_what_it_finds,
          a_thread_that_has_none_has_none_afterwards, a_device_stays_current_where_that_is_wanted)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/visit", built_without_cuda)

#endif
