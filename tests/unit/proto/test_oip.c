/* test_oip.c - Open Inference JSON to an operator and back, and what is refused. */
#include "proto/oip.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/unit/proto/oip_texts.h"
#include "tests/unit/unit.h"

START_TEST(a_plain_request_asks_for_the_loss) {
    ck_assert_int_eq(parse("{\"id\":\"a\\u00e4\\n\"," INPUTS "}"), KLD_OK);
    ck_assert_str_eq(request.id, "a\xc3\xa4\n");
    ck_assert_uint_eq(request.input_count, 2);
    ck_assert_uint_eq(request.output_count, 1);
    ck_assert_int_eq(request.output[0].slot, KLD_SLOT_LOSS);
    ck_assert_int_eq(request.output[0].where, KLD_OIP_JSON);
    ck_assert_uint_eq(request.tail_bytes, 0);
    float values[2];
    ck_assert_int_eq(kld_oip_decode(&request.input[1], values, &err), KLD_OK);
    ck_assert_float_eq(values[0], 0.25f);
    ck_assert_float_eq(values[1], 0.75f);
    ck_assert_int_eq(parse("{\"id\":\"\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80!\"," INPUTS "}"),
                     KLD_OK);
    ck_assert_str_eq(request.id, "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80!");
}
END_TEST

START_TEST(what_a_stock_client_sends_is_understood) {
    ck_assert_int_eq(parse("{\"model_name\":null,\"model_version\":\"\"," INPUTS "}"), KLD_OK);
    ck_assert_int_eq(parse("{\"model_name\":\"kl_div\",\"model_version\":\"1\"," INPUTS "}"),
                     KLD_OK);
    ck_assert_int_eq(
        parse("{\"inputs\":["
              "{\"name\":\"predictions\",\"shape\":[3,2],\"datatype\":\"FP16\","
              "\"parameters\":{\"binary_data_size\":12}},"
              "{\"name\":\"targets\",\"shape\":[3,2],\"datatype\":\"FP64\",\"parameters\":"
              "{\"shared_memory_region\":\"r\",\"shared_memory_byte_size\":48,"
              "\"shared_memory_offset\":8}},"
              "{\"name\":\"row_mask\",\"shape\":[3],\"datatype\":\"BOOL\","
              "\"parameters\":{\"binary_data_size\":3}}],"
              "\"outputs\":[{\"name\":\"row_loss\"},{\"name\":\"grad_predictions\","
              "\"parameters\":{\"binary_data\":true}},{\"name\":\"grad_targets\",\"parameters\":"
              "{\"shared_memory_region\":\"r\",\"shared_memory_byte_size\":48,"
              "\"shared_memory_offset\":56}}],"
              "\"parameters\":{\"binary_data_output\":true,\"timeout\":1500,\"priority\":0,"
              "\"divergence\":\"reverse_kl\",\"reduction\":\"sum\",\"scale\":2.5}}"),
        KLD_OK);
    ck_assert_uint_eq(request.tail_bytes, 15);
    ck_assert_uint_eq(request.input[2].tail_offset_bytes, 12);
    ck_assert_int_eq(request.input[1].where, KLD_OIP_REGION);
    ck_assert_str_eq(request.input[1].region, "r");
    ck_assert_uint_eq(request.input[1].region_offset_bytes, 8);
    ck_assert_int_eq(request.output[0].where, KLD_OIP_BINARY);
    ck_assert_uint_eq(request.output[0].dtype, KLD_DTYPE_FP64);
    ck_assert_uint_eq(request.output[0].shape[0], 3);
    ck_assert_uint_eq(request.output[1].dtype, KLD_DTYPE_FP16);
    ck_assert_int_eq(request.output[2].where, KLD_OIP_REGION);
    ck_assert_uint_eq(request.timeout_ns, 1500000);
    ck_assert_uint_eq(request.op.divergence, KLD_DIVERGENCE_REVERSE_KL);
    ck_assert_double_eq(request.op.number[KLD_NUMBER_SCALE], 2.5);
}
END_TEST

