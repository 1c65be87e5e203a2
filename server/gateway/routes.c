/* routes.c - one table of paths, and the replies that need no worker (routes.h).
 * A path is matched piece by piece; `*` stands for one piece that the handler looks at. Bodies of
 * these routes are small and collected in memory of fixed size. Loop thread only. */
#include "server/gateway/routes.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/oip.h"
#include "server/gateway/cuda_shm.h"
#include "server/gateway/hosts.h"
#include "server/gateway/infer.h"
#include "server/gateway/last_words.h"
#include "server/gateway/metrics.h"
#include "server/gateway/regions.h"
#include "server/gateway/shm.h"
#include "server/gateway/tensors.h"
#include "server/gateway/trace.h"
#include "server/gateway/upload.h"

#define SMALL_BODY_BYTES_MAX 4096 /* what the loop reads while others wait; none needs 2 KiB */
#define SMALL_BODY_TEXT "the body of this request has at most 4096 bytes"
#define PIECES_MAX 2        /* stars in a pattern */
#define PIECE_BYTES_MAX 512 /* as long as a path */

/* What the stars of a pattern stood for. */
struct pieces {
    char text[PIECES_MAX][PIECE_BYTES_MAX];
};

/* The state of an exchange on any route but infer. */
struct small_body {
    struct pieces pieces;
    size_t bytes;
    char data[SMALL_BODY_BYTES_MAX];
};

struct kld_route {
    const char *method; /* GET also serves HEAD */
    const char *pattern;
    void (*answer)(struct kld_exchange *exchange, const struct pieces *pieces, const char *body,
                   size_t bytes); /* NULL: infer, or, with PUT, an upload */
    bool model;                   /* the first star is a model's name, the second its version */
    enum kld_right right;
};

static void fail(struct kld_exchange *exchange, enum kld_status status, const char *what) {
    struct kld_error error;
    kld_error_set(&error, status, "%s", what);
    kld_exchange_reply_error(exchange, &error);
}

static void answer_json(struct kld_exchange *exchange, const struct kld_oip_text *text) {
    if (text->overflow)
        fail(exchange, KLD_INTERNAL, "the reply does not fit its buffer");
    else
        kld_exchange_reply_text(exchange, 200, "application/json", text->data, text->length);
}

