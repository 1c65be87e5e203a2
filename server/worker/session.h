/* session.h - one client of the Unix socket: its connection, lanes, regions, quotas and replies.
 *
 * Life: OPEN from accept() on; CLOSING when the connection ended, for whatever reason: its requests
 * are detached, its regions condemned, its lanes closed as they fall idle, and when the last
 * request, region, lane and pool task is gone, the session is freed (kld_session_collect()).
 *
 * Output never blocks: what the socket does not take is kept in `out`, whose size follows from the
 * replies that can be outstanding, and nothing more is read from the client until it has read them.
 *
 * Everything belongs to the loop thread; work on uv's pool touches only what its struct names. */
#ifndef KLD_SERVER_WORKER_SESSION_H
#define KLD_SERVER_WORKER_SESSION_H

#include <sys/types.h>
#include <uv.h>

#include "proto/wire.h"
#include "server/worker/request.h"
#include "server/worker/strays.h"
#include "server/worker/users.h"

struct kld_worker;

/* Tasks on uv's pool that one client may have outstanding; reading from it pauses there. */
#define KLD_SESSION_TASKS_MAX 64
/* Frames read from one client before the loop looks at the others; the last packet is read whole.
 */
#define KLD_SESSION_BURST 16
#define KLD_SESSION_EVENTS_MAX 64 /* events of one client */
#define KLD_SESSION_FDS_MAX KLD_STRAYS_FDS_MAX

enum kld_lane_state { KLD_LANE_CLOSED, KLD_LANE_OPENING, KLD_LANE_OPEN, KLD_LANE_CLOSING };

/* A stream number of a client, and the back end's stream behind it (lane.c). */
struct kld_lane {
    struct kld_session *session;
    enum kld_lane_state state;
    enum kld_priority priority;      /* from STREAM; settled once the lane opens */
    uint64_t owner;                  /* whose turns it takes (kld_stream_options), likewise */
    uint32_t running_count;          /* requests with the back end: */
    struct kld_request_list running; /* in order of arrival, as the next */
    struct kld_request_list queued;
    bool held; /* its turn to wait for an event has not come, see waits.h */
    uint64_t held_ns;
    TAILQ_ENTRY(kld_lane) in_held;
    struct kld_task task;      /* OPENING, CLOSING: on uv's pool, which then owns: */
    struct kld_stream *stream; /* OPEN: the loop's */
    enum kld_status status;    /* of opening */
    struct kld_error error;
};

/* See cuda_file.h. */
struct kld_cuda_file {
    uint32_t users; /* regions, and pieces of them */
    int fd;
    uint64_t number;
};

enum kld_session_state { KLD_SESSION_OPEN, KLD_SESSION_CLOSING };

struct kld_session {
    struct kld_worker *worker;
    TAILQ_ENTRY(kld_session) in_worker;
    TAILQ_ENTRY(kld_session) in_unsent;
    enum kld_session_state state;
    uint64_t closed_ns; /* CLOSING: since when, CLOCK_MONOTONIC */
    uint64_t opened_ns; /* as that */
    bool greeted;       /* HELLO was answered by WELCOME */
    bool put_off;       /* it was late with HELLO and something had come */
    bool packs;         /* it sends packets of several frames, so it takes them */
    bool unsent;        /* has replies since kld_session_hold(); on the worker's list of those */
    bool broken;        /* the socket takes nothing any more; its end will be reported */
    bool polling;       /* `poll` is not yet closed */
    int fd;             /* -1 once given to the pool to be closed */
    int events;         /* what `poll` waits for */
    uv_poll_t poll;
    uid_t uid;
    pid_t pid;
    struct kld_user *user;        /* for whom it counts, see users.h */
    int pidfd;                    /* of that process; -1: none. Closed with the session */
    bool is_gateway;              /* that process is the server's own; see orders.h */
    char name[KLD_WIRE_NAME_MAX]; /* from HELLO; "" before; safe to log */

