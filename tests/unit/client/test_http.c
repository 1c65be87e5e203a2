/* test_http.c - the HTTP connection against a server that misbehaves on demand. */
#include "tests/unit/client/close_in_child.h"
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/client/fake_http.h"

#define ROWS 3
#define CLASSES 50
#define COUNT (ROWS * CLASSES)

static struct fake_http server;
static struct kld_connection *connection;
static struct kld_error error;
static float q[COUNT], p[COUNT], gradient[COUNT];

static void setup(const struct kld_connect_options *options) {
    fake_http_open(&server);
    enum kld_status status = kld_connect(server.url, options, &connection, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
}

static void teardown(void) {
    kld_close(connection);
    fake_http_close(&server);
}

static struct kld_request make_request(void) {
    for (int i = 0; i < COUNT; i++) {
        q[i] = (float)(i + 1);
        p[i] = 1;
        gradient[i] = 0;
    }
    return small_request(ROWS, CLASSES, q, p, gradient);
}

#define LOSS ((float)(COUNT * (COUNT + 1) / 2 - COUNT))

static void check_answer(enum kld_status status, const struct kld_result *result) {
    ck_assert_msg(status == KLD_OK, "%d: %s", status, error.text);
    ck_assert(result->scalar && result->loss == (double)LOSS);
    for (int i = 0; i < COUNT; i++)
        ck_assert(gradient[i] == 2 * (float)(i + 1));
}

/* Of this process's descriptors those that lead to the server; all of them close in what it
 * executes. */
static int closing_links(void) {
    int links = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_in peer;
        socklen_t bytes = sizeof peer;
        char url[64];
        if (getpeername(fd, (struct sockaddr *)&peer, &bytes) != 0 || peer.sin_family != AF_INET)
            continue;
        snprintf(url, sizeof url, "http://127.0.0.1:%u", ntohs(peer.sin_port));
        if (strncmp(url, server.url, strlen(url)) != 0)
            continue;
        ck_assert_int_eq(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        links++;
    }
    return links;
}

START_TEST(test_sockets_are_not_inherited) {
    setup(NULL);
    struct kld_request request = make_request();
    struct kld_result result;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_ge(closing_links(), 1);
    teardown();
}
END_TEST

START_TEST(test_trace) {
    setup(NULL);
    struct kld_request request = make_request();
    struct kld_result result;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_str_eq(server.last_traceparent, "0");
    for (int i = 0; i < 16; i++)
        request.trace.id[i] = (uint8_t)(0xa0 + i);
    request.trace.span[7] = 9;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_str_eq(server.last_traceparent,
                     "00-a0a1a2a3a4a5a6a7a8a9aaabacadaeaf-0000000000000009-00");
    teardown();
}
END_TEST

START_TEST(test_run) {
    struct kld_connect_options options = {.token = "secret"};
    server.not_ready = 2;
    setup(&options);
    struct kld_request request = make_request();
    float loss = 0;
    struct kld_result result;
    request.op.tensor[KLD_SLOT_LOSS].dtype = KLD_DTYPE_FP32;
    request.bytes[KLD_SLOT_LOSS].data = &loss;
    kld_op_set_number(&request.op, "scale", 0.1, NULL);
    request.timeout_ns = 10000000000;
    enum kld_status status = kld_run(connection, &request, &result, &error);
    check_answer(status, &result);
    ck_assert(loss == LOSS);
    ck_assert_str_eq(server.last_authorization, "Bearer secret");
    ck_assert_ptr_nonnull(strstr(server.last_head, "\"scale\":0.1000000000000000"));
    ck_assert_ptr_nonnull(strstr(server.last_head, "\"timeout\":"));
    ck_assert_ptr_nonnull(strstr(server.last_head, "\"shape\":[3,50]"));
    struct kld_server_info info;
    ck_assert_int_eq(kld_info(connection, &info, &error), KLD_OK);
    ck_assert_str_eq(info.device, "fake 1.2");
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(kld_stats(connection, NULL, &error), KLD_UNIMPLEMENTED);
    teardown();
}
END_TEST

START_TEST(test_strides_and_regions) {
    setup(NULL);
    struct kld_request request = make_request();
    static float wide[ROWS * (CLASSES + 3)], out[ROWS * (CLASSES + 1)];
    for (int i = 0; i < ROWS; i++)
        memcpy(wide + i * (CLASSES + 3), q + i * CLASSES, CLASSES * 4);
    request.bytes[KLD_SLOT_PREDICTIONS].data = wide;
    request.op.tensor[KLD_SLOT_PREDICTIONS].row_stride_bytes = (CLASSES + 3) * 4;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = out;
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].row_stride_bytes = (CLASSES + 1) * 4;
    struct kld_region *region, *other;
    ck_assert_int_eq(kld_region_create(connection, 4096, &region, &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(connection, 4096, &other, &error), KLD_OK);
    memcpy(kld_region_data(other), p, sizeof p);
    ck_assert_int_eq(kld_copy(connection, region, 1024, other, 0, sizeof p, &error), KLD_OK);
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = region, .offset_bytes = 1024};
    struct kld_result result;
    server.mode = FAKE_HTTP_IN_PIECES;
    server.times = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert(result.loss == (double)LOSS);
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < CLASSES; i++)
            ck_assert(out[row * (CLASSES + 1) + i] == 2 * q[row * CLASSES + i]);
        ck_assert(out[row * (CLASSES + 1) + CLASSES] == 0);
    }
    teardown();
}
END_TEST

