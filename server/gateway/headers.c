/* headers.c - looks at the headers of a request, and at what MHD has made of the bytes between them
 * (headers.h). Reads no body, answers nothing. Loop thread. */
#include "server/gateway/headers.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "server/gateway/watch.h"

const char *kld_exchange_find_header(const struct kld_exchange *exchange, const char *name) {
    return MHD_lookup_connection_value(exchange->connection, MHD_HEADER_KIND, name);
}

struct headers_of_name {
    const char *name;
    unsigned count;
};

static enum MHD_Result count_header(void *user, enum MHD_ValueKind kind, const char *name,
                                    const char *value) {
    struct headers_of_name *headers = user;
    headers->count += strcasecmp(name, headers->name) == 0;
    return MHD_YES;
}

const char *kld_exchange_header_alone(const struct kld_exchange *exchange, const char *name) {
    const char *value = kld_exchange_header(exchange, name);
    struct headers_of_name headers = {.name = name};
    if (value)
        MHD_get_connection_values(exchange->connection, MHD_HEADER_KIND, count_header, &headers);
    return headers.count == 1 ? value : NULL;
}

struct found {
    const char *length, *coding, *encoding, *host;
    unsigned encodings, hosts, authorizations;
    uint64_t name_sizes;
    uintptr_t end;     /* of the version, then of the value that was looked at last */
    size_t line_bytes; /* that end a line: 2 as CR LF, 1 as a lone LF; 0: none was seen yet */
    bool misspelt, split, contradicts, hides;
};

/* MHD before 1.0 puts NULs where a line, and the name of a header, ends, and then takes any line
 * that begins with one for the empty line behind the head: also one that came with it, or with a
 * colon. What is behind is the body, or the next request, to MHD, and headers to whoever forwarded
 * it. Every other NUL ends a text early. It tells of neither, but no text is moved (is_plain()
 * finds the one that is), so that the bytes between two of them say what was there: the end of a
 * line, which is the same for all of a head, and nothing else. Newer ones refuse a NUL and a line
 * without a name by themselves, and may have blanks there that they cut off; they take lone LFs
 * among others for ends of lines, and join lines that are one header's. */
static bool leaves_texts_in_place(void) { return strncmp(MHD_get_version(), "0.", 2) == 0; }

/* From the end of what was looked at last so many lines end, up to there. */
static void end_lines(struct found *found, uintptr_t to, size_t lines) {
    size_t bytes = to - found->end;
    if (!found->line_bytes)
        found->line_bytes = bytes / lines;
    found->hides = found->hides || bytes != found->line_bytes * lines || found->line_bytes < 1 ||
                   found->line_bytes > 2;
}

static struct kld_watched *watched_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

enum kld_status kld_headers_check_library(const char *version, struct kld_error *err) {
    unsigned major = 0, minor = 0, patch = 0;
    if (sscanf(version, "%u.%u.%u", &major, &minor, &patch) >= 2 &&
        (major > 0 || minor > 9 || (minor == 9 && patch >= 74)))
        return KLD_OK;
    return kld_error_set(err, KLD_UNIMPLEMENTED,
                         "libmicrohttpd %.20s does not tell how long a request's head is; expected "
                         "0.9.74 or newer",
                         version);
}

/* From the first byte of the method to the last of the empty line. */
static size_t head_bytes(const struct kld_exchange *exchange) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(exchange->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    return info ? info->header_size : 0;
}

void *kld_headers_note_uri(void *user, const char *uri, struct MHD_Connection *connection) {
    (void)user;
    struct kld_watched *watched = watched_of(connection);
    if (watched)
        watched->uri_bytes = uri ? strlen(uri) : 0;
    return NULL;
}

/* Between the method and the path are blanks, which MHD makes one NUL and the rest of; between the
 * path and the version one. */
static bool is_whole(const struct kld_exchange *exchange, const struct kld_request_line *line) {
    const struct kld_watched *watched = watched_of(exchange->connection);
    for (const char *c = line->method + strlen(line->method) + 1; c < line->url; c++)
        if (*c != ' ')
            return false;
    return watched && line->url + watched->uri_bytes + 1 == line->version;
}

/* As it came, in one line, with no blank in its name. To a line that begins with a blank MHD
 * (0.9.75) makes a longer name of the line before, in new memory, and a blank before the colon it
 * takes for a part of the name: "Content-Length : 5" would be a header that says nothing here and
 * five bytes to whoever forwarded it. Where nothing was done to it, the value lies behind the name,
 * the colon and blanks. */
static bool is_plain(const char *name, size_t size, const char *value) {
    uintptr_t end = (uintptr_t)name + size, at = (uintptr_t)value;
    if (!size || at <= end || at - end > KLD_HTTP_HEAD_BYTES_MAX)
        return false;
    for (size_t i = 0; i < size; i++)
        if (name[i] <= ' ' || name[i] > '~')
            return false;
    for (const char *c = name + size + 1; c < value; c++)
        if (*c != ' ' && *c != '\t')
            return false;
    return true;
}

