/* auth.c - reads the file of tokens, finds who sent one, counts what he has in flight (auth.h).
 * Hashes by GnuTLS. Tells nobody which token was nearly right: every line is compared, each in the
 * same time. Reading at start on the main thread; the rest on any. */
#include "server/gateway/auth.h"

#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/gateway/file.h"

#define FILE_BYTES_MAX ((size_t)1 << 20)

struct kld_auth {
    uint64_t requests_max, bytes_max, buffer_bytes_max; /* of one token */
    struct kld_caller everybody;                        /* where there are no tokens */
    uint32_t count;                                     /* 0: no tokens */
    struct kld_caller *caller;
};

static const struct {
    const char *name;
    enum kld_right right;
} rights[] = {{"infer", KLD_RIGHT_INFER}, {"shm", KLD_RIGHT_SHM}, {"metrics", KLD_RIGHT_METRICS}};

static bool read_rights(char *text, unsigned *ret_rights) {
    char *state = NULL;
    *ret_rights = KLD_RIGHT_ANY;
    for (char *word = strtok_r(text, ",", &state); word; word = strtok_r(NULL, ",", &state)) {
        size_t i = 0;
        while (i < sizeof rights / sizeof rights[0] && strcmp(rights[i].name, word) != 0)
            i++;
        if (i == sizeof rights / sizeof rights[0])
            return false;
        *ret_rights |= rights[i].right;
    }
    return true;
}

static bool read_hash(const char *text, uint8_t ret_hash[32]) {
    gnutls_datum_t hex = {.data = (unsigned char *)(uintptr_t)text, .size = (unsigned)strlen(text)};
    size_t bytes = 32;
    return hex.size == 64 && gnutls_hex_decode(&hex, ret_hash, &bytes) == 0 && bytes == 32;
}

static bool is_name(const char *text) {
    size_t length =
        strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");
    return length > 0 && length < KLD_AUTH_NAME_MAX && !text[length];
}

static enum kld_status read_line(struct kld_auth *auth, char *line, unsigned number,
                                 struct kld_error *err) {
    char *state = NULL;
    line[strcspn(line, "#")] = '\0';
    char *name = strtok_r(line, " \t\r", &state), *hash = strtok_r(NULL, " \t\r", &state);
    char *right = strtok_r(NULL, " \t\r", &state);
    if (!name)
        return KLD_OK;
    if (auth->count == KLD_AUTH_TOKENS_MAX)
        return kld_error_set(err, KLD_TOO_LARGE, "tokens: line %u: at most %d tokens", number,
                             KLD_AUTH_TOKENS_MAX);
    struct kld_caller *caller = &auth->caller[auth->count];
    /* The line may hold a token that somebody put there by mistake: it is not repeated. */
    if (!is_name(name) || !hash || !right || strtok_r(NULL, " \t\r", &state) ||
        !read_hash(hash, caller->sha256) || !read_rights(right, &caller->rights))
        return kld_error_set(err, KLD_INVALID,
                             "tokens: line %u is not NAME, the SHA-256 of the token in 64 "
                             "hexadecimal digits, and rights by comma among infer, shm, metrics",
                             number);
    for (uint32_t i = 0; i < auth->count; i++)
        if (strcmp(auth->caller[i].name, name) == 0 ||
            memcmp(auth->caller[i].sha256, caller->sha256, 32) == 0)
            return kld_error_set(err, KLD_INVALID,
                                 "tokens: line %u has the name or the token of an earlier one",
                                 number);
    strcpy(caller->name, name);
    auth->count++;
    return KLD_OK;
}

static enum kld_status read_tokens(struct kld_auth *auth, char *text, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    char *at = text;
    for (unsigned number = 1; at && status == KLD_OK; number++) {
        char *line = strsep(&at, "\n");
        status = read_line(auth, line, number, err);
    }
    if (status == KLD_OK && auth->count == 0)
        status = kld_error_set(err, KLD_INVALID, "tokens: the file has no tokens");
    return status;
}

/* Half, or somewhat more where one request may have half already. */
static uint64_t staging_of(const struct kld_config *config) {
    uint64_t all = config->staging_bytes_max, share = config->staging_request_bytes_max;
    if (share > all / 2)
        share = all / 2;
    return share + all / 4 > all / 2 ? share + all / 4 : all / 2;
}

enum kld_status kld_auth_open(const struct kld_config *config, struct kld_auth **ret_auth,
                              struct kld_error *err) {
    struct kld_auth *auth = calloc(1, sizeof *auth);
    enum kld_status status = KLD_OK;
    char *text = NULL;
    if (!auth)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    auth->everybody.rights = UINT32_MAX;
    auth->requests_max = config->token_requests_max;
    auth->buffer_bytes_max = config->token_buffer_bytes_max;
    auth->bytes_max = staging_of(config);
    if (auth->bytes_max > config->token_bytes_max)
        auth->bytes_max = config->token_bytes_max;
    if (config->tokens[0]) {
        auth->caller = calloc(KLD_AUTH_TOKENS_MAX, sizeof *auth->caller);
        if (!auth->caller)
            status = kld_error_set(err, KLD_NO_MEMORY, "out of memory");
        else
            status = kld_file_read("tokens", config->tokens, FILE_BYTES_MAX, &text, err);
        if (status == KLD_OK)
            status = read_tokens(auth, text, err);
        kld_file_forget(text);
    }
    if (status) {
        kld_auth_close(auth);
        return status;
    }
    *ret_auth = auth;
    return KLD_OK;
}

