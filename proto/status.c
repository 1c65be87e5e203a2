/* status.c - texts and HTTP codes of enum kld_status, and the one way to describe an error.
 * Logs nothing, allocates nothing; any thread. */
#include "proto/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/utf8.h"

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
        kld_utf8_trim(err->text, sizeof err->text - 1);
    err->status = status;
    return status;
}
