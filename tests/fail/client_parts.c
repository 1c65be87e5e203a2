/* client_parts.c - the parts of client.h's conversation: every function of libkld that works
 * without a GPU, with answers that are known. Makes nothing of its own while calls fail: no memory,
 * no descriptor. One thread. */
#include "tests/fail/client.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ROWS 16
#define CLASSES 24
#define COUNT (ROWS * CLASSES)
#define BYTES (COUNT * sizeof(float))
#define SECOND 1000000000ull
#define TIMEOUT_NS (6 * SECOND) /* of a request; a server that was lost is found again sooner */

static struct {
    float q[COUNT], p[COUNT], gradient[COUNT]; /* the last one is what comes back */
    double rows[ROWS], row_truth[ROWS];
    double loss; /* forward KL, batchmean */
    int fd;      /* a sealed memfd with p */
} data;

bool client_parts_open(void) {
    unsigned seed = 1;
    for (float *rows = data.q; rows != data.gradient; rows += CLASSES) {
        float sum = 0;
        for (int i = 0; i < CLASSES; i++) {
            seed = seed * 1664525u + 1013904223u;
            sum += rows[i] = (float)(seed >> 8) + 100000;
        }
        for (int i = 0; i < CLASSES; i++)
            rows[i] /= sum;
    }
    for (int i = 0; i < COUNT; i++)
        data.row_truth[i / CLASSES] +=
            (double)data.p[i] * (log((double)data.p[i]) - log((double)data.q[i]));
    for (int row = 0; row < ROWS; row++)
        data.loss += data.row_truth[row] / ROWS;
    data.fd = memfd_create("nth-own", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    return data.fd >= 0 && write(data.fd, data.p, BYTES) == (ssize_t)BYTES &&
           fcntl(data.fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0;
}

/* ---- what is right --------------------------------------------------------------------------- */

static void worst(struct script *s, enum outcome outcome, const char *what, const char *text) {
    if (s->outcome == RIGHT || (outcome > s->outcome && outcome > CLEAR))
        snprintf(s->text, sizeof s->text, "%.180s: %s", what, text);
    s->outcome = outcome > s->outcome ? outcome : s->outcome;
}

static void expect(struct script *s, bool right, const char *what) {
    if (!right)
        worst(s, WRONG, what, "not right");
}

static bool is_ours(enum kld_status status) {
    return status == KLD_NO_MEMORY || status == KLD_INTERNAL || status == KLD_UNAVAILABLE ||
           status == KLD_BUSY || status == KLD_DEVICE_LOST;
}

static bool went(struct script *s, const char *what, enum kld_status status) {
    char text[sizeof s->error.text + 32];
    snprintf(text, sizeof text, "%s: %s", kld_status_name(status), s->error.text);
    if (status && (s->error.status != status || !s->error.text[0]))
        worst(s, WRONG, what, "an error without a description");
    else if (status)
        worst(s, is_ours(status) ? CLEAR : BLAMED, what, text);
    s->error = (struct kld_error){0};
    return status == KLD_OK;
}

/* True: it worked. The call names &s->error. */
#define TRY(call) went(s, #call, call)

static bool near(double got, double truth) {
    return fabs(got - truth) <= 1e-5 * fabs(truth) + 1e-7;
}

static bool gradient_is_right(const float *gradient) {
    for (int i = 0; i < COUNT; i++)
        if (!near(gradient[i], -(double)data.p[i] / (double)data.q[i] / ROWS))
            return false;
    return true;
}

static bool rows_are_right(void) {
    for (int row = 0; row < ROWS; row++)
        if (!near(data.rows[row], data.row_truth[row]))
            return false;
    return true;
}

/* ---- requests -------------------------------------------------------------------------------- */

static struct kld_request request_begin(void) {
    struct kld_request request = {.timeout_ns = TIMEOUT_NS};
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = ROWS;
    request.op.shape[1] = CLASSES;
    return request;
}

static void put_data(struct kld_request *request, enum kld_slot slot, void *at) {
    request->op.tensor[slot].dtype = slot == KLD_SLOT_ROW_LOSS ? KLD_DTYPE_FP64 : KLD_DTYPE_FP32;
    request->bytes[slot].data = at;
}

static void put_region(struct kld_request *request, enum kld_slot slot, struct kld_region *region,
                       uint64_t offset_bytes) {
    request->op.tensor[slot].dtype = KLD_DTYPE_FP32;
    request->bytes[slot] = (struct kld_bytes){.region = region, .offset_bytes = offset_bytes};
}

/* q, p and the gradient, in plain memory. */
static struct kld_request request_plain(void) {
    struct kld_request request = request_begin();
    put_data(&request, KLD_SLOT_PREDICTIONS, data.q);
    put_data(&request, KLD_SLOT_TARGETS, data.p);
    put_data(&request, KLD_SLOT_GRAD_PREDICTIONS, data.gradient);
    memset(data.gradient, 0, sizeof data.gradient);
    return request;
}

/* Loss and gradient; gradient NULL: the loss alone. */
static bool run_is_right(struct script *s, struct kld_connection *connection,
                         const struct kld_request *request, const float *gradient) {
    struct kld_result result = {0};
    if (!TRY(kld_run(connection, request, &result, &s->error)))
        return false;
    expect(s, result.scalar && near(result.loss, data.loss), "the loss");
    expect(s, !gradient || gradient_is_right(gradient), "the gradient");
    return true;
}

static struct kld_connection *begin_at(struct script *s, const char *url) {
    struct kld_connect_options options = {
        .client_name = "nth", .connect_timeout_ns = 3 * SECOND, .threads = 2};
    struct kld_connection *connection = NULL;
    (void)TRY(kld_connect(url, &options, &connection, &s->error));
    return connection;
}

/* The connection, whatever failed, serves on. */
static void end(struct script *s, struct kld_connection *connection) {
    calm_begins();
    enum outcome before = s->outcome;
    struct kld_request request = request_plain();
    bool ran = run_is_right(s, connection, &request, data.gradient);
    if (!ran || s->outcome > before)
        worst(s, WRONG, "the connection afterwards", s->text);
    calm_ends();
    kld_close(connection);
}

/* ---- parts ----------------------------------------------------------------------------------- */

static bool has_stats(const char *url) { return strncmp(url, "http", 4) != 0; }

static void ask(struct script *s) {
    static char metrics[KLD_METRICS_TEXT_MAX];
    struct kld_connection *connection = begin_at(s, s->url);
    if (!connection)
        return;
    struct kld_server_info info;
    if (TRY(kld_info(connection, &info, &s->error)))
        expect(s, strcmp(info.backend, "cpu") == 0, "the name of the back end");
    if (strncmp(s->url, "local", 5) != 0)
        (void)TRY(kld_ping(connection, NULL, &s->error));
    struct kld_server_stats stats;
    if (has_stats(s->url)) {
        if (TRY(kld_stats(connection, &stats, &s->error)))
            expect(s, stats.pool_bytes <= stats.pool_bytes_max, "the statistics");
        (void)TRY(kld_stream_priority(connection, 3, 1, &s->error));
    } else if (TRY(kld_metrics(connection, metrics, sizeof metrics, &s->error))) {
        expect(s, strstr(metrics, "\nkld_requests_total{") != NULL, "the metrics");
    }
    end(s, connection);
}

static void regions(struct script *s) {
    struct kld_connection *connection = begin_at(s, s->url);
    if (!connection)
        return;
    struct kld_region *own = NULL, *imported = NULL;
    (void)TRY(kld_region_create(connection, 2 * BYTES, &own, &s->error));
    (void)TRY(kld_region_import_memfd(connection, data.fd, BYTES, &imported, &s->error));
    if (own && imported) {
        float *at = kld_region_data(own);
        memcpy(at, data.q, BYTES);
        const float *read = kld_region_data(imported);
        expect(s, !read || memcmp(read, data.p, BYTES) == 0, "the imported region");
        struct kld_request request = request_begin();
        put_region(&request, KLD_SLOT_PREDICTIONS, own, 0);
        put_region(&request, KLD_SLOT_TARGETS, imported, 0);
        put_region(&request, KLD_SLOT_GRAD_PREDICTIONS, own, BYTES);
        run_is_right(s, connection, &request, at + COUNT);
        if (TRY(kld_copy(connection, own, BYTES, imported, 0, BYTES, &s->error)))
            expect(s, memcmp(at + COUNT, data.p, BYTES) == 0, "the copy");
    }
    kld_region_drop(imported);
    end(s, connection);
}

struct asked {
    uint64_t id;
    int times;
    enum kld_status status;
    double loss;
    struct kld_error error;
};

static void answered(void *user, enum kld_status status, const struct kld_result *result,
                     const struct kld_error *error) {
    struct asked *asked = user;
    asked->times++;
    asked->status = status;
    asked->loss = result->loss;
    asked->error = *error;
}

#define IN_FLIGHT 4

static bool all_answered(const struct asked *asked) {
    for (int i = 0; i < IN_FLIGHT; i++)
        if (asked[i].id && !asked[i].times)
            return false;
    return true;
}

/* Each of those that were taken is answered once; the last one was cancelled. */
static void answers_are_right(struct script *s, const struct asked *asked) {
    for (int i = 0; i < IN_FLIGHT; i++) {
        expect(s, asked[i].times == (asked[i].id != 0), "one answer each");
        if (!asked[i].id || (i == IN_FLIGHT - 1 && asked[i].status == KLD_CANCELLED))
            continue;
        s->error = asked[i].error;
        if (went(s, "an answer", asked[i].status))
            expect(s, near(asked[i].loss, data.loss), "the loss of an answer");
    }
}

static void in_flight(struct script *s, struct kld_connection *connection, bool corked) {
    struct asked asked[IN_FLIGHT] = {0};
    struct kld_request request = request_plain();
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    if (corked)
        kld_cork(connection);
    for (uint32_t i = 0; i < IN_FLIGHT; i++) {
        request.stream = i;
        (void)TRY(kld_submit(connection, &request, answered, &asked[i], &asked[i].id, &s->error));
    }
    if (corked)
        kld_uncork(connection);
    kld_cancel(connection, asked[IN_FLIGHT - 1].id);
    for (int turn = 0; turn < 2000 && !all_answered(asked); turn++)
        (void)TRY(kld_process(connection, 10, &s->error));
    answers_are_right(s, asked);
}

static void plain(struct script *s) {
    struct kld_connection *connection = begin_at(s, s->url);
    if (!connection)
        return;
    struct kld_request request = request_plain();
    run_is_right(s, connection, &request, data.gradient);
    memset(data.rows, 0, sizeof data.rows);
    put_data(&request, KLD_SLOT_ROW_LOSS, data.rows);
    if (run_is_right(s, connection, &request, data.gradient))
        expect(s, rows_are_right(), "the losses of rows");
    in_flight(s, connection, false);
    uint64_t id = 0;
    struct kld_result result = {0};
    if (TRY(kld_run_slice(connection, &request, 1, &id, &result, &s->error))) {
        bool worked = true;
        for (int turn = 0; id && worked && turn < 1000; turn++)
            worked = TRY(kld_wait_slice(connection, &id, 10, &result, &s->error));
        expect(s, !worked || near(result.loss, data.loss), "the loss of slices");
    }
    end(s, connection);
}

/* Closed with requests in flight. */
static void leave(struct script *s) {
    struct kld_connection *connection = begin_at(s, s->url);
    if (!connection)
        return;
    struct asked asked[IN_FLIGHT] = {0};
    struct kld_region *region = NULL;
    struct kld_request request = request_plain();
    (void)TRY(kld_region_create(connection, BYTES, &region, &s->error));
    if (region) {
        memcpy(kld_region_data(region), data.p, BYTES);
        request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = region};
    }
    for (uint32_t i = 0; i < IN_FLIGHT; i++)
        (void)TRY(kld_submit(connection, &request, answered, &asked[i], &asked[i].id, &s->error));
    kld_region_drop(region);
    kld_close(connection);
}

static void pool(struct script *s) {
    struct kld_connection *connection = begin_at(s, s->url);
    if (!connection)
        return;
    struct kld_region *own = NULL, *there = NULL;
    (void)TRY(kld_region_create(connection, 2 * BYTES, &own, &s->error));
    (void)TRY(kld_region_create_pool(connection, 2 * BYTES, &there, &s->error));
    if (own && there) {
        float *at = kld_region_data(own);
        memcpy(at, data.p, BYTES);
        struct kld_request request = request_plain();
        request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
        request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = there};
        put_region(&request, KLD_SLOT_GRAD_PREDICTIONS, there, BYTES);
        if (TRY(kld_copy(connection, there, 0, own, 0, BYTES, &s->error)) &&
            run_is_right(s, connection, &request, NULL) &&
            TRY(kld_copy(connection, own, BYTES, there, BYTES, BYTES, &s->error)))
            expect(s, gradient_is_right(at + COUNT), "the gradient from the pool");
    }
    kld_region_drop(there);
    end(s, connection);
}

