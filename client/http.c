/* http.c - a connection over HTTP, to the gateway or to any server of the same protocol: transfers
 * by libcurl's multi interface inside the connection's epoll set, deadlines, and trying again.
 * What is sent and received is in http_request.c and http_reply.c. Proxies are not used: the server
 * is named by its address. The thread that owns the connection. */
#include "client/http.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define RETRY_NS_MIN 20000000ull /* doubled with each try, up to ... */
#define RETRY_DOUBLINGS 5        /* ... so often */
#define UPLOAD_BUFFER_BYTES (2l << 20)
#define RECEIVE_BUFFER_BYTES (512l << 10)
#define KEEPALIVE_IDLE_S 15l
#define KEEPALIVE_INTERVAL_S 2l /* nine of them by Linux's default: 33 s in all */

static struct http_connection *http_of(struct kld_connection *connection) {
    return (struct http_connection *)connection;
}

/* ---- libcurl's events in our epoll set --------------------------------------------------------
 */

int kld_http_socket_changed(CURL *easy, curl_socket_t fd, int what, void *user, void *socket_user) {
    struct http_connection *h = user;
    if (what == CURL_POLL_REMOVE) {
        (void)epoll_ctl(h->base.epoll_fd, EPOLL_CTL_DEL, fd, NULL); /* may be closed already */
        return 0;
    }
    uint32_t events = (what & CURL_POLL_IN ? EPOLLIN : 0) | (what & CURL_POLL_OUT ? EPOLLOUT : 0);
    if (kld_connection_watch(&h->base, fd, KLD_TAG_TRANSPORT + (uint64_t)fd, events, NULL))
        h->broken = true; /* libcurl 7.88, if told so, later uses a transfer that is gone */
    return 0;
}

int kld_http_timer_changed(CURLM *multi, long timeout_ms, void *user) {
    struct http_connection *h = user;
    h->curl_at_ns = timeout_ms < 0 ? KLD_NEVER : kld_now_ns() + (uint64_t)timeout_ms * 1000000;
    if (timeout_ms >= 0)
        kld_connection_arm(&h->base, h->curl_at_ns);
    return 0;
}

/* Those that libcurl opens itself stay open in whatever this process executes, where the server
 * would not see their end. */
static curl_socket_t socket_open(void *user, curlsocktype purpose, struct curl_sockaddr *address) {
    int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
    ((struct http_transfer *)user)->socket_error = fd < 0 ? errno : 0;
    return fd;
}

static int progressed(void *user, curl_off_t to_receive, curl_off_t received, curl_off_t to_send,
                      curl_off_t sent) {
    const struct kld_connect_options *options = ((struct http_call *)user)->options;
    if (to_send == 0) /* it is connecting: how much there is, libcurl knows once it sends */
        return 0;
    return options->progress(options->progress_user, (uint64_t)sent, (uint64_t)to_send);
}

CURL *kld_http_easy_open(struct http_connection *h, const char *path,
                         struct http_transfer *transfer) {
    const struct kld_connect_options *options = &h->base.options;
    char url[KLD_HTTP_URL_MAX + 64];
    CURL *easy = h->multi || kld_http_multi_open(h) ? curl_easy_init() : NULL;
    if (!easy)
        return NULL;
    snprintf(url, sizeof url, "%s%s", h->root, path);
    /* Texts are copied. Without one of them it would ask somebody else, or trust somebody else. */
    bool copied = !curl_easy_setopt(easy, CURLOPT_URL, url) &&
                  !curl_easy_setopt(easy, CURLOPT_PROXY, "") &&
                  !curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    if (options->ca_file) /* in the place of the system's, of which there is a folder, too */
        copied = copied && !curl_easy_setopt(easy, CURLOPT_CAINFO, options->ca_file) &&
                 !curl_easy_setopt(easy, CURLOPT_CAPATH, NULL);
    if (options->cert_file) /* without a passphrase OpenSSL would ask the terminal for one */
        copied = copied && !curl_easy_setopt(easy, CURLOPT_SSLCERT, options->cert_file) &&
                 !curl_easy_setopt(easy, CURLOPT_SSLKEY, options->key_file) &&
                 !curl_easy_setopt(easy, CURLOPT_KEYPASSWD, "");
    if (!copied) {
        curl_easy_cleanup(easy);
        return NULL;
    }
    curl_easy_setopt(easy, CURLOPT_PRIVATE, transfer);
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, socket_open);
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETDATA, transfer);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1l);
    /* Names are resolved in a thread, which a transfer's end else waits for: 10 s and more. */
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1l);
    /* Else a call without a limit waits for ever for a host that has vanished. */
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1l);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPIDLE, KEEPALIVE_IDLE_S);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS,
                     (long)(options->connect_timeout_ns / 1000000 + 1));
    transfer->easy = easy;
    transfer->ended = false;
    transfer->socket_error = 0;
    return easy;
}

