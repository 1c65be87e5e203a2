/* admit.c - from a SUBMIT or COPY frame to a request: decoded, checked, its regions and events
 * found and pinned. Writes no request's state (core.c does). Worker process, loop thread. */
#include <inttypes.h>

#include "server/worker/core.h"
#include "server/worker/event.h"

/* An attached region's memory is its owner's: that is what must stay. */
static void pin(struct kld_request *request, struct kld_region *region) {
    struct kld_region *owner = kld_worker_region_owner(region);
    kld_worker_region_acquire(owner);
    request->regions[request->regions_count++] = owner;
}

static struct kld_place place_in(const struct kld_region *region, uint64_t offset) {
    return (struct kld_place){.memory = region->memory,
                              .offset_bytes = region->memory_offset + offset};
}

/* The same op, with each tensor named by its memory instead of by its region: two regions may show
 * the same bytes, and kld_op_check() is to see that. */
static enum kld_status to_spaces(struct kld_op *op, struct kld_region *const *regions,
                                 struct kld_error *err) {
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!regions[slot])
            continue;
        op->tensor[slot].region = regions[slot]->space;
        if (__builtin_add_overflow(op->tensor[slot].offset_bytes, regions[slot]->space_offset,
                                   &op->tensor[slot].offset_bytes))
            return kld_error_set(err, KLD_INVALID, "%s: offset overflows 64 bits",
                                 kld_slot_name(slot));
    }
    return KLD_OK;
}

/* An element that is not aligned where it lies would be a fault of the device. */
static enum kld_status check_use(const struct kld_op *op, uint32_t slot,
                                 const struct kld_region *region, struct kld_error *err) {
    uint64_t element = kld_dtype_bytes(op->tensor[slot].dtype);
    if ((region->space_offset % element + op->tensor[slot].offset_bytes % element) % element != 0)
        return kld_error_set(err, KLD_INVALID,
                             "%s: its region does not begin at a multiple of the tensor's %u-byte "
                             "element",
                             kld_slot_name(slot), (unsigned)element);
    if (region->attached && kld_slot_is_output(slot))
        return kld_error_set(err, KLD_FORBIDDEN,
                             "%s: its region was attached; that can be read, not written",
                             kld_slot_name(slot));
    return KLD_OK;
}

static enum kld_status look_up(struct kld_session *session, struct kld_op *op,
                               struct kld_geometry *geometry, struct kld_region **regions,
                               struct kld_error *err) {
    enum kld_status status;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        regions[slot] = NULL;
        if (op->tensor[slot].dtype == KLD_DTYPE_ABSENT)
            continue;
        regions[slot] =
            kld_worker_region_find(session, op->tensor[slot].region, kld_slot_name(slot), err);
        if (!regions[slot])
            return err->status;
        if ((status = kld_op_check_bounds(op, geometry, (enum kld_slot)slot, regions[slot]->bytes,
                                          err)) ||
            (status = check_use(op, slot, regions[slot], err)))
            return status;
    }
    if (!session->aliased)
        return KLD_OK;
    if ((status = to_spaces(op, regions, err)))
        return status;
    return kld_op_check(op, geometry, err);
}

static enum kld_status check_early(const struct kld_worker *worker,
                                   struct kld_region *const *regions, struct kld_error *err) {
    if (!worker->device->info.imports_cuda_ipc)
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "EARLY needs the cuda back end; this server runs on %s",
                             worker->device->info.backend);
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (regions[slot] && regions[slot]->kind == KLD_REGION_MEMFD)
            return kld_error_set(err, KLD_INVALID,
                                 "%s: lies in host memory; EARLY expects every tensor on the "
                                 "device",
                                 kld_slot_name(slot));
    return KLD_OK;
}

/* The events that the frame names, if it does. */
static enum kld_status find_events(struct kld_session *session,
                                   const struct kld_frame_submit *frame,
                                   struct kld_worker_event **ret_ready,
                                   struct kld_worker_event **ret_finished, struct kld_error *err) {
    *ret_ready = *ret_finished = NULL;
    if (frame->ready_event &&
        !(*ret_ready = kld_worker_event_find(session, frame->ready_event, KLD_EVENT_READY, 0, err)))
        return err->status;
    if (frame->done_event && !(*ret_finished = kld_worker_event_find(
                                   session, frame->done_event, KLD_EVENT_DONE, frame->stream, err)))
        return err->status;
    return KLD_OK;
}

