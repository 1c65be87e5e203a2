/* test_http_reply.c - the reader of the JSON in infer replies and errors. */
#include "tests/unit/unit.h"

#include <string.h>

#include "client/http.h"

static struct http_reply reply;
static struct kld_error error;

/* From memory of exactly that size, so that a read beyond it is seen by the sanitizer. */
static enum kld_status read_text(const char *text, size_t bytes) {
    char *exact = malloc(bytes ? bytes : 1);
    memcpy(exact, text, bytes);
    enum kld_status status = kld_http_reply_read(exact, bytes, &reply, &error);
    free(exact);
    return status;
}

static const char good[] =
    "{\"id\":\"a\\\"\\u00e9\\ud83d\\ude00]\",\"model_name\":\"kl_div\",\"model_version\":\"1\","
    "\"parameters\":{\"x\":[1,2,{\"y\":null}],\"z\":true}, \"outputs\" : [ "
    "{\"name\":\"loss\",\"datatype\":\"FP32\",\"shape\":[1],\"parameters\":{\"binary_data_size\":4}"
    "},"
    "{\"parameters\":{\"a\":-1.5e3,\"binary_data_size\":4398046511104},\"name\":\"grad_targets\"}]}"
    " ";

START_TEST(test_good) {
    ck_assert_int_eq(read_text(good, strlen(good)), KLD_OK);
    ck_assert_uint_eq(reply.count, 2);
    ck_assert_int_eq(reply.output[0].slot, KLD_SLOT_LOSS);
    ck_assert_uint_eq(reply.output[0].bytes, 4);
    ck_assert_int_eq(reply.output[1].slot, KLD_SLOT_GRAD_TARGETS);
    ck_assert_uint_eq(reply.output[1].bytes, 4398046511104);
}
END_TEST

START_TEST(test_cut_anywhere) {
    for (size_t bytes = 0; bytes + 1 < strlen(good); bytes++)
        ck_assert_msg(read_text(good, bytes) != KLD_OK, "%zu bytes passed", bytes);
}
END_TEST

#define OUTPUT(name, size) "{\"name\":\"" name "\",\"parameters\":{\"binary_data_size\":" size "}}"

START_TEST(test_bad) {
    static const char *const bad[] = {
        "{}",
        "[]",
        "null",
        "{\"outputs\":[]}",
        "{\"outputs\":{}}",
        "{\"outputs\":[" OUTPUT("loss", "4") "],\"outputs\":[" OUTPUT("loss", "4") "]}",
        "{\"outputs\":[" OUTPUT("loss", "-4") "]}",
        "{\"outputs\":[" OUTPUT("loss", "4.0") "]}",
        "{\"outputs\":[" OUTPUT("loss", "\"4\"") "]}",
        "{\"outputs\":[" OUTPUT("loss", "18446744073709551616") "]}",
        "{\"outputs\":[" OUTPUT("predictions", "4") "]}",
        "{\"outputs\":[" OUTPUT("unknown", "4") "]}",
        "{\"outputs\":[{\"name\":\"loss\",\"data\":[1.5]}]}",
        "{\"outputs\":[" OUTPUT("loss", "4") "]} x",
        "{\"outputs\":[" OUTPUT("loss", "4") ",]}",
        "{\"outputs\":[" OUTPUT("lo\\u00zzss", "4") "]}",
        "{\"outputs\":[" OUTPUT("lo\nss", "4") "]}",
        "{\"x\":[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]],\"outputs\":[" OUTPUT("loss", "4") "]}",
        "{\"x\":]],\"outputs\":[" OUTPUT("loss", "4") "]}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_msg(read_text(bad[i], strlen(bad[i])) != KLD_OK, "case %zu passed", i);
}
END_TEST

START_TEST(test_error_text) {
    char text[KLD_ERROR_TEXT_MAX];
    const char *json = "{\"code\":1,\"error\":\"a \\\"b\\\" \\u00e9\\n\"}";
    ck_assert(kld_http_text_read(json, strlen(json), "error", text, sizeof text));
    ck_assert_str_eq(text, "a \"b\" \xc3\xa9\n");
    ck_assert(kld_http_text_read(json, strlen(json), "error", text, 4));
    ck_assert_str_eq(text, "a \"");
    ck_assert(!kld_http_text_read("<html>", 6, "error", text, sizeof text));
    ck_assert(!kld_http_text_read("{}", 2, "error", text, sizeof text));
    ck_assert(!kld_http_text_read("{\"error\":3}", 11, "error", text, sizeof text));
}
END_TEST

/* What is found to be none half-way leaves a text that ends, and nothing of itself. */
START_TEST(test_error_text_that_goes_wrong) {
    const char *const wrong[] = {"{\"error\":\"a \\x\"}", "{\"error\":\"a \n\"}", "{\"error\":\"a",
                                 "{\"error\":\"a\",", "{\"error\":\"a\\"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char text[8] = "xxxxxxx";
        ck_assert(!kld_http_text_read(wrong[i], strlen(wrong[i]), "error", text, sizeof text));
        ck_assert_msg(text[0] == '\0', "case %zu leaves '%.8s'", i, text);
    }
}
END_TEST

/* Optional white space, any case; nothing else is it. */
START_TEST(test_device_lost_header) {
    static const struct {
        const char *line;
        bool lost;
    } lines[] = {
        {"KLD-Status: device_lost\r\n", true},
        {"kld-status:device_lost\r\n", true},
        {"KLD-STATUS:\t  device_lost \r\n", true},
        {"KLD-Status: device_lost", true},
        {"KLD-Status: device_lost_not\r\n", false},
        {"KLD-Status: device_los", false},
        {"KLD-Status:\r\n", false},
        {"KLD-Status", false},
        {"KLD-Statuses: device_lost\r\n", false},
        {"X-KLD-Status: device_lost\r\n", false},
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        struct http_call call = {0};
        size_t bytes = strlen(lines[i].line);
        char *exact = malloc(bytes);
        memcpy(exact, lines[i].line, bytes);
        ck_assert_uint_eq(kld_http_header(exact, 1, bytes, &call), bytes);
        ck_assert_msg(call.device_lost == lines[i].lost, "%s", lines[i].line);
        free(exact);
    }
}
END_TEST

UNIT_MAIN("client/http_reply", test_device_lost_header, test_good, test_cut_anywhere, test_bad,
          test_error_text, test_error_text_that_goes_wrong)
