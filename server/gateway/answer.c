/* answer.c - replies that are a text: compressed for who takes that, errors as JSON (http.h). Knows
 * no route. The exchange's loop thread. */
#include <stdlib.h>
#include <string.h>

#include "proto/oip.h"
#include "server/gateway/compress.h"
#include "server/gateway/http.h"
#include "server/gateway/last_words.h"
#include "server/gateway/recent.h"

enum kld_coding kld_exchange_coding(const struct kld_exchange *exchange) {
    return kld_coding_choose(kld_exchange_header(exchange, MHD_HTTP_HEADER_ACCEPT_ENCODING));
}

void kld_exchange_add_header(struct MHD_Response **response, const char *name, const char *value) {
    if (!*response || MHD_add_response_header(*response, name, value) == MHD_YES)
        return;
    MHD_destroy_response(*response);
    *response = NULL;
}

void kld_exchange_say_of_now(const struct kld_exchange *exchange, struct MHD_Response **response) {
    if (strcmp(exchange->method, MHD_HTTP_METHOD_GET) == 0 ||
        strcmp(exchange->method, MHD_HTTP_METHOD_HEAD) == 0)
        kld_exchange_add_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
}

void kld_exchange_say_packed(struct MHD_Response **response, enum kld_coding coding) {
    kld_exchange_add_header(response, MHD_HTTP_HEADER_CONTENT_ENCODING, kld_coding_name(coding));
    kld_exchange_add_header(response, MHD_HTTP_HEADER_VARY, MHD_HTTP_HEADER_ACCEPT_ENCODING);
}

struct MHD_Response *kld_exchange_spare(void) {
    static char text[] = "{\"error\":\"out of memory\"}";
    struct MHD_Response *response =
        MHD_create_response_from_buffer(sizeof text - 1, text, MHD_RESPMEM_PERSISTENT);
    kld_exchange_add_header(&response, MHD_HTTP_HEADER_CONTENT_TYPE, "application/json");
    kld_exchange_add_header(&response, "KLD-Status", kld_status_name(KLD_NO_MEMORY));
    kld_exchange_add_header(&response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
    kld_exchange_add_header(&response, MHD_HTTP_HEADER_CONNECTION, "close");
    return response;
}

/* NULL: no memory, or not worth it. */
static struct MHD_Response *pack(enum kld_coding coding, const char *text, size_t bytes,
                                 size_t *ret_bytes) {
    void *packed = coding == KLD_CODING_NONE ? NULL : malloc(bytes);
    *ret_bytes = packed ? kld_compress(coding, text, bytes, packed) : 0;
    struct MHD_Response *response =
        *ret_bytes ? MHD_create_response_from_buffer(*ret_bytes, packed, MHD_RESPMEM_MUST_FREE)
                   : NULL;
    if (response)
        kld_exchange_say_packed(&response, coding); /* else it frees what it was given */
    else
        free(packed);
    return response;
}

/* For browsers and Prometheus. JSON of a kilobyte or two is not worth it, and tritonclient's
 * asyncio (2.73) accepts gzip with every request, but undoes it of inference alone. */
static bool is_packed_if_asked(const char *type, size_t bytes) {
    return bytes >= KLD_COMPRESS_BYTES_MIN && strcmp(type, "application/json") != 0;
}

static void count_sent(const struct kld_exchange *exchange, size_t bytes) {
    if (strcmp(exchange->method, MHD_HTTP_METHOD_HEAD) != 0)
        kld_stats_add(exchange->gateway->stats, KLD_STAT_http_sent_bytes_total, (int64_t)bytes);
}

void kld_exchange_reply_text(struct kld_exchange *exchange, unsigned http_status, const char *type,
                             const char *text, size_t bytes) {
    enum kld_coding coding =
        is_packed_if_asked(type, bytes) ? kld_exchange_coding(exchange) : KLD_CODING_NONE;
    size_t packed_bytes = 0;
    struct MHD_Response *response = pack(coding, text, bytes, &packed_bytes);
    if (response)
        bytes = packed_bytes;
    else
        response =
            MHD_create_response_from_buffer(bytes, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
    if (bytes)
        kld_exchange_add_header(&response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    kld_exchange_say_of_now(exchange, &response);
    if (response)
        count_sent(exchange, bytes);
    kld_exchange_reply(exchange, http_status, response);
}

/* Who may not ask, or has too much in flight; the rest is counted where it is seen. */
static void count_rejection(struct kld_stats *stats, enum kld_status status) {
    if (status == KLD_UNAUTHENTICATED)
        kld_stats_rejected(stats, KLD_REJECT_http_unauthenticated);
    else if (status == KLD_FORBIDDEN)
        kld_stats_rejected(stats, KLD_REJECT_http_forbidden);
    else if (status == KLD_THROTTLED)
        kld_stats_rejected(stats, KLD_REJECT_http_token_limit);
}

static void reply_error(struct kld_exchange *exchange, const struct kld_error *error,
                        const char *methods) {
    char buffer[KLD_ERROR_TEXT_MAX * 6 + 16];
    struct kld_oip_text text = {.data = buffer, .capacity = sizeof buffer};
    unsigned http_status = (unsigned)kld_status_http(error->status);
    if (!exchange->replied) {
        kld_recent_error(exchange->gateway->common->recent, uv_hrtime(), error);
        count_rejection(exchange->gateway->stats, error->status);
    }
    kld_oip_append_error(&text, error->text[0] ? error->text : kld_status_text(error->status));
    struct MHD_Response *response =
        MHD_create_response_from_buffer(text.length, buffer, MHD_RESPMEM_MUST_COPY);
    kld_exchange_add_header(&response, MHD_HTTP_HEADER_CONTENT_TYPE, "application/json");
    kld_exchange_add_header(&response, "KLD-Status", kld_status_name(error->status));
    if (http_status == 503 || http_status == 429)
        kld_exchange_add_header(&response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
    if (http_status == 401)
        kld_exchange_add_header(&response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    if (methods)
        kld_exchange_add_header(&response, MHD_HTTP_HEADER_ALLOW, methods);
    kld_exchange_say_of_now(exchange, &response);
    if (response)
        count_sent(exchange, text.length);
    kld_last_words_keep(exchange, http_status, response, buffer, text.length);
    kld_exchange_reply(exchange, http_status, response);
}

void kld_exchange_reply_error(struct kld_exchange *exchange, const struct kld_error *error) {
    reply_error(exchange, error, NULL);
}

void kld_exchange_reply_method(struct kld_exchange *exchange, const char *methods) {
    struct kld_error error;
    kld_error_set(&error, KLD_METHOD, "this path takes %s", methods);
    reply_error(exchange, &error, methods);
}