void kld_http_transfer_close(struct http_connection *h, struct http_transfer *transfer) {
    if (transfer->easy) {
        curl_multi_remove_handle(h->multi, transfer->easy);
        curl_easy_cleanup(transfer->easy);
    }
    curl_slist_free_all(transfer->headers);
    transfer->easy = NULL;
    transfer->headers = NULL;
}

/* ---- Calls ------------------------------------------------------------------------------------
 */

static void call_end(struct http_connection *h, struct http_call *call, enum kld_status status,
                     const struct kld_error *error) {
    kld_http_transfer_close(h, &call->transfer);
    kld_call_unlink(&call->base);
    kld_call_drop_regions(&call->base);
    kld_call_end(&h->base, &call->base, status, error);
    kld_call_release(&h->base, &call->base);
}

static void call_fail(struct http_connection *h, struct http_call *call, enum kld_status status,
                      const char *text) {
    struct kld_error error;
    kld_error_set(&error, status, "%s", text);
    call_end(h, call, status, &error);
}

bool kld_http_header_append(struct curl_slist **list, const char *header) {
    struct curl_slist *longer = curl_slist_append(*list, header);
    if (longer)
        *list = longer;
    return longer != NULL;
}

#define TRACEPARENT_BYTES_MAX (sizeof "traceparent: 00---ff" + 48)

/* False: there is none. */
static bool trace_write(const struct kld_trace_context *trace,
                        char ret_header[TRACEPARENT_BYTES_MAX]) {
    bool id = false, span = false;
    char *at = stpcpy(ret_header, "traceparent: 00-");
    for (size_t i = 0; i < sizeof trace->id; i++) {
        at += sprintf(at, "%02x", trace->id[i]);
        id = id || trace->id[i];
    }
    *at++ = '-';
    for (size_t i = 0; i < sizeof trace->span; i++) {
        at += sprintf(at, "%02x", trace->span[i]);
        span = span || trace->span[i];
    }
    sprintf(at, "-%02x", trace->flags);
    return id && span;
}

static enum kld_status call_start(struct http_connection *h, struct http_call *call,
                                  struct kld_error *err) {
    call->retry_at_ns = KLD_NEVER;
    call->reply_head_bytes = UINT64_MAX;
    call->text_bytes = call->output_bytes = call->retry_after_ns = 0;
    call->output = 0;
    call->parsed = false;
    call->device_lost = false;
    call->failure.status = KLD_OK;
    enum kld_status status = kld_http_head_write(call, err);
    if (status)
        return status;
    CURL *easy = kld_http_easy_open(h, "/v2/models/kl_div/infer", &call->transfer);
    char length[64], traceparent[TRACEPARENT_BYTES_MAX];
    snprintf(length, sizeof length, "Inference-Header-Content-Length: %llu",
             (unsigned long long)call->head_bytes);
    struct curl_slist **headers = &call->transfer.headers;
    bool whole = easy != NULL;
    for (const struct curl_slist *header = h->post_headers; header; header = header->next)
        whole = whole && kld_http_header_append(headers, header->data);
    whole = whole && kld_http_header_append(headers, length);
    if (trace_write(&call->base.request.trace, traceparent))
        whole = whole && kld_http_header_append(headers, traceparent);
    if (!whole)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a request");
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, call->transfer.headers);
    curl_easy_setopt(easy, CURLOPT_POST, 1l);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)call->body_bytes);
    curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, UPLOAD_BUFFER_BYTES);
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, RECEIVE_BUFFER_BYTES);
    curl_easy_setopt(easy, CURLOPT_READFUNCTION, kld_http_body_read);
    curl_easy_setopt(easy, CURLOPT_READDATA, call);
    curl_easy_setopt(easy, CURLOPT_SEEKFUNCTION, kld_http_body_seek);
    curl_easy_setopt(easy, CURLOPT_SEEKDATA, call);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, kld_http_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, call);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, kld_http_body_write);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, call);
    if (h->base.options.progress) {
        curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, progressed);
        curl_easy_setopt(easy, CURLOPT_XFERINFODATA, call);
        curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0l);
    }
    call->base.result.attempts++;
    if (curl_multi_add_handle(h->multi, easy) != CURLM_OK)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a request");
    return KLD_OK;
}

