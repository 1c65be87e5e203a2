/* test_oip_number.c - the fast ways to read and write numbers against the C library: special
 * values, random ones, and texts in the middle of two floats. */
#include "proto/oip_number.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "tests/unit/unit.h"

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static void round_trip_float(float value) {
    char text[KLD_NUMBER_TEXT_MAX + 1];
    size_t length = kld_number_write_float(text, value);
    ck_assert_uint_lt(length, 18);
    text[length] = '\0';
    const char *at = text;
    float back = kld_number_read_float(&at), library = strtof(text, NULL);
    ck_assert_msg(memcmp(&back, &value, 4) == 0 && memcmp(&library, &value, 4) == 0 && !*at,
                  "%.9g was written as %s and read as %.9g", (double)value, text, (double)back);
}

START_TEST(every_kind_of_float_comes_back) {
    const float special[] = {
        0.f,         -0.f,       1.f,        -1.f,          10.f,   0.1f,
        1e-4f,       9.9999e-5f, 1e8f,       99999999.f,    1e-45f, 1.17549435e-38f,
        3.4028e38f,  -2.5f,      123456.f,   16777216.f,    1e-30f, 1e30f,
        0.99999994f, 9.9999990f, 99.999992f, 0.00099999993f};
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++)
        round_trip_float(special[i]);
    for (int i = 0; i < 300000; i++) {
        uint32_t bits = (uint32_t)next_random();
        float value;
        memcpy(&value, &bits, sizeof value);
        if (isfinite(value))
            round_trip_float(value);
        round_trip_float((float)(next_random() >> 40) / 16777216.f); /* as probabilities are */
        round_trip_float(((float)(next_random() >> 40) - 8388608.f) / 65536.f);
    }
}
END_TEST

/* Whatever text: the same bits as the C library. */
START_TEST(reading_is_what_the_library_reads) {
    char text[80];
    for (int i = 0; i < 400000; i++) {
        uint64_t random = next_random();
        const char *sign = random & 1 ? "-" : "";
        uint64_t digits = next_random() >> (random >> 1 & 63);
        int form = (int)(random >> 8) & 3, exponent = (int)(random >> 10) % 60 - 30;
        if (form == 0)
            snprintf(text, sizeof text, "%s%llu", sign, (unsigned long long)digits);
        else if (form == 1)
            snprintf(text, sizeof text, "%s0.%0*llu", sign, (int)(random >> 20 & 15),
                     (unsigned long long)digits);
        else if (form == 2)
            snprintf(text, sizeof text, "%s%llu.%llue%d", sign, (unsigned long long)digits % 1000,
                     (unsigned long long)next_random() >> 20, exponent);
        else
            snprintf(text, sizeof text, "%s%lluE+%d", sign, (unsigned long long)digits,
                     exponent < 0 ? -exponent : exponent);
        const char *at = text;
        float single = kld_number_read_float(&at), wanted = strtof(text, NULL);
        ck_assert_msg(memcmp(&single, &wanted, 4) == 0 && !*at, "%s: %.9g", text, (double)single);
        at = text;
        double number = kld_number_read_double(&at), expected = strtod(text, NULL);
        ck_assert_msg(memcmp(&number, &expected, 8) == 0 && !*at, "%s: %.17g", text, number);
    }
}
END_TEST

/* Texts at and around the middle of two floats, where rounding twice would go wrong. */
START_TEST(the_middle_of_two_floats) {
    char text[80];
    for (int i = 0; i < 100000; i++) {
        uint32_t bits = (uint32_t)(next_random() % 0x40000000) + 0x20000000;
        float low;
        memcpy(&low, &bits, sizeof low);
        double middle = ((double)low + (double)nextafterf(low, INFINITY)) / 2;
        for (int digits = 9; digits <= 19; digits += 5) {
            snprintf(text, sizeof text, "%.*e", digits - 1, middle);
            const char *at = text;
            float value = kld_number_read_float(&at);
            ck_assert_msg(value == strtof(text, NULL), "%s", text);
        }
    }
}
END_TEST

UNIT_MAIN("proto/oip_number", every_kind_of_float_comes_back, reading_is_what_the_library_reads,
          the_middle_of_two_floats)
