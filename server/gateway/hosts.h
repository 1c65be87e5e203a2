/* hosts.h - by which names callers without a token may call this server.
 *
 * A page in a browser can have its own name lead to this host (DNS rebinding): for the browser the
 * server is then a part of the page, which reads its answers. The name is in the header Host. It
 * matters where nothing else keeps strangers away, on loopback without tokens, and where http_hosts
 * says names. With TLS the browser has asked for another name than the certificate's, and goes. Any
 * thread. */
#ifndef KLD_SERVER_GATEWAY_HOSTS_H
#define KLD_SERVER_GATEWAY_HOSTS_H

#include <stdbool.h>

#include "proto/status.h"
#include "server/config.h"

/* fd: of the listening socket. */
bool kld_hosts_matter(const struct kld_config *config, int fd);

/* host: the header's value, or NULL. KLD_FORBIDDEN: neither an address, nor localhost, nor in
 * http_hosts, with or without a port. No host at all is no browser's. */
enum kld_status kld_hosts_check(const struct kld_config *config, const char *host,
                                struct kld_error *err);

#endif
