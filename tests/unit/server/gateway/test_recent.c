/* test_recent.c - the last minute and the last errors, for the status page. */
#include "server/gateway/recent.h"

#include <stdio.h>
#include <string.h>

#include "tests/unit/unit.h"

#define S UINT64_C(1000000000)

static struct kld_recent_error errors[KLD_RECENT_ERRORS];

static const char *kept(const char *text) {
    struct kld_recent *recent = kld_recent_open();
    struct kld_error error = {.status = KLD_INVALID};
    snprintf(error.text, sizeof error.text, "%s", text);
    kld_recent_error(recent, 1, &error);
    ck_assert_uint_eq(kld_recent_errors(recent, errors), 1);
    kld_recent_close(recent);
    return errors[0].text;
}

START_TEST(the_rate_is_of_whole_seconds) {
    struct kld_recent *recent = kld_recent_open();
    uint64_t now = 1000 * S;
    for (int i = 0; i < 50; i++)
        kld_recent_request(recent, now - 5 * S);
    for (int i = 0; i < 70; i++)
        kld_recent_request(recent, now - 50 * S);
    kld_recent_request(recent, now); /* this second is not over */
    ck_assert_double_eq(kld_recent_rate(recent, now, 10), 5);
    ck_assert_double_eq(kld_recent_rate(recent, now, 60), 2);
    ck_assert_double_eq(kld_recent_rate(recent, now + 30 * S, 60), 51.0 / 60);
    ck_assert_double_eq(kld_recent_rate(recent, now + 200 * S, 60), 0);
    kld_recent_request(recent, now + 14 * S); /* where 50 s ago was */
    ck_assert_double_eq(kld_recent_rate(recent, now + 15 * S, 60), 52.0 / 60);
    kld_recent_close(recent);
}
END_TEST

START_TEST(what_a_client_sent_is_left_out) {
    ck_assert_str_eq(kept("unknown input 'secret'; known: a"), "unknown input '...'; known: a");
    ck_assert_str_eq(kept("no 'a'secret'b' here"), "no '...' here");
    ck_assert_str_eq(kept("'s' or 't'"), "'...'");
    ck_assert_str_eq(kept("a client's word"), "a client's word");
    ck_assert_str_eq(kept("it needs 4096 bytes, 1.5e3"), "it needs # bytes, #.#e#");
    ck_assert_str_eq(kept("tab\t\xc3\xa4\x7f."), "tab.");
    ck_assert_str_eq(kept("'1'"), "'...'");
    ck_assert_str_eq(kept(""), kld_status_text(KLD_INVALID));
    char text[KLD_ERROR_TEXT_MAX];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    ck_assert_uint_eq(strlen(kept(text)), KLD_RECENT_TEXT_MAX - 1);
    memcpy(text + KLD_RECENT_TEXT_MAX - 3, "'secret'", 8);
    ck_assert_ptr_null(strstr(kept(text), "s"));
}
END_TEST

START_TEST(the_last_errors_come_first) {
    struct kld_recent *recent = kld_recent_open();
    struct kld_error error = {.status = KLD_BUSY};
    ck_assert_uint_eq(kld_recent_errors(recent, errors), 0);
    for (int i = 0; i < 3 * KLD_RECENT_ERRORS; i++) {
        snprintf(error.text, sizeof error.text, "%c", 'a' + i);
        kld_recent_error(recent, (uint64_t)i, &error);
    }
    ck_assert_uint_eq(kld_recent_errors(recent, errors), KLD_RECENT_ERRORS);
    ck_assert_str_eq(errors[0].text, "x");
    ck_assert_str_eq(errors[KLD_RECENT_ERRORS - 1].text, "q");
    ck_assert_uint_eq(errors[0].at_ns, 3 * KLD_RECENT_ERRORS - 1);
    ck_assert_int_eq(errors[0].status, KLD_BUSY);
    kld_recent_close(recent);
    kld_recent_close(NULL);
}
END_TEST

UNIT_MAIN("server/gateway/recent", the_rate_is_of_whole_seconds, what_a_client_sent_is_left_out,
          the_last_errors_come_first)
