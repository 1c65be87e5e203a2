/* worker.h - the worker as a whole: one libuv loop over one device and its Unix clients.
 *
 * kld_worker_main() (server/role.h) opens the device, then init, run, done. The tests run the same
 * three over a device of their own. Everything in struct kld_worker belongs to the loop thread,
 * except completions.newest and what its fields' types say. */
#ifndef KLD_SERVER_WORKER_WORKER_H
#define KLD_SERVER_WORKER_WORKER_H

#include <uv.h>

#include "kernels/backend.h"
#include "server/config.h"
#include "server/failed_lines.h"
#include "server/stats.h"
#include "server/worker/mapping.h"
#include "server/worker/device.h"
#include "server/worker/peer.h"
#include "server/worker/queue.h"
#include "server/worker/session.h"
#include "server/worker/strays.h"
#include "server/worker/users.h"

#define KLD_POLL_NS 5000000u /* the loop polls so long for the end of a job of a GPU */
#define KLD_REFUSALS_MAX 64  /* refused connections that wait to be closed */
/* Jobs that one lane has with the back end at a time: enough to keep a device busy while the loop
 * is on its way. The rest waits in the lane, where a cancel, a deadline or the end of the client
 * still spares the device the work. */
#define KLD_LANE_DEPTH 4
/* Jobs of all clients that wait on the device for an event, or behind one that does: a part of
 * those that a back end can have in flight, so that clients whose events do not come leave room for
 * others. */
#define KLD_WAITS_MAX 32
#define KLD_CLIENT_WAITS_MAX 16 /* of one client */
#define KLD_POOL_FLOOR_PART 16  /* one in so many bytes of the pool is for no client's regions */
#define KLD_HEALTH_MS 500       /* between two looks at an idle device, see health.h */
#define KLD_STUCK_MS 60000      /* where the setting stuck_ms is 0, see health.h */

struct kld_worker_options {
    const struct kld_config *config;
    struct kld_stats_page *page;
    const struct kld_backend *backend;
    struct kld_device *device; /* open; kld_worker_done() closes it */
    uint32_t index;            /* of this worker: its place in the page, and of its device */
    int listen_fd;             /* SOCK_SEQPACKET, listening; the caller's */
    uint32_t orphan_ms;        /* 0: KLD_ORPHAN_MS, see waits.h */
    uint32_t orphan_dead_ms;   /* 0: KLD_ORPHAN_DEAD_MS */
    uint32_t health_ms;        /* 0: KLD_HEALTH_MS */
    uint32_t stuck_ms;         /* 0: the setting of that name */
    uint64_t host_bytes;       /* 0: kld_host_memory_bytes() */
    uint32_t cpus;             /* 0: kld_cpus_usable() */
    /* Once nothing of ours runs on the lost device any more, where that is known before this
     * process has ended; NULL: nobody wants to know. */
    void (*device_dead)(const struct kld_worker_options *options);
    bool test_faults; /* SIGUSR2: the next operator ends the device */
    int control_fd;   /* its end means that the supervisor is gone; -1: none; the caller's */
};

