/* auth.c - reads lists of tokens, finds who sent one, counts what he has in flight (auth.h). Opens
 * no file. Hashes by GnuTLS. Tells nobody which token was nearly right: every line is compared,
 * each in the same time. Reading on one thread at a time; the rest on any. */
#include "server/gateway/auth.h"

#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct token {
    uint8_t sha256[32];
    unsigned rights; /* enum kld_right, or-ed */
    struct kld_caller *caller;
};

struct kld_tokens {
    _Atomic uint32_t users;
    uint32_t count;
    struct token token[KLD_AUTH_TOKENS_MAX];
};

struct kld_auth {
    uint64_t requests_max, bytes_max, buffer_bytes_max; /* of one token */
    bool limited;                                       /* constant: there are tokens */
    _Atomic uint32_t count;                             /* of the list in use */
    struct kld_caller everybody;                        /* where there are none */
    pthread_mutex_t mutex;                              /* of the next */
    struct kld_tokens *tokens;                          /* in use; one of its users */
    /* Of who reads lists: everybody who ever was in one. Other threads have pointers to them. */
    uint32_t names;
    struct kld_caller *name[KLD_AUTH_NAMES_MAX];
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

/* Of a list that was refused: nobody can have found those who came with it. */
static void unlearn(struct kld_auth *auth, uint32_t names) {
    while (auth->names > names)
        free(auth->name[--auth->names]);
}

/* Those who were never seen are gone until a list that names them is used. */
static enum kld_status know(struct kld_auth *auth, const char *name, struct kld_caller **ret_caller,
                            struct kld_error *err) {
    for (uint32_t i = 0; i < auth->names; i++)
        if (strcmp(auth->name[i]->name, name) == 0) {
            *ret_caller = auth->name[i];
            return KLD_OK;
        }
    if (auth->names == KLD_AUTH_NAMES_MAX)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "tokens: this server has known %d names since it was started, the "
                             "most it can; restart it",
                             KLD_AUTH_NAMES_MAX);
    struct kld_caller *caller = calloc(1, sizeof *caller);
    if (!caller)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    strcpy(caller->name, name);
    atomic_store(&caller->gone, true);
    auth->name[auth->names++] = *ret_caller = caller;
    return KLD_OK;
}

static enum kld_status read_line(struct kld_auth *auth, struct kld_tokens *tokens, char *line,
                                 unsigned number, struct kld_error *err) {
    char *state = NULL;
    line[strcspn(line, "#")] = '\0';
    char *name = strtok_r(line, " \t\r", &state), *hash = strtok_r(NULL, " \t\r", &state);
    char *right = strtok_r(NULL, " \t\r", &state);
    if (!name)
        return KLD_OK;
    if (tokens->count == KLD_AUTH_TOKENS_MAX)
        return kld_error_set(err, KLD_TOO_LARGE, "tokens: line %u: at most %d tokens", number,
                             KLD_AUTH_TOKENS_MAX);
    struct token *token = &tokens->token[tokens->count];
    /* The line may hold a token that somebody put there by mistake: it is not repeated. */
    if (!is_name(name) || !hash || !right || strtok_r(NULL, " \t\r", &state) ||
        !read_hash(hash, token->sha256) || !read_rights(right, &token->rights))
        return kld_error_set(err, KLD_INVALID,
                             "tokens: line %u is not NAME, the SHA-256 of the token in 64 "
                             "hexadecimal digits, and rights by comma among infer, shm, metrics",
                             number);
    for (uint32_t i = 0; i < tokens->count; i++)
        if (strcmp(tokens->token[i].caller->name, name) == 0 ||
            memcmp(tokens->token[i].sha256, token->sha256, 32) == 0)
            return kld_error_set(err, KLD_INVALID,
                                 "tokens: line %u has the name or the token of an earlier one",
                                 number);
    enum kld_status status = know(auth, name, &token->caller, err);
    tokens->count += status == KLD_OK;
    return status;
}

