/* links.h - the gateway's ways to all workers, and which of them computes a call: the one with the
 * least in flight among those that serve, or the one that the caller named. A call's tensors lie in
 * staging, which every worker has mapped, so any of them can. Loop thread only. */
#ifndef KLD_SERVER_GATEWAY_LINKS_H
#define KLD_SERVER_GATEWAY_LINKS_H

#include "server/gateway/link.h"

/* One for each worker of the page. staging outlives them. */
enum kld_status kld_links_open(uv_loop_t *loop, const struct kld_config *config,
                               struct kld_stats_page *page, struct kld_staging *staging,
                               struct kld_links **ret_links, struct kld_error *err);
/* As kld_link_close(), of all of them. */
void kld_links_close(struct kld_links *links, void (*closed)(void *user), void *user);

uint32_t kld_links_count(const struct kld_links *links);
/* Never calls back before it returns. call->device, if it is pinned, is below the count. */
void kld_links_submit(struct kld_links *links, struct kld_link_call *call);
/* One of the workers serves and has greeted its link. Any thread. */
bool kld_links_up(const struct kld_links *links);
/* Between the two, calls are sent some at a time: to wake a worker for each costs both more than to
 * compute a small one. kld_links_send() may call back. */
void kld_links_hold(struct kld_links *links);
void kld_links_send(struct kld_links *links);
/* True: it was not sent to a worker yet and never will be; done() does not come. */
bool kld_links_withdraw(struct kld_link_call *call);

#endif
