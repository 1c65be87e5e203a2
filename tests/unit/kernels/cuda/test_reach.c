/* test_reach.c - small jobs of the CUDA back end over pinned host memory, which kernels use where
 * it lies, and losses that the host adds up; over a double of the runtime. A build without CUDA has
 * none of it. */
#include "kernels/backend.h"
#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "tests/unit/kernels/cuda/fixture.h"

#define ROW_BYTES 128 /* of prepare()'s tensors */

static void run_rows(struct record *record, struct kld_memory *memory, uint64_t rows) {
    prepare(record, memory, false);
    record->job.op.shape[0] = rows;
    record->job.place[1].offset_bytes = rows * ROW_BYTES;
    ck_assert_int_eq(kld_op_check(&record->job.op, &record->job.geometry, &err), KLD_OK);
    submit(record, 0);
    wait_for(record, false);
    ck_assert_int_eq(record->job.status, KLD_OK);
    ck_assert(record->job.loss == FAKE_LOSS);
}

/* Since it had called for memory so often: the first job that is staged does. */
static bool staged(uint64_t before) { return cuda->pool_allocations(device) != before; }

/* Targets are p, and lie behind the predictions. */
START_TEST(a_small_job_over_pinned_memory_is_computed_there) {
    setup();
    uint64_t used = cuda->pool_allocations(device);
    for (uint64_t rows = 1; rows * 2 * ROW_BYTES <= CUDA_REACH_BYTES; rows *= 2) {
        prepare(&records[0], host, true);
        usleep(1000);
        ck_assert(submit(&records[0], 0)); /* launched by the caller, as one in device memory */
        wait_for(&records[0], false);
        run_rows(&records[0], host, rows);
        ck_assert_ptr_eq(atomic_load(&fake_p_at),
                         (char *)host->host + FAKE_MAPPED_AT + rows * ROW_BYTES);
        ck_assert_uint_eq(records[0].job.copy_ns, 0);
    }
    ck_assert(!staged(used));
    teardown();
}
END_TEST

/* One row more than fits; memory that is not pinned; and one tensor of two there. */
START_TEST(what_is_larger_or_not_pinned_is_staged) {
    setup();
    uint64_t used = cuda->pool_allocations(device);
    run_rows(&records[0], host, CUDA_REACH_BYTES / (2 * ROW_BYTES));
    ck_assert(!staged(used));
    run_rows(&records[0], host, CUDA_REACH_BYTES / (2 * ROW_BYTES) + 1);
    ck_assert(staged(used));
    teardown();
    setup();
    used = cuda->pool_allocations(device);
    run_rows(&records[0], far, 1);
    ck_assert(staged(used));
    teardown();
    setup();
    used = cuda->pool_allocations(device);
    prepare(&records[0], host, false);
    records[0].job.place[1].memory = pool;
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert(!staged(used));
    prepare(&records[0], host, false);
    records[0].job.place[1].memory = far;
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert(staged(used));
    teardown();
}
END_TEST

/* FP64 and inputs of two kinds are read up to four times: a quarter of it. */
START_TEST(what_is_read_again_and_again_has_less) {
    setup();
    uint64_t used = cuda->pool_allocations(device), rows = CUDA_REACH_BYTES / 4 / (4 * ROW_BYTES);
    for (uint64_t more = 0; more < 2; more++)
        for (int kind = 0; kind < 3; kind++) {
            prepare(&records[0], host, false);
            struct kld_job *job = &records[0].job;
            job->op.shape[0] = (kind == 0 ? rows : 2 * rows) + more;
            if (kind == 0)
                job->op.tensor[0].dtype = job->op.tensor[1].dtype = KLD_DTYPE_FP64;
            else if (kind == 1)
                job->op.targets_form = KLD_FORM_LOGITS;
            else
                job->op.tensor[1].dtype = KLD_DTYPE_BF16, job->op.shape[0] = rows * 8 / 3 + more;
            job->place[1].offset_bytes = 1 << 19;
            ck_assert_int_eq(kld_op_check(&job->op, &job->geometry, &err), KLD_OK);
            submit(&records[0], 0);
            wait_for(&records[0], false);
            ck_assert_int_eq(records[0].job.status, KLD_OK);
            ck_assert_int_eq(staged(used), more != 0);
        }
    teardown();
}
END_TEST

/* A gradient and a loss for each row are written there, too, and count. */
START_TEST(outputs_count_as_well) {
    setup();
    uint64_t used = cuda->pool_allocations(device), rows = CUDA_REACH_BYTES / (2 * ROW_BYTES);
    for (int i = 0; i < 2; i++) {
        prepare(&records[0], host, false);
        struct kld_job *job = &records[0].job;
        job->op.shape[0] = i == 0 ? rows * 2 / 3 : rows;
        job->op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_FP32;
        job->op.tensor[KLD_SLOT_GRAD_PREDICTIONS].region = 3;
        job->place[1].offset_bytes = rows * ROW_BYTES;
        job->place[KLD_SLOT_GRAD_PREDICTIONS] =
            (struct kld_place){.memory = host, .offset_bytes = 2 * rows * ROW_BYTES};
        ck_assert_int_eq(kld_op_check(&job->op, &job->geometry, &err), KLD_OK);
        submit(&records[0], 0);
        wait_for(&records[0], false);
        ck_assert_int_eq(records[0].job.status, KLD_OK);
        ck_assert_int_eq(staged(used), i);
    }
    teardown();
}
END_TEST

