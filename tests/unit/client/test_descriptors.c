/* test_descriptors.c - a process without file descriptors: its connections say so, and not that
 * there is no server, and go on once there are some again. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <arpa/inet.h>
#include <curl/curl.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/client/fake_http.h"
#include "tests/unit/client/fake_worker.h"

#define ROWS 3
#define CLASSES 4
#define SHORT_NS 300000000ull
#define LONG_NS 60000000000ull
#define OWN 3 /* descriptors of a connection, before it has one to a server */
#define LEFT_MAX 16
#define NONE_LEFT "no file descriptors left (RLIMIT_NOFILE)"

static struct kld_connection *connection;
static struct kld_error error;
static float q[ROWS * CLASSES], p[ROWS * CLASSES], gradient[ROWS * CLASSES];
static struct rlimit before;

/* So many are left from now on. */
static void leave(int count) {
    int taken[LEFT_MAX], past = 0;
    ck_assert_int_le(count, LEFT_MAX);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    for (int i = 0; i < count; i++) {
        taken[i] = dup(0);
        ck_assert_int_ge(taken[i], 0);
        past = taken[i] + 1;
    }
    for (int i = 0; i < count; i++)
        close(taken[i]);
    struct rlimit few = {.rlim_cur = (rlim_t)past, .rlim_max = before.rlim_max};
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
}

static void leave_all(void) { ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0); }

static void says(enum kld_status got, enum kld_status expected, const char *text) {
    ck_assert_msg(got == expected && strcmp(error.text, text) == 0, "%d: %s", got, error.text);
}

static enum kld_status run(uint64_t timeout_ns) {
    struct kld_request request = small_request(ROWS, CLASSES, q, p, gradient);
    request.timeout_ns = timeout_ns;
    return kld_run(connection, &request, NULL, &error);
}

static void cannot_connect_with(const char *url, const char *ca_file, int count) {
    struct kld_connect_options options = {.connect_timeout_ns = SHORT_NS, .ca_file = ca_file};
    enum kld_status status = KLD_UNAVAILABLE;
    /* On a busy machine it may not have come to try. */
    for (int i = 0; i < 100 && status == KLD_UNAVAILABLE; i++) {
        leave(OWN + count);
        status = kld_connect(url, &options, &connection, &error);
        leave_all();
        if (!strstr(error.text, "did not answer in time"))
            break;
    }
    says(status, KLD_NO_MEMORY, NONE_LEFT);
}

static int open_now(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    ck_assert_ptr_nonnull(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

/* What libcurl wakes a thread by: a pair of sockets, or one eventfd from 8.9 on. */
static int wakes_with(void) {
    int closed = open_now();
    CURLM *multi = curl_multi_init();
    int count = open_now() - closed;
    curl_multi_cleanup(multi);
    return count;
}

static void cannot_connect(const char *url) { cannot_connect_with(url, NULL, 0); }

static void connect_lazily(const char *url) {
    struct kld_connect_options options = {.connect_timeout_ns = SHORT_NS, .lazy = true};
    leave(OWN);
    enum kld_status status = kld_connect(url, &options, &connection, &error);
    leave_all();
    ck_assert_msg(status == KLD_OK, "%s", error.text);
}

static void can_run(void) {
    enum kld_status status = run(LONG_NS);
    ck_assert_msg(status == KLD_OK, "%d: %s", status, error.text);
}

/* It has no link. */
static void cannot_ask(void) {
    leave(0);
    enum kld_status status = kld_ping(connection, NULL, &error);
    leave_all();
    says(status, KLD_NO_MEMORY, NONE_LEFT);
}

START_TEST(over_a_unix_socket) {
    struct fake_worker worker = {0};
    struct kld_server_info info;
    char url[128];
    fake_worker_open(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    cannot_connect(url);
    connect_lazily(url);
    says(kld_info(connection, &info, &error), KLD_NO_MEMORY, NONE_LEFT);
    cannot_ask();
    can_run();
    leave(0);
    worker.hang_up = 1; /* both ends are in this process */
    enum kld_status status = KLD_OK;
    while (!status)
        status = run(SHORT_NS);
    leave_all();
    says(status, KLD_DEADLINE, "deadline passed; " NONE_LEFT);
    can_run();
    kld_close(connection);
    fake_worker_close(&worker);
}
END_TEST

START_TEST(over_http) {
    static struct fake_http server;
    fake_http_open(&server);
    cannot_connect(server.url);
    connect_lazily(server.url);
    cannot_ask();
    leave(0);
    enum kld_status status = run(SHORT_NS);
    leave_all();
    says(status, KLD_DEADLINE, "deadline passed; " NONE_LEFT);
    can_run();
    kld_close(connection);
    fake_http_close(&server);
}
END_TEST

/* libcurl wakes two: who waits for it, and for the thread that looks a name up, in which the
 * system's code then lacks the first of its own. It does not say so. */
START_TEST(over_http_by_a_name) {
    const char *url = "http://name.invalid:1"; /* nobody has it, RFC 6761 */
    int wakes = wakes_with();
    ck_assert_msg(wakes == 1 || wakes == 2, "%d", wakes);
    for (int count = 0; count <= 2 * wakes; count++)
        cannot_connect_with(url, NULL, count);
    connect_lazily(url);
    cannot_ask();
    leave(0);
    enum kld_status status = run(SHORT_NS);
    leave_all();
    says(status, KLD_DEADLINE, "deadline passed; " NONE_LEFT);
    struct kld_connect_options options = {.connect_timeout_ns = SHORT_NS};
    struct kld_connection *other;
    leave(OWN + 2 * wakes + 2); /* enough for the one answer that there is */
    status = kld_connect(url, &options, &other, &error);
    leave_all();
    ck_assert_msg(status == KLD_UNAVAILABLE && !strstr(error.text, "descriptors"), "%d: %s", status,
                  error.text);
    status = kld_ping(connection, NULL, &error);
    ck_assert_msg(status == KLD_UNAVAILABLE && !strstr(error.text, "descriptors"), "%d: %s", status,
                  error.text);
    kld_close(connection);
}
END_TEST

/* The one that is left is the socket's, and none for the file with the certificates. The server
 * needs none: the kernel connects for whoever listens. */
START_TEST(over_https) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    char url[64];
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, size), 0);
    ck_assert_int_eq(listen(listener, 64), 0);
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    snprintf(url, sizeof url, "https://127.0.0.1:%d", ntohs(address.sin_port));
    cannot_connect_with(url, "/etc/ssl/certs/ca-certificates.crt", 1);
    close(listener);
}
END_TEST

START_TEST(of_a_connection_itself) {
    leave(0);
    enum kld_status status = kld_connect("local:cpu", NULL, &connection, &error);
    leave_all();
    says(status, KLD_NO_MEMORY, "no file descriptors left for a connection (RLIMIT_NOFILE)");
}
END_TEST

UNIT_MAIN("client/descriptors", over_a_unix_socket, over_http, over_http_by_a_name, over_https,
          of_a_connection_itself)
