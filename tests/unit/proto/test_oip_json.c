/* test_oip_json.c - texts of infer requests as the scanner sees them: cut short, wrong, and again.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/oip.h"
#include "tests/unit/proto/oip_texts.h"
#include "tests/unit/unit.h"

/* With the memory of `first` or without any. */
static void same_with_memory(const char *first, const char *text, size_t bytes) {
    static struct kld_oip_memo memo;
    static struct kld_oip_request again;
    struct kld_error other = {.status = KLD_OK};
    memset(&err, 0, sizeof err);
    memset(&again, 0, sizeof again);
    memset(&request, 0, sizeof request);
    ck_assert_int_eq(kld_oip_parse(first, strlen(first), &memo, &request, &err), KLD_OK);
    enum kld_status status = kld_oip_parse(text, bytes, NULL, &request, &err);
    ck_assert_int_eq(kld_oip_parse(text, bytes, &memo, &again, &other), status);
    ck_assert_msg(status ? strcmp(err.text, other.text) == 0
                         : memcmp(&again, &request, sizeof request) == 0,
                  "%.*s: %s, %s", (int)bytes, text, err.text, other.text);
}

START_TEST(what_was_asked_before_changes_nothing) {
    const char *first = "{\"id\":\"x\"," INPUTS ",\"outputs\":[{\"name\":\"loss\"}]} ";
    const char others[] = "[]{}\",:0e- \\x";
    size_t length = strlen(first);
    char text[512];
    for (size_t at = 0; at <= length; at++) {
        for (const char *other = others; *other; other++) {
            strcpy(text, first);
            text[at < length ? at : 0] = *other; /* in its place */
            same_with_memory(first, text, length);
            snprintf(text, sizeof text, "%.*s%c%s", (int)at, first, *other, first + at);
            same_with_memory(first, text, length + 1);
        }
        snprintf(text, sizeof text, "%.*s%s", (int)at, first, at < length ? first + at + 1 : "");
        same_with_memory(first, text, strlen(text)); /* without it */
        same_with_memory(first, first, at);
    }
    for (int depth = 1; depth <= 20; depth++) { /* of other data, past what is allowed */
        int bytes = snprintf(text, sizeof text,
                             "{\"id\":\"x\",\"inputs\":[" P
                             ",{\"name\":\"targets\",\"shape\":[1,2],\"datatype\":\"FP32\","
                             "\"data\":%.*s1%.*s}],\"outputs\":[{\"name\":\"loss\"}]} ",
                             depth, "[[[[[[[[[[[[[[[[[[[[", depth, "]]]]]]]]]]]]]]]]]]]]");
        same_with_memory(first, text, (size_t)bytes);
    }
}
END_TEST

/* Every beginning of a text, with nothing to be read behind it; and numbers that are none. */
START_TEST(texts_that_end_too_early) {
    const char *text =
        "{\"id\":\"abcdefghij\",\"inputs\":[{\"name\":\"predictions\",\"shape\":[1,2],"
        "\"datatype\":\"FP32\",\"data\":[0.12345678, -1234567890.25e-10]}," T "]}";
    size_t page = (size_t)sysconf(_SC_PAGESIZE), length = strlen(text);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(memory, MAP_FAILED);
    ck_assert_int_eq(mprotect(memory + page, page, PROT_NONE), 0);
    for (size_t bytes = 0; bytes <= length; bytes++) {
        char *at = memory + page - bytes;
        memcpy(at, text, bytes);
        ck_assert_int_eq(kld_oip_parse(at, bytes, NULL, &request, &err),
                         bytes < length ? KLD_INVALID : KLD_OK);
    }
    munmap(memory, 2 * page);
    const struct {
        const char *text, *error;
    } wrong[] = {{"[1,2,]", "the JSON is not valid: expected a value (NaN and infinities are not "
                            "JSON: send them binary) at byte 5"},
                 {"[1, 2 3]", "the JSON is not valid: expected ',' or ']' at byte 6"},
                 {"[12345678.,1]", "the JSON is not valid: a number without digits behind its "
                                   "point at byte 10"},
                 {"[1,01]", "the JSON is not valid: expected ',' or ']' at byte 4"},
                 {"[1,2e+]", "the JSON is not valid: a number without digits in its exponent at "
                             "byte 6"},
                 {"[1,2", "the JSON is not valid: expected ',' or ']' at byte 4"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        ck_assert_int_eq(parse(wrong[i].text), KLD_INVALID);
        ck_assert_str_eq(err.text, wrong[i].error);
    }
}
END_TEST

UNIT_MAIN("proto/oip_json", texts_that_end_too_early, what_was_asked_before_changes_nothing)