/* mode, times, what comes out, requests that the server saw (libcurl itself repeats one that died
 * on a connection which it had used before, so attempts may be fewer) */
static const struct {
    enum fake_http_mode mode;
    int times;
    enum kld_status status;
    int requests;
    const char *text;
} cases[] = {
    {FAKE_HTTP_BUSY, 2, KLD_OK, 3, ""},
    {FAKE_HTTP_HANG_UP, 2, KLD_OK, 3, ""},
    {FAKE_HTTP_CUT, 1, KLD_OK, 2, ""},
    {FAKE_HTTP_HANG_UP, 1000, KLD_UNAVAILABLE, 11, "lost"},
    {FAKE_HTTP_INVALID, 1, KLD_INVALID, 1, "no \"such thing\""},
    {FAKE_HTTP_PLAIN_500, 1, KLD_INTERNAL, 1, "HTTP status 500"},
    {FAKE_HTTP_SHORT, 1, KLD_INTERNAL, 1, "too short"},
    {FAKE_HTTP_LONG, 1, KLD_INTERNAL, 1, "too long"},
    {FAKE_HTTP_NONSENSE, 1, KLD_INTERNAL, 1, "not an infer reply"},
    {FAKE_HTTP_WRONG_SIZE, 1, KLD_INTERNAL, 1, "expected 4"},
    {FAKE_HTTP_NO_LENGTH, 1, KLD_INTERNAL, 1, "no binary outputs"},
    {FAKE_HTTP_IN_PIECES, 1, KLD_OK, 1, ""},
};

START_TEST(test_misbehaviour) {
    setup(NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct kld_request request = make_request();
        struct kld_result result = {0};
        error.text[0] = '\0';
        server.requests = 0;
        server.mode = (int)cases[i].mode;
        server.times = cases[i].times;
        if (cases[i].mode == FAKE_HTTP_WRONG_SIZE)
            request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = 0;
        enum kld_status status = kld_run(connection, &request, &result, &error);
        ck_assert_msg(status == cases[i].status, "case %zu: %d %s", i, status, error.text);
        ck_assert_msg(server.requests == cases[i].requests, "case %zu: %d", i, server.requests);
        ck_assert_msg(strstr(error.text, cases[i].text) != NULL, "case %zu: %s", i, error.text);
        server.times = 0;
        request = make_request();
        check_answer(kld_run(connection, &request, &result, &error), &result);
    }
    teardown();
}
END_TEST

START_TEST(test_in_place) {
    setup(NULL);
    struct kld_request request = make_request();
    struct kld_result result;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = q;
    server.mode = FAKE_HTTP_HANG_UP; /* nothing was written yet: it may run again */
    server.times = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_int_eq(server.requests, 2);
    ck_assert(q[COUNT - 1] == 2 * COUNT);
    request = make_request();
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = q;
    server.mode = FAKE_HTTP_CUT; /* part of the input is gone */
    server.times = 1;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_UNAVAILABLE);
    ck_assert_uint_eq(result.attempts, 1);
    teardown();
}
END_TEST

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *failed) {
    int *counts = user;
    counts[status]++;
}

