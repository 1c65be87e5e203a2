/* http_load.c - the other side of the HTTP measurements (gateway.py): a bare libmicrohttpd server
 * that says hello, a TCP sink, and a client that loads any of them. One thread, epoll; prints one
 * line of JSON. Not a test: a reply that is not 200 ends it; a flood takes 503 too. */
#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define REPLY_BYTES_MAX (64 << 10)
#define FIRST_REPLY_NS 20000000000u
#define DRAIN_NS 10000000000u
#define LATENCIES_MAX (4 << 20)
#define CONNECTIONS_MAX 4096
#define PIECE_BYTES (1 << 20)

static void fail(const char *what) {
    fprintf(stderr, "http_load: %s: %s\n", what, strerror(errno));
    exit(EXIT_FAILURE);
}

static uint64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static uint64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static int dial(int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return fd;
}

/* ---- Servers ----------------------------------------------------------------------------------*/

/* Reads a body, if there is one, and says hello. */
static enum MHD_Result hello(void *user, struct MHD_Connection *connection, const char *url,
                             const char *method, const char *version, const char *data,
                             size_t *size, void **context) {
    static int seen;
    if (!*context) {
        *context = &seen;
        return MHD_YES;
    }
    if (*size) {
        *size = 0;
        return MHD_YES;
    }
    *context = NULL;
    struct MHD_Response *response =
        MHD_create_response_from_buffer(5, (void *)(uintptr_t) "hello", MHD_RESPMEM_PERSISTENT);
    enum MHD_Result result = MHD_queue_response(connection, 200, response);
    MHD_destroy_response(response);
    return result;
}

static _Noreturn void run_hello(int port, unsigned threads) {
    /* A pool of one is none: MHD wants two or more. */
    if (!MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD, (uint16_t)port, NULL, NULL, hello, NULL,
                          MHD_OPTION_CONNECTION_LIMIT, 4096u,
                          threads > 1 ? MHD_OPTION_THREAD_POOL_SIZE : MHD_OPTION_END, threads,
                          MHD_OPTION_END))
        fail("MHD_start_daemon");
    puts("ready");
    fflush(stdout);
    for (;;)
        pause();
}

/* Takes `bytes` bytes of each connection and answers with one. */
static _Noreturn void run_sink(int port, uint64_t bytes) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    char *piece = malloc(PIECE_BYTES);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (!piece || bind(listener, (struct sockaddr *)&at, sizeof at) != 0 ||
        listen(listener, 8) != 0)
        fail("listen");
    puts("ready");
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        uint64_t have = 0;
        ssize_t got;
        while (have < bytes && (got = recv(fd, piece, PIECE_BYTES, 0)) > 0)
            have += (uint64_t)got;
        if (send(fd, "x", 1, MSG_NOSIGNAL) < 0)
            fail("send");
        close(fd);
    }
}

/* ---- Clients ----------------------------------------------------------------------------------*/

/* The head, then `bytes` bytes of FP32 numbers of 4.4e-5, probabilities of some 32,768 classes;
 * until the first byte of the answer. */
static int run_stream(int port, uint64_t bytes, const char *head, size_t head_bytes) {
    char *piece = malloc(PIECE_BYTES), reply[4096];
    if (!piece)
        fail("memory");
    memset(piece, 0x38, PIECE_BYTES);
    int fd = dial(port);
    uint64_t begun = now_ns();
    if (send(fd, head, head_bytes, MSG_NOSIGNAL) != (ssize_t)head_bytes)
        fail("send");
    for (uint64_t left = bytes; left;) {
        ssize_t put = send(fd, piece, left < PIECE_BYTES ? left : PIECE_BYTES, MSG_NOSIGNAL);
        if (put <= 0)
            fail("send");
        left -= (uint64_t)put;
    }
    uint64_t sent = now_ns();
    ssize_t got = recv(fd, reply, sizeof reply - 1, 0);
    if (got <= 0 || (got > 1 && strncmp(reply, "HTTP/1.1 200", 12) != 0))
        fail("the reply");
    uint64_t end = now_ns();
    printf("{\"bytes\": %llu, \"sent_s\": %.6f, \"answered_s\": %.6f}\n", (unsigned long long)bytes,
           (double)(sent - begun) / 1e9, (double)(end - begun) / 1e9);
    return EXIT_SUCCESS;
}

struct peer {
    int fd;
    size_t have;
    uint64_t asked_ns;
    char reply[REPLY_BYTES_MAX];
};

/* The number in the header that says how long the body is, in large or in small letters; NULL:
 * none. */
static const char *body_length(const struct peer *peer, size_t headers) {
    static const char *const names[] = {"\r\nContent-Length: ", "\r\ncontent-length: "};
    for (int i = 0; i < 2; i++) {
        const char *found = memmem(peer->reply, headers, names[i], strlen(names[i]));
        if (found)
            return found + strlen(names[i]);
    }
    return NULL;
}

