/* request.h - one operator or copy of a Unix client, from admission to its return to the pool.
 *
 * States; core.c is the only writer, and only on the loop thread:
 *   FREE     in the pool of queue.c.
 *   QUEUED   admitted: its regions are pinned; it waits in its lane for its turn.
 *   RUNNING  its job is with the back end, which alone may touch `job` until done() is called.
 * A request leaves QUEUED or RUNNING only to FREE, and its regions are unpinned just then.
 *
 * `answered` is apart from the state: a client that cancels, whose deadline passes or who leaves is
 * answered (or gone) at once, while a RUNNING request stays RUNNING, its memory pinned, until the
 * back end is through with it. `told` is its EARLY counterpart: DONE went out at launch, the work
 * goes on, and is counted and logged when it has ended. Nothing here allocates. */
#ifndef KLD_SERVER_WORKER_REQUEST_H
#define KLD_SERVER_WORKER_REQUEST_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "kernels/backend.h"

struct kld_lane;
struct kld_region;
struct kld_session;
struct kld_worker_event;

enum kld_request_state { KLD_REQUEST_FREE, KLD_REQUEST_QUEUED, KLD_REQUEST_RUNNING };

/* From TRACE: whose part the request is, for its line in the log. */
struct kld_request_trace {
    bool is_there;
    uint8_t id[16], span[8], flags;
};

struct kld_request {
    /* Loop thread only. */
    enum kld_request_state state;
    bool answered;               /* the client got its reply, or is gone: the result is dropped */
    bool early;                  /* DONE is wanted at launch */
    bool told;                   /* and was sent */
    bool waits;                  /* at the back end, in a place of those who wait (waits.h) */
    struct kld_session *session; /* outlives its requests */
    struct kld_lane *lane;       /* of that session */
    uint64_t number;             /* the client's request number */
    uint64_t arrival_ns;         /* CLOCK_MONOTONIC */
    uint64_t running_ns;         /* RUNNING: since when, the same clock */
    enum kld_job_stage stage;    /* of the oldest RUNNING one of a lane: what waits.c knows, ... */
    uint64_t stage_ns;           /* ... and since when; 0: it has not looked */
    uint64_t deadline_ns;        /* the same clock; 0: none */
    uint32_t heap_place;         /* in the queue's heap of deadlines, from 1; 0: not there */
    uint32_t regions_count;
    struct kld_region *regions[KLD_SLOT_COUNT]; /* each acquired once for this request */
    struct kld_worker_event *ready, *finished;  /* acquired; NULL: none */
    struct kld_request_trace trace;
    TAILQ_ENTRY(kld_request) in_session; /* while not FREE */
    TAILQ_ENTRY(kld_request) in_lane;    /* among its queued or its running ones */

    /* FREE: the pool's (loop thread). RUNNING: from done() on, the completion list's (device.c). */
    struct kld_request *next;
    struct kld_request *next_launched; /* the completion list's, from launched() on */

    /* RUNNING: the back end's, until done(). Else the loop thread's. */
    struct kld_job job;
};
TAILQ_HEAD(kld_request_list, kld_request);

#endif
