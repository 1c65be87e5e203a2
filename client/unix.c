/* unix.c - a connection to a worker over its Unix socket: greeting, requests in flight, answers.
 * What is sent is unix_send.c's; what happens when the worker goes away is in unix_lost.c.
 * Nothing blocks but open, questions and what makes a region, and those run the connection's own
 * loop. The thread that owns the connection. */
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
    u->owner = getpid();
    u->nobody = false;
    u->lacking.status = KLD_OK;
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
    } else {
        u->nobody = errno == ENOENT || errno == ECONNREFUSED;
        if (u->socket < 0) /* for now: another thread may close files */
            (void)kld_socket_lacks(errno, &u->lacking);
    }
    kld_unix_hang_up(u);
    u->state = UNIX_DOWN;
    kld_unix_retry_later(u);
}

/* ---- Calls: from queued to sent to ended ------------------------------------------------------
 */

void kld_unix_call_end(struct unix_connection *u, struct unix_call *call, enum kld_status status,
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
    kld_unix_call_end(u, call, status, &error);
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
    u->fatal.status = u->put_off.status = KLD_OK;
    u->base.offloaded = strcmp(u->welcome.backend, "cpu") != 0;
    u->state = UNIX_UP;
    kld_unix_watch_link(u);
    kld_unix_attached_welcomed(u);
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
    result->fence_number = done->fence_number;
    if (!call->abandoned)
        kld_unix_stage_get(call);
    kld_unix_call_end(u, call, KLD_OK, NULL);
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
    kld_unix_call_end(u, call, error->status, error);
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
        bool passing = error->status == KLD_BUSY || error->status == KLD_UNAVAILABLE ||
                       error->status == KLD_NO_MEMORY ||
                       error->status == KLD_DEADLINE; /* HELLO came too late */
        *(passing ? &u->put_off : &u->fatal) = *error;
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

/* Of one packet; false: the connection is lost. */
static bool packet_received(struct unix_connection *u, const uint8_t *data, size_t bytes, int cut,
                            unsigned *ret_frames) {
    uint64_t request;
    struct kld_error error = {.status = KLD_OK};
    if (bytes == 0 || kld_packet_check(data, bytes, 0, cut, ret_frames, &request, &error)) {
        if (error.status == KLD_VERSION)
            u->fatal = error; /* to whoever waits: another try would end the same way */
        return false;         /* the end, or something that is not our server */
    }
    for (size_t at = 0; at < bytes && u->socket >= 0;) {
        union kld_frame frame;
        struct kld_frame_header header;
        bool was_up = u->state == UNIX_UP;
        memcpy(&header, data + at, sizeof header);
        memcpy(&frame, data + at, header.length);
        frame_received(u, &frame);
        at += header.length;
        if (was_up && u->state != UNIX_UP)
            break; /* gone to another worker: the rest is not that one's greeting */
    }
    return true;
}

static void receive(struct unix_connection *u) {
    for (unsigned read = 0; read < RECEIVE_MAX && u->socket >= 0;) {
        union {
            union kld_frame frame;
            uint8_t data[KLD_WIRE_PACKET_BYTES_MAX];
        } packet;
        struct iovec bytes = {.iov_base = &packet, .iov_len = sizeof packet};
        struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
        unsigned frames = 1;
        ssize_t count = recvmsg(u->socket, &message, MSG_DONTWAIT);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        int cut = message.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
        if (!packet_received(u, packet.data, count < 0 ? 0 : (size_t)count, cut, &frames)) {
            kld_unix_lose(u);
            return;
        }
        read += frames;
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
