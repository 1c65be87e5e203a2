/* test_safetensors.c - headers of .safetensors files, good and bad. */
#include "tests/unit/unit.h"

#include <string.h>

#include "client/cli/safetensors.h"

static char file[4096];
static struct kld_array array;
static struct kld_error error;

static enum kld_status parse(const char *json, size_t values, const char *name) {
    uint64_t length = strlen(json);
    memset(file, 0, sizeof file);
    memcpy(file, &length, 8);
    memcpy(file + 8, json, length);
    return kld_safetensors_parse(file, 8 + length + values, name, &array, &error);
}

START_TEST(test_good) {
    const char *two = "{\"__metadata__\":{\"a\":\"b\"},"
                      "\"x\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                      "\"y.z\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12,20]}} ";
    ck_assert_int_eq(parse(two, 20, "x"), KLD_OK);
    ck_assert_int_eq(array.dtype, KLD_DTYPE_BF16);
    ck_assert_uint_eq(array.shape[1], 3);
    ck_assert_uint_eq(array.offset_bytes, 8 + strlen(two));
    ck_assert_int_eq(parse(two, 20, "y.z"), KLD_OK);
    ck_assert_uint_eq(array.offset_bytes, 8 + strlen(two) + 12);
    ck_assert_int_eq(parse(two, 20, NULL), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "x, y.z"));
    ck_assert_int_eq(parse(two, 20, "w"), KLD_INVALID);
    ck_assert_int_eq(parse(two, 19, "y.z"), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "cut short"));
}
END_TEST

static const struct {
    const char *json, *text;
} bad[] = {
    {"[]", "not a JSON object"},
    {"{", "not a JSON object"},
    {"{}", "which tensor"},
    {"{\"x\":1}", "dtype"},
    {"{\"x\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[0,16]}}", "I64"},
    {"{\"x\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", "no shape"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,8]}}", "whole"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", "whole"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1e300],\"data_offsets\":[0,8]}}", "whole"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}", "empty"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}",
     "2^40"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}",
     "dimensions"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,9]}}", "data_offsets"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", "data_offsets"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", "data_offsets"},
    {"{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[9007199254740984,9007199254740992]}"
     "}",
     "cut short"},
};

START_TEST(test_bad) {
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ck_assert_msg(parse(bad[i].json, 16, NULL) != KLD_OK, "case %zu passed", i);
        ck_assert_msg(strstr(error.text, bad[i].text) != NULL, "case %zu: %s", i, error.text);
    }
    uint64_t length = UINT64_MAX;
    memcpy(file, &length, 8);
    ck_assert_int_eq(kld_safetensors_parse(file, 100, NULL, &array, &error), KLD_INVALID);
    ck_assert_int_eq(kld_safetensors_parse(file, 7, NULL, &array, &error), KLD_INVALID);
}
END_TEST

START_TEST(test_written_is_read) {
    struct kld_array out = {.dtype = KLD_DTYPE_BF16, .rank = 2, .shape = {3, 5}};
    ck_assert_int_eq(kld_array_size(&out, &error), KLD_OK);
    char header[KLD_SAFETENSORS_HEADER_BYTES];
    size_t bytes = kld_safetensors_header(&out, "grad_predictions", header);
    ck_assert_uint_eq(bytes % 8, 0);
    ck_assert_int_eq(kld_safetensors_parse(header, bytes + out.bytes, NULL, &array, &error),
                     KLD_OK);
    ck_assert_uint_eq(array.offset_bytes, bytes);
    ck_assert_uint_eq(array.shape[1], 5);
    ck_assert_int_eq(array.dtype, KLD_DTYPE_BF16);
}
END_TEST

UNIT_MAIN("client/cli/safetensors", test_good, test_bad, test_written_is_read)
