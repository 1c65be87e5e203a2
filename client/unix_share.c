/* unix_share.c - what is shared through a worker over its Unix socket: attached and published
 * tensors, priorities of streams; events are unix_event.c's. As with regions, what there is to send
 * follows from the state of each, so a lost worker only changes states. The thread that owns the
 * connection. */
#include <stdlib.h>
#include <string.h>

#include "client/unix.h"

/* Between two looks for a name that is not there yet: doubled with each, up to so often. A look may
 * mean a connection to each of the server's workers, of everybody who waits. */
#define ATTACH_AGAIN_NS 10000000ull
#define ATTACH_DOUBLINGS 5

static struct unix_connection *unix_of(struct kld_connection *connection) {
    return (struct unix_connection *)connection;
}

uint64_t kld_unix_patience(const struct unix_connection *u) {
    return kld_now_ns() + u->base.options.connect_timeout_ns;
}

static void frame_name(char to[KLD_WIRE_NAME_MAX], const char *name) {
    memset(to, 0, KLD_WIRE_NAME_MAX);
    memcpy(to, name, strlen(name)); /* share.c saw to its length */
}

bool kld_unix_is_passing(struct unix_connection *u, const struct kld_error *error) {
    if (!error || (error->status != KLD_DEVICE_LOST && error->status != KLD_UNAVAILABLE))
        return false;
    u->doomed = u->doomed || error->status == KLD_DEVICE_LOST;
    u->leaving = true;
    return true;
}

/* ---- Attached tensors ----------------------------------------------------------------------- */

static bool is_of_name(const struct unix_publication *publication, const char *name) {
    return !publication->ended &&
           strncmp(publication->frame.as_PUBLISH.name, name, KLD_WIRE_NAME_MAX) == 0;
}

static struct unix_publication *publication_find(struct unix_connection *u, const char *name) {
    struct unix_publication *publication = u->publications;
    while (publication && !is_of_name(publication, name))
        publication = publication->next;
    return publication;
}

enum kld_status kld_unix_region_attach(struct kld_region *base, uint32_t uid, const char *name,
                                       uint64_t timeout_ns, struct kld_tensor_view *ret_tensor,
                                       struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    struct unix_connection *u = unix_of(base->connection);
    enum kld_status status = kld_unix_room(region, err);
    if (!status)
        status = kld_unix_region_begin(region, (enum kld_region_kind)0, err);
    if (status)
        return status;
    const struct unix_publication *own = uid == KLD_WIRE_UID_OWN ? publication_find(u, name) : NULL;
    if (own && own->state != UNIX_REGION_FAILED)
        return kld_error_set(err, KLD_INVALID,
                             "this connection publishes that tensor itself; use its region");
    region->attached = true;
    frame_name(region->name, name);
    region->uid = uid;
    uint64_t now = kld_now_ns();
    if (__builtin_add_overflow(now, timeout_ns, &region->until_ns))
        region->until_ns = KLD_NEVER;
    kld_unix_region_add_later(region);
    uint64_t wait_ns = u->base.options.connect_timeout_ns, deadline;
    if (__builtin_add_overflow(region->until_ns, wait_ns, &deadline))
        deadline = KLD_NEVER;
    if ((status = kld_unix_wait_state(u, &region->state, &region->error, deadline, err)))
        return status;
    const struct kld_wire_description *tensor = &region->tensor;
    *ret_tensor = (struct kld_tensor_view){.dtype = tensor->dtype,
                                           .form = tensor->form,
                                           .rank = tensor->rank,
                                           .owner_uid = region->owner_uid,
                                           .row_stride_bytes = tensor->row_stride_bytes};
    memcpy(ret_tensor->shape, tensor->shape, sizeof ret_tensor->shape);
    return KLD_OK;
}

void kld_unix_attached_welcomed(struct unix_connection *u) {
    for (struct kld_region *base = u->base.regions; base; base = base->next) {
        struct unix_region *region = (struct unix_region *)base;
        if (region->tensor.rank) /* else its caller still waits, as long as that asked for */
            region->until_ns = kld_now_ns() + KLD_RECONNECT_NS_MAX;
    }
}

/* Nobody has published it yet: when to look again, the last time at the end of its caller's time.
 */
