/* session.c - a client's connection: packets in, replies out, and its end.
 * Does not know what a frame means (frames.c). Never blocks; allocates only in kld_session_open().
 * Worker process, loop thread. */
#include "server/worker/session.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"
#include "server/worker/closer.h"
#include "server/worker/core.h"
#include "server/worker/event.h"
#include "server/worker/health.h"
#include "server/worker/peer.h"
#include "server/worker/places.h"
#include "server/worker/quota.h"

/* ---- Out ------------------------------------------------------------------------------------- */

static bool send_now(struct kld_session *session, const void *data, size_t bytes) {
    for (;;) {
        if (send(session->fd, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
            return true;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != ENOBUFS) {
            session->broken = true;
            shutdown(session->fd, SHUT_RDWR); /* the client is not to wait; the poll reports it */
        }
        return false;
    }
}

/* Of the next packet. Each frame says its own length. */
static size_t next_packet(const struct kld_session *session) {
    size_t at = session->out_head, most = session->packs ? KLD_WIRE_PACKET_FRAMES_MAX : 1;
    for (size_t frames = 0; frames < most && at < session->out_tail; frames++) {
        struct kld_frame_header header;
        memcpy(&header, session->out + at, sizeof header);
        if (frames && (at + header.length - session->out_head > KLD_WIRE_PACKET_BYTES_MAX ||
                       !kld_frame_may_follow(header.type)))
            break;
        at += header.length;
        if (!kld_frame_may_follow(header.type))
            break;
    }
    return at - session->out_head;
}

void kld_session_flush(struct kld_session *session) {
    while (session->out_head < session->out_tail && !session->broken) {
        size_t bytes = next_packet(session);
        if (!send_now(session, session->out + session->out_head, bytes))
            return;
        session->out_head += bytes;
    }
    session->out_head = session->out_tail = 0;
}

void kld_session_hold(struct kld_worker *worker) { worker->holding = true; }

static void sent_later(struct kld_session *session) {
    session->unsent = true;
    TAILQ_INSERT_TAIL(&session->worker->unsent, session, in_unsent);
}

static void not_sent_later(struct kld_session *session) {
    if (session->unsent)
        TAILQ_REMOVE(&session->worker->unsent, session, in_unsent);
    session->unsent = false;
}

void kld_session_release(struct kld_worker *worker) {
    struct kld_session *session;
    worker->holding = false;
    while ((session = TAILQ_FIRST(&worker->unsent))) {
        not_sent_later(session);
        kld_session_flush(session);
        kld_session_poll(session);
    }
}

void kld_session_reply(struct kld_session *session, const union kld_frame *frame) {
    size_t bytes = frame->header.length;
    if (session->state != KLD_SESSION_OPEN || session->broken)
        return;
    bool held = session->worker->holding && session->packs;
    if (session->out_tail == 0 && !held && (send_now(session, frame, bytes) || session->broken))
        return;
    if (session->out_max - session->out_tail < bytes) {
        memmove(session->out, session->out + session->out_head,
                session->out_tail - session->out_head);
        session->out_tail -= session->out_head;
        session->out_head = 0;
    }
    if (session->out_max - session->out_tail < bytes) { /* out_max makes room for all: a defect */
        kld_log(KLD_LOG_ERROR, "replies overflow", "client=\"%s\"", session->name);
        session->broken = true;
        shutdown(session->fd, SHUT_RDWR);
        return;
    }
    if (held && session->out_tail == 0)
        sent_later(session);
    memcpy(session->out + session->out_tail, frame, bytes);
    session->out_tail += bytes;
    if (!session->unsent)
        kld_session_poll(session);
}

void kld_session_error_frame(union kld_frame *frame, uint64_t request,
                             const struct kld_error *error) {
    kld_frame_init(frame, KLD_FRAME_ERROR, request);
    frame->as_ERROR.status = error->status;
    /* Nothing behind the text: what lay there before it is not for clients. */
    memcpy(frame->as_ERROR.text, error->text, strnlen(error->text, sizeof error->text - 1));
}

void kld_session_reply_error(struct kld_session *session, uint64_t request,
                             const struct kld_error *error) {
    union kld_frame frame;
    kld_session_error_frame(&frame, request, error);
    kld_session_reply(session, &frame);
}

/* ---- In -------------------------------------------------------------------------------------- */

/* A packet of 0 bytes and the end of the connection look the same to recvmsg(). */
static bool at_end(int fd) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLRDHUP};
    return poll(&poll_fd, 1, 0) != 0;
}

