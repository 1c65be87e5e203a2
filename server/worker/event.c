/* event.c - registers, pins and releases the events of a client.
 * Opening a handle and making an event take their time and run on uv's pool. Waits for no event:
 * the device does. Worker process: loop thread, except add_work() and remove_work(). */
#include "server/worker/event.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/worker/core.h"

#define SLOT_MASK (((uint64_t)1 << KLD_EVENT_SLOT_BITS) - 1)
_Static_assert(KLD_SESSION_EVENTS_MAX <= SLOT_MASK + 1, "an id holds the place in the table");

static bool all_zero(const uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i])
            return false;
    return true;
}

static void forget(struct kld_worker_event *event) {
    struct kld_session *session = event->session;
    session->gpu_events[event->id & SLOT_MASK] = NULL;
    session->gpu_events_count--;
    if (event->region)
        kld_worker_region_release(event->region);
    free(event);
}

static void task_ended(struct kld_session *session) {
    session->tasks--;
    kld_session_poll(session);
    kld_session_collect(session);
}

static void add_work(uv_work_t *work) {
    struct kld_worker_event *event = work->data;
    struct kld_worker *worker = event->session->worker;
    const struct kld_backend *backend = worker->options.backend;
    struct kld_device *device = worker->device;
    struct kld_error *error = &event->error;
    if (event->kind == KLD_EVENT_READY)
        event->status = backend->event_import(device, event->ipc_handle, &event->gpu, error);
    else if (event->kind == KLD_EVENT_DONE)
        event->status = backend->event_create(device, &event->gpu, event->ipc_handle, error);
    else
        event->status = backend->event_create_fence(device, event->region->memory,
                                                    event->offset_bytes, &event->gpu, error);
}

static void remove_work(uv_work_t *work) {
    struct kld_worker_event *event = work->data;
    event->session->worker->options.backend->event_free(event->gpu);
}

static void remove_after(uv_work_t *work, int cancelled) {
    struct kld_worker_event *event = work->data;
    struct kld_session *session = event->session;
    (void)cancelled; /* never asked for */
    forget(event);
    task_ended(session);
}

/* CONDEMNED and without users -> REMOVING. */
static void remove_unused(struct kld_worker_event *event) {
    if (event->state != KLD_REGION_CONDEMNED || event->users)
        return;
    event->state = KLD_REGION_REMOVING;
    event->session->tasks++;
    kld_task_queue(&event->task, event->session->worker, event->session->user, remove_work,
                   remove_after);
}

static void condemn(struct kld_worker_event *event) {
    event->state = KLD_REGION_CONDEMNED;
    remove_unused(event);
}

static void add_after(uv_work_t *work, int cancelled) {
    struct kld_worker_event *event = work->data;
    struct kld_session *session = event->session;
    (void)cancelled;
    kld_session_awaited(session);
    if (event->status != KLD_OK) {
        struct kld_error error = event->error;
        kld_session_reply_error(session, event->request, &error);
        forget(event);
        if (error.status == KLD_DEVICE_LOST)
            kld_core_device_lost(session->worker, &error);
    } else if (session->state == KLD_SESSION_CLOSING) {
        condemn(event);
    } else {
        event->state = KLD_REGION_LIVE;
        union kld_frame frame;
        kld_frame_init(&frame, KLD_FRAME_EVENT, event->request);
        frame.as_EVENT.event = event->id;
        if (event->kind == KLD_EVENT_DONE)
            memcpy(frame.as_EVENT.ipc_handle, event->ipc_handle, sizeof event->ipc_handle);
        kld_session_reply(session, &frame);
    }
    task_ended(session);
}

static enum kld_status check_room(const struct kld_session *session, struct kld_error *err) {
    const struct kld_device_info *info = &session->worker->device->info;
    if (!info->imports_cuda_ipc)
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "events need the cuda back end; this server runs on %s",
                             info->backend);
    if (session->worker->draining)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server is going away; connect again");
    if (session->gpu_events_count >= KLD_SESSION_EVENTS_MAX)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "%u events of this connection exist, the most allowed",
                             session->gpu_events_count);
    return KLD_OK;
}

static enum kld_status check(const struct kld_session *session,
                             const struct kld_frame_event_add *frame, struct kld_error *err) {
    const struct kld_device_info *info = &session->worker->device->info;
    if (frame->kind != KLD_EVENT_READY && frame->kind != KLD_EVENT_DONE)
        return kld_error_set(err, KLD_INVALID, "unknown event kind %u; known: 1 ready, 2 done",
                             frame->kind);
    if (frame->reserved != 0 ||
        all_zero(frame->ipc_handle, sizeof frame->ipc_handle) == (frame->kind == KLD_EVENT_READY))
        return kld_error_set(err, KLD_INVALID,
                             "EVENT_ADD: expected a handle for kind 1, none for kind 2, and a "
                             "reserved field of 0");
    enum kld_status status = check_room(session, err);
    if (!status && memcmp(frame->device_uuid, info->uuid, KLD_WIRE_UUID_BYTES) != 0)
        return kld_worker_other_device(session->worker, frame->device_uuid, "the event is", "",
                                       err);
    return status;
}

