/* auth.h - who may ask for what: bearer tokens from a file, and what each of them has in flight.
 *
 * A line of the file is `NAME SHA256 RIGHTS`: a name for people, the SHA-256 of the token in 64
 * hexadecimal digits, rights by comma among infer, shm, metrics. `#` begins a comment. Tokens
 * themselves are kept nowhere and never logged. Without a file everybody has every right and no
 * limit of his own.
 *
 * A list is constant; another may take its place while requests are on their way. Who asks is known
 * for the process's life by his name, whatever his token and rights are by then: what he has in
 * flight and keeps stays his. Any thread, but for kld_auth_read() and kld_auth_replace(). */
#ifndef KLD_SERVER_GATEWAY_AUTH_H
#define KLD_SERVER_GATEWAY_AUTH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"
#include "server/config.h"
#include "server/gateway/staging.h"

#define KLD_AUTH_NAME_MAX 64     /* bytes of a caller's name, NUL included */
#define KLD_AUTH_TOKENS_MAX 1024 /* lines of the file */
#define KLD_AUTH_NAMES_MAX 16384 /* that a process ever had, over all lists */
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
    atomic_bool gone;             /* his token is in the list no more */
    _Atomic uint32_t requests;
    _Atomic uint64_t bytes, buffer_bytes;
    struct kld_staging_share staged; /* of staging's */
};

/* His token is gone and his last request has ended. */
static inline bool kld_caller_left(const struct kld_caller *caller) {
    return atomic_load(&caller->gone) && atomic_load(&caller->requests) == 0;
}

struct kld_auth;
struct kld_tokens; /* the list that a file gave; counted */

/* text: of the file, which is taken apart; NULL: no tokens, which no later list can change. */
enum kld_status kld_auth_open(const struct kld_config *config, char *text,
                              struct kld_auth **ret_auth, struct kld_error *err);
void kld_auth_close(struct kld_auth *auth); /* NULL is allowed */

struct kld_auth_change {
    uint32_t tokens, added, removed; /* by name */
};
/* Another list, and then it in the place of the one in use: requests from here on are asked by it.
 * One thread at a time. NULL for text, and then for the list, where there are no tokens. A list
 * that is not to be used is released. */
enum kld_status kld_auth_read(struct kld_auth *auth, char *text, struct kld_tokens **ret_tokens,
                              struct kld_error *err);
void kld_auth_replace(struct kld_auth *auth, struct kld_tokens *tokens,
                      struct kld_auth_change *ret_change);
void kld_tokens_release(struct kld_tokens *tokens); /* NULL is allowed */

/* header: the value of Authorization, or NULL. *ret_rights: enum kld_right, or-ed.
 * KLD_UNAUTHENTICATED: none, or not a known token. */
enum kld_status kld_auth_find(struct kld_auth *auth, const char *header,
                              struct kld_caller **ret_caller, unsigned *ret_rights,
                              struct kld_error *err);
/* KLD_FORBIDDEN: known, but without this right. */
enum kld_status kld_auth_check(unsigned held, enum kld_right right, struct kld_error *err);

/* There are others, for whom something has to be left. */
bool kld_auth_has_several(const struct kld_auth *auth);

/* One request more in flight, or so many bytes more of staging, or of buffers on the device.
 * KLD_THROTTLED: over token_requests_max, token_bytes_max or token_buffer_bytes_max; nothing was
 * added then. Of staging a token has at most about half, whatever token_bytes_max says, so that a
 * few who send slowly do not have all of it. */
enum kld_status kld_auth_take_request(struct kld_auth *auth, struct kld_caller *caller,
                                      struct kld_error *err);
enum kld_status kld_auth_take_bytes(struct kld_auth *auth, struct kld_caller *caller,
                                    uint64_t bytes, struct kld_error *err);
/* What kld_auth_take_bytes() would answer now; adds nothing. */
enum kld_status kld_auth_check_bytes(const struct kld_auth *auth, const struct kld_caller *caller,
                                     uint64_t bytes, struct kld_error *err);
enum kld_status kld_auth_take_buffer(struct kld_auth *auth, struct kld_caller *caller,
                                     uint64_t bytes, struct kld_error *err);
void kld_auth_give_buffer(struct kld_caller *caller, uint64_t bytes);
void kld_auth_give_request(struct kld_caller *caller);
void kld_auth_give_bytes(struct kld_caller *caller, uint64_t bytes);

#endif
