/* check.c - the checks that a request of any kind of connection goes through before it is sent.
 * Reads no tensor. The thread that owns the connection. */
#include <string.h>

#include "client/connection.h"

/* Where one memfd was imported twice, a request sees it in one place: in the largest of the regions
 * that it names, so that what overlaps is seen, and what lies exactly over its own tensor. */
static const struct kld_region *place_of(const struct kld_request *request,
                                         const struct kld_region *region) {
    const struct kld_region *largest = region;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT && region->inode; slot++) {
        const struct kld_region *other = request->bytes[slot].region;
        if (request->op.tensor[slot].dtype && other && kld_region_is_same(other, region) &&
            (other->bytes > largest->bytes ||
             (other->bytes == largest->bytes && other->local_id < largest->local_id)))
            largest = other;
    }
    return largest;
}

/* Puts each tensor where the checks can compare it: host memory as addresses (region 0), the rest
 * by region. */
static enum kld_status place_tensors(struct kld_connection *connection, struct kld_request *request,
                                     struct kld_error *err) {
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        struct kld_tensor *tensor = &request->op.tensor[slot];
        struct kld_bytes *bytes = &request->bytes[slot];
        tensor->region = tensor->offset_bytes = 0;
        if (tensor->dtype == KLD_DTYPE_ABSENT) {
            memset(bytes, 0, sizeof *bytes);
            continue;
        }
        if (!bytes->data == !bytes->region)
            return kld_error_set(err, KLD_INVALID, "%s: %s; expected either data or a region",
                                 kld_slot_name(slot),
                                 bytes->data ? "both data and a region" : "no memory given");
        if (bytes->data) {
            tensor->offset_bytes = (uint64_t)(uintptr_t)bytes->data;
            continue;
        }
        if (bytes->region->connection != connection || bytes->region->dropped)
            return kld_error_set(err, KLD_INVALID, "%s: the region %s", kld_slot_name(slot),
                                 bytes->region->connection != connection
                                     ? "belongs to another connection"
                                     : "was dropped");
        uint64_t end;
        if (__builtin_add_overflow(bytes->offset_bytes, bytes->region->bytes, &end))
            return kld_error_set(err, KLD_INVALID, "%s: offset beyond the region",
                                 kld_slot_name(slot));
        const struct kld_region *place = place_of(request, bytes->region);
        tensor->region = place->data ? 0 : place->local_id;
        tensor->offset_bytes = (uint64_t)(uintptr_t)place->data + bytes->offset_bytes;
    }
    return KLD_OK;
}

static enum kld_status check_bounds(const struct kld_request *request,
                                    const struct kld_geometry *geometry, struct kld_error *err) {
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_bytes *bytes = &request->bytes[slot];
        if (request->op.tensor[slot].dtype == KLD_DTYPE_ABSENT)
            continue;
        /* The check's own text would show the address. */
        uint32_t element = kld_dtype_bytes(request->op.tensor[slot].dtype);
        if ((uintptr_t)bytes->data % element != 0)
            return kld_error_set(err, KLD_INVALID,
                                 "%s: its data is not aligned; expected a multiple of its "
                                 "%u-byte element",
                                 kld_slot_name(slot), element);
        struct kld_op op = request->op;
        op.tensor[slot].offset_bytes =
            bytes->region ? bytes->offset_bytes : (uint64_t)(uintptr_t)bytes->data;
        enum kld_status status =
            kld_op_check_bounds(&op, geometry, (enum kld_slot)slot,
                                bytes->region ? bytes->region->bytes : UINT64_MAX, err);
        if (status)
            return status;
    }
    return KLD_OK;
}

static enum kld_status check_events(const struct kld_connection *connection,
                                    const struct kld_request *request, struct kld_error *err) {
    const struct kld_event *events[] = {request->wait, request->record};
    bool here = connection->transport->runs_here;
    if ((request->wait || request->record || (request->early && !here)) &&
        !connection->transport->event_bytes)
        return kld_unimplemented(connection, here ? "events" : "events and early answers", err);
    if (here)
        return KLD_OK;
    for (int i = 0; i < 2; i++)
        if (events[i] && (events[i]->connection != connection || events[i]->dropped))
            return kld_error_set(err, KLD_INVALID, "%s: the event %s", i ? "record" : "wait",
                                 events[i]->dropped ? "was dropped"
                                                    : "belongs to another connection");
    if (request->early && !request->record)
        return kld_error_set(err, KLD_INVALID,
                             "early without record; an early answer says nothing about a device "
                             "that fails later, expected a done event of kld_event_create(), which "
                             "is lost with it");
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (request->early && request->bytes[slot].data)
            return kld_error_set(err, KLD_INVALID,
                                 "%s: plain memory; with an early answer every tensor lies in a "
                                 "region of device memory",
                                 kld_slot_name(slot));
    return KLD_OK;
}

enum kld_status kld_call_check(struct kld_connection *connection, struct kld_call *call,
                               struct kld_error *err) {
    enum kld_status status = place_tensors(connection, &call->request, err);
    if (!status)
        status = kld_op_check(&call->request.op, &call->geometry, err);
    if (!status)
        status = check_bounds(&call->request, &call->geometry, err);
    if (!status)
        status = check_events(connection, &call->request, err);
    return status;
}