enum kld_status kld_http_status(long code) {
    if (code >= 502 && code <= 504)
        return KLD_UNAVAILABLE; /* of the several with 503, the one that says: try again */
#define X(NAME, name, number, http, text)                                                          \
    if (code == http && code != 200)                                                               \
        return KLD_##NAME;
    KLD_STATUS_MAP(X)
#undef X
    return code >= 500 ? KLD_INTERNAL : KLD_INVALID;
}

/* What is wrong with the certificate to show, or its key: libcurl says that something is. */
static enum kld_status certificate_error(const struct kld_connect_options *options,
                                         const char *reason, struct kld_error *err) {
    const char *cert = options->cert_file, *key = options->key_file;
    if (access(cert, R_OK) != 0)
        return kld_error_set(err, KLD_INVALID, "cert_file %.100s: %s", cert, strerror(errno));
    if (key && access(key, R_OK) != 0)
        return kld_error_set(err, KLD_INVALID, "key_file %.100s: %s", key, strerror(errno));
    return kld_error_set(err, KLD_INVALID,
                         "cert_file %.60s%s%.60s: not a PEM certificate and its key, without a "
                         "passphrase (%s)",
                         cert, key ? ", key_file " : "", key ? key : "", reason);
}

/* How many descriptors what failed so may have had open at once, where libcurl does not tell
 * whether it lacked one: its thread's pair and what the system's resolver opens; a socket to the
 * server and a file of certificates. */
static int descriptors_of(CURLcode code) {
    switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST: return 3;
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_CERTPROBLEM: return 2;
    default: return 0;
    }
}

/* errno of the first that is not to be had, now that the transfer's own are closed; 0: none. */
static int descriptors_lack(int count) {
    int probe[3], error = 0, opened = 0;
    while (!error && opened < count) {
        probe[opened] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        error = probe[opened] < 0 ? errno : 0;
        opened += !error;
    }
    while (opened)
        close(probe[--opened]);
    return error;
}

enum kld_status kld_http_curl_error(const struct http_connection *h,
                                    const struct http_transfer *transfer, struct kld_error *err) {
    CURLcode code = transfer->code;
    const char *reason = curl_easy_strerror(code), *ca_file = h->base.options.ca_file;
    const char *scheme = h->base.transport->name, *hint = "";
    if ((code == CURLE_COULDNT_CONNECT || descriptors_of(code)) &&
        kld_socket_lacks(transfer->socket_error, err))
        return KLD_NO_MEMORY;
    if (code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL)
        return kld_error_set(err, KLD_INVALID, "the URL is wrong (%s); expected %s://HOST:PORT",
                             reason, scheme);
    if (code == CURLE_SSL_CACERT_BADFILE && ca_file)
        return kld_error_set(err, KLD_INVALID, "ca_file %.100s: not a file of certificates (%s)",
                             ca_file, reason);
    if (code == CURLE_SSL_CERTPROBLEM && h->base.options.cert_file)
        return certificate_error(&h->base.options, reason, err);
    if (code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "the server's certificate is not trusted; name those to trust "
                             "with ca_file (%s)",
                             reason);
    if (code == CURLE_OUT_OF_MEMORY)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory, or no descriptor to watch, for HTTP");
    if (code == CURLE_GOT_NOTHING && strcmp(scheme, "http") == 0)
        hint = ", and without TLS (https:// is with it)";
    if (code == CURLE_SSL_CONNECT_ERROR)
        hint = ", and with TLS (http:// is without it)";
    return kld_error_set(err, KLD_UNAVAILABLE,
                         "no answer from this address (%s); is kld-server running with this --http "
                         "address%s?",
                         reason, hint);
}

