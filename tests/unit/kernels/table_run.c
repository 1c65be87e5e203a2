/* table_run.c - runs a case on a device: lays every tensor out in one arena with gaps between them,
 * fills what is no input with a pattern, runs, and compares each byte that no output may have
 * changed. Device memory is reached by COPY jobs only. One thread; done() comes on the device's. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/kernels/table.h"

#define GAP_BYTES 192 /* before, between and behind the tensors */
#define STRIDE_ELEMENTS 3
#define PATTERN 0xa5
#define FAILURE_MAX 256

struct arena {
    uint64_t bytes;
    uint64_t at[KLD_SLOT_COUNT];
    unsigned char *before, *after; /* on the host; after: what came back */
    struct kld_op op;
    struct kld_geometry geometry;
};

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool done;
};

static void job_done(struct kld_job *job) {
    struct waiter *waiter = job->owner;
    pthread_mutex_lock(&waiter->lock);
    waiter->done = true;
    pthread_cond_signal(&waiter->wake);
    pthread_mutex_unlock(&waiter->lock);
}

/* Submits and waits. */
static bool run_job(struct kld_stream *stream, struct kld_job *job, char *failure) {
    struct waiter waiter = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    job->done = job_done;
    job->owner = &waiter;
    stream->device->backend->submit(stream, job);
    pthread_mutex_lock(&waiter.lock);
    while (!waiter.done)
        pthread_cond_wait(&waiter.wake, &waiter.lock);
    pthread_mutex_unlock(&waiter.lock);
    if (job->status == KLD_OK)
        return true;
    snprintf(failure, FAILURE_MAX, "job: %.200s", job->error.text);
    return false;
}

static bool copy(struct kld_stream *stream, struct kld_memory *to, struct kld_memory *from,
                 uint64_t bytes, char *failure) {
    static const struct kld_job empty;
    struct kld_job job = empty;
    job.kind = KLD_JOB_COPY;
    job.copy_to.memory = to;
    job.copy_from.memory = from;
    job.copy_bytes = bytes;
    return run_job(stream, &job, failure);
}

static enum kld_slot own_tensor(int slot) {
    return slot == KLD_SLOT_GRAD_PREDICTIONS ? KLD_SLOT_PREDICTIONS
           : slot == KLD_SLOT_GRAD_TARGETS   ? KLD_SLOT_TARGETS
                                             : KLD_SLOT_COUNT;
}

/* Offsets, strides and the checked op. */
static bool lay_out(struct arena *arena, const struct table_truth *truth,
                    const struct table_case *at, const struct table_place *place, char *failure) {
    arena->op = truth->op;
    arena->bytes = GAP_BYTES;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        struct kld_tensor *tensor = &arena->op.tensor[slot];
        const struct kld_slot_geometry *shape = &truth->geometry.slot[slot];
        if (!tensor->dtype)
            continue;
        enum kld_slot own = own_tensor(slot);
        uint64_t element = kld_dtype_bytes(tensor->dtype);
        tensor->region = 1;
        if (place->in_place && own != KLD_SLOT_COUNT) {
            tensor->offset_bytes = arena->op.tensor[own].offset_bytes;
            tensor->row_stride_bytes = arena->op.tensor[own].row_stride_bytes;
            arena->at[slot] = arena->at[own];
            continue;
        }
        uint64_t stride = shape->row_bytes + (at->strided ? STRIDE_ELEMENTS * element : 0);
        tensor->row_stride_bytes = at->strided ? stride : 0;
        arena->at[slot] = (arena->bytes + 63) / 64 * 64 + place->shift_elements * element;
        tensor->offset_bytes = arena->at[slot];
        arena->bytes = arena->at[slot] + stride * shape->rows + GAP_BYTES;
    }
    struct kld_error err;
    if (kld_op_check(&arena->op, &arena->geometry, &err) == KLD_OK)
        return true;
    snprintf(failure, FAILURE_MAX, "kld_op_check: %.200s", err.text);
    return false;
}

static uint64_t distinct_row(const struct table_truth *truth, const struct kld_op *op, int slot,
                             uint64_t row) {
    bool wide = slot == KLD_SLOT_PREDICTIONS || slot == KLD_SLOT_TARGETS ||
                (slot == KLD_SLOT_GRAD_OUTPUT && op->reduction == KLD_REDUCTION_NONE);
    return wide ? table_row_of(truth, row) : row;
}

/* Inputs in their places, garbage in masked rows, the pattern everywhere else. */
static void fill(struct arena *arena, const struct table_truth *truth) {
    memset(arena->before, PATTERN, arena->bytes);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *shape = &arena->geometry.slot[slot];
        if (!truth->input[slot])
            continue;
        for (uint64_t row = 0; row < shape->rows; row++) {
            unsigned char *to = arena->before + arena->at[slot] + row * shape->stride_bytes;
            uint64_t from = distinct_row(truth, &arena->op, slot, row);
            if (slot != KLD_SLOT_ROW_MASK && shape->rows > 1 && table_row_masked(truth, row))
                memset(to, 0xff, shape->row_bytes); /* NaN in every float type */
            else
                memcpy(to, truth->input[slot] + from * shape->row_bytes, shape->row_bytes);
        }
    }
}

