/* unix.c - a connection to a worker over its Unix socket: greeting, requests in flight, answers.
 * What happens when the worker goes away is in unix_lost.c.
 * Nothing blocks but open, ping, stats and the two region calls that need an answer, and those run
 * the connection's own loop. What there is to send is kept as the state of calls and regions, not
 * as a queue of frames: kld_unix_flush() sends whatever is due. The thread that owns the
 * connection. */
#include "client/unix.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKOFF_NS_MIN 2000000ull
#define BACKOFF_NS_MAX 100000000ull
#define RECEIVE_MAX 64 /* frames taken in one round, so that others get their turn */

static struct unix_connection *unix_of(struct kld_connection *connection) {
    return (struct unix_connection *)connection;
}

/* ---- The socket ----------------------------------------------------------------------------- */

enum unix_sent kld_unix_send(struct unix_connection *u, const union kld_frame *frame, int fd) {
    struct iovec bytes = {.iov_base = (void *)frame, .iov_len = frame->header.length};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    ssize_t sent;
    do
        sent = sendmsg(u->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return UNIX_SENT;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? UNIX_FULL : UNIX_LOST;
}

static void want_write(struct unix_connection *u, bool wanted) {
    if (u->want_write == wanted)
        return;
    u->want_write = wanted;
    (void)kld_connection_watch(&u->base, u->socket, KLD_TAG_SOCKET,
                               EPOLLIN | (wanted ? EPOLLOUT : 0), NULL);
}

void kld_unix_retry_later(struct unix_connection *u) {
    if (u->backoff_ns == 0)
        u->backoff_ns = BACKOFF_NS_MIN;
    u->retry_at_ns = kld_now_ns() + u->backoff_ns;
    u->backoff_ns = u->backoff_ns * 2 > BACKOFF_NS_MAX ? BACKOFF_NS_MAX : u->backoff_ns * 2;
    kld_connection_arm(&u->base, u->retry_at_ns);
}

static void refuse(struct unix_connection *u, enum kld_status status, const char *text) {
    kld_error_set(&u->fatal, status, "%s", text);
}

/* Connects and greets; on any failure the next try is armed. */
void kld_unix_connect(struct unix_connection *u) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, u->path, sizeof address.sun_path);
    u->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (u->socket >= 0 && connect(u->socket, (struct sockaddr *)&address, sizeof address) == 0 &&
        kld_connection_watch(&u->base, u->socket, KLD_TAG_SOCKET, EPOLLIN, NULL) == KLD_OK) {
        union kld_frame frame;
        kld_frame_init(&frame, KLD_FRAME_HELLO, KLD_NUMBER_CONTROL);
        frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
        snprintf(frame.as_HELLO.client_name, sizeof frame.as_HELLO.client_name, "%s",
                 u->base.options.client_name);
        u->state = UNIX_GREETING;
        u->want_write = false;
        if (kld_unix_send(u, &frame, -1) == UNIX_SENT)
            return;
    } else if (errno == EACCES || errno == EPERM) {
        refuse(u, KLD_FORBIDDEN, "not allowed to use this socket; its mode or group excludes you");
    } else if (errno == EPROTOTYPE || errno == ENOTSOCK) {
        refuse(u, KLD_INVALID, "there is no kld socket at this path but something else");
    }
    if (u->socket >= 0)
        close(u->socket);
    u->socket = -1;
    u->state = UNIX_DOWN;
    kld_unix_retry_later(u);
}

/* ---- Calls: from queued to sent to ended ------------------------------------------------------
 */

/* Out of the lists and off its memory; delivered unless that was done before. */
static void end_call(struct unix_connection *u, struct unix_call *call, enum kld_status status,
                     const struct kld_error *error) {
    kld_call_unlink(&call->base);
    u->cancels -= call->cancel_wanted;
    call->cancel_wanted = false;
    kld_unix_stage_free(call);
    kld_call_drop_regions(&call->base);
    if (!call->abandoned)
        kld_call_end(&u->base, &call->base, status, error);
    kld_call_release(&u->base, &call->base);
}

void kld_unix_call_fail(struct unix_connection *u, struct unix_call *call, enum kld_status status,
                        const char *text) {
    struct kld_error error;
    kld_error_set(&error, status, "%s", text);
    end_call(u, call, status, &error);
}

/* The wire id of a region that a call needs. READY: *ret_id is set. */
static enum unix_region_state region_id(const struct kld_region *base, uint64_t *ret_id) {
    const struct unix_region *region = (const struct unix_region *)base;
    *ret_id = region->wire_id;
    return region->state;
}