void kld_auth_close(struct kld_auth *auth) {
    if (!auth)
        return;
    free(auth->caller);
    free(auth);
}

enum kld_status kld_auth_find(struct kld_auth *auth, const char *header,
                              struct kld_caller **ret_caller, struct kld_error *err) {
    if (!auth->count) {
        *ret_caller = &auth->everybody;
        return KLD_OK;
    }
    if (!header || strncasecmp(header, "Bearer ", 7) != 0)
        return kld_error_set(err, KLD_UNAUTHENTICATED,
                             "this server wants a token: Authorization: Bearer TOKEN");
    const char *token = header + 7 + strspn(header + 7, " ");
    size_t length = strlen(token);
    uint8_t hash[32];
    struct kld_caller *found = NULL;
    if (length == 0 || length > KLD_AUTH_TOKEN_BYTES_MAX ||
        gnutls_hash_fast(GNUTLS_DIG_SHA256, token, length, hash) != 0)
        return kld_error_set(err, KLD_UNAUTHENTICATED, "the token is not known here");
    for (uint32_t i = 0; i < auth->count; i++)
        if (gnutls_memcmp(auth->caller[i].sha256, hash, sizeof hash) == 0)
            found = &auth->caller[i];
    if (!found)
        return kld_error_set(err, KLD_UNAUTHENTICATED, "the token is not known here");
    *ret_caller = found;
    return KLD_OK;
}

enum kld_status kld_auth_check(const struct kld_caller *caller, enum kld_right right,
                               struct kld_error *err) {
    if ((caller->rights & right) == (unsigned)right)
        return KLD_OK;
    size_t i = 0;
    while (i + 1 < sizeof rights / sizeof rights[0] && rights[i].right != right)
        i++;
    return kld_error_set(err, KLD_FORBIDDEN, "the token does not have the right '%s'",
                         rights[i].name);
}

/* What is refused was never added, not even for a moment: another loop must not refuse because of
 * it. */
enum kld_status kld_auth_take_request(struct kld_auth *auth, struct kld_caller *caller,
                                      struct kld_error *err) {
    uint32_t before = atomic_load(&caller->requests);
    do {
        if (auth->count && before >= auth->requests_max)
            return kld_error_set(err, KLD_THROTTLED,
                                 "%" PRIu64
                                 " requests of this token are in flight, the most allowed "
                                 "(token_requests_max); try again",
                                 auth->requests_max);
    } while (!atomic_compare_exchange_weak(&caller->requests, &before, before + 1));
    return KLD_OK;
}

/* counter: the caller's, of what `what` names, which `setting` limits. */
static enum kld_status take(const struct kld_auth *auth, _Atomic uint64_t *counter, uint64_t bytes,
                            uint64_t most, const char *what, const char *setting,
                            struct kld_error *err) {
    uint64_t before = atomic_load(counter);
    bool fits;
    do {
        fits = !auth->count || (bytes <= most && before <= most - bytes);
    } while (fits && !atomic_compare_exchange_weak(counter, &before, before + bytes));
    if (fits)
        return KLD_OK;
    if (bytes > most)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the request needs %" PRIu64 " bytes of %s; a token may have %" PRIu64
                             " in flight (%s)",
                             bytes, what, most, setting);
    return kld_error_set(err, KLD_THROTTLED,
                         "the requests of this token in flight hold %" PRIu64
                         " bytes of %s and this one needs %" PRIu64 "; at most %" PRIu64
                         " (%s); try again",
                         before, what, bytes, most, setting);
}

enum kld_status kld_auth_take_bytes(struct kld_auth *auth, struct kld_caller *caller,
                                    uint64_t bytes, struct kld_error *err) {
    return take(auth, &caller->bytes, bytes, auth->bytes_max, "staging memory",
                "token_bytes_max, and about half of staging_bytes_max", err);
}

enum kld_status kld_auth_take_buffer(struct kld_auth *auth, struct kld_caller *caller,
                                     uint64_t bytes, struct kld_error *err) {
    return take(auth, &caller->buffer_bytes, bytes, auth->buffer_bytes_max, "device memory",
                "token_buffer_bytes_max", err);
}

void kld_auth_give_request(struct kld_caller *caller) { atomic_fetch_sub(&caller->requests, 1); }

void kld_auth_give_bytes(struct kld_caller *caller, uint64_t bytes) {
    atomic_fetch_sub(&caller->bytes, bytes);
}

void kld_auth_give_buffer(struct kld_caller *caller, uint64_t bytes) {
    atomic_fetch_sub(&caller->buffer_bytes, bytes);
}