enum kld_status kld_auth_read(struct kld_auth *auth, char *text, struct kld_tokens **ret_tokens,
                              struct kld_error *err) {
    enum kld_status status = KLD_OK;
    *ret_tokens = NULL;
    if (!auth->limited != !text)
        return kld_error_set(err, KLD_INVALID,
                             "tokens: whether there are any is decided at the server's start");
    if (!text)
        return KLD_OK;
    struct kld_tokens *tokens = calloc(1, sizeof *tokens);
    if (!tokens)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    atomic_store(&tokens->users, 1);
    uint32_t names = auth->names;
    for (unsigned number = 1; text && status == KLD_OK; number++) {
        char *line = strsep(&text, "\n");
        status = read_line(auth, tokens, line, number, err);
    }
    if (status == KLD_OK && tokens->count == 0)
        status = kld_error_set(err, KLD_INVALID, "tokens: the file has no tokens");
    if (status) {
        kld_tokens_release(tokens);
        unlearn(auth, names);
        return status;
    }
    *ret_tokens = tokens;
    return KLD_OK;
}

void kld_tokens_release(struct kld_tokens *tokens) {
    if (tokens && atomic_fetch_sub(&tokens->users, 1) == 1)
        free(tokens);
}

static struct kld_tokens *acquire(struct kld_auth *auth) {
    pthread_mutex_lock(&auth->mutex);
    struct kld_tokens *tokens = auth->tokens;
    if (tokens)
        atomic_fetch_add(&tokens->users, 1);
    pthread_mutex_unlock(&auth->mutex);
    return tokens;
}

static bool names(const struct kld_tokens *tokens, const struct kld_caller *caller) {
    for (uint32_t i = 0; i < tokens->count; i++)
        if (tokens->token[i].caller == caller)
            return true;
    return false;
}

/* Who comes is there before he can be found, and who leaves is gone after the last time. */
void kld_auth_replace(struct kld_auth *auth, struct kld_tokens *tokens,
                      struct kld_auth_change *ret_change) {
    memset(ret_change, 0, sizeof *ret_change);
    if (!tokens)
        return;
    ret_change->tokens = tokens->count;
    for (uint32_t i = 0; i < tokens->count; i++)
        ret_change->added += atomic_exchange(&tokens->token[i].caller->gone, false);
    pthread_mutex_lock(&auth->mutex);
    struct kld_tokens *before = auth->tokens;
    auth->tokens = tokens;
    atomic_store(&auth->count, tokens->count);
    pthread_mutex_unlock(&auth->mutex);
    for (uint32_t i = 0; before && i < before->count; i++)
        if (!names(tokens, before->token[i].caller)) {
            atomic_store(&before->token[i].caller->gone, true);
            ret_change->removed++;
        }
    kld_tokens_release(before);
}

/* Half, or somewhat more where one request may have half already. */
static uint64_t staging_of(const struct kld_config *config) {
    uint64_t all = config->staging_bytes_max, share = config->staging_request_bytes_max;
    if (share > all / 2)
        share = all / 2;
    return share + all / 4 > all / 2 ? share + all / 4 : all / 2;
}

enum kld_status kld_auth_open(const struct kld_config *config, char *text,
                              struct kld_auth **ret_auth, struct kld_error *err) {
    struct kld_auth *auth = calloc(1, sizeof *auth);
    struct kld_tokens *tokens = NULL;
    struct kld_auth_change unused;
    if (!auth)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    pthread_mutex_init(&auth->mutex, NULL); /* which does not fail here */
    auth->requests_max = config->token_requests_max;
    auth->buffer_bytes_max = config->token_buffer_bytes_max;
    auth->bytes_max = staging_of(config);
    if (auth->bytes_max > config->token_bytes_max)
        auth->bytes_max = config->token_bytes_max;
    auth->limited = text != NULL;
    enum kld_status status = kld_auth_read(auth, text, &tokens, err);
    if (status) {
        kld_auth_close(auth);
        return status;
    }
    kld_auth_replace(auth, tokens, &unused);
    *ret_auth = auth;
    return KLD_OK;
}

