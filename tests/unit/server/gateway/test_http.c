/* test_http.c - connections and exchanges of http.c under a handler of the test: when one waits for
 * its reply suspended and when it lingers, how often MHD reads from a large body in a turn of the
 * loop, and a connection that cannot be watched. Memory fails by standing in for calloc, which a
 * sanitizer does itself: there that test lets it succeed. */
#include "server/gateway/http.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "server/gateway/accept.h"
#include "server/gateway/links.h"
#include "server/gateway/recent.h"
#include "server/gateway/watch.h"
#include "tests/unit/unit.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FAILS 0
#else
#define FAILS 1
#endif

#define REQUEST "POST /any HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"

static bool failing;

#if FAILS
void *__libc_calloc(size_t count, size_t bytes);
void *calloc(size_t items, size_t bytes) {
    return failing && bytes == sizeof(struct kld_watched) ? NULL : __libc_calloc(items, bytes);
}
#endif

static struct kld_config config;
static struct kld_stats_page page;
static struct kld_gateway_common common;
static struct kld_gateway gateway = {.common = &common, .config = &config, .page = &page};
static struct kld_exchange *waits; /* for its reply */
static uv_timer_t timer;
static bool soon, was_suspended, closed;
static uint64_t delay_ms;
static int begun, ended, fed;
static uint64_t fed_bytes;

static void reply(uv_timer_t *unused) {
    was_suspended = waits->suspended;
    kld_exchange_reply_text(waits, 200, "text/plain", "hello", 5);
    waits = NULL;
}

static void begin(struct kld_exchange *exchange) { begun++; }
static size_t feed(struct kld_exchange *exchange, const char *data, size_t size) {
    fed += size > 2; /* more than REQUEST has */
    fed_bytes += size;
    return size;
}
static void end(struct kld_exchange *exchange) { ended++; }

static void finish(struct kld_exchange *exchange) {
    waits = exchange;
    exchange->soon = soon;
    uv_timer_start(&timer, reply, delay_ms, 0);
}

static const struct kld_http_handler handler = {begin, feed, finish, kld_exchange_reply_error, end};

static void open_all(void) {
    struct kld_error error;
    enum kld_config_action action;
    char *no_environment[] = {NULL};
    ck_assert_int_eq(kld_config_parse(0, NULL, no_environment, &config, &action, &error), KLD_OK);
    common.loops = 1;
    common.recent = kld_recent_open();
    gateway.stats = &page.common;
    ck_assert_int_eq(uv_loop_init(&gateway.loop), 0);
    uv_timer_init(&gateway.loop, &timer);
    ck_assert_int_eq(kld_links_open(&gateway.loop, &config, &page, NULL, &gateway.links, &error),
                     KLD_OK);
    ck_assert_int_eq(kld_http_open(&gateway, &handler, &gateway.http, &error), KLD_OK);
}

static int taken; /* the gateway's end of the connection that was dialled last */

/* A connection that the gateway has; returns the client's end. */
static int dial(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&at, sizeof at), 0);
    ck_assert_int_eq(listen(listener, 1), 0);
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&at, &bytes), 0);
    ck_assert_int_eq(connect(client, (struct sockaddr *)&at, sizeof at), 0);
    int fd = taken = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
    close(listener);
    gateway.connections++;
    kld_http_take(gateway.http, fd, (struct sockaddr *)&at, sizeof at, false);
    return client;
}

/* What the client gets, the end of the connection included, while the loop runs; 10 s. */
static ssize_t answer(int client, char *text, size_t size) {
    uint64_t until = uv_hrtime() + UINT64_C(10000000000);
    ssize_t got;
    do {
        uv_run(&gateway.loop, UV_RUN_NOWAIT);
        got = recv(client, text, size - 1, MSG_DONTWAIT);
    } while (got < 0 && errno == EAGAIN && uv_hrtime() < until);
    text[got > 0 ? got : 0] = '\0';
    return got;
}

static void ask(int client, bool expected_soon, uint64_t after_ms) {
    char text[4096];
    soon = expected_soon;
    delay_ms = after_ms;
    ck_assert_int_eq(send(client, REQUEST, sizeof REQUEST - 1, 0), sizeof REQUEST - 1);
    ck_assert_int_gt(answer(client, text, sizeof text), 0);
    ck_assert_ptr_eq(strstr(text, "HTTP/1.1 200"), text);
}

static void is_closed(void *unused) { closed = true; }

static void close_all(void) {
    kld_http_close(gateway.http, is_closed, NULL);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&gateway.loop, UV_RUN_DEFAULT);
    ck_assert(closed);
    kld_recent_close(common.recent);
    free(gateway.links); /* it has no link, and so nothing to close */
    ck_assert_uint_eq(gateway.connections, 0);
    ck_assert_int_eq(uv_loop_close(&gateway.loop), 0);
}

START_TEST(who_waits_for_a_moment_is_not_suspended) {
    open_all();
    int client = dial();
    ask(client, true, 0);
    ck_assert(!was_suspended);
    uint64_t ms =
        50; /* it took longer than was expected, and the loop had time to see that it did */
    int times = 3;
    do {
        ask(client, true, ms *= 2);
        times++;
    } while (!was_suspended && ms < 5000);
    ck_assert(was_suspended);
    ask(client, false, 0);
    ck_assert(was_suspended);
    ask(client, true, 0); /* and again on the same connection */
    ck_assert(!was_suspended);
    ck_assert_int_eq(begun, times);
    close(client);
    close_all();
    ck_assert_int_eq(ended, times);
}
END_TEST