/* The status of the reply that is there as a whole; 0: not yet. */
static int status_of(const struct peer *peer) {
    const char *end = memmem(peer->reply, peer->have, "\r\n\r\n", 4);
    size_t headers = end ? (size_t)(end - peer->reply) : 0;
    const char *length = end ? body_length(peer, headers) : NULL;
    if (end && !length)
        fail("a reply without Content-Length");
    if (!end || peer->have < headers + 4 + strtoull(length, NULL, 10))
        return 0;
    return atoi(peer->reply + strlen("HTTP/1.1 "));
}

static void ask(struct peer *peer, const char *request, size_t bytes) {
    peer->have = 0;
    peer->asked_ns = now_ns();
    if (send(peer->fd, request, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
        fail("send");
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static int run_load(int port, int connections, double seconds, const char *request, size_t bytes) {
    struct peer *peers = calloc((size_t)connections, sizeof *peers);
    uint32_t *took_us = malloc(LATENCIES_MAX * sizeof *took_us);
    struct epoll_event events[64];
    size_t count = 0;
    int epoll = epoll_create1(0);
    if (!peers || !took_us || epoll < 0)
        fail("memory");
    for (int i = 0; i < connections; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &peers[i]};
        peers[i].fd = dial(port);
        epoll_ctl(epoll, EPOLL_CTL_ADD, peers[i].fd, &event);
        ask(&peers[i], request, bytes);
    }
    uint64_t used_before_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    uint64_t begun = now_ns(), end = begun + (uint64_t)(seconds * 1e9), now = begun;
    uint64_t patience = end + FIRST_REPLY_NS; /* with a server that has just begun */
    while ((now < end || (!count && now < patience)) && count < LATENCIES_MAX) {
        int ready = epoll_wait(epoll, events, 64, 1000);
        for (int i = 0; i < ready && count < LATENCIES_MAX; i++) {
            struct peer *peer = events[i].data.ptr;
            ssize_t got =
                recv(peer->fd, peer->reply + peer->have, sizeof peer->reply - peer->have, 0);
            if (got <= 0)
                fail("recv");
            peer->have += (size_t)got;
            int status = status_of(peer);
            if (!status)
                continue;
            if (status != 200)
                fail("a reply that is not 200");
            took_us[count++] = (uint32_t)((now_ns() - peer->asked_ns) / 1000);
            ask(peer, request, bytes);
        }
        now = now_ns();
    }
    uint64_t used_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    errno = ETIMEDOUT;
    if (!count)
        fail("no reply");
    qsort(took_us, count, sizeof *took_us, by_size);
    double took = (double)(now - begun) / 1e9;
    printf("{\"requests_per_s\": %.0f, \"p50_us\": %u, \"p99_us\": %u, \"requests\": %zu, "
           "\"busy\": %.2f}\n",
           (double)count / took, took_us[count / 2], took_us[count - count / 100 - 1], count,
           (double)(used_ns - used_before_ns) / 1e9 / took);
    for (int i = 0; i < connections; i++)
        close(peers[i].fd);
    close(epoll);
    free(took_us);
    free(peers);
    return EXIT_SUCCESS;
}

/* ---- More than the server can take
 * -------------------------------------------------------------*/

struct tally {
    uint32_t *took_us;
    size_t count, in_time; /* in_time: before the flood's end */
};

/* How a flood fared: with 200, and with 503. */
struct flood {
    struct peer *peers;
    uint32_t *idle; /* a stack of peers that wait for nothing */
    size_t idle_count, offered, without_connection;
    struct tally answered, refused;
    int epoll, port;
};

static void note(struct tally *tally, uint64_t asked_ns) {
    if (tally->count < LATENCIES_MAX)
        tally->took_us[tally->count++] = (uint32_t)((now_ns() - asked_ns) / 1000);
}

static void open_peer(struct flood *flood, struct peer *peer) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = peer};
    peer->fd = dial(flood->port);
    epoll_ctl(flood->epoll, EPOLL_CTL_ADD, peer->fd, &event);
}

static void take_reply(struct flood *flood, struct peer *peer) {
    ssize_t got = recv(peer->fd, peer->reply + peer->have, sizeof peer->reply - peer->have, 0);
    if (got <= 0)
        fail("recv");
    peer->have += (size_t)got;
    int status = status_of(peer);
    if (!status)
        return;
    if (status != 200 && status != 503)
        fail("a reply that is neither 200 nor 503");
    note(status == 200 ? &flood->answered : &flood->refused, peer->asked_ns);
    flood->idle[flood->idle_count++] = (uint32_t)(peer - flood->peers);
}

/* What is due by now of `rate` requests a second, each on a connection that waits for nothing. */
static void offer(struct flood *flood, uint64_t passed_ns, double rate, const char *request,
                  size_t bytes) {
    size_t due = (size_t)((double)passed_ns / 1e9 * rate);
    for (; flood->offered < due; flood->offered++) {
        if (flood->idle_count)
            ask(&flood->peers[flood->idle[--flood->idle_count]], request, bytes);
        else
            flood->without_connection++;
    }
}

