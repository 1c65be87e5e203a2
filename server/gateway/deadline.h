/* deadline.h - deadlines of what waits for another thread: kept by the loop that waits, so that a
 * thread which is held up itself (pool.c waits for its worker) does not hold them up too.
 *
 * Kept to KLD_DEADLINE_TICK_MS. Everything on the loop of the gateway that it was set with. */
#ifndef KLD_SERVER_GATEWAY_DEADLINE_H
#define KLD_SERVER_GATEWAY_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>

#include "server/gateway/gateway.h"

#define KLD_DEADLINE_TICK_MS 10

/* Zeroed: not set. */
struct kld_deadline {
    struct kld_deadline *before, *after;
    uint64_t at_ns; /* uv_hrtime() */
    bool set;
    void (*passed)(struct kld_deadline *deadline); /* it is not set any more; may set it again */
};

enum kld_status kld_deadlines_open(struct kld_gateway *gateway, struct kld_error *err);
void kld_deadlines_close(struct kld_gateway *gateway); /* none is kept any more */

/* at_ns UINT64_MAX: never, which is not to set it. */
void kld_deadline_set(struct kld_gateway *gateway, struct kld_deadline *deadline, uint64_t at_ns,
                      void (*passed)(struct kld_deadline *deadline));
void kld_deadline_clear(struct kld_gateway *gateway, struct kld_deadline *deadline);

#endif