/* What is optional may be null, a parameter's value not. */
START_TEST(null_is_a_field_that_is_not_there) {
    static const char *const same[] = {
        "{\"id\":null,\"parameters\":null,\"outputs\":null,\"model_name\":null,\"model_version\":"
        "null,"
        "\"inputs\":[{\"name\":\"predictions\",\"shape\":[1,2],\"datatype\":\"FP32\","
        "\"data\":[0.5,0.5],\"parameters\":null}," T "]}",
        "{" INPUTS ",\"outputs\":[{\"name\":\"loss\",\"parameters\":null}]}"};
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        ck_assert_msg(parse(same[i]) == KLD_OK, "%s: %s", same[i], err.text);
        ck_assert(!request.has_id && request.timeout_ns == 0);
        ck_assert_uint_eq(request.output_count, 1);
        ck_assert_int_eq(request.output[0].slot, KLD_SLOT_LOSS);
        ck_assert_int_eq(request.output[0].where, KLD_OIP_JSON);
        ck_assert_int_eq(request.input[0].where, KLD_OIP_JSON);
    }
    ck_assert_int_eq(parse("{\"inputs\":[" P ",{\"name\":\"targets\",\"shape\":[1,2],\"data\":null,"
                           "\"datatype\":\"FP32\",\"parameters\":{\"binary_data_size\":8}}]}"),
                     KLD_OK);
    ck_assert_int_eq(request.input[1].where, KLD_OIP_BINARY);
    static const char *const wrong[] = {
        "{\"inputs\":null}", "{" INPUTS ",\"parameters\":{\"reduction\":null}}",
        "{" INPUTS ",\"parameters\":{\"timeout\":null}}", "{" INPUTS ",\"outputs\":[null]}",
        "{\"inputs\":[" P ",{\"name\":\"targets\",\"shape\":[1,2],\"datatype\":\"FP32\","
        "\"data\":null,\"parameters\":null}]}"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_int_eq(parse(wrong[i]), KLD_INVALID);
}
END_TEST

#define ONE(name, shape, rest)                                                                     \
    "{\"name\":\"" name "\",\"shape\":" shape ",\"datatype\":\"FP32\"," rest "}"
#define BIN(name, shape, size) ONE(name, shape, "\"parameters\":{\"binary_data_size\":" size "}")

