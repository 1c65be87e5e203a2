/* tls.c - certificate, key and client CA for HTTPS, checked before they are used, and given to
 * connections one by one (tls.h). libmicrohttpd has none of its own: it knows one certificate for a
 * daemon's whole life. GnuTLS does the rest; credentials that nobody changes any more may be shared
 * by threads. */
#include "server/gateway/tls.h"

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/log.h"

struct kld_tls_keys {
    _Atomic uint32_t users;
    gnutls_certificate_credentials_t credentials;
    bool client_ca; /* they have one: clients are asked for certificates */
    int64_t until;
};

struct kld_tls {
    bool client_ca;            /* constant */
    pthread_mutex_t mutex;     /* of the next */
    struct kld_tls_keys *keys; /* in use; one of their users */
};

static gnutls_datum_t datum_of(const char *text) {
    return (gnutls_datum_t){.data = (unsigned char *)(uintptr_t)text,
                            .size = (unsigned)strlen(text)};
}

static int until_of(gnutls_certificate_credentials_t credentials, int64_t *ret_until) {
    gnutls_x509_crt_t *chain = NULL;
    unsigned count = 0;
    int result = gnutls_certificate_get_x509_crt(credentials, 0, &chain, &count);
    if (result < 0)
        return result;
    *ret_until = count ? (int64_t)gnutls_x509_crt_get_expiration_time(chain[0]) : 0;
    for (unsigned i = 0; i < count; i++)
        gnutls_x509_crt_deinit(chain[i]);
    gnutls_free(chain);
    return 0;
}

static enum kld_status fill(struct kld_tls_keys *keys, const struct kld_secrets *secrets,
                            struct kld_error *err) {
    gnutls_datum_t certificate = datum_of(secrets->tls_cert), key = datum_of(secrets->tls_key);
    int result = gnutls_certificate_set_x509_key_mem(keys->credentials, &certificate, &key,
                                                     GNUTLS_X509_FMT_PEM);
    if (result >= 0)
        result = until_of(keys->credentials, &keys->until);
    if (result < 0)
        return kld_error_set(err, KLD_INVALID,
                             "tls_cert, tls_key: not a PEM certificate and its key: %s",
                             gnutls_strerror(result));
    if (!secrets->tls_client_ca)
        return KLD_OK;
    gnutls_datum_t ca = datum_of(secrets->tls_client_ca);
    result = gnutls_certificate_set_x509_trust_mem(keys->credentials, &ca, GNUTLS_X509_FMT_PEM);
    if (result <= 0)
        return kld_error_set(err, KLD_INVALID, "tls_client_ca: not a PEM certificate: %s",
                             result ? gnutls_strerror(result) : "there is none");
    keys->client_ca = true;
    return KLD_OK;
}