/* What still waits at the end is the slowest of all: its replies count for how long they took, and
 * for no rate. After DRAIN_NS one that has none is as old as it is by then. */
static void drain(struct flood *flood, size_t connections) {
    struct epoll_event events[64];
    uint64_t end = now_ns() + DRAIN_NS;
    while (flood->idle_count < connections && now_ns() < end) {
        int ready = epoll_wait(flood->epoll, events, 64, 100);
        for (int i = 0; i < ready; i++)
            take_reply(flood, events[i].data.ptr);
    }
    for (size_t i = 0; i < flood->idle_count; i++)
        flood->peers[flood->idle[i]].asked_ns = 0;
    for (size_t i = 0; i < connections; i++)
        if (flood->peers[i].asked_ns)
            note(&flood->answered, flood->peers[i].asked_ns);
}

static void print_tally(const char *name, struct tally *tally, double seconds) {
    qsort(tally->took_us, tally->count, sizeof *tally->took_us, by_size);
    size_t count = tally->count;
    printf("\"%s_per_s\": %.0f, \"%s_p50_us\": %u, \"%s_p99_us\": %u, ", name,
           (double)tally->in_time / seconds, name, count ? tally->took_us[count / 2] : 0, name,
           count ? tally->took_us[count - count / 100 - 1] : 0);
}

static int run_flood(int port, int connections, double seconds, double rate, const char *request,
                     size_t bytes) {
    struct flood flood = {.port = port, .epoll = epoll_create1(0)};
    struct epoll_event events[64];
    flood.peers = calloc((size_t)connections, sizeof *flood.peers);
    flood.idle = calloc((size_t)connections, sizeof *flood.idle);
    flood.answered.took_us = malloc(LATENCIES_MAX * sizeof(uint32_t));
    flood.refused.took_us = malloc(LATENCIES_MAX * sizeof(uint32_t));
    if (!flood.peers || !flood.idle || !flood.answered.took_us || !flood.refused.took_us)
        fail("memory");
    for (int i = 0; i < connections; i++) {
        open_peer(&flood, &flood.peers[i]);
        flood.idle[flood.idle_count++] = (uint32_t)i;
    }
    uint64_t begun = now_ns(), end = begun + (uint64_t)(seconds * 1e9), now;
    while ((now = now_ns()) < end) {
        offer(&flood, now - begun, rate, request, bytes);
        int ready = epoll_wait(flood.epoll, events, 64, 0);
        for (int i = 0; i < ready; i++)
            take_reply(&flood, events[i].data.ptr);
    }
    double took = (double)(now - begun) / 1e9;
    size_t waiting = (size_t)connections - flood.idle_count;
    flood.answered.in_time = flood.answered.count;
    flood.refused.in_time = flood.refused.count;
    drain(&flood, (size_t)connections);
    printf("{");
    print_tally("answered", &flood.answered, took);
    print_tally("refused", &flood.refused, took);
    printf("\"offered_per_s\": %.0f, \"without_connection_per_s\": %.0f, "
           "\"waiting_per_s\": %.0f}\n",
           (double)flood.offered / took, (double)flood.without_connection / took,
           (double)waiting / took);
    free(flood.peers);
    free(flood.idle);
    free(flood.answered.took_us);
    free(flood.refused.took_us);
    return EXIT_SUCCESS; /* what is open ends with the process */
}

int main(int argc, char **argv) {
    static char text[1 << 20];
    size_t bytes = 0;
    if (argc >= 3 && strcmp(argv[1], "hello") == 0)
        run_hello(atoi(argv[2]), argc >= 4 ? (unsigned)atoi(argv[3]) : 1);
    if (argc >= 4 && strcmp(argv[1], "sink") == 0)
        run_sink(atoi(argv[2]), strtoull(argv[3], NULL, 10));
    if (argc >= 4)
        bytes = fread(text, 1, sizeof text, stdin); /* the head, or the whole request */
    if (argc >= 4 && strcmp(argv[1], "stream") == 0)
        return run_stream(atoi(argv[2]), strtoull(argv[3], NULL, 10), text, bytes);
    if (argc >= 5 && strcmp(argv[1], "load") == 0 && atoi(argv[3]) <= CONNECTIONS_MAX)
        return run_load(atoi(argv[2]), atoi(argv[3]), atof(argv[4]), text, bytes);
    if (argc >= 6 && strcmp(argv[1], "flood") == 0 && atoi(argv[3]) <= CONNECTIONS_MAX)
        return run_flood(atoi(argv[2]), atoi(argv[3]), atof(argv[4]), atof(argv[5]), text, bytes);
    fputs(
        "http_load hello PORT [THREADS] | sink PORT BYTES | stream PORT BYTES <head |\n"
        "          load PORT CONNECTIONS SECONDS | flood PORT CONNECTIONS SECONDS RATE <request\n",
        stderr);
    return 2;
}
