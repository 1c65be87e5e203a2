/* job.c - one job from its operator to launches: staging of tensors in host memory that are not
 * small enough to be used there, chunks of rows where staging is bounded, times. Under
 * device->work. Never waits for the device: what must come later is enqueued by cuda_job_advance(),
 * when the marks have passed. */
#include "kernels/cuda/plan.h"

#include <string.h>

#define NOWHERE 4096 /* an address that no allocation has */

static uint64_t round_up(uint64_t bytes) { return (bytes + 255) & ~(uint64_t)255; }

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The first error counts; what was enqueued before it is still waited for. */
static bool failed(struct cuda_device *device, struct cuda_flight *flight, cudaError_t error,
                   const char *doing) {
    if (!error)
        return false;
    if (!flight->status)
        flight->status = cuda_fail(device, error, doing, &flight->job->error);
    return true;
}

/* Nothing is recorded in the default stream while another is captured: the last mark then comes
 * later, the others are for times. */
void cuda_job_mark(struct cuda_device *device, struct cuda_flight *flight, enum cuda_mark which) {
    cudaError_t error = cudaEventRecord(flight->mark[which], cuda_stream_of(flight));
    if (which == MARK_END)
        flight->unmarked = cuda_is_of_capture(error);
    if (cuda_is_of_capture(error))
        cudaGetLastError();
    else if (error)
        atomic_store(&device->lost, true);
}

/* What the client has recorded in its event by now comes first. */
static void wait_for_event(struct cuda_device *device, struct cuda_flight *flight) {
    const struct cuda_event *event = (const struct cuda_event *)flight->job->wait;
    if (event)
        failed(device, flight, cudaStreamWaitEvent(cuda_stream_of(flight), event->event, 0),
               "waiting for an event");
}

/* Behind all of the job, also of one that failed: nobody is to wait for what does not come. Before
 * MARK_END: what follows on another stream waits for that, and what the job stood on goes when it
 * has passed; a number must not come behind a later one, nor behind its memory's end. */
static void record_event(struct cuda_device *device, struct cuda_flight *flight) {
    const struct cuda_event *event = (const struct cuda_event *)flight->job->record;
    if (event)
        failed(device, flight,
               cuda_event_record(event, flight->job->record_number, cuda_stream_of(flight)),
               "recording an event");
}

/* ---- planning ---------------------------------------------------------------------------------
 */

/* The slot whose staging this one shares: a gradient written over its own tensor. */
static int staged_with(const struct kld_job *job, int slot) {
    int own = slot == KLD_SLOT_GRAD_PREDICTIONS ? KLD_SLOT_PREDICTIONS
              : slot == KLD_SLOT_GRAD_TARGETS   ? KLD_SLOT_TARGETS
                                                : slot;
    bool same = own != slot && job->place[own].memory == job->place[slot].memory &&
                job->place[own].offset_bytes == job->place[slot].offset_bytes;
    return same ? own : slot;
}

/* Where each staged slot lies in a chunk of `rows`; returns the bytes of all. */
static uint64_t plan_staging(struct cuda_flight *flight, uint64_t rows) {
    const struct kld_job *job = flight->job;
    uint64_t bytes = 0;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!(flight->slots_staged & (1u << slot)))
            continue;
        int with = staged_with(job, slot);
        if (with != slot) { /* tensors come before their gradients */
            flight->staging_at[slot] = flight->staging_at[with];
            continue;
        }
        flight->staging_at[slot] = bytes;
        bytes +=
            round_up((cuda_slot_is_tall(job, slot) ? rows : 1) * cuda_plan_row_bytes(flight, slot));
    }
    return bytes;
}

static bool sums_weights(const struct cuda_flight *flight) { return flight->args.divisor == 0; }

static uint64_t divisor_bytes(const struct cuda_flight *flight) {
    if (!sums_weights(flight))
        return 0;
    return 5 * min_u64(flight->job->geometry.rows, KLD_CUDA_DIVISOR_ROWS) + 512;
}

