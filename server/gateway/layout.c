/* layout.c - finds memory for an infer request: a piece of staging for all its tensors and the
 * reply's JSON, or, where that is more than its share, a buffer on the device for the large ones.
 * Requests that find staging full wait (wait.h) with their connections not read (infer.h).
 * Loop thread. */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "server/gateway/infer.h"
#include "server/gateway/regions.h"
#include "server/gateway/shm.h"
#include "server/gateway/staging.h"
#include "server/gateway/tensors.h"

#define PIECE_BYTES_MAX ((uint64_t)4 << 20)
#define PIECE_BYTES_MIN ((uint64_t)64 << 10)
#define BUFFER_ALIGN 256

/* ---- Waiting ----------------------------------------------------------------------------------*/

static struct kld_infer *infer_of(struct kld_waiter *waiter) {
    return (struct kld_infer *)(void *)((char *)waiter - offsetof(struct kld_infer, waiter));
}

static void ask_again(struct kld_waiter *waiter) {
    struct kld_infer *infer = infer_of(waiter);
    infer->retry(infer);
}

static void waited_too_long(struct kld_waiter *waiter) {
    struct kld_error error;
    kld_stats_rejected(infer_of(waiter)->gateway->stats, KLD_REJECT_http_staging_full);
    kld_error_set(&error, KLD_BUSY, "the staging memory was in use until the deadline; try again");
    kld_infer_fail(infer_of(waiter), &error);
}

void kld_infer_wait(struct kld_infer *infer, void (*retry)(struct kld_infer *infer)) {
    kld_exchange_pause(infer->exchange);
    infer->retry = retry;
    infer->waiter.retry = ask_again;
    infer->waiter.late = waited_too_long;
    kld_waiter_add(infer->gateway, &infer->waiter, kld_infer_late_ns(infer, KLD_LATE_MEMORY));
}

/* ---- Memory -----------------------------------------------------------------------------------*/

/* His client's pace is measured by it (watch.h). */
static void show_held(const struct kld_infer *infer) {
    infer->exchange->held_bytes = infer->held_bytes;
    infer->exchange->held_pool_bytes = infer->held_buffer_bytes;
    infer->exchange->held_pool = infer->pieces.pool;
}

/* turn: NULL for who does not wait. Nothing is counted for the caller that he does not get: another
 * loop must not refuse because of it. */
static enum kld_status take(struct kld_infer *infer, struct kld_staging_turn *turn, uint64_t bytes,
                            bool json, uint64_t *ret_offset, struct kld_error *err) {
    struct kld_gateway *gateway = infer->gateway;
    enum kld_status status = kld_auth_check_bytes(gateway->auth, infer->caller, bytes, err);
    if (status)
        return status;
    status = turn ? kld_staging_take(gateway->staging, turn, bytes, json, ret_offset, err)
                  : kld_staging_alloc(gateway->staging, bytes, ret_offset, err);
    if (!status && (status = kld_auth_take_bytes(gateway->auth, infer->caller, bytes, err)))
        kld_staging_free(gateway->staging, *ret_offset);
    if (!status)
        infer->held_bytes += bytes;
    if (!infer->in_pool)
        show_held(infer);
    return status;
}

enum kld_status kld_infer_alloc(struct kld_infer *infer, uint64_t bytes, bool json,
                                uint64_t *ret_offset, struct kld_error *err) {
    infer->waiter.turn.share = &infer->caller->staged;
    infer->waiter.turn.capped = kld_auth_has_several(infer->gateway->auth);
    return take(infer, &infer->waiter.turn, bytes, json, ret_offset, err);
}

enum kld_status kld_infer_alloc_now(struct kld_infer *infer, uint64_t bytes, uint64_t *ret_offset,
                                    struct kld_error *err) {
    return take(infer, NULL, bytes, false, ret_offset, err);
}

void kld_infer_give(struct kld_infer *infer, uint64_t offset, uint64_t bytes) {
    kld_staging_free(infer->gateway->staging, offset);
    kld_auth_give_bytes(infer->caller, bytes);
    infer->held_bytes -= bytes;
    show_held(infer);
}

static uint64_t aligned(uint64_t bytes, uint64_t align) {
    return (bytes + align - 1) & ~(align - 1);
}

/* Of the staging memory, what one request may have; at most half, so that two fit. */
static uint64_t share_of(const struct kld_gateway *gateway) {
    uint64_t half = kld_staging_range_bytes_max(gateway->staging) / 2;
    uint64_t share = gateway->config->staging_request_bytes_max;
    return share < half ? share : half;
}

uint64_t kld_infer_piece_bytes(const struct kld_gateway *gateway) {
    uint64_t bytes = aligned(share_of(gateway) / (2 * KLD_PIECES), KLD_STAGING_ALIGN);
    return bytes > PIECE_BYTES_MAX   ? PIECE_BYTES_MAX
           : bytes < PIECE_BYTES_MIN ? PIECE_BYTES_MIN
                                     : bytes;
}

