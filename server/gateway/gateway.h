/* gateway.h - what the parts of the gateway share: one of it, in kld_gateway_main().
 *
 * Everything belongs to the loop thread. Work that may take long (large JSON, shared memory of
 * callers, connecting) runs on libuv's thread pool and touches only what its own struct holds. */
#ifndef KLD_SERVER_GATEWAY_GATEWAY_H
#define KLD_SERVER_GATEWAY_GATEWAY_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/config.h"
#include "server/gateway/mail.h"
#include "server/stats.h"

struct kld_auth;
struct kld_http;
struct kld_links;
struct kld_shm;
struct kld_pool;
struct kld_staging;
struct kld_tensors;
struct kld_waiters;

/* For the model's statistics; since this gateway was started. Durations in ns. */
struct kld_gateway_counts {
    uint64_t success, success_ns, fail, fail_ns;
    uint64_t queue_ns, copy_ns, kernel_ns; /* of successes */
    uint64_t last_ms;                      /* since 1970, of the last request; 0: none */
};

struct kld_gateway {
    const struct kld_config *config;
    struct kld_stats_page *page;
    struct kld_stats *stats; /* &page->common */
    uv_loop_t loop;
    struct kld_auth *auth;
    struct kld_http *http;
    struct kld_links *links;
    struct kld_shm *shm;
    struct kld_staging *staging;
    struct kld_tensors *tensors;
    struct kld_pool *pool[KLD_DEVICES_MAX]; /* of each worker */
    uint32_t pools, next_pool;
    struct kld_waiters *waiters; /* for staging */
    struct kld_mail mail;        /* of this loop */
    struct kld_gateway_counts counts;
    uint32_t infers; /* infer requests from their first byte to the last of their reply */
    bool draining;
};

#endif
