/* test_oip_number.c - the fast ways to read and write numbers against the C library: special
 * values, random ones, and texts in the middle of two floats. */
#include "proto/oip_number.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/unit.h"

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Where the text may be read on behind the number, and where it may not: the same. */
#define READ_BOTH_WAYS(type)                                                                       \
    static type read_##type(const char *text, size_t size, const char **ret_behind) {              \
        const char *near = text, *far = text;                                                      \
        type value = kld_number_read_##type(&near, text + strlen(text) + 1);                       \
        type other = kld_number_read_##type(&far, text + size);                                    \
        ck_assert_msg(memcmp(&value, &other, sizeof value) == 0 && near == far, "%s", text);       \
        *ret_behind = near;                                                                        \
        return value;                                                                              \
    }
READ_BOTH_WAYS(float)
READ_BOTH_WAYS(double)

static void round_trip_float(float value) {
    char text[KLD_NUMBER_TEXT_MAX + 1] = "";
    size_t length = kld_number_write_float(text, value);
    ck_assert_uint_lt(length, 18);
    text[length] = '\0';
    const char *at;
    float back = read_float(text, sizeof text, &at), library = strtof(text, NULL);
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
    char text[80] = "";
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
        const char *at;
        float single = read_float(text, sizeof text, &at), wanted = strtof(text, NULL);
        ck_assert_msg(memcmp(&single, &wanted, 4) == 0 && !*at, "%s: %.9g", text, (double)single);
        double number = read_double(text, sizeof text, &at), expected = strtod(text, NULL);
        ck_assert_msg(memcmp(&number, &expected, 8) == 0 && !*at, "%s: %.17g", text, number);
    }
}
END_TEST

/* Texts at and around the middle of two floats, where rounding twice would go wrong. */
START_TEST(the_middle_of_two_floats) {
    char text[80] = "";
    for (int i = 0; i < 100000; i++) {
        uint32_t bits = (uint32_t)(next_random() % 0x40000000) + 0x20000000;
        float low;
        memcpy(&low, &bits, sizeof low);
        double middle = ((double)low + (double)nextafterf(low, INFINITY)) / 2;
        for (int digits = 9; digits <= 19; digits += 5) {
            snprintf(text, sizeof text, "%.*e", digits - 1, middle);
            const char *at;
            float value = read_float(text, sizeof text, &at);
            ck_assert_msg(value == strtof(text, NULL), "%s", text);
        }
    }
}
END_TEST

/* Every number of digits, before and behind the point, with what may follow them. */
START_TEST(digits_by_the_eight) {
    static const char followers[] = ",] \n}/:";
    for (int before = 1; before <= 24; before++)
        for (int behind = 0; behind <= 24; behind++)
            for (const char *follower = followers; *follower; follower++) {
                char text[80] = "";
                int length = 0;
                for (int i = 0; i < before; i++)
                    text[length++] = (char)('1' + next_random() % 9);
                text[length++] = '.';
                for (int i = 0; i < behind; i++)
                    text[length++] = (char)('0' + next_random() % 10);
                length -= behind == 0; /* no point without digits */
                text[length] = *follower;
                const char *at;
                ck_assert_double_eq(read_float(text, sizeof text, &at), strtof(text, NULL));
                ck_assert_int_eq(at - text, length);
                ck_assert_double_eq(read_double(text, sizeof text, &at), strtod(text, NULL));
                ck_assert_int_eq(at - text, length);
            }
}
END_TEST

/* The last bytes that may be read are the last of the memory. */
START_TEST(nothing_is_read_behind_the_end) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(memory, MAP_FAILED);
    ck_assert_int_eq(mprotect(memory + page, page, PROT_NONE), 0);
    const char *const numbers[] = {"1]", "0.5]", "0.12345678]", "1234567.1234567]", "12345678]"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        size_t length = strlen(numbers[i]);
        const char *at = memory + page - length;
        memcpy(memory + page - length, numbers[i], length);
        ck_assert_double_eq(kld_number_read_float(&at, memory + page), strtof(numbers[i], NULL));
        ck_assert_ptr_eq(at, memory + page - 1);
    }
    munmap(memory, 2 * page);
}
END_TEST

UNIT_MAIN("proto/oip_number", digits_by_the_eight, nothing_is_read_behind_the_end,
          every_kind_of_float_comes_back, reading_is_what_the_library_reads,
          the_middle_of_two_floats)
