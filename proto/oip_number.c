/* oip_number.c - the fast paths of oip_number.h, each with the reason why it is exact enough.
 * Pure; any thread. */
#include "proto/oip_number.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/digits.h"

#define TENS_MAX 22 /* the largest power of ten that a double holds exactly */

static const double tens[TENS_MAX + 1] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                          1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                          1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

/* digits * 10^exponent, negative or not. */
struct decimal {
    uint64_t digits;
    int exponent;
    bool negative;
    const char *end;
};

/* end: of the text, in which something that is no digit comes before it. */
static inline const char *take_digits(const char *at, const char *end, uint64_t *digits) {
    static const uint32_t powers[] = {1,      10,      100,      1000,     10000,
                                      100000, 1000000, 10000000, 100000000};
    uint64_t value = *digits;
    for (; end - at >= 8; at += 8) {
        uint64_t eight = kld_digits_load(at);
        unsigned count = kld_digits_count(eight);
        if (count < 8) {
            *digits = count ? value * powers[count] + kld_digits_value(eight, count) : value;
            return at + count;
        }
        value = value * 100000000 + kld_digits_value(eight, 8);
    }
    for (unsigned digit; (digit = (unsigned)(*at - '0')) <= 9; at++)
        value = value * 10 + digit;
    *digits = value;
    return at;
}

/* False if it has too many digits or too large an exponent for the fast paths. */
static inline __attribute__((always_inline)) bool split(const char *at, const char *end,
                                                        struct decimal *decimal) {
    int exponent = 0;
    bool minus = false;
    decimal->digits = 0;
    decimal->negative = *at == '-';
    at += decimal->negative;
    const char *first = at;
    at = *at == '0' ? at + 1 : take_digits(at, end, &decimal->digits); /* a 0 stands alone */
    const char *point = at;
    if (*at == '.') {
        point++;
        if (*first == '0')
            first = point;
        at = take_digits(point, end, &decimal->digits);
    }
    if (at - first > 19) { /* 10^19 still fits 64 bits; zeros in front count for nothing */
        while (*first == '0' || *first == '.')
            first++;
        if (at - first - (first < point && point < at) > 19)
            return false;
    }
    int behind_point = (int)(at - point);
    if (*at == 'e' || *at == 'E') {
        at++;
        minus = *at == '-';
        at += *at == '-' || *at == '+';
        for (; *at >= '0' && *at <= '9'; at++)
            if ((exponent = exponent * 10 + (*at - '0')) > 1000)
                return false;
    }
    decimal->exponent = (minus ? -exponent : exponent) - behind_point;
    decimal->end = at;
    return decimal->exponent >= -TENS_MAX && decimal->exponent <= TENS_MAX;
}

static double scale(const struct decimal *decimal) {
    double value = (double)decimal->digits;
    return decimal->exponent < 0 ? value / tens[-decimal->exponent]
                                 : value * tens[decimal->exponent];
}

/* Both factors are exact doubles, so the one operation rounds once: the nearest double. */
double kld_number_read_double(const char **at, const char *end) {
    struct decimal decimal;
    char *behind;
    if (split(*at, end, &decimal) && decimal.digits <= (uint64_t)1 << 53) {
        double value = scale(&decimal);
        *at = decimal.end;
        return decimal.negative ? -value : value;
    }
    double value = strtod(*at, &behind);
    *at = behind;
    return value;
}

/* The double is within two roundings (2^-52) of the truth. Rounding it again to FP32 gives the
 * nearest float unless it lies next to the middle of two floats: the low 29 bits say so. */
float kld_number_read_float(const char **at, const char *end) {
    struct decimal decimal;
    char *behind;
    if (split(*at, end, &decimal)) {
        double value = scale(&decimal);
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        int64_t from_middle = (int64_t)(bits & 0x1fffffff) - 0x10000000;
        if (value == 0 ||
            (value > 1e-30 && value < 1e30 && (from_middle > 8 || from_middle < -8))) {
            *at = decimal.end;
            return (float)(decimal.negative ? -value : value);
        }
    }
    float value = strtof(*at, &behind);
    *at = behind;
    return value;
}

/* value = number / 10^places, in decimal, without trailing zeros behind the point. */
static size_t write_fixed(char *to, uint64_t number, int places) {
    char digits[24];
    int count = 0;
    size_t length = 0;
    while (places > 0 && number % 10 == 0) {
        number /= 10;
        places--;
    }
    do {
        digits[count++] = (char)('0' + number % 10);
        number /= 10;
    } while (number || count <= places); /* at least one digit before the point */
    while (count > 0) {
        if (count == places)
            to[length++] = '.';
        to[length++] = digits[--count];
    }
    return length;
}

/* Nine digits: value * 10^places as a whole number in [10^8, 10^9). Only the product is rounded, by
 * 10^-7 of the last digit at most, and half a unit of that digit is a sixth of half a unit of FP32
 * in the worst case: what is written reads back to the same bits. */
size_t kld_number_write_float(char *to, float value) {
    double magnitude = fabs((double)value);
    int places = 8;
    size_t sign = signbit(value) ? 1 : 0;
    if (!(magnitude >= 1e-4 && magnitude < 1e8))
        return (size_t)snprintf(to, KLD_NUMBER_TEXT_MAX, "%.9g", (double)value);
    while (magnitude * tens[places] < 1e8)
        places++;
    while (magnitude * tens[places] >= 1e9)
        places--;
    if (sign)
        *to = '-';
    return sign + write_fixed(to + sign, (uint64_t)(magnitude * tens[places] + 0.5), places);
}

size_t kld_number_write_double(char *to, double value) {
    return (size_t)snprintf(to, KLD_NUMBER_TEXT_MAX, "%.17g", value);
}
