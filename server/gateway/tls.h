/* tls.h - the certificate and key that HTTPS is served with, and the check of clients'
 * certificates. Read once at start; clients are checked on the loop thread of their connection. */
#ifndef KLD_SERVER_GATEWAY_TLS_H
#define KLD_SERVER_GATEWAY_TLS_H

#include <microhttpd.h>
#include <stdbool.h>

#include "proto/status.h"
#include "server/config.h"

/* What the daemons are started with; all NULL: plain HTTP. */
struct kld_tls {
    char *certificate, *key, *client_ca; /* PEM; client_ca NULL: clients need no certificate */
};

/* Refuses files that do not fit each other. */
enum kld_status kld_tls_read(const struct kld_config *config, struct kld_tls *ret_tls,
                             struct kld_error *err);
void kld_tls_forget(struct kld_tls *tls); /* once the daemons run; overwrites the key */

/* Did this connection show a certificate that the client CA signed for clients? */
enum kld_status kld_tls_check_client(struct MHD_Connection *connection, struct kld_error *err);

#endif
