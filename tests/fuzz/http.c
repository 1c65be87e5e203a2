/* http.c - libFuzzer over a whole gateway and the worker behind it, in one process, over TCP:
 * requests of every route, whole or not, in pieces, compressed, pipelined, nonsense, connections
 * that are cut or do not read, orders of the supervisor in between.
 *
 * After each input every whole request has had its reply, the next one is answered rightly, to the
 * byte, and nothing of anybody is left: no connection, request, staging memory, region, stored
 * tensor, buffer on the device or descriptor.
 *
 * Input: instructions, 1 byte each and what they read. */
#include <cjson/cJSON.h>
#include <fcntl.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zlib.h>

#include "proto/oip.h"
#include "server/role.h"
#include "server/secrets.h"
#include "tests/fuzz/common/host.h"
#include "tests/fuzz/common/web.h"

#define WEBS 4
#define STEPS_MAX 60
#define BODY_MAX (1 << 19)
#define SHM_NAME "/kld-fuzz"
#define SHM_BYTES 65536
#define IDLE_WAIT_NS 30000000000ull

static struct fuzz_host host;
static struct kld_child child;
static int control[2];
static struct fuzz_web webs[WEBS], witness;
static char path[64], right[FUZZ_REPLY_MAX];
static size_t right_bytes;
static uint64_t regions_at_rest, region_bytes_at_rest, pinned_at_rest;
static unsigned fds_at_rest;

static void remove_names(void) {
    unlink(path);
    shm_unlink(SHM_NAME);
}

/* ---- The server ------------------------------------------------------------------------------ */

static void *run_gateway(void *user) {
    kld_gateway_main(&child);
    fuzz_broken("the gateway serves", __FILE__, __LINE__);
}

static int listen_at(struct sockaddr_in *address) {
    socklen_t bytes = sizeof *address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *address =
        (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    require(bind(fd, (struct sockaddr *)address, bytes) == 0 && listen(fd, 64) == 0);
    getsockname(fd, (struct sockaddr *)address, &bytes);
    return fd;
}

/* To the number that a child of the supervisor has it under. */
static void give(int fd, int number) {
    require(dup2(fd, number) == number);
    close(fd);
}

static int pack_no_secrets(void) {
    const struct kld_secrets none = {.tokens = NULL};
    struct kld_error err;
    int fd;
    require(kld_secrets_pack(&none, &fd, &err) == KLD_OK);
    return fd;
}

static void start(void) {
    pthread_t thread;
    struct sockaddr_in metrics;
    char unix_setting[80];
    snprintf(path, sizeof path, "/tmp/kld-fuzz-%d.sock", (int)getpid());
    snprintf(unix_setting, sizeof unix_setting, "--unix=%s", path);
    atexit(remove_names);
    char *settings[] = {unix_setting,
                        "--log-level=debug",
                        "--sandbox=false",
                        "--http-threads=1",
                        "--metrics-http=127.0.0.1:0",
                        "--shm-prefix=/kld-fuzz",
                        "--cuda-shm=true",
                        "--pool-bytes-max=16M",
                        "--staging-bytes-max=2M",
                        "--staging-request-bytes-max=128K",
                        "--json-bytes-max=256K",
                        "--body-bytes-max=4M",
                        "--keep-buffer-bytes=1",
                        "--http-requests-max=6",
                        "--http-regions-max=3",
                        "--tensors-max=3",
                        "--tensor-bytes-max=1M",
                        "--http-deadline-ms=1000",
                        "--http-idle-ms=3600000"};
    fuzz_host_open(&host, sizeof settings / sizeof settings[0], settings, path);
    fuzz_host_start(&host, NULL, NULL);
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) == 0);
    give(listen_at(&witness.address), KLD_FD_LISTEN);
    give(listen_at(&metrics), KLD_FD_METRICS);
    give(pack_no_secrets(), KLD_FD_SECRETS);
    give(dup(control[1]), KLD_FD_CONTROL);
    child = (struct kld_child){&host.config, host.page, &host.page->common, 0};
    require(pthread_create(&thread, NULL, run_gateway, NULL) == 0);
    for (int i = 0; i < WEBS; i++)
        webs[i] = (struct fuzz_web){.fd = -1, .address = i == WEBS - 1 ? metrics : witness.address};
}

static uint64_t gauge(enum kld_stat stat) { return atomic_load(&host.page->common.value[stat]); }

/* ---- The next request is answered rightly, nothing is left ------------------------------------
 */