/* The event's id; its state, where it is not ready. */
static enum unix_region_state event_id(const struct kld_event *base, uint64_t *ret_id,
                                       const struct kld_error **ret_error) {
    const struct unix_event *event = (const struct unix_event *)base;
    *ret_id = event ? event->wire_id : 0;
    if (event)
        *ret_error = &event->error;
    return event ? event->state : UNIX_REGION_READY;
}

/* Fills in the regions and events of the frame; the state of the first that is not ready. */
static enum unix_region_state encode(const struct unix_call *call, union kld_frame *frame,
                                     const struct kld_error **ret_error) {
    const struct kld_call *base = &call->base;
    const struct kld_region *regions[KLD_SLOT_COUNT] = {NULL};
    uint64_t ids[KLD_SLOT_COUNT] = {0};
    if (base->copy.destination) {
        regions[0] = base->copy.destination;
        regions[1] = base->copy.source;
    }
    for (int slot = 0; slot < KLD_SLOT_COUNT && !base->copy.destination; slot++)
        if (base->request.op.tensor[slot].dtype)
            regions[slot] = base->request.bytes[slot].region ? base->request.bytes[slot].region
                                                             : &call->stage->region->base;
    for (int i = 0; i < KLD_SLOT_COUNT; i++) {
        enum unix_region_state state =
            regions[i] ? region_id(regions[i], &ids[i]) : UNIX_REGION_READY;
        if (state == UNIX_REGION_READY)
            continue;
        *ret_error = &((const struct unix_region *)regions[i])->error;
        return state;
    }
    if (base->copy.destination) {
        kld_frame_init(frame, KLD_FRAME_COPY, base->id);
        frame->as_COPY.destination = ids[0];
        frame->as_COPY.source = ids[1];
        frame->as_COPY.destination_offset_bytes = base->copy.destination_offset_bytes;
        frame->as_COPY.source_offset_bytes = base->copy.source_offset_bytes;
        frame->as_COPY.bytes = base->copy.bytes;
        frame->as_COPY.stream = base->copy.stream;
        return UNIX_REGION_READY;
    }
    struct kld_op op = base->request.op;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        struct kld_tensor *tensor = &op.tensor[slot];
        if (!tensor->dtype)
            continue;
        tensor->region = ids[slot];
        tensor->offset_bytes = base->request.bytes[slot].region
                                   ? base->request.bytes[slot].offset_bytes
                                   : call->stage_offset + call->staged_at[slot];
        if (base->request.bytes[slot].data)
            tensor->row_stride_bytes = 0; /* packed in staging */
    }
    kld_frame_init(frame, KLD_FRAME_SUBMIT, base->id);
    struct kld_frame_submit *submit = &frame->as_SUBMIT;
    kld_submit_encode(&op, submit);
    submit->stream = base->request.stream;
    submit->flags = base->request.early ? KLD_SUBMIT_EARLY : 0;
    enum unix_region_state state = event_id(base->request.wait, &submit->ready_event, ret_error);
    if (state == UNIX_REGION_READY)
        state = event_id(base->request.record, &submit->done_event, ret_error);
    return state;
}

static void timeouts_encode(const struct unix_connection *u, const struct kld_call *call,
                            union kld_frame *frame) {
    uint32_t streams = u->welcome.streams_max ? u->welcome.streams_max : 1;
    if (frame->header.type == KLD_FRAME_COPY) {
        frame->as_COPY.stream %= streams;
        return;
    }
    frame->as_SUBMIT.stream %= streams;
    if (call->deadline_ns == KLD_NEVER)
        return;
    uint64_t now = kld_now_ns();
    frame->as_SUBMIT.timeout_ns = call->deadline_ns > now ? call->deadline_ns - now : 1;
}

static bool is_traced(const struct kld_call *call) {
    static const struct kld_trace_context none;
    const struct kld_trace_context *trace = &call->request.trace;
    return !call->copy.destination && memcmp(trace->id, none.id, sizeof none.id) != 0 &&
           memcmp(trace->span, none.span, sizeof none.span) != 0;
}

/* Before the request itself. Where that is not taken now, it is sent once more with it later. */
static enum unix_sent send_trace(struct unix_connection *u, const struct kld_call *call) {
    const struct kld_trace_context *trace = &call->request.trace;
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_TRACE, KLD_NUMBER_IGNORED | call->id);
    frame.as_TRACE.target = call->id;
    memcpy(frame.as_TRACE.id, trace->id, sizeof trace->id);
    memcpy(frame.as_TRACE.span, trace->span, sizeof trace->span);
    frame.as_TRACE.flags = trace->flags;
    return kld_unix_send(u, &frame, -1);
}

