/* tls.h - the certificate and key that HTTPS is served with, and the check of clients'
 * certificates. A connection has the keys that were in use when it was accepted, to its end; new
 * ones take their place for those that come later. Which client CA counts is the newest one's to
 * say, for each request, so a CA that was taken out lets nobody in any more. Any thread, but for
 * what takes a connection, which is its loop's. */
#ifndef KLD_SERVER_GATEWAY_TLS_H
#define KLD_SERVER_GATEWAY_TLS_H

#include <microhttpd.h>
#include <stdbool.h>

#include "proto/status.h"
#include "server/secrets.h"

struct kld_tls;      /* what is in use; changes */
struct kld_tls_keys; /* certificate, key and client CA that were read together; constant, counted */

/* *ret_tls NULL: the secrets have no certificate, and HTTP is plain. */
enum kld_status kld_tls_open(const struct kld_secrets *secrets, struct kld_tls **ret_tls,
                             struct kld_error *err);
void kld_tls_close(struct kld_tls *tls);                    /* NULL is allowed */
bool kld_tls_wants_certificates(const struct kld_tls *tls); /* of clients; constant */

/* Other keys, and then they in the place of those in use. Refuses files that do not fit each other,
 * and what would turn TLS or client certificates on or off. tls NULL: *ret_keys becomes NULL. */
enum kld_status kld_tls_read(const struct kld_tls *tls, const struct kld_secrets *secrets,
                             struct kld_tls_keys **ret_keys, struct kld_error *err);
void kld_tls_replace(struct kld_tls *tls, struct kld_tls_keys *keys);
/* Of the server's certificate: when it expires, in seconds since 1970. */
int64_t kld_tls_until(const struct kld_tls_keys *keys);

/* To be asked when something of TLS failed. Where GnuTLS has no memory for the random numbers of a
 * thread it puts itself out of use for good, and each later connection would be closed at once:
 * then this is true, and unless the process is ending already, it is asked to as by SIGTERM, so
 * that its successor serves. */
bool kld_tls_end_if_broken(const struct kld_tls *tls, bool ending);

struct kld_tls_keys *kld_tls_acquire(struct kld_tls *tls); /* those in use */
void kld_tls_release(struct kld_tls_keys *keys);           /* NULL is allowed */

/* For MHD_OPTION_HTTPS_CERT_CALLBACK: a daemon without keys, each of whose connections needs the
 * next, or its handshake fails. */
void *kld_tls_callback(void);
/* Before its handshake: with these keys, which the connection holds until MHD says that it is
 * closed. Then it has taken the session apart already: nothing is to look at that. */
void kld_tls_begin(struct MHD_Connection *connection, const struct kld_tls_keys *keys);
/* Did this connection show a certificate that the client CA in use signed for clients? *keys: the
 * connection's, which become those in use. */
enum kld_status kld_tls_check_client(struct kld_tls *tls, struct MHD_Connection *connection,
                                     struct kld_tls_keys **keys, struct kld_error *err);

#endif
