/* utf8.c - see utf8.h. */
#include "proto/utf8.h"

#include <stdint.h>

size_t kld_utf8_sequence(const char *text, size_t bytes) {
    const unsigned char *s = (const unsigned char *)text;
    size_t length;
    uint32_t code, least;
    if (bytes == 0)
        return 0;
    if (s[0] < 0x80)
        return 1;
    if (s[0] >= 0xc2 && s[0] <= 0xdf)
        length = 2, code = s[0] & 0x1fu, least = 0x80;
    else if ((s[0] & 0xf0) == 0xe0)
        length = 3, code = s[0] & 0x0fu, least = 0x800;
    else if (s[0] >= 0xf0 && s[0] <= 0xf4)
        length = 4, code = s[0] & 0x07u, least = 0x10000;
    else
        return 0;
    if (bytes < length)
        return 0;
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (s[i] & 0x3fu);
    }
    return code < least || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff) ? 0 : length;
}

void kld_utf8_trim(char *text, size_t bytes) {
    size_t start = bytes;
    while (start > 0 && bytes - start < 4 && ((unsigned char)text[start - 1] & 0xC0) == 0x80)
        start--;
    if (start == 0)
        return;
    unsigned char lead = (unsigned char)text[start - 1];
    size_t want = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    if (want > 1 && bytes - (start - 1) < want)
        text[start - 1] = '\0';
}