/* What went wrong, and whether another try may help. *ret_lost: the server had begun on it. */
static enum kld_status judge(const struct http_connection *h, struct http_call *call,
                             bool *ret_retry, bool *ret_lost, struct kld_error *err) {
    CURLcode code = call->transfer.code;
    char text[KLD_ERROR_TEXT_MAX];
    *ret_retry = *ret_lost = false;
    if (call->failure.status) {
        *err = call->failure;
        return call->failure.status;
    }
    switch (code) {
    case CURLE_OK: break;
    case CURLE_ABORTED_BY_CALLBACK:
        return kld_error_set(err, KLD_CANCELLED, "cancelled while it was sent");
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_PARTIAL_FILE:
        *ret_retry = *ret_lost = true;
        return kld_error_set(err, KLD_UNAVAILABLE, "the connection to the server was lost: %s",
                             curl_easy_strerror(code));
    case CURLE_COULDNT_RESOLVE_HOST: /* a server that restarts may have no address meanwhile */
    case CURLE_COULDNT_CONNECT:
    case CURLE_SSL_CONNECT_ERROR: /* it was cut: kld_connect() has seen one that was not */
    case CURLE_OPERATION_TIMEDOUT:
        *ret_retry = true;
        return kld_http_curl_error(h, &call->transfer, err);
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_CACERT_BADFILE: /* it was one when kld_connect() read it: no wrong use */
        *ret_retry = kld_http_curl_error(h, &call->transfer, err) == KLD_NO_MEMORY;
        return err->status = *ret_retry ? KLD_NO_MEMORY : KLD_FORBIDDEN;
    default: return kld_http_curl_error(h, &call->transfer, err);
    }
    if (call->transfer.http_status == 200)
        return kld_http_reply_finish(call, err);
    enum kld_status status = kld_http_status(call->transfer.http_status);
    *ret_retry = status == KLD_UNAVAILABLE;
    *ret_lost = call->device_lost;
    if (call->device_lost)
        status = KLD_DEVICE_LOST;
    if (kld_http_text_read(call->text, call->text_bytes, "error", text, sizeof text))
        return kld_error_set(err, status, "%s", text);
    return kld_error_set(err, status, "the server answered with HTTP status %ld",
                         call->transfer.http_status);
}

/* A transfer of a call is over: end it, or arm the next try. */
static void call_transferred(struct http_connection *h, struct http_call *call) {
    struct kld_error error = {0};
    bool retry, lost;
    enum kld_status status = judge(h, call, &retry, &lost, &error);
    kld_http_transfer_close(h, &call->transfer);
    uint64_t now = kld_now_ns();
    call->losses += lost;
    call->device_losses += call->device_lost;
    if (!call->first_failure_ns || lost) /* where the server had begun, it was there until now */
        call->first_failure_ns = now;
    /* Over HTTP the server works on its own copy: only a reply that had begun to arrive over an
     * input makes a second try wrong. A request that servers or devices die of is given up
     * after so many, of devices fewer, since each takes everybody along; one that is told "not
     * now" is asked again as long as its caller waits. */
    if (!status || !retry || call->losses >= KLD_ATTEMPTS_MAX ||
        call->device_losses >= KLD_DEVICE_LOSSES_MAX ||
        (call->wrote && kld_op_in_place(&call->base.request.op))) {
        call_end(h, call, status, &error);
        return;
    }
    uint32_t tries = call->base.result.attempts;
    uint64_t pause = RETRY_NS_MIN << (tries < RETRY_DOUBLINGS ? tries : RETRY_DOUBLINGS);
    pause = kld_jitter(pause) + call->retry_after_ns; /* never before the server's own time */
    uint64_t end = kld_patience(&h->base, &call->base, call->first_failure_ns);
    if (now + pause >= end && end != call->base.deadline_ns) {
        /* A split tells who answers "not now", for whatever reason, from who is lost. */
        if (h->base.member && !lost && call->transfer.http_status == 503)
            status = error.status = KLD_BUSY;
        call_end(h, call, status, &error);
        return;
    }
    call->base.error = error; /* told if the deadline comes first */
    call->retry_at_ns = now + pause;
    kld_connection_arm(&h->base, call->retry_at_ns);
}

static void transfers_ended(struct http_connection *h) {
    int left;
    for (CURLMsg *message; (message = curl_multi_info_read(h->multi, &left));) {
        struct http_transfer *transfer;
        if (message->msg != CURLMSG_DONE ||
            curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, (char **)&transfer))
            continue;
        transfer->code = message->data.result;
        int descriptors = descriptors_of(transfer->code);
        if (descriptors)
            transfer->socket_error = descriptors_lack(descriptors);
        curl_easy_getinfo(message->easy_handle, CURLINFO_RESPONSE_CODE, &transfer->http_status);
        long links = 0;
        if (curl_easy_getinfo(message->easy_handle, CURLINFO_NUM_CONNECTS, &links) == CURLE_OK)
            h->base.links += (uint64_t)links;
        if (transfer->call)
            call_transferred(h, transfer->call);
        else
            transfer->ended = true;
    }
}