/* Sends queued calls in order, as far as their regions are known to the worker. */
static enum unix_sent flush_calls(struct unix_connection *u) {
    while (u->queued.first && u->sent.count < u->welcome.requests_max && !u->doomed &&
           !u->leaving) {
        struct unix_call *call = (struct unix_call *)u->queued.first;
        const struct kld_error *error = NULL;
        union kld_frame frame;
        enum unix_region_state state = encode(call, &frame, &error);
        if (state == UNIX_REGION_FAILED || state == UNIX_REGION_LOST) {
            struct kld_error kept = *error; /* its region may go with the call */
            end_call(u, call, kept.status, &kept);
            continue;
        }
        if (state != UNIX_REGION_READY)
            return UNIX_SENT;
        timeouts_encode(u, &call->base, &frame);
        enum unix_sent sent = is_traced(&call->base) ? send_trace(u, &call->base) : UNIX_SENT;
        if (sent == UNIX_SENT)
            sent = kld_unix_send(u, &frame, -1);
        if (sent != UNIX_SENT)
            return sent;
        kld_call_unlink(&call->base);
        kld_call_append(&u->sent, &call->base);
        call->base.result.attempts++;
    }
    return UNIX_SENT;
}

static enum unix_sent flush_cancels(struct unix_connection *u) {
    for (struct kld_call *base = u->sent.first; base && u->cancels; base = base->next) {
        struct unix_call *call = (struct unix_call *)base;
        if (!call->cancel_wanted)
            continue;
        union kld_frame frame;
        kld_frame_init(&frame, KLD_FRAME_CANCEL, KLD_NUMBER_IGNORED | base->id);
        frame.as_CANCEL.target = base->id;
        enum unix_sent sent = kld_unix_send(u, &frame, -1);
        if (sent != UNIX_SENT)
            return sent;
        call->cancel_wanted = false;
        u->cancels--;
    }
    return UNIX_SENT;
}

static enum unix_sent flush_control(struct unix_connection *u) {
    if (!u->control.wanted || u->control.sent)
        return UNIX_SENT;
    enum unix_sent sent = kld_unix_send(u, &u->control.frame, -1);
    u->control.sent = sent == UNIX_SENT;
    return sent;
}

void kld_unix_flush(struct unix_connection *u) {
    if (u->state != UNIX_UP || u->locked)
        return;
    /* Ending a call may release its region, which comes here again: that is the next turn's. */
    enum unix_sent sent;
    u->locked = true;
    do {
        sent = flush_control(u);
        if (sent == UNIX_SENT && u->region_work)
            sent = kld_unix_regions_flush(u);
        if (sent == UNIX_SENT && u->share_work)
            sent = kld_unix_shares_flush(u);
        if (sent == UNIX_SENT && u->cancels)
            sent = flush_cancels(u);
        if (sent == UNIX_SENT)
            sent = flush_calls(u);
    } while (sent == UNIX_SENT && u->region_work);
    u->locked = false;
    if (sent == UNIX_LOST)
        kld_unix_lose(u);
    else
        want_write(u, sent == UNIX_FULL);
}

/* ---- Answers ----------------------------------------------------------------------------------
 */

static void welcomed(struct unix_connection *u, const struct kld_frame_welcome *welcome) {
    u->welcome = *welcome;
    u->welcome.backend[sizeof u->welcome.backend - 1] = '\0';
    if (u->welcome.requests_max == 0)
        u->welcome.requests_max = 1;
    u->base.calls_max =
        u->welcome.requests_max < KLD_CALLS_MAX ? u->welcome.requests_max : KLD_CALLS_MAX;
    u->welcomed = true;
    u->base.links++;
    u->fatal.status = KLD_OK;
    u->base.offloaded = strcmp(u->welcome.backend, "cpu") != 0;
    u->state = UNIX_UP;
    if (kld_unix_priorities_send(u) != UNIX_SENT)
        kld_unix_lose(u);
    else
        kld_unix_flush(u);
}

static void call_done(struct unix_connection *u, struct unix_call *call,
                      const struct kld_frame_done *done) {
    struct kld_result *result = &call->base.result;
    u->backoff_ns = BACKOFF_NS_MIN; /* it works: the next loss starts from the shortest pause */
    result->loss = done->loss;
    result->scalar = done->scalar != 0;
    result->queue_ns = done->queue_ns;
    result->copy_ns = done->copy_ns;
    result->kernel_ns = done->kernel_ns;
    result->bytes = done->bytes;
    if (!call->abandoned)
        kld_unix_stage_get(call);
    end_call(u, call, KLD_OK, NULL);
}