START_TEST(test_many_deadlines_and_cancels) {
    setup(NULL);
    struct kld_request request = make_request();
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = 0;
    int counts[32] = {0};
    uint64_t id;
    for (int i = 0; i < 50; i++)
        ck_assert_int_eq(kld_submit(connection, &request, on_end, counts, &id, &error), KLD_OK);
    kld_cancel(connection, id);
    for (int i = 0; i < TRIES_MAX && counts[KLD_OK] < 49; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(counts[KLD_OK], 49);
    ck_assert_int_eq(counts[KLD_CANCELLED], 1);
    struct kld_result result;
    server.mode = FAKE_HTTP_SILENT;
    server.times = 1;
    request.timeout_ns = 500000000; /* time enough for the one word of the busy one */
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEADLINE);
    server.mode = FAKE_HTTP_BUSY;
    server.times = 1000;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEADLINE);
    ck_assert_ptr_nonnull(strstr(error.text, "busy"));
    /* Closed with requests in flight. */
    server.mode = FAKE_HTTP_SILENT;
    for (int i = 0; i < 5; i++)
        ck_assert_int_eq(kld_submit(connection, &request, on_end, counts, &id, &error), KLD_OK);
    ck_assert_int_eq(kld_process(connection, 5, &error), KLD_OK);
    teardown();
}
END_TEST

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* The caller's deadline says how long, not a count; never before the server's own time. A request
 * that devices die of is another matter. */
START_TEST(test_a_busy_server_is_asked_until_the_deadline) {
    setup(NULL);
    struct kld_request request = make_request();
    struct kld_result result;
    server.mode = FAKE_HTTP_BUSY_1S;
    server.times = 1;
    uint64_t start = now_ms();
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_uint_ge(now_ms() - start, 1000);
    ck_assert_int_eq(server.requests, 2);
    server.requests = 0;
    server.mode = FAKE_HTTP_BUSY;
    server.times = 11;
    request = make_request();
    request.timeout_ns = UINT64_C(60000000000);
    start = now_ms();
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_int_eq(server.requests, 12);
    ck_assert_uint_ge(now_ms() - start, 2000); /* ever later */
    server.mode = FAKE_HTTP_BUSY_1S;
    server.times = 1000;
    request.timeout_ns = 300000000;
    uint64_t took_ms = 1000;
    bool told = false; /* in the best of a few tries: in others the machine may have been busy */
    for (int i = 0; i < 5 && (took_ms >= 1000 || !told); i++) {
        start = now_ms();
        ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEADLINE);
        told = strstr(error.text, "busy") != NULL;
        took_ms = now_ms() - start;
    }
    ck_assert(told);
    ck_assert_uint_lt(took_ms, 1000);
    server.requests = 0;
    server.mode = FAKE_HTTP_LOST;
    server.times = 1000;
    request.timeout_ns = UINT64_C(60000000000);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEVICE_LOST);
    ck_assert_ptr_nonnull(strstr(error.text, "failed"));
    ck_assert_int_eq(server.requests, 2); /* the server has tried twice itself, each time */
    teardown();
}
END_TEST

static int stop_half_way(void *user, uint64_t sent, uint64_t total) {
    uint64_t *last = user;
    ck_assert_uint_gt(total, 0);
    ck_assert_uint_le(*last, sent);
    *last = sent;
    return sent * 2 > total;
}

static void on_answer(void *user, enum kld_status status, const struct kld_result *result,
                      const struct kld_error *failed) {
    *(enum kld_status *)user = status;
}

