/* test_compress.c - what a client accepts, and that what is compressed comes back. */
#include "server/gateway/compress.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "tests/unit/unit.h"

START_TEST(the_best_liked_is_chosen) {
    const struct {
        const char *accept;
        enum kld_coding coding;
    } cases[] = {{NULL, KLD_CODING_NONE},
                 {"", KLD_CODING_NONE},
                 {"identity", KLD_CODING_NONE},
                 {"br, zstd", KLD_CODING_NONE},
                 {"gzip", KLD_CODING_GZIP},
                 {"GZIP", KLD_CODING_GZIP},
                 {"gzip, deflate, br", KLD_CODING_GZIP},
                 {"deflate", KLD_CODING_DEFLATE},
                 {"deflate,gzip;q=0.5", KLD_CODING_DEFLATE},
                 {"gzip;q=0", KLD_CODING_NONE},
                 {"gzip; q=0.000, *", KLD_CODING_DEFLATE},
                 {"*", KLD_CODING_GZIP},
                 {"*;q=0", KLD_CODING_NONE},
                 {"identity;q=1, *;q=0", KLD_CODING_NONE},
                 {"gzip;q=9", KLD_CODING_NONE},
                 {"gzip;x=1", KLD_CODING_NONE},
                 {"gzipped", KLD_CODING_NONE},
                 {" ,,; , gzip", KLD_CODING_GZIP},
                 {"gzip;", KLD_CODING_NONE}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (kld_coding_choose(cases[i].accept) != cases[i].coding)
            ck_abort_msg("case %zu: '%s'", i, cases[i].accept);
}
END_TEST

START_TEST(it_comes_back) {
    static char text[100000], back[sizeof text], packed[sizeof text];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)('0' + i * i % 7);
    for (int coding = KLD_CODING_GZIP; coding <= KLD_CODING_DEFLATE; coding++) {
        size_t bytes = kld_compress((enum kld_coding)coding, text, sizeof text, packed);
        ck_assert_uint_gt(bytes, 0);
        ck_assert_uint_lt(bytes, sizeof text / 2);
        z_stream stream = {.next_in = (Bytef *)packed, .avail_in = (uInt)bytes};
        stream.next_out = (Bytef *)back;
        stream.avail_out = sizeof back;
        ck_assert_int_eq(inflateInit2(&stream, coding == KLD_CODING_GZIP ? 15 + 16 : 15), Z_OK);
        ck_assert_int_eq(inflate(&stream, Z_FINISH), Z_STREAM_END);
        inflateEnd(&stream);
        ck_assert_mem_eq(back, text, sizeof text);
    }
}
END_TEST

START_TEST(what_does_not_get_smaller_is_left) {
    char noise[2048], packed[sizeof noise];
    unsigned state = 1;
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (char)((state = state * 1664525u + 1013904223u) >> 24);
    ck_assert_uint_eq(kld_compress(KLD_CODING_GZIP, noise, sizeof noise, packed), 0);
    ck_assert_uint_eq(kld_compress(KLD_CODING_NONE, noise, sizeof noise, packed), 0);
}
END_TEST

UNIT_MAIN("server/gateway/compress", the_best_liked_is_chosen, it_comes_back,
          what_does_not_get_smaller_is_left)
