/* test_status.c - codes, texts, and errors that are cut to fit. */
#include "proto/status.h"

#include <string.h>

#include "tests/unit/unit.h"

START_TEST(every_status_has_a_name_and_an_http_code) {
#define X(NAME, name, number, http, text)                                                          \
    ck_assert_str_eq(kld_status_name(KLD_##NAME), #name);                                          \
    ck_assert_int_eq(kld_status_http(KLD_##NAME), http);                                           \
    ck_assert_int_eq(kld_status_known(number), 1);
    KLD_STATUS_MAP(X)
#undef X
    ck_assert_int_eq(kld_status_known(999), 0);
    ck_assert_int_eq(kld_status_http((enum kld_status)999), 500);
}
END_TEST

START_TEST(error_text_is_cut_at_a_character) {
    struct kld_error err;
    char longer[400];
    memset(longer, 'a', sizeof longer);
    memcpy(longer + 254, "\xc3\xa4", 2); /* a two-byte character across the end of the buffer */
    longer[399] = '\0';
    ck_assert_int_eq(kld_error_set(&err, KLD_INVALID, "%s", longer), KLD_INVALID);
    ck_assert_uint_eq(strlen(err.text), 254);
    longer[253] = 'a', longer[254] = 'a';
    memcpy(longer + 253, "\xc3\xa4", 2); /* just fits */
    kld_error_set(&err, KLD_INVALID, "%s", longer);
    ck_assert_uint_eq(strlen(err.text), 255);
    ck_assert_int_eq(kld_error_set(NULL, KLD_BUSY, "x"), KLD_BUSY);
}
END_TEST

UNIT_MAIN("proto/status", every_status_has_a_name_and_an_http_code,
          error_text_is_cut_at_a_character)
