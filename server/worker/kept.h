/* kept.h - who wants memory of the device's pool, which is full, while the gateway keeps some of it
 * for its next request (server/gateway/pool.h): the gateway is told, and the client waits a moment
 * instead of being refused. Loop thread. */
#ifndef KLD_SERVER_WORKER_KEPT_H
#define KLD_SERVER_WORKER_KEPT_H

#include <stdbool.h>

struct kld_region;
struct kld_worker;

#define KLD_KEPT_WAIT_MS 1000 /* at most: then it is refused */

void kld_kept_init(struct kld_worker *worker);
/* Of a region of the pool whose memory was refused. True: it waits, and
 * kld_worker_region_add_again() tries once more. */
bool kld_kept_wait(struct kld_region *region);
/* Those who wait are tried for the last time. */
void kld_kept_close(struct kld_worker *worker);

#endif