static struct kld_region *attach(struct script *s, struct kld_connection *teacher,
                                 struct kld_connection *student) {
    struct kld_region *attached = NULL;
    struct kld_tensor_view view = {0};
    enum kld_status status = kld_attach(student, "nth", 0, &attached, &view, &s->error);
    /* The teacher's connection was lost, and it had no reason yet to look for its server. */
    if (status == KLD_NOT_FOUND && TRY(kld_ping(teacher, NULL, &s->error)))
        status = kld_attach(student, "nth", 0, &attached, &view, &s->error);
    if (went(s, "kld_attach()", status))
        expect(s, view.rank == 2 && view.shape[1] == CLASSES, "what is attached");
    return attached;
}

static void share(struct script *s) {
    struct kld_connection *teacher = begin_at(s, s->url);
    struct kld_connection *student = teacher ? begin_at(s, s->url) : NULL;
    struct kld_region *region = NULL;
    struct kld_tensor_view view = {.dtype = KLD_DTYPE_FP32, .rank = 2, .shape = {ROWS, CLASSES}};
    if (student)
        (void)TRY(kld_region_import_memfd(teacher, data.fd, BYTES, &region, &s->error));
    if (region && TRY(kld_publish(teacher, "nth", region, &view, NULL, 0, &s->error))) {
        struct kld_region *attached = attach(s, teacher, student);
        struct kld_request request = request_plain();
        request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = attached};
        if (attached)
            run_is_right(s, student, &request, data.gradient);
        kld_region_drop(attached);
        (void)TRY(kld_detach(teacher, "nth", &s->error));
    }
    if (student)
        end(s, student);
    kld_close(teacher);
}