void kld_auth_close(struct kld_auth *auth) {
    if (!auth)
        return;
    kld_tokens_release(auth->tokens);
    for (uint32_t i = 0; i < auth->names; i++)
        free(auth->name[i]);
    pthread_mutex_destroy(&auth->mutex);
    free(auth);
}

enum kld_status kld_auth_find(struct kld_auth *auth, const char *header,
                              struct kld_caller **ret_caller, unsigned *ret_rights,
                              struct kld_error *err) {
    if (!auth->limited) {
        *ret_caller = &auth->everybody;
        *ret_rights = UINT32_MAX;
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
    struct kld_tokens *tokens = acquire(auth);
    for (uint32_t i = 0; i < tokens->count; i++)
        if (gnutls_memcmp(tokens->token[i].sha256, hash, sizeof hash) == 0) {
            found = tokens->token[i].caller;
            *ret_rights = tokens->token[i].rights;
        }
    kld_tokens_release(tokens);
    if (!found)
        return kld_error_set(err, KLD_UNAUTHENTICATED, "the token is not known here");
    *ret_caller = found;
    return KLD_OK;
}

enum kld_status kld_auth_check(unsigned held, enum kld_right right, struct kld_error *err) {
    if ((held & right) == (unsigned)right)
        return KLD_OK;
    size_t i = 0;
    while (i + 1 < sizeof rights / sizeof rights[0] && rights[i].right != right)
        i++;
    return kld_error_set(err, KLD_FORBIDDEN, "the token does not have the right '%s'",
                         rights[i].name);
}

bool kld_auth_has_several(const struct kld_auth *auth) { return atomic_load(&auth->count) > 1; }

/* What is refused was never added, not even for a moment: another loop must not refuse because of
 * it. */
enum kld_status kld_auth_take_request(struct kld_auth *auth, struct kld_caller *caller,
                                      struct kld_error *err) {
    uint32_t before = atomic_load(&caller->requests);
    do {
        if (auth->limited && before >= auth->requests_max)
            return kld_error_set(err, KLD_THROTTLED,
                                 "%" PRIu64
                                 " requests of this token are in flight, the most allowed "
                                 "(token_requests_max); try again",
                                 auth->requests_max);
    } while (!atomic_compare_exchange_weak(&caller->requests, &before, before + 1));
    return KLD_OK;
}

/* before: what the caller has of what `what` names, which `setting` limits. */
static enum kld_status check(const struct kld_auth *auth, uint64_t before, uint64_t bytes,
                             uint64_t most, const char *what, const char *setting,
                             struct kld_error *err) {
    if (!auth->limited || (bytes <= most && before <= most - bytes))
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

static enum kld_status take(const struct kld_auth *auth, _Atomic uint64_t *counter, uint64_t bytes,
                            uint64_t most, const char *what, const char *setting,
                            struct kld_error *err) {
    uint64_t before = atomic_load(counter);
    enum kld_status status;
    do {
        status = check(auth, before, bytes, most, what, setting, err);
    } while (!status && !atomic_compare_exchange_weak(counter, &before, before + bytes));
    return status;
}

#define STAGING "staging memory", "token_bytes_max, and about half of staging_bytes_max"

enum kld_status kld_auth_check_bytes(const struct kld_auth *auth, const struct kld_caller *caller,
                                     uint64_t bytes, struct kld_error *err) {
    return check(auth, atomic_load(&caller->bytes), bytes, auth->bytes_max, STAGING, err);
}

enum kld_status kld_auth_take_bytes(struct kld_auth *auth, struct kld_caller *caller,
                                    uint64_t bytes, struct kld_error *err) {
    return take(auth, &caller->bytes, bytes, auth->bytes_max, STAGING, err);
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