static void call_failed(struct unix_connection *u, struct unix_call *call,
                        const struct kld_error *error) {
    switch (error->status) {
    case KLD_DEVICE_LOST: /* the worker is about to end: kld_unix_lose() sees to the call */
        u->doomed = call->lost_device = true;
        return;
    case KLD_UNAVAILABLE: /* it takes nothing new; what it has it will answer */
        u->leaving = call->refused = true;
        return;
    case KLD_DEADLINE:
    case KLD_CANCELLED:
        if (!call->stage || call->fence)
            break;
        kld_unix_fence(u, call, error);
        return;
    case KLD_BUSY:
    case KLD_THROTTLED:
        if (!call->fence)
            break;
        kld_call_unlink(&call->base); /* asked again */
        kld_call_append(&u->queued, &call->base);
        return;
    default: break;
    }
    end_call(u, call, error->status, error);
}

/* Is there nothing to wait for any more from a worker that is leaving? */
static bool left(const struct unix_connection *u) {
    for (const struct kld_call *call = u->sent.first; call; call = call->next)
        if (!((const struct unix_call *)call)->refused)
            return false;
    return u->leaving;
}

static void control_answered(struct unix_connection *u, const union kld_frame *frame,
                             const struct kld_error *error) {
    if (u->state == UNIX_GREETING) {
        bool passing = error->status == KLD_BUSY || error->status == KLD_UNAVAILABLE;
        if (!passing)
            u->fatal = *error;
        kld_unix_lose(u);
        return;
    }
    if (!u->control.sent || u->control.ended ||
        frame->header.request != u->control.frame.header.request)
        return;
    u->control.ended = true;
    u->control.reply = *frame;
    if (error)
        u->control.error = *error;
}

static void frame_received(struct unix_connection *u, const union kld_frame *frame) {
    uint64_t number = frame->header.request & ~KLD_NUMBER_KIND;
    struct kld_error error, *failed = NULL;
    if (frame->header.type == KLD_FRAME_ERROR) {
        bool known = frame->as_ERROR.status && kld_status_known(frame->as_ERROR.status);
        enum kld_status status = known ? (enum kld_status)frame->as_ERROR.status : KLD_INTERNAL;
        const char *text = frame->as_ERROR.text;
        kld_error_set(&error, status, "%.*s", KLD_ERROR_TEXT_MAX - 1,
                      text[0] ? text : kld_status_text(status));
        failed = &error;
    }
    if (u->state == UNIX_GREETING) {
        if (frame->header.type == KLD_FRAME_WELCOME)
            welcomed(u, &frame->as_WELCOME);
        else if (failed)
            control_answered(u, frame, failed);
        return;
    }
    switch (frame->header.request & KLD_NUMBER_KIND) {
    case KLD_NUMBER_CALL: {
        struct unix_call *call = (struct unix_call *)kld_call_find(&u->base, number);
        if (!call || call->base.list != &u->sent)
            return;
        if (failed)
            call_failed(u, call, failed);
        else if (frame->header.type == KLD_FRAME_DONE)
            call_done(u, call, &frame->as_DONE);
        return;
    }
    case KLD_NUMBER_REGION:
        if (!kld_unix_region_answered(u, number, frame, failed))
            kld_unix_share_answered(u, number, frame, failed);
        return;
    case KLD_NUMBER_CONTROL: control_answered(u, frame, failed); return;
    default: return;
    }
}

static void receive(struct unix_connection *u) {
    for (int i = 0; i < RECEIVE_MAX && u->socket >= 0; i++) {
        union kld_frame frame;
        struct iovec bytes = {.iov_base = &frame, .iov_len = sizeof frame};
        struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
        ssize_t count = recvmsg(u->socket, &message, MSG_DONTWAIT);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        uint64_t request;
        struct kld_error error = {.status = KLD_OK};
        int cut = message.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
        if (count <= 0 || kld_frame_check(&frame, (size_t)count, 0, cut, &request, &error)) {
            if (error.status == KLD_VERSION)
                u->fatal = error; /* to whoever waits: another try would end the same way */
            kld_unix_lose(u);     /* the end, or something that is not our server */
            return;
        }
        frame_received(u, &frame);
        if (u->state == UNIX_UP && !u->sent.first && !u->doomed)
            break; /* nothing else is expected: spare the call that would say so */
    }
    if (u->doomed || left(u))
        kld_unix_lose(u);
    else
        kld_unix_flush(u);
}

void kld_unix_event(struct kld_connection *connection, uint64_t tag, uint32_t events) {
    struct unix_connection *u = unix_of(connection);
    if (u->socket < 0)
        return;
    if (events & EPOLLOUT)
        kld_unix_flush(u);
    if (u->socket >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        receive(u);
}