/* Blanks behind a value are no part of it (RFC 9112, 5.1), but MHD (0.9.75) leaves them there. It
 * is asked for values again, and the text is the connection's own copy. */
static void trim(const char *value, size_t size) {
    char *text = (char *)(uintptr_t)value;
    while (size && (text[size - 1] == ' ' || text[size - 1] == '\t'))
        text[--size] = '\0';
}

static bool is_named(const char *name, size_t size, const char *wanted, size_t wanted_size) {
    return size == wanted_size && strncasecmp(name, wanted, size) == 0;
}
#define IS(wanted) is_named(name, size, wanted, sizeof(wanted) - 1)

static enum MHD_Result look_at(void *user, enum MHD_ValueKind kind, const char *name, size_t size,
                               const char *value, size_t value_size) {
    struct found *found = user;
    const char **known = NULL;
    if (!value || !is_plain(name, size, value)) {
        found->misspelt = true;
        return MHD_NO;
    }
    if (found->end) {
        end_lines(found, (uintptr_t)name, 1);
        found->end = (uintptr_t)value + value_size;
    }
    found->name_sizes |= UINT64_C(1) << size % 64;
    if (memchr(value, '\r', value_size)) { /* a lone one ends a line to some */
        found->split = true;
        return MHD_NO;
    }
    if (IS(MHD_HTTP_HEADER_CONTENT_LENGTH))
        known = &found->length;
    else if (IS(MHD_HTTP_HEADER_TRANSFER_ENCODING)) {
        found->contradicts = found->contradicts || found->coding;
        known = &found->coding;
    } else if (IS(MHD_HTTP_HEADER_CONTENT_ENCODING)) {
        found->encoding = value;
        found->encodings++;
    } else if (IS(MHD_HTTP_HEADER_HOST)) {
        found->host = value;
        found->hosts++;
    } else if (IS(MHD_HTTP_HEADER_AUTHORIZATION)) {
        found->authorizations++;
    }
    if (!known) {
        trim(value, value_size); /* not of those that frame the body: MHD has read them by now */
        return MHD_YES;
    }
    found->contradicts = found->contradicts || (*known && strcmp(*known, value) != 0);
    *known = value;
    return MHD_YES;
}

/* MHD picks one of two lengths and waits for ever behind a coding that it does not know. A proxy in
 * front of it may pick the other: then one request could hide a second. */
enum kld_status kld_headers_check(struct kld_exchange *exchange,
                                  const struct kld_request_line *line, struct kld_error *err) {
    struct found found = {.length = NULL};
    const char *version = line->version;
    if (leaves_texts_in_place()) {
        found.end = (uintptr_t)version + strlen(version);
        found.hides = !is_whole(exchange, line);
    }
    MHD_get_connection_values_n(exchange->connection, MHD_HEADER_KIND, look_at, &found);
    if (found.end && !found.split)
        end_lines(&found, (uintptr_t)line->method + head_bytes(exchange), 2);
    if (found.misspelt)
        return kld_error_set(err, KLD_INVALID,
                             "a header has a blank in its name, or goes on in a second line");
    if (found.hides)
        return kld_error_set(err, KLD_INVALID,
                             "the head has a NUL, a line without a name, or lines that end in "
                             "different ways; each is 'name: value' and ends with CR LF");
    if (found.split)
        return kld_error_set(err, KLD_INVALID, "a header has a lone CR in its value");
    if (found.coding && strcmp(version, MHD_HTTP_VERSION_1_0) == 0)
        return kld_error_set(err, KLD_INVALID, "HTTP/1.0 has no Transfer-Encoding");
    if (found.contradicts || (found.length && found.coding))
        return kld_error_set(err, KLD_INVALID,
                             "the headers contradict each other about the length of the body");
    if (found.hosts > 1 || (!found.hosts && strcmp(version, MHD_HTTP_VERSION_1_0) != 0))
        return kld_error_set(err, KLD_INVALID, "a request has one header Host");
    if (found.authorizations > 1) /* nor is it ours to say which of two callers asks */
        return kld_error_set(err, KLD_INVALID, "a request has at most one header Authorization");
    if (found.coding && strcasecmp(found.coding, "chunked") != 0)
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "Transfer-Encoding '%.40s' is not supported; chunked is",
                             found.coding);
    exchange->name_sizes = found.name_sizes;
    exchange->host = found.host;
    exchange->encoded_twice = found.encodings > 1;
    exchange->encoded =
        found.encoding && *found.encoding && strcasecmp(found.encoding, "identity") != 0;
    return KLD_OK;
}

bool kld_headers_trailed(const struct kld_exchange *exchange) {
    return exchange->has_body && !exchange->has_length &&
           MHD_get_connection_values(exchange->connection, MHD_FOOTER_KIND, NULL, NULL) > 0;
}

void kld_headers_drop_idle_expectation(const struct kld_exchange *exchange) {
    const char *expect = kld_exchange_header(exchange, MHD_HTTP_HEADER_EXPECT);
    if (expect && *expect && !exchange->has_body)
        *(char *)(uintptr_t)expect = '-'; /* the text is the connection's own copy */
}
