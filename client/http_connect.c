/* http_connect.c - the HTTP connection apart from its requests: opening and closing, the questions
 * that wait for their answer and its table.
 * The thread that owns the connection. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "client/http.h"

#define CONNECTIONS_MAX 64l
#define READY_NS_MIN 20000000ull /* between two looks at a server that is not ready */
#define READY_NS_MAX 200000000ull
#define TOKEN_BYTES_MAX 1024 /* as the server has it */

struct http_get {
    struct http_transfer transfer;
    size_t bytes, capacity;
    char *text; /* what fits of the body: `small`, or the caller's */
    bool cut;   /* it did not fit */
    char small[4096];
};

static struct http_connection *http_of(struct kld_connection *connection) {
    return (struct http_connection *)connection;
}

/* ---- Opening and questions --------------------------------------------------------------------
 */

static size_t get_write(char *data, size_t size, size_t count, void *user) {
    struct http_get *get = user;
    size_t room = get->capacity - get->bytes, bytes = size * count;
    memcpy(get->text + get->bytes, data, bytes < room ? bytes : room);
    get->cut = get->cut || bytes > room;
    get->bytes += bytes < room ? bytes : room;
    return bytes;
}

/* Runs the connection's loop until the answer is there. text: where the body goes; NULL: into
 * ret_get itself. */
static enum kld_status get_into(struct http_connection *h, const char *path, uint64_t deadline_ns,
                                char *text, size_t capacity, struct http_get *ret_get,
                                struct kld_error *err) {
    memset(ret_get, 0, sizeof *ret_get);
    ret_get->text = text ? text : ret_get->small;
    ret_get->capacity = text ? capacity : sizeof ret_get->small;
    struct http_transfer *transfer = &ret_get->transfer;
    CURL *easy = kld_http_easy_open(h, path, transfer);
    if (!easy)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a request");
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, h->get_headers);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, get_write);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, ret_get);
    enum kld_status status = KLD_OK;
    h->asked = transfer;
    if (curl_multi_add_handle(h->multi, easy) != CURLM_OK)
        status = kld_error_set(err, KLD_NO_MEMORY, "no memory for a request");
    while (!status && !transfer->ended && kld_now_ns() < deadline_ns)
        status = kld_connection_step(&h->base, deadline_ns, err);
    kld_connection_waited(&h->base);
    h->asked = NULL;
    kld_http_transfer_close(h, transfer);
    if (status)
        return status;
    if (!transfer->ended)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server did not answer in time");
    if (transfer->code)
        return kld_http_curl_error(h, transfer, err);
    if (transfer->http_status == 200)
        return KLD_OK;
    char said[KLD_ERROR_TEXT_MAX];
    status = kld_http_status(transfer->http_status);
    if (kld_http_text_read(ret_get->text, ret_get->bytes, "error", said, sizeof said))
        return kld_error_set(err, status, "%s", said);
    return kld_error_set(err, status, "the server answered with HTTP status %ld%s",
                         transfer->http_status, status == KLD_UNAVAILABLE ? ": not ready" : "");
}

static enum kld_status get(struct http_connection *h, const char *path, uint64_t deadline_ns,
                           struct http_get *ret_get, struct kld_error *err) {
    return get_into(h, path, deadline_ns, NULL, 0, ret_get, err);
}

static void curl_start(void) { curl_global_init(CURL_GLOBAL_DEFAULT); }

static enum kld_status make_headers(struct http_connection *h, struct kld_error *err) {
    const char *token = h->base.options.token;
    char authorization[TOKEN_BYTES_MAX + 32] = "";
    bool ok = true;
    if (token) {
        if (strlen(token) > TOKEN_BYTES_MAX || strpbrk(token, "\r\n"))
            return kld_error_set(err, KLD_INVALID, "the token is one line of at most %d bytes",
                                 TOKEN_BYTES_MAX);
        snprintf(authorization, sizeof authorization, "Authorization: Bearer %s", token);
        ok = kld_http_header_append(&h->get_headers, authorization) &&
             kld_http_header_append(&h->post_headers, authorization);
    }
    /* Without "Expect:" libcurl would ask before each large body and wait a round trip. */
    ok = ok && kld_http_header_append(&h->post_headers, "Content-Type: application/octet-stream") &&
         kld_http_header_append(&h->post_headers, "Expect:");
    return ok ? KLD_OK : kld_error_set(err, KLD_NO_MEMORY, "no memory for a connection");
}

static enum kld_status wait_ready(struct http_connection *h, struct kld_error *err) {
    uint64_t deadline = kld_now_ns() + h->base.options.connect_timeout_ns;
    uint64_t pause = READY_NS_MIN;
    struct kld_error before = {.status = KLD_OK};
    for (;;) {
        struct http_get answer;
        enum kld_status status = get(h, "/v2/health/ready", deadline, &answer, err);
        uint64_t again = kld_now_ns() + kld_jitter(pause);
        /* A try that had no time left says less than the one before it. */
        if (status == KLD_UNAVAILABLE && !answer.transfer.ended && before.status)
            return kld_error_set(err, before.status, "%s", before.text);
        /* Who lacks descriptors may have some in time: another thread closes files, maybe. */
        bool passing =
            status == KLD_UNAVAILABLE || (status == KLD_NO_MEMORY && answer.transfer.socket_error);
        if (!passing || again >= deadline)
            return status;
        if (err)
            before = *err;
        while (kld_now_ns() < again && !kld_connection_step(&h->base, again, NULL))
            ;
        pause = pause * 2 > READY_NS_MAX ? READY_NS_MAX : pause * 2;
    }
}

