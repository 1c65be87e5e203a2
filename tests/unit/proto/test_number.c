/* test_number.c - whole numbers of settings and command lines. */
#include "proto/number.h"
#include "tests/unit/unit.h"

#include <math.h>
#include <string.h>

static const struct {
    const char *text;
    int base;
    bool units;
    uint64_t number;
} good[] = {
    {"0", 10, false, 0},
    {"007", 10, false, 7},
    {"18446744073709551615", 10, false, UINT64_MAX},
    {"660", 8, false, 0660},
    {"3k", 10, true, 3072},
    {"64M", 10, true, 64u << 20},
    {"2G", 10, true, (uint64_t)2 << 30},
    {"16777215T", 10, true, (uint64_t)16777215 << 40},
};

static const struct {
    const char *text;
    int base;
    bool units;
} bad[] = {
    {"", 10, true},          {"-1", 10, false},
    {"+1", 10, false},       {" 1", 10, false},
    {"1 ", 10, false},       {"0x10", 10, false},
    {"1K", 10, false},       {"K", 10, true},
    {"1KB", 10, true},       {"1.5G", 10, true},
    {"8", 8, false},         {"1E3", 10, true},
    {"16777216T", 10, true}, {"18446744073709551616", 10, false},
};

START_TEST(what_a_number_is) {
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        uint64_t number = 1;
        ck_assert_msg(kld_number_parse(good[i].text, good[i].base, good[i].units, &number), "'%s'",
                      good[i].text);
        ck_assert_uint_eq(number, good[i].number);
    }
}
END_TEST

START_TEST(what_none_is) {
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t number = 5;
        ck_assert_msg(!kld_number_parse(bad[i].text, bad[i].base, bad[i].units, &number), "'%s'",
                      bad[i].text);
        ck_assert_uint_eq(number, 5);
    }
}
END_TEST

START_TEST(what_is_shown_reads_back) {
    static const struct {
        double number;
        const char *text;
    } shown[] = {
        {2, "2"},
        {1.5, "1.5"},
        {-0.1, "-0.1"},
        {1.0000001, "1.0000001"},
        {0x1.0000000000001p0, "1.0000000000000002"},
        {1e300, "1e+300"},
        {0x1p-1022, "2.2250738585072014e-308"},
        {-0x1p-1074, "-4.94066e-324"},
        {INFINITY, "inf"},
        {-0x1.fffffffffffffp1023, "-1.7976931348623157e+308"},
    };
    char text[KLD_NUMBER_SHOWN_MAX];
    for (size_t i = 0; i < sizeof shown / sizeof shown[0]; i++)
        ck_assert_str_eq(kld_number_show(shown[i].number, text), shown[i].text);
    ck_assert_ptr_nonnull(strstr(kld_number_show(NAN, text), "nan"));
}
END_TEST

UNIT_MAIN("proto/number", what_a_number_is, what_none_is, what_is_shown_reads_back)
