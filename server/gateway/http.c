/* http.c - the libmicrohttpd daemon and its callbacks (http.h). When it runs is drive.c's. It knows
 * no route and no tensor. Loop thread only. */
#include "server/gateway/http.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/gateway/accept.h"
#include "server/gateway/drive.h"
#include "server/gateway/headers.h"
#include "server/gateway/last_words.h"
#include "server/gateway/parting.h"
#include "server/gateway/tls.h"
#include "server/gateway/trace.h"
#include "server/gateway/watch.h"
#include "server/gateway/window.h"

#define CONTINUE_BYTES_MAX 100   /* that a 100 Continue takes, within a TLS record as well */
#define STREAMED_BYTES (1 << 20) /* of a body: there is more to come, mostly */
#define LINGER_TURNS_MAX 16      /* what looking costs, then, is less than a suspension, ... */
#define LINGER_NS_MAX 500000u    /* ... and what is not here by now takes longer, ... */
#define LINGER_TURNS_MIN 4       /* ... unless it is the others of a turn that took the time */
#define TLS_PRIORITIES "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"

struct kld_http {
    struct kld_gateway *gateway;
    const struct kld_http_handler *handler;
    struct MHD_Daemon *daemon;
    struct MHD_Response *spare; /* where there is no memory for a reply */
    struct kld_drive drive;
    int open_handles;
    bool taken;   /* MHD told of the connection that it is being given */
    bool metrics; /* that one is for metrics alone */
    bool closing; /* nothing is suspended any more */
    struct kld_exchange *first;
    struct kld_watch watch;
    struct kld_partings partings;
    void (*closed)(void *user);
    void *closed_user;
};

static struct kld_watched *watched_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

/* A proxy asks for http://host/path; what it names is the path. */
static const char *path_of(const char *url) {
    size_t scheme = strncasecmp(url, "http://", 7) == 0    ? 7
                    : strncasecmp(url, "https://", 8) == 0 ? 8
                                                           : 0;
    if (!scheme)
        return url;
    const char *path = strchr(url + scheme, '/');
    return path ? path : "/";
}

/* As much of it as there is room for; the memory was zeros. */
static void copy_text(char *to, const char *text, size_t size) {
    memcpy(to, text, strnlen(text, size - 1));
}

static struct kld_exchange *open_exchange(struct kld_http *http, struct MHD_Connection *connection,
                                          const char *url, const char *method) {
    struct kld_exchange *exchange = malloc(sizeof *exchange);
    if (!exchange)
        return NULL;
    /* calloc() passes by what its thread has just freed, and a compiler makes one of malloc() and
     * zeros from the first byte on. */
    exchange->gateway = http->gateway;
    memset(&exchange->connection, 0, sizeof *exchange - offsetof(struct kld_exchange, connection));
    exchange->connection = connection;
    exchange->started_ns = uv_hrtime();
    exchange->asked = KLD_ASKED_UNKNOWN;
    exchange->name_sizes = UINT64_MAX; /* until headers.c has looked */
    copy_text(exchange->method, method, sizeof exchange->method);
    copy_text(exchange->url, url, sizeof exchange->url);
    exchange->url_cut = strlen(url) >= sizeof exchange->url;
    const char *length = kld_exchange_header(exchange, MHD_HTTP_HEADER_CONTENT_LENGTH);
    bool chunked = kld_exchange_header(exchange, MHD_HTTP_HEADER_TRANSFER_ENCODING) != NULL;
    exchange->has_length = length && !chunked;
    if (exchange->has_length)
        exchange->length_bytes = strtoull(length, NULL, 10); /* MHD has checked the digits */
    exchange->has_body = chunked || exchange->length_bytes > 0;
    kld_headers_drop_idle_expectation(exchange);
    exchange->after = http->first;
    if (http->first)
        http->first->before = exchange;
    http->first = exchange;
    return exchange;
}

static void start(struct kld_http *http, struct kld_exchange *exchange,
                  const struct kld_request_line *line) {
    struct kld_error error;
    if (kld_headers_check(exchange, line, &error)) {
        exchange->misframed = true;
        kld_stats_rejected(http->gateway->stats, KLD_REJECT_http_framing);
    } else if (!kld_tls_wants_certificates(http->gateway->tls) ||
               kld_tls_check_client(http->gateway->tls, exchange->connection,
                                    &watched_of(exchange->connection)->keys, &error) == KLD_OK) {
        http->handler->begin(exchange);
        if (!exchange->replied)
            kld_window_begin(exchange);
        return;
    }
    kld_refused_log(exchange, error.status);
    kld_exchange_reply_error(exchange, &error);
}

