/* routes.h - which path and method does what; every reply that is not a computation.
 * Loop thread only. */
#ifndef KLD_SERVER_GATEWAY_ROUTES_H
#define KLD_SERVER_GATEWAY_ROUTES_H

#include "server/gateway/http.h"

extern const struct kld_http_handler kld_routes_handler;

#endif
