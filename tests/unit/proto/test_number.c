/* test_number.c - whole numbers of settings and command lines. */
#include "proto/number.h"
#include "tests/unit/unit.h"

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

UNIT_MAIN("proto/number", what_a_number_is, what_none_is)