#define TEXT(name, size)                                                                           \
    char name##_buffer[size];                                                                      \
    struct kld_oip_text name = {.data = name##_buffer, .capacity = sizeof name##_buffer}

static void live(struct kld_exchange *exchange, const struct pieces *pieces, const char *body,
                 size_t bytes) {
    kld_exchange_reply_text(exchange, 200, "", "", 0);
}

static void ready(struct kld_exchange *exchange, const struct pieces *pieces, const char *body,
                  size_t bytes) {
    const char *reason = kld_gateway_why_not_ready(exchange->gateway);
    if (reason)
        fail(exchange, KLD_UNAVAILABLE, reason);
    else
        kld_exchange_reply_text(exchange, 200, "", "", 0);
}

static void server_metadata(struct kld_exchange *exchange, const struct pieces *pieces,
                            const char *body, size_t bytes) {
    TEXT(text, 1024);
    kld_oip_append(&text,
                   "{\"name\":\"kld\",\"version\":\"" KLD_RELEASE "\",\"extensions\":["
                   "\"binary_tensor_data\",\"model_configuration\","
                   "\"statistics\",\"stored_tensors\"%s%s]",
                   exchange->gateway->config->shm_prefix[0] ? ",\"system_shared_memory\"" : "",
                   kld_cuda_shm_works(exchange->gateway) ? ",\"cuda_shared_memory\"" : "");
    kld_metrics_append_device(exchange->gateway->page, &text);
    kld_oip_append(&text, "}");
    answer_json(exchange, &text);
}

static void model_metadata(struct kld_exchange *exchange, const struct pieces *pieces,
                           const char *body, size_t bytes) {
    TEXT(text, 4096);
    kld_oip_append_metadata(&text);
    answer_json(exchange, &text);
}

static void model_config(struct kld_exchange *exchange, const struct pieces *pieces,
                         const char *body, size_t bytes) {
    TEXT(text, 4096);
    kld_oip_append_config(&text);
    answer_json(exchange, &text);
}

static void model_stats(struct kld_exchange *exchange, const struct pieces *pieces,
                        const char *body, size_t bytes) {
    TEXT(text, 4096);
    kld_metrics_append_model(&exchange->gateway->page->model, &text);
    answer_json(exchange, &text);
}

static void repository_index(struct kld_exchange *exchange, const struct pieces *pieces,
                             const char *body, size_t bytes) {
    struct kld_error error;
    bool only_ready;
    TEXT(text, 512);
    if (kld_oip_parse_index(body, bytes, &only_ready, &error)) {
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    kld_oip_append_index(&text, kld_gateway_why_not_ready(exchange->gateway), only_ready);
    answer_json(exchange, &text);
}

static void metrics(struct kld_exchange *exchange, const struct pieces *pieces, const char *body,
                    size_t bytes) {
    struct kld_oip_text text = {.data = malloc(KLD_METRICS_BYTES_MAX),
                                .capacity = KLD_METRICS_BYTES_MAX};
    if (text.data)
        kld_metrics_append(exchange->gateway->page, &text);
    if (!text.data)
        fail(exchange, KLD_NO_MEMORY, "out of memory");
    else if (text.overflow)
        fail(exchange, KLD_INTERNAL, "the metrics do not fit their buffer");
    else
        kld_exchange_reply_text(exchange, 200, "text/plain; version=0.0.4; charset=utf-8",
                                text.data, text.length);
    free(text.data);
}

static void page(struct kld_exchange *exchange, const struct pieces *pieces, const char *body,
                 size_t bytes) {
    TEXT(text, 16384);
    kld_page_append(exchange->gateway, exchange->host, &text);
    kld_exchange_reply_text(exchange, 200, "text/html; charset=utf-8", text.data, text.length);
}

/* ---- Shared memory ----------------------------------------------------------------------------*/

static void list_regions(struct kld_exchange *exchange, enum kld_registered_kind kind,
                         const char *name) {
    struct kld_oip_text text;
    struct kld_error error;
    if (kld_regions_list(exchange->gateway->regions, kind, exchange->caller, name, &text, &error)) {
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    answer_json(exchange, &text);
    free(text.data);
}

static void unregister(struct kld_exchange *exchange, enum kld_registered_kind kind,
                       const char *name) {
    kld_regions_unregister(exchange->gateway->regions, kind, exchange->caller, name,
                           &exchange->gateway->loop);
    kld_exchange_reply_text(exchange, 200, "", "", 0);
}

static void shm_status(struct kld_exchange *exchange, const struct pieces *pieces, const char *body,
                       size_t bytes) {
    list_regions(exchange, KLD_REGISTERED_SYSTEM, NULL);
}

static void shm_status_of(struct kld_exchange *exchange, const struct pieces *pieces,
                          const char *body, size_t bytes) {
    list_regions(exchange, KLD_REGISTERED_SYSTEM, pieces->text[0]);
}

static void shm_register(struct kld_exchange *exchange, const struct pieces *pieces,
                         const char *body, size_t bytes) {
    struct kld_oip_register wanted;
    struct kld_error error;
    if (kld_oip_parse_register(body, bytes, &wanted, &error) ||
        kld_shm_register(exchange->gateway->regions, exchange->gateway->config, exchange->caller,
                         pieces->text[0], &wanted, &error))
        kld_exchange_reply_error(exchange, &error);
    else
        kld_exchange_reply_text(exchange, 200, "", "", 0);
}

static void shm_unregister(struct kld_exchange *exchange, const struct pieces *pieces,
                           const char *body, size_t bytes) {
    unregister(exchange, KLD_REGISTERED_SYSTEM, NULL);
}

static void shm_unregister_one(struct kld_exchange *exchange, const struct pieces *pieces,
                               const char *body, size_t bytes) {
    unregister(exchange, KLD_REGISTERED_SYSTEM, pieces->text[0]);
}

static void cuda_status(struct kld_exchange *exchange, const struct pieces *pieces,
                        const char *body, size_t bytes) {
    list_regions(exchange, KLD_REGISTERED_CUDA, NULL);
}

static void cuda_status_of(struct kld_exchange *exchange, const struct pieces *pieces,
                           const char *body, size_t bytes) {
    list_regions(exchange, KLD_REGISTERED_CUDA, pieces->text[0]);
}

static void cuda_register(struct kld_exchange *exchange, const struct pieces *pieces,
                          const char *body, size_t bytes) {
    kld_cuda_shm_register(exchange, pieces->text[0], body, bytes);
}

static void cuda_unregister(struct kld_exchange *exchange, const struct pieces *pieces,
                            const char *body, size_t bytes) {
    unregister(exchange, KLD_REGISTERED_CUDA, NULL);
}

static void cuda_unregister_one(struct kld_exchange *exchange, const struct pieces *pieces,
                                const char *body, size_t bytes) {
    unregister(exchange, KLD_REGISTERED_CUDA, pieces->text[0]);
}

/* ---- Stored tensors ---------------------------------------------------------------------------*/

static void tensor_list(struct kld_exchange *exchange, const char *name) {
    struct kld_oip_text text;
    struct kld_error error;
    if (kld_tensors_list(exchange->gateway->tensors, exchange->caller, name, &text, &error)) {
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    answer_json(exchange, &text);
    free(text.data);
}

static void tensors_all(struct kld_exchange *exchange, const struct pieces *pieces,
                        const char *body, size_t bytes) {
    tensor_list(exchange, NULL);
}

static void tensors_one(struct kld_exchange *exchange, const struct pieces *pieces,
                        const char *body, size_t bytes) {
    tensor_list(exchange, pieces->text[0]);
}

static void tensor_delete(struct kld_exchange *exchange, const struct pieces *pieces,
                          const char *body, size_t bytes) {
    struct kld_trace trace;
    bool there = kld_tensors_remove(exchange->gateway->tensors, exchange->caller, pieces->text[0]);
    kld_trace_take(exchange, &trace);
    kld_tensor_log(exchange, &trace, "delete_tensor", there ? KLD_OK : KLD_NOT_FOUND, NULL, 0);
    if (there)
        kld_exchange_reply_text(exchange, 200, "", "", 0);
    else
        fail(exchange, KLD_NOT_FOUND, "no tensor of this name is stored");
}

/* ---- The table --------------------------------------------------------------------------------*/

#define MODEL(method, tail, answer, right)                                                         \
    {method, "/v2/models/*" tail, answer, true, KLD_RIGHT_##right}, {                              \
        method, "/v2/models/*/versions/*" tail, answer, true, KLD_RIGHT_##right                    \
    }
#define ROUTE(method, path, answer, right)                                                         \
    { method, path, answer, false, KLD_RIGHT_##right }
#define SHM(kind) "/v2/" kind "sharedmemory"

static const struct kld_route routes[] = {
    MODEL("POST", "/infer", NULL, INFER), /* first: most of what is asked for */
    ROUTE("GET", "/", page, METRICS),
    ROUTE("GET", "/metrics", metrics, METRICS),
    ROUTE("GET", "/v2", server_metadata, ANY),
    ROUTE("GET", "/v2/health/live", live, NONE),
    ROUTE("GET", "/v2/health/ready", ready, NONE),
    ROUTE("GET", "/v2/models/stats", model_stats, ANY),
    MODEL("GET", "", model_metadata, ANY),
    MODEL("GET", "/ready", ready, ANY),
    MODEL("GET", "/config", model_config, ANY),
    MODEL("GET", "/stats", model_stats, ANY),
    ROUTE("POST", "/v2/repository/index", repository_index, ANY),
    ROUTE("GET", "/v2/tensors", tensors_all, INFER),
    ROUTE("GET", "/v2/tensors/*", tensors_one, INFER),
    ROUTE("PUT", "/v2/tensors/*", NULL, INFER),
    ROUTE("DELETE", "/v2/tensors/*", tensor_delete, INFER),
    ROUTE("GET", SHM("system") "/status", shm_status, SHM),
    ROUTE("GET", SHM("system") "/region/*/status", shm_status_of, SHM),
    ROUTE("POST", SHM("system") "/region/*/register", shm_register, SHM),
    ROUTE("POST", SHM("system") "/unregister", shm_unregister, SHM),
    ROUTE("POST", SHM("system") "/region/*/unregister", shm_unregister_one, SHM),
    ROUTE("GET", SHM("cuda") "/status", cuda_status, SHM),
    ROUTE("GET", SHM("cuda") "/region/*/status", cuda_status_of, SHM),
    ROUTE("POST", SHM("cuda") "/region/*/register", cuda_register, SHM),
    ROUTE("POST", SHM("cuda") "/unregister", cuda_unregister, SHM),
    ROUTE("POST", SHM("cuda") "/region/*/unregister", cuda_unregister_one, SHM),
};

static bool match(const char *pattern, const char *path, struct pieces *pieces) {
    int piece = 0;
    while (*pattern) {
        if (*pattern != '*') {
            if (*pattern++ != *path++)
                return false;
            continue;
        }
        size_t length = strcspn(path, "/");
        if (length == 0 || length >= PIECE_BYTES_MAX || piece == PIECES_MAX)
            return false;
        memcpy(pieces->text[piece], path, length);
        pieces->text[piece++][length] = '\0';
        path += length;
        pattern++;
    }
    return *path == '\0';
}

static bool is_upload(const struct kld_route *route) {
    return !route->answer && route->method[1] == 'U';
}

static bool serves(const struct kld_route *route, const char *method) {
    return strcmp(route->method, method) == 0 ||
           (strcmp(route->method, "GET") == 0 && strcmp(method, "HEAD") == 0);
}

/* Once, whatever patterns the path fits. No method's name is a part of another one's. */
static void add_method(struct kld_oip_text *methods, const char *method) {
    methods->data[methods->length] = '\0';
    if (strstr(methods->data, method))
        return;
    kld_oip_append(methods, "%s%s%s", methods->length ? ", " : "", method,
                   strcmp(method, "GET") == 0 ? ", HEAD" : "");
}

/* The route, or NULL after a reply that says why there is none. */
static const struct kld_route *find(struct kld_exchange *exchange, struct pieces *pieces) {
    char methods_buffer[64] = "";
    struct kld_oip_text methods = {.data = methods_buffer, .capacity = sizeof methods_buffer - 1};
    for (size_t i = 0; !exchange->url_cut && i < sizeof routes / sizeof routes[0]; i++) {
        for (int piece = 0; piece < PIECES_MAX; piece++)
            pieces->text[piece][0] = '\0';
        if (!match(routes[i].pattern, exchange->url, pieces))
            continue;
        if (serves(&routes[i], exchange->method)) {
            struct kld_error error;
            if (!routes[i].model ||
                (strcmp(pieces->text[0], KLD_OIP_MODEL) == 0 &&
                 (!pieces->text[1][0] || strcmp(pieces->text[1], KLD_OIP_MODEL_VERSION) == 0)))
                return &routes[i];
            kld_error_set(&error, KLD_NOT_FOUND,
                          "no such model or version; this server has " KLD_OIP_MODEL
                          " version " KLD_OIP_MODEL_VERSION);
            kld_refused_log(exchange, error.status);
            kld_exchange_reply_error(exchange, &error);
            return NULL;
        }
        add_method(&methods, routes[i].method);
    }
    methods_buffer[methods.length] = '\0';
    kld_refused_log(exchange, methods.length ? KLD_METHOD : KLD_NOT_FOUND);
    if (methods.length)
        kld_exchange_reply_method(exchange, methods_buffer);
    else
        fail(exchange, KLD_NOT_FOUND, "no such path");
    return NULL;
}

/* A name that leads here by somebody else's doing is a stranger's, too. */
static enum kld_status check_host(const struct kld_exchange *exchange, struct kld_error *err) {
    const struct kld_gateway_common *common = exchange->gateway->common;
    return (exchange->metrics_only ? common->metrics_hosts_matter : common->hosts_matter)
               ? kld_hosts_check(exchange->gateway->config, exchange->host, err)
               : KLD_OK;
}

/* Who asks is known by the route that a path was matched to, so no other spelling of a path can
 * miss it; and who is not known learns nothing about paths. */
static bool may_pass(struct kld_exchange *exchange) {
    struct kld_error error;
    const char *header = kld_exchange_header(exchange, MHD_HTTP_HEADER_AUTHORIZATION);
    if (kld_auth_find(exchange->gateway->auth, header, &exchange->caller, &exchange->rights,
                      &error) == KLD_OK &&
        check_host(exchange, &error) == KLD_OK)
        return true;
    struct pieces pieces;
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++)
        if (routes[i].right == KLD_RIGHT_NONE && match(routes[i].pattern, exchange->url, &pieces))
            return true;
    kld_refused_log(exchange, error.status);
    exchange->caller = NULL; /* nor does he who came by a wrong name count as known */
    kld_exchange_reply_error(exchange, &error);
    return false;
}

static bool is_for_operators(const struct kld_route *route) {
    return route->answer == metrics || route->right == KLD_RIGHT_NONE;
}

/* A body that is too large, or would be read as what it is not. */
static enum kld_status check_body(const struct kld_exchange *exchange,
                                  const struct kld_route *route, struct kld_error *err) {
    const uint64_t most = exchange->gateway->config->body_bytes_max;
    if (route->answer && exchange->length_bytes > SMALL_BODY_BYTES_MAX)
        return kld_error_set(err, KLD_TOO_LARGE, SMALL_BODY_TEXT);
    if (exchange->length_bytes > most) {
        kld_stats_rejected(exchange->gateway->stats, KLD_REJECT_http_body_bytes_max);
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the body has %" PRIu64 " bytes; at most %" PRIu64 " (body_bytes_max)",
                             exchange->length_bytes, most);
    }
    if (!exchange->has_body || !(exchange->encoded_twice || (exchange->encoded && route->answer)))
        return KLD_OK;
    return kld_error_set(err, KLD_MEDIA,
                         "bodies of infer alone may have a Content-Encoding, and only one");
}

static void begin(struct kld_exchange *exchange) {
    struct pieces pieces;
    struct kld_error error;
    if (!may_pass(exchange))
        return;
    const struct kld_route *route = find(exchange, &pieces);
    if (!route) {
        kld_stats_rejected(exchange->gateway->stats, KLD_REJECT_http_no_path);
        return;
    }
    if (exchange->metrics_only && !is_for_operators(route)) {
        kld_refused_log(exchange, KLD_NOT_FOUND);
        fail(exchange, KLD_NOT_FOUND, "at this address there are /metrics and /v2/health alone");
        return;
    }
    if ((exchange->caller && kld_auth_check(exchange->rights, route->right, &error)) ||
        check_body(exchange, route, &error)) {
        kld_refused_log(exchange, error.status);
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    exchange->route = route;
    if (is_upload(route)) {
        kld_upload_begin(exchange, pieces.text[0]);
    } else if (!route->answer) {
        kld_infer_begin(exchange);
    } else if (!exchange->has_body) {
        route->answer(exchange, &pieces, "", 0);
    } else {
        struct small_body *body = calloc(1, sizeof *body);
        exchange->state = body;
        if (!body)
            fail(exchange, KLD_NO_MEMORY, "out of memory");
        else
            body->pieces = pieces;
    }
}

static size_t feed(struct kld_exchange *exchange, const char *data, size_t size) {
    if (is_upload(exchange->route))
        return kld_upload_feed(exchange, data, size);
    if (!exchange->route->answer)
        return kld_infer_feed(exchange, data, size);
    struct small_body *body = exchange->state;
    if (size > sizeof body->data - body->bytes) {
        fail(exchange, KLD_TOO_LARGE, SMALL_BODY_TEXT);
        return size;
    }
    memcpy(body->data + body->bytes, data, size);
    body->bytes += size;
    return size;
}

static void finish(struct kld_exchange *exchange) {
    const struct small_body *body = exchange->state;
    if (is_upload(exchange->route))
        kld_upload_finish(exchange);
    else if (!exchange->route->answer)
        kld_infer_finish(exchange);
    else
        exchange->route->answer(exchange, &body->pieces, body->data, body->bytes);
}

/* Requests count their outcomes themselves. */
static void refuse(struct kld_exchange *exchange, const struct kld_error *error) {
    if (exchange->route && is_upload(exchange->route))
        kld_upload_refuse(exchange, error);
    else if (exchange->route && !exchange->route->answer)
        kld_infer_refuse(exchange, error);
    else
        kld_exchange_reply_error(exchange, error);
}

static void end(struct kld_exchange *exchange) {
    if (exchange->waiting)
        exchange->waiting_gone(exchange->waiting);
    if (exchange->route && is_upload(exchange->route))
        kld_upload_end(exchange);
    else if (exchange->route && !exchange->route->answer)
        kld_infer_end(exchange);
    else
        free(exchange->state);
}

const struct kld_http_handler kld_routes_handler = {begin, feed, finish, refuse, end};
