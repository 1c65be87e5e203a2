/* share.c - what processes share through a server: the public functions of published tensors, of a
 * GPU's events, of priorities, and of CUDA allocations that come as descriptors. What goes over the
 * wire is the transport's (unix_share.c, unix_event.c). The thread that owns the connection. */
#include <stdlib.h>
#include <string.h>

#include "client/connection.h"
#include "proto/wire.h"

static enum kld_status check_name(const char *name, struct kld_error *err) {
    size_t length = name ? strlen(name) : 0;
    bool good = length > 0 && length < KLD_TENSOR_NAME_MAX;
    for (size_t i = 0; i < length && good; i++)
        good = name[i] > ' ' && name[i] <= '~';
    return good ? KLD_OK
                : kld_error_set(err, KLD_INVALID,
                                "the name of a tensor is 1 to %d letters from '!' to '~'",
                                KLD_TENSOR_NAME_MAX - 1);
}

enum kld_status kld_region_import_cuda_fd(struct kld_connection *connection, int fd,
                                          const uint8_t device_uuid[16], uint64_t base_bytes,
                                          uint64_t offset_bytes, uint64_t bytes,
                                          struct kld_region **ret_region, struct kld_error *err) {
    if (!connection->transport->region_import_cuda_fd)
        return kld_unimplemented(connection, "CUDA allocations", err);
    if (offset_bytes > base_bytes || bytes > base_bytes - offset_bytes)
        return kld_error_set(err, KLD_INVALID, "the region does not lie inside its allocation");
    struct kld_ipc_source source = {
        .device_uuid = device_uuid, .base_bytes = base_bytes, .offset_bytes = offset_bytes};
    struct kld_region *region = NULL;
    enum kld_status status = kld_region_open(connection, bytes, &region, err);
    return status ? status
                  : kld_region_made(
                        connection->transport->region_import_cuda_fd(region, fd, &source, err),
                        region, ret_region);
}

enum kld_status kld_region_reserve_cuda(struct kld_connection *connection,
                                        const uint8_t device_uuid[16], uint64_t bytes,
                                        struct kld_region **ret_region, struct kld_error *err) {
    if (!connection->transport->region_reserve_cuda)
        return kld_unimplemented(connection, "regions in pieces", err);
    struct kld_region *region = NULL;
    enum kld_status status = kld_region_open(connection, bytes, &region, err);
    return status ? status
                  : kld_region_made(
                        connection->transport->region_reserve_cuda(region, device_uuid, err),
                        region, ret_region);
}

enum kld_status kld_region_grow_cuda_fd(struct kld_region *region, int fd, uint64_t bytes,
                                        struct kld_error *err) {
    const struct kld_transport *transport = region->connection->transport;
    if (!transport->region_grow_cuda_fd)
        return kld_unimplemented(region->connection, "regions in pieces", err);
    if (region->dropped)
        return kld_error_set(err, KLD_INVALID, "the region was dropped");
    return transport->region_grow_cuda_fd(region, fd, bytes, err);
}

/* ---- Published tensors ---------------------------------------------------------------------- */

enum kld_status kld_publish(struct kld_connection *connection, const char *name,
                            struct kld_region *region, const struct kld_tensor_view *tensor,
                            const uint32_t *uids, uint32_t uids_count, struct kld_error *err) {
    if (!connection->transport->publish)
        return kld_unimplemented(connection, "published tensors", err);
    enum kld_status status = check_name(name, err);
    if (status)
        return status;
    if (!region || region->connection != connection || region->dropped)
        return kld_error_set(err, KLD_INVALID,
                             "a tensor is published in a region of its own "
                             "connection");
    return connection->transport->publish(region, name, tensor, uids, uids_count, err);
}

enum kld_status kld_published(struct kld_connection *connection, const char *name,
                              struct kld_error *err) {
    if (!connection->transport->published)
        return kld_unimplemented(connection, "published tensors", err);
    enum kld_status status = check_name(name, err);
    return status ? status : connection->transport->published(connection, name, err);
}

enum kld_status kld_detach(struct kld_connection *connection, const char *name,
                           struct kld_error *err) {
    if (!connection->transport->detach)
        return kld_unimplemented(connection, "published tensors", err);
    enum kld_status status = check_name(name, err);
    return status ? status : connection->transport->detach(connection, name, err);
}

static enum kld_status attach(struct kld_connection *connection, uint32_t uid, const char *name,
                              uint64_t timeout_ns, struct kld_region **ret_region,
                              struct kld_tensor_view *ret_tensor, struct kld_error *err) {
    if (!connection->transport->region_attach)
        return kld_unimplemented(connection, "published tensors", err);
    struct kld_region *region = NULL;
    enum kld_status status = check_name(name, err);
    if (!status) /* how many bytes it has the server will say */
        status = kld_region_open(connection, 1, &region, err);
    return status ? status
                  : kld_region_made(connection->transport->region_attach(
                                        region, uid, name, timeout_ns, ret_tensor, err),
                                    region, ret_region);
}