static const struct {
    const char *text, *part; /* the error's text has this in it */
    enum kld_status status;
} refused[] = {
    {"", "too early", KLD_INVALID},
    {"[]", "object", KLD_INVALID},
    {"{} x", "behind", KLD_INVALID},
    {"{\"a\":1}", "unknown key 'a'", KLD_INVALID},
    {"{\"id\":\"\xff\"}", "UTF-8", KLD_INVALID},
    {"{\"id\":\"\xed\xa0\x80\"}", "UTF-8", KLD_INVALID},
    {"{\"id\":\"\\ud800\"}", "surrogate", KLD_INVALID},
    {"{\"id\":\"\\u0000\"}", "u0000", KLD_INVALID},
    {"{\"id\":\"a\nb\"}", "control", KLD_INVALID},
    {"{\"id\":\"a\",\"id\":\"b\"}", "twice", KLD_INVALID},
    {"{\"id\":\"a\",\"\\u0069d\":\"b\"}", "twice", KLD_INVALID},
    {"{\"id\":01}", "expected ','", KLD_INVALID},
    {"{\"id\":1.}", "point", KLD_INVALID},
    {"{\"id\":NaN}", "not JSON", KLD_INVALID},
    {"{\"id\":[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}", "nesting", KLD_INVALID},
    {"{\"model_name\":\"foo\"," INPUTS "}", "'model_name' is not \"kl_div\"", KLD_INVALID},
    {"{\"model_name\":7," INPUTS "}", "model_name", KLD_INVALID},
    {"{\"model_version\":\"2\"," INPUTS "}", "'model_version' is not \"1\"", KLD_INVALID},
    {"{\"model_version\":1," INPUTS "}", "model_version", KLD_INVALID},
    {"{\"ID\":\"a\"," INPUTS "}", "unknown key 'ID'", KLD_INVALID},
    {"{\"inputs\":[" P "]}", "'targets' is missing", KLD_INVALID},
    {"{\"inputs\":[" P "," P "]}", "twice", KLD_INVALID},
    {"{" INPUTS "," INPUTS "}", "twice", KLD_INVALID},
    {"{\"inputs\":7}", "array", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("loss", "[1]", "\"data\":[1]") "]}", "unknown input", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[2,1]", "\"data\":[1,2]") "]}", "[2,1]", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[0]", "\"data\":[]") "]}", "is 0", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[1.5]", "\"data\":[]") "]}", "whole", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[-1]", "\"data\":[]") "]}", "whole", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[9007199254740991]", "\"data\":[]") "]}", "2^40",
     KLD_TOO_LARGE},
    {"{\"inputs\":[" P "," ONE("targets", "[1e300]", "\"data\":[]") "]}",
     "targets: dimension 0 of the shape must be a whole number from 1 to 2^40", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[1,-2]", "\"data\":[]") "]}",
     "targets: dimension 1 of the shape must be a whole number from 1 to 2^40", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[9007199254740993]", "\"data\":[]") "]}", "2^40",
     KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[4294967296,4294967296,4294967296]", "\"data\":[]") "]}",
     "2^40", KLD_TOO_LARGE},
    {"{\"inputs\":[" P "," ONE("targets", "[1,1,1,1,1,1,1,1,1]", "\"data\":[]") "]}", "rank",
     KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[1,2]", "\"data\":5") "]}", "array of numbers",
     KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[1,2]", "\"x\":5") "]}", "unknown key 'x'", KLD_INVALID},
    {"{\"inputs\":[" P "," ONE("targets", "[1,2]", "\"parameters\":{}") "]}", "exactly one",
     KLD_INVALID},
    {"{\"inputs\":[" P "," BIN("targets", "[1,2]", "9") "]}", "need 8", KLD_INVALID},
    {"{\"inputs\":[" P "," BIN("targets", "[1,2]", "-8") "]}", "whole", KLD_INVALID},
    {"{\"inputs\":[" P
     "," ONE("targets", "[1,2]", "\"data\":[1,2],\"parameters\":{\"binary_data_size\":8}") "]}",
     "exactly one", KLD_INVALID},
    {"{\"inputs\":[" P
     "," ONE("targets", "[1,2]", "\"parameters\":{\"shared_memory_region\":\"a\"}") "]}",
     "go together", KLD_INVALID},
    {"{\"inputs\":[" P
     "," ONE("targets", "[1,2]",
             "\"parameters\":{\"shared_memory_region\":\"a\",\"shared_memory_byte_size\":8,"
             "\"shared_memory_offset\":2}") "]}",
     "multiple", KLD_INVALID},
    {"{\"inputs\":[" P ",{\"name\":\"targets\",\"shape\":[1,2],\"datatype\":\"FP8\",\"data\":[]}]}",
     "unknown datatype", KLD_INVALID},
    {"{\"inputs\":[" P
     ",{\"name\":\"targets\",\"shape\":[1,2],\"datatype\":\"BF16\",\"data\":[1,2]}]}",
     "binary", KLD_INVALID},
    {"{" INPUTS ",\"outputs\":[{\"name\":\"lose\"}]}", "unknown output", KLD_INVALID},
    {"{" INPUTS ",\"outputs\":[{\"name\":\"loss\"},{\"name\":\"loss\"}]}", "twice", KLD_INVALID},
    {"{" INPUTS ",\"outputs\":[{\"name\":\"loss\",\"parameters\":{\"datatype\":\"FP16\"}}]}",
     "loss has dtype FP16; expected FP32", KLD_INVALID},
    {"{" INPUTS ",\"outputs\":[{\"name\":\"row_loss\",\"parameters\":{\"datatype\":\"BF16\"}}]}",
     "row_loss has dtype BF16; expected FP32", KLD_INVALID},
    {"{\"inputs\":[{\"name\":\"predictions\",\"shape\":[1,2],\"datatype\":\"FP16\",\"parameters\":"
     "{\"binary_data_size\":4}}," T "],\"outputs\":[{\"name\":\"grad_predictions\"}]}",
     "grad_predictions is FP16, which JSON cannot hold", KLD_INVALID},
    {"{\"inputs\":[" P
     ",{\"name\":\"targets\",\"shape\":[1,2],\"datatype\":\"FP32\",\"data\":[1,2],"
     "\"d\\u0061ta\":[1,2]}]}",
     "'data' is there twice", KLD_INVALID},
    {"{\"\\u0069nputs\":[" P "]," INPUTS "}", "'inputs' is there twice", KLD_INVALID},
    {"{\"inputs\\u0073\":[" P "," T "]}", "unknown key 'inputss'", KLD_INVALID},
    {"{\"\\\"nputs\":[" P "," T "]}", "unknown key '\"nputs'", KLD_INVALID},
    {"{\"input\\u0173\":[" P "," T "]}", "unknown key 'input", KLD_INVALID},
    {"{" INPUTS ",\"outputs\":[{\"name\":\"loss\",\"parameters\":{\"classification\":3}}]}",
     "unknown key", KLD_INVALID},
    {"{" INPUTS ",\"outputs\":[{\"name\":\"grad_predictions\",\"parameters\":"
     "{\"shared_memory_region\":\"a\",\"shared_memory_byte_size\":8}},{\"name\":\"grad_targets\","
     "\"parameters\":{\"shared_memory_region\":\"a\",\"shared_memory_byte_size\":8,"
     "\"shared_memory_offset\":4}}]}",
     "overlaps", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"temperatur\":1}}", "unknown parameter", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"temperature\":2}}", "logits", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"temperature\":\"2\"}}", "takes a number", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"reduction\":2}}", "takes text", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"reduction\":true}}", "must be a text", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"predictions_form\":\"Probs\"}}", "probs, logprobs",
     KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"scale\":1e999}}", "finite", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"timeout\":-1}}", "timeout", KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"divergence\":\"kl\"}}", "forward_kl, reverse_kl, jeffreys",
     KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"divergence\":\"js\",\"beta\":2}}", "beta must be in [0, 1]",
     KLD_INVALID},
    {"{" INPUTS ",\"parameters\":{\"divergence\":\"skew_kl\"}}", "needs the parameter skew",
     KLD_INVALID},
};