static uint32_t slots_to_stage(const struct kld_job *job) {
    uint32_t slots = 0;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (cuda_slot_is_present(job, slot) && !cuda_is_on_device(&job->place[slot]))
            slots |= 1u << slot;
    return slots;
}

static const struct cuda_memory *memory_of(const struct kld_job *job, int slot) {
    return (const struct cuda_memory *)job->place[slot].memory;
}

/* How often a row goes over the bus: the kernel for everything (FP64, inputs of two kinds, a loss
 * of each element) reads it again and again. */
static uint64_t times_read(const struct kld_job *job) {
    const struct kld_op *op = &job->op;
    uint32_t dtype = op->tensor[KLD_SLOT_PREDICTIONS].dtype;
    bool special = dtype != KLD_DTYPE_FP64 && dtype == op->tensor[KLD_SLOT_TARGETS].dtype &&
                   op->predictions_form == op->targets_form && op->reduction != KLD_REDUCTION_NONE;
    return special ? 1 : 4;
}

/* A few bytes in pinned memory are with a kernel, by way of the bus, sooner than copies of them are
 * enqueued and waited for. */
static bool are_in_reach(const struct kld_job *job, uint32_t slots) {
    uint64_t bytes = 0;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!(slots & (1u << slot)))
            continue;
        if (!memory_of(job, slot)->reach)
            return false;
        bytes += job->geometry.slot[slot].rows * job->geometry.slot[slot].row_bytes;
    }
    return bytes <= CUDA_REACH_BYTES / times_read(job);
}

bool cuda_job_in_place(const struct kld_job *job) {
    return job->kind == KLD_JOB_OP && are_in_reach(job, slots_to_stage(job));
}

static void plan_slots(struct cuda_flight *flight) {
    const struct kld_job *job = flight->job;
    uint32_t slots = slots_to_stage(job);
    flight->staged = !are_in_reach(job, slots);
    flight->slots_staged = flight->staged ? slots : 0;
    for (int slot = 0; slot < KLD_SLOT_COUNT && !flight->staged; slot++)
        if (slots & (1u << slot))
            cuda_plan_tensor(flight, slot)->at =
                memory_of(job, slot)->reach + job->place[slot].offset_bytes;
    uint64_t group = flight->args.group_rows, rows = KLD_CUDA_GROUPS_MAX * group;
    if (flight->args.masked && rows > KLD_CUDA_MASK_ROWS)
        rows = KLD_CUDA_MASK_ROWS / group * group;
    flight->segment_rows = rows;
}

/* A loss that is wanted in the answer alone, of few groups, is added up by the host: for a small
 * job the kernel that would do it is half of what there is to launch. One that is written to memory
 * of whatever kind is written by the device: what comes behind it in its stream reads it there. Of
 * scratch there are the sums alone then. */
static void plan_sums(struct cuda_flight *flight) {
    struct kld_cuda_args *args = &flight->args;
    uint64_t groups = (cuda_plan_rows(flight) + args->group_rows - 1) / args->group_rows;
    bool by_host = flight->job->geometry.scalar && args->divisor != 0 && !args->loss.dtype;
    by_host = by_host && groups <= CUDA_SUMS_MAX;
    flight->sums_count = by_host ? (uint32_t)groups : 0;
    if (flight->sums_count)
        args->scratch = (struct kld_cuda_scratch *)flight->sums;
}

/* As finish_kernel() does, to the bit. */
static double total_of(const struct cuda_flight *flight) {
    double sum[CUDA_SUMS_MAX] = {0}, next[CUDA_SUMS_MAX];
    memcpy(sum, flight->sums->partial, flight->sums_count * sizeof *sum);
    for (uint32_t step = CUDA_SUMS_MAX / 2; step; step /= 2) {
        for (uint32_t i = 0; i < CUDA_SUMS_MAX; i++)
            next[i] = sum[i] + sum[i ^ step];
        memcpy(sum, next, sizeof sum);
    }
    return 0.0 + sum[0];
}