/* Takes the descriptors out of a message. The room for them is all that a packet can carry, so none
 * is dropped by the kernel on this thread. */
static unsigned take_fds(struct msghdr *message, int *fds) {
    unsigned count = 0;
    for (struct cmsghdr *at = CMSG_FIRSTHDR(message); at; at = CMSG_NXTHDR(message, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS)
            continue;
        unsigned more = (unsigned)((at->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (unsigned i = 0; i < more && count < KLD_SESSION_FDS_MAX; i++)
            memcpy(&fds[count++], CMSG_DATA(at) + i * sizeof(int), sizeof(int));
    }
    return count;
}

/* Returns the number of frames read; 0: nothing more to read now. *ret_end: the connection ended.
 */
static unsigned receive(struct kld_session *session, bool *ret_end) {
    union {
        union kld_frame frame;
        uint8_t space[KLD_WIRE_PACKET_BYTES_MAX];
    } packet;
    union {
        char space[CMSG_SPACE(sizeof(int) * KLD_SESSION_FDS_MAX)];
        struct cmsghdr align;
    } control;
    int fds[KLD_SESSION_FDS_MAX];
    struct iovec part = {.iov_base = &packet, .iov_len = sizeof packet};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    ssize_t bytes = recvmsg(session->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes < 0) {
        *ret_end = errno != EAGAIN && errno != EINTR;
        return 0;
    }
    unsigned fds_count = take_fds(&message, fds);
    if (bytes == 0 && fds_count == 0 && at_end(session->fd)) {
        *ret_end = true;
        return 0;
    }
    return kld_session_packet(session, &packet, (size_t)bytes, message.msg_flags, fds, fds_count);
}

/* Of what waits to be closed. The gateway's callers send none, so it waits for nobody's. */
static bool has_room(const struct kld_session *session) {
    struct kld_strays *strays = session->worker->strays;
    return session->is_gateway || !kld_strays_full(strays, session->uid);
}

static bool may_read(const struct kld_session *session) {
    return session->out_tail == 0 && session->tasks < KLD_SESSION_TASKS_MAX && !session->broken &&
           has_room(session);
}

bool kld_session_has_come(const struct kld_session *session, bool *ret_may_be_read) {
    struct pollfd poll_fd = {.fd = session->fd, .events = POLLIN};
    *ret_may_be_read = may_read(session);
    return session->out_tail == 0 && poll(&poll_fd, 1, 0) == 1 && (poll_fd.revents & POLLIN);
}

static void poll_ready(uv_poll_t *poll, int status, int events) {
    struct kld_session *session = poll->data;
    struct kld_worker *worker = session->worker;
    bool end = status < 0;
    if (events & UV_WRITABLE) {
        kld_session_flush(session);
        kld_worker_progress(worker);
    }
    if (events & UV_READABLE)
        for (unsigned read = 0; read < KLD_SESSION_BURST && may_read(session) && !worker->lost;) {
            unsigned frames = receive(session, &end);
            if (!frames)
                break;
            read += frames;
        }
    if (end || (events & UV_DISCONNECT))
        kld_session_close(session);
    else
        kld_session_poll(session);
}

void kld_session_poll(struct kld_session *session) {
    if (session->state != KLD_SESSION_OPEN || !session->polling)
        return;
    int events = UV_DISCONNECT | (may_read(session) ? UV_READABLE : 0) |
                 (session->out_tail && !session->broken ? UV_WRITABLE : 0);
    if (!(events & UV_READABLE) && !has_room(session))
        kld_health_let_in_soon(session->worker);
    if (events == session->events)
        return;
    session->events = events;
    uv_poll_start(&session->poll, events, poll_ready);
}

/* ---- Life ------------------------------------------------------------------------------------ */

/* Replies that can be outstanding while nothing is read: one for each request, of which there are
 * no more than the worker has, and each task, one for each frame of the packet at hand and one more
 * for what it cancelled; WELCOME may be among them. */
static size_t out_bytes(const struct kld_config *config) {
    uint64_t requests = config->requests_max + kld_quota_gateway_requests(config);
    if (requests > config->client_requests_max)
        requests = config->client_requests_max;
    return (size_t)(requests + KLD_SESSION_TASKS_MAX + KLD_WIRE_PACKET_FRAMES_MAX + 1) *
               sizeof(struct kld_frame_error) +
           sizeof(struct kld_frame_welcome);
}

enum kld_status kld_session_open(struct kld_worker *worker, int fd, uid_t uid, pid_t pid,
                                 struct kld_error *err) {
    const struct kld_config *config = worker->options.config;
    struct kld_session *session = calloc(1, sizeof *session);
    if (session) {
        session->out_max = out_bytes(config);
        session->out = malloc(session->out_max);
        session->user = kld_user_acquire(&worker->users, uid);
        session->lanes = calloc(config->client_streams_max, sizeof *session->lanes);
    }
    if (!session || !session->out || !session->user || !session->lanes ||
        uv_poll_init(&worker->loop, &session->poll, fd) != 0) {
        if (session) {
            if (session->user)
                kld_user_release(&worker->users, session->user);
            free(session->out);
            free(session->lanes);
        }
        free(session);
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for another connection");
    }
    session->worker = worker;
    session->fd = fd;
    session->uid = uid;
    session->pid = pid;
    session->opened_ns = kld_worker_now_ns();
    session->pidfd = kld_peer_pidfd(fd);
    if (kld_places_is_gateway(worker, fd))
        kld_quota_recognise(session);
    session->polling = true;
    session->poll.data = session;
    TAILQ_INIT(&session->requests);
    for (uint64_t i = 0; i < config->client_streams_max; i++) {
        session->lanes[i].session = session;
        TAILQ_INIT(&session->lanes[i].running);
        TAILQ_INIT(&session->lanes[i].queued);
    }
    TAILQ_INSERT_TAIL(&worker->sessions, session, in_worker);
    worker->sessions_count++;
    worker->clients++;
    kld_stats_set(worker->stats, KLD_STAT_unix_clients, worker->clients);
    kld_stats_add(worker->stats, KLD_STAT_unix_clients_total, 1);
    kld_places_watch(worker);
    kld_session_poll(session);
    return KLD_OK;
}

static void poll_closed(uv_handle_t *handle) {
    struct kld_session *session = handle->data;
    session->polling = false;
    kld_session_collect(session);
}

void kld_session_close(struct kld_session *session) {
    struct kld_worker *worker = session->worker;
    if (session->state == KLD_SESSION_CLOSING)
        return;
    session->state = KLD_SESSION_CLOSING;
    session->closed_ns = kld_worker_now_ns();
    kld_log(KLD_LOG_DEBUG, "client left", "client=\"%s\" client_pid=%d in_flight=%u", session->name,
            (int)session->pid, session->requests_count);
    worker->clients--;
    kld_stats_set(worker->stats, KLD_STAT_unix_clients, worker->clients);
    uv_poll_stop(&session->poll);
    uv_close((uv_handle_t *)&session->poll, poll_closed);
    kld_close_connection(worker, session, session->fd);
    session->fd = -1;
    session->out_head = session->out_tail = 0;
    not_sent_later(session);
    kld_worker_region_drop_all(session);
    kld_worker_event_drop_all(session);
    kld_core_detach(session);
    kld_worker_accept(worker);
    kld_worker_progress(worker);
}

void kld_session_awaits(struct kld_session *session) {
    if (session->awaited++ == 0)
        session->awaited_ns = kld_worker_now_ns();
}

void kld_session_awaited(struct kld_session *session) {
    session->awaited--;
    session->awaited_ns = kld_worker_now_ns();
}

void kld_session_collect(struct kld_session *session) {
    struct kld_worker *worker = session->worker;
    if (session->state != KLD_SESSION_CLOSING || session->polling || session->requests_count ||
        session->lanes_busy || session->tasks || session->regions_count ||
        session->gpu_events_count)
        return;
    TAILQ_REMOVE(&worker->sessions, session, in_worker);
    worker->sessions_count--;
    free(session->regions);
    free(session->cuda_files);
    free(session->lanes);
    free(session->out);
    if (session->pidfd >= 0)
        close(session->pidfd);
    kld_user_release(&worker->users, session->user);
    free(session);
    kld_worker_accept(worker);
}
