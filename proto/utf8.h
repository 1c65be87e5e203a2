/* utf8.h - where text is text. Pure; any thread. */
#ifndef KLD_PROTO_UTF8_H
#define KLD_PROTO_UTF8_H

#include <stddef.h>

/* Length of the UTF-8 sequence that `text` begins with, which has `bytes`: 1 for ASCII, 0 if it is
 * none: in its shortest form, no surrogate, at most U+10FFFF (RFC 3629). */
size_t kld_utf8_sequence(const char *text, size_t bytes);
/* Drops a sequence that the end of text[0 .. bytes-1] cut in two; a NUL is behind that. */
void kld_utf8_trim(char *text, size_t bytes);

#endif
