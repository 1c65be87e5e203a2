/* tls.c - certificate, key and client CA for HTTPS, checked before they are used (tls.h).
 * GnuTLS under libmicrohttpd does the rest. */
#include "server/gateway/tls.h"

#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <string.h>

#include "server/gateway/file.h"

#define FILE_BYTES_MAX ((size_t)1 << 20)

static gnutls_datum_t datum_of(char *text) {
    return (gnutls_datum_t){.data = (unsigned char *)text, .size = (unsigned)strlen(text)};
}

/* libmicrohttpd would only say that it cannot start. */
static enum kld_status check(const struct kld_tls *tls, struct kld_error *err) {
    gnutls_certificate_credentials_t credentials;
    gnutls_datum_t certificate = datum_of(tls->certificate), key = datum_of(tls->key);
    if (gnutls_certificate_allocate_credentials(&credentials) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    enum kld_status status = KLD_OK;
    int result =
        gnutls_certificate_set_x509_key_mem(credentials, &certificate, &key, GNUTLS_X509_FMT_PEM);
    if (result < 0) {
        status = kld_error_set(err, KLD_INVALID,
                               "tls_cert, tls_key: not a PEM certificate and its key: %s",
                               gnutls_strerror(result));
    } else if (tls->client_ca) {
        gnutls_datum_t ca = datum_of(tls->client_ca);
        result = gnutls_certificate_set_x509_trust_mem(credentials, &ca, GNUTLS_X509_FMT_PEM);
        if (result <= 0)
            status = kld_error_set(err, KLD_INVALID, "tls_client_ca: not a PEM certificate: %s",
                                   result ? gnutls_strerror(result) : "there is none");
    }
    gnutls_certificate_free_credentials(credentials);
    return status;
}

enum kld_status kld_tls_read(const struct kld_config *config, struct kld_tls *ret_tls,
                             struct kld_error *err) {
    struct kld_tls tls = {.certificate = NULL};
    enum kld_status status = KLD_OK;
    if (!config->tls_cert[0] != !config->tls_key[0] ||
        (config->tls_client_ca[0] && !config->tls_cert[0]))
        return kld_error_set(err, KLD_INVALID,
                             "tls_cert and tls_key go together, and tls_client_ca with them");
    if (config->tls_cert[0] &&
        (status = kld_file_read("tls_cert", config->tls_cert, FILE_BYTES_MAX, &tls.certificate,
                                err)) == KLD_OK &&
        (status = kld_file_read("tls_key", config->tls_key, FILE_BYTES_MAX, &tls.key, err)) ==
            KLD_OK &&
        (!config->tls_client_ca[0] ||
         (status = kld_file_read("tls_client_ca", config->tls_client_ca, FILE_BYTES_MAX,
                                 &tls.client_ca, err)) == KLD_OK))
        status = check(&tls, err);
    if (status) {
        kld_tls_forget(&tls);
        return status;
    }
    *ret_tls = tls;
    return KLD_OK;
}

void kld_tls_forget(struct kld_tls *tls) {
    kld_file_forget(tls->certificate);
    kld_file_forget(tls->key);
    kld_file_forget(tls->client_ca);
    memset(tls, 0, sizeof *tls);
}

enum kld_status kld_tls_check_client(struct MHD_Connection *connection, struct kld_error *err) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    char purpose_oid[] = GNUTLS_KP_TLS_WWW_CLIENT;
    gnutls_typed_vdata_st purpose = {.type = GNUTLS_DT_KEY_PURPOSE_OID,
                                     .data = (unsigned char *)purpose_oid,
                                     .size = sizeof purpose_oid - 1};
    unsigned problems = 0;
    int result = info ? gnutls_certificate_verify_peers((gnutls_session_t)info->tls_session,
                                                        &purpose, 1, &problems)
                      : GNUTLS_E_NO_CERTIFICATE_FOUND;
    if (result == GNUTLS_E_NO_CERTIFICATE_FOUND)
        return kld_error_set(err, KLD_UNAUTHENTICATED,
                             "this server wants a client certificate and none was shown");
    if (result < 0 || problems)
        return kld_error_set(err, KLD_UNAUTHENTICATED,
                             "the client certificate is not accepted by this server");
    return KLD_OK;
}
