/* frames.c - what each frame of a client asks for. One in, at most one immediate reply out;
 * REGION_ADD, REGION_GROW, EVENT_ADD, FENCE_ADD, SUBMIT and COPY are answered later by region.c,
 * event.c and core.c. Reads and writes no socket (session.c). Worker process, loop thread. */
#include <string.h>
#include <sys/socket.h>

#include "server/log.h"
#include "server/worker/core.h"
#include "server/worker/event.h"
#include "server/worker/publish.h"
#include "server/worker/quota.h"
#include "server/worker/space.h"

/* Letters for logs: printable, and nothing that ends a quoted value. */
static enum kld_status take_name(struct kld_session *session, const char *name,
                                 struct kld_error *err) {
    size_t length = strnlen(name, KLD_WIRE_NAME_MAX);
    bool good = length < KLD_WIRE_NAME_MAX;
    for (size_t i = 0; i < KLD_WIRE_NAME_MAX; i++)
        good = good && (i < length ? name[i] >= ' ' && name[i] <= '~' : name[i] == 0);
    if (!good)
        return kld_error_set(err, KLD_INVALID,
                             "HELLO: client_name must be printable ASCII, padded with NUL");
    for (size_t i = 0; i < KLD_WIRE_NAME_MAX; i++)
        session->name[i] = (char)(name[i] == '"' || name[i] == '\\' ? '_' : name[i]);
    return KLD_OK;
}

static void list_devices(const struct kld_stats_page *page, struct kld_frame_welcome *welcome) {
    welcome->devices = kld_stats_workers(page);
    for (uint32_t i = 0; i < welcome->devices; i++) {
        memcpy(welcome->device_list[i].uuid, page->device[i].uuid, KLD_WIRE_UUID_BYTES);
        memcpy(welcome->device_list[i].name, page->device[i].name, KLD_WIRE_NAME_MAX - 1);
    }
}

static enum kld_status hello(struct kld_session *session, const struct kld_frame_hello *frame,
                             struct kld_error *err) {
    struct kld_worker *worker = session->worker;
    const struct kld_config *config = worker->options.config;
    const struct kld_device_info *info = &worker->device->info;
    if (session->greeted)
        return kld_error_set(err, KLD_INVALID, "HELLO came twice");
    if (frame->version_min > KLD_WIRE_VERSION || frame->version_max < KLD_WIRE_VERSION)
        return kld_error_set(err, KLD_VERSION,
                             "the client speaks versions %u to %u; this server speaks %d",
                             frame->version_min, frame->version_max, KLD_WIRE_VERSION);
    if (frame->reserved != 0)
        return kld_error_set(err, KLD_INVALID, "HELLO: reserved field is not 0");
    enum kld_status status = take_name(session, frame->client_name, err);
    if (status)
        return status;
    session->greeted = true;

    union kld_frame reply;
    kld_frame_init(&reply, KLD_FRAME_WELCOME, frame->header.request);
    struct kld_frame_welcome *welcome = &reply.as_WELCOME;
    welcome->epoch = worker->epoch;
    welcome->version = KLD_WIRE_VERSION;
    welcome->device = (uint16_t)worker->options.index;
    list_devices(worker->options.page, welcome);
    memcpy(welcome->backend, info->backend, sizeof welcome->backend);
    welcome->regions_max = kld_quota_regions_max(session);
    welcome->requests_max = kld_quota_requests_max(session);
    welcome->streams_max = (uint32_t)config->client_streams_max;
    welcome->events_max = info->imports_cuda_ipc ? KLD_SESSION_EVENTS_MAX : 0;
    welcome->flags =
        KLD_WELCOME_PACKETS |
        (config->peer_access && worker->options.backend->reaches ? KLD_WELCOME_PEERS : 0) |
        (info->imports_cuda_ipc ? KLD_WELCOME_SPACES : 0);
    welcome->publications_max = (uint32_t)config->user_publications_max;
    welcome->region_bytes_max = kld_quota_region_bytes_max(session);
    welcome->pool_bytes_max = info->pool_bytes_max;
    kld_session_reply(session, &reply);
    return KLD_OK;
}

