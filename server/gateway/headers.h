/* headers.h - what the head of a request says about the rest of it, found in one pass over its
 * headers. Loop thread. */
#ifndef KLD_SERVER_GATEWAY_HEADERS_H
#define KLD_SERVER_GATEWAY_HEADERS_H

#include "server/gateway/http.h"

/* Whom it is for and where the body ends must be said once, in a way that everybody before us reads
 * as we do. An error means that nobody knows what comes behind the head: the connection has to end.
 * Sets what the exchange says of its headers. version: as MHD tells it. */
enum kld_status kld_headers_check(struct kld_exchange *exchange, const char *version,
                                  struct kld_error *err);

#endif
