/* replies.c - libFuzzer over what libkld makes of a hostile HTTP server: replies that are wrong, no
 * HTTP, cut, too long, too short, connections that end.
 *
 * The server is a function that has its turn when the client waits (turns/turns.h), which takes no
 * time; it answers each request as the input says, and rightly once that is at its end. The client
 * does the same calls each time: each returns in time with KLD_OK, or with an error that is
 * described; nothing is written outside the caller's tensors; then a new connection is served
 * rightly, and nothing is left: no memory, no descriptor.
 *
 * Input: 1 byte that chooses what the client does; then for each request 1 byte that says how it is
 * answered, and what that reads. */
#include <curl/curl.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/fuzz/common/fuzz.h"
#include "tests/fuzz/turns/turns.h"

#define PEERS 8
#define REQUEST_MAX 65536
#define LOSS 0.25f
#define ROWS 4
#define CLASSES 8
#define BUFFER_BYTES 16384 /* of libcurl */
#define GUARD 64           /* floats on both sides of the gradient */
#define CONNECT_NS 25000000ull
#define CALL_NS 25000000ull
#define RETURNS_NS 8000000000ull
/* Bytes that the kernel carries from one end to the other have come after so long, on one thread
 * nearly always at once. Where a call is to succeed more of it is given. */
#define SETTLE_US 100
#define SETTLE_RIGHT_US 5000

struct peer {
    int fd; /* -1: none */
    size_t have;
    char text[REQUEST_MAX];
};

static char url[64];
static struct fuzz_input script;
static int listener;
static struct peer peer[PEERS];
static unsigned peers; /* of these */
static unsigned fds_at_rest;

/* ---- The server ------------------------------------------------------------------------------ */