static void attach_later(struct unix_connection *u, struct unix_region *region, uint64_t now_ns) {
    uint32_t looks = region->looks++;
    uint64_t pause = ATTACH_AGAIN_NS << (looks < ATTACH_DOUBLINGS ? looks : ATTACH_DOUBLINGS);
    uint64_t left = region->until_ns - now_ns;
    pause = kld_jitter(pause);
    region->state = UNIX_REGION_WAITING;
    region->retry_at_ns = now_ns + (pause < left ? pause : left);
    kld_connection_arm(&u->base, region->retry_at_ns);
}

void kld_unix_attach_answered(struct unix_connection *u, struct unix_region *region,
                              const union kld_frame *reply, const struct kld_error *error) {
    if (error && error->status == KLD_NOT_FOUND && !region->tensor.rank &&
        kld_unix_look_further(u, region))
        return;
    uint64_t now = kld_now_ns();
    if (error && error->status == KLD_NOT_FOUND && now < region->until_ns) {
        attach_later(u, region, now);
        return;
    }
    const struct kld_frame_attached *attached = &reply->as_ATTACHED;
    bool again = region->tensor.rank != 0;
    struct kld_error wrong;
    uint64_t bytes;
    if (error && again && error->status == KLD_NOT_FOUND) {
        kld_error_set(&region->error, KLD_GONE,
                      "the attached tensor was not published again after its server was lost");
        region->state = UNIX_REGION_FAILED;
    } else if (error) {
        region->error = *error;
        region->state = UNIX_REGION_FAILED;
    } else if (again && (memcmp(&region->tensor, &attached->tensor, sizeof region->tensor) != 0 ||
                         region->base.bytes != attached->bytes)) {
        kld_error_set(&region->error, KLD_GONE,
                      "the attached tensor was published again as another one; attach to it again");
        region->state = UNIX_REGION_FAILED;
    } else if (kld_description_check(&attached->tensor, 0, attached->bytes, &bytes, &wrong)) {
        kld_error_set(&region->error, KLD_INTERNAL, "the server described no tensor: %.180s",
                      wrong.text);
        region->state = UNIX_REGION_FAILED;
    } else {
        region->tensor = attached->tensor;
        region->owner_uid = attached->uid;
        region->base.bytes = attached->bytes;
        region->wire_id = attached->region;
        region->looks = 0;
        region->state = UNIX_REGION_READY;
    }
}

void kld_unix_attach_again(struct unix_connection *u, uint64_t now_ns) {
    for (struct kld_region *base = u->base.regions; base; base = base->next) {
        struct unix_region *region = (struct unix_region *)base;
        if (region->state != UNIX_REGION_WAITING)
            continue;
        if (now_ns < region->retry_at_ns) {
            kld_connection_arm(&u->base, region->retry_at_ns);
            continue;
        }
        region->state = UNIX_REGION_NEW;
        u->region_work++;
    }
}

/* ---- Published tensors ---------------------------------------------------------------------- */

static void publication_free(struct unix_connection *u, struct unix_publication *publication) {
    struct unix_publication **link = &u->publications;
    while (*link != publication)
        link = &(*link)->next;
    *link = publication->next;
    u->share_work -= publication->state == UNIX_REGION_NEW || publication->ended;
    free(publication);
}