/* Takes staging for as many rows at once as fit; at least one group of rows. */
static bool reserve_staging(struct cuda_device *device, struct cuda_flight *flight) {
    uint64_t group = flight->args.group_rows;
    uint64_t rows = min_u64(cuda_plan_rows(flight), flight->segment_rows);
    for (;;) {
        uint64_t bytes = plan_staging(flight, rows), least = divisor_bytes(flight);
        if (bytes < least)
            bytes = least;
        if ((bytes <= CUDA_STAGING_MAX || rows <= group) &&
            cuda_staging_reserve(device, flight, bytes)) {
            flight->chunk_rows = rows;
            return true;
        }
        if (rows <= group)
            return false;
        rows = (rows / 2 + group - 1) / group * group;
    }
}

static bool others_staged(const struct cuda_device *device, const struct cuda_flight *flight) {
    for (int i = 0; i < CUDA_FLIGHTS_MAX; i++) {
        const struct cuda_flight *other = &device->flights[i];
        if (other != flight && other->job && other->staging_bytes)
            return true;
    }
    return false;
}

/* ---- launching --------------------------------------------------------------------------------
 */

/* The arguments of a launch that begins at row `first`, of a chunk that begins at chunk_first. */
static struct kld_cuda_args args_at(struct cuda_flight *flight, uint64_t first, uint64_t rows) {
    const struct kld_job *job = flight->job;
    struct kld_cuda_args saved = flight->args;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        struct kld_cuda_tensor *tensor = cuda_plan_tensor(flight, slot);
        if (!cuda_slot_is_present(job, slot))
            continue;
        if (flight->slots_staged & (1u << slot)) {
            tensor->at = flight->staging + flight->staging_at[slot];
            tensor->stride_bytes = job->geometry.slot[slot].row_bytes;
        } else if (tensor->at && cuda_slot_is_tall(job, slot)) {
            tensor->at += first * (flight->args.elements ? cuda_plan_row_bytes(flight, slot)
                                                         : tensor->stride_bytes);
        }
    }
    struct kld_cuda_args args = flight->args;
    flight->args = saved;
    args.rows = rows;
    if (args.elements)
        args.elements = min_u64(args.elements - first * args.classes, rows * args.classes);
    args.first_group = first % flight->segment_rows / args.group_rows;
    return args;
}

/* Sum of the weights of all rows, before anything else; staged in the job's staging memory. */
static void launch_divisor(struct cuda_device *device, struct cuda_flight *flight) {
    const struct kld_job *job = flight->job;
    uint64_t weights_at = flight->staging_at[KLD_SLOT_ROW_WEIGHTS];
    uint64_t mask_at = flight->staging_at[KLD_SLOT_ROW_MASK];
    flight->staging_at[KLD_SLOT_ROW_WEIGHTS] = 0;
    flight->staging_at[KLD_SLOT_ROW_MASK] =
        round_up(4 * min_u64(job->geometry.rows, KLD_CUDA_DIVISOR_ROWS));
    const int slots[2] = {KLD_SLOT_ROW_WEIGHTS, KLD_SLOT_ROW_MASK};
    for (uint64_t first = 0; first < job->geometry.rows; first += KLD_CUDA_DIVISOR_ROWS) {
        uint64_t rows = min_u64(job->geometry.rows - first, KLD_CUDA_DIVISOR_ROWS);
        cudaError_t error = cudaSuccess;
        for (int i = 0; i < 2 && !error; i++)
            if (flight->slots_staged & (1u << slots[i]))
                error = cuda_copy_slot(flight, slots[i], first, rows, false);
        struct kld_cuda_args args = args_at(flight, first, rows);
        if (!error)
            error = kld_cuda_launch_divisor(&args, first == 0, cuda_stream_of(flight));
        if (failed(device, flight, error, "summing the row weights"))
            break;
    }
    flight->staging_at[KLD_SLOT_ROW_WEIGHTS] = weights_at;
    flight->staging_at[KLD_SLOT_ROW_MASK] = mask_at;
}

