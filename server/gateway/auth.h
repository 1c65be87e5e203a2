/* auth.h - who may ask for what: bearer tokens from a file, and what each of them has in flight.
 *
 * A line of the file is `NAME SHA256 RIGHTS`: a name for people, the SHA-256 of the token in 64
 * hexadecimal digits, rights by comma among infer, shm, metrics. `#` begins a comment. Tokens
 * themselves are kept nowhere and never logged. Without a file everybody has every right and no
 * limit of his own.
 *
 * The list is read at start and constant; what is in flight is counted by atomics. Any thread. */
#ifndef KLD_SERVER_GATEWAY_AUTH_H
#define KLD_SERVER_GATEWAY_AUTH_H

#include <stdatomic.h>
#include <stdint.h>

#include "proto/status.h"
#include "server/config.h"

#define KLD_AUTH_NAME_MAX 64     /* bytes of a caller's name, NUL included */
#define KLD_AUTH_TOKENS_MAX 1024 /* lines of the file */
#define KLD_AUTH_TOKEN_BYTES_MAX 1024

enum kld_right {
    KLD_RIGHT_NONE = 0,  /* open to all, without a token */
    KLD_RIGHT_ANY = 1,   /* any token */
    KLD_RIGHT_INFER = 2, /* compute, and store tensors to compute with */
    KLD_RIGHT_SHM = 4,   /* register shared memory */
    KLD_RIGHT_METRICS = 8,
};

struct kld_caller {
    char name[KLD_AUTH_NAME_MAX]; /* "": everybody, there are no tokens */
    uint8_t sha256[32];
    unsigned rights; /* enum kld_right, or-ed */
    _Atomic uint32_t requests;
    _Atomic uint64_t bytes, buffer_bytes;
};

struct kld_auth;

enum kld_status kld_auth_open(const struct kld_config *config, struct kld_auth **ret_auth,
                              struct kld_error *err);
void kld_auth_close(struct kld_auth *auth); /* NULL is allowed */

/* header: the value of Authorization, or NULL. KLD_UNAUTHENTICATED: none, or not a known token. */
enum kld_status kld_auth_find(struct kld_auth *auth, const char *header,
                              struct kld_caller **ret_caller, struct kld_error *err);
/* KLD_FORBIDDEN: known, but without this right. */
enum kld_status kld_auth_check(const struct kld_caller *caller, enum kld_right right,
                               struct kld_error *err);

/* One request more in flight, or so many bytes more of staging, or of buffers on the device.
 * KLD_THROTTLED: over token_requests_max, token_bytes_max or token_buffer_bytes_max; nothing was
 * added then. Of staging a token has at most about half, whatever token_bytes_max says, so that a
 * few who send slowly do not have all of it. */
enum kld_status kld_auth_take_request(struct kld_auth *auth, struct kld_caller *caller,
                                      struct kld_error *err);
enum kld_status kld_auth_take_bytes(struct kld_auth *auth, struct kld_caller *caller,
                                    uint64_t bytes, struct kld_error *err);
enum kld_status kld_auth_take_buffer(struct kld_auth *auth, struct kld_caller *caller,
                                     uint64_t bytes, struct kld_error *err);
void kld_auth_give_buffer(struct kld_caller *caller, uint64_t bytes);
void kld_auth_give_request(struct kld_caller *caller);
void kld_auth_give_bytes(struct kld_caller *caller, uint64_t bytes);

#endif
