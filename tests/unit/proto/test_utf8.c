/* test_utf8.c - all pairs of first bytes, and ends of sequences, against a table of ranges, as
 * RFC 3629 has it. */
#include "proto/utf8.h"

#include <stdbool.h>
#include <string.h>

#include "tests/unit/unit.h"

/* RFC 3629, section 4: what each byte of a sequence may be. */
static const struct {
    size_t length;
    unsigned char first[2], second[2];
} forms[] = {
    {1, {0x00, 0x7f}, {0, 0}},       {2, {0xc2, 0xdf}, {0x80, 0xbf}},
    {3, {0xe0, 0xe0}, {0xa0, 0xbf}}, {3, {0xe1, 0xec}, {0x80, 0xbf}},
    {3, {0xed, 0xed}, {0x80, 0x9f}}, {3, {0xee, 0xef}, {0x80, 0xbf}},
    {4, {0xf0, 0xf0}, {0x90, 0xbf}}, {4, {0xf1, 0xf3}, {0x80, 0xbf}},
    {4, {0xf4, 0xf4}, {0x80, 0x8f}},
};

static bool within(unsigned char c, const unsigned char range[2]) {
    return c >= range[0] && c <= range[1];
}

static size_t expected(const unsigned char *s, size_t bytes) {
    const unsigned char tail[2] = {0x80, 0xbf};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        if (!bytes || !within(s[0], forms[i].first))
            continue;
        if (bytes < forms[i].length || (forms[i].length > 1 && !within(s[1], forms[i].second)))
            return 0;
        for (size_t k = 2; k < forms[i].length; k++)
            if (!within(s[k], tail))
                return 0;
        return forms[i].length;
    }
    return 0;
}

static void compare(const unsigned char *s, size_t bytes) {
    size_t got = kld_utf8_sequence((const char *)s, bytes), want = expected(s, bytes);
    ck_assert_msg(got == want, "%02x %02x %02x %02x, %zu bytes: %zu, expected %zu", s[0], s[1],
                  s[2], s[3], bytes, got, want);
}

START_TEST(every_sequence) {
    const unsigned char last[] = {0x00, 0x7f, 0x80, 0xbf, 0xc0, 0xff};
    for (unsigned two = 0; two < 65536; two++)
        for (size_t i = 0; i < sizeof last; i++)
            for (size_t k = 0; k < sizeof last; k++) {
                unsigned char s[4] = {(unsigned char)(two >> 8), (unsigned char)two, last[i],
                                      last[k]};
                compare(s, 4);
            }
}
END_TEST

START_TEST(what_the_end_cuts_is_none) {
    for (unsigned first = 0; first < 256; first++) {
        unsigned char s[4] = {(unsigned char)first, 0x90, 0x80, 0x80};
        for (size_t bytes = 0; bytes <= 4; bytes++)
            compare(s, bytes);
    }
}
END_TEST

UNIT_MAIN("proto/utf8", every_sequence, what_the_end_cuts_is_none)
