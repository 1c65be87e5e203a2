/* headers.h - what the head of a request says about the rest of it, found in one pass over its
 * headers, and whether MHD has seen all of it. Loop thread. */
#ifndef KLD_SERVER_GATEWAY_HEADERS_H
#define KLD_SERVER_GATEWAY_HEADERS_H

#include "server/gateway/http.h"

/* As MHD tells them: in the buffer of the connection, one behind the other. */
struct kld_request_line {
    const char *method, *url, *version;
};

/* MHD_OPTION_URI_LOG_CALLBACK: keeps how long the path and its query are, before MHD undoes what is
 * escaped in them. NULL, which is what a request begins with. */
void *kld_headers_note_uri(void *user, const char *uri, struct MHD_Connection *connection);

/* version: of the libmicrohttpd that runs, which need not be what was built with. Up to 0.9.73 it
 * tells of every head that it has no bytes, so that each would be refused. KLD_UNIMPLEMENTED. */
enum kld_status kld_headers_check_library(const char *version, struct kld_error *err);

/* Whom it is for and where the body ends must be said once, in a way that everybody before us reads
 * as we do. An error means that nobody knows what comes behind the head: the connection has to end.
 * Sets what the exchange says of its headers. */
enum kld_status kld_headers_check(struct kld_exchange *exchange,
                                  const struct kld_request_line *line, struct kld_error *err);

/* Headers came behind the last chunk: nobody knows whether all of them were seen, so that what
 * comes behind is no request and the connection has to end. */
bool kld_headers_trailed(const struct kld_exchange *exchange);

/* MHD (0.9.75) says 100 Continue also where no body is to come, takes the request that is pipelined
 * behind it for an empty piece of one, and is then answered at a time when it takes no answer: the
 * connection ended without any. Such an expectation means nothing (RFC 9110, 10.1.1), so MHD does
 * not find it. */
void kld_headers_drop_idle_expectation(const struct kld_exchange *exchange);

#endif