/* Each tensor at its own alignment, in staging or, of a bulk request, in the buffer. Sums of at
 * most nine tensors of 2^43 bytes. */
static void place(struct kld_infer *infer) {
    uint64_t staging = 0, buffer = 0;
    for (uint32_t i = 0; i < kld_infer_tensors(infer); i++) {
        const struct kld_oip_tensor *tensor = kld_infer_tensor(infer, i);
        if (infer->held[i])
            continue;
        infer->in_buffer[i] =
            infer->bulk && tensor->where != KLD_OIP_JSON && tensor->bytes > KLD_INFER_SMALL_BYTES;
        uint64_t *total = infer->in_buffer[i] ? &buffer : &staging;
        infer->place[i] = *total;
        *total += aligned(tensor->bytes, infer->in_buffer[i] ? BUFFER_ALIGN : KLD_STAGING_ALIGN);
    }
    if (buffer)
        staging += KLD_PIECES * kld_infer_piece_bytes(infer->gateway);
    infer->tensors_bytes = staging;
    infer->buffer_bytes = buffer;
}

/* All of a request that lies on a device lies on one, where it is computed. */
static enum kld_status hold(struct kld_infer *infer, uint32_t index, struct kld_pool_buffer *buffer,
                            struct kld_error *err) {
    const struct kld_oip_request *request = &infer->request;
    infer->held[index] = infer->buffer_of[index] = buffer;
    if ((infer->uses_buffers && infer->pieces.pool != buffer->pool) ||
        (request->has_device && request->device != kld_pool_index(buffer->pool)))
        return kld_error_set(
            err, KLD_INVALID, "%s lies on device %u, and the request asks for another one",
            kld_slot_name(kld_infer_tensor(infer, index)->slot), kld_pool_index(buffer->pool));
    infer->uses_buffers = true;
    infer->pieces.pool = buffer->pool;
    return KLD_OK;
}

static enum kld_status hold_stored(struct kld_infer *infer, uint32_t index, struct kld_error *err) {
    struct kld_pool_buffer *buffer;
    enum kld_status status = kld_tensors_acquire(infer->gateway->tensors, infer->caller,
                                                 &infer->request.input[index], &buffer, err);
    return status ? status : hold(infer, index, buffer, err);
}

/* CUDA memory is where the device reads it; other shared memory is read and written here. */
static enum kld_status hold_region(struct kld_infer *infer, uint32_t index, struct kld_error *err) {
    const struct kld_oip_tensor *tensor = kld_infer_tensor(infer, index);
    struct kld_region_use use;
    enum kld_status status =
        kld_regions_acquire(infer->gateway->regions, infer->caller, tensor->region,
                            tensor->region_offset_bytes, tensor->bytes, &use, err);
    if (status)
        return status;
    infer->region[index] = use.object;
    infer->place[index] = tensor->region_offset_bytes;
    return use.buffer ? hold(infer, index, use.buffer, err) : KLD_OK;
}

/* The first tensor that lies in the same shared memory; index itself where there is none before. */
static uint32_t first_beside(const struct kld_infer *infer, uint32_t index) {
    uint32_t first = 0;
    while (first < index &&
           !(infer->region[first] && kld_shm_is_same(infer->region[first], infer->region[index])))
        first++;
    return first;
}

/* The parser knows names alone (oip.c); here one object that was registered under two is one place,
 * and the same is refused. CUDA memory under two names the worker knows by its handle. */
static enum kld_status check_objects(struct kld_infer *infer, struct kld_error *err) {
    struct kld_op *op = &infer->request.op;
    struct kld_geometry geometry;
    enum kld_status status = KLD_OK;
    uint32_t tensors = kld_infer_tensors(infer);
    bool renamed = false;
    for (uint32_t i = 1; i < tensors && !renamed; i++)
        renamed = infer->region[i] && infer->region[first_beside(infer, i)] != infer->region[i];
    if (!renamed)
        return KLD_OK;
    for (uint32_t i = 0; i < tensors; i++) {
        const struct kld_oip_tensor *tensor = kld_infer_tensor(infer, i);
        op->tensor[tensor->slot].region = 1 + (infer->region[i] ? first_beside(infer, i) : i);
        if (infer->region[i])
            op->tensor[tensor->slot].offset_bytes =
                kld_shm_offset(infer->region[i]) + tensor->region_offset_bytes;
    }
    status = kld_op_check(op, &geometry, err);
    for (uint32_t i = 0; i < tensors; i++)
        op->tensor[kld_infer_tensor(infer, i)->slot].region =
            op->tensor[kld_infer_tensor(infer, i)->slot].offset_bytes = 0;
    return status;
}

