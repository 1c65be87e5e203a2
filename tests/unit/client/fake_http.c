/* fake_http.c - see fake_http.h. A thread for each connection. */
#include "tests/unit/client/fake_http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

/* For ThreadSanitizer, which asks a program for it by this name. libcurl 7.88 closes a socket that
 * is still connecting before it says that nothing is to be heard of it any more: epoll_ctl() is
 * then asked to remove a number that accept() here may have by now. It is in no set of the client,
 * and nothing happens; only beside a server in the same process can that be seen at all. */
#ifdef __SANITIZE_THREAD__
__attribute__((visibility("default"))) const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void) { return "race:kld_http_socket_changed\n"; }
#endif

struct peer {
    struct fake_http *server;
    int fd;
};

/* All of it, or 0 when the peer or the test is gone. */
static int receive_all(struct peer *peer, char *to, size_t bytes) {
    for (size_t have = 0; have < bytes;) {
        struct pollfd polled = {peer->fd, POLLIN, 0};
        if (peer->server->stop)
            return 0;
        if (poll(&polled, 1, 20) <= 0)
            continue;
        ssize_t count = recv(peer->fd, to + have, bytes - have, 0);
        if (count <= 0)
            return 0;
        have += (size_t)count;
    }
    return 1;
}

static void send_all(struct peer *peer, const char *from, size_t bytes, size_t piece) {
    for (size_t sent = 0; sent < bytes;) {
        size_t part = bytes - sent < piece ? bytes - sent : piece;
        ssize_t count = send(peer->fd, from + sent, part, MSG_NOSIGNAL);
        if (count <= 0)
            return;
        sent += (size_t)count;
        if (piece < 100)
            usleep(200);
    }
}

static int receive_headers(struct peer *peer, char *to, size_t capacity) {
    size_t length = 0;
    while (length + 1 < capacity) {
        if (!receive_all(peer, to + length, 1))
            return 0;
        to[++length] = '\0';
        if (length >= 4 && memcmp(to + length - 4, "\r\n\r\n", 4) == 0)
            return 1;
    }
    return 0;
}

static const char *header(const char *headers, const char *name) {
    const char *found = strcasestr(headers, name);
    return found ? found + strlen(name) : "0";
}

static void answer_text(struct peer *peer, const char *status, const char *more, const char *body) {
    char text[1024];
    int length = snprintf(text, sizeof text, "HTTP/1.1 %s\r\n%sContent-Length: %zu\r\n\r\n%s",
                          status, more, strlen(body), body);
    send_all(peer, text, (size_t)length, 1 << 20);
}

static void answer_infer(struct peer *peer, int mode, const char *head, const float *tail,
                         size_t elements) {
    int gradient = strstr(head, "\"grad_predictions\"") != NULL, rows = 0;
    char row_losses[128] = "";
    float loss = 0;
    for (size_t i = 0; i < elements; i++)
        loss += tail[i] - tail[elements + i];
    char json[1024], start[512];
    int json_bytes;
    if (strstr(head, "\"row_loss\"") && strstr(head, "\"shape\":["))
        rows = atoi(strstr(head, "\"shape\":[") + 9);
    if (rows)
        snprintf(row_losses, sizeof row_losses,
                 "{\"name\":\"row_loss\",\"parameters\":{\"binary_data_size\":%d}},", rows * 8);
    if (mode == FAKE_HTTP_NONSENSE)
        json_bytes = snprintf(json, sizeof json, "{\"outputs\":[}");
    else if (gradient)
        json_bytes = snprintf(json, sizeof json,
                              "{\"outputs\":[%s{\"name\":\"grad_predictions\",\"parameters\":{"
                              "\"binary_data_size\":%zu}},{\"name\":\"loss\",\"parameters\":{"
                              "\"binary_data_size\":4}}]}",
                              row_losses, elements * 4);
    else
        json_bytes = snprintf(json, sizeof json,
                              "{\"model_name\":\"kl_div\", \"x\":[1,{\"y\":\"]\"}], \"outputs\":[{"
                              "\"name\":\"loss\",\"datatype\":\"FP32\",\"shape\":[1],"
                              "\"parameters\":{\"binary_data_size\":%d}}]}",
                              mode == FAKE_HTTP_WRONG_SIZE ? 8 : 4);
    size_t row_bytes = (size_t)rows * 8, gradient_bytes = gradient ? elements * 4 : 0;
    size_t tail_bytes = row_bytes + gradient_bytes + 4;
    char *body = calloc(1, tail_bytes + 8);
    for (size_t i = 0; rows && i < elements; i++)
        ((double *)body)[i / (elements / (size_t)rows)] += (double)(tail[i] - tail[elements + i]);
    for (size_t i = 0; gradient && i < elements; i++)
        ((float *)(body + row_bytes))[i] = 2 * tail[i];
    memcpy(body + row_bytes + gradient_bytes, &loss, 4);
    size_t sent = mode == FAKE_HTTP_SHORT        ? tail_bytes - 2
                  : mode == FAKE_HTTP_LONG       ? tail_bytes + 8
                  : mode == FAKE_HTTP_WRONG_SIZE ? tail_bytes + 4
                                                 : tail_bytes;
    int start_bytes = snprintf(start, sizeof start, "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n",
                               (size_t)json_bytes + sent);
    if (mode != FAKE_HTTP_NO_LENGTH)
        start_bytes += snprintf(start + start_bytes, sizeof start - (size_t)start_bytes,
                                "inference-header-content-length: %d\r\n", json_bytes);
    start_bytes += snprintf(start + start_bytes, sizeof start - (size_t)start_bytes, "\r\n");
    size_t piece = mode == FAKE_HTTP_IN_PIECES ? 7 : 1 << 20;
    send_all(peer, start, (size_t)start_bytes, piece);
    send_all(peer, json, (size_t)json_bytes, piece);
    send_all(peer, body, mode == FAKE_HTTP_CUT ? sent / 2 : sent, piece);
    free(body);
}