/* One that has its place in the session's table; NULL with the error described. */
static struct kld_worker_event *event_new(struct kld_session *session, uint64_t request,
                                          enum kld_event_kind kind, struct kld_error *err) {
    struct kld_worker_event *event = calloc(1, sizeof *event);
    if (!event) {
        kld_error_set(err, KLD_NO_MEMORY, "no memory for another event");
        return NULL;
    }
    uint64_t slot = 0;
    while (session->gpu_events[slot]) /* there is room: the count says so */
        slot++;
    session->gpu_events[slot] = event;
    session->gpu_events_count++;
    event->session = session;
    event->state = KLD_REGION_ADDING;
    event->id = ++session->gpu_event_serial << KLD_EVENT_SLOT_BITS | slot;
    event->request = request;
    event->kind = kind;
    event->task.work.data = event;
    return event;
}

static void add(struct kld_worker_event *event) {
    struct kld_session *session = event->session;
    session->tasks++;
    kld_session_awaits(session);
    kld_task_queue(&event->task, session->worker, session->user, add_work, add_after);
}

enum kld_status kld_worker_event_add(struct kld_session *session,
                                     const struct kld_frame_event_add *frame,
                                     struct kld_error *err) {
    enum kld_status status = check(session, frame, err);
    if (status)
        return status;
    struct kld_worker_event *event =
        event_new(session, frame->header.request, (enum kld_event_kind)frame->kind, err);
    if (!event)
        return KLD_NO_MEMORY;
    memcpy(event->ipc_handle, frame->ipc_handle, sizeof event->ipc_handle);
    add(event);
    return KLD_OK;
}

/* Where the device may write a number, and keep doing so when the client is gone. */
static enum kld_status check_word(const struct kld_region *region, uint64_t offset_bytes,
                                  struct kld_error *err) {
    if (region->attached)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "fence: its region was attached; that can be read, not written");
    if (region->kind != KLD_REGION_MEMFD)
        return kld_error_set(err, KLD_INVALID,
                             "fence: its region lies on the device; expected host memory");
    if (offset_bytes % sizeof(uint32_t) != 0 || region->bytes < sizeof(uint32_t) ||
        offset_bytes > region->bytes - sizeof(uint32_t))
        return kld_error_set(err, KLD_INVALID,
                             "fence: offset %" PRIu64 "; expected a multiple of 4, and 4 bytes "
                             "behind it in a region of %" PRIu64,
                             offset_bytes, region->bytes);
    return KLD_OK;
}

enum kld_status kld_worker_fence_add(struct kld_session *session,
                                     const struct kld_frame_fence_add *frame,
                                     struct kld_error *err) {
    enum kld_status status = check_room(session, err);
    if (!status && !session->worker->options.backend->event_create_fence)
        return kld_error_set(err, KLD_UNIMPLEMENTED, "this server has no fences");
    struct kld_region *region =
        status ? NULL : kld_worker_region_find(session, frame->region, "fence", err);
    if (!region)
        return err->status;
    if ((status = check_word(region, frame->offset_bytes, err)))
        return status;
    struct kld_worker_event *event =
        event_new(session, frame->header.request, KLD_EVENT_FENCE, err);
    if (!event)
        return KLD_NO_MEMORY;
    kld_worker_region_acquire(region);
    event->region = region;
    event->offset_bytes = frame->offset_bytes;
    add(event);
    return KLD_OK;
}

static struct kld_worker_event *find(struct kld_session *session, uint64_t id) {
    uint64_t slot = id & SLOT_MASK;
    struct kld_worker_event *event =
        slot < KLD_SESSION_EVENTS_MAX ? session->gpu_events[slot] : NULL;
    return event && event->id == id && event->state == KLD_REGION_LIVE ? event : NULL;
}

struct kld_worker_event *kld_worker_event_find(struct kld_session *session, uint64_t id,
                                               enum kld_event_kind kind, uint32_t stream,
                                               struct kld_error *err) {
    const char *what = kind == KLD_EVENT_READY ? "ready_event" : "done_event";
    struct kld_worker_event *event = find(session, id);
    bool fence = event && event->kind == KLD_EVENT_FENCE && kind == KLD_EVENT_DONE;
    if ((event && event->kind == (uint32_t)kind) ||
        (fence && (!event->number || event->stream == stream)))
        return event;
    if (fence)
        kld_error_set(err, KLD_INVALID,
                      "%s: fence %" PRIu64 " is that of stream %u; its numbers come in order in "
                      "one stream only",
                      what, id, event->stream);
    else if (event)
        kld_error_set(err, KLD_INVALID, "%s: event %" PRIu64 " is of the other kind", what, id);
    else
        kld_error_set(err, KLD_NOT_FOUND, "%s: no event %" PRIu64 " on this connection", what, id);
    return NULL;
}

enum kld_status kld_worker_event_drop(struct kld_session *session, uint64_t id,
                                      struct kld_error *err) {
    struct kld_worker_event *event = find(session, id);
    if (!event)
        return kld_error_set(err, KLD_NOT_FOUND,
                             "EVENT_DROP: no event %" PRIu64 " on this connection", id);
    condemn(event);
    return KLD_OK;
}

void kld_worker_event_drop_all(struct kld_session *session) {
    for (uint32_t i = 0; i < KLD_SESSION_EVENTS_MAX; i++)
        if (session->gpu_events[i] && session->gpu_events[i]->state == KLD_REGION_LIVE)
            condemn(session->gpu_events[i]);
}

uint32_t kld_worker_event_count(struct kld_worker_event *event, uint32_t stream) {
    if (event->kind != KLD_EVENT_FENCE)
        return 0;
    event->stream = stream;
    event->number += event->number == UINT32_MAX ? 2 : 1; /* 0 is none */
    return event->number;
}

void kld_worker_event_acquire(struct kld_worker_event *event) { event->users++; }

void kld_worker_event_release(struct kld_worker_event *event) {
    event->users--;
    remove_unused(event);
}