bool kld_http_multi_open(struct http_connection *h) {
    h->broken = false;
    h->curl_at_ns = KLD_NEVER;
    h->multi = curl_multi_init();
    if (!h->multi)
        return false;
    curl_multi_setopt(h->multi, CURLMOPT_SOCKETFUNCTION, kld_http_socket_changed);
    curl_multi_setopt(h->multi, CURLMOPT_SOCKETDATA, h);
    curl_multi_setopt(h->multi, CURLMOPT_TIMERFUNCTION, kld_http_timer_changed);
    curl_multi_setopt(h->multi, CURLMOPT_TIMERDATA, h);
    curl_multi_setopt(h->multi, CURLMOPT_MAX_HOST_CONNECTIONS, CONNECTIONS_MAX);
    return true;
}

static enum kld_status http_open(struct kld_connection *connection, const char *url,
                                 struct kld_error *err) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, curl_start);
    struct http_connection *h = http_of(connection);
    size_t length = strlen(url), prefix = strlen(connection->transport->prefix);
    while (length > prefix && url[length - 1] == '/')
        length--;
    if (length == prefix || length >= sizeof h->root)
        return kld_error_set(err, KLD_INVALID, "expected %sHOST:PORT, of at most %d bytes",
                             connection->transport->prefix, KLD_HTTP_URL_MAX - 1);
    const char *behind = strpbrk(url, "?#"); /* the paths of requests would be a part of it */
    if (behind)
        return kld_error_set(err, KLD_INVALID,
                             "the URL has a '%c'; expected %sHOST:PORT without one", *behind,
                             connection->transport->prefix);
    if (connection->options.key_file && !connection->options.cert_file)
        return kld_error_set(err, KLD_INVALID, "key_file without cert_file; expected both");
    memcpy(h->root, url, length);
    if (!kld_http_multi_open(h))
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a connection");
    enum kld_status status = make_headers(h, err);
    return status || connection->options.lazy ? status : wait_ready(h, err);
}

static void http_close(struct kld_connection *connection) {
    struct http_connection *h = http_of(connection);
    for (struct kld_call *call = h->calls.first; call; call = call->next) {
        kld_http_transfer_close(h, &((struct http_call *)call)->transfer);
        kld_call_drop_regions(call);
    }
    if (h->multi)
        curl_multi_cleanup(h->multi);
    curl_slist_free_all(h->get_headers);
    curl_slist_free_all(h->post_headers);
}

static enum kld_status http_info(struct kld_connection *connection,
                                 struct kld_server_info *ret_info, struct kld_error *err) {
    struct http_connection *h = http_of(connection);
    struct http_get answer;
    enum kld_status status =
        get(h, "/v2", kld_now_ns() + connection->options.connect_timeout_ns, &answer, err);
    if (status)
        return status;
    char name[24];
    memset(ret_info, 0, sizeof *ret_info);
    (void)kld_http_text_read(answer.text, answer.bytes, "name", name, sizeof name);
    (void)kld_http_text_read(answer.text, answer.bytes, "version", ret_info->version,
                             sizeof ret_info->version);
    /* Nobody knows yet whether it is like the others of a split, which is to ask again. */
    char state[16];
    if (connection->member &&
        kld_http_text_read(answer.text, answer.bytes, "state", state, sizeof state) &&
        strcmp(state, "starting") == 0)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server is starting");
    /* Other servers of the protocol do not say what they have, nor does one with unlike devices. */
    if (!kld_http_text_read(answer.text, answer.bytes, "backend", ret_info->backend,
                            sizeof ret_info->backend) ||
        !kld_http_text_read(answer.text, answer.bytes, "device", ret_info->device,
                            sizeof ret_info->device)) {
        snprintf(ret_info->backend, sizeof ret_info->backend, "remote");
        snprintf(ret_info->device, sizeof ret_info->device, "%s %s", name, ret_info->version);
    }
    ret_info->requests_max = KLD_CALLS_MAX;
    return KLD_OK;
}

static enum kld_status http_ping(struct kld_connection *connection, struct kld_error *err) {
    struct http_get answer;
    return get(http_of(connection), "/v2/health/live",
               kld_now_ns() + connection->options.connect_timeout_ns, &answer, err);
}

static enum kld_status http_metrics(struct kld_connection *connection, char *ret_text,
                                    size_t capacity, struct kld_error *err) {
    struct http_get answer;
    enum kld_status status = get_into(http_of(connection), "/metrics",
                                      kld_now_ns() + connection->options.connect_timeout_ns,
                                      ret_text, capacity - 1, &answer, err);
    ret_text[status ? 0 : answer.bytes] = '\0';
    if (!status && answer.cut)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the server's metrics are over %zu bytes; is it a kld server?",
                             capacity - 1);
    return status;
}

#define HTTP_TRANSPORT(scheme)                                                                     \
    {                                                                                              \
        .prefix = scheme "://", .name = scheme,                                                    \
        .connection_bytes = sizeof(struct http_connection),                                        \
        .call_bytes = sizeof(struct http_call), .region_bytes = sizeof(struct kld_region),         \
        .open = http_open, .close = http_close, .info = http_info, .ping = http_ping,              \
        .metrics = http_metrics, .region_create = kld_plain_region_create,                         \
        .region_import_memfd = kld_plain_region_import_memfd,                                      \
        .region_release = kld_plain_region_release, .submit = kld_http_submit,                     \
        .cancel = kld_http_cancel, .event = kld_http_event, .timer = kld_http_timer,               \
    }

const struct kld_transport kld_transport_http = HTTP_TRANSPORT("http");
const struct kld_transport kld_transport_https = HTTP_TRANSPORT("https");