    uint64_t trace_target;          /* the request that the next is of; 0: none */
    struct kld_request_trace trace; /* of the newest TRACE */

    struct kld_request_list requests; /* all not FREE */
    uint32_t requests_count;
    uint32_t requests_waited; /* of them: not answered */
    struct kld_lane *lanes;   /* client_streams_max of them */
    uint32_t lanes_busy;      /* not CLOSED */
    uint32_t waits_running;   /* requests with an event that the back end has */
    uint32_t tasks;           /* on uv's pool: regions coming and going, its end */
    uint32_t awaited;    /* tasks there whose end the client waits for: what comes, and lanes */
    uint64_t awaited_ns; /* when the first of these began, or one ended since */

    struct kld_region **regions;      /* by the low bits of the id; NULL: free */
    uint32_t regions_size;            /* entries of that table; grows up to client_regions_max */
    uint32_t regions_count;           /* every state */
    uint32_t mapped;                  /* of them: mappings of this process */
    uint64_t region_bytes;            /* of them */
    uint64_t pool_bytes;              /* of those in the device's pool */
    uint64_t shared_bytes;            /* of those in memory of the host */
    uint64_t region_serial;           /* the high bits of the newest id */
    struct kld_cuda_file *cuda_files; /* in the kernel's order; grows with what is shown */
    uint32_t cuda_files_count, cuda_files_size;
    uint64_t cuda_file_serial;
    bool aliased; /* two regions showed the same memory at some time */

    struct kld_worker_event *gpu_events[KLD_SESSION_EVENTS_MAX]; /* by the low bits of the id */
    uint32_t gpu_events_count;                                   /* every state */
    uint64_t gpu_event_serial; /* the high bits of the newest id */

    uint8_t *out; /* frames that wait for the socket: bytes out_head to out_tail */
    size_t out_head, out_tail, out_max;
};
TAILQ_HEAD(kld_session_list, kld_session);

/* Takes over a connected, non-blocking socket; where it fails, that stays the caller's. */
enum kld_status kld_session_open(struct kld_worker *worker, int fd, uid_t uid, pid_t pid,
                                 struct kld_error *err);
void kld_session_close(struct kld_session *session);
/* Counts a task that the client waits for, and its end. */
void kld_session_awaits(struct kld_session *session);
void kld_session_awaited(struct kld_session *session);
/* Frees a CLOSING session that nothing belongs to any more. Call it last: *session may be gone. */
void kld_session_collect(struct kld_session *session);

/* Replies are kept from here on until kld_session_release(), which sends them: of a client that
 * takes it, several in one packet. */
void kld_session_hold(struct kld_worker *worker);
void kld_session_release(struct kld_worker *worker);
/* Sends or keeps a reply. A session that is closing or broken drops it. */
void kld_session_reply(struct kld_session *session, const union kld_frame *frame);
/* The frame that tells a client of an error: its text and no byte of what is behind that. */
void kld_session_error_frame(union kld_frame *frame, uint64_t request,
                             const struct kld_error *error);
void kld_session_reply_error(struct kld_session *session, uint64_t request,
                             const struct kld_error *error);
/* Waits for what there is room for and is wanted now. */
void kld_session_poll(struct kld_session *session);
/* Something has come that the loop has not read, though the client takes its replies; may_be_read:
 * and is about to. */
bool kld_session_has_come(const struct kld_session *session, bool *ret_may_be_read);
/* Sends what is kept, as far as the socket takes it. */
void kld_session_flush(struct kld_session *session);
/* frames.c: acts on one packet. Descriptors are taken over. flags: of recvmsg(). Returns the number
 * of its frames. */
unsigned kld_session_packet(struct kld_session *session, const void *data, size_t bytes, int flags,
                            int *fds, unsigned fds_count);

/* lane.c */
void kld_lane_open(struct kld_lane *lane);  /* CLOSED -> OPENING; core hears of the end */
void kld_lane_close(struct kld_lane *lane); /* OPEN and idle -> CLOSING -> CLOSED */

#endif
