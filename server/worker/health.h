/* health.h - an idle worker's look at its device, where others can take it away.
 *
 * Under MPS a context dies with any other's on the card, and the daemon lets nobody in again before
 * the last of the dead has gone. A worker with nothing to do would not notice and keep all of them
 * out, its own clients too, so it asks the device every KLD_HEALTH_MS, on uv's pool. Loop thread.
 */
#ifndef KLD_SERVER_WORKER_HEALTH_H
#define KLD_SERVER_WORKER_HEALTH_H

#include "server/worker/worker.h"

void kld_health_init(struct kld_worker *worker); /* the handle */
/* Begins to look, if this device can be lost so. */
void kld_health_start(struct kld_worker *worker);

#endif
