/* link.h - the gateway's connection to its worker: an ordinary client through libkld.
 *
 * The connection is made on the thread pool (connecting blocks); calls that come earlier wait. It
 * is never given up: while the worker is gone, libkld finds the next one and sends again what can
 * safely run again. As many calls are with the worker as it allows one client; the others wait here
 * in order.
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

struct kld_link_call {
    /* The caller's, before kld_link_submit(). request.bytes[].offset_bytes of each tensor of the op
     * is its place in staging; regions, stream and timeout are set by the link. */
    struct kld_request request;
    uint64_t deadline_ns; /* uv_hrtime() */
    void (*done)(struct kld_link_call *call, enum kld_status status,
                 const struct kld_result *result, const struct kld_error *error);
    void (*late)(struct kld_link_call *call); /* at most once, before done() */

    /* The link's own. */
    struct kld_link *link;
    struct kld_link_call *before, *after;
    uint64_t id;
    bool submitted, is_late;
};

/* staging outlives the link. */
enum kld_status kld_link_open(uv_loop_t *loop, const struct kld_config *config,
                              struct kld_stats *stats, struct kld_staging *staging,
                              struct kld_link **ret_link, struct kld_error *err);
/* Asks for the end, for a process that ends too: calls that are still on end with KLD_UNAVAILABLE
 * although the worker may be writing yet. closed() comes on the loop, the link is gone then. */
void kld_link_close(struct kld_link *link, void (*closed)(void *user), void *user);

/* Never calls back before it returns. */
void kld_link_submit(struct kld_link *link, struct kld_link_call *call);

#endif