/* JSON may write any character of a key as an escape. */
START_TEST(escaped_keys_are_the_same_keys) {
    static const char *const same[] = {
        "{\"\\u0069nputs\":[" P "," T "]}", "{\"input\\u0073\":[" P "," T "]}",
        "{\"inputs\":[" P
        ",{\"n\\u0061me\":\"targets\",\"sha\\u0070e\":[1,2],\"datatype\":\"FP32\","
        "\"d\\u0061t\\u0061\":[0.25,0.75]}]}",
        "{\"inputs\":[" P ",{\"\\u0064\\u0061\\u0074\\u0061\":[0.25,0.75],\"name\":\"targets\","
        "\"shape\":[1,2],\"datatype\":\"FP32\"}]}"};
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        ck_assert_msg(parse(same[i]) == KLD_OK, "%s: %s", same[i], err.text);
        ck_assert_int_eq(request.input[1].where, KLD_OIP_JSON);
        float numbers[2];
        ck_assert_int_eq(kld_oip_decode(&request.input[1], numbers, &err), KLD_OK);
        ck_assert(numbers[0] == 0.25f && numbers[1] == 0.75f);
    }
}
END_TEST

START_TEST(a_device_is_told_as_it_was_asked_for) {
    ck_assert_int_eq(parse("{" INPUTS ",\"parameters\":{\"device\":1099511627776}}"), KLD_OK);
    ck_assert(request.has_device && request.device == UINT64_C(1) << 40);
}
END_TEST

START_TEST(what_is_wrong_is_refused_and_named) {
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        enum kld_status status = parse(refused[i].text);
        ck_assert_msg(status == refused[i].status && strstr(err.text, refused[i].part),
                      "%s\n gave %d: %s", refused[i].text, (int)status, err.text);
    }
}
END_TEST

static enum kld_status decode(const char *dtype, const char *shape, const char *data, void *to) {
    char text[512];
    snprintf(text, sizeof text,
             "{\"inputs\":[{\"name\":\"predictions\",\"shape\":%s,\"datatype\":\"FP32\",\"data\":"
             "[1]},{\"name\":\"targets\",\"shape\":%s,\"datatype\":\"FP32\",\"data\":[1]},"
             "{\"name\":\"%s\",\"shape\":%s,\"datatype\":\"%s\",\"data\":%s}],"
             "\"outputs\":[{\"name\":\"grad_targets\"}],\"parameters\":{\"reduction\":\"%s\"}}",
             shape, shape, strcmp(dtype, "BOOL") == 0 ? "row_mask" : "grad_output",
             strcmp(dtype, "BOOL") == 0 ? "[2]" : shape, dtype, data,
             strcmp(dtype, "BOOL") == 0 ? "sum" : "none");
    ck_assert_msg(parse(text) == KLD_OK, "%s: %s", text, err.text);
    return kld_oip_decode(&request.input[2], to, &err);
}

