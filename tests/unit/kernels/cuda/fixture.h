/* fixture.h - a device of the CUDA back end over the double of the runtime, and jobs on it: what
 * the tests of its host side share. Each of those is a program of its own, so all of it is static.
 */
#ifndef KLD_TESTS_CUDA_FIXTURE_H
#define KLD_TESTS_CUDA_FIXTURE_H

#include <sched.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/backend.h"
#include "kernels/cuda/device.h"
#include "tests/unit/kernels/cuda/fake_kernels.h"
#include "tests/unit/unit.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
static atomic_int mallocs;          /* of the back end */
static _Thread_local bool of_check; /* this thread is in the test's own code */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *malloc(size_t bytes) {
    atomic_fetch_add(&mallocs, !of_check);
    return __libc_malloc(bytes);
}
void *calloc(size_t items, size_t bytes) {
    atomic_fetch_add(&mallocs, !of_check);
    return __libc_calloc(items, bytes);
}
#else
static atomic_int mallocs;
static _Thread_local bool of_check;
#endif

#define JOBS 64
#define STREAMS 4

extern const struct kld_backend kld_backend_cuda;
static const struct kld_backend *const cuda = &kld_backend_cuda;
static struct kld_device *device;
static struct kld_stream *streams[STREAMS];
static struct kld_memory *pool;
static struct kld_memory *host; /* pinned */
static struct kld_memory *far;  /* of the host, too; not pinned: tensors there are staged */
static struct kld_error err;

struct record {
    struct kld_job job;
    pthread_t ended_in;
    atomic_ullong place; /* in the order of all ends; 0: has not ended */
    atomic_int launches;
};
static struct record records[JOBS];
static atomic_ullong ends;

static void done(struct kld_job *job) {
    struct record *record = job->owner;
    bool before = of_check;
    of_check = true;
    ck_assert_uint_eq(atomic_load(&record->place), 0);
    of_check = before;
    record->ended_in = pthread_self();
    atomic_store(&record->place, atomic_fetch_add(&ends, 1) + 1);
}

static void launched(struct kld_job *job) {
    struct record *record = job->owner;
    ck_assert_uint_eq(atomic_load(&record->place), 0);
    atomic_fetch_add(&record->launches, 1);
}

static bool peer_access;
static uint64_t pool_bytes_max = 1 << 30;

static void setup(void) {
    struct kld_device_options options = {
        .spin_us = 20, .pool_bytes_max = pool_bytes_max, .peer_access = peer_access};
    of_check = true;
    int fd = memfd_create("test", 0);
    ck_assert_int_eq(ftruncate(fd, 1 << 20), 0);
    ck_assert_int_eq(cuda->device_open(&options, &device, &err), KLD_OK);
    ck_assert_int_eq(cuda->memory_alloc(device, 1 << 20, &pool, &err), KLD_OK);
    ck_assert_int_eq(cuda->memory_map(device, fd, 1 << 20, &host, &err), KLD_OK);
    bool pinned = !atomic_exchange(&fake_no_pinning, true);
    ck_assert_int_eq(cuda->memory_map(device, fd, 1 << 20, &far, &err), KLD_OK);
    atomic_store(&fake_no_pinning, !pinned);
    close(fd);
    for (int i = 0; i < STREAMS; i++)
        ck_assert_int_eq(cuda->stream_open(device, NULL, &streams[i], &err), KLD_OK);
    atomic_store(&fake_us, 5);
    usleep(2000); /* the device's thread falls asleep, so that a submit() can launch */
}

/* Everything that was opened is closed. */
static void teardown(void) {
    for (int i = 0; i < STREAMS; i++)
        cuda->stream_close(streams[i]);
    cuda->memory_free(pool);
    cuda->memory_free(host);
    cuda->memory_free(far);
    cuda->device_close(device);
    ck_assert_int_eq(atomic_load(&fake_streams) + atomic_load(&fake_events), 0);
    ck_assert_int_eq(atomic_load(&fake_blocks) + atomic_load(&fake_pinned), 0);
    ck_assert_int_eq(atomic_load(&fake_imports) + atomic_load(&fake_maps), 0);
    ck_assert_int_eq(atomic_load(&fake_handles) + atomic_load(&fake_ranges), 0);
}

static void prepare(struct record *record, struct kld_memory *memory, bool early) {
    memset(record, 0, sizeof *record);
    struct kld_job *job = &record->job;
    job->kind = KLD_JOB_OP;
    kld_op_init(&job->op);
    job->op.rank = 2;
    job->op.shape[0] = 16;
    job->op.shape[1] = 32;
    for (uint32_t slot = 0; slot < 2; slot++) {
        job->op.tensor[slot].dtype = KLD_DTYPE_FP32;
        job->op.tensor[slot].region = 1 + slot;
        job->place[slot] = (struct kld_place){.memory = memory, .offset_bytes = slot * 4096};
    }
    ck_assert_int_eq(kld_op_check(&job->op, &job->geometry, &err), KLD_OK);
    job->done = done;
    job->launched = early ? launched : NULL;
    job->owner = record;
}

static bool submit(struct record *record, int stream) {
    of_check = false;
    bool launched_here = cuda->submit(streams[stream], &record->job);
    of_check = true;
    if (launched_here && record->job.launched)
        atomic_fetch_add(&record->launches, 1);
    return launched_here;
}

static void wait_for(struct record *record, bool polls) {
    uint64_t until = fake_now_ns() + 60000000000u;
    while (!atomic_load(&record->place)) {
        of_check = false;
        if (polls)
            cuda->poll(device, true);
        else
            sched_yield();
        of_check = true;
        ck_assert(fake_now_ns() < until);
    }
}

#endif