static void ask(const char *method, const char *target, const char *body) {
    char text[2048];
    int bytes = snprintf(text, sizeof text,
                         "%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n\r\n%s",
                         method, target, strlen(body), body);
    require(bytes > 0 && bytes < (int)sizeof text);
    fuzz_web_ask(&witness, false);
    require(fuzz_web_send(&witness, text, (size_t)bytes));
    fuzz_web_settle(&witness);
    require(witness.fd >= 0);
}

static void delete_tensor(const char *name) {
    char target[3 * KLD_OIP_NAME_MAX + 16] = "/v2/tensors/";
    for (char *to = target + strlen(target); *name; name++)
        to += sprintf(to, "%%%02x", (unsigned char)*name);
    ask("DELETE", target, "");
    require(witness.status == 200);
}

/* What callers stored is theirs until they say so. */
static void forget_stored(void) {
    ask("POST", "/v2/systemsharedmemory/unregister", "");
    require(witness.status == 200);
    ask("POST", "/v2/cudasharedmemory/unregister", "");
    require(witness.status == 200);
    if (!gauge(KLD_STAT_http_tensors))
        return;
    ask("GET", "/v2/tensors", "");
    require(witness.status == 200);
    cJSON *list = cJSON_ParseWithLength(witness.body, witness.body_bytes);
    const cJSON *entry, *all = cJSON_IsArray(list) ? list : list ? list->child : NULL;
    cJSON_ArrayForEach(entry, all) {
        const cJSON *name = cJSON_GetObjectItem(entry, "name");
        require(cJSON_IsString(name));
        delete_tensor(name->valuestring);
    }
    cJSON_Delete(list);
}

static void require_right(void) {
    ask("POST", "/v2/models/kl_div/infer",
        "{\"inputs\":[{\"name\":\"predictions\",\"datatype\":\"FP32\",\"shape\":[2,3],"
        "\"data\":[0.2,0.3,0.5,0.1,0.1,0.8]},{\"name\":\"targets\",\"datatype\":\"FP32\","
        "\"shape\":[2,3],\"data\":[0.1,0.4,0.5,0.3,0.3,0.4]}],"
        "\"outputs\":[{\"name\":\"loss\"},{\"name\":\"grad_predictions\"}]}");
    require(witness.status == 200);
    if (!right_bytes)
        memcpy(right, witness.body, right_bytes = witness.body_bytes);
    require(witness.body_bytes == right_bytes && memcmp(witness.body, right, right_bytes) == 0);
}

/* Those who left before they were accepted have come, too. */
static bool is_idle(void) {
    return gauge(KLD_STAT_http_connections_total) >= fuzz_web_opened &&
           gauge(KLD_STAT_http_connections) == 1 && gauge(KLD_STAT_http_parting) == 0 &&
           gauge(KLD_STAT_http_requests_in_flight) == 0 &&
           gauge(KLD_STAT_http_requests_waiting) == 0 && gauge(KLD_STAT_staging_bytes) == 0 &&
           fuzz_host_stat(&host, KLD_STAT_worker_requests_in_flight) == 0;
}

static bool is_as_at_rest(void) {
    return is_idle() && gauge(KLD_STAT_http_regions) == 0 && gauge(KLD_STAT_http_tensors) == 0 &&
           gauge(KLD_STAT_http_region_bytes) == 0 && gauge(KLD_STAT_http_tensor_bytes) == 0 &&
           fuzz_host_stat(&host, KLD_STAT_pool_bytes) == 0 &&
           fuzz_host_stat(&host, KLD_STAT_worker_regions) == regions_at_rest &&
           fuzz_host_stat(&host, KLD_STAT_worker_region_bytes) == region_bytes_at_rest &&
           fuzz_host_stat(&host, KLD_STAT_pinned_bytes) == pinned_at_rest;
}

static void wait_for(bool (*truth)(void)) {
    uint64_t until = fuzz_now_ns() + IDLE_WAIT_NS;
    for (unsigned us = 20; !truth() && fuzz_now_ns() < until; us += us < 2000 ? us : 0)
        fuzz_nap_us(us);
}

static void require_idle(void) {
    wait_for(is_idle);
    require(gauge(KLD_STAT_http_connections) == 1);
    require(gauge(KLD_STAT_http_parting) == 0);
    require(gauge(KLD_STAT_http_requests_in_flight) == 0);
    require(gauge(KLD_STAT_http_requests_waiting) == 0);
    require(gauge(KLD_STAT_staging_bytes) == 0);
    require(is_idle());
}

