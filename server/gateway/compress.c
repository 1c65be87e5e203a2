/* compress.c - what a client accepts, and zlib in one go (compress.h). Any thread. */
#include "server/gateway/compress.h"

#include <limits.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>
#include <zlib.h>

#define LEVEL 1 /* numbers gain little from more */

/* The weight of one item of the list: "gzip", "gzip;q=0.5"; in thousandths. */
static int weight_of(const char *item, size_t bytes) {
    const char *end = item + bytes, *at = memchr(item, ';', bytes);
    int value = 0, scale = 1000;
    if (!at)
        return 1000;
    at++;
    while (at < end && (*at == ' ' || *at == '\t'))
        at++;
    if (end - at < 3 || (*at != 'q' && *at != 'Q') || at[1] != '=')
        return 0;
    at += 2;
    if (*at != '0' && *at != '1')
        return 0;
    value = (*at++ - '0') * 1000;
    if (at < end && *at == '.')
        for (at++; at < end && *at >= '0' && *at <= '9' && scale > 1; at++) {
            scale /= 10;
            value += (*at - '0') * scale;
        }
    return value > 1000 ? 1000 : value;
}

static bool is_name(const char *item, size_t bytes, const char *name) {
    size_t length = strcspn(item, ";, \t");
    return length <= bytes && length == strlen(name) && strncasecmp(item, name, length) == 0;
}

enum kld_coding kld_coding_choose(const char *accept) {
    int gzip = -1, deflate = -1, any = -1;
    while (accept && *accept) {
        accept += strspn(accept, ", \t");
        size_t bytes = strcspn(accept, ",");
        int weight = weight_of(accept, bytes);
        if (is_name(accept, bytes, "gzip") || is_name(accept, bytes, "x-gzip"))
            gzip = weight;
        else if (is_name(accept, bytes, "deflate"))
            deflate = weight;
        else if (is_name(accept, bytes, "*"))
            any = weight;
        accept += bytes;
    }
    gzip = gzip < 0 ? any : gzip;
    deflate = deflate < 0 ? any : deflate;
    if (gzip <= 0 && deflate <= 0)
        return KLD_CODING_NONE;
    return gzip >= deflate ? KLD_CODING_GZIP : KLD_CODING_DEFLATE;
}

const char *kld_coding_name(enum kld_coding coding) {
    return coding == KLD_CODING_GZIP      ? "gzip"
           : coding == KLD_CODING_DEFLATE ? "deflate"
                                          : "identity";
}

size_t kld_compress(enum kld_coding coding, const void *data, size_t bytes, void *to) {
    z_stream stream = {.next_in = (Bytef *)(uintptr_t)data, .avail_in = (uInt)bytes};
    int window = coding == KLD_CODING_GZIP ? 15 + 16 : 15;
    if (coding == KLD_CODING_NONE || bytes > INT_MAX ||
        deflateInit2(&stream, LEVEL, Z_DEFLATED, window, 8, Z_DEFAULT_STRATEGY) != Z_OK)
        return 0;
    stream.next_out = to;
    stream.avail_out = (uInt)bytes;
    size_t packed = deflate(&stream, Z_FINISH) == Z_STREAM_END ? stream.total_out : 0;
    deflateEnd(&stream);
    return packed;
}
