/* test_auth.c - the file of tokens, who is found by them, what each may have in flight. */
#include "server/gateway/auth.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
static unsigned held; /* rights of who was found */
static struct kld_error err;

static enum kld_status open_with(const char *text) {
    char *copy = text ? strdup(text) : NULL;
    auth = NULL;
    enum kld_status status = kld_auth_open(&config, copy, &auth, &err);
    free(copy);
    return status;
}

START_TEST(a_token_is_found_by_its_hash) {
    ck_assert_int_eq(
        open_with("# who\n\na " SECRET " infer,shm # one\n  b\t" OTHER "  metrics\r\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err), KLD_OK);
    ck_assert_str_eq(caller->name, "a");
    ck_assert_int_eq(kld_auth_check(held, KLD_RIGHT_ANY, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_check(held, KLD_RIGHT_SHM, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_check(held, KLD_RIGHT_METRICS, &err), KLD_FORBIDDEN);
    ck_assert_ptr_nonnull(strstr(err.text, "'metrics'"));
    ck_assert_int_eq(kld_auth_find(auth, "bearer  other", &caller, &held, &err), KLD_OK);
    ck_assert_str_eq(caller->name, "b");
    ck_assert_int_eq(kld_auth_check(held, KLD_RIGHT_INFER, &err), KLD_FORBIDDEN);
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
        ck_assert_int_eq(kld_auth_find(auth, headers[i], &caller, &held, &err),
                         KLD_UNAUTHENTICATED);
        ck_assert_ptr_null(strstr(err.text, "secre"));
    }
    kld_auth_close(auth);
}
END_TEST

START_TEST(without_a_file_everybody_may) {
    ck_assert_int_eq(open_with(NULL), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, NULL, &caller, &held, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_check(held, KLD_RIGHT_SHM, &err), KLD_OK);
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
}
END_TEST

START_TEST(what_a_token_has_in_flight) {
    ck_assert_int_eq(open_with("a " SECRET " infer\nb " OTHER " infer\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err), KLD_OK);
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
    ck_assert_int_eq(kld_auth_find(auth, "Bearer other", &caller, &held, &err), KLD_OK);
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
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err), KLD_OK);
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

/* ---- Another list --------------------------------------------------------------------------- */

static struct kld_auth_change change;

static enum kld_status replace_by(const char *text) {
    struct kld_tokens *tokens;
    char *copy = text ? strdup(text) : NULL;
    enum kld_status status = kld_auth_read(auth, copy, &tokens, &err);
    free(copy);
    if (status == KLD_OK)
        kld_auth_replace(auth, tokens, &change);
    return status;
}

static void expect_change(uint32_t tokens, uint32_t added, uint32_t removed) {
    ck_assert_uint_eq(change.tokens, tokens);
    ck_assert_uint_eq(change.added, added);
    ck_assert_uint_eq(change.removed, removed);
}

START_TEST(another_list_takes_its_place) {
    struct kld_caller *a, *b;
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &a, &held, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer other", &b, &held, &err), KLD_UNAUTHENTICATED);
    ck_assert_int_eq(replace_by("b " OTHER " shm\na " SECRET " metrics\n"), KLD_OK);
    expect_change(2, 1, 0);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer other", &b, &held, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err), KLD_OK);
    ck_assert_ptr_eq(caller, a); /* whose rights are others now */
    ck_assert_int_eq(kld_auth_check(held, KLD_RIGHT_INFER, &err), KLD_FORBIDDEN);
    ck_assert_int_eq(kld_auth_check(held, KLD_RIGHT_METRICS, &err), KLD_OK);
    ck_assert_int_eq(replace_by("a " OTHER " infer\n"), KLD_OK); /* another token for the name */
    expect_change(1, 0, 1);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err),
                     KLD_UNAUTHENTICATED);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer other", &caller, &held, &err), KLD_OK);
    ck_assert_ptr_eq(caller, a);
    ck_assert(b->gone && !a->gone);
    kld_auth_close(auth);
}
END_TEST

START_TEST(who_is_gone_finishes_and_may_come_back) {
    struct kld_caller *a;
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &a, &held, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_request(auth, a, &err), KLD_OK);
    ck_assert_int_eq(kld_auth_take_bytes(auth, a, 60, &err), KLD_OK);
    ck_assert_int_eq(replace_by("b " OTHER " infer\n"), KLD_OK);
    expect_change(1, 1, 1);
    ck_assert(a->gone && !kld_caller_left(a)); /* his request is on its way */
    kld_auth_give_request(a);
    ck_assert(kld_caller_left(a));
    ck_assert_int_eq(replace_by("a " SECRET " infer\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err), KLD_OK);
    ck_assert_ptr_eq(caller, a); /* with what he has in flight */
    ck_assert(!a->gone);
    ck_assert_int_eq(kld_auth_take_bytes(auth, a, 41, &err), KLD_THROTTLED);
    kld_auth_give_bytes(a, 60);
    kld_auth_close(auth);
}
END_TEST

START_TEST(a_bad_list_changes_nothing) {
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err), KLD_OK);
    ck_assert_int_eq(replace_by("b " OTHER " infer\nc x infer\n"), KLD_INVALID);
    ck_assert_int_eq(replace_by(""), KLD_INVALID);
    ck_assert_int_eq(replace_by(NULL), KLD_INVALID);
    ck_assert(!caller->gone);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer other", &caller, &held, &err),
                     KLD_UNAUTHENTICATED);
    ck_assert_int_eq(kld_auth_find(auth, "Bearer secret", &caller, &held, &err), KLD_OK);
    kld_auth_close(auth);
    ck_assert_int_eq(open_with(NULL), KLD_OK);
    ck_assert_int_eq(replace_by("b " OTHER " infer\n"), KLD_INVALID); /* was open to all */
    ck_assert_int_eq(replace_by(NULL), KLD_OK);
    expect_change(0, 0, 0);
    kld_auth_close(auth);
}
END_TEST