static enum MHD_Result queue_spare(struct kld_http *http, struct MHD_Connection *connection) {
    kld_stats_http_reply(http->gateway->stats, MHD_HTTP_SERVICE_UNAVAILABLE);
    http->drive.queued = true;
    return MHD_queue_response(connection, MHD_HTTP_SERVICE_UNAVAILABLE, http->spare);
}

static enum MHD_Result queue_reply(struct kld_exchange *exchange) {
    struct kld_http *http = exchange->gateway->http;
    struct MHD_Response *response = exchange->response;
    exchange->queued = true;
    http->drive.sending++;
    if (!response)
        return queue_spare(http, exchange->connection);
    exchange->response = NULL;
    kld_stats_http_reply(http->gateway->stats, exchange->http_status);
    http->drive.queued = true;
    if (kld_gateway_is_draining(exchange->gateway) ||
        kld_headers_trailed(exchange)) /* without memory for it, it ends unannounced */
        (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    enum MHD_Result result =
        MHD_queue_response(exchange->connection, exchange->http_status, response);
    MHD_destroy_response(response);
    return result;
}

/* Of a body, with what is dropped of it. Who is known may have as much dropped as he might have had
 * taken: it costs him more than us. A stranger may not. */
static uint64_t known_bytes_max(const struct kld_exchange *exchange) {
    return exchange->caller ? exchange->gateway->config->body_bytes_max : 0;
}
static uint64_t read_bytes_max(const struct kld_exchange *exchange) {
    uint64_t most = known_bytes_max(exchange);
    return most > KLD_HTTP_DISCARD_BYTES_MAX ? most : KLD_HTTP_DISCARD_BYTES_MAX;
}

/* At once where the client waits for it (Expect), where the body is too much to read or nobody
 * knows where it ends; else the body is read and dropped first, so that the client sees the reply
 * and not a reset. MHD closes the connection after a reply before the body, and takes one in its
 * first call alone: later it has said 100 Continue, or reads all of the body first. */
bool kld_exchange_refused_at_once(const struct kld_exchange *exchange) {
    const char *expect = kld_exchange_header(exchange, MHD_HTTP_HEADER_EXPECT);
    return exchange->misframed ||
           (exchange->has_body && (expect || (exchange->has_length &&
                                              exchange->length_bytes > read_bytes_max(exchange))));
}

/* MHD may go on with the next chunk of a connection that was just suspended; to suspend it twice
 * would break MHD's lists. */
bool kld_exchange_hold(struct kld_exchange *exchange) {
    if (exchange->suspended || exchange->gateway->http->closing)
        return exchange->suspended;
    exchange->suspended = true;
    MHD_suspend_connection(exchange->connection);
    return true;
}

/* The exchange was heard of in this run. */
static void note(struct kld_http *http, struct kld_exchange *exchange) {
    http->drive.did += exchange->turn != http->drive.turn;
    exchange->turn = http->drive.turn;
}

/* A small job is done within microseconds, and a connection that is not suspended until then costs
 * less: MHD takes a suspended one out of its epoll set, and afterwards puts it back and tries to
 * read from it. Whether the reply has come is looked at when MHD runs next. */
static bool lingers(struct kld_http *http, struct kld_exchange *exchange) {
    struct kld_drive *drive = &http->drive;
    if (!exchange->soon || http->closing)
        return false;
    if (!exchange->lingered)
        exchange->lingers_ns = drive->turn_ns;
    if (exchange->lingered == LINGER_TURNS_MAX ||
        (exchange->lingered >= LINGER_TURNS_MIN &&
         drive->turn_ns - exchange->lingers_ns > LINGER_NS_MAX))
        return false;
    exchange->lingered++;
    if (exchange->turn == drive->turn) {
        drive->did--;
        exchange->turn = 0;
    }
    drive->lingering++;
    return true;
}

/* Of a body that no length announces the end may be far: some is dropped of it in any case, then
 * its sender is told, and parting.c drops the rest of what may be. */
static enum MHD_Result discard(struct kld_exchange *exchange, size_t *size) {
    uint64_t some =
        KLD_HTTP_DISCARD_BYTES_MAX - (exchange->last_words ? KLD_HTTP_DISCARD_BEHIND_BYTES_MAX : 0);
    exchange->discarded_bytes += *size;
    *size = 0;
    if (exchange->discarded_bytes <= some ||
        exchange->taken_bytes + exchange->discarded_bytes <= known_bytes_max(exchange))
        return MHD_YES;
    exchange->discarded_bytes = some;
    kld_last_words_say(exchange);
    return MHD_NO;
}

static enum MHD_Result receive(struct kld_http *http, struct kld_exchange *exchange,
                               const char *data, size_t *size) {
    if (exchange->replied) {
        note(http, exchange); /* of what the socket holds already, no byte is seen to move */
        return discard(exchange, size);
    }
    size_t taken = http->handler->feed(exchange, data, *size);
    if (taken)
        note(http, exchange);
    kld_stats_add(http->gateway->stats, KLD_STAT_http_received_bytes_total, (int64_t)taken);
    exchange->taken_bytes += taken;
    kld_window_taken(exchange, taken);
    http->drive.streamed |= taken && exchange->taken_bytes > STREAMED_BYTES;
    *size -= taken;
    if (exchange->replied)
        return discard(exchange, size);
    if (exchange->paused)
        kld_exchange_hold(exchange);
    return MHD_YES;
}

static enum MHD_Result access_handler(void *user, struct MHD_Connection *connection,
                                      const char *url, const char *method, const char *version,
                                      const char *data, size_t *size, void **context) {
    struct kld_http *http = user;
    struct kld_exchange *exchange = *context;
    if ((http->closing && !(exchange && exchange->replied)) || (exchange && exchange->gone))
        return MHD_NO;
    if (!exchange) {
        struct kld_watched *watched = watched_of(connection);
        /* No memory for it: nobody would know what it may ask, nor cut it off. */
        if (!watched ||
            !(exchange = *context = open_exchange(http, connection, path_of(url), method)))
            return queue_spare(http, connection);
        watched->exchange = exchange;
        watched->exchanges++;
        if (exchange->has_body && !exchange->has_length)
            watched->written_before = kld_watched_written(watched);
        exchange->metrics_only = watched->metrics;
        note(http, exchange);
        start(http, exchange, &(struct kld_request_line){method, url, version});
        return exchange->replied && kld_exchange_refused_at_once(exchange) ? queue_reply(exchange)
                                                                           : MHD_YES;
    }
    if (*size)
        return receive(http, exchange, data, size);
    if (!exchange->replied && !exchange->finished && !exchange->paused)
        http->handler->feed(exchange, "", 0); /* what a pause may have left undone */
    if (!exchange->replied && !exchange->finished && !exchange->paused) {
        exchange->finished = true;
        http->handler->finish(exchange);
    }
    if (exchange->replied)
        return queue_reply(exchange);
    if (!lingers(http, exchange))
        kld_exchange_hold(exchange);
    return MHD_YES;
}

static void close_exchange(struct kld_http *http, struct kld_exchange *exchange) {
    if (exchange->response)
        MHD_destroy_response(exchange->response);
    http->drive.sending -= exchange->queued;
    http->drive.did++;
    http->handler->end(exchange);
    if (exchange->before)
        exchange->before->after = exchange->after;
    else
        http->first = exchange->after;
    if (exchange->after)
        exchange->after->before = exchange->before;
    free(exchange->last_words);
    free(exchange);
}

/* MHD answers a chunk that is none, or such a trailer, by itself, and calls the end of a connection
 * in the middle of a body the same; who got an answer may have left on it, too. */
static bool was_answered_by_mhd(const struct kld_exchange *exchange,
                                const struct kld_watched *watched) {
    return watched && exchange->has_body && !exchange->has_length && !exchange->replied &&
           !exchange->gone &&
           kld_watched_written(watched) > watched->written_before + CONTINUE_BYTES_MAX;
}

static void completed(void *user, struct MHD_Connection *connection, void **context,
                      enum MHD_RequestTerminationCode code) {
    struct kld_watched *watched = watched_of(connection);
    if (watched && watched->exchange) {
        watched->discarded_bytes = watched->exchange->discarded_bytes;
        watched->exchange = NULL;
    }
    struct kld_exchange *exchange = *context;
    if (exchange) {
        if (code == MHD_REQUEST_TERMINATED_TIMEOUT_REACHED && !exchange->too_slow)
            kld_watch_too_slow(&((struct kld_http *)user)->watch, exchange);
        exchange->misframed |= was_answered_by_mhd(exchange, watched);
        close_exchange(user, exchange);
    }
    *context = NULL;
}

static void watch(struct kld_http *http, struct MHD_Connection *connection, void **context) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info)
        *context = kld_watch_add(&http->watch, info->connect_fd);
    struct kld_watched *watched = *context;
    if (!watched)
        return; /* it has no keys, either */
    watched->metrics = http->metrics;
    if (watched->metrics)
        MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, KLD_METRICS_IDLE_S);
    if (http->gateway->tls) {
        watched->keys = kld_tls_acquire(http->gateway->tls);
        kld_tls_begin(connection, watched->keys);
    }
}