struct kld_worker {
    struct kld_worker_options options;
    struct kld_device *device;      /* = options.device */
    struct kld_stats *stats;        /* its block of options.page */
    struct kld_stats_device *shown; /* what others know of it, there too */
    uv_loop_t loop;
    uv_poll_t listener, control;
    uv_signal_t terminate;   /* SIGTERM */
    uv_signal_t fault;       /* SIGUSR2, where tests want it */
    uv_idle_t poll;          /* while active the loop polls instead of sleeping */
    uint64_t poll_until_ns;  /* CLOCK_MONOTONIC */
    uv_timer_t deadline;     /* the earliest deadline of a request */
    uv_timer_t accept_again; /* after accept() ran out of something */
    uv_timer_t drain;        /* SIGTERM + drain_ms */
    uv_prepare_t small;      /* active when a CPU may have small jobs to run */
    uint64_t awake_ns;       /* constant: after these, for the next one */
    uv_timer_t waits;        /* while jobs with an event are with the back end */
    uv_timer_t hello;        /* while somebody has not said it, see places.h */
    uv_timer_t kept_again;   /* see kept.h, as the next */
    TAILQ_HEAD(kld_kept_list, kld_region) kept_waiting;
    uv_timer_t health; /* see health.h */
    uv_work_t health_work;
    bool health_looks; /* while it does, the pool has the two below */
    enum kld_status health_status;
    struct kld_error health_error;
    uv_timer_t pool_watch; /* see health.h, as the rest */
    uv_work_t pool_work;
    bool pool_asked;              /* pool_work is with the pool */
    uint64_t pool_ns;             /* CLOCK_MONOTONIC: the pool was last known to take work */
    uint64_t pool_looked_ns;      /* as that: of the newest look */
    uint64_t room_ns;             /* as that: newcomers did not wait for connections to be closed */
    bool stuck;                   /* one of these is too long ago */
    uv_timer_t let_in;            /* while somebody waits for descriptors to be closed */
    struct kld_mappings mappings; /* the pool's; see mapping.h */
    struct kld_strays *strays;
    struct kld_completions completions;
    struct kld_queue queue;
    struct kld_session_list sessions; /* open and closing */
    struct kld_session_list unsent;   /* see kld_session_hold() */
    bool holding;                     /* replies are kept */
    uint32_t sessions_count;          /* of them */
    uint32_t clients;                 /* open ones */
    uint32_t queued;                  /* requests that the back end does not have yet */
    uint32_t waits_running;           /* requests with an event that the back end has */
    struct kld_lane *lane_turn;       /* see waits.h, as the next */
    uint32_t refusals;                /* refused connections on uv's pool */
    bool listening;                   /* the listener is polled */
    bool draining;                    /* SIGTERM came: nothing new is admitted */
    bool stopping;                    /* handles are being closed; the loop ends */
    bool lost;                        /* the device is: everything was answered, the loop stops */
    bool cut_short;                   /* drain_ms passed with work in flight */
    bool told_turns;                  /* that clients compute on our card without MPS */
    bool told_handles;                /* that IPC handles do not say whose they are */
    uint64_t pool_allocations;        /* that the statistics have been told of */
    uint64_t cuda_files;              /* of all sessions, see cuda_file.h */
    bool told_cuda_files;             /* that some are not told apart */
    struct kld_peers peers;           /* who may connect */
    struct kld_users users;           /* of all sessions */
    struct kld_gateway_process gateway;
    struct kld_failed_lines failed_lines;
    TAILQ_HEAD(kld_publication_list, kld_publication) publications;
    uint32_t publications_count;
    TAILQ_HEAD(kld_held_lanes, kld_lane) lanes_held;

    /* Told by WELCOME and STATS. */
    uint64_t epoch, started_ns;
    uint64_t requests_total, errors_total, kernel_ns_total, bytes_total;
    uint64_t regions, region_bytes;
    uint64_t pool_bytes; /* of regions in the device's pool, but for the gateway's */
    uint64_t mapped;     /* regions that are mappings of this process, but for the gateway's */
    uint64_t mapped_max; /* of them */
    uint64_t host_bytes; /* the memory of the host that there is for us; 0: not known */
};

enum kld_status kld_worker_init(struct kld_worker *worker, const struct kld_worker_options *options,
                                struct kld_error *err);
/* Serves until SIGTERM, the end of the supervisor or the loss of the device. Returns the exit
 * status: 0, or 2 for a lost device. */
int kld_worker_run(struct kld_worker *worker);
/* After a run that ended with 0 and nothing in flight: releases everything, the device too. A
 * process whose device is lost, or which left work behind, calls _exit() instead. */
void kld_worker_done(struct kld_worker *worker);

/* Begins to drain, as SIGTERM does. Loop thread. */
void kld_worker_drain(struct kld_worker *worker);
/* Core and sessions tell that something ended; while draining this may end the loop. */
void kld_worker_progress(struct kld_worker *worker);
/* A job goes to the device, or the last one came back: where waiting takes nothing from what
 * computes, the loop polls for a while instead of sleeping: the socket, which saves the wake-up,
 * and the device, which saves its thread's. */
void kld_worker_poll(struct kld_worker *worker);
/* Polls the listener again if there is room. */
void kld_worker_accept(struct kld_worker *worker);
/* Tells the statistics what the device's pool holds and has made. */
void kld_worker_pool_counted(struct kld_worker *worker);
/* A client has a context of its own on our card. Says once what that costs without MPS. */
void kld_worker_shares_card(struct kld_worker *worker);
/* An IPC handle was imported: says once if such handles do not tell which card they are of. */
void kld_worker_handle_came(struct kld_worker *worker);
/* The deadline timer follows the queue's earliest deadline. */
void kld_worker_watch_deadlines(struct kld_worker *worker);

uint64_t kld_worker_now_ns(void); /* CLOCK_MONOTONIC */

#endif
