/* secrets.h - tokens, certificate, key and client CA, on their way from the supervisor, which reads
 * their files, to the gateway, which may open none. A sealed memfd holds their texts; it is handed
 * over at the gateway's start and, when the server reloads, once more over the control socket. A
 * gateway that replaces another gets the same memfd: what lies in the files by then counts from the
 * next reload on.
 *
 * Says nothing of what the texts mean (server/gateway/auth.h, tls.h). Reading files may take its
 * time; any thread. */
#ifndef KLD_SERVER_SECRETS_H
#define KLD_SERVER_SECRETS_H

#include "proto/status.h"
#include "server/config.h"

#define KLD_SECRET_BYTES_MAX ((size_t)1 << 20) /* of each file */

/* X(setting): in the order of the memfd. */
#define KLD_SECRET_MAP(X) X(tokens) X(tls_cert) X(tls_key) X(tls_client_ca)

struct kld_secrets {
#define X(setting) char *setting; /* NUL-terminated; NULL: not configured */
    KLD_SECRET_MAP(X)
#undef X
};

/* Are those there that go together? Looks at the settings alone. */
enum kld_status kld_secrets_check(const struct kld_config *config, struct kld_error *err);
/* The files that the settings name, opened by their paths, after that check. An error names the
 * setting, never what is in the file. */
enum kld_status kld_secrets_read(const struct kld_config *config, struct kld_secrets *ret_secrets,
                                 struct kld_error *err);
/* Into a new memfd; out of one, which stays the caller's. */
enum kld_status kld_secrets_pack(const struct kld_secrets *secrets, int *ret_fd,
                                 struct kld_error *err);
enum kld_status kld_secrets_unpack(int fd, struct kld_secrets *ret_secrets, struct kld_error *err);
/* Overwrites and frees the texts. */
void kld_secrets_forget(struct kld_secrets *secrets);

#endif
