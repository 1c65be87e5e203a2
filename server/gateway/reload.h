/* reload.h - takes over, while requests are on their way, what the supervisor read anew: tokens,
 * certificate, key, client CA, log level; all of it, or nothing. One reload at a time, which the
 * supervisor sees to. The first loop's thread. */
#ifndef KLD_SERVER_GATEWAY_RELOAD_H
#define KLD_SERVER_GATEWAY_RELOAD_H

#include <uv.h>

#include "server/gateway/gateway.h"
#include "server/role.h"
#include "server/secrets.h"

struct kld_auth_change;
struct kld_tls_keys;
struct kld_tokens;

struct kld_gateway_reload {
    struct kld_gateway *gateway; /* of the first loop; auth, tls and regions are everybody's */
    uv_timer_t timer;            /* while callers who left have regions */
    uv_work_t work;
    struct kld_child_order order;
    int fd; /* memfd of secrets.h; -1: no reload is under way */

    /* uv's pool's until its work is done. */
    struct kld_tokens *tokens;
    struct kld_tls_keys *keys;
    struct kld_error error;
};

void kld_gateway_reload_open(struct kld_gateway_reload *reload, struct kld_gateway *gateway);
void kld_gateway_reload_close(
    struct kld_gateway_reload *reload); /* its timer; what is under way goes on */
/* Takes the descriptor. Reports to the supervisor when it is done. */
void kld_gateway_reload_begin(struct kld_gateway_reload *reload,
                              const struct kld_child_order *order, int fd);

#endif