/* Rows [next_row, until), which lie in one segment. */
static void launch_rows(struct cuda_device *device, struct cuda_flight *flight, uint64_t until) {
    const struct kld_job *job = flight->job;
    uint64_t first = flight->next_row;
    struct kld_cuda_args args = args_at(flight, first, until - first);
    if (atomic_exchange(&device->fail_next, false))
        args.p.at = (char *)(uintptr_t)NOWHERE;
    if (failed(device, flight, kld_cuda_launch_rows(&args, cuda_stream_of(flight)),
               "launching a kernel"))
        return;
    bool last = until == cuda_plan_rows(flight);
    if (job->geometry.scalar && !flight->sums_count &&
        (last || until % flight->segment_rows == 0)) {
        uint64_t segment = (until - 1) / flight->segment_rows * flight->segment_rows;
        uint32_t groups = (uint32_t)((until - segment + args.group_rows - 1) / args.group_rows);
        failed(device, flight,
               kld_cuda_launch_finish(&args, groups, segment == 0, last, job->geometry.loss_dtype,
                                      flight->result, cuda_stream_of(flight)),
               "launching a kernel");
    }
    flight->next_row = until;
}

static uint64_t segment_end(const struct cuda_flight *flight) {
    uint64_t end = (flight->next_row / flight->segment_rows + 1) * flight->segment_rows;
    return min_u64(end, cuda_plan_rows(flight));
}

/* Is some tensor, of those that go in or of those that come out, in memory that is not pinned? A
 * thread that enqueues a copy of one waits for all that is in the stream before. */
static bool is_pageable(const struct cuda_flight *flight, bool outputs) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if ((flight->slots_staged & (1u << slot)) && kld_slot_is_output(slot) == outputs &&
            !memory_of(flight->job, slot)->base.pinned)
            return true;
    return false;
}

/* The rest of the job comes when that mark has passed, and the stream's later jobs behind it. */
static void put_off(struct cuda_flight *flight, enum cuda_mark until) {
    flight->until = until;
    flight->stream->holder = flight;
}

/* What a chunk has computed, from row `chunk_first` on. */
static void finish_chunk(struct cuda_device *device, struct cuda_flight *flight) {
    const struct kld_job *job = flight->job;
    uint64_t first = flight->chunk_first, rows = flight->next_row - first;
    bool last = flight->next_row == cuda_plan_rows(flight);
    flight->until = MARK_END;
    for (int slot = 0; slot < KLD_SLOT_COUNT && !flight->status; slot++)
        if ((flight->slots_staged & (1u << slot)) && kld_slot_is_output(slot) &&
            (last || cuda_slot_is_tall(job, slot))) /* a scalar loss is known with the last */
            failed(device, flight, cuda_copy_slot(flight, slot, first, rows, true),
                   "copying from the device");
    bool more = !flight->status && !last;
    flight->stream->holder = more ? flight : NULL;
    if (!more)
        record_event(device, flight);
    cuda_job_mark(device, flight, MARK_END);
}

/* The next chunk of a staged job: in, compute, out. */
static void launch_chunk(struct cuda_device *device, struct cuda_flight *flight) {
    uint64_t first = flight->chunk_first = flight->next_row;
    uint64_t until = min_u64(segment_end(flight), first + flight->chunk_rows);
    for (int slot = 0; slot < KLD_SLOT_COUNT && !flight->status; slot++)
        if ((flight->slots_staged & (1u << slot)) && !kld_slot_is_output(slot))
            failed(device, flight, cuda_copy_slot(flight, slot, first, until - first, false),
                   "copying to the device");
    cuda_job_mark(device, flight, MARK_COPIED);
    if (!flight->status)
        launch_rows(device, flight, until);
    cuda_job_mark(device, flight, MARK_COMPUTED);
    if (!flight->status && is_pageable(flight, true))
        put_off(flight, MARK_COMPUTED);
    else
        finish_chunk(device, flight);
}

