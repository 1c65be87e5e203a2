/* fixture.h - a CPU device, its memories and streams, and copies that say in which order they end.
 */
#ifndef KLD_TESTS_UNIT_KERNELS_CPU_FIXTURE_H
#define KLD_TESTS_UNIT_KERNELS_CPU_FIXTURE_H

#include "tests/unit/unit.h"

#include <pthread.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/device.h"

#define JOBS 200

struct shared {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    unsigned count, order[JOBS];
};

static inline void note_done(struct kld_job *job) {
    struct shared *shared = job->owner;
    pthread_mutex_lock(&shared->lock);
    shared->order[shared->count++] = (unsigned)job->op.rank; /* not looked at by a copy */
    pthread_cond_signal(&shared->wake);
    pthread_mutex_unlock(&shared->lock);
}

static inline void wait_count(struct shared *shared, unsigned count) {
    pthread_mutex_lock(&shared->lock);
    while (shared->count < count)
        pthread_cond_wait(&shared->wake, &shared->lock);
    pthread_mutex_unlock(&shared->lock);
}

static inline struct kld_device *device_open(uint32_t threads, uint64_t pool_bytes_max,
                                             uint32_t spin_us) {
    struct kld_device_options options = {
        .threads = threads, .pool_bytes_max = pool_bytes_max, .spin_us = spin_us};
    struct kld_device *device = NULL;
    struct kld_error err;
    ck_assert_int_eq(kld_backend_cpu.device_open(&options, &device, &err), KLD_OK);
    return device;
}

static inline struct kld_memory *memory_alloc(struct kld_device *device, uint64_t bytes) {
    struct kld_memory *memory = NULL;
    struct kld_error err;
    ck_assert_int_eq(kld_backend_cpu.memory_alloc(device, bytes, &memory, &err), KLD_OK);
    return memory;
}

static inline struct kld_stream *stream_of(struct kld_device *device, uint64_t owner) {
    struct kld_stream_options options = {.owner = owner};
    struct kld_stream *stream = NULL;
    struct kld_error err;
    ck_assert_int_eq(kld_backend_cpu.stream_open(device, &options, &stream, &err), KLD_OK);
    return stream;
}

static inline struct kld_stream *stream_open(struct kld_device *device) {
    return stream_of(device, 0);
}

static inline void copy_init(struct kld_job *job, struct shared *shared, unsigned number,
                             struct kld_memory *to, struct kld_memory *from, uint64_t bytes) {
    memset(job, 0, sizeof *job);
    job->kind = KLD_JOB_COPY;
    job->copy_to.memory = to;
    job->copy_from.memory = from;
    job->copy_bytes = bytes;
    job->done = note_done;
    job->owner = shared;
    job->op.rank = number;
}

static inline void device_end(struct kld_device *device, struct kld_stream *stream,
                              struct kld_memory *from, struct kld_memory *to) {
    kld_backend_cpu.stream_close(stream);
    kld_backend_cpu.memory_free(from);
    kld_backend_cpu.memory_free(to);
    kld_backend_cpu.device_close(device);
}

#endif