static void connection_changed(void *user, struct MHD_Connection *connection, void **context,
                               enum MHD_ConnectionNotificationCode code) {
    struct kld_http *http = user;
    bool opened = code == MHD_CONNECTION_NOTIFY_STARTED;
    if (opened) {
        kld_stats_add(http->gateway->stats, KLD_STAT_http_connections, 1);
        http->taken = true;
        kld_stats_add(http->gateway->stats, KLD_STAT_http_connections_total, 1);
        watch(http, connection, context);
    } else if (*context) {
        struct kld_watched *watched = *context;
        /* MHD does not tell of its end where it cannot watch the socket again, and has freed the
         * headers by now (0.9.75). Of no connection it finds none. */
        if (watched->exchange) {
            watched->exchange->connection = NULL;
            close_exchange(http, watched->exchange);
        }
        kld_partings_take(&http->partings, watched);
        kld_tls_release(watched->keys);
        kld_watch_remove(&http->watch, *context);
        *context = NULL;
    }
    if (!opened) { /* behind what counts it among those that part: it is never counted nowhere */
        kld_stats_add(http->gateway->stats, KLD_STAT_http_connections, -1);
        atomic_fetch_sub(&http->gateway->connections, 1);
    }
}

void kld_http_take(struct kld_http *http, int fd, const struct sockaddr *peer, socklen_t peer_bytes,
                   bool metrics) {
    if (http->closing) {
        close(fd);
        atomic_fetch_sub(&http->gateway->connections, 1);
        return;
    }
    http->taken = false;
    http->metrics = metrics;
    kld_drive_again(&http->drive);
    /* Where it fails MHD has closed the socket, and told so only if it had told of its opening. */
    if (MHD_add_connection(http->daemon, fd, peer, peer_bytes) != MHD_YES && !http->taken) {
        atomic_fetch_sub(&http->gateway->connections, 1);
        (void)kld_tls_end_if_broken(http->gateway->tls, http->gateway->common->draining);
    }
}

