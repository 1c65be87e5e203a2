/* test_auth.c - the file of tokens, who is found by them, what each may have in flight. */
#include "server/gateway/auth.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/unit.h"

/* sha256 of "secret" and of "other" */
#define SECRET "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
#define OTHER "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa"

static struct kld_config config = {.token_requests_max = 2,
                                   .token_bytes_max = 100,
                                   .token_buffer_bytes_max = 500,
                                   .staging_bytes_max = 1000,
                                   .staging_request_bytes_max = 250};
static struct kld_auth *auth;
static struct kld_caller *caller;
static struct kld_error err;

static enum kld_status open_with(const char *text) {
    snprintf(config.tokens, sizeof config.tokens, "/tmp/kld-test-auth-%d", (int)getpid());
    FILE *file = fopen(config.tokens, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
    auth = NULL;
    enum kld_status status = kld_auth_open(&config, &auth, &err);
    unlink(config.tokens);
    return status;
}

START_TEST(a_token_is_found_by_its_hash) {
    ck_assert_int_eq(
        open_with("# who\n\na " SECRET " infer,shm # one\n  b\t" OTHER "  metrics\r\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &err), KLD_OK);
    ck_assert_str_eq(caller->name, "a");
    ck_assert_int_eq(kld_auth_check(caller, KLD_RIGHT_ANY, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_check(caller, KLD_RIGHT_SHM, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_check(caller, KLD_RIGHT_METRICS, &err), KLD_FORBIDDEN);
    ck_assert_ptr_nonnull(strstr(err.text, "'metrics'"));
    ck_assert_int_eq(kld_auth_find(auth, "bearer  other", &caller, &err), KLD_OK);
    ck_assert_str_eq(caller->name, "b");
    ck_assert_int_eq(kld_auth_check(caller, KLD_RIGHT_INFER, &err), KLD_FORBIDDEN);
    kld_auth_close(auth);
}
END_TEST

START_TEST(what_is_no_token) {
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    char many[KLD_AUTH_TOKEN_BYTES_MAX + 20] = "Bearer ";
    memset(many + 7, 'a', KLD_AUTH_TOKEN_BYTES_MAX + 1);
    const char *const headers[] = {
        NULL,           "",       "Bearer",          "Bearer ",        "Basic secret",
        "Bearer secre", "secret", "Bearer secret x", "Bearer " SECRET, many};
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        ck_assert_int_eq(kld_auth_find(auth, headers[i], &caller, &err), KLD_UNAUTHENTICATED);
        ck_assert_ptr_null(strstr(err.text, "secre"));
    }
    kld_auth_close(auth);
}
END_TEST

START_TEST(without_a_file_everybody_may) {
    config.tokens[0] = '\0';
    ck_assert_int_eq(kld_auth_open(&config, &auth, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, NULL, &caller, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_check(caller, KLD_RIGHT_SHM, &err), KLD_OK);
    for (int i = 0; i < 10; i++)
        ck_assert_int_eq(kld_auth_take_request(auth, caller, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_bytes(auth, caller, 1000, &err), KLD_OK);
    kld_auth_close(auth);
}
END_TEST

START_TEST(bad_files_are_refused) {
    const struct {
        const char *text, *part;
    } files[] = {{"", "no tokens"},
                 {"# only a comment\n", "no tokens"},
                 {"a " SECRET "\n", "line 1"},
                 {"\na secret infer\n", "line 2"},
                 {"a " SECRET "00 infer\n", "line 1"},
                 {"a x" SECRET " infer\n", "line 1"},
                 {"a " SECRET " infer,admin\n", "line 1"},
                 {"a " SECRET " infer shm\n", "line 1"},
                 {"a/b " SECRET " infer\n", "line 1"},
                 {"a " SECRET " infer\na " OTHER " infer\n", "line 2"},
                 {"a " SECRET " infer\nb " SECRET " infer\n", "line 2"}};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        ck_assert_int_eq(open_with(files[i].text), KLD_INVALID);
        if (!strstr(err.text, files[i].part))
            ck_abort_msg("'%s' does not hold '%s'", err.text, files[i].part);
        ck_assert_ptr_null(strstr(err.text, "secret "));
    }
    strcpy(config.tokens, "/tmp/there/is/none");
    ck_assert_int_eq(kld_auth_open(&config, &auth, &err), KLD_INVALID);
    strcpy(config.tokens, "/tmp");
    ck_assert_int_eq(kld_auth_open(&config, &auth, &err), KLD_INVALID);
}
END_TEST

START_TEST(what_a_token_has_in_flight) {
    ck_assert_int_eq(open_with("a " SECRET " infer\nb " OTHER " infer\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_request(auth, caller, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_request(auth, caller, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_request(auth, caller, &err), KLD_THROTTLED);
    kld_auth_give_request(caller);
    ck_assert_int_eq(kld_auth_take_request(auth, caller, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_bytes(auth, caller, 101, &err), KLD_TOO_LARGE);
    ck_assert_int_eq(kld_auth_take_bytes(auth, caller, UINT64_MAX, &err), KLD_TOO_LARGE);
    ck_assert_int_eq(kld_auth_take_bytes(auth, caller, 60, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_bytes(auth, caller, 41, &err), KLD_THROTTLED);
    ck_assert_int_eq(kld_auth_take_bytes(auth, caller, 40, &err), KLD_OK);
    kld_auth_give_bytes(caller, 100);
    ck_assert_int_eq(kld_auth_take_bytes(auth, caller, 100, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_buffer(auth, caller, 501, &err), KLD_TOO_LARGE);
    ck_assert_int_eq(kld_auth_take_buffer(auth, caller, 500, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_buffer(auth, caller, 1, &err), KLD_THROTTLED);
    kld_auth_give_buffer(caller, 500);
    ck_assert_int_eq(kld_auth_take_buffer(auth, caller, 1, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer other", &caller, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_request(auth, caller, &err), KLD_OK); /* another's */
    kld_auth_close(auth);
}
END_TEST

static atomic_bool asking;

static void *ask_for_too_much(void *user) {
    struct kld_error ignored;
    while (atomic_load(&asking))
        kld_auth_take_bytes(auth, caller, 101, &ignored);
    return NULL;
}

START_TEST(what_is_refused_is_in_nobodys_way) {
    pthread_t other;
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &err), KLD_OK);
    atomic_store(&asking, true);
    ck_assert_int_eq(pthread_create(&other, NULL, ask_for_too_much, NULL), 0);
    for (int i = 0; i < 300000; i++) {
        ck_assert_int_eq(kld_auth_take_bytes(auth, caller, 100, &err), KLD_OK);
        kld_auth_give_bytes(caller, 100);
    }
    atomic_store(&asking, false);
    pthread_join(other, NULL);
    ck_assert_uint_eq(caller->bytes, 0);
    kld_auth_close(auth);
}
END_TEST

UNIT_MAIN("auth", a_token_is_found_by_its_hash, what_is_no_token, without_a_file_everybody_may,
          bad_files_are_refused, what_a_token_has_in_flight, what_is_refused_is_in_nobodys_way)
