/* wait.h - those who found staging full and wait for it, on one loop: infer requests and uploads
 * alike; and those who wait for their turn (place.h). In which order they get it is staging.c's to
 * say, for all loops together: who holds none yet stands in its queue. Here is only who is asked
 * again, and until when.
 *
 * Staging is freed by any loop and by the thread pool, so it is looked at each KLD_WAIT_TICK_MS
 * while somebody waits. Loop thread. */
#ifndef KLD_SERVER_GATEWAY_WAIT_H
#define KLD_SERVER_GATEWAY_WAIT_H

#include <stdbool.h>
#include <stdint.h>

#include "server/gateway/gateway.h"
#include "server/gateway/staging.h"

#define KLD_WAIT_TICK_MS 5

/* In its owner's struct; zeroed: does not wait. */
struct kld_waiter {
    /* The owner's. */
    struct kld_staging_turn turn; /* for kld_staging_take() */
    /* Something has changed: asks for its memory again, then calls kld_waiter_remove() or stays. */
    void (*retry)(struct kld_waiter *waiter);
    void (*late)(struct kld_waiter *waiter); /* it does not wait any more */
    /* It waits for no staging: retry at each tick, unless one that came before it still waits. */
    bool in_turn; /* all of these have the same time to wait */

    /* Its own. */
    struct kld_waiter *before, *after;
    uint64_t until_ns; /* uv_hrtime() */
    bool waits;
};

/* retry and late are set. Who waits already stays where he is, with the deadline that he has. */
void kld_waiter_add(struct kld_gateway *gateway, struct kld_waiter *waiter, uint64_t until_ns);
/* Out of staging's queue too. Nothing if it does not wait. */
void kld_waiter_remove(struct kld_gateway *gateway, struct kld_waiter *waiter);

enum kld_status kld_waiters_open(struct kld_gateway *gateway, struct kld_error *err);
void kld_waiters_close(struct kld_gateway *gateway); /* nobody waits any more */

#endif