static void end_failed(struct cuda_device *device, struct cuda_flight *flight) {
    flight->until = MARK_END;
    flight->stream->holder = NULL;
    record_event(device, flight);
    for (int which = MARK_COPIED; which < MARK_COUNT; which++)
        cuda_job_mark(device, flight, (enum cuda_mark)which);
}

static void launch_first_chunk(struct cuda_device *device, struct cuda_flight *flight) {
    if (!flight->status && sums_weights(flight))
        launch_divisor(device, flight);
    if (!flight->status)
        launch_chunk(device, flight);
    else
        end_failed(device, flight);
}

/* Once, as soon as nothing puts the job off any more: each time would be one more thing to wait for
 * in the driver's queue, which has an end. */
static void enter(struct cuda_device *device, struct cuda_flight *flight) {
    failed(device, flight, cuda_stream_enter(flight), "ordering two streams");
}

/* Is there, in its stream, what an enqueued copy would have to wait for? */
static bool has_work_before(const struct cuda_flight *flight) {
    return flight->job->wait || flight->stream->newest || flight->stream->adopted;
}

static bool start_staged(struct cuda_device *device, struct cuda_flight *flight) {
    struct kld_job *job = flight->job;
    if (!reserve_staging(device, flight)) {
        if (others_staged(device, flight))
            return false;
        flight->status = kld_error_set(
            &job->error, KLD_NO_MEMORY,
            "a row of tensors in host memory does not fit what is free of the device pool");
    }
    cudaError_t error = flight->status ? cudaSuccess : cuda_staging_allocate(device, flight);
    if (error == cudaErrorMemoryAllocation && atomic_load(&device->kept_bytes)) {
        cudaGetLastError(); /* the card is full, and not the pool: others have the rest of it */
        cuda_staging_forget(device);
        error = cuda_staging_allocate(device, flight);
    }
    if (error == cudaErrorMemoryAllocation && cuda_now_ns() < device->heir_until_ns) {
        cudaGetLastError();
        cuda_staging_release(device, flight);
        return false; /* a lost predecessor's memory, maybe: see cuda_heir_waits() */
    }
    failed(device, flight, error, "allocating device memory");
    enter(device, flight);
    if (!flight->status)
        wait_for_event(device, flight);
    cuda_job_mark(device, flight, MARK_START);
    if (flight->status)
        end_failed(device, flight);
    else if (is_pageable(flight, false) && has_work_before(flight))
        put_off(flight, MARK_START);
    else
        launch_first_chunk(device, flight);
    return true;
}

static void start_copy(struct cuda_device *device, struct cuda_flight *flight) {
    struct kld_job *job = flight->job;
    cuda_job_mark(device, flight, MARK_START);
    if (!flight->status) /* else it may come before what it is to come behind */
        failed(device, flight,
               cudaMemcpyAsync(cuda_address_of(&job->copy_to), cuda_address_of(&job->copy_from),
                               job->copy_bytes, cudaMemcpyDefault, cuda_stream_of(flight)),
               "copying");
    cuda_job_mark(device, flight, MARK_END);
}

static uint64_t bytes_of(const struct kld_job *job) {
    uint64_t bytes = 0;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        bytes += job->geometry.slot[slot].rows * job->geometry.slot[slot].row_bytes;
    return bytes;
}