static void stats(struct kld_session *session, uint64_t request) {
    struct kld_worker *worker = session->worker;
    union kld_frame reply;
    kld_frame_init(&reply, KLD_FRAME_STATS_REPLY, request);
    struct kld_frame_stats_reply *out = &reply.as_STATS_REPLY;
    out->epoch = worker->epoch;
    out->uptime_ns = kld_worker_now_ns() - worker->started_ns;
    out->requests_total = worker->requests_total;
    out->errors_total = worker->errors_total;
    out->in_flight = worker->queue.in_use;
    out->clients = worker->clients;
    out->regions = worker->regions;
    out->region_bytes = worker->region_bytes;
    out->pool_bytes = worker->options.backend->pool_bytes(worker->device);
    out->pool_bytes_max = worker->device->info.pool_bytes_max;
    out->kernel_ns_total = worker->kernel_ns_total;
    out->bytes_total = worker->bytes_total;
    kld_session_reply(session, &reply);
}

static void reply_plain(struct kld_session *session, enum kld_frame_type type, uint64_t request) {
    union kld_frame reply;
    kld_frame_init(&reply, type, request);
    kld_session_reply(session, &reply);
}

static enum kld_status set_stream(struct kld_session *session, const struct kld_frame_stream *frame,
                                  struct kld_error *err) {
    uint64_t streams = session->worker->options.config->client_streams_max;
    if (frame->stream >= streams)
        return kld_error_set(err, KLD_INVALID, "stream %u; expected a number below %llu",
                             frame->stream, (unsigned long long)streams);
    if (frame->priority < KLD_PRIORITY_LOW || frame->priority > KLD_PRIORITY_HIGH)
        return kld_error_set(err, KLD_INVALID,
                             "priority %d; expected -1 (low), 0 (normal) or 1 (high)",
                             frame->priority);
    struct kld_lane *lane = &session->lanes[frame->stream];
    if (lane->state != KLD_LANE_CLOSED)
        return kld_error_set(err, KLD_INVALID,
                             "stream %u is in use; its priority is set before its first request",
                             frame->stream);
    lane->priority = (enum kld_priority)frame->priority;
    return KLD_OK;
}

static enum kld_status set_trace(struct kld_session *session, const struct kld_frame_trace *frame,
                                 struct kld_error *err) {
    static const uint8_t none[16];
    if (memcmp(frame->id, none, sizeof frame->id) == 0 ||
        memcmp(frame->span, none, sizeof frame->span) == 0 || frame->flags > UINT8_MAX ||
        frame->reserved || frame->target == 0)
        return kld_error_set(err, KLD_INVALID,
                             "TRACE with a target, id or span that is 0, flags over 255, or a "
                             "reserved field that is not 0");
    session->trace_target = frame->target;
    session->trace.is_there = true;
    memcpy(session->trace.id, frame->id, sizeof frame->id);
    memcpy(session->trace.span, frame->span, sizeof frame->span);
    session->trace.flags = (uint8_t)frame->flags;
    return KLD_OK;
}

/* Frames that are answered by a DONE without contents. */
static enum kld_status act(struct kld_session *session, const union kld_frame *frame,
                           struct kld_error *err) {
    enum kld_status status;
    switch (frame->header.type) {
    case KLD_FRAME_REGION_DROP:
        status = kld_worker_region_drop(session, frame->as_REGION_DROP.region, err);
        break;
    case KLD_FRAME_EVENT_DROP:
        status = kld_worker_event_drop(session, frame->as_EVENT_DROP.event, err);
        break;
    case KLD_FRAME_STREAM: status = set_stream(session, &frame->as_STREAM, err); break;
    default: status = kld_core_cancel(session, frame->as_CANCEL.target, err);
    }
    if (status == KLD_OK)
        reply_plain(session, KLD_FRAME_DONE, frame->header.request);
    return status;
}

