/* unix_send.c - what goes to a worker over its Unix socket: requests, several in a packet where
 * they are due together, and what was asked for meanwhile. What there is to send is kept as the
 * state of calls and regions, not as a queue of frames: kld_unix_flush() sends whatever is due.
 * Receives nothing (unix.c). The thread that owns the connection. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "client/unix.h"

/* ---- The socket ----------------------------------------------------------------------------- */

static enum unix_sent outcome(ssize_t sent) {
    if (sent >= 0)
        return UNIX_SENT;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? UNIX_FULL : UNIX_LOST;
}

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
    return outcome(sent);
}

static void want_write(struct unix_connection *u, bool wanted) {
    if (u->want_write == wanted)
        return;
    u->want_write = wanted;
    (void)kld_connection_watch(&u->base, u->socket, KLD_TAG_SOCKET,
                               EPOLLIN | (wanted ? EPOLLOUT : 0), NULL);
}

/* ---- Calls ----------------------------------------------------------------------------------
 */

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

/* Frames on their way into one packet: those of the first `calls` queued calls. */
struct packet {
    uint8_t data[KLD_WIRE_PACKET_BYTES_MAX];
    size_t bytes;
    unsigned frames, calls;
};

static void add_frame(struct packet *packet, const union kld_frame *frame) {
    memcpy(packet->data + packet->bytes, frame, frame->header.length);
    packet->bytes += frame->header.length;
    packet->frames++;
}

/* Right before the request itself. */
static void add_trace(struct packet *packet, const struct kld_call *call) {
    const struct kld_trace_context *trace = &call->request.trace;
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_TRACE, KLD_NUMBER_IGNORED | call->id);
    frame.as_TRACE.target = call->id;
    memcpy(frame.as_TRACE.id, trace->id, sizeof trace->id);
    memcpy(frame.as_TRACE.span, trace->span, sizeof trace->span);
    frame.as_TRACE.flags = trace->flags;
    add_frame(packet, &frame);
}

static bool has_room(const struct unix_connection *u, const struct packet *packet) {
    size_t call_bytes = sizeof(struct kld_frame_submit) + sizeof(struct kld_frame_trace);
    return packet->calls == 0 || ((u->welcome.flags & KLD_WELCOME_PACKETS) &&
                                  packet->frames + 2 <= KLD_WIRE_PACKET_FRAMES_MAX &&
                                  packet->bytes + call_bytes <= KLD_WIRE_PACKET_BYTES_MAX);
}

/* Queued calls in order, as far as their regions are known to the worker. Ends those whose region
 * it does not take. */
static void fill(struct unix_connection *u, struct packet *packet) {
    packet->bytes = packet->frames = packet->calls = 0;
    for (struct kld_call *base = u->queued.first, *next;
         base && u->sent.count + packet->calls < u->welcome.requests_max && has_room(u, packet);
         base = next) {
        struct unix_call *call = (struct unix_call *)base;
        const struct kld_error *error = NULL;
        union kld_frame frame;
        next = base->next;
        enum unix_region_state state = encode(call, &frame, &error);
        if (state == UNIX_REGION_FAILED || state == UNIX_REGION_LOST) {
            struct kld_error kept = *error; /* its region may go with the call */
            kld_unix_call_end(u, call, kept.status, &kept);
            continue;
        }
        if (state != UNIX_REGION_READY)
            return;
        timeouts_encode(u, base, &frame);
        if (is_traced(base))
            add_trace(packet, base);
        add_frame(packet, &frame);
        packet->calls++;
    }
}

static enum unix_sent send_bytes(const struct unix_connection *u, const uint8_t *data,
                                 size_t bytes) {
    ssize_t sent;
    do
        sent = send(u->socket, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return outcome(sent);
}

/* Of one call, in two packets, where the worker takes no others. If the second is not taken now, it
 * is sent once more with the first later. */
static enum unix_sent send_packet(const struct unix_connection *u, const struct packet *packet) {
    size_t first = packet->bytes;
    if (!(u->welcome.flags & KLD_WELCOME_PACKETS) && packet->frames == 2)
        first = sizeof(struct kld_frame_trace);
    enum unix_sent sent = send_bytes(u, packet->data, first);
    if (sent == UNIX_SENT && first < packet->bytes)
        sent = send_bytes(u, packet->data + first, packet->bytes - first);
    return sent;
}

static enum unix_sent flush_calls(struct unix_connection *u) {
    while (u->queued.first && !u->doomed && !u->leaving) {
        struct packet packet;
        fill(u, &packet);
        if (packet.calls == 0)
            break;
        enum unix_sent sent = send_packet(u, &packet);
        if (sent != UNIX_SENT)
            return sent;
        for (; packet.calls; packet.calls--) {
            struct kld_call *call = u->queued.first;
            kld_call_unlink(call);
            kld_call_append(&u->sent, call);
            call->result.attempts += !((struct unix_call *)call)->fence;
        }
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
    /* Ending a call may release its region or event, which comes here again: that is the next
     * turn's. */
    enum unix_sent sent;
    uint32_t shares;
    u->locked = true;
    do {
        sent = flush_control(u);
        if (sent == UNIX_SENT && u->region_work)
            sent = kld_unix_regions_flush(u);
        if (sent == UNIX_SENT && u->share_work)
            sent = kld_unix_shares_flush(u);
        if (sent == UNIX_SENT && u->cancels)
            sent = flush_cancels(u);
        shares = u->share_work; /* some wait for a region, and stay */
        if (sent == UNIX_SENT)
            sent = flush_calls(u);
    } while (sent == UNIX_SENT && (u->region_work || u->share_work > shares));
    u->locked = false;
    if (sent == UNIX_LOST)
        kld_unix_lose(u);
    else
        want_write(u, sent == UNIX_FULL);
}
