/* status.c - texts and HTTP codes of enum kld_status, and the one way to describe an error.
 * Logs nothing, allocates nothing; any thread. */
#include "proto/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *kld_status_name(enum kld_status status) {
    switch (status) {
#define X(NAME, name, number, http, text)                                                          \
    case KLD_##NAME: return #name;
        KLD_STATUS_MAP(X)
#undef X
    }
    return "unknown";
}

const char *kld_status_text(enum kld_status status) {
    switch (status) {
#define X(NAME, name, number, http, text)                                                          \
    case KLD_##NAME: return text;
        KLD_STATUS_MAP(X)
#undef X
    }
    return "unknown status";
}

int kld_status_http(enum kld_status status) {
    switch (status) {
#define X(NAME, name, number, http, text)                                                          \
    case KLD_##NAME: return http;
        KLD_STATUS_MAP(X)
#undef X
    }
    return 500;
}

int kld_status_known(unsigned number) {
    switch (number) {
#define X(NAME, name, number, http, text)                                                          \
    case number: return 1;
        KLD_STATUS_MAP(X)
#undef X
    default: return 0;
    }
}

/* Drops a UTF-8 sequence that the end of the buffer cut in two. */
static void trim_partial_utf8(char *text, size_t length) {
    size_t start = length;
    while (start > 0 && length - start < 4 && ((unsigned char)text[start - 1] & 0xC0) == 0x80)
        start--;
    if (start == 0)
        return;
    unsigned char lead = (unsigned char)text[start - 1];
    size_t want = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    if (want > 1 && length - (start - 1) < want)
        text[start - 1] = '\0';
}

enum kld_status(kld_error_set)(struct kld_error *err, enum kld_status status, const char *format,
                               ...) {
    if (!err)
        return status;
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    if (wanted < 0)
        err->text[0] = '\0';
    else if ((size_t)wanted >= sizeof err->text)
        trim_partial_utf8(err->text, sizeof err->text - 1);
    err->status = status;
    return status;
}