bool cuda_job_start(struct cuda_device *device, struct cuda_flight *flight) {
    struct kld_job *job = flight->job;
    flight->status = KLD_OK;
    flight->staged = false;
    flight->until = MARK_END;
    flight->unmarked = false;
    flight->next_row = 0;
    flight->staging = NULL;
    flight->staging_bytes = 0;
    job->status = job->error.status = KLD_OK;
    job->error.text[0] = 0;
    job->loss = 0;
    job->copy_ns = job->kernel_ns = 0;
    job->launch_ns = cuda_now_ns();
    job->bytes = job->kind == KLD_JOB_COPY ? job->copy_bytes : bytes_of(job);
    cuda_stream_choose(flight, job->bytes);
    if (failed(device, flight, cuda_stream_captured(flight), "running in a captured stream")) {
        flight->until = MARK_COUNT;
        return true;
    }
    if (job->kind == KLD_JOB_COPY) {
        enter(device, flight);
        start_copy(device, flight);
        return true;
    }
    cuda_plan_args(device, flight);
    plan_slots(flight);
    plan_sums(flight);
    if (flight->staged)
        return start_staged(device, flight);
    enter(device, flight);
    wait_for_event(device, flight);
    cuda_job_mark(device, flight, MARK_START);
    if (!flight->status && sums_weights(flight))
        launch_divisor(device, flight);
    while (!flight->status && flight->next_row < cuda_plan_rows(flight))
        launch_rows(device, flight, segment_end(flight));
    record_event(device, flight);
    cuda_job_mark(device, flight, MARK_END);
    return true;
}

/* ---- completion -------------------------------------------------------------------------------
 */

static uint64_t between_ns(const struct cuda_flight *flight, enum cuda_mark from,
                           enum cuda_mark until) {
    float ms = 0;
    if (cudaEventElapsedTime(&ms, flight->mark[from], flight->mark[until]) != cudaSuccess)
        cudaGetLastError();
    return ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;
}

static void add_times(struct cuda_flight *flight) {
    struct kld_job *job = flight->job;
    if (job->kind == KLD_JOB_COPY) {
        job->copy_ns = between_ns(flight, MARK_START, MARK_END);
    } else if (!flight->staged) {
        job->kernel_ns = between_ns(flight, MARK_START, MARK_END);
    } else {
        job->copy_ns += between_ns(flight, MARK_START, MARK_COPIED) +
                        between_ns(flight, MARK_COMPUTED, MARK_END);
        job->kernel_ns += between_ns(flight, MARK_COPIED, MARK_COMPUTED);
    }
}

static double loss_of(const struct cuda_flight *flight) {
    if (!flight->sums_count)
        return *flight->result;
    double value = total_of(flight) / flight->args.divisor;
    return flight->job->geometry.loss_dtype == KLD_DTYPE_FP32 ? (double)(float)value : value;
}

bool cuda_job_advance(struct cuda_device *device, struct cuda_flight *flight) {
    struct kld_job *job = flight->job;
    if (flight->until == MARK_START) {
        launch_first_chunk(device, flight);
        return false;
    }
    if (flight->until == MARK_COMPUTED) {
        finish_chunk(device, flight);
        return false;
    }
    if (flight->until < MARK_COUNT)
        add_times(flight);
    if (job->kind == KLD_JOB_OP && flight->staged && !flight->status &&
        flight->next_row < cuda_plan_rows(flight)) {
        cuda_job_mark(device, flight, MARK_START);
        launch_chunk(device, flight);
        return false;
    }
    cuda_staging_release(device, flight);
    job->status = flight->status;
    if (job->kind == KLD_JOB_OP && !flight->status && job->geometry.scalar)
        job->loss = loss_of(flight);
    return true;
}

void cuda_job_lose(struct cuda_device *device, struct cuda_flight *flight) {
    cuda_staging_release(device, flight);
    flight->job->status =
        kld_error_set(&flight->job->error, KLD_DEVICE_LOST, "%s", kld_status_text(KLD_DEVICE_LOST));
}