START_TEST(row_loss_comes_in_fp64_where_it_is_asked_for) {
    ck_assert_int_eq(parse("{" INPUTS ",\"outputs\":[{\"name\":\"row_loss\",\"parameters\":{"
                           "\"binary_data\":true,\"datatype\":\"FP64\"}},{\"name\":\"loss\"}]}"),
                     KLD_OK);
    ck_assert_uint_eq(request.output[0].dtype, KLD_DTYPE_FP64);
    ck_assert_uint_eq(request.output[0].bytes, 8);
    ck_assert_uint_eq(request.op.tensor[KLD_SLOT_ROW_LOSS].dtype, KLD_DTYPE_FP64);
    ck_assert_uint_eq(request.output[1].dtype, KLD_DTYPE_FP32);
    const char *const wrong[][2] = {
        {"{\"name\":\"loss\",\"parameters\":{\"datatype\":\"FP64\"}}", "loss has dtype FP64"},
        {"{\"name\":\"row_loss\",\"parameters\":{\"datatype\":\"BOOL\"}}",
         "row_loss has dtype BOOL"},
        {"{\"name\":\"row_loss\",\"parameters\":{\"datatype\":\"FP8\"}}", "unknown datatype"},
        {"{\"name\":\"row_loss\",\"parameters\":{\"datatype\":8}}", "unknown datatype"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char text[512];
        snprintf(text, sizeof text, "{" INPUTS ",\"outputs\":[%s]}", wrong[i][0]);
        ck_assert_int_eq(parse(text), KLD_INVALID);
        ck_assert_msg(strstr(err.text, wrong[i][1]), "%s", err.text);
    }
}
END_TEST

START_TEST(data_is_flat_or_nested_as_the_shape_says) {
    float f[4];
    double d[4];
    uint8_t b[2];
    ck_assert_int_eq(decode("FP32", "[2,2]", "[1, -2e0 ,3.5,\n4]", f), KLD_OK);
    ck_assert_float_eq(f[1], -2);
    ck_assert_int_eq(decode("FP32", "[2,2]", "[[1,2],[3,4]]", f), KLD_OK);
    ck_assert_float_eq(f[3], 4);
    ck_assert_int_eq(decode("FP64", "[2,1,2]", "[[[1,2]],[[3,0.1]]]", d), KLD_OK);
    ck_assert_double_eq(d[3], 0.1);
    ck_assert_int_eq(decode("BOOL", "[2,2]", "[true,0]", b), KLD_OK);
    ck_assert_uint_eq(b[0] + 2 * b[1], 1);
    const char *const wrong[] = {
        "[1,2,3]",         "[1,2,3,4,5]",  "[[1,2,3],[4]]",  "[[1,2],[3,4],[]]",
        "[[[1,2],[3,4]]]", "[[1,2],3,4]",  "[[],[1,2,3,4]]", "[]",
        "[\"1\",2,3,4]",   "[null,2,3,4]", "[1e39,2,3,4]",   "[{},2,3,4]"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_msg(decode("FP32", "[2,2]", wrong[i], f) == KLD_INVALID, "%s", wrong[i]);
    ck_assert_int_eq(decode("BOOL", "[2,2]", "[2,0]", b), KLD_INVALID);
    ck_assert_int_eq(decode("FP64", "[2,1,2]", "[[1,2],[3,4]]", d), KLD_INVALID);
}
END_TEST

START_TEST(a_reply_is_json_whatever_the_numbers_are) {
    char buffer[2048];
    struct kld_oip_text text = {.data = buffer, .capacity = sizeof buffer};
    ck_assert_int_eq(parse("{\"id\":\"q\\\"\"," INPUTS ",\"outputs\":[{\"name\":\"loss\"},"
                           "{\"name\":\"grad_targets\"},{\"name\":\"row_loss\",\"parameters\":"
                           "{\"binary_data\":true}}]}"),
                     KLD_OK);
    float loss = NAN, gradient[2] = {-INFINITY, 0.1f};
    kld_oip_reply(&text, &request, (const void *[]){&loss, gradient, NULL});
    ck_assert(!text.overflow);
    buffer[text.length] = '\0';
    ck_assert_str_eq(
        buffer, "{\"id\":\"q\\\"\",\"model_name\":\"kl_div\",\"model_version\":\"1\",\"outputs\":["
                "{\"name\":\"loss\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[null],"
                "\"parameters\":{\"non_finite\":\"nan\"}},"
                "{\"name\":\"grad_targets\",\"datatype\":\"FP32\",\"shape\":[1,2],"
                "\"data\":[null,0.100000001],\"parameters\":{\"non_finite\":\"-inf\"}},"
                "{\"name\":\"row_loss\",\"datatype\":\"FP32\",\"shape\":[1],"
                "\"parameters\":{\"binary_data_size\":4}}]}");
    ck_assert_uint_le(text.length, kld_oip_reply_bytes_max(&request));

    text.length = 0;
    gradient[1] = INFINITY;
    kld_oip_reply(&text, &request, (const void *[]){&loss, gradient, NULL});
    buffer[text.length] = '\0';
    ck_assert_ptr_nonnull(strstr(buffer, "\"non_finite\":[\"-inf\",\"inf\"]"));

    text = (struct kld_oip_text){.data = buffer, .capacity = 40};
    kld_oip_reply(&text, &request, (const void *[]){&loss, gradient, NULL});
    ck_assert(text.overflow);
    ck_assert_uint_le(text.length, 40);
}
END_TEST

START_TEST(the_longest_numbers_fit_the_announced_size) {
    char buffer[4096];
    ck_assert_int_eq(
        parse("{\"inputs\":[{\"name\":\"predictions\",\"shape\":[8],\"datatype\":\"FP64\","
              "\"data\":[1]},{\"name\":\"targets\",\"shape\":[8],\"datatype\":\"FP32\",\"data\":"
              "[1]}],\"outputs\":[{\"name\":\"grad_predictions\"},{\"name\":\"grad_targets\"}]}"),
        KLD_OK);
    double wide[8];
    float narrow[8];
    for (int i = 0; i < 8; i++)
        wide[i] = -1.2345678901234567e-308, narrow[i] = -1.23456789e-38f;
    struct kld_oip_text text = {.data = buffer, .capacity = kld_oip_reply_bytes_max(&request)};
    ck_assert_uint_le(text.capacity, sizeof buffer);
    kld_oip_reply(&text, &request, (const void *[]){wide, narrow});
    ck_assert(!text.overflow);
    buffer[text.length] = '\0';
    double first = strtod(strstr(buffer, "\"data\":[") + 8, NULL);
    ck_assert(first == wide[0]);
}
END_TEST

START_TEST(errors_are_json_even_if_a_text_was_cut) {
    char buffer[64];
    struct kld_oip_text text = {.data = buffer, .capacity = sizeof buffer};
    kld_oip_append_error(&text, "a\"\\\x01\xc3");
    buffer[text.length] = '\0';
    ck_assert_str_eq(buffer, "{\"error\":\"a\\\"\\\\\\u0001?\"}");
}
END_TEST

START_TEST(register_bodies) {
    struct kld_oip_register got;
    const char good[] = "{\"key\":\"/a\",\"offset\":0,\"byte_size\":64}";
    ck_assert_int_eq(kld_oip_parse_register(good, strlen(good), &got, &err), KLD_OK);
    ck_assert_str_eq(got.key, "/a");
    ck_assert_uint_eq(got.byte_size, 64);
    const char *const wrong[] = {"",
                                 "[]",
                                 "{\"key\":1,\"byte_size\":4}",
                                 "{\"key\":\"/a\"}",
                                 "{\"key\":\"/a\",\"byte_size\":0}",
                                 "{\"key\":\"/a\",\"byte_size\":1,\"x\":1}",
                                 "{\"key\":\"/a\",\"byte_size\":1,\"offset\":-1}"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_int_eq(kld_oip_parse_register(wrong[i], strlen(wrong[i]), &got, &err),
                         KLD_INVALID);
}
END_TEST

START_TEST(an_index_is_of_what_is_wanted) {
    const struct {
        const char *body;
        bool only_ready;
    } good[] = {
        {"", false}, {"{}", false}, {"{\"ready\":false}", false}, {"{\"ready\":true}", true}};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        bool only_ready = !good[i].only_ready;
        ck_assert_int_eq(kld_oip_parse_index(good[i].body, strlen(good[i].body), &only_ready, &err),
                         KLD_OK);
        ck_assert(only_ready == good[i].only_ready);
    }
    const char *const wrong[] = {
        "[]", "true", "null", "{\"ready\":1}", "{\"ready\":null}", "{\"ready\":true,\"x\":1}"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        bool untouched = true;
        ck_assert_int_eq(kld_oip_parse_index(wrong[i], strlen(wrong[i]), &untouched, &err),
                         KLD_INVALID);
        ck_assert(untouched);
    }
    for (int i = 0; i < 4; i++) {
        bool is_ready = i & 1, only_ready = i & 2;
        char buffer[128] = "";
        struct kld_oip_text text = {.data = buffer, .capacity = sizeof buffer - 1};
        kld_oip_append_index(&text, is_ready ? NULL : "it is asleep", only_ready);
        ck_assert(!text.overflow);
        if (is_ready)
            ck_assert_ptr_nonnull(strstr(buffer, "\"READY\",\"reason\":\"\"}]"));
        else if (only_ready)
            ck_assert_str_eq(buffer, "[]");
        else
            ck_assert_ptr_nonnull(strstr(buffer, "\"UNAVAILABLE\",\"reason\":\"it is asleep\"}]"));
    }
}
END_TEST

#define HANDLE                                                                                     \
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+"         \
    "Pw=="

START_TEST(register_bodies_of_cuda_memory) {
    struct kld_oip_register_cuda got;
    const char *right =
        "{\"raw_handle\":{\"b64\":\"" HANDLE "\"},\"device_id\":3,\"byte_size\":9007199254740991}";
    ck_assert_int_eq(kld_oip_parse_register_cuda(right, strlen(right), &got, &err), KLD_OK);
    for (int i = 0; i < KLD_OIP_CUDA_HANDLE_BYTES; i++)
        ck_assert_uint_eq(got.handle[i], i);
    ck_assert_uint_eq(got.device_id, 3);
    ck_assert_uint_eq(got.byte_size, 9007199254740991u);
    static const char *const wrong[] = {
        "",
        "[]",
        "null",
        "{}",
        "{\"raw_handle\":{\"b64\":\"" HANDLE "\"},\"device_id\":0}",
        "{\"raw_handle\":{\"b64\":\"" HANDLE "\"},\"byte_size\":1}",
        "{\"raw_handle\":{\"b64\":\"" HANDLE "AA\"},\"device_id\":0,\"byte_size\":1}",
        "{\"raw_handle\":{\"b64\":\"" HANDLE "\",\"c\":0},\"device_id\":0,\"byte_size\":1}"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_int_eq(kld_oip_parse_register_cuda(wrong[i], strlen(wrong[i]), &got, &err),
                         KLD_INVALID);
}
END_TEST

START_TEST(json_that_is_not_tensor_data_is_bounded) {
    size_t bytes = (size_t)3 << 20;
    char *text = malloc(bytes + 1);
    memset(text, ' ', bytes);
    memcpy(text, "{\"id\":\"a\"", 9);
    text[bytes - 1] = '}';
    ck_assert_int_eq(kld_oip_parse(text, bytes, NULL, &request, &err), KLD_TOO_LARGE);
    free(text);
}
END_TEST

START_TEST(the_same_text_with_other_numbers_is_the_same_request) {
    static struct kld_oip_memo memo;
    struct kld_oip_request first, again;
    float values[2];
    const char *text = "{\"id\":\"x\"," INPUTS "}";
    const char *other = "{\"id\":\"x\",\"inputs\":[{\"name\":\"predictions\",\"shape\":[1,2],"
                        "\"datatype\":\"FP32\",\"data\":[0.125,7]}," T "]}";
    ck_assert_int_eq(kld_oip_parse(text, strlen(text), &memo, &first, &err), KLD_OK);
    ck_assert_uint_ne(memo.bytes, 0);
    ck_assert_int_eq(kld_oip_parse(other, strlen(other), &memo, &again, &err), KLD_OK);
    ck_assert_ptr_eq(again.input[0].data, strstr(other, "[0.125"));
    ck_assert_int_eq(kld_oip_decode(&again.input[0], values, &err), KLD_OK);
    ck_assert(values[0] == 0.125f && values[1] == 7);
    ck_assert_int_eq(kld_oip_decode(&again.input[1], values, &err), KLD_OK);
    ck_assert(values[0] == 0.25f && values[1] == 0.75f);
    ck_assert_str_eq(again.id, "x");
    /* Anything else is read anew, and what is refused is not remembered. */
    const char *name = "{\"id\":\"y\"," INPUTS "}", *wrong = "{\"id\":\"y\",\"inputs\":[" P "]}";
    ck_assert_int_eq(kld_oip_parse(name, strlen(name), &memo, &again, &err), KLD_OK);
    ck_assert_str_eq(again.id, "y");
    ck_assert_int_eq(kld_oip_parse(wrong, strlen(wrong), &memo, &again, &err), KLD_INVALID);
    ck_assert_int_eq(kld_oip_parse(wrong, strlen(wrong), &memo, &again, &err), KLD_INVALID);
    const char *array = "{\"id\":\"y\",\"inputs\":[{\"name\":\"predictions\",\"shape\":[1,2],"
                        "\"datatype\":\"FP32\",\"data\":[\"a\"]}," T "]}";
    ck_assert_int_eq(kld_oip_parse(array, strlen(array), &memo, &again, &err), KLD_OK);
    ck_assert_int_eq(kld_oip_decode(&again.input[0], values, &err), KLD_INVALID);
}
END_TEST

/* Known before there is memory for what the shape says, whatever the text before this one had. */
START_TEST(fewer_numbers_than_the_shape_says_are_seen_by_the_length) {
    static struct kld_oip_memo memo;
    static const struct {
        const char *data;
        enum kld_status status;
    } cases[] = {
        {"[0.5,0.5]", KLD_OK}, {"[1,2]", KLD_OK},    {"[[1,2]]", KLD_OK}, {"[[1]]", KLD_OK},
        {"[ 1]", KLD_INVALID}, {"[1]", KLD_INVALID}, {"[]", KLD_INVALID}, {"[[]]", KLD_INVALID},
        {"[1,2,3]", KLD_OK},   {"[\"1\"]", KLD_OK},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[512];
        snprintf(text, sizeof text,
                 "{\"inputs\":[{\"name\":\"predictions\",\"shape\":[1,2],\"datatype\":\"FP32\","
                 "\"data\":%s}," T "]}",
                 cases[i].data);
        ck_assert_int_eq(kld_oip_parse(text, strlen(text), &memo, &request, &err), KLD_OK);
        ck_assert_uint_ne(memo.bytes, 0);
        ck_assert_msg(kld_oip_check_length(&request.input[0], &err) == cases[i].status, "%s",
                      cases[i].data);
        ck_assert_int_eq(kld_oip_check_length(&request.input[1], &err), KLD_OK);
    }
}
END_TEST

START_TEST(names_are_text) {
    char longest[KLD_OIP_NAME_MAX + 1];
    struct kld_error error;
    memset(longest, 'n', sizeof longest);
    longest[KLD_OIP_NAME_MAX] = 0;
    ck_assert_int_eq(kld_oip_check_name(longest, "tensor", &error), KLD_INVALID);
    ck_assert_str_eq(error.text, "the name of a tensor has 1 to 127 bytes");
    longest[KLD_OIP_NAME_MAX - 1] = 0;
    ck_assert_int_eq(kld_oip_check_name(longest, "tensor", &error), KLD_OK);
    ck_assert_int_eq(kld_oip_check_name("", "region", &error), KLD_INVALID);
    ck_assert_int_eq(
        kld_oip_check_name("teacher/logits, \xc3\xa4\xe2\x82\xac \n", "region", &error), KLD_OK);
    const char *const bad[] = {"ab\xcd", "ab\xff", "ab\xe0\x80\x80", "ab\xed\xa0\x80", "ab\xc3"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ck_assert_int_eq(kld_oip_check_name(bad[i], "region", &error), KLD_INVALID);
        ck_assert_ptr_nonnull(
            strstr(error.text, "byte 2 of the name of a region is a NUL or begins no UTF-8"));
        ck_assert_ptr_nonnull(strstr(error.text, "expected UTF-8"));
    }
    /* What is no text anywhere else, in an error that repeats what a client sent, say. */
    char buffer[64];
    struct kld_oip_text text = {.data = buffer, .capacity = sizeof buffer};
    kld_oip_append_string(&text, "\xe0\x80\x80\xc3\xa4\xed\xa0\x80\xf4\x90\x80\x80\xcd");
    ck_assert_uint_eq(text.length, strlen("\"???\xc3\xa4????????\""));
    ck_assert_int_eq(memcmp(text.data, "\"???\xc3\xa4????????\"", text.length), 0);
}
END_TEST

UNIT_MAIN("proto/oip", a_plain_request_asks_for_the_loss, null_is_a_field_that_is_not_there,
          what_a_stock_client_sends_is_understood, what_is_wrong_is_refused_and_named,
          escaped_keys_are_the_same_keys, a_device_is_told_as_it_was_asked_for,
          row_loss_comes_in_fp64_where_it_is_asked_for, data_is_flat_or_nested_as_the_shape_says,
          a_reply_is_json_whatever_the_numbers_are, the_longest_numbers_fit_the_announced_size,
          errors_are_json_even_if_a_text_was_cut, register_bodies, an_index_is_of_what_is_wanted,
          register_bodies_of_cuda_memory, json_that_is_not_tensor_data_is_bounded,
          the_same_text_with_other_numbers_is_the_same_request,
          fewer_numbers_than_the_shape_says_are_seen_by_the_length, names_are_text)
