/* health.h - a worker's look at its device, where others can take it away, and at its own threads.
 *
 * Under MPS a context dies with any other's on the card, and the daemon lets nobody in again before
 * the last of the dead has gone. A worker with nothing to do would not notice and keep all of them
 * out, its own clients too, so it asks the device every KLD_HEALTH_MS, on uv's pool.
 *
 * Memory is registered, streams are opened and connections closed on uv's pool. When that has ended
 * nothing for stuck_ms, or nobody was let in for so long because connections cannot be closed
 * (strays.h), then the worker is not ready, and says so to the supervisor, which starts another
 * (supervisor/watchdog.c). To pin much memory takes its time, so the limit is far
 * above what any of it takes; time in which a job waits for its client's event does not count
 * (waits.h), as long as connections are closed. Loop thread. */
#ifndef KLD_SERVER_WORKER_HEALTH_H
#define KLD_SERVER_WORKER_HEALTH_H

#include "server/worker/worker.h"

void kld_health_init(struct kld_worker *worker); /* the handles */
void kld_health_close(struct kld_worker *worker);
/* Begins to look; at the device if it can be lost so. */
void kld_health_start(struct kld_worker *worker);
/* uv's pool has done something. */
void kld_health_pool_took(struct kld_worker *worker);
/* Somebody is not read, or not let in, before descriptors are closed: in a moment he may be. */
void kld_health_let_in_soon(struct kld_worker *worker);

#endif