static void pin_events(struct kld_request *request, struct kld_worker_event *ready,
                       struct kld_worker_event *finished) {
    request->ready = ready;
    request->finished = finished;
    if (ready)
        kld_worker_event_acquire(ready);
    if (finished)
        kld_worker_event_acquire(finished);
}

enum kld_status kld_core_submit(struct kld_session *session, const struct kld_frame_submit *frame,
                                struct kld_error *err) {
    struct kld_op op;
    struct kld_geometry geometry;
    struct kld_region *regions[KLD_SLOT_COUNT];
    struct kld_worker_event *ready, *finished;
    uint64_t offsets[KLD_SLOT_COUNT];
    struct kld_request *request = NULL;
    bool early = frame->flags & KLD_SUBMIT_EARLY;
    enum kld_status status;
    bool traced = session->trace_target == frame->header.request;
    session->trace_target = 0; /* whatever comes of this one: a number may be used again */
    if ((status = kld_submit_decode(frame, &op, err)) ||
        (status = kld_op_check(&op, &geometry, err)))
        return status;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++)
        offsets[slot] = op.tensor[slot].offset_bytes;
    if ((status = look_up(session, &op, &geometry, regions, err)) ||
        (early && (status = check_early(session->worker, regions, err))) ||
        (status = find_events(session, frame, &ready, &finished, err)) ||
        (status = kld_core_admit(session, frame->header.request, frame->stream, &request, err)))
        return status;
    request->early = early;
    if (traced)
        request->trace = session->trace;
    pin_events(request, ready, finished);
    request->job.record_number = finished ? kld_worker_event_count(finished, frame->stream) : 0;
    request->job.kind = KLD_JOB_OP;
    request->job.op = op;
    request->job.geometry = geometry;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        request->job.place[slot] = (struct kld_place){0};
        if (!regions[slot])
            continue;
        pin(request, regions[slot]);
        request->job.place[slot] = place_in(regions[slot], offsets[slot]);
    }
    kld_core_enter(request, frame->timeout_ns);
    return KLD_OK;
}

static enum kld_status copy_bounds(const struct kld_region *region, const char *what,
                                   uint64_t offset, uint64_t bytes, struct kld_error *err) {
    if (offset > region->bytes || bytes > region->bytes - offset)
        return kld_error_set(err, KLD_INVALID,
                             "%s: %" PRIu64 " bytes at offset %" PRIu64
                             " do not fit a region of %" PRIu64 " bytes",
                             what, bytes, offset, region->bytes);
    return KLD_OK;
}

enum kld_status kld_core_copy(struct kld_session *session, const struct kld_frame_copy *frame,
                              struct kld_error *err) {
    struct kld_request *request = NULL;
    enum kld_status status;
    if (frame->reserved != 0)
        return kld_error_set(err, KLD_INVALID, "COPY: reserved field is not 0");
    if (frame->bytes == 0)
        return kld_error_set(err, KLD_INVALID, "COPY of 0 bytes; expected at least 1");
    struct kld_region *to = kld_worker_region_find(session, frame->destination, "destination", err);
    struct kld_region *from =
        to ? kld_worker_region_find(session, frame->source, "source", err) : NULL;
    if (!from)
        return err->status;
    if (to->attached)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "destination: its region was attached; that can be read, not written");
    uint64_t to_offset = frame->destination_offset_bytes, from_offset = frame->source_offset_bytes;
    if ((status = copy_bounds(to, "destination", to_offset, frame->bytes, err)) ||
        (status = copy_bounds(from, "source", from_offset, frame->bytes, err)))
        return status;
    /* Offsets in the space cannot overflow: regions lie inside their allocations. */
    uint64_t to_first = to->space_offset + to_offset, from_first = from->space_offset + from_offset;
    if (to->space == from->space && to_first < from_first + frame->bytes &&
        from_first < to_first + frame->bytes)
        return kld_error_set(err, KLD_INVALID, "source and destination of a COPY overlap");
    if ((status = kld_core_admit(session, frame->header.request, frame->stream, &request, err)))
        return status;
    request->job.kind = KLD_JOB_COPY;
    request->job.record_number = 0;
    request->job.copy_to = place_in(to, to_offset);
    request->job.copy_from = place_in(from, from_offset);
    request->job.copy_bytes = frame->bytes;
    pin(request, to);
    pin(request, from);
    kld_core_enter(request, 0);
    return KLD_OK;
}