void kld_exchange_release(struct kld_exchange *exchange) {
    if (exchange->suspended || exchange->lingered)
        kld_drive_again(&exchange->gateway->http->drive);
    if (!exchange->suspended)
        return;
    exchange->suspended = false;
    MHD_resume_connection(exchange->connection);
}

void kld_exchange_gone(struct kld_exchange *exchange) {
    exchange->gone = true;
    kld_exchange_release(exchange);
}

void kld_exchange_pause(struct kld_exchange *exchange) { exchange->paused = true; }

void kld_exchange_continue(struct kld_exchange *exchange) {
    exchange->paused = false;
    kld_exchange_release(exchange);
}

void kld_exchange_reply(struct kld_exchange *exchange, unsigned http_status,
                        struct MHD_Response *response) {
    if (exchange->replied) {
        if (response)
            MHD_destroy_response(response);
        return;
    }
    exchange->replied = true;
    exchange->http_status = http_status;
    exchange->response = response;
    exchange->paused = false;
    kld_exchange_release(exchange);
}

/* A reply of MHD's own, to what is not HTTP: it is told of in words alone (0.9.75). */
static void listen_to_mhd(void *user, const char *format, va_list arguments) {
    static const char says[] = "Error processing request (HTTP response code is %u";
    const struct kld_http *http = user;
    if (strncmp(format, says, sizeof says - 1) != 0)
        return;
    kld_stats_http_reply(http->gateway->stats, va_arg(arguments, unsigned));
    kld_stats_rejected(http->gateway->stats, KLD_REJECT_http_not_http);
}