static void say(int fd, const void *data, size_t bytes) {
    (void)!send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void say_body(int fd, const char *status, const char *more, const void *body, size_t bytes) {
    char head[512];
    int used = snprintf(head, sizeof head, "HTTP/1.1 %s\r\n%sContent-Length: %zu\r\n\r\n", status,
                        more, bytes);
    say(fd, head, (size_t)used);
    say(fd, body, bytes);
}

#define GRADIENT_BYTES (ROWS * CLASSES * 4)
#define TEXT(x) TEXT_(x)
#define TEXT_(x) #x

static void say_right(int fd, bool infer) {
    static const char json[] =
        "{\"outputs\":[{\"name\":\"grad_predictions\",\"parameters\":{\"binary_data_size\":128}},"
        "{\"name\":\"loss\",\"parameters\":{\"binary_data_size\":4}}]}";
    char body[sizeof json - 1 + GRADIENT_BYTES + 4] = {0}, more[64];
    const float loss = LOSS;
    _Static_assert(GRADIENT_BYTES == 128, "as the text above says");
    if (!infer) {
        say_body(fd, "200 OK", "", "{\"name\":\"fuzz\",\"version\":\"1\"}", 30);
        return;
    }
    memcpy(body, json, sizeof json - 1);
    memcpy(body + sizeof body - 4, &loss, 4);
    snprintf(more, sizeof more, "Inference-Header-Content-Length: %zu\r\n", sizeof json - 1);
    say_body(fd, "200 OK", more, body, sizeof body);
}

static void say_made(int fd, struct fuzz_input *input) {
    static const char *const statuses[] = {"200 OK",    "200 OK",   "400 No", "503 Busy",
                                           "413 Large", "204 None", "301 Go", "500 Oh"};
    char body[4096], more[160];
    uint8_t how = fuzz_byte(input);
    size_t bytes = fuzz_bytes(input, body, fuzz_short(input) % sizeof body);
    size_t json = how & 0x80 ? fuzz_short(input) : bytes;
    size_t tail = how & 0x40 ? GRADIENT_BYTES + 4u : fuzz_byte(input);
    if (bytes + tail > sizeof body)
        tail = sizeof body - bytes;
    memset(body + bytes, 0x3e, tail);
    snprintf(more, sizeof more, "Inference-Header-Content-Length: %zu\r\n%s%s", json,
             how & 0x20 ? "Retry-After: 0\r\n" : "",
             how & 0x10 ? "KLD-Status: device_lost\r\n" : "");
    say_body(fd, statuses[how % 8], more, body, bytes + tail);
}

/* False: the connection is to be closed. */
static bool treat(int fd, bool infer, struct fuzz_input *input) {
    char raw[4096];
    size_t bytes;
    uint8_t how = input->at < input->end ? fuzz_byte(input) : 0;
    switch (how % 8) {
    case 1:
    case 2: say_made(fd, input); return true;
    case 3:
        bytes = fuzz_bytes(input, raw, fuzz_short(input) % sizeof raw);
        say(fd, raw, bytes);
        return how & 0x80;
    case 4: return false;
    case 5: return true; /* nothing */
    case 6: say_body(fd, "503 Busy", "Retry-After: 0\r\n", "{\"error\":\"busy\"}", 16); return true;
    case 7: /* cut */ say_right(fd, infer); return false;
    default: say_right(fd, infer); return true;
    }
}

/* Whole requests in what came. */
static bool serve(struct peer *from) {
    ssize_t bytes =
        recv(from->fd, from->text + from->have, sizeof from->text - 1 - from->have, MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (bytes <= 0)
        return false;
    from->have += (size_t)bytes;
    for (;;) {
        from->text[from->have] = '\0';
        char *blank = memmem(from->text, from->have, "\r\n\r\n", 4);
        if (!blank)
            return from->have + 1 < sizeof from->text;
        *blank = '\0';
        const char *length = strcasestr(from->text, "\r\nContent-Length: ");
        size_t whole =
            (size_t)(blank + 4 - from->text) + (length ? strtoull(length + 18, NULL, 10) : 0);
        *blank = '\r';
        if (from->have < whole)
            return whole < sizeof from->text;
        bool goes_on = treat(from->fd, from->text[0] == 'P', &script);
        from->have -= whole;
        memmove(from->text, from->text + whole, from->have);
        if (!goes_on)
            return false;
    }
}

static void hang_up(struct peer *from) {
    close(from->fd);
    from->fd = -1;
    peers--;
}

static bool welcome(void) {
    struct linger now = {.l_onoff = 1};
    int at_once = 1; /* else a part waits until the one before it is acknowledged */
    int place = 0;
    while (place < PEERS && peer[place].fd >= 0)
        place++;
    int fd = place < PEERS ? accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
    if (fd < 0)
        return false;
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now); /* no port is kept in use */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
    peers++;
    peer[place].fd = fd;
    peer[place].have = 0;
    return true;
}

static bool server_turn(void) {
    struct pollfd polled[1 + PEERS];
    polled[PEERS] = (struct pollfd){.fd = listener, .events = POLLIN};
    for (int i = 0; i < PEERS; i++)
        polled[i] = (struct pollfd){.fd = peer[i].fd, .events = POLLIN};
    if (poll(polled, 1 + PEERS, 0) <= 0)
        return false;
    bool did = false;
    for (int i = 0; i < PEERS; i++) {
        if (peer[i].fd < 0 || !polled[i].revents)
            continue;
        did = true;
        if (!serve(&peer[i]))
            hang_up(&peer[i]);
    }
    return (polled[PEERS].revents && welcome()) || did;
}

/* ---- The client ------------------------------------------------------------------------------ */

static bool is_fine(enum kld_status status, const struct kld_error *err) {
    if (status)
        require_error(status, err);
    return status == KLD_OK;
}

static float inputs[2 * ROWS * CLASSES], gradient[2 * GUARD + ROWS * CLASSES];

static struct kld_request request_of(void) {
    struct kld_request request = {.timeout_ns = CALL_NS};
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = ROWS;
    request.op.shape[1] = CLASSES;
    for (int i = 0; i < 3; i++)
        request.op.tensor[slots[i]].dtype = KLD_DTYPE_FP32;
    request.bytes[KLD_SLOT_PREDICTIONS].data = inputs;
    request.bytes[KLD_SLOT_TARGETS].data = inputs + ROWS * CLASSES;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = gradient + GUARD;
    return request;
}

static void require_guarded(void) {
    for (int i = 0; i < GUARD; i++)
        require(gradient[i] == 7 && gradient[GUARD + ROWS * CLASSES + i] == 7);
    for (int i = 0; i < 2 * ROWS * CLASSES; i++)
        require(inputs[i] == 0.125f);
}

static void ask(struct kld_connection *connection, struct kld_error *err) {
    static char metrics[8192];
    struct kld_server_info info;
    if (is_fine(kld_info(connection, &info, err), err)) {
        require(memchr(info.backend, 0, sizeof info.backend) != NULL);
        require(memchr(info.device, 0, sizeof info.device) != NULL);
        require(memchr(info.version, 0, sizeof info.version) != NULL);
    }
    if (is_fine(kld_metrics(connection, metrics, sizeof metrics, err), err))
        require(memchr(metrics, 0, sizeof metrics) != NULL);
    is_fine(kld_ping(connection, NULL, err), err);
}

/* libkld has 2.5 MB of buffers for a request, and to make and to poison these took half the time.
 * What goes through them here is a few KB. */
CURLcode __real_curl_easy_setopt(CURL *easy, CURLoption option, void *value);
CURLcode __wrap_curl_easy_setopt(CURL *easy, CURLoption option, void *value);
CURLcode __wrap_curl_easy_setopt(CURL *easy, CURLoption option, void *value) {
    bool buffer = option == CURLOPT_BUFFERSIZE || option == CURLOPT_UPLOAD_BUFFERSIZE;
    return __real_curl_easy_setopt(easy, option, buffer ? (void *)(uintptr_t)BUFFER_BYTES : value);
}

static void use(uint8_t what, uint64_t connect_ns) {
    const struct kld_connect_options options = {.connect_timeout_ns = connect_ns, .lazy = what & 1};
    struct kld_connection *connection = NULL;
    struct kld_error err = {.status = KLD_OK};
    struct kld_request request = request_of();
    struct kld_result result;
    if (!is_fine(kld_connect(url, &options, &connection, &err), &err))
        return;
    is_fine(kld_run(connection, &request, &result, &err), &err);
    if (what & 2)
        ask(connection, &err);
    if (what & 4)
        is_fine(kld_run(connection, &request, &result, &err), &err);
    kld_close(connection);
}

static void require_right(void) {
    const struct kld_connect_options options = {.connect_timeout_ns = 5000000000u};
    struct kld_connection *connection = NULL;
    struct kld_error err = {.status = KLD_OK};
    struct kld_request request = request_of();
    struct kld_result result;
    request.timeout_ns = 5000000000u;
    require(kld_connect(url, &options, &connection, &err) == KLD_OK);
    require(kld_run(connection, &request, &result, &err) == KLD_OK);
    require(result.scalar && result.loss == (double)LOSS);
    kld_close(connection);
}

/* The kernel may still have to carry the end of one. */
static void require_no_peers(void) {
    fuzz_turns_give();
    for (uint64_t until = fuzz_now_ns() + RETURNS_NS; peers && fuzz_now_ns() < until;)
        fuzz_nap_us(100);
    require(peers == 0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    require(bind(listener, (struct sockaddr *)&address, bytes) == 0 && listen(listener, 16) == 0);
    getsockname(listener, (struct sockaddr *)&address, &bytes);
    snprintf(url, sizeof url, "http://127.0.0.1:%d", ntohs(address.sin_port));
    unsetenv("http_proxy");
    for (int i = 0; i < PEERS; i++)
        peer[i].fd = -1;
    for (int i = 0; i < 2 * ROWS * CLASSES; i++)
        inputs[i] = 0.125f;
    for (int i = 0; i < 2 * GUARD + ROWS * CLASSES; i++)
        gradient[i] = 7;
    fuzz_turns_open(server_turn, SETTLE_RIGHT_US);
    require_right();
    require_no_peers();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!fds_at_rest) /* not before: libFuzzer opens some of its own */
        fds_at_rest = fuzz_open_fds();
    script = (struct fuzz_input){data, data + bytes};
    uint8_t what = fuzz_byte(&script);
    uint64_t began = fuzz_now_ns();
    fuzz_turns_settle(SETTLE_US);
    use(what, CONNECT_NS);
    require(fuzz_now_ns() - began < RETURNS_NS);
    script = (struct fuzz_input){NULL, NULL};
    fuzz_turns_settle(SETTLE_RIGHT_US);
    require_no_peers();
    require_right();
    require_guarded();
    require_no_peers();
    fuzz_require_fds(fds_at_rest);
    fuzz_require_no_leaks();
    return 0;
}
