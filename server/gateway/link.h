/* link.h - the gateway's connection to one worker: an ordinary client through libkld. Which worker
 * computes what is decided in links.c.
 *
 * Connecting blocks nobody (libkld's lazy connections); calls that come earlier wait. The
 * connection is never given up: while the worker is gone, libkld finds the next one and sends again
 * what can safely run again. As many calls are with the worker as it allows one client; the others
 * wait here in order.
 *
 * A call and the staging memory it names belong to the link from kld_link_submit() until done().
 * A deadline (late()) only tells the caller that nobody waits for the answer any more. Neither it
 * nor a client's leaving cancels anything: the worker answers a cancelled request at once, while
 * its kernel may still be writing into what would then be somebody else's memory (R1 of
 * server/README.md). For the same reason the worker is given no timeout. Loop thread only. */
#ifndef KLD_SERVER_GATEWAY_LINK_H
#define KLD_SERVER_GATEWAY_LINK_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "client/kld.h"
#include "server/config.h"
#include "server/gateway/staging.h"
#include "server/stats.h"

struct kld_link;
struct kld_links;

struct kld_link_call {
    /* The caller's, before kld_link_submit(). request.bytes[].offset_bytes of each tensor of the op
     * is its place in staging; regions, stream and timeout are set by the link. */
    struct kld_request request;
    uint64_t deadline_ns; /* uv_hrtime() */
    bool pinned;          /* the caller wants this device and no other: */
    uint32_t device;
    void (*done)(struct kld_link_call *call, enum kld_status status,
                 const struct kld_result *result, const struct kld_error *error);
    void (*late)(struct kld_link_call *call); /* at most once, before done() */

    /* The links' own. */
    struct kld_links *links;
    struct kld_link *link;
    bool moved; /* from a worker that did not come back */
    struct kld_link_call *before, *after;
    uint64_t id;
    bool submitted, is_late;
};

/* What all links have in common; it outlives them. */
struct kld_link_options {
    uv_loop_t *loop;
    const struct kld_config *config;
    struct kld_stats *stats;
    const struct kld_stats_page *page;
    struct kld_staging *staging;
    /* A call ended; it is the caller's again. */
    void (*ended)(struct kld_link_call *call, enum kld_status status,
                  const struct kld_result *result, const struct kld_error *error);
    bool holds; /* calls wait for kld_link_send(), up to some */
};

/* The link to worker `index`. */
enum kld_status kld_link_open(const struct kld_link_options *options, uint32_t index,
                              struct kld_link **ret_link, struct kld_error *err);
/* Asks for the end, for a process that ends too: calls that are still on end with KLD_UNAVAILABLE
 * although the worker may be writing yet. closed() comes on the loop, the link is gone then. */
void kld_link_close(struct kld_link *link, void (*closed)(void *user), void *user);

/* Never calls back before it returns. */
void kld_link_submit(struct kld_link *link, struct kld_link_call *call);
/* Sends what waits. May call back. */
void kld_link_send(struct kld_link *link);
/* As kld_links_withdraw(). */
bool kld_link_withdraw(struct kld_link_call *call);
/* The worker's process of now, or of late, has greeted it. Any thread. */
bool kld_link_is_up(const struct kld_link *link);
/* Calls that have not ended. */
uint32_t kld_link_load(const struct kld_link *link);

#endif