/* ret_fd_taken: the descriptor now belongs to a region. */
static enum kld_status dispatch(struct kld_session *session, const union kld_frame *frame, int fd,
                                bool *ret_fd_taken, struct kld_error *err) {
    enum kld_status status;
    uint64_t request = frame->header.request;
    if (!session->greeted && frame->header.type != KLD_FRAME_HELLO)
        return kld_error_set(err, KLD_INVALID, "%s before HELLO; the first frame must be HELLO",
                             kld_frame_name(frame->header.type));
    switch (frame->header.type) {
    case KLD_FRAME_HELLO: return hello(session, &frame->as_HELLO, err);
    case KLD_FRAME_REGION_ADD:
        status = kld_worker_region_add(session, &frame->as_REGION_ADD, fd, err);
        *ret_fd_taken = status == KLD_OK && fd >= 0;
        return status;
    case KLD_FRAME_REGION_GROW:
        status = kld_space_grow(session, &frame->as_REGION_GROW, fd, err);
        *ret_fd_taken = status == KLD_OK;
        return status;
    case KLD_FRAME_EVENT_ADD: return kld_worker_event_add(session, &frame->as_EVENT_ADD, err);
    case KLD_FRAME_FENCE_ADD: return kld_worker_fence_add(session, &frame->as_FENCE_ADD, err);
    case KLD_FRAME_PUBLISH: return kld_publication_open(session, &frame->as_PUBLISH, err);
    case KLD_FRAME_ATTACH: return kld_publication_attach(session, &frame->as_ATTACH, err);
    case KLD_FRAME_DETACH: return kld_publication_detach(session, &frame->as_DETACH, err);
    case KLD_FRAME_REGION_DROP:
    case KLD_FRAME_EVENT_DROP:
    case KLD_FRAME_STREAM:
    case KLD_FRAME_CANCEL: return act(session, frame, err);
    case KLD_FRAME_COPY: return kld_core_copy(session, &frame->as_COPY, err);
    case KLD_FRAME_SUBMIT: return kld_core_submit(session, &frame->as_SUBMIT, err);
    case KLD_FRAME_TRACE: return set_trace(session, &frame->as_TRACE, err);
    case KLD_FRAME_STATS: stats(session, request); return KLD_OK;
    case KLD_FRAME_PING: reply_plain(session, KLD_FRAME_PONG, request); return KLD_OK;
    default:
        return kld_error_set(err, KLD_INVALID, "%s is not a frame that a client sends",
                             kld_frame_name(frame->header.type));
    }
}

/* One that is whole. fd: -1 for none. */
static void frame_came(struct kld_session *session, const void *data, size_t bytes, int fd,
                       bool *ret_fd_taken) {
    struct kld_error error = {.status = KLD_OK};
    union kld_frame frame;
    memcpy(&frame, data, bytes);
    if (dispatch(session, &frame, fd, ret_fd_taken, &error) == KLD_OK)
        return;
    if (frame.header.type == KLD_FRAME_SUBMIT || frame.header.type == KLD_FRAME_COPY)
        kld_core_refused(session, &frame.header, &error);
    kld_session_reply_error(session, frame.header.request, &error);
}

unsigned kld_session_packet(struct kld_session *session, const void *data, size_t bytes, int flags,
                            int *fds, unsigned fds_count) {
    struct kld_stats *counters = session->worker->stats;
    struct kld_error error = {.status = KLD_OK};
    uint64_t request = 0;
    unsigned frames = 1;
    bool fd_taken = false;
    enum kld_status status = kld_packet_check(data, bytes, fds_count, (flags & MSG_TRUNC) != 0,
                                              &frames, &request, &error);
    /* There was room for all that a packet can carry: this process had none for them. */
    if (status && (flags & MSG_CTRUNC))
        kld_error_set(&error, KLD_NO_MEMORY,
                      "the worker has no file descriptor left for the one that came with this");
    else if (status)
        kld_stats_add(counters, KLD_STAT_unix_frames_invalid_total, 1);
    if (status)
        kld_session_reply_error(session, request, &error);
    session->packs = session->packs || (!status && frames > 1);
    for (size_t at = 0; at < bytes && !status && !session->worker->lost;) {
        struct kld_frame_header header;
        memcpy(&header, (const uint8_t *)data + at, sizeof header);
        frame_came(session, (const uint8_t *)data + at, header.length, fds_count ? fds[0] : -1,
                   &fd_taken);
        at += header.length;
    }
    if (fds_count > fd_taken)
        kld_strays_close(session->worker->strays, session->uid, fds + fd_taken,
                         fds_count - fd_taken);
    return frames;
}
