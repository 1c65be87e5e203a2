/* unix_event.c - events over the Unix socket: the caller's, those that the worker makes, and
 * fences, which are a word in a region of ours (unix_watch.c has the words). What there is to send
 * follows from the state of each, as in unix_share.c. The thread that owns the connection. */
#include <string.h>

#include "client/unix.h"

static struct unix_connection *unix_of(struct kld_connection *connection) {
    return (struct unix_connection *)connection;
}

/* At kld_close() regions and words have gone before it. */
static void event_free(struct unix_connection *u, struct unix_event *event) {
    u->share_work -= event->state == UNIX_REGION_NEW;
    if (!u->closing) {
        kld_region_drop(event->region);
        kld_unix_word_close(u, event->word);
    }
    kld_event_free(&event->base);
}

/* Told to the worker, and answered. */
static enum kld_status add(struct unix_connection *u, struct unix_event *event,
                           struct kld_error *err) {
    event->state = UNIX_REGION_NEW;
    u->share_work++;
    kld_unix_flush(u);
    return kld_unix_wait_state(u, &event->state, &event->error, kld_unix_patience(u), err);
}

enum kld_status kld_unix_event_open(struct kld_event *base, uint8_t handle[64],
                                    const uint8_t *device_uuid, struct kld_error *err) {
    struct unix_event *event = (struct unix_event *)base;
    struct unix_connection *u = unix_of(base->connection);
    event->kind = device_uuid ? KLD_EVENT_READY : KLD_EVENT_DONE;
    event->state = UNIX_REGION_MAKING;
    enum kld_status status;
    if (device_uuid && (status = kld_unix_go_to_memory(u, device_uuid, event, err)))
        return status;
    if (device_uuid) {
        memcpy(event->ipc_handle, handle, sizeof event->ipc_handle);
        memcpy(event->device_uuid, device_uuid, sizeof event->device_uuid);
    }
    status = add(u, event, err);
    if (!status && !device_uuid)
        memcpy(handle, event->ipc_handle, sizeof event->ipc_handle);
    return status;
}

enum kld_status kld_unix_fence_open(struct kld_event *base, uint32_t **ret_word,
                                    struct kld_error *err) {
    struct unix_event *event = (struct unix_event *)base;
    struct unix_connection *u = unix_of(base->connection);
    event->kind = KLD_EVENT_FENCE;
    event->state = UNIX_REGION_MAKING;
    enum kld_status status =
        kld_region_create(base->connection, KLD_FENCE_BYTES, &event->region, err);
    if (!status)
        status =
            kld_unix_word_open(u, ((struct unix_region *)event->region)->fd, &event->word, err);
    if (!status)
        status = add(u, event, err);
    if (!status)
        *ret_word = kld_unix_word_at(event->word);
    return status;
}

bool kld_unix_fence_passed(const struct kld_event *base, uint32_t number) {
    const struct unix_event *event = (const struct unix_event *)base;
    return event->word && kld_unix_word_passed(unix_of(base->connection), event->word, number);
}

void kld_unix_event_release(struct kld_event *base) {
    struct unix_event *event = (struct unix_event *)base;
    struct unix_connection *u = unix_of(base->connection);
    if (u->closing || u->state != UNIX_UP ||
        (event->state != UNIX_REGION_ADDING && event->state != UNIX_REGION_READY)) {
        event_free(u, event);
        return;
    }
    event->released = true;
    if (event->state == UNIX_REGION_READY) {
        u->share_work++;
        kld_unix_flush(u);
    }
}

static enum unix_sent event_send(struct unix_connection *u, struct unix_event *event) {
    union kld_frame frame;
    if (event->released) {
        kld_frame_init(&frame, KLD_FRAME_EVENT_DROP, KLD_NUMBER_IGNORED | event->base.local_id);
        frame.as_EVENT_DROP.event = event->wire_id;
        return kld_unix_send(u, &frame, -1);
    }
    if (event->kind == KLD_EVENT_FENCE) {
        kld_frame_init(&frame, KLD_FRAME_FENCE_ADD, KLD_NUMBER_REGION | event->base.local_id);
        frame.as_FENCE_ADD.region = ((const struct unix_region *)event->region)->wire_id;
        return kld_unix_send(u, &frame, -1);
    }
    kld_frame_init(&frame, KLD_FRAME_EVENT_ADD, KLD_NUMBER_REGION | event->base.local_id);
    struct kld_frame_event_add *add = &frame.as_EVENT_ADD;
    add->kind = event->kind;
    if (event->kind == KLD_EVENT_READY) {
        memcpy(add->ipc_handle, event->ipc_handle, sizeof add->ipc_handle);
        memcpy(add->device_uuid, event->device_uuid, sizeof add->device_uuid);
    } else if (u->welcome.device < KLD_WIRE_DEVICES_MAX) { /* the worker's own card */
        memcpy(add->device_uuid, u->welcome.device_list[u->welcome.device].uuid,
               sizeof add->device_uuid);
    }
    return kld_unix_send(u, &frame, -1);
}

