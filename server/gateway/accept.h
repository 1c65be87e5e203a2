/* accept.h - takes connections off the listening socket and hands each to the HTTP loop that has
 * the fewest. The loops do not listen themselves: the kernel would wake all of them, and the same
 * one would nearly always win.
 *
 * At http_connections_max nothing is accepted; who comes waits in the socket's backlog. For
 * metrics, where they have an address of their own, there are KLD_METRICS_RESERVE more. Belongs to
 * the loop that it was opened on, which is the first one. */
#ifndef KLD_SERVER_GATEWAY_ACCEPT_H
#define KLD_SERVER_GATEWAY_ACCEPT_H

#include <stdbool.h>

#include <stdint.h>

#include "server/gateway/gateway.h"

#define KLD_METRICS_RESERVE 8 /* connections, ... */
#define KLD_METRICS_IDLE_S 2U /* ... which give way when they are silent: a probe waits for one */

struct kld_acceptor;

/* loops[0] is of the calling thread. listen_fd stays the caller's. */
enum kld_status kld_acceptor_open(struct kld_gateway *const *loops, uint32_t count, int listen_fd,
                                  bool metrics, struct kld_acceptor **ret_acceptor,
                                  struct kld_error *err);
/* Accepts no more; what was accepted has been handed over. */
void kld_acceptor_close(struct kld_acceptor *acceptor);

#endif