static enum kld_status read_keys(const struct kld_secrets *secrets, struct kld_tls_keys **ret_keys,
                                 struct kld_error *err) {
    struct kld_tls_keys *keys = calloc(1, sizeof *keys);
    if (!keys || gnutls_certificate_allocate_credentials(&keys->credentials) != 0) {
        free(keys);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    atomic_store(&keys->users, 1);
    enum kld_status status = fill(keys, secrets, err);
    if (status)
        kld_tls_release(keys);
    else
        *ret_keys = keys;
    return status;
}

enum kld_status kld_tls_open(const struct kld_secrets *secrets, struct kld_tls **ret_tls,
                             struct kld_error *err) {
    *ret_tls = NULL;
    if (!secrets->tls_cert)
        return KLD_OK;
    struct kld_tls *tls = calloc(1, sizeof *tls);
    if (!tls)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    enum kld_status status = read_keys(secrets, &tls->keys, err);
    if (status) {
        free(tls);
        return status;
    }
    pthread_mutex_init(&tls->mutex, NULL); /* which does not fail here */
    tls->client_ca = tls->keys->client_ca;
    *ret_tls = tls;
    return KLD_OK;
}

void kld_tls_close(struct kld_tls *tls) {
    if (!tls)
        return;
    kld_tls_release(tls->keys);
    pthread_mutex_destroy(&tls->mutex);
    free(tls);
}

bool kld_tls_wants_certificates(const struct kld_tls *tls) { return tls && tls->client_ca; }

enum kld_status kld_tls_read(const struct kld_tls *tls, const struct kld_secrets *secrets,
                             struct kld_tls_keys **ret_keys, struct kld_error *err) {
    *ret_keys = NULL;
    if (!tls != !secrets->tls_cert || (tls && tls->client_ca != (secrets->tls_client_ca != NULL)))
        return kld_error_set(err, KLD_INVALID,
                             "tls_cert, tls_client_ca: whether there are any is decided at the "
                             "server's start");
    return tls ? read_keys(secrets, ret_keys, err) : KLD_OK;
}

void kld_tls_replace(struct kld_tls *tls, struct kld_tls_keys *keys) {
    if (!tls || !keys)
        return;
    pthread_mutex_lock(&tls->mutex);
    struct kld_tls_keys *before = tls->keys;
    tls->keys = keys;
    pthread_mutex_unlock(&tls->mutex);
    kld_tls_release(before);
}

int64_t kld_tls_until(const struct kld_tls_keys *keys) { return keys->until; }

bool kld_tls_end_if_broken(const struct kld_tls *tls, bool ending) {
    gnutls_privkey_t any;
    int result = tls ? gnutls_privkey_init(&any) : GNUTLS_E_INVALID_REQUEST;
    if (result == 0)
        gnutls_privkey_deinit(any);
    if (result != GNUTLS_E_LIB_IN_ERROR_STATE)
        return false;
    if (!ending) {
        kld_log(KLD_LOG_ERROR, "tls failed",
                "text=\"GnuTLS has put itself out of use in this process, which ends\"");
        (void)tgkill(getpid(), getpid(), SIGTERM); /* the thread that is sure to take signals */
    }
    return true;
}

struct kld_tls_keys *kld_tls_acquire(struct kld_tls *tls) {
    pthread_mutex_lock(&tls->mutex);
    struct kld_tls_keys *keys = tls->keys;
    atomic_fetch_add(&keys->users, 1);
    pthread_mutex_unlock(&tls->mutex);
    return keys;
}

void kld_tls_release(struct kld_tls_keys *keys) {
    if (!keys || atomic_fetch_sub(&keys->users, 1) != 1)
        return;
    gnutls_certificate_free_credentials(keys->credentials);
    free(keys);
}

static int no_keys(gnutls_session_t session, const gnutls_datum_t *authorities, int authorities_max,
                   const gnutls_pk_algorithm_t *algorithms, int algorithms_max,
                   gnutls_pcert_st **ret_chain, unsigned *ret_count, gnutls_privkey_t *ret_key) {
    return -1;
}

void *kld_tls_callback(void) { return (void *)(uintptr_t)no_keys; }

static gnutls_session_t session_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    return info ? (gnutls_session_t)info->tls_session : NULL;
}

void kld_tls_begin(struct MHD_Connection *connection, const struct kld_tls_keys *keys) {
    gnutls_session_t session = session_of(connection);
    if (!session) /* it will have no keys, and its handshake fails */
        return;
    gnutls_credentials_set(session, GNUTLS_CRD_CERTIFICATE, keys->credentials);
    if (keys->client_ca)
        gnutls_certificate_server_set_request(session, GNUTLS_CERT_REQUEST);
}

/* What a session looks at after its handshake is whom it trusts, and that is to be the newest. */
static void renew(struct kld_tls *tls, gnutls_session_t session, struct kld_tls_keys **keys) {
    struct kld_tls_keys *newest = kld_tls_acquire(tls);
    if (newest != *keys)
        gnutls_credentials_set(session, GNUTLS_CRD_CERTIFICATE, newest->credentials);
    kld_tls_release(*keys);
    *keys = newest;
}

enum kld_status kld_tls_check_client(struct kld_tls *tls, struct MHD_Connection *connection,
                                     struct kld_tls_keys **keys, struct kld_error *err) {
    gnutls_session_t session = session_of(connection);
    char purpose_oid[] = GNUTLS_KP_TLS_WWW_CLIENT;
    gnutls_typed_vdata_st purpose = {.type = GNUTLS_DT_KEY_PURPOSE_OID,
                                     .data = (unsigned char *)purpose_oid,
                                     .size = sizeof purpose_oid - 1};
    unsigned problems = 0;
    if (session)
        renew(tls, session, keys);
    int result = session ? gnutls_certificate_verify_peers(session, &purpose, 1, &problems)
                         : GNUTLS_E_NO_CERTIFICATE_FOUND;
    if (result == GNUTLS_E_NO_CERTIFICATE_FOUND)
        return kld_error_set(err, KLD_UNAUTHENTICATED,
                             "this server wants a client certificate and none was shown");
    if (result < 0 || problems)
        return kld_error_set(err, KLD_UNAUTHENTICATED,
                             "the client certificate is not accepted by this server");
    return KLD_OK;
}
