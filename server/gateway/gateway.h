/* gateway.h - what the parts of the gateway share. There is a struct kld_gateway for each HTTP
 * loop, and one of what they have in common, made in kld_gateway_main().
 *
 * A struct kld_gateway belongs to its loop's thread. Of what it points to, http, links and waiters
 * are its own; staging, regions, tensors, auth, tls and the pools are everybody's and say
 * themselves which thread may call. Work that may take long (large JSON, shared memory of callers,
 * connecting) runs on libuv's thread pool and touches only what its own struct holds. */
#ifndef KLD_SERVER_GATEWAY_GATEWAY_H
#define KLD_SERVER_GATEWAY_GATEWAY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/config.h"
#include "server/failed_lines.h"
#include "server/gateway/mail.h"
#include "server/stats.h"

struct kld_auth;
struct kld_deadlines;
struct kld_http;
struct kld_infer_spares;
struct kld_links;
struct kld_oip_memo;
struct kld_pool;
struct kld_recent;
struct kld_regions;
struct kld_staging;
struct kld_tensors;
struct kld_tls;
struct kld_waiters;

/* KLD_UNAVAILABLE from libkld for what it was given: its own words are about the server of its
 * caller, and whoever asked over HTTP has another one. */
#define KLD_WORKER_LOST_TEXT "the worker was lost while it had this request; send it again"

/* Of all loops together; any thread. */
struct kld_gateway_common {
    _Atomic uint32_t infers; /* infer requests from their first byte to the last of their reply */
    /* Requests, uploads among them, that hold anything: those that nobody waits for any more,
     * because the client left or the deadline passed, do so until their worker is through with
     * them. */
    _Atomic uint32_t held;
    atomic_bool draining;
    struct kld_recent *recent;
    uint32_t loops;   /* constant */
    uint64_t spin_ns; /* constant */
    /* Constant: the name by which a caller calls us matters, at the address of http and at that of
     * metrics_http (hosts.h). */
    bool hosts_matter, metrics_hosts_matter;
};

struct kld_gateway {
    struct kld_gateway_common *common;
    uint32_t index; /* of the loop */
    const struct kld_config *config;
    struct kld_stats_page *page;
    struct kld_stats *stats; /* &page->common */
    uv_loop_t loop;
    struct kld_auth *auth;
    struct kld_http *http;
    struct kld_links *links;
    struct kld_regions *regions;
    struct kld_staging *staging;
    struct kld_tensors *tensors;
    struct kld_tls *tls;                    /* NULL: plain HTTP */
    struct kld_pool *pool[KLD_DEVICES_MAX]; /* of each worker */
    uint32_t pools, next_pool;
    uint32_t waiting_for_place; /* requests above http_requests_max (place.h) */
    uint64_t round_ms;          /* uv_now() at which places were last given to them */
    struct kld_deadlines *deadlines;
    struct kld_waiters *waiters;     /* for staging */
    struct kld_oip_memo *memo;       /* for what is parsed on the loop's own thread */
    struct kld_infer_spares *spares; /* of requests that are done, for the next ones */
    struct kld_failed_lines failed_lines;
    struct kld_mail mail;         /* of this loop */
    _Atomic uint32_t connections; /* open, or on their way here; any thread (accept.h) */
};

/* With so many CPUs to use (proto/cpus.h): how many loops, and whether one may poll for a reply
 * that is near. Pure. */
uint32_t kld_gateway_loops(const struct kld_config *config, uint32_t cpus);
bool kld_gateway_may_spin(uint32_t loops, uint32_t cpus);

/* This process or the whole server is told to end: each reply is the last of its connection. Any
 * thread. */
bool kld_gateway_is_draining(const struct kld_gateway *gateway);
/* Requests are answered: nobody ends it, a worker serves, and it is within reach. Any thread. */
bool kld_gateway_is_ready(const struct kld_gateway *gateway);
const char *kld_gateway_why_not_ready(const struct kld_gateway *gateway); /* NULL: it is */

#endif