enum kld_status kld_unix_publish(struct kld_region *base, const char *name,
                                 const struct kld_tensor_view *tensor, const uint32_t *uids,
                                 uint32_t uids_count, struct kld_error *err) {
    struct unix_connection *u = unix_of(base->connection);
    if (((struct unix_region *)base)->attached)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "the region was attached; only its owner publishes it");
    if (uids_count > KLD_WIRE_UIDS_MAX)
        return kld_error_set(err, KLD_INVALID, "%u users; at most %d can be named", uids_count,
                             KLD_WIRE_UIDS_MAX);
    struct unix_publication *publication = publication_find(u, name);
    if (publication && publication->state != UNIX_REGION_FAILED)
        return kld_error_set(err, KLD_EXISTS, "this connection publishes that name already");
    if (publication)
        publication_free(u, publication);
    publication = calloc(1, sizeof *publication);
    if (!publication)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a published tensor");
    publication->region = (struct unix_region *)base;
    publication->local_id = ++u->base.region_last_id;
    kld_frame_init(&publication->frame, KLD_FRAME_PUBLISH,
                   KLD_NUMBER_REGION | publication->local_id);
    struct kld_frame_publish *frame = &publication->frame.as_PUBLISH;
    frame_name(frame->name, name);
    frame->offset_bytes = tensor->offset_bytes;
    frame->tensor = (struct kld_wire_description){.dtype = tensor->dtype,
                                                  .form = tensor->form,
                                                  .rank = tensor->rank,
                                                  .row_stride_bytes = tensor->row_stride_bytes};
    for (uint32_t i = 0; i < tensor->rank && i < KLD_RANK_MAX; i++)
        frame->tensor.shape[i] = tensor->shape[i];
    frame->uids_count = uids_count;
    if (uids_count)
        memcpy(frame->uids, uids, uids_count * sizeof *uids);
    publication->state = UNIX_REGION_NEW;
    publication->next = u->publications;
    u->publications = publication;
    u->share_work++;
    kld_unix_flush(u);
    enum kld_status status =
        kld_unix_wait_state(u, &publication->state, &publication->error, kld_unix_patience(u), err);
    if (status && publication->state == UNIX_REGION_ADDING && u->state == UNIX_UP) {
        union kld_frame detach; /* whatever becomes of it, nobody is to find it */
        kld_frame_init(&detach, KLD_FRAME_DETACH, KLD_NUMBER_IGNORED | publication->local_id);
        frame_name(detach.as_DETACH.name, name);
        (void)kld_unix_send(u, &detach, -1);
    }
    if (status)
        publication_free(u, publication);
    return status;
}

enum kld_status kld_unix_published(struct kld_connection *connection, const char *name,
                                   struct kld_error *err) {
    const struct unix_publication *publication = publication_find(unix_of(connection), name);
    if (!publication)
        return kld_error_set(err, KLD_NOT_FOUND,
                             "this connection publishes no tensor of that name");
    if (publication->state != UNIX_REGION_FAILED)
        return KLD_OK;
    return kld_error_set(err, publication->error.status,
                         "not published again after its server was lost: %.180s",
                         publication->error.text);
}

enum kld_status kld_unix_detach(struct kld_connection *connection, const char *name,
                                struct kld_error *err) {
    struct unix_connection *u = unix_of(connection);
    struct unix_publication *publication = publication_find(u, name);
    if (!publication)
        return kld_error_set(err, KLD_NOT_FOUND,
                             "this connection publishes no tensor of that name");
    publication_free(u, publication); /* first: a new worker is not to hear of it */
    if (u->state != UNIX_UP)
        return KLD_OK;
    union kld_frame frame;
    struct kld_error error;
    kld_frame_init(&frame, KLD_FRAME_DETACH, 0);
    frame_name(frame.as_DETACH.name, name);
    enum kld_status status = kld_unix_ask(u, &frame, KLD_FRAME_DONE, &error);
    if (status && status != KLD_NOT_FOUND) {
        if (err)
            *err = error;
        return status;
    }
    return KLD_OK;
}

void kld_unix_publications_drop(struct unix_connection *u, const struct unix_region *region) {
    for (struct unix_publication *publication = u->publications, *next; publication;
         publication = next) {
        next = publication->next;
        if (publication->region == region)
            publication_free(u, publication);
    }
}

void kld_unix_publications_end(struct unix_connection *u, const struct unix_region *region) {
    for (struct unix_publication *publication = u->publications, *next; publication;
         publication = next) {
        next = publication->next;
        if (publication->region != region || publication->ended)
            continue;
        if (publication->state != UNIX_REGION_ADDING && publication->state != UNIX_REGION_READY) {
            publication_free(u, publication);
            continue;
        }
        publication->ended = true;
        u->share_work++;
    }
}

void kld_unix_region_dropped(struct kld_region *base) {
    struct unix_connection *u = unix_of(base->connection);
    kld_unix_publications_end(u, (struct unix_region *)base);
    kld_unix_flush(u);
}

/* Before anything is published, which may be under the same name. */
static enum unix_sent publications_end_flush(struct unix_connection *u) {
    enum unix_sent sent = UNIX_SENT;
    for (struct unix_publication *at = u->publications, *next; at && sent == UNIX_SENT; at = next) {
        next = at->next;
        if (!at->ended)
            continue;
        union kld_frame frame;
        kld_frame_init(&frame, KLD_FRAME_DETACH, KLD_NUMBER_IGNORED | at->local_id);
        memcpy(frame.as_DETACH.name, at->frame.as_PUBLISH.name, sizeof frame.as_DETACH.name);
        sent = kld_unix_send(u, &frame, -1);
        if (sent == UNIX_SENT)
            publication_free(u, at);
    }
    return sent;
}