/* Of 32 groups of four rows; not where the loss is wanted in memory, whose writer is the device. */
START_TEST(a_loss_of_few_groups_is_added_up_by_the_host) {
    setup();
    atomic_store(&fake_finishes, 0);
    run_rows(&records[0], pool, 4 * CUDA_SUMS_MAX);
    run_rows(&records[0], host, 1);
    ck_assert_int_eq(atomic_load(&fake_finishes), 0);
    run_rows(&records[0], pool, 4 * CUDA_SUMS_MAX + 1);
    ck_assert_int_eq(atomic_load(&fake_finishes), 1);
    prepare(&records[0], pool, false);
    records[0].job.op.tensor[KLD_SLOT_LOSS].dtype = KLD_DTYPE_FP32;
    records[0].job.op.tensor[KLD_SLOT_LOSS].region = 3;
    records[0].job.place[KLD_SLOT_LOSS] =
        (struct kld_place){.memory = pool, .offset_bytes = 1 << 19};
    ck_assert_int_eq(kld_op_check(&records[0].job.op, &records[0].job.geometry, &err), KLD_OK);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_finishes), 2);
    teardown();
}
END_TEST

/* Where blocks share a row they read the mask from device memory, also where the host adds up. */
START_TEST(a_mask_that_is_kept_lies_in_device_memory) {
    setup();
    for (int cluster = 1; cluster < 3; cluster++) {
        atomic_store(&fake_cluster, cluster);
        atomic_store(&fake_finishes, 0);
        prepare(&records[0], pool, false);
        struct kld_job *job = &records[0].job;
        job->op.tensor[KLD_SLOT_ROW_MASK].dtype = KLD_DTYPE_UINT8;
        job->op.tensor[KLD_SLOT_ROW_MASK].region = 3;
        job->place[1].offset_bytes = 65536;
        job->place[KLD_SLOT_ROW_MASK] = (struct kld_place){.memory = pool, .offset_bytes = 1 << 19};
        ck_assert_int_eq(kld_op_check(&job->op, &job->geometry, &err), KLD_OK);
        submit(&records[0], 0);
        wait_for(&records[0], false);
        ck_assert_int_eq(job->status, KLD_OK);
        ck_assert(job->loss == FAKE_LOSS);
        ck_assert_int_eq(atomic_load(&fake_finishes), 0);
        ck_assert_int_eq(atomic_load(&fake_masked) != NULL, cluster > 1);
    }
    teardown();
}
END_TEST

/* A job whose loss lies in host memory. */
static void run_with_loss(struct kld_memory *tensors, struct kld_memory *memory, uint64_t rows,
                          bool early, int finishes) {
    float *loss = (float *)((char *)memory->host + (1 << 19));
    struct kld_job *job = &records[0].job;
    uint64_t used = cuda->pool_allocations(device);
    *loss = 7;
    prepare(&records[0], tensors, early);
    job->op.shape[0] = rows;
    job->place[1].offset_bytes = 0;
    job->op.tensor[KLD_SLOT_LOSS].dtype = KLD_DTYPE_FP32;
    job->op.tensor[KLD_SLOT_LOSS].region = 3;
    job->place[KLD_SLOT_LOSS] = (struct kld_place){.memory = memory, .offset_bytes = 1 << 19};
    ck_assert_int_eq(kld_op_check(&job->op, &job->geometry, &err), KLD_OK);
    atomic_store(&fake_finishes, 0);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(job->status, KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_finishes), finishes);
    if (memory == host)
        ck_assert_ptr_eq(atomic_load(&fake_loss_at), (char *)loss + FAKE_MAPPED_AT);
    ck_assert_int_eq(staged(used), tensors == far || memory == far);
    ck_assert(*loss == (float)FAKE_LOSS && job->loss == FAKE_LOSS);
}

/* What is behind a job on its stream, its event too, finds the loss written: the device does that,
 * straight where the host's memory is in reach, else by a copy, once all rows are added up. It does
 * where nothing but the answer is waited for, too: the next job of the stream may be on its way
 * by then. */
START_TEST(a_loss_in_host_memory_is_written_before_anybody_looks) {
    struct kld_memory **const in[] = {&host, &far};
    for (int i = 0; i < 2; i++) {
        for (int early = 0; early < 2; early++) {
            setup();
            run_with_loss(pool, *in[i], 4 * (early ? CUDA_SUMS_MAX : 1), early, 1);
            teardown();
        }
        setup();
        run_with_loss(pool, *in[i], 4 * CUDA_SUMS_MAX + 1, false, 1);
        teardown();
        setup(); /* two segments: two chunks, if staged */
        run_with_loss(pool, *in[i], 4 * (KLD_CUDA_GROUPS_MAX + 1), false, 2);
        teardown();
    }
}
END_TEST

/* The tensors, too, are in host memory, which kernels do not reach. */
START_TEST(a_loss_beside_staged_tensors_is_written) {
    for (int early = 0; early < 2; early++) {
        setup();
        run_with_loss(far, far, 16, early, 1);
        teardown();
    }
}
END_TEST

UNIT_MAIN("kernels/cuda/reach", a_small_job_over_pinned_memory_is_computed_there,
          what_is_larger_or_not_pinned_is_staged, what_is_read_again_and_again_has_less,
          outputs_count_as_well, a_loss_of_few_groups_is_added_up_by_the_host,
          a_mask_that_is_kept_lies_in_device_memory,
          a_loss_in_host_memory_is_written_before_anybody_looks,
          a_loss_beside_staged_tensors_is_written)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/reach", built_without_cuda)

#endif