/* A server without a GPU has none: what libkld makes for it, a thread among it, goes again. */
static void fence(struct script *s) {
    struct kld_connection *connection = begin_at(s, s->url);
    if (!connection)
        return;
    for (int i = 0; i < 2; i++) {
        uint32_t *word = NULL;
        struct kld_event *made = NULL;
        enum kld_status status = kld_fence_create(connection, &word, &made, &s->error);
        if (status != KLD_UNIMPLEMENTED && went(s, "kld_fence_create()", status))
            expect(s, word && *word == 0 && !kld_fence_passed(made, 1), "a new fence");
        kld_event_drop(made);
    }
    end(s, connection);
}

/* Two servers, four parts. */
static void split(struct script *s) {
    char urls[512];
    snprintf(urls, sizeof urls, "split:%s,%s", s->url, s->other_url);
    struct kld_connect_options options = {.connect_timeout_ns = 3 * SECOND,
                                          .part_timeout_ns = 3 * SECOND,
                                          .part_bytes_max = 4 * 3 * CLASSES * sizeof(float)};
    struct kld_connection *connection = NULL;
    if (!TRY(kld_connect(urls, &options, &connection, &s->error)))
        return;
    struct kld_request request = request_plain();
    run_is_right(s, connection, &request, data.gradient);
    in_flight(s, connection, false);
    end(s, connection);
}

/* Some in one packet; also to a server that is found again meanwhile. */
static void packet(struct script *s) {
    struct kld_connection *connection = begin_at(s, s->url);
    if (!connection)
        return;
    in_flight(s, connection, true);
    in_flight(s, connection, true);
    end(s, connection);
}

const struct part client_parts[] = {
    {"ask", ask},     {"regions", regions}, {"plain", plain}, {"leave", leave},   {"pool", pool},
    {"share", share}, {"fence", fence},     {"split", split}, {"packet", packet}, {NULL, NULL}};
