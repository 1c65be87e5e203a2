/* publish.c - see publish.h. Touches no memory and no socket. Worker process, loop thread. */
#include "server/worker/publish.h"

#include <stdlib.h>
#include <string.h>

#include "server/log.h"
#include "server/worker/worker.h"

static uid_t owner_of(const struct kld_publication *publication) {
    return publication->region->session->uid;
}

static struct kld_publication *find(struct kld_worker *worker, uid_t uid, const char *name) {
    struct kld_publication *publication;
    TAILQ_FOREACH(publication, &worker->publications, in_worker)
    if (owner_of(publication) == uid &&
        memcmp(publication->name, name, sizeof publication->name) == 0)
        return publication;
    return NULL;
}

static void end(struct kld_publication *publication) {
    struct kld_worker *worker = publication->region->session->worker;
    struct kld_region *region;
    while ((region = TAILQ_FIRST(&publication->attached)))
        kld_worker_region_orphan(region);
    TAILQ_REMOVE(&worker->publications, publication, in_worker);
    worker->publications_count--;
    publication->region->publications--;
    free(publication);
}

void kld_publication_end_region(struct kld_region *region) {
    struct kld_worker *worker = region->session->worker;
    struct kld_publication *publication, *next;
    for (publication = TAILQ_FIRST(&worker->publications); publication && region->publications;
         publication = next) {
        next = TAILQ_NEXT(publication, in_worker);
        if (publication->region == region)
            end(publication);
    }
}

static enum kld_status check_uids(const struct kld_frame_publish *frame, struct kld_error *err) {
    bool good = frame->uids_count <= KLD_WIRE_UIDS_MAX;
    if (frame->reserved != 0)
        return kld_error_set(err, KLD_INVALID, "PUBLISH: reserved field is not 0");
    for (uint32_t i = frame->uids_count; good && i < KLD_WIRE_UIDS_MAX; i++)
        good = frame->uids[i] == 0;
    return good ? KLD_OK
                : kld_error_set(err, KLD_INVALID,
                                "PUBLISH names %u users; expected at most %d, and 0 behind them",
                                frame->uids_count, KLD_WIRE_UIDS_MAX);
}

/* Is there room for another one, of this user and in all? */
static enum kld_status check_room(const struct kld_session *session, struct kld_error *err) {
    const struct kld_worker *worker = session->worker;
    const struct kld_publication *publication;
    uint64_t own = 0, own_max = worker->options.config->user_publications_max;
    TAILQ_FOREACH(publication, &worker->publications, in_worker)
    own += owner_of(publication) == session->uid;
    if (own >= own_max)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "%llu tensors are published by this user, the most allowed",
                             (unsigned long long)own);
    if (worker->publications_count >= KLD_PUBLICATIONS_MAX)
        return kld_error_set(err, KLD_TOO_LARGE, "%u tensors are published, the most allowed",
                             worker->publications_count);
    if (own >= kld_share_max(worker->options.config->user_share, KLD_PUBLICATIONS_MAX,
                             worker->publications_count - own))
        return kld_error_set(err, KLD_TOO_LARGE,
                             "%llu tensors are published by this user, the most allowed beside "
                             "those of others (user_share)",
                             (unsigned long long)own);
    return KLD_OK;
}

static void reply_done(struct kld_session *session, uint64_t request) {
    union kld_frame reply;
    kld_frame_init(&reply, KLD_FRAME_DONE, request);
    kld_session_reply(session, &reply);
}

enum kld_status kld_publication_open(struct kld_session *session,
                                     const struct kld_frame_publish *frame, struct kld_error *err) {
    struct kld_worker *worker = session->worker;
    enum kld_status status;
    uint64_t bytes = 0;
    if ((status = kld_name_check(frame->name, err)) || (status = check_uids(frame, err)))
        return status;
    struct kld_region *region = kld_worker_region_find(session, frame->region, "PUBLISH", err);
    if (!region)
        return err->status;
    if (region->attached)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "PUBLISH: the region was attached; only its owner publishes it");
    if ((status = kld_description_check(&frame->tensor, frame->offset_bytes, region->bytes, &bytes,
                                        err)))
        return status;
    if (find(worker, session->uid, frame->name))
        return kld_error_set(err, KLD_EXISTS, "this user publishes a tensor of that name already");
    if ((status = check_room(session, err)))
        return status;
    struct kld_publication *publication = calloc(1, sizeof *publication);
    if (!publication)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for another published tensor");
    publication->region = region;
    publication->offset_bytes = frame->offset_bytes;
    publication->bytes = bytes;
    publication->tensor = frame->tensor;
    memcpy(publication->name, frame->name, sizeof publication->name);
    publication->uids_count = frame->uids_count;
    memcpy(publication->uids, frame->uids, sizeof publication->uids);
    TAILQ_INIT(&publication->attached);
    TAILQ_INSERT_TAIL(&worker->publications, publication, in_worker);
    worker->publications_count++;
    region->publications++;
    reply_done(session, frame->header.request);
    return KLD_OK;
}

static bool may_attach(const struct kld_session *session,
                       const struct kld_publication *publication) {
    if (session->uid == owner_of(publication))
        return true;
    for (uint32_t i = 0; i < publication->uids_count; i++)
        if (publication->uids[i] == session->uid)
            return true;
    return false;
}

enum kld_status kld_publication_attach(struct kld_session *session,
                                       const struct kld_frame_attach *frame,
                                       struct kld_error *err) {
    enum kld_status status = kld_name_check(frame->name, err);
    if (status)
        return status;
    if (frame->reserved)
        return kld_error_set(err, KLD_INVALID, "ATTACH: reserved field is not 0");
    uid_t uid = frame->uid == KLD_WIRE_UID_OWN ? session->uid : frame->uid;
    struct kld_publication *publication = find(session->worker, uid, frame->name);
    bool may = publication && may_attach(session, publication);
    if (publication && !may && kld_failed_lines_take(&session->worker->failed_lines))
        kld_log(KLD_LOG_WARN, "attach refused", "client=\"%s\" client_pid=%d uid=%u", session->name,
                (int)session->pid, (unsigned)session->uid);
    if (!may) /* in the same words, or who may not would learn what others publish */
        return kld_error_set(err, KLD_NOT_FOUND,
                             uid == session->uid
                                 ? "no tensor of this name is published by this user; to attach "
                                   "to another user's, name that user"
                                 : "no tensor of this name is published by user %u for this user",
                             (unsigned)uid);
    struct kld_region *region = NULL;
    if ((status = kld_worker_region_attach(session, publication, &region, err)))
        return status;
    union kld_frame reply;
    kld_frame_init(&reply, KLD_FRAME_ATTACHED, frame->header.request);
    reply.as_ATTACHED.region = region->id;
    reply.as_ATTACHED.bytes = region->bytes;
    reply.as_ATTACHED.tensor = publication->tensor;
    reply.as_ATTACHED.uid = owner_of(publication);
    kld_session_reply(session, &reply);
    return KLD_OK;
}

enum kld_status kld_publication_detach(struct kld_session *session,
                                       const struct kld_frame_name *frame, struct kld_error *err) {
    enum kld_status status = kld_name_check(frame->name, err);
    if (status)
        return status;
    struct kld_publication *publication = find(session->worker, session->uid, frame->name);
    if (!publication || publication->region->session != session)
        return kld_error_set(err, KLD_NOT_FOUND,
                             "DETACH: this connection published no tensor of that name");
    end(publication);
    reply_done(session, frame->header.request);
    return KLD_OK;
}
