/* pool_state.h - the inside of a pool, for pool.c and pool_keep.c, which keeps buffers that nobody
 * uses for who wants one next. The pool's thread. */
#ifndef KLD_SERVER_GATEWAY_POOL_STATE_H
#define KLD_SERVER_GATEWAY_POOL_STATE_H

#include "server/gateway/pool_list.h"

struct kld_pool {
    const struct kld_config *config;
    uint32_t index; /* of the worker */
    struct kld_staging *staging;
    uv_thread_t thread;
    uv_loop_t loop;
    struct kld_mail mail;
    uv_timer_t tick; /* while there are jobs */
    uv_poll_t poll;  /* once connected */
    struct kld_letter stop;
    struct kld_connection *connection; /* NULL: none yet */
    struct kld_region *region;         /* of staging */
    uint32_t streams, next_stream;
    uint64_t epoch;          /* of the worker of which streams is */
    uint64_t losses;         /* kld_losses(), when buffers were last looked at */
    struct kld_stats *stats; /* of the worker, and what it says of itself: */
    const struct kld_stats_device *shown;
    struct kld_pool_list waiting, running;
    struct kld_pool_list starved; /* OPENs that found the device's pool full, in turn */
    _Atomic uint64_t
        starved_ns; /* uv_hrtime() when there were any last, or others found it so; 0 */
    struct kld_error unreachable; /* what the last try ended with, ... */
    uint64_t again_ns;            /* ... and uv_hrtime() of the next */
    struct kld_pool_buffer *buffers;
    uint64_t kept_bytes;    /* of those that nobody uses */
    uint32_t kept_count;    /* how many those are */
    uint64_t given_back_ns; /* uv_hrtime() when all of them had to go; 0: never */
    uint64_t kept_again_ns; /* uv_hrtime() from which on some are kept */
    uint32_t wanted_seen;   /* of shown->pool_wanted */
    bool stopping;
    uv_mutex_t gate; /* of `ended`: buffers are dropped on any loop, also while the thread ends */
    bool ended;      /* nobody reads its mail any more */
};

/* Frees a buffer that nobody uses; at: where the pool's list has it. */
void kld_pool_forget(struct kld_pool *pool, struct kld_pool_buffer **at);
/* False: it is not kept, and still to be forgotten. */
bool kld_pool_keep(struct kld_pool_buffer *buffer);
/* Forgets those that were kept for so long, or ns 0: all of them. */
void kld_pool_forget_kept(struct kld_pool *pool, uint64_t ns);
/* One that has room for so much, and not more than a quarter too much; NULL: none is kept. */
struct kld_pool_buffer *kld_pool_take_kept(struct kld_pool *pool, uint64_t bytes);
/* The worker has no place for one more region: might it have with what was kept here, which goes
 * now, or went a moment ago and may not have left the worker yet? */
bool kld_pool_gives_way(struct kld_pool *pool);
/* Gives all back if somebody else wanted memory of the device's pool, which was full. */
void kld_pool_look_at_wanted(struct kld_pool *pool);
/* Most that the device's pool has; 0: not known. */
uint64_t kld_pool_bytes_max(const struct kld_pool *pool);
/* The worker may tell who finds the device's pool full to wait for what is kept, or not. Not while
 * this thread waits for the worker: it could not give anything back. */
void kld_pool_offer_kept(struct kld_pool *pool, bool offered);

#endif