/* ---- Streams -------------------------------------------------------------------------------- */

static void stream_frame(union kld_frame *frame, uint32_t stream, int priority) {
    kld_frame_init(frame, KLD_FRAME_STREAM, KLD_NUMBER_IGNORED | (stream + 1));
    frame->as_STREAM.stream = stream;
    frame->as_STREAM.priority = priority;
}

enum unix_sent kld_unix_priorities_send(struct unix_connection *u) {
    union kld_frame frame;
    enum unix_sent sent = UNIX_SENT;
    for (uint32_t i = 0; i < KLD_PRIORITIES_MAX && sent == UNIX_SENT; i++) {
        stream_frame(&frame, i, u->priorities[i]);
        if (u->priorities[i])
            sent = kld_unix_send(u, &frame, -1);
    }
    return sent;
}

enum kld_status kld_unix_stream_priority(struct kld_connection *connection, uint32_t stream,
                                         int priority, struct kld_error *err) {
    struct unix_connection *u = unix_of(connection);
    uint32_t streams = u->welcomed ? u->welcome.streams_max : KLD_PRIORITIES_MAX;
    if (stream >= streams || stream >= KLD_PRIORITIES_MAX)
        return kld_error_set(err, KLD_INVALID, "stream %u; expected a number below %u", stream,
                             streams < KLD_PRIORITIES_MAX ? streams : KLD_PRIORITIES_MAX);
    if (u->state == UNIX_UP) {
        union kld_frame frame;
        stream_frame(&frame, stream, priority);
        enum kld_status status = kld_unix_ask(u, &frame, KLD_FRAME_DONE, err);
        if (status)
            return status;
    }
    u->priorities[stream] = (int8_t)priority;
    return KLD_OK;
}

/* ---- Together ------------------------------------------------------------------------------- */

void kld_unix_shares_lost(struct unix_connection *u) {
    for (struct unix_publication *at = u->publications, *next; at; at = next) {
        next = at->next;
        if (at->ended)
            publication_free(u, at); /* the next worker does not hear of it */
        else
            at->state = UNIX_REGION_NEW;
    }
    u->share_work = 0;
    kld_unix_events_lost(u);
    for (const struct unix_publication *at = u->publications; at; at = at->next)
        u->share_work++;
}

static enum unix_sent publication_send(struct unix_connection *u,
                                       struct unix_publication *publication) {
    const struct unix_region *region = publication->region;
    if (region->state == UNIX_REGION_FAILED || region->state == UNIX_REGION_LOST) {
        publication->state = UNIX_REGION_FAILED;
        publication->error = region->error;
        u->share_work--;
        return UNIX_SENT;
    }
    if (region->state != UNIX_REGION_READY)
        return UNIX_SENT;
    publication->frame.as_PUBLISH.region = region->wire_id;
    enum unix_sent sent = kld_unix_send(u, &publication->frame, -1);
    if (sent == UNIX_SENT) {
        publication->state = UNIX_REGION_ADDING;
        u->share_work--;
    }
    return sent;
}

enum unix_sent kld_unix_shares_flush(struct unix_connection *u) {
    enum unix_sent sent = kld_unix_events_flush(u);
    if (sent == UNIX_SENT)
        sent = publications_end_flush(u);
    for (struct unix_publication *at = u->publications; at && sent == UNIX_SENT; at = at->next)
        if (at->state == UNIX_REGION_NEW)
            sent = publication_send(u, at);
    return sent;
}

void kld_unix_share_answered(struct unix_connection *u, uint64_t local_id,
                             const union kld_frame *reply, const struct kld_error *error) {
    if (kld_unix_event_answered(u, local_id, reply, error))
        return;
    struct unix_publication *publication = u->publications;
    while (publication && publication->local_id != local_id)
        publication = publication->next;
    if (!publication || publication->state != UNIX_REGION_ADDING || kld_unix_is_passing(u, error))
        return;
    publication->state = error ? UNIX_REGION_FAILED : UNIX_REGION_READY;
    if (error)
        publication->error = *error;
}
