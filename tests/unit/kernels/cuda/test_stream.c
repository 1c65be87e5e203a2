/* test_stream.c - priorities of streams, and the order of small and large jobs in and beside one;
 * over the double of the runtime. A build without CUDA has none of it, and says so. */
#include "kernels/backend.h"

#include <string.h>

#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "tests/unit/kernels/cuda/fixture.h"

static void prepare_large(struct record *record) {
    prepare(record, pool, false);
    record->job.op.shape[0] = 1 << 20;
    ck_assert_int_eq(kld_op_check(&record->job.op, &record->job.geometry, &err), KLD_OK);
}

/* By whichever thread; the priority of the stream that it is on. */
static int launch(struct record *record, int stream) {
    int before = atomic_load(&fake_launches);
    submit(record, stream);
    while (atomic_load(&fake_launches) == before)
        sched_yield();
    return atomic_load(&fake_launched_at);
}

/* Small jobs have a priority above that of large ones, whoever sends them; in one stream order
 * comes first. */
START_TEST(small_jobs_need_not_wait_for_large_ones) {
    setup();
    atomic_store(&fake_us, 30000);
    prepare_large(&records[0]);
    ck_assert_int_eq(launch(&records[0], 0), -2);
    atomic_store(&fake_us, 5);
    prepare(&records[1], pool, false);
    ck_assert_int_eq(launch(&records[1], 1), -3);
    prepare(&records[2], pool, false); /* where it can hold up nobody else's */
    ck_assert_int_eq(launch(&records[2], 0), -2);
    for (int i = 0; i < 3; i++)
        wait_for(&records[i], false);
    ck_assert(records[1].place < records[0].place && records[0].place < records[2].place);
    atomic_store(&fake_us, 30000);
    prepare(&records[3], pool, false);
    ck_assert_int_eq(launch(&records[3], 0), -3); /* again: the stream was empty */
    atomic_store(&fake_us, 5);
    prepare_large(&records[4]);
    ck_assert_int_eq(launch(&records[4], 0), -2);
    wait_for(&records[4], false);
    ck_assert(records[3].place && records[3].place < records[4].place);
    ck_assert_uint_lt(records[4].job.kernel_ns, 20000000); /* it waited, and did not compute */
    teardown();
}
END_TEST

/* Those of a stream's large and small jobs, together. */
START_TEST(priorities_are_those_of_the_device) {
    setup();
    const enum kld_priority priorities[] = {KLD_PRIORITY_LOW, KLD_PRIORITY_NORMAL,
                                            KLD_PRIORITY_HIGH};
    static const struct {
        int greatest, sum[3];
    } cards[] = {{-5, {0 - 1, -2 - 3, -4 - 5}},
                 {-2, {0 - 1, 0 - 1, -1 - 2}},
                 {-1, {0, 0 - 1, -1 - 1}},
                 {0, {0, 0, 0}}};
    for (size_t card = 0; card < sizeof cards / sizeof cards[0]; card++)
        for (int i = 0; i < 3; i++) {
            struct kld_stream *stream;
            atomic_store(&fake_greatest, cards[card].greatest);
            atomic_store(&fake_priority_sum, 0);
            struct kld_stream_options options = {.priority = priorities[i]};
            ck_assert_int_eq(cuda->stream_open(device, &options, &stream, &err), KLD_OK);
            ck_assert_int_eq(atomic_load(&fake_priority_sum), cards[card].sum[i]);
            cuda->stream_close(stream);
        }
    teardown();
}
END_TEST

UNIT_MAIN("kernels/cuda/stream", small_jobs_need_not_wait_for_large_ones,
          priorities_are_those_of_the_device)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/stream", built_without_cuda)

#endif