START_TEST(who_lingers_is_answered_at_the_end) {
    char text[4096];
    open_all();
    int client = dial();
    soon = true;
    delay_ms = 60000;
    ck_assert_int_eq(send(client, REQUEST, sizeof REQUEST - 1, 0), sizeof REQUEST - 1);
    while (!waits)
        uv_run(&gateway.loop, UV_RUN_NOWAIT);
    ck_assert(!waits->suspended);
    close_all();
    ck_assert_int_gt(recv(client, text, sizeof text, 0), 0);
    ck_assert_ptr_eq(strstr(text, "HTTP/1.1 503"), text);
    ck_assert_int_eq(ended, 1);
    close(client);
}
END_TEST

#define SENT_BYTES (64 << 10)
#define SEVERAL_READS (6 * SENT_BYTES) /* MHD has 32 KiB for a connection */

/* So much is there to be read. */
static void wait_for_bytes(int fd, int bytes) {
    for (int i = 0, here; ioctl(fd, FIONREAD, &here) == 0 && here < bytes; i++) {
        ck_assert_int_lt(i, TRIES_MAX);
        usleep(1000);
    }
}

static void send_some(int client, int bytes) {
    static char zeros[SENT_BYTES];
    for (; bytes > 0; bytes -= SENT_BYTES)
        ck_assert_int_eq(send(client, zeros, sizeof zeros, 0), sizeof zeros);
}

/* A large body of which `bytes` have been taken. */
static int dial_and_upload(uint64_t bytes) {
    static const char head[] =
        "POST /any HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n";
    int client = dial();
    ck_assert_int_eq(send(client, head, sizeof head - 1, 0), sizeof head - 1);
    for (uint64_t sent = 0; fed_bytes < bytes;) {
        if (sent == fed_bytes && (sent += SENT_BYTES))
            send_some(client, SENT_BYTES);
        uv_run(&gateway.loop, UV_RUN_NOWAIT);
    }
    return client;
}

/* How often the handler was fed in the next turn that feeds it at all. */
static int fed_in_a_turn(void) {
    for (fed = 0; fed == 0;)
        uv_run(&gateway.loop, UV_RUN_NOWAIT);
    return fed;
}

START_TEST(a_large_body_is_read_several_times_in_a_turn) {
    open_all();
    int client = dial_and_upload(SENT_BYTES), uploads = taken;
    send_some(client, SEVERAL_READS);
    wait_for_bytes(uploads, SEVERAL_READS);
    ck_assert_int_eq(fed_in_a_turn(), 1); /* it is not yet large */
    while (fed_bytes < (1 << 20) + SENT_BYTES) {
        send_some(client, SENT_BYTES);
        fed_in_a_turn();
    }
    int other = dial();
    uv_run(&gateway.loop, UV_RUN_NOWAIT);
    send_some(client, SEVERAL_READS);
    wait_for_bytes(uploads, SEVERAL_READS);
    ck_assert_int_gt(fed_in_a_turn(), 4);
    send_some(client, SEVERAL_READS);
    ck_assert_int_eq(send(other, REQUEST, sizeof REQUEST - 1, 0), sizeof REQUEST - 1);
    wait_for_bytes(uploads, SEVERAL_READS);
    wait_for_bytes(taken, sizeof REQUEST - 1);
    ck_assert_int_eq(fed_in_a_turn(), 1); /* another has come, whose call is not to wait */
    ck_assert_ptr_nonnull(waits);
    close(other);
    close(client);
    close_all();
}
END_TEST

/* Nobody would know what it may ask, nor cut it off when it is slow. */
START_TEST(a_connection_without_memory_to_watch_it_is_refused) {
    char text[4096];
    open_all();
    failing = true;
    int client = dial();
    uv_run(&gateway.loop, UV_RUN_NOWAIT); /* where MHD tells of it */
    failing = false;
    ck_assert_int_eq(send(client, REQUEST, sizeof REQUEST - 1, 0), sizeof REQUEST - 1);
    delay_ms = 0;
    ssize_t got = answer(client, text, sizeof text);
    ck_assert_int_gt(got, 0);
#if FAILS
    ck_assert_ptr_eq(strstr(text, "HTTP/1.1 503"), text);
    ck_assert_ptr_nonnull(strstr(text, "out of memory"));
    ck_assert_int_eq(answer(client, text, sizeof text), 0); /* and that was all */
    ck_assert_int_eq(begun, 0);
#endif
    close(client);
    client = dial(); /* others are not affected */
    ask(client, true, 0);
    close(client);
    close_all();
    ck_assert_int_eq(ended, begun);
}
END_TEST

UNIT_MAIN("server/gateway/http", who_waits_for_a_moment_is_not_suspended,
          who_lingers_is_answered_at_the_end, a_large_body_is_read_several_times_in_a_turn,
          a_connection_without_memory_to_watch_it_is_refused)