/* Sockets and what waits for them are shared with it. */
START_TEST(test_closed_in_a_child) {
    setup(NULL);
    struct kld_request request = make_request();
    enum kld_status status = KLD_BUSY;
    request.timeout_ns = 10000000000ull;
    server.mode = FAKE_HTTP_LATE;
    server.times = 1;
    ck_assert_int_eq(kld_submit(connection, &request, on_answer, &status, NULL, &error), KLD_OK);
    for (int i = 0; i < TRIES_MAX && !server.requests; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    close_in_child(connection);
    for (int i = 0; i < TRIES_MAX && status == KLD_BUSY; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(status, KLD_OK);
    teardown();
}
END_TEST

START_TEST(test_progress) {
    uint64_t last = 0;
    struct kld_connect_options options = {.progress = stop_half_way, .progress_user = &last};
    setup(&options);
    struct kld_request request = make_request();
    struct kld_result result;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_CANCELLED);
    ck_assert_uint_gt(last, 0);
    teardown();
}
END_TEST

START_TEST(test_no_server) {
    struct kld_connect_options options = {.connect_timeout_ns = 2000000000};
    ck_assert_int_eq(kld_connect("http://127.0.0.1:1", &options, &connection, &error),
                     KLD_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.text, "kld-server"));
    ck_assert_int_eq(kld_connect("http://", &options, &connection, &error), KLD_INVALID);
    /* What is asked for would come behind them, and never reach the server's path. */
    const char *const cut[] = {"http://127.0.0.1:1?a", "http://127.0.0.1:1/?a=b", "http://h/#",
                               "https://127.0.0.1:1/path#part", "split:local:,http://h:1?"};
    options.lazy = true;
    for (size_t i = 0; i < sizeof cut / sizeof cut[0]; i++) {
        ck_assert_int_eq(kld_connect(cut[i], &options, &connection, &error), KLD_INVALID);
        ck_assert_msg(strstr(error.text, "the URL has a '") && strstr(error.text, "://HOST:PORT"),
                      "%s: %s", cut[i], error.text);
    }
    options.token = "two\nlines";
    ck_assert_int_eq(kld_connect("http://127.0.0.1:1", &options, &connection, &error), KLD_INVALID);
}
END_TEST

/* What the resolver does, for libcurl too: "slow.test" takes its time, and "later.test" has no
 * address the first times. */
#define SLOW_US 60000000
static atomic_int unresolved;
__attribute__((visibility("default"))) int getaddrinfo(const char *name, const char *service,
                                                       const struct addrinfo *hints,
                                                       struct addrinfo **result) {
    if (name && strcmp(name, "slow.test") == 0) {
        usleep(SLOW_US);
        return EAI_AGAIN;
    }
    if (name && strcmp(name, "later.test") == 0) {
        if (atomic_fetch_sub(&unresolved, 1) > 0)
            return EAI_AGAIN;
        name = "127.0.0.1";
    }
    int (*next)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    *(void **)&next = dlsym(RTLD_NEXT, "getaddrinfo");
    return next(name, service, hints, result);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

START_TEST(test_a_slow_resolver_keeps_nobody) {
    struct kld_connect_options options = {.lazy = true};
    struct kld_result result;
    struct kld_request request = make_request();
    uint64_t began = now_ns();
    ck_assert_int_eq(kld_connect("http://slow.test:9", &options, &connection, &error), KLD_OK);
    request.timeout_ns = 200000000;
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_DEADLINE);
    kld_close(connection);
    options = (struct kld_connect_options){.connect_timeout_ns = 200000000};
    ck_assert_int_eq(kld_connect("http://slow.test:9", &options, &connection, &error),
                     KLD_UNAVAILABLE);
    ck_assert_uint_lt(now_ns() - began, (uint64_t)SLOW_US * 1000); /* of one name */
}
END_TEST

START_TEST(test_a_name_without_an_address_is_asked_for_again) {
    char url[64];
    struct kld_connect_options options = {.lazy = true};
    struct kld_result result;
    fake_http_open(&server);
    snprintf(url, sizeof url, "http://later.test%s", strrchr(server.url, ':'));
    atomic_store(&unresolved, 2);
    ck_assert_int_eq(kld_connect(url, &options, &connection, &error), KLD_OK);
    struct kld_request request = make_request();
    request.timeout_ns = 20000000000;
    check_answer(kld_run(connection, &request, &result, &error), &result);
    ck_assert_uint_eq(result.attempts, 3);
    teardown();
}
END_TEST

UNIT_MAIN("client/http", test_sockets_are_not_inherited, test_closed_in_a_child, test_trace,
          test_a_busy_server_is_asked_until_the_deadline, test_run, test_strides_and_regions,
          test_misbehaviour, test_in_place, test_many_deadlines_and_cancels, test_progress,
          test_no_server, test_a_slow_resolver_keeps_nobody,
          test_a_name_without_an_address_is_asked_for_again)