/* One request; 0: the connection ends. */
static int serve(struct peer *peer) {
    struct fake_http *server = peer->server;
    char headers[4096];
    if (!receive_headers(peer, headers, sizeof headers))
        return 0;
    if (strncmp(headers, "GET /v2/health/ready", 20) == 0) {
        if (server->not_ready > 0 && server->not_ready-- > 0)
            answer_text(peer, "503 Service Unavailable", "", "");
        else
            answer_text(peer, "200 OK", "", "");
        return 1;
    }
    if (strncmp(headers, "GET ", 4) == 0) {
        const char *said = server->metadata, *turned_away = server->turned_away;
        if (turned_away) {
            answer_text(peer, turned_away, "", "{\"error\":\"not now\"}");
            return 1;
        }
        answer_text(peer, "200 OK", "", said ? said : "{\"name\":\"fake\",\"version\":\"1.2\"}");
        return 1;
    }
    size_t head_bytes = strtoul(header(headers, "Inference-Header-Content-Length: "), NULL, 10);
    size_t bytes = strtoul(header(headers, "\r\nContent-Length: "), NULL, 10);
    char *body = malloc(bytes + 1);
    int whole = receive_all(peer, body, bytes);
    char head[sizeof server->last_head] = "";
    memcpy(head, body, head_bytes < sizeof head ? head_bytes : 0);
    pthread_mutex_lock(&server->lock);
    memcpy(server->last_head, head, sizeof head);
    sscanf(header(headers, "Authorization: "), "%255[^\r]", server->last_authorization);
    sscanf(header(headers, "\r\ntraceparent: "), "%63[^\r]", server->last_traceparent);
    pthread_mutex_unlock(&server->lock);
    int mode = server->times > 0 && server->times-- > 0 ? server->mode : FAKE_HTTP_GOOD;
    server->requests++;
    size_t elements = (bytes - head_bytes) / 8;
    if (mode == FAKE_HTTP_LATE)
        usleep(300000);
    float *tail = malloc(bytes - head_bytes + 1);
    memcpy(tail, body + head_bytes, bytes - head_bytes);
    if (!whole || mode == FAKE_HTTP_HANG_UP)
        whole = 0;
    else if (mode == FAKE_HTTP_BUSY)
        answer_text(peer, "503 Service Unavailable", "Retry-After: 0\r\n", "{\"error\":\"busy\"}");
    else if (mode == FAKE_HTTP_BUSY_1S)
        answer_text(peer, "503 Service Unavailable", "Retry-After: 1\r\n", "{\"error\":\"busy\"}");
    else if (mode == FAKE_HTTP_LOST)
        answer_text(peer, "503 Service Unavailable", "kld-status: device_lost\r\n",
                    "{\"error\":\"failed\"}");
    else if (mode == FAKE_HTTP_INVALID)
        answer_text(peer, "400 Bad Request", "", "{\"error\":\"no \\\"such\\u0020thing\\\"\"}");
    else if (mode == FAKE_HTTP_LOCKED)
        answer_text(peer, "401 Unauthorized", "", "{\"error\":\"the token is not known here\"}");
    else if (mode == FAKE_HTTP_PLAIN_500)
        answer_text(peer, "500 Oops", "", "<html>");
    else if (mode != FAKE_HTTP_SILENT)
        answer_infer(peer, mode, head, tail, elements);
    free(tail);
    free(body);
    return whole && mode != FAKE_HTTP_CUT && mode != FAKE_HTTP_LONG;
}

static void *run_peer(void *argument) {
    struct peer *peer = argument;
    struct fake_http *server = peer->server;
    while (serve(peer))
        ;
    close(peer->fd);
    free(peer);
    server->threads--;
    return NULL;
}

static void *run(void *argument) {
    struct fake_http *server = argument;
    while (!server->stop) {
        struct pollfd polled = {server->listener, POLLIN, 0};
        if (poll(&polled, 1, 20) <= 0)
            continue;
        struct peer *peer = malloc(sizeof *peer);
        *peer = (struct peer){server, accept(server->listener, NULL, NULL)};
        int one = 1;
        setsockopt(peer->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        pthread_t thread;
        server->threads++;
        if (peer->fd < 0 || pthread_create(&thread, NULL, run_peer, peer) != 0)
            abort();
        pthread_detach(thread);
    }
    return NULL;
}

void fake_http_open(struct fake_http *server) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    pthread_mutex_init(&server->lock, NULL);
    server->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(server->listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(server->listener, 64) != 0 ||
        getsockname(server->listener, (struct sockaddr *)&address, &length) != 0 ||
        pthread_create(&server->thread, NULL, run, server) != 0)
        abort();
    snprintf(server->url, sizeof server->url, "http://127.0.0.1:%d/", ntohs(address.sin_port));
}

void fake_http_close(struct fake_http *server) {
    server->stop = 1;
    pthread_join(server->thread, NULL);
    close(server->listener);
    while (server->threads > 0)
        usleep(1000);
}