/* A fence goes out when its region is known, and where somebody sees the end of this connection.
 * One that cannot fails here. */
static bool can_be_sent(struct unix_connection *u, struct unix_event *event) {
    if (event->kind != KLD_EVENT_FENCE)
        return true;
    const struct unix_region *region = (const struct unix_region *)event->region;
    if (region->state == UNIX_REGION_FAILED)
        event->error = region->error;
    else if (!u->watched)
        kld_error_set(&event->error, KLD_NO_MEMORY,
                      "no file descriptor left to watch the server for a fence");
    else
        return region->state == UNIX_REGION_READY;
    event->state = UNIX_REGION_FAILED;
    u->share_work--;
    return false;
}

static void event_answered(struct unix_connection *u, struct unix_event *event,
                           const union kld_frame *reply, const struct kld_error *error) {
    if (event->state != UNIX_REGION_ADDING || (!error && reply->header.type != KLD_FRAME_EVENT) ||
        kld_unix_is_passing(u, error))
        return;
    if (error) {
        event->state = UNIX_REGION_FAILED;
        event->error = *error;
    } else {
        event->state = UNIX_REGION_READY;
        event->wire_id = reply->as_EVENT.event;
        if (event->kind == KLD_EVENT_DONE)
            memcpy(event->ipc_handle, reply->as_EVENT.ipc_handle, sizeof event->ipc_handle);
        if (event->word)
            kld_unix_word_arm(u, event->word);
    }
    if (event->released && event->state == UNIX_REGION_READY)
        u->share_work++;
    else if (event->released)
        event_free(u, event);
}

bool kld_unix_event_answered(struct unix_connection *u, uint64_t local_id,
                             const union kld_frame *reply, const struct kld_error *error) {
    for (struct kld_event *base = u->base.events; base; base = base->next) {
        if (base->local_id != local_id)
            continue;
        event_answered(u, (struct unix_event *)base, reply, error);
        return true;
    }
    return false;
}

static void event_lost(struct unix_event *event) {
    event->state = UNIX_REGION_LOST;
    kld_error_set(&event->error, KLD_DEVICE_LOST,
                  "the done %s of the request was lost with its worker; create another",
                  event->kind == KLD_EVENT_FENCE ? "fence" : "event");
    kld_region_drop(event->region);
    event->region = NULL;
}

void kld_unix_events_lost(struct unix_connection *u) {
    for (struct kld_event *base = u->base.events, *next; base; base = next) {
        next = base->next;
        struct unix_event *event = (struct unix_event *)base;
        bool lost = event->kind != KLD_EVENT_READY &&
                    (event->state == UNIX_REGION_READY || event->state == UNIX_REGION_LOST);
        if (event->released) {
            event->state = UNIX_REGION_FAILED; /* no work any more */
            event_free(u, event);
            continue;
        }
        if (event->state == UNIX_REGION_MAKING)
            continue;
        event->wire_id = 0;
        if (lost) {
            event_lost(event);
            continue;
        }
        event->state = UNIX_REGION_NEW;
        u->share_work++;
    }
}

enum unix_sent kld_unix_events_flush(struct unix_connection *u) {
    enum unix_sent sent = UNIX_SENT;
    for (struct kld_event *base = u->base.events, *next; base && sent == UNIX_SENT; base = next) {
        next = base->next;
        struct unix_event *event = (struct unix_event *)base;
        bool add_it = event->state == UNIX_REGION_NEW && can_be_sent(u, event);
        bool drop = event->state == UNIX_REGION_READY && event->released;
        if ((!add_it && !drop) || (sent = event_send(u, event)) != UNIX_SENT)
            continue;
        u->share_work--;
        event->state = UNIX_REGION_ADDING;
        if (drop)
            event_free(u, event);
    }
    return sent;
}
