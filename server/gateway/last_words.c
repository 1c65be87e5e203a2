/* last_words.c - writes a reply where MHD would write none (last_words.h). It neither decides when
 * nor ends the connection. Loop thread only. */
#include "server/gateway/last_words.h"

#include <gnutls/gnutls.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define HEAD_BYTES_MAX 1024 /* the status line and few headers, all of which are ours */

struct head {
    char text[HEAD_BYTES_MAX];
    size_t length; /* HEAD_BYTES_MAX: it did not fit */
};

static void add_line(struct head *head, const char *name, const char *value) {
    size_t left = sizeof head->text - head->length;
    int length = snprintf(head->text + head->length, left, "%s%s\r\n", name, value);
    head->length += length >= 0 && (size_t)length < left ? (size_t)length : left;
}

static enum MHD_Result add_header(void *user, enum MHD_ValueKind kind, const char *name,
                                  const char *value) {
    char begin[64];
    (void)kind;
    snprintf(begin, sizeof begin, "%s: ", name);
    add_line(user, begin, value);
    return MHD_YES;
}

static void add_date(struct head *head) {
    char date[64];
    struct tm parts;
    time_t now = time(NULL);
    if (gmtime_r(&now, &parts) && strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", &parts))
        add_line(head, "Date: ", date);
}

void kld_last_words_keep(struct kld_exchange *exchange, unsigned http_status,
                         struct MHD_Response *response, const char *body, size_t body_bytes) {
    struct head head = {.length = 0};
    char number[64];
    if (!response || exchange->replied || exchange->finished || !exchange->has_body ||
        exchange->has_length)
        return;
    snprintf(number, sizeof number, "%u ", http_status);
    add_line(&head, "HTTP/1.1 ", number);
    head.length -= 2;
    add_line(&head, "", MHD_get_reason_phrase_for(http_status));
    add_date(&head);
    MHD_get_response_headers(response, add_header, &head);
    snprintf(number, sizeof number, "%zu", body_bytes);
    add_line(&head, "Content-Length: ", number);
    add_line(&head, "Connection: close\r\n", "");
    if (head.length == sizeof head.text)
        return;
    if (strcmp(exchange->method, MHD_HTTP_METHOD_HEAD) == 0)
        body_bytes = 0;
    char *words = malloc(head.length + body_bytes);
    if (!words)
        return;
    memcpy(words, head.text, head.length);
    memcpy(words + head.length, body, body_bytes);
    exchange->last_words = words;
    exchange->last_words_bytes = head.length + body_bytes;
}

void kld_last_words_say(struct kld_exchange *exchange) {
    bool tls = exchange->gateway->tls != NULL;
    const union MHD_ConnectionInfo *info =
        exchange->last_words
            ? MHD_get_connection_info(exchange->connection, tls ? MHD_CONNECTION_INFO_GNUTLS_SESSION
                                                                : MHD_CONNECTION_INFO_CONNECTION_FD)
            : NULL;
    if (!info)
        return;
    const char *words = exchange->last_words;
    size_t bytes = exchange->last_words_bytes;
    ssize_t sent = tls ? gnutls_record_send((gnutls_session_t)info->tls_session, words, bytes)
                       : send(info->connect_fd, words, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == (ssize_t)bytes)
        kld_stats_http_reply(exchange->gateway->stats, exchange->http_status);
}