static enum kld_status hold_regions(struct kld_infer *infer, struct kld_error *err) {
    struct kld_gateway *gateway = infer->gateway;
    uint64_t json_max = gateway->config->json_bytes_max + 4096;
    if (infer->request.has_device && infer->request.device >= kld_links_count(gateway->links))
        return kld_error_set(err, KLD_INVALID,
                             "parameter 'device' is %" PRIu64
                             "; this server has %u, numbered from 0",
                             infer->request.device, kld_links_count(gateway->links));
    for (uint32_t i = 0; i < kld_infer_tensors(infer); i++) {
        const struct kld_oip_tensor *tensor = kld_infer_tensor(infer, i);
        bool output = i >= infer->request.input_count;
        enum kld_status status;
        if (!output && tensor->where == KLD_OIP_JSON &&
            (status = kld_oip_check_length(tensor, err)))
            return status;
        if (output && tensor->where == KLD_OIP_JSON && tensor->elements > json_max / 2)
            return kld_error_set(err, KLD_TOO_LARGE,
                                 "%s as JSON would have more than %" PRIu64
                                 " bytes (json_bytes_max); ask for it with binary_data",
                                 kld_slot_name(tensor->slot), gateway->config->json_bytes_max);
        if (tensor->where == KLD_OIP_REGION && (status = hold_region(infer, i, err)))
            return status;
        if (tensor->where == KLD_OIP_STORED && (status = hold_stored(infer, i, err)))
            return status;
    }
    return check_objects(infer, err);
}

static void opened(struct kld_pool_job *job) {
    struct kld_infer *infer =
        (struct kld_infer *)(void *)((char *)job - offsetof(struct kld_infer, job));
    kld_infer_arrived(infer);
    infer->in_worker = false;
    infer->buffer = job->buffer;
    if (!infer->exchange || infer->exchange->replied) {
        kld_infer_let_go(infer);
    } else if (job->status) {
        kld_infer_fail(infer, &job->error);
    } else {
        for (uint32_t i = 0; i < kld_infer_tensors(infer); i++)
            if (infer->in_buffer[i])
                infer->buffer_of[i] = infer->buffer;
        kld_bulk_begin(infer);
        kld_infer_laid_out(infer);
    }
}

static void open_buffer(struct kld_infer *infer) {
    struct kld_gateway *gateway = infer->gateway;
    struct kld_error error;
    if (kld_auth_take_buffer(gateway->auth, infer->caller, infer->buffer_bytes, &error)) {
        kld_infer_fail(infer, &error);
        return;
    }
    if (!infer->pieces.pool) /* else that of its stored tensors */
        infer->pieces.pool = infer->request.has_device ? gateway->pool[infer->request.device]
                                                       : kld_pool_choose(gateway);
    infer->held_buffer_bytes = infer->buffer_bytes;
    show_held(infer);
    infer->pieces.staging_offset =
        infer->tensors_offset + infer->tensors_bytes - KLD_PIECES * kld_infer_piece_bytes(gateway);
    infer->pieces.piece_bytes = kld_infer_piece_bytes(gateway);
    memset(&infer->job, 0, sizeof infer->job);
    infer->job.kind = KLD_POOL_OPEN;
    infer->job.bytes = infer->buffer_bytes;
    infer->job.owner = kld_auth_has_several(gateway->auth) ? infer->caller : NULL;
    infer->job.done = opened;
    infer->in_worker = true;
    kld_exchange_pause(infer->exchange);
    kld_infer_await(infer, KLD_LATE_MEMORY);
    kld_pool_submit(infer->pieces.pool, &gateway->mail, &infer->job);
}

static void take_staging(struct kld_infer *infer) {
    struct kld_gateway *gateway = infer->gateway;
    uint64_t reply = kld_oip_reply_bytes_max(&infer->request);
    uint64_t json_max = gateway->config->json_bytes_max + 4096;
    struct kld_error error;
    reply = reply < json_max ? reply : json_max;
    enum kld_status status =
        kld_infer_alloc(infer, infer->tensors_bytes + reply, false, &infer->tensors_offset, &error);
    if (status == KLD_BUSY) {
        kld_infer_wait(infer, take_staging);
        return;
    }
    kld_staging_leave(gateway->staging, &infer->waiter.turn);
    kld_waiter_remove(infer->gateway, &infer->waiter);
    if (status) {
        kld_infer_fail(infer, &error);
        return;
    }
    infer->has_tensors = true;
    for (uint32_t i = 0; i < kld_infer_tensors(infer); i++)
        if (!infer->buffer_of[i] && !infer->in_buffer[i])
            infer->place[i] += infer->tensors_offset;
    infer->reply.data =
        kld_staging_at(gateway->staging, infer->tensors_offset + infer->tensors_bytes);
    infer->reply.capacity = reply;
    if (infer->buffer_bytes)
        open_buffer(infer);
    else
        kld_infer_laid_out(infer);
}

void kld_infer_lay_out(struct kld_infer *infer) {
    struct kld_error error;
    if (kld_body_check(infer, &error) || hold_regions(infer, &error)) {
        kld_infer_fail(infer, &error);
        return;
    }
    place(infer);
    if (infer->tensors_bytes > share_of(infer->gateway)) {
        infer->bulk = true;
        place(infer);
        infer->bulk = infer->buffer_bytes > 0; /* no pieces travel where all is JSON */
    }
    infer->uses_buffers = infer->uses_buffers || infer->buffer_bytes > 0;
    take_staging(infer);
}