/* A NUL in a path (%00) must not end it early: it becomes a byte that no route and no name has. */
static size_t unescape(void *user, struct MHD_Connection *connection, char *text) {
    size_t length = MHD_http_unescape(text);
    for (char *nul; (nul = memchr(text, '\0', length));)
        *nul = '\xff';
    return length;
}

static struct MHD_Daemon *start_daemon(struct kld_http *http) {
    const struct kld_config *config = http->gateway->config;
    bool tls = http->gateway->tls != NULL;
    struct MHD_OptionItem https[] = {
        {MHD_OPTION_HTTPS_CERT_CALLBACK, 0, kld_tls_callback()},
        {MHD_OPTION_HTTPS_PRIORITIES, 0, (void *)(uintptr_t)TLS_PRIORITIES},
        {MHD_OPTION_END, 0, NULL}};
    if (!tls)
        https[0].option = MHD_OPTION_END;
    return MHD_start_daemon(
        MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG |
            (tls ? MHD_USE_TLS : 0),
        0, NULL, NULL, access_handler, http, MHD_OPTION_EXTERNAL_LOGGER, listen_to_mhd, http,
        MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL, MHD_OPTION_URI_LOG_CALLBACK,
        kld_headers_note_uri, NULL, MHD_OPTION_ARRAY, https, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)config->http_connections_max + KLD_METRICS_RESERVE, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)((config->http_idle_ms + 999) / 1000), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)KLD_HTTP_HEAD_BYTES_MAX, MHD_OPTION_CONNECTION_MEMORY_INCREMENT,
        (size_t)KLD_HTTP_HEAD_BYTES_MAX, MHD_OPTION_NOTIFY_COMPLETED, completed, http,
        MHD_OPTION_NOTIFY_CONNECTION, connection_changed, http, MHD_OPTION_END);
}

enum kld_status kld_http_open(struct kld_gateway *gateway, const struct kld_http_handler *handler,
                              struct kld_http **ret_http, struct kld_error *err) {
    enum kld_status status = kld_headers_check_library(MHD_get_version(), err);
    if (status)
        return status;
    struct kld_http *http = calloc(1, sizeof *http);
    if (!http)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    http->gateway = gateway;
    http->handler = handler;
    http->spare = kld_exchange_spare();
    http->daemon = http->spare ? start_daemon(http) : NULL;
    if (!http->daemon || kld_drive_open(&http->drive, &gateway->loop, http->daemon, &http->watch,
                                        gateway->links, gateway->common->spin_ns) != 0) {
        if (http->daemon)
            MHD_stop_daemon(http->daemon);
        MHD_destroy_response(http->spare);
        free(http);
        return kld_error_set(err, KLD_UNAVAILABLE, "the HTTP server cannot be started");
    }
    kld_watch_init(&http->watch, &gateway->loop, gateway->config, gateway->stats);
    kld_partings_open(&http->partings, gateway);
    http->open_handles = 3;
    *ret_http = http;
    return KLD_OK;
}

static void part_closed(void *user) {
    struct kld_http *http = user;
    if (--http->open_handles)
        return;
    http->closed(http->closed_user);
    MHD_destroy_response(http->spare);
    free(http);
}

static void handle_closed(uv_handle_t *handle) { part_closed(handle->data); }

void kld_http_close(struct kld_http *http, void (*closed)(void *user), void *user) {
    struct kld_error error;
    kld_error_set(&error, KLD_UNAVAILABLE, "the server is shutting down; try again");
    http->closed = closed;
    http->closed_user = user;
    http->closing = true;
    for (struct kld_exchange *exchange = http->first; exchange; exchange = exchange->after)
        if (exchange->suspended || (exchange->lingered && !exchange->replied)) {
            kld_exchange_continue(exchange);
            http->handler->refuse(exchange, &error);
        }
    kld_partings_close(&http->partings, part_closed, http);
    kld_drive_close(&http->drive, part_closed, http);
    http->watch.timer.data = http;
    uv_close((uv_handle_t *)&http->watch.timer, handle_closed);
}
