/* test_event.c - fences: the numbers that jobs write to words of host memory, and what they are
 * ordered with; over the double of the runtime. Events are in test_thread.c. A build without CUDA
 * has none of it, and says so. */
#include "kernels/backend.h"

#include <string.h>

#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "tests/unit/kernels/cuda/fixture.h"

#define WORD_AT 512

static struct kld_gpu_event *fence;

static uint32_t word(void) {
    return atomic_load((_Atomic uint32_t *)(void *)((char *)host->host + WORD_AT));
}

static void setup_fence(void) {
    setup();
    memset((char *)host->host + WORD_AT, 7, 4);
    ck_assert_int_eq(cuda->event_create_fence(device, host, WORD_AT, &fence, &err), KLD_OK);
    ck_assert_uint_eq(word(), 0);
}

static void run(struct kld_memory *memory, bool early, uint32_t number) {
    prepare(&records[0], memory, early);
    records[0].job.record = fence;
    records[0].job.record_number = number;
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_uint_eq(word(), number);
}

START_TEST(each_job_writes_its_number) {
    setup_fence();
    run(pool, false, 1);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    run(pool, true, 2);
    ck_assert_int_eq(atomic_load(&records[0].launches), 1);
    run(far, false, 3); /* staged */
    run(pool, false, UINT32_MAX);
    ck_assert_int_eq(atomic_load(&fake_writes), 5);
    cuda->event_free(fence);
    teardown();
}
END_TEST

/* Nobody is to wait for what does not come. */
START_TEST(a_job_that_fails_writes_its_number_too) {
    setup_fence();
    for (uint32_t staged = 0; staged < 2; staged++) {
        atomic_store(&fake_launch_error, cudaErrorInvalidValue);
        run(staged ? far : pool, false, 1 + staged);
        ck_assert_int_eq(records[0].job.status, KLD_INVALID);
    }
    cuda->event_free(fence);
    teardown();
}
END_TEST

/* What comes behind the job on its stream's other half waits for its last mark, and its memory goes
 * behind that: the number must come before. */
START_TEST(the_number_comes_before_the_last_mark) {
    setup_fence();
    for (int staged = 0; staged < 2; staged++) {
        run(staged ? far : pool, false, 1 + (uint32_t)staged);
        for (int size = 0; size < CUDA_SIZES; size++) {
            cudaStream_t stream = ((struct cuda_stream *)streams[0])->stream[size];
            ck_assert(!((struct fake_stream *)stream)->wrote);
        }
    }
    cuda->event_free(fence);
    teardown();
}
END_TEST

START_TEST(memory_that_is_not_pinned_has_no_fence) {
    atomic_store(&fake_no_pinning, true);
    setup();
    ck_assert(!host->pinned);
    ck_assert_int_eq(cuda->event_create_fence(device, host, 0, &fence, &err), KLD_NO_MEMORY);
    ck_assert_ptr_nonnull(strstr(err.text, "could not be pinned"));
    prepare(&records[0], far, false); /* a request's may be there */
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    teardown();
}
END_TEST

START_TEST(a_driver_that_writes_no_numbers_says_so) {
    setup();
    atomic_store(&fake_write_error, cudaErrorNotSupported);
    ck_assert_int_eq(cuda->event_create_fence(device, host, 0, &fence, &err), KLD_UNIMPLEMENTED);
    atomic_store(&fake_write_error, 0);
    ck_assert_int_eq(cuda->event_create_fence(device, host, 0, &fence, &err), KLD_OK);
    cuda->event_free(fence);
    teardown();
}
END_TEST

START_TEST(an_old_driver_has_no_fences) {
    atomic_store(&fake_no_writes, true);
    setup();
    ck_assert_int_eq(cuda->event_create_fence(device, host, 0, &fence, &err), KLD_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(err.text, "CUDA 11.7"));
    teardown();
}
END_TEST

UNIT_MAIN("kernels/cuda/event", each_job_writes_its_number, a_job_that_fails_writes_its_number_too,
          the_number_comes_before_the_last_mark, memory_that_is_not_pinned_has_no_fence,
          a_driver_that_writes_no_numbers_says_so, an_old_driver_has_no_fences)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/event", built_without_cuda)

#endif