static void transfer_failed(struct http_connection *h, struct http_transfer *transfer) {
    transfer->code = CURLE_OUT_OF_MEMORY;
    if (transfer->call)
        call_transferred(h, transfer->call);
    else
        transfer->ended = true;
}

/* libcurl had no memory, or we could not watch its socket: it tells nobody whose that was, and
 * would wait for it for ever (7.88 also faults over what it keeps of that socket). All that is
 * under way ends, and what comes next starts anew. */
static void give_up(struct http_connection *h) {
    for (struct kld_call *call = h->calls.first, *next; call; call = next) {
        struct http_transfer *transfer = &((struct http_call *)call)->transfer;
        next = call->next;
        if (transfer->easy)
            transfer_failed(h, transfer);
    }
    if (h->asked) {
        kld_http_transfer_close(h, h->asked);
        transfer_failed(h, h->asked);
    }
    curl_multi_cleanup(h->multi);
    h->multi = NULL;
    (void)kld_http_multi_open(h);
}

/* libcurl's turn: what a socket has for it, or its timer. */
static void act(struct http_connection *h, curl_socket_t fd, int bits) {
    int running;
    if (!h->multi)
        return;
    CURLMcode code = curl_multi_socket_action(h->multi, fd, bits, &running);
    transfers_ended(h);
    if (code != CURLM_OK || h->broken)
        give_up(h);
}

void kld_http_event(struct kld_connection *connection, uint64_t tag, uint32_t events) {
    int bits = (events & (EPOLLIN | EPOLLHUP) ? CURL_CSELECT_IN : 0) |
               (events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
               (events & EPOLLERR ? CURL_CSELECT_ERR : 0);
    act(http_of(connection), (curl_socket_t)(tag - KLD_TAG_TRANSPORT), bits);
}

/* The time of one call: its deadline, or its next try. */
static void call_timer(struct http_connection *h, struct http_call *call, uint64_t now) {
    uint64_t deadline = call->base.deadline_ns;
    if (now >= deadline) {
        char text[KLD_ERROR_TEXT_MAX];
        snprintf(text, sizeof text, "deadline passed%s%.200s", call->base.error.text[0] ? "; " : "",
                 call->base.error.text);
        call_fail(h, call, KLD_DEADLINE, text);
        return;
    }
    if (now >= call->retry_at_ns) {
        struct kld_error error;
        enum kld_status status = call_start(h, call, &error);
        if (status) {
            call_end(h, call, status, &error);
            return;
        }
    }
    uint64_t at = call->retry_at_ns < deadline ? call->retry_at_ns : deadline;
    if (at != KLD_NEVER)
        kld_connection_arm(&h->base, at);
}

void kld_http_timer(struct kld_connection *connection, uint64_t now) {
    struct http_connection *h = http_of(connection);
    if (now >= h->curl_at_ns) {
        h->curl_at_ns = KLD_NEVER;
        act(h, CURL_SOCKET_TIMEOUT, 0);
    } else if (h->curl_at_ns != KLD_NEVER) {
        kld_connection_arm(connection, h->curl_at_ns);
    }
    for (struct kld_call *call = h->calls.first, *next; call; call = next) {
        next = call->next;
        call_timer(h, (struct http_call *)call, now);
    }
}

enum kld_status kld_http_submit(struct kld_connection *connection, struct kld_call *base,
                                struct kld_error *err) {
    struct http_connection *h = http_of(connection);
    struct http_call *call = (struct http_call *)base;
    call->options = &connection->options;
    call->transfer.call = call;
    if (base->copy.destination) { /* both are memory of this process */
        const struct kld_copy_request *copy = &base->copy;
        memcpy((char *)copy->destination->data + copy->destination_offset_bytes,
               (const char *)copy->source->data + copy->source_offset_bytes, copy->bytes);
        base->result.attempts = 1;
        memset(&base->copy, 0, sizeof base->copy); /* its regions were not held */
        kld_call_end(connection, base, KLD_OK, NULL);
        kld_call_release(connection, base);
        return KLD_OK;
    }
    enum kld_status status = call_start(h, call, err);
    if (status) {
        kld_http_transfer_close(h, &call->transfer);
        return status;
    }
    kld_call_hold_regions(base);
    kld_call_append(&h->calls, base);
    if (base->deadline_ns != KLD_NEVER)
        kld_connection_arm(connection, base->deadline_ns);
    return KLD_OK;
}

void kld_http_cancel(struct kld_connection *connection, struct kld_call *base) {
    call_fail(http_of(connection), (struct http_call *)base, KLD_CANCELLED, "cancelled");
}