static void require_nothing_left(void) {
    wait_for(is_as_at_rest);
    require(gauge(KLD_STAT_http_regions) == 0);
    require(gauge(KLD_STAT_http_tensors) == 0);
    require(fuzz_host_stat(&host, KLD_STAT_pool_bytes) == 0);
    require(fuzz_host_stat(&host, KLD_STAT_worker_regions) == regions_at_rest);
    require(is_as_at_rest());
    fuzz_require_fds(fds_at_rest);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    for (int fd = 3; fd < 8; fd++) /* those of a child stay free */
        if (fcntl(fd, F_GETFD) < 0)
            require(dup2(STDERR_FILENO, fd) == fd);
    int shm = shm_open(SHM_NAME, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    require(shm >= 0 && ftruncate(shm, SHM_BYTES) == 0);
    close(shm);
    start();
    fuzz_web_open(&witness);
    do { /* its way to the worker is there */
        ask("GET", "/v2/health/ready", "");
    } while (witness.status != 200);
    static char large[200000 + 200];
    int head =
        sprintf(large, "PUT /v2/tensors/x?datatype=FP32&shape=50000 HTTP/1.1\r\nHost: localhost\r\n"
                       "Content-Length: 200000\r\n\r\n");
    for (int i = 0; i < 3; i++) {
        require_right();
        fuzz_web_ask(&witness, false); /* the thread of the device's pool is there, too */
        require(fuzz_web_send(&witness, large, (size_t)head + 200000));
        fuzz_web_settle(&witness);
        require(witness.status == 200);
        forget_stored();
    }
    require_idle();
    fuzz_nap_us(300000);
    regions_at_rest = fuzz_host_stat(&host, KLD_STAT_worker_regions);
    region_bytes_at_rest = fuzz_host_stat(&host, KLD_STAT_worker_region_bytes);
    pinned_at_rest = fuzz_host_stat(&host, KLD_STAT_pinned_bytes);
    return 0;
}

/* ---- Requests -------------------------------------------------------------------------------- */

static const char *const targets[] = {
    "POST /v2/models/kl_div/infer",
    "POST /v2/models/kl_div/versions/1/infer",
    "PUT /v2/tensors/a?datatype=FP32&shape=2,8",
    "PUT /v2/tensors/b?datatype=FP32&shape=16,4096&lifetime_ms=60000&device=0",
    "PUT /v2/tensors/c?datatype=BF16&shape=1000",
    "DELETE /v2/tensors/a",
    "DELETE /v2/tensors/b",
    "GET /v2/tensors",
    "GET /v2/tensors/a",
    "POST /v2/systemsharedmemory/region/r/register",
    "POST /v2/systemsharedmemory/region/s/register",
    "POST /v2/systemsharedmemory/region/r/unregister",
    "GET /v2/systemsharedmemory/status",
    "POST /v2/cudasharedmemory/region/r/register",
    "POST /v2/cudasharedmemory/unregister",
    "POST /v2/repository/index",
    "GET /metrics",
    "GET /",
    "HEAD /v2",
    "GET /v2/models/stats",
    "GET /v2/models/kl_div/config",
    "GET /v2/health/ready",
    "OPTIONS /v2/models/kl_div/infer",
    "POST /v2/models/other/infer",
};

/* As the bits of how: what is done to the body, and what the headers say of it. */
enum {
    CHUNKED = 1,
    GZIP = 2,
    DEFLATE = 4,
    SPLIT = 8,
    EXPECT = 16,
    LAST = 32,
    TRACED = 64,
    PACKED = 128
};

static size_t pack(const char *body, size_t bytes, bool gzip, unsigned char *to, size_t room) {
    z_stream stream = {.next_in = (unsigned char *)(uintptr_t)body,
                       .avail_in = (unsigned)bytes,
                       .next_out = to,
                       .avail_out = (unsigned)room};
    require(deflateInit2(&stream, 1, Z_DEFLATED, gzip ? 31 : 15, 8, 0) == Z_OK);
    require(deflate(&stream, Z_FINISH) == Z_STREAM_END);
    deflateEnd(&stream);
    return room - stream.avail_out;
}

/* JSON of the input, and a tail of numbers behind it. */
static size_t read_body(struct fuzz_input *input, char *body, size_t *ret_json) {
    *ret_json = fuzz_bytes(input, body, fuzz_short(input));
    size_t tail = fuzz_byte(input) * (size_t)4 << fuzz_byte(input) % 12;
    static const float numbers[4] = {0.25f, 0.125f, 0.5f, 0.0625f};
    for (size_t i = 0; i < tail; i += sizeof numbers)
        memcpy(body + *ret_json + i, numbers, sizeof numbers);
    return *ret_json + tail;
}

static void send_chunks(struct fuzz_web *web, const char *body, size_t bytes) {
    char head[24];
    while (bytes) {
        size_t part = bytes < 7000 ? bytes : 7000;
        fuzz_web_send(web, head, (size_t)sprintf(head, "%zx\r\n", part));
        fuzz_web_send(web, body, part);
        fuzz_web_send(web, "\r\n", 2);
        body += part;
        bytes -= part;
    }
    fuzz_web_send(web, "0\r\n\r\n", 5);
}

static void send_request(struct fuzz_input *input, struct fuzz_web *web) {
    static char body[65536 + (255 << 13) + 64];
    static unsigned char packed[sizeof body + 4096];
    char head[1024];
    const char *target = targets[fuzz_byte(input) % (sizeof targets / sizeof targets[0])];
    uint8_t how = fuzz_byte(input);
    size_t json, bytes = read_body(input, body, &json);
    const char *sent = body;
    size_t used = (size_t)snprintf(head, sizeof head, "%s HTTP/1.1\r\nHost: localhost\r\n", target);
    if (strncmp(target, "POST", 4) == 0 && (bytes > json || how & SPLIT))
        used += (size_t)sprintf(head + used, "Inference-Header-Content-Length: %zu\r\n", json);
    if (how & (GZIP | DEFLATE)) {
        bytes = pack(body, bytes, how & GZIP, packed, sizeof packed);
        sent = (const char *)packed;
        used += (size_t)sprintf(head + used, "Content-Encoding: %s\r\n",
                                how & GZIP ? "gzip" : "deflate");
    }
    if (how & CHUNKED)
        used += (size_t)sprintf(head + used, "Transfer-Encoding: chunked\r\n");
    else
        used += (size_t)sprintf(head + used, "Content-Length: %zu\r\n", bytes);
    used +=
        (size_t)sprintf(head + used, "%s%s%s%s\r\n", how & EXPECT ? "Expect: 100-continue\r\n" : "",
                        how & LAST ? "Connection: close\r\n" : "",
                        how & TRACED ? "traceparent: 00-0af7651916cd43dd8448eb211c80319c-"
                                       "b7ad6b7169203331-01\r\n"
                                     : "",
                        how & PACKED ? "Accept-Encoding: gzip\r\n" : "");
    fuzz_web_ask(web, target[0] == 'H');
    if (!fuzz_web_send(web, head, used))
        return;
    if (how & CHUNKED)
        send_chunks(web, sent, bytes);
    else
        fuzz_web_send(web, sent, bytes);
}

/* What is no order that the supervisor would send must not be: it is trusted. */
static void send_order(struct fuzz_input *input) {
    static const char kinds[] = {KLD_ORDER_ALIVE, KLD_ORDER_LOG_LEVEL, KLD_ORDER_RELOAD};
    struct kld_child_order order = {.kind = kinds[fuzz_byte(input) % 3], .log_level = "debug"};
    struct kld_child_report report;
    bool reload = order.kind == KLD_ORDER_RELOAD;
    int secrets = reload ? pack_no_secrets() : -1;
    fuzz_send(control[0], &order, sizeof order, &secrets, reload);
    if (reload)
        close(secrets);
    while (recv(control[0], &report, sizeof report, reload ? 0 : MSG_DONTWAIT) > 1)
        reload = false;
}

static void send_raw(struct fuzz_input *input, struct fuzz_web *web) {
    char bytes[4096];
    size_t count = fuzz_bytes(input, bytes, fuzz_short(input) % sizeof bytes);
    web->raw = true;
    fuzz_web_send(web, bytes, count);
}

static void step(struct fuzz_input *input) {
    uint8_t what = fuzz_byte(input);
    struct fuzz_web *web = &webs[what / 16 % WEBS];
    if (web->fd < 0)
        fuzz_web_open(web);
    switch (what % 8) {
    case 0: fuzz_web_close(web); break;
    case 1: send_raw(input, web); break;
    case 2:
        web->raw = true;
        shutdown(web->fd, fuzz_byte(input) % 3);
        break;
    case 3: fuzz_web_take(web, 1); break;
    case 4: fuzz_web_settle(web); break;
    case 5: send_order(input); break;
    default: send_request(input, web);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!fds_at_rest) /* not before: libFuzzer opens some of its own */
        fds_at_rest = fuzz_open_fds();
    struct fuzz_input input = {data, data + bytes};
    for (int i = 0; i < STEPS_MAX && input.at < input.end; i++)
        step(&input);
    for (int i = 0; i < WEBS; i++) {
        fuzz_web_settle(&webs[i]);
        fuzz_web_close(&webs[i]);
    }
    require_idle();
    require_right();
    forget_stored();
    require_idle();
    require_nothing_left();
    fuzz_require_no_leaks();
    return 0;
}