/* Takes the outputs out of the arena and puts the bytes of before there: the rest must be equal. */
static bool harvest(struct arena *arena, struct table_outputs *ret_outputs, char *failure) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *shape = &arena->geometry.slot[slot];
        if (!kld_slot_is_output((uint32_t)slot) || !arena->op.tensor[slot].dtype)
            continue;
        unsigned char *packed = malloc(shape->rows * shape->row_bytes);
        if (!packed)
            abort();
        for (uint64_t row = 0; row < shape->rows; row++) {
            uint64_t at = arena->at[slot] + row * shape->stride_bytes;
            memcpy(packed + row * shape->row_bytes, arena->after + at, shape->row_bytes);
            memcpy(arena->after + at, arena->before + at, shape->row_bytes);
        }
        ret_outputs->at[slot] = packed;
    }
    if (memcmp(arena->before, arena->after, arena->bytes) == 0)
        return true;
    uint64_t at = 0;
    while (arena->before[at] == arena->after[at])
        at++;
    snprintf(failure, FAILURE_MAX, "byte %llu of %llu changed that belongs to no output",
             (unsigned long long)at, (unsigned long long)arena->bytes);
    return false;
}

/* The memory of the kind asked for; *ret_host and *ret_fd are to be released after it. */
static struct kld_memory *open_memory(struct kld_device *device, enum table_memory kind,
                                      uint64_t bytes, void **ret_host, char *failure) {
    struct kld_memory *memory = NULL;
    struct kld_error err = {KLD_OK, ""};
    enum kld_status status;
    *ret_host = NULL;
    if (kind == TABLE_POOL) {
        status = device->backend->memory_alloc(device, bytes, &memory, &err);
    } else if (kind == TABLE_WRAPPED) {
        *ret_host = malloc(bytes);
        status = device->backend->memory_wrap(device, *ret_host, bytes, &memory, &err);
    } else {
        int fd = memfd_create("table", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
            abort();
        status = device->backend->memory_map(device, fd, bytes, &memory, &err);
        close(fd);
    }
    if (status)
        snprintf(failure, FAILURE_MAX, "memory: %.200s", err.text);
    return status ? NULL : memory;
}

static bool run_in(struct kld_stream *stream, struct kld_memory *memory, struct arena *arena,
                   const struct table_place *place, struct table_outputs *ret_outputs,
                   char *failure) {
    const struct kld_backend *backend = stream->device->backend;
    struct kld_memory *before = NULL, *after = NULL;
    struct kld_error err;
    bool fine =
        backend->memory_wrap(stream->device, arena->before, arena->bytes, &before, &err) ==
            KLD_OK &&
        backend->memory_wrap(stream->device, arena->after, arena->bytes, &after, &err) == KLD_OK;
    if (!fine)
        snprintf(failure, FAILURE_MAX, "memory_wrap: %.200s", err.text);
    for (uint32_t i = 0; fine && i < place->repeats; i++) {
        struct table_outputs outputs = {0};
        struct kld_job job;
        memset(&job, 0, sizeof job);
        job.kind = KLD_JOB_OP;
        job.op = arena->op;
        job.geometry = arena->geometry;
        for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
            if (arena->op.tensor[slot].dtype)
                job.place[slot] = (struct kld_place){memory, arena->at[slot]};
        fine =
            copy(stream, memory, before, arena->bytes, failure) && run_job(stream, &job, failure) &&
            copy(stream, after, memory, arena->bytes, failure) && harvest(arena, &outputs, failure);
        outputs.loss = job.loss;
        outputs.bytes = job.bytes;
        outputs.best_ns = job.kernel_ns;
        if (i == 0) {
            *ret_outputs = outputs;
            continue;
        }
        struct table_truth geometry;
        geometry.geometry = arena->geometry;
        fine = fine && table_outputs_equal(&geometry, ret_outputs, &outputs, failure);
        if (outputs.best_ns < ret_outputs->best_ns)
            ret_outputs->best_ns = outputs.best_ns;
        table_outputs_done(&outputs);
    }
    backend->memory_free(before);
    backend->memory_free(after);
    return fine;
}

bool table_run(struct kld_device *device, const struct table_truth *truth,
               const struct table_case *at, const struct table_place *place,
               struct table_outputs *ret_outputs, char *failure) {
    struct arena arena = {0};
    struct kld_stream *stream = NULL;
    struct kld_error err;
    void *host = NULL;
    memset(ret_outputs, 0, sizeof *ret_outputs);
    if (!lay_out(&arena, truth, at, place, failure))
        return false;
    arena.before = malloc(arena.bytes);
    arena.after = malloc(arena.bytes);
    if (!arena.before || !arena.after)
        abort();
    fill(&arena, truth);
    bool fine = device->backend->stream_open(device, NULL, &stream, &err) == KLD_OK;
    if (!fine)
        snprintf(failure, FAILURE_MAX, "stream: %.200s", err.text);
    struct kld_memory *memory =
        fine ? open_memory(device, place->memory, arena.bytes, &host, failure) : NULL;
    fine = memory && run_in(stream, memory, &arena, place, ret_outputs, failure);
    device->backend->memory_free(memory);
    device->backend->stream_close(stream);
    free(host);
    free(arena.before);
    free(arena.after);
    return fine;
}

void table_outputs_done(struct table_outputs *outputs) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        free(outputs->at[slot]);
}

bool table_outputs_equal(const struct table_truth *truth, const struct table_outputs *a,
                         const struct table_outputs *b, char *failure) {
    if (memcmp(&a->loss, &b->loss, sizeof a->loss) != 0) {
        snprintf(failure, FAILURE_MAX, "the reported loss has other bits: %.17g, %.17g", a->loss,
                 b->loss);
        return false;
    }
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *shape = &truth->geometry.slot[slot];
        if (!a->at[slot] || !b->at[slot])
            continue;
        if (memcmp(a->at[slot], b->at[slot], shape->rows * shape->row_bytes) == 0)
            continue;
        snprintf(failure, FAILURE_MAX, "%s has other bits", kld_slot_name((uint32_t)slot));
        return false;
    }
    return true;
}
