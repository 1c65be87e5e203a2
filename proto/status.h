/* status.h - the one list of outcomes: code, number on the wire, HTTP status, text.
 *
 * Every function that can fail returns enum kld_status; KLD_OK is 0. A function that detects an
 * error describes it in a struct kld_error (what was wrong, what was expected) and returns it; it
 * does not log. Texts never hold a path, a pointer, a key or another client's name: they travel to
 * clients. Pure; any thread. */
#ifndef KLD_PROTO_STATUS_H
#define KLD_PROTO_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* part of libkld's interface */

/* X(NAME, name, number on the wire, HTTP status, text). Numbers are part of the protocol: never
 * reuse one. */
#define KLD_STATUS_MAP(X)                                                                          \
    X(OK, ok, 0, 200, "ok")                                                                        \
    X(INVALID, invalid, 1, 400, "invalid request")                                                 \
    X(UNAUTHENTICATED, unauthenticated, 2, 401, "authentication required")                         \
    X(FORBIDDEN, forbidden, 3, 403, "not allowed")                                                 \
    X(NOT_FOUND, not_found, 4, 404, "no such thing")                                               \
    X(METHOD, method, 5, 405, "method not allowed")                                                \
    X(DEADLINE, deadline, 6, 408, "deadline passed")                                               \
    X(EXISTS, exists, 7, 409, "already exists")                                                    \
    X(TOO_LARGE, too_large, 8, 413, "over a limit")                                                \
    X(MEDIA, media, 9, 415, "unsupported encoding")                                                \
    X(THROTTLED, throttled, 10, 429, "too many requests of this client")                           \
    X(INTERNAL, internal, 11, 500, "internal error")                                               \
    X(UNIMPLEMENTED, unimplemented, 12, 501, "not supported by this server")                       \
    X(BUSY, busy, 13, 503, "busy, try again")                                                      \
    X(UNAVAILABLE, unavailable, 14, 503, "not available, try again")                               \
    X(DEVICE_LOST, device_lost, 15, 503, "the device failed while the request was in flight")      \
    X(NO_MEMORY, no_memory, 16, 503, "out of memory")                                              \
    X(CANCELLED, cancelled, 17, 503, "cancelled")                                                  \
    X(VERSION, version, 18, 400, "protocol version not supported")                                 \
    X(GONE, gone, 19, 410, "its owner took it back")

enum kld_status {
#define X(NAME, name, number, http, text) KLD_##NAME = number,
    KLD_STATUS_MAP(X)
#undef X
};

#define KLD_ERROR_TEXT_MAX 256 /* bytes, the terminating NUL included */

struct kld_error {
    enum kld_status status;
    char text[KLD_ERROR_TEXT_MAX]; /* NUL-terminated UTF-8, "" while status is KLD_OK */
};

/* The lower-case name ("invalid"), the general text, the HTTP status. An unknown number gives
 * "unknown", "unknown status", 500. */
const char *kld_status_name(enum kld_status status);
const char *kld_status_text(enum kld_status status);
int kld_status_http(enum kld_status status);
int kld_status_known(unsigned number); /* 1 if a KLD_STATUS_MAP entry has this number */

/* Writes status and the formatted text (cut at a UTF-8 boundary to fit) and returns status, so that
 * callers can `return kld_error_set(err, KLD_INVALID, "...")`. err may be NULL. */
enum kld_status kld_error_set(struct kld_error *err, enum kld_status status, const char *format,
                              ...) __attribute__((format(printf, 3, 4)));
#ifdef __clang_analyzer__ /* which cannot see that what it returns is not KLD_OK */
#define kld_error_set(err, status, ...) ((kld_error_set)(err, status, __VA_ARGS__), (status))
#endif

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
