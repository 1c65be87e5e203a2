/* test_copy.c - copies past the caches, from anywhere to anywhere, of any size. */
#include "tests/unit/unit.h"

#include <string.h>

#include "proto/copy.h"

START_TEST(copies_what_it_is_given_and_no_more) {
    enum { ROOM = 512 };
    static unsigned char from[ROOM], to[ROOM], want[ROOM];
    for (size_t i = 0; i < ROOM; i++)
        from[i] = (unsigned char)(1 + i % 251);
    for (size_t bytes = 0; bytes <= 300; bytes++)
        for (size_t at = 0; at < 130; at += 13) {
            size_t source = (at * 7 + bytes) % 200;
            memset(to, 0, sizeof to);
            memset(want, 0, sizeof want);
            memcpy(want + at, from + source, bytes);
            kld_copy_past_caches(to + at, from + source, bytes);
            ck_assert_int_eq(memcmp(to, want, sizeof to), 0);
        }
}
END_TEST

UNIT_MAIN("proto/copy", copies_what_it_is_given_and_no_more)
