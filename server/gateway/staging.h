/* staging.h - the one piece of shared memory into which HTTP bodies land and out of which results
 * are sent.
 *
 * A sealed memfd of staging_bytes_max, mapped here and registered with the worker as one region, so
 * that a body is where the worker computes as soon as it is received. Ranges of it are handed out
 * at 64-byte boundaries, from the smallest free ones that are large enough (to the power of two),
 * and coalesce when they come back. Pages are taken by first use.
 *
 * A sixteenth of it is for small ranges alone (the JSON in front of a binary body, small requests
 * as a whole): those who want little do not wait for those who want much.
 *
 * Who gets none stands in a queue (struct kld_staging_turn), of small or of large ranges:
 * - who holds none of that sort yet gets none before those who came earlier, nor while somebody
 *   waits who holds some: no newcomer overtakes;
 * - who holds some of it gets more as soon as there is room. There are ever fewer of those while
 *   one of them waits, so each gets its turn, and nobody waits for one who stands behind him.
 * JSON has at most half of the small and of the large ones, but one may always have what it needs:
 * whose JSON is here needs more for his tensors, and with the memory full of JSON nobody would get
 * on. Where all who have some come to wait for more in spite of that, one of them is refused. Nor
 * does the JSON of one caller keep others' out: he has half of that half at most, but as above, and
 * is refused more, so that nobody waits behind him for what he does not finish.
 *
 * Any thread; the bytes of an allocated range may be touched by whoever its holder lets (MHD, the
 * thread pool, the worker). Does not wait: full is KLD_BUSY. */
#ifndef KLD_SERVER_GATEWAY_STAGING_H
#define KLD_SERVER_GATEWAY_STAGING_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"
#include "server/stats.h"

#define KLD_STAGING_ALIGN 64
#define KLD_STAGING_SMALL_BYTES ((uint64_t)64 << 10) /* a small range has at most so many ... */
#define KLD_STAGING_SMALL_PARTS 16                   /* ... and one in so many of those for small */

struct kld_staging;

/* bytes is rounded up to whole pages. stats: keeps the gauge staging_bytes; NULL: nobody does. */
enum kld_status kld_staging_open(uint64_t bytes, struct kld_stats *stats,
                                 struct kld_staging **ret_staging, struct kld_error *err);
void kld_staging_close(struct kld_staging *staging); /* NULL is allowed */

int kld_staging_fd(const struct kld_staging *staging);
uint64_t kld_staging_bytes(const struct kld_staging *staging);
uint64_t kld_staging_range_bytes_max(const struct kld_staging *staging);
uint64_t kld_staging_used_bytes(struct kld_staging *staging);

/* KLD_TOO_LARGE: more than there is at all; KLD_BUSY: more than is free in one piece now. */
enum kld_status kld_staging_alloc(struct kld_staging *staging, uint64_t bytes, uint64_t *ret_offset,
                                  struct kld_error *err);

/* What the JSON of one caller has of the large and of the small ones. The caller owns it, and it
 * outlives his turns; it is read and written under staging's mutex. */
struct kld_staging_share {
    uint64_t json_bytes[2];
};

/* A place in the queue, of one request. Zeroed: not in it. */
struct kld_staging_turn {
    struct kld_staging_turn *before, *after;
    bool queued, small;    /* in the queue of small ones */
    bool has[2];           /* it got large ones; small ones */
    bool json;             /* what it asked for last, */
    uint64_t wanted_bytes; /* ... and so much */
    /* Set before each call by who asks. */
    struct kld_staging_share *share; /* always the same; NULL: not counted */
    bool capped;                     /* there are others to leave some to */
    uint64_t json_bytes[2];          /* of the share, what is its own; under staging's mutex */
};
/* As kld_staging_alloc(), in turn. KLD_BUSY: the turn is in the queue, until it is asked for again
 * and gets some, or leaves. KLD_TOO_LARGE also where it has all that is in use and would wait for
 * itself; KLD_UNAVAILABLE: it and others who have some would wait for each other; KLD_THROTTLED:
 * its caller has enough JSON here. json: for JSON of a body. The turn outlives what it gets. */
enum kld_status kld_staging_take(struct kld_staging *staging, struct kld_staging_turn *turn,
                                 uint64_t bytes, bool json, uint64_t *ret_offset,
                                 struct kld_error *err);
void kld_staging_leave(struct kld_staging *staging, struct kld_staging_turn *turn);
/* Another number than before: somebody who got none may get some now. */
uint64_t kld_staging_changes(const struct kld_staging *staging);

/* offset: of a range that is allocated. */
void kld_staging_free(struct kld_staging *staging, uint64_t offset);
void *kld_staging_at(const struct kld_staging *staging, uint64_t offset);

#endif
