/* pool.h - memory on the device for what does not fit staging, and for tensors that stay there.
 *
 * One for each worker: a thread of its own with a connection of its own to the worker, through
 * libkld: making a buffer waits for the worker, which no HTTP loop may do. Jobs come from any loop
 * and end on the loop that sent them. A buffer is lost with that connection, as it is when the
 * worker ends; jobs that name it end with KLD_DEVICE_LOST then. What was dropped is kept for
 * keep_buffer_ms, keep_buffer_bytes in all and a quarter of the device's pool, KLD_POOL_KEPT_MAX
 * of them, for an OPEN that wants about as much: the pages of new memory cost a CPU as much as to
 * fill them. When another client of the worker finds the device's pool full, what is kept is given
 * back, and for KLD_POOL_ASIDE_MS nothing is. It holds then what its last user left: who opens a
 * buffer writes it before he reads it. An OPEN that finds the device's pool full waits in turn
 * until there is room or nobody wants it any more. Whose owner would have more than one in
 * KLD_POOL_SHARE_PART of the pool with it, and who finds no room, is passed by those behind him who
 * would not: else one owner keeps all others out with what cannot fit beside what he has. One for
 * more than there ever is ends with KLD_TOO_LARGE.
 *
 * A job, the buffers and the staging memory it names belong to the pool from kld_pool_submit()
 * until done(). Senders keep their deadlines themselves (deadline.h), because this thread may be
 * held up by its worker; here only a RUN that still waits to be sent at its deadline ends with
 * KLD_DEADLINE, and what nobody wants any more, if no worker has seen it, with KLD_CANCELLED. */
#ifndef KLD_SERVER_GATEWAY_POOL_H
#define KLD_SERVER_GATEWAY_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/kld.h"
#include "server/config.h"
#include "server/gateway/mail.h"
#include "server/gateway/staging.h"
#include "server/stats.h"

#define KLD_POOL_ASIDE_MS 500
#define KLD_POOL_WANTED_MS 2000
#define KLD_POOL_KEPT_MAX 64 /* buffers: each is a region of the worker; the largest stay */
#define KLD_POOL_KEPT_BYTES_MIN 32768 /* smaller ones cost next to nothing to make again */

#define KLD_POOL_SHARE_PART 2

struct kld_pool;

struct kld_pool_buffer {
    struct kld_pool *pool; /* constant while it is used, as bytes and imported */
    uint64_t bytes;
    bool imported;
    _Atomic uint32_t users;
    _Atomic bool lost; /* the connection that it was made on is gone, or its worker */

    /* The pool's thread's own. */
    uint64_t room_bytes; /* of its region: bytes or more */
    uint64_t kept_ns;    /* uv_hrtime() since when nobody uses it; 0: somebody does */
    struct kld_pool_buffer *after;
    struct kld_region *region;
    const void *owner; /* of the job that opened it; only compared */
    uint64_t losses;   /* kld_losses() when it was made */
    struct kld_letter letter;
};

/* IMPORT is an OPEN of memory that a caller has: it is not lost with its worker, because libkld
 * gives its handle to the next one. */
enum kld_pool_kind {
    KLD_POOL_OPEN,
    KLD_POOL_IMPORT,
    KLD_POOL_FILL,
    KLD_POOL_READ,
    KLD_POOL_RUN,
};

struct kld_pool_job {
    /* The caller's, before kld_pool_submit(). */
    enum kld_pool_kind kind;
    struct kld_pool_buffer
        *buffer; /* FILL, READ; OPEN and IMPORT set it, with one user: the caller */
    uint64_t bytes, buffer_offset, staging_offset;
    const void *owner; /* OPEN: whose share it is of; NULL: nobody's, and he is not passed */
    uint8_t handle[64], uuid[KLD_WIRE_UUID_BYTES]; /* IMPORT: a cudaIpcMemHandle_t, and its card */
    struct kld_request request; /* RUN: as for the link, but offsets are in slot[] if it is set */
    struct kld_pool_buffer *slot[KLD_SLOT_COUNT]; /* NULL: staging */
    uint64_t deadline_ns;                         /* RUN: uv_hrtime() */
    void (*done)(struct kld_pool_job *job);       /* status, result and error are set */

    enum kld_status status;
    struct kld_result result;
    struct kld_error error;

    /* The pool's own. */
    _Atomic bool unwanted; /* set by any thread */
    _Atomic bool starved;  /* an OPEN that waits for others' memory; for any thread to read */
    struct kld_pool *pool;
    struct kld_mail *sender;
    struct kld_letter letter;
    struct kld_pool_job *before, *after;
};

/* Starts the thread; connects to worker `index` with the first job. staging, stats and shown,
 * the last two that worker's, outlive the pool. */
enum kld_status kld_pool_open(const struct kld_config *config, uint32_t index,
                              struct kld_staging *staging, struct kld_stats *stats,
                              const struct kld_stats_device *shown, struct kld_pool **ret_pool,
                              struct kld_error *err);
/* One of the gateway's, in turn, of those whose worker serves. */
struct kld_gateway;
uint32_t kld_pool_index(const struct kld_pool *pool); /* of its worker */
struct kld_pool *kld_pool_choose(struct kld_gateway *gateway);
/* Does somebody want room in the device's pool that another one holds: who waits for it here, or
 * was refused it by the worker, a moment ago, or all those who find more than half of it taken. Any
 * thread. */
bool kld_pool_is_wanted(const struct kld_pool *pool);
/* For a process that ends, on its loop: the thread ends; jobs that are still on end with
 * KLD_UNAVAILABLE, posted to their senders before this returns. Nobody submits any more. */
void kld_pool_stop(struct kld_pool *pool);
/* After kld_pool_stop(), when every letter was read and every buffer dropped that ever will be. */
void kld_pool_close(struct kld_pool *pool);

void kld_pool_submit(struct kld_pool *pool, struct kld_mail *sender, struct kld_pool_job *job);

/* Nobody waits for it: an OPEN, IMPORT or RUN that was not sent yet is not begun. done() comes
 * either way. After kld_pool_submit(), before done(); the sender's thread. */
void kld_pool_unwant(struct kld_pool_job *job);

void kld_pool_hold(struct kld_pool_buffer *buffer);
void kld_pool_drop(struct kld_pool_buffer *buffer); /* NULL is allowed; any thread */

#endif