START_TEST(names_have_a_limit) {
    static char text[1024 * 96];
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    uint32_t known = 1;
    enum kld_status status = KLD_OK;
    while (status == KLD_OK && known <= KLD_AUTH_NAMES_MAX) {
        size_t used = 0;
        for (uint32_t i = 0; i < KLD_AUTH_TOKENS_MAX; i++, known++)
            used += (size_t)snprintf(text + used, sizeof text - used, "n%u %064x infer\n", known,
                                     known);
        status = replace_by(text);
    }
    ck_assert_int_eq(status, KLD_TOO_LARGE);
    ck_assert_ptr_nonnull(strstr(err.text, "restart"));
    ck_assert_int_eq(replace_by("a " SECRET " infer\n"), KLD_OK); /* known ones still go */
    kld_auth_close(auth);
}
END_TEST

START_TEST(a_refused_list_uses_up_no_names) {
    static char text[1024 * 96];
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    for (uint32_t known = 1; known <= 2 * KLD_AUTH_NAMES_MAX;) {
        size_t used = 0;
        for (uint32_t i = 1; i < KLD_AUTH_TOKENS_MAX; i++, known++)
            used += (size_t)snprintf(text + used, sizeof text - used, "n%u %064x infer\n", known,
                                     known);
        snprintf(text + used, sizeof text - used, "last x infer\n");
        ck_assert_int_eq(replace_by(text), KLD_INVALID);
    }
    ck_assert_int_eq(replace_by("b " OTHER " infer\n"), KLD_OK);
    expect_change(1, 1, 1);
    kld_auth_close(auth);
}
END_TEST

/* Found by any of the lists, never half by one. */
static void *find_all_the_time(void *user) {
    struct kld_caller *found;
    struct kld_error ignored;
    unsigned rights;
    while (atomic_load(&asking)) {
        if (kld_auth_find(auth, "Bearer secret", &found, &rights, &ignored) != KLD_OK)
            return user; /* in every list */
        if (strcmp(found->name, "a") != 0 || kld_auth_check(rights, KLD_RIGHT_INFER, &ignored))
            return user;
        if (kld_auth_take_request(auth, found, &ignored) == KLD_OK)
            kld_auth_give_request(found);
        if (kld_auth_find(auth, "Bearer other", &found, &rights, &ignored) == KLD_OK &&
            strcmp(found->name, "b") != 0)
            return user;
    }
    return NULL;
}

START_TEST(lists_are_replaced_under_who_asks) {
    pthread_t asker[3];
    int wrong;
    void *result;
    ck_assert_int_eq(open_with("a " SECRET " infer\n"), KLD_OK);
    atomic_store(&asking, true);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(pthread_create(&asker[i], NULL, find_all_the_time, &wrong), 0);
    for (int i = 0; i < 2000; i++)
        ck_assert_int_eq(replace_by(i % 2 ? "a " SECRET " infer\n"
                                          : "b " OTHER " shm\na " SECRET " infer,shm\n"),
                         KLD_OK);
    atomic_store(&asking, false);
    for (int i = 0; i < 3; i++) {
        pthread_join(asker[i], &result);
        ck_assert_ptr_null(result);
    }
    kld_auth_close(auth);
}
END_TEST

UNIT_MAIN("auth", a_token_is_found_by_its_hash, what_is_no_token, without_a_file_everybody_may,
          bad_files_are_refused, what_a_token_has_in_flight, what_is_refused_is_in_nobodys_way,
          another_list_takes_its_place, who_is_gone_finishes_and_may_come_back,
          a_bad_list_changes_nothing, names_have_a_limit, a_refused_list_uses_up_no_names,
          lists_are_replaced_under_who_asks)