enum kld_status kld_attach(struct kld_connection *connection, const char *name, uint64_t timeout_ns,
                           struct kld_region **ret_region, struct kld_tensor_view *ret_tensor,
                           struct kld_error *err) {
    return attach(connection, KLD_WIRE_UID_OWN, name, timeout_ns, ret_region, ret_tensor, err);
}

enum kld_status kld_attach_from(struct kld_connection *connection, uint32_t uid, const char *name,
                                uint64_t timeout_ns, struct kld_region **ret_region,
                                struct kld_tensor_view *ret_tensor, struct kld_error *err) {
    if (uid == KLD_WIRE_UID_OWN)
        return kld_error_set(err, KLD_INVALID, "%u is no user's number", uid);
    return attach(connection, uid, name, timeout_ns, ret_region, ret_tensor, err);
}

/* ---- Events and streams --------------------------------------------------------------------- */

/* One for the transport to fill in. */
static enum kld_status event_new(struct kld_connection *connection, struct kld_event **ret_event,
                                 struct kld_error *err) {
    if (!connection->transport->event_bytes)
        return kld_unimplemented(connection, "events", err);
    struct kld_event *event = calloc(1, connection->transport->event_bytes);
    if (!event)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for an event");
    event->connection = connection;
    event->local_id = ++connection->region_last_id;
    event->next = connection->events;
    connection->events = event;
    *ret_event = event;
    return KLD_OK;
}

/* Hands it out, or undoes it where that failed. */
static enum kld_status event_made(enum kld_status status, struct kld_event *event,
                                  struct kld_event **ret_event) {
    if (status)
        kld_event_drop(event);
    else
        *ret_event = event;
    return status;
}

static enum kld_status event_open(struct kld_connection *connection, uint8_t handle[64],
                                  const uint8_t *device_uuid, struct kld_event **ret_event,
                                  struct kld_error *err) {
    struct kld_event *event = NULL;
    enum kld_status status = event_new(connection, &event, err);
    return status ? status
                  : event_made(connection->transport->event_open(event, handle, device_uuid, err),
                               event, ret_event);
}

enum kld_status kld_event_import(struct kld_connection *connection, const uint8_t handle[64],
                                 const uint8_t device_uuid[16], struct kld_event **ret_event,
                                 struct kld_error *err) {
    uint8_t copy[64];
    memcpy(copy, handle, sizeof copy);
    return event_open(connection, copy, device_uuid, ret_event, err);
}

enum kld_status kld_event_create(struct kld_connection *connection, uint8_t ret_handle[64],
                                 struct kld_event **ret_event, struct kld_error *err) {
    return event_open(connection, ret_handle, NULL, ret_event, err);
}

enum kld_status kld_fence_create(struct kld_connection *connection, uint32_t **ret_word,
                                 struct kld_event **ret_fence, struct kld_error *err) {
    struct kld_event *fence = NULL;
    enum kld_status status = event_new(connection, &fence, err);
    return status ? status
                  : event_made(connection->transport->fence_open(fence, ret_word, err), fence,
                               ret_fence);
}

bool kld_fence_passed(const struct kld_event *fence, uint32_t number) {
    return fence->connection->transport->fence_passed(fence, number);
}

void kld_event_free(struct kld_event *event) {
    struct kld_event **link = &event->connection->events;
    while (*link != event)
        link = &(*link)->next;
    *link = event->next;
    free(event);
}

void kld_event_drop(struct kld_event *event) {
    if (!event || event->dropped)
        return;
    event->dropped = true;
    if (event->users == 0)
        event->connection->transport->event_release(event);
}

void kld_event_user_drop(struct kld_event *event) {
    if (event && --event->users == 0 && event->dropped)
        event->connection->transport->event_release(event);
}

enum kld_status kld_stream_adopt(struct kld_connection *connection, uint32_t stream,
                                 void *cuda_stream, struct kld_error *err) {
    if (!connection->transport->stream_adopt)
        return kld_unimplemented(connection, "streams of the caller's", err);
    return connection->transport->stream_adopt(connection, stream, cuda_stream, err);
}

enum kld_status kld_stream_priority(struct kld_connection *connection, uint32_t stream,
                                    int priority, struct kld_error *err) {
    if (!connection->transport->stream_priority)
        return kld_unimplemented(connection, "priorities of streams", err);
    if (priority < -1 || priority > 1)
        return kld_error_set(err, KLD_INVALID,
                             "priority %d; expected -1 (low), 0 (normal) or 1 (high)", priority);
    return connection->transport->stream_priority(connection, stream, priority, err);
}
