/* uv_pool.h - libuv's pool of threads, started when a role starts. Knows no work. On the thread
 * that runs the loop.
 *
 * libuv starts it at its first work, and ends the process (abort()) if it gets no threads for it.
 * At the start that ends nobody's requests; later it would, for a shortage that passes. */
#ifndef KLD_SERVER_UV_POOL_H
#define KLD_SERVER_UV_POOL_H

#include <uv.h>

#include "proto/status.h"

/* Are there as many threads to be had? Makes them and lets them go: libc keeps what they had, for
 * those that libuv makes. So a role that cannot start says why. */
enum kld_status kld_uv_pool_try(struct kld_error *err);

/* A role that bounds itself does so first. Without memory for it the first work starts the pool.
 * SIGTERM and SIGINT are none of its threads' business: they go to the loop's. */
void kld_uv_pool_start(uv_loop_t *loop);

#endif
