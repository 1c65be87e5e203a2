/* test_staging.c - what the CUDA back end keeps of the pool between jobs over host memory: who
 * takes which block, and who gives way; over a double of the runtime. A build without CUDA has none
 * of it. */
#include "kernels/backend.h"
#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "tests/unit/kernels/cuda/fixture.h"

/* Of the pool, so that taking all of it takes no time. */
static void setup_small(void) {
    pool_bytes_max = 64 << 20;
    setup();
}

/* What is kept between jobs is nobody's: a buffer that needs the room gets it. */
START_TEST(kept_staging_gives_way) {
    setup_small();
    struct kld_memory *large, *second;
    uint64_t most = device->info.pool_bytes_max, used = cuda->pool_bytes(device);
    prepare(&records[0], far, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    int blocks = atomic_load(&fake_blocks);
    ck_assert_int_eq(cuda->memory_alloc(device, most - used, &large, &err), KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_blocks), blocks); /* one came, one went */
    ck_assert_int_eq(cuda->memory_alloc(device, 1, &second, &err), KLD_NO_MEMORY);
    prepare(&records[0], far, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_NO_MEMORY);
    cuda->memory_free(large);
    prepare(&records[0], far, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    teardown();
}
END_TEST

/* Jobs of one stream run in order, also where the one in the middle comes in chunks and the one
 * before it ends meanwhile. */
START_TEST(nobody_gets_between_chunks) {
    setup_small();
    struct kld_memory *large;
    uint64_t most = device->info.pool_bytes_max, used = cuda->pool_bytes(device);
    prepare(&records[2], pool, false);
    records[2].job.place[1].offset_bytes = 65536;
    submit(&records[2], 0);
    wait_for(&records[2], false);
    const char *last = atomic_load(&fake_p_at);
    ck_assert_int_eq(cuda->memory_alloc(device, most - used - 2048, &large, &err), KLD_OK);
    atomic_store(&fake_us, 20000);
    atomic_store(&fake_launches, 0);
    prepare(&records[0], pool, false);
    prepare(&records[1], far, false);
    prepare(&records[2], pool, false);
    records[2].job.place[1].offset_bytes = 65536;
    for (int i = 0; i < 3; i++)
        submit(&records[i], 0);
    for (int i = 0; i < 3; i++) {
        wait_for(&records[i], false);
        ck_assert_int_eq(records[i].job.status, KLD_OK);
    }
    ck_assert_int_ge(atomic_load(&fake_launches), 4);
    ck_assert_ptr_eq(atomic_load(&fake_p_at), last);
    cuda->memory_free(large);
    teardown();
}
END_TEST

/* A job that finds no room waits for it, and keeps back others that want some, but nobody else. */
START_TEST(who_finds_no_room_keeps_back_who_needs_none) {
    setup_small();
    struct kld_memory *large;
    uint64_t most = device->info.pool_bytes_max, used = cuda->pool_bytes(device);
    ck_assert_int_eq(cuda->memory_alloc(device, most - used - 4096, &large, &err), KLD_OK);
    atomic_store(&fake_us, FAKE_LONG_US);
    atomic_store(&fake_launches, 0);
    for (int i = 0; i < 4; i++)
        prepare(&records[i], i < 2 ? far : pool, false);
    submit(&records[0], 0);
    while (atomic_load(&fake_launches) < 1)
        usleep(100);
    atomic_store(&fake_us, 5);
    submit(&records[1], 1);
    submit(&records[2], 1); /* behind that in its stream */
    submit(&records[3], 2);
    wait_for(&records[3], false);
    for (int i = 0; i < 3; i++)
        ck_assert_uint_eq(atomic_load(&records[i].place), 0);
    fake_skip_long();
    for (int i = 0; i < 4; i++) {
        wait_for(&records[i], false);
        ck_assert_int_eq(records[i].job.status, KLD_OK);
    }
    ck_assert_int_lt(atomic_load(&records[1].place), atomic_load(&records[2].place));
    cuda->memory_free(large);
    teardown();
}
END_TEST

static void run_staged(struct record *record, uint64_t rows) {
    prepare(record, far, false);
    record->job.op.shape[0] = rows;
    record->job.place[1].offset_bytes = rows * 128;
    ck_assert_int_eq(kld_op_check(&record->job.op, &record->job.geometry, &err), KLD_OK);
    submit(record, 0);
    wait_for(record, false);
    ck_assert_int_eq(record->job.status, KLD_OK);
}

/* Kernels may take all 16 bytes of which one is a staged tensor's: none is what was there before.
 */
START_TEST(no_granule_of_a_tensor_is_left_as_it_was) {
    setup();
    const struct cuda_block *kept = ((struct cuda_device *)device)->kept;
    for (uint32_t classes = 29; classes <= 32; classes++)
        for (int i = 0; i < 2; i++) { /* the second one in what the first has left */
            struct record *record = &records[0];
            prepare(record, far, false);
            record->job.op.shape[0] = 1;
            record->job.op.shape[1] = classes;
            record->job.op.predictions_form = record->job.op.targets_form = KLD_FORM_LOGITS;
            ck_assert_int_eq(kld_op_check(&record->job.op, &record->job.geometry, &err), KLD_OK);
            submit(record, 0);
            wait_for(record, false);
            ck_assert_int_eq(record->job.status, KLD_OK);
            const struct cuda_block *block = kept;
            while (!block->at)
                block++;
            ck_assert_uint_ge(block->bytes, 512);
            for (uint32_t at = 0; i == 1 && at < 256; at++)
                for (int slot = 0; slot < 2; slot++)
                    ck_assert_int_eq((unsigned char)block->at[256 * slot + at],
                                     at < 128 ? 0 : 0xee);
            memset(block->at, 0xee, 512);
        }
    teardown();
}
END_TEST

/* What cannot fit whatever gives way takes nothing from anybody. */
START_TEST(kept_staging_does_not_give_way_in_vain) {
    setup_small();
    struct kld_memory *none;
    uint64_t most = device->info.pool_bytes_max, used = cuda->pool_bytes(device);
    run_staged(&records[0], 16);
    uint64_t made = cuda->pool_allocations(device);
    int blocks = atomic_load(&fake_blocks);
    uint64_t sizes[] = {most - used + 1, most + 1, UINT64_MAX};
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(cuda->memory_alloc(device, sizes[i], &none, &err), KLD_NO_MEMORY);
    ck_assert_int_eq(atomic_load(&fake_blocks), blocks);
    run_staged(&records[0], 16);
    ck_assert_uint_eq(cuda->pool_allocations(device), made);
    teardown();
}
END_TEST

/* The pool has room, and the card has not: others have the rest of it. */
START_TEST(kept_staging_gives_way_on_a_full_card) {
    setup_small();
    run_staged(&records[0], 3500);
    usleep(1100000); /* it waits for nobody's heritage any more */
    int blocks = atomic_load(&fake_blocks);
    atomic_store(&fake_no_memory, 1);
    run_staged(&records[0], 16); /* which leaves the large block to others */
    ck_assert_int_eq(atomic_load(&fake_no_memory), 0);
    ck_assert_int_eq(atomic_load(&fake_blocks), blocks); /* one came, one went */
    teardown();
}
END_TEST

/* A large block stays for large jobs, whatever small ones come between; both are made once. */
START_TEST(small_jobs_leave_large_blocks_alone) {
    setup_small();
    run_staged(&records[0], 3500); /* 2 x 448,000 bytes */
    uint64_t made = cuda->pool_allocations(device), used = cuda->pool_bytes(device);
    int before = atomic_load(&fake_allocations);
    atomic_store(&fake_us, 20000);
    prepare(&records[0], far, false);
    submit(&records[0], 0); /* in flight with its block while the large one comes */
    while (cuda->pool_bytes(device) == used)
        sched_yield();
    ck_assert_uint_lt(cuda->pool_bytes(device) - used, 256 << 10);
    prepare(&records[1], far, false);
    records[1].job.op.shape[0] = 3500;
    records[1].job.place[1].offset_bytes = 3500 * 128;
    ck_assert_int_eq(kld_op_check(&records[1].job.op, &records[1].job.geometry, &err), KLD_OK);
    submit(&records[1], 1);
    wait_for(&records[0], false);
    wait_for(&records[1], false);
    atomic_store(&fake_us, 5);
    ck_assert_uint_eq(cuda->pool_allocations(device), made + 1); /* the small one's */
    ck_assert_int_eq(atomic_load(&fake_allocations), before + 1);
    for (int i = 0; i < 10; i++)
        run_staged(&records[0], i % 2 ? 3500 : 16);
    ck_assert_uint_eq(cuda->pool_allocations(device), made + 1);
    teardown();
}
END_TEST

/* Many jobs at once have filled what is kept with blocks that are too small for the next one: they
 * give way, as many as it takes and no more, and it allocates once. */
START_TEST(what_is_kept_follows_the_jobs) {
    pool_bytes_max = (uint64_t)8 << 30;
    setup();
    enum { BLOCK = 36 << 20, LARGER = 40 << 20, MOST = CUDA_KEPT_BYTES / BLOCK };
    static struct cuda_flight flight[MOST];
    struct cuda_device *own = (struct cuda_device *)device;
    pthread_mutex_lock(&own->work);
    for (int i = 0; i < MOST; i++) {
        flight[i].stream = (struct cuda_stream *)streams[0];
        ck_assert(cuda_staging_reserve(own, &flight[i], BLOCK));
        ck_assert_int_eq(cuda_staging_allocate(own, &flight[i]), cudaSuccess);
    }
    for (int i = 0; i < MOST; i++)
        cuda_staging_release(own, &flight[i]);
    ck_assert_uint_eq(atomic_load(&own->kept_bytes), (uint64_t)MOST * BLOCK);
    const uint64_t sizes[] = {LARGER, BLOCK, LARGER};
    uint64_t made = cuda_pool_allocations(device), left;
    for (int i = 0; i < 3; i++) {
        ck_assert(cuda_staging_reserve(own, &flight[0], sizes[i]));
        ck_assert_int_eq(cuda_staging_allocate(own, &flight[0]), cudaSuccess);
        cuda_staging_release(own, &flight[0]);
        ck_assert_uint_eq(cuda_pool_allocations(device), made + 1);
    }
    left = CUDA_KEPT_BYTES - atomic_load(&own->kept_bytes);
    ck_assert_uint_lt(left, BLOCK);
    pthread_mutex_unlock(&own->work);
    teardown();
}
END_TEST

/* What nobody uses goes back to the card when a buffer does, but for a little that stays at hand.
 */
START_TEST(the_pool_is_trimmed_behind_a_buffer) {
    setup_small();
    struct kld_memory *memory;
    uint64_t used = cuda->pool_bytes(device);
    ck_assert_int_eq(cuda->memory_alloc(device, 8 << 20, &memory, &err), KLD_OK);
    ck_assert_uint_eq(cuda->pool_bytes(device), used + (8 << 20));
    atomic_store(&fake_trimmed_to, 0);
    cuda->memory_free(memory);
    ck_assert_uint_eq(cuda->pool_bytes(device), used);
    ck_assert_uint_eq(atomic_load(&fake_trimmed_to), used + CUDA_POOL_KEEP);
    teardown();
}
END_TEST

/* A burst of jobs in host memory leaves blocks that are not kept: once nothing was asked for a
 * while, they go back as well. */
START_TEST(the_pool_is_trimmed_behind_a_burst) {
    setup_small();
    struct cuda_device *own = (struct cuda_device *)device;
    uint64_t used = cuda->pool_bytes(device);
    prepare(&records[0], far, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert(!atomic_load(&own->surplus)); /* kept for the next job like it */
    atomic_store(&fake_trimmed_to, 0);
    pthread_mutex_lock(&own->work);
    cuda_staging_forget(own);
    pthread_mutex_unlock(&own->work);
    prepare(&records[0], pool, false); /* the device thread sleeps anew */
    records[0].job.place[1].offset_bytes = 65536;
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_uint_eq(atomic_load(&fake_trimmed_to), 0);
    for (int i = 0; i < 10000 && !atomic_load(&fake_trimmed_to); i++)
        usleep(1000);
    ck_assert_uint_eq(atomic_load(&fake_trimmed_to), used + CUDA_POOL_KEEP);
    ck_assert(!atomic_load(&own->surplus));
    teardown();
}
END_TEST

static void *open_slowly(void *argument) {
    const uint8_t handle[64] = "slow";
    of_check = true;
    ck_assert_int_eq(cuda->memory_import_ipc(device, handle, FAKE_ALLOCATION, 0, 4096, argument,
                                             &(struct kld_error){0}),
                     KLD_OK);
    return NULL;
}

static void *take_all(void *argument) {
    of_check = true;
    uint64_t most = device->info.pool_bytes_max - cuda->pool_bytes(device);
    ck_assert_int_eq(cuda->memory_alloc(device, most, argument, &(struct kld_error){0}), KLD_OK);
    return NULL;
}

/* The driver takes its time over a handle, and somebody wants the room of what is kept: he waits,
 * and no job does. */
START_TEST(room_is_made_without_holding_up_jobs) {
    setup_small();
    struct kld_memory *opened, *large;
    pthread_t opener, taker;
    run_staged(&records[0], 16);
    atomic_store(&fake_open_us, 3000000);
    ck_assert_int_eq(pthread_create(&opener, NULL, open_slowly, &opened), 0);
    while (atomic_load(&fake_opening) == 0)
        usleep(1000);
    ck_assert_int_eq(pthread_create(&taker, NULL, take_all, &large), 0);
    usleep(50000);
    uint64_t start_ns = fake_now_ns();
    for (int i = 0; i < 20; i++) {
        prepare(&records[0], pool, false);
        submit(&records[0], 0);
        wait_for(&records[0], false);
        ck_assert_int_eq(records[0].job.status, KLD_OK);
    }
    ck_assert_uint_lt(fake_now_ns() - start_ns, 2500000000); /* long before he has it */
    pthread_join(opener, NULL);
    pthread_join(taker, NULL);
    atomic_store(&fake_open_us, 0);
    cuda->memory_free(opened);
    cuda->memory_free(large);
    teardown();
}
END_TEST

/* Where others have what is left of the card, to a buffer as well. */
START_TEST(a_buffer_has_the_room_of_kept_staging_on_a_full_card) {
    setup();
    struct kld_memory *large;
    usleep(1100000); /* nobody's predecessor's memory is waited for any more */
    run_staged(&records[0], 3500);
    uint64_t kept = atomic_load(&((struct cuda_device *)device)->kept_bytes);
    ck_assert_uint_gt(kept, 0);
    atomic_store(&fake_free_bytes, 1 << 20);
    atomic_store(&fake_no_memory, 1); /* not in vain: all that there is, and a byte */
    ck_assert_int_eq(cuda->memory_alloc(device, (2 << 20) + kept + 1, &large, &err), KLD_NO_MEMORY);
    ck_assert_uint_eq(atomic_load(&((struct cuda_device *)device)->kept_bytes), kept);
    atomic_store(&fake_no_memory, 1);
    atomic_store(&fake_trimmed_to, 1);
    ck_assert_int_eq(cuda->memory_alloc(device, (2 << 20) + kept, &large, &err), KLD_OK);
    ck_assert_uint_eq(atomic_load(&((struct cuda_device *)device)->kept_bytes), 0);
    ck_assert_uint_eq(atomic_load(&fake_trimmed_to), 0);
    cuda->memory_free(large);
    atomic_store(&fake_no_memory, 1); /* nothing is kept: once is all */
    ck_assert_int_eq(cuda->memory_alloc(device, 1 << 20, &large, &err), KLD_NO_MEMORY);
    teardown();
}
END_TEST

/* A job of memory that is not pinned, with a gradient there. */
static void submit_pageable(int record, int stream, struct kld_gpu_event *wait) {
    prepare(&records[record], far, false);
    struct kld_job *job = &records[record].job;
    job->op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_FP32;
    job->op.tensor[KLD_SLOT_GRAD_PREDICTIONS].region = 3;
    job->place[KLD_SLOT_GRAD_PREDICTIONS] =
        (struct kld_place){.memory = far, .offset_bytes = 3 * 4096};
    ck_assert_int_eq(kld_op_check(&job->op, &job->geometry, &err), KLD_OK);
    job->wait = wait;
    submit(&records[record], stream);
}

/* The driver waits with whoever enqueues a copy of memory that is not pinned: for a client's event,
 * for an earlier job, for the kernel. None of that holds up jobs of others, and the stream's own
 * come in order. */
START_TEST(memory_that_is_not_pinned_holds_up_nobody) {
    setup();
    struct kld_gpu_event *event;
    uint8_t handle[64];
    ck_assert_int_eq(cuda->event_create(device, &event, handle, &err), KLD_OK);
    atomic_store(&fake_pageable, (const char *)far->host);
    for (int waits = 0; waits < 2; waits++) {
        uint64_t start_ns = fake_now_ns(), long_ns = FAKE_LONG_US * 1000ull;
        pthread_mutex_lock(&fake_lock);
        ((struct fake_event *)((struct cuda_event *)event)->event)->at_ns = start_ns + long_ns;
        pthread_mutex_unlock(&fake_lock);
        atomic_store(&fake_us, FAKE_LONG_US);
        atomic_store(&fake_launches, 0);
        submit_pageable(0, 0, waits ? event : NULL);
        while (!waits && atomic_load(&fake_launches) == 0)
            usleep(100);
        usleep(2000);
        atomic_store(&fake_us, 5);
        submit_pageable(1, 0, NULL);
        prepare(&records[2], pool, false);
        submit(&records[2], 0);
        prepare(&records[3], pool, false);
        submit(&records[3], 1);
        wait_for(&records[3], false);
        for (int i = 0; i < 3; i++)
            ck_assert_uint_eq(atomic_load(&records[i].place), 0);
        fake_skip_long();
        for (int i = 0; i < 4; i++) {
            wait_for(&records[i], false);
            ck_assert_int_eq(records[i].job.status, KLD_OK);
            ck_assert(records[i].job.loss == FAKE_LOSS);
        }
        ck_assert_uint_lt(atomic_load(&records[0].place), atomic_load(&records[1].place));
        ck_assert_uint_lt(atomic_load(&records[1].place), atomic_load(&records[2].place));
    }
    cuda->event_free(event);
    teardown();
}
END_TEST

UNIT_MAIN("kernels/cuda/staging", memory_that_is_not_pinned_holds_up_nobody,
          a_buffer_has_the_room_of_kept_staging_on_a_full_card, kept_staging_gives_way,
          who_finds_no_room_keeps_back_who_needs_none, kept_staging_gives_way_on_a_full_card,
          nobody_gets_between_chunks, kept_staging_does_not_give_way_in_vain,
          no_granule_of_a_tensor_is_left_as_it_was, small_jobs_leave_large_blocks_alone,
          what_is_kept_follows_the_jobs, the_pool_is_trimmed_behind_a_buffer,
          the_pool_is_trimmed_behind_a_burst, room_is_made_without_holding_up_jobs)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/staging", built_without_cuda)

#endif
