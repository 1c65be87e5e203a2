/* test_split.c - one request over several servers: the bits of one, whatever the cut; and what
 * happens when servers are lost, silent, of another kind. The members are local: ones for numbers
 * and servers of the test's own for faults. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <arpa/inet.h>
#include <math.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/split.h"
#include "tests/unit/client/fake_http.h"

#define ROWS 37
#define CLASSES 23
#define COUNT (ROWS * CLASSES)

/* Everything that a request may have. */
static float q[COUNT + ROWS], p[COUNT + ROWS], weights[ROWS], scalar = -1.25f;
static unsigned char mask[ROWS];
static float go_rows[ROWS], go_elements[COUNT];
struct results {
    float loss[COUNT], grad_q[COUNT], grad_p[COUNT], row_loss[ROWS];
    struct kld_result result;
};
static struct kld_error error;

static uint64_t state = 7;

static float random_unit(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(state >> 40) / 16777216.0f + 1e-3f;
}

static void fill(void) {
    for (int i = 0; i < COUNT + ROWS; i++) {
        q[i] = random_unit();
        p[i] = random_unit();
    }
    for (int i = 0; i < COUNT; i++)
        go_elements[i] = random_unit() - 0.4f;
    for (int i = 0; i < ROWS; i++) {
        weights[i] = random_unit();
        go_rows[i] = random_unit() - 0.4f;
        mask[i] = random_unit() > 0.25f;
    }
}

static struct kld_connection *open_url(const char *url, uint64_t part_bytes) {
    struct kld_connect_options options = {.threads = 2, .part_bytes_max = part_bytes};
    struct kld_connection *connection = NULL;
    enum kld_status status = kld_connect(url, &options, &connection, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    return connection;
}

static void place(struct kld_request *request, enum kld_slot slot, const void *data) {
    request->op.tensor[slot].dtype = slot == KLD_SLOT_ROW_MASK ? KLD_DTYPE_BOOL : KLD_DTYPE_FP32;
    request->bytes[slot].data = (void *)data;
}

struct shape {
    uint32_t divergence, reduction, form;
    bool mask, weights, gradients, grad_output, row_loss, normalizer;
};

static struct kld_request request_of(const struct shape *shape, struct results *to) {
    struct kld_request request = small_request(ROWS, CLASSES, q, p, to->grad_q);
    bool scalar_loss =
        shape->reduction != KLD_REDUCTION_ROW && shape->reduction != KLD_REDUCTION_NONE;
    request.op.divergence = shape->divergence;
    request.op.reduction = shape->reduction;
    request.op.predictions_form = request.op.targets_form = shape->form;
    if (shape->divergence == KLD_DIVERGENCE_MIXED_KL)
        kld_op_set_number(&request.op, "weight", 0.3, NULL);
    if (shape->divergence == KLD_DIVERGENCE_SKEW_KL ||
        shape->divergence == KLD_DIVERGENCE_SKEW_REVERSE_KL)
        kld_op_set_number(&request.op, "skew", 0.2, NULL);
    kld_op_set_number(&request.op, "scale", 0.7, NULL);
    if (shape->normalizer && scalar_loss && shape->reduction != KLD_REDUCTION_SUM)
        kld_op_set_number(&request.op, "normalizer", 11.3, NULL);
    if (shape->mask)
        place(&request, KLD_SLOT_ROW_MASK, mask);
    if (shape->weights)
        place(&request, KLD_SLOT_ROW_WEIGHTS, weights);
    if (shape->gradients)
        place(&request, KLD_SLOT_GRAD_TARGETS, to->grad_p);
    else
        request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = 0;
    if (shape->gradients && shape->grad_output)
        place(&request, KLD_SLOT_GRAD_OUTPUT,
              scalar_loss                             ? &scalar
              : shape->reduction == KLD_REDUCTION_ROW ? go_rows
                                                      : go_elements);
    if (shape->row_loss)
        place(&request, KLD_SLOT_ROW_LOSS, to->row_loss);
    place(&request, KLD_SLOT_LOSS, to->loss);
    /* Rows with gaps, in one tensor. */
    request.op.tensor[KLD_SLOT_TARGETS].row_stride_bytes = (CLASSES + 1) * sizeof(float);
    return request;
}

static void run(struct kld_connection *connection, const struct kld_request *request,
                struct results *to) {
    enum kld_status status = kld_run(connection, request, &to->result, &error);
    ck_assert_msg(status == KLD_OK, "%d: %s", status, error.text);
}

static void same(const struct results *one, const struct results *many) {
    ck_assert_mem_eq(one->loss, many->loss, sizeof one->loss);
    ck_assert_mem_eq(one->grad_q, many->grad_q, sizeof one->grad_q);
    ck_assert_mem_eq(one->grad_p, many->grad_p, sizeof one->grad_p);
    ck_assert_mem_eq(one->row_loss, many->row_loss, sizeof one->row_loss);
    ck_assert_mem_eq(&one->result.loss, &many->result.loss, sizeof(double));
    ck_assert_int_eq(one->result.scalar, many->result.scalar);
}

#define THREE "split:local:cpu,local:cpu,local:cpu"
#define PART (2 * (CLASSES * 4 * 4)) /* some rows */

START_TEST(the_bits_of_one) {
    struct kld_connection *one = open_url("local:cpu", 0);
    struct kld_connection *many[] = {open_url("split:local:cpu", 0), open_url(THREE, 0),
                                     open_url(THREE, PART), open_url(THREE, 1)};
    fill();
    for (uint32_t i = 0; i < 9 * 6 * 16; i++) {
        struct shape shape = {.divergence = i % 9,
                              .reduction = i / 9 % 6,
                              .form = i % 3,
                              .mask = i / 54 & 1,
                              .weights = i / 54 & 2,
                              .gradients = i / 54 & 4,
                              .grad_output = i / 54 & 8,
                              .row_loss = (i / 54 + i) & 1,
                              .normalizer = i % 5 == 0};
        static struct results expected, got;
        memset(&expected, 0, sizeof expected);
        memset(&got, 0, sizeof got);
        struct kld_request request = request_of(&shape, &expected);
        run(one, &request, &expected);
        request = request_of(&shape, &got);
        run(many[i % 4], &request, &got);
        same(&expected, &got);
        ck_assert_uint_eq(got.result.attempts, 1);
    }
    for (int i = 0; i < 4; i++)
        kld_close(many[i]);
    kld_close(one);
}
END_TEST

/* Weights that sum to 0, to less than 0, and to what is no number. */
START_TEST(unusual_weights) {
    struct kld_connection *one = open_url("local:cpu", 0), *many = open_url(THREE, PART);
    fill();
    for (uint32_t i = 0; i < 24; i++) {
        static struct results expected, got;
        struct shape shape = {.reduction = KLD_REDUCTION_ROWMEAN,
                              .form = i % 3,
                              .mask = i & 1,
                              .weights = true,
                              .gradients = true,
                              .grad_output = i & 2,
                              .row_loss = i & 4};
        for (int row = 0; row < ROWS; row++)
            weights[row] = i % 2 ? (float)(row % 2) - 0.7f : 0;
        memset(&expected, 1, sizeof expected);
        memset(&got, 1, sizeof got);
        struct kld_request request = request_of(&shape, &expected);
        run(one, &request, &expected);
        request = request_of(&shape, &got);
        run(many, &request, &got);
        ck_assert_mem_eq(&expected.loss, &got.loss, sizeof(float));
        same(&expected, &got);
    }
    weights[3] = INFINITY;
    static struct results any;
    struct shape shape = {.reduction = KLD_REDUCTION_ROWMEAN, .weights = true};
    struct kld_request request = request_of(&shape, &any);
    ck_assert_int_eq(kld_run(many, &request, NULL, &error), KLD_INVALID);
    ck_assert_msg(strstr(error.text, "row_weights sum to inf"), "%s", error.text);
    kld_close(many);
    kld_close(one);
}
END_TEST

/* FP64, whose loss shows the last bit; a tensor of rank 4, of rank 1; fewer rows than servers; a
 * gradient over its own tensor; regions; a row loss in FP64 that the caller asked for. */
START_TEST(other_layouts) {
    struct kld_connection *one = open_url("local:cpu", 0);
    struct kld_connection *many = open_url(THREE, 1000);
    static double x[2][COUNT], y[2][COUNT], rows[2][COUNT];
    const uint64_t shapes[][5] = {{2, ROWS, CLASSES}, {4, 1, 7, 3, 11}, {1, CLASSES}, {2, 2, 9}};
    for (int k = 0; k < 4; k++) {
        double loss[2];
        for (int i = 0; i < COUNT; i++) {
            x[0][i] = x[1][i] = (double)random_unit();
            y[0][i] = y[1][i] = (double)random_unit();
        }
        memset(rows, 0, sizeof rows);
        for (int i = 0; i < 2; i++) {
            struct kld_connection *connection = i ? many : one;
            struct kld_request request = {0};
            struct kld_region *region = NULL;
            struct kld_result result;
            kld_op_init(&request.op);
            request.op.rank = (uint32_t)shapes[k][0];
            memcpy(request.op.shape, shapes[k] + 1, request.op.rank * sizeof(uint64_t));
            request.op.reduction = k % 2 ? KLD_REDUCTION_MEAN : KLD_REDUCTION_BATCHMEAN;
            const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                           KLD_SLOT_ROW_LOSS, KLD_SLOT_GRAD_PREDICTIONS};
            void *const data[] = {x[i], y[i], rows[i], x[i]};
            for (int s = 0; s < 4; s++) {
                request.op.tensor[slots[s]].dtype = KLD_DTYPE_FP64;
                request.bytes[slots[s]].data = data[s];
            }
            ck_assert_int_eq(kld_region_create(connection, sizeof y[i] + 64, &region, NULL),
                             KLD_OK);
            memcpy((char *)kld_region_data(region) + 64, y[i], sizeof y[i]);
            request.bytes[KLD_SLOT_TARGETS] =
                (struct kld_bytes){.region = region, .offset_bytes = 64};
            ck_assert_msg(kld_run(connection, &request, &result, &error) == KLD_OK, "%s",
                          error.text);
            loss[i] = result.loss;
            struct kld_region *copy = NULL;
            ck_assert_int_eq(kld_region_create(connection, 64, &copy, NULL), KLD_OK);
            ck_assert_int_eq(kld_copy(connection, copy, 8, region, 64, 40, &error), KLD_OK);
            ck_assert_mem_eq((char *)kld_region_data(copy) + 8, y[i], 40);
            kld_region_drop(copy);
            kld_region_drop(region);
        }
        ck_assert_mem_eq(&loss[0], &loss[1], sizeof(double));
        ck_assert_mem_eq(x[0], x[1], sizeof x[0]);
        ck_assert_mem_eq(rows[0], rows[1], sizeof rows[0]);
    }
    kld_close(one);
    kld_close(many);
}
END_TEST

static int ended;

static void count_ended(void *user, enum kld_status status, const struct kld_result *result,
                        const struct kld_error *err) {
    ck_assert_msg(status == *(enum kld_status *)user, "%d: %s", status, err->text);
    ended++;
}

START_TEST(several_at_once_and_given_up) {
    struct kld_connection *many = open_url(THREE, PART);
    static struct results results[40];
    uint64_t id[40];
    enum kld_status fine = KLD_OK, cancelled = KLD_CANCELLED;
    fill();
    for (int i = 0; i < 40; i++) {
        struct shape shape = {.gradients = true};
        struct kld_request request = request_of(&shape, &results[i]);
        ck_assert_int_eq(kld_submit(many, &request, count_ended, i % 4 == 3 ? &cancelled : &fine,
                                    &id[i], &error),
                         KLD_OK);
        if (i % 4 == 3)
            kld_cancel(many, id[i]);
    }
    while (ended < 40)
        ck_assert_int_eq(kld_process(many, 1000, &error), KLD_OK);
    for (int i = 1; i < 40; i++)
        if (i % 4 != 3)
            ck_assert_mem_eq(results[0].grad_q, results[i].grad_q, sizeof results[0].grad_q);
    struct kld_server_info info;
    ck_assert_int_eq(kld_info(many, &info, &error), KLD_OK);
    ck_assert_str_eq(info.backend, "cpu");
    ck_assert_uint_eq(info.devices, 0);
    ck_assert_ptr_nonnull(strstr(info.device, "3 servers"));
    ck_assert_int_eq(kld_ping(many, NULL, &error), KLD_OK);
    ck_assert_int_eq(kld_stats(many, NULL, &error), KLD_UNIMPLEMENTED);
    struct shape shape = {.gradients = true};
    struct kld_request request = request_of(&shape, &results[0]);
    ck_assert_int_eq(kld_submit(many, &request, count_ended, &fine, NULL, &error), KLD_OK);
    kld_close(many); /* with a request in flight */
}
END_TEST

static void refused(const char *url, enum kld_status status, const char *text) {
    struct kld_connect_options options = {.connect_timeout_ns =
                                              status == KLD_UNAVAILABLE ? 200000000 : 0};
    struct kld_connection *connection = NULL;
    ck_assert_int_eq(kld_connect(url, &options, &connection, &error), status);
    ck_assert_msg(strstr(error.text, text), "%s: %s", url, error.text);
    ck_assert_ptr_null(connection);
}

START_TEST(wrong_lists) {
    char many[2000] = "split:local:";
    for (int i = 0; i < 64; i++)
        strcat(many, ",local:");
    refused("split:", KLD_INVALID, "server 1 of 1 has a URL of 0 bytes");
    refused("split:local:,", KLD_INVALID, "server 2 of 2 has a URL of 0 bytes");
    refused("split:local:,ftp://b", KLD_INVALID, "ftp://b: unknown kind of server");
    refused("split:split:local:", KLD_INVALID, "inside of another");
    refused(many, KLD_INVALID, "65 servers; expected at most 64");
    refused("split:http://user:secret@127.0.0.1:9", KLD_UNAVAILABLE,
            "http://127.0.0.1:9: no answer");
    ck_assert_ptr_null(strstr(error.text, "secret"));
    refused("split:unix:/nowhere/kld.sock,http://127.0.0.1:9", KLD_UNAVAILABLE,
            "none of 2 servers is left; unix:/nowhere/kld.sock: no server has answered");
}
END_TEST

/* ---- Faults: servers that compute loss = sum of q - sum of p, row by row, and gradient 2 q ------
 */

static struct fake_http server[3];

#define METADATA(version, backend, device)                                                         \
    "{\"name\":\"fake\",\"version\":\"" version "\",\"backend\":\"" backend                        \
    "\",\"device\":\"" device "\"}"

static struct kld_connection *open_fakes(int count, uint64_t part_timeout_ns, char *url) {
    struct kld_connect_options options = {.part_bytes_max = 1, .part_timeout_ns = part_timeout_ns};
    struct kld_connection *connection = NULL;
    strcpy(url, "split:");
    memset(server, 0, sizeof server);
    for (int i = 0; i < count; i++) {
        fake_http_open(&server[i]);
        server[i].metadata = METADATA("1.2", "cpu", "x (v)");
        sprintf(url + strlen(url), "%s%s", i ? "," : "", server[i].url);
    }
    enum kld_status status = kld_connect(url, &options, &connection, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    return connection;
}

static void close_fakes(int count) {
    for (int i = 0; i < count; i++)
        fake_http_close(&server[i]);
}

static float small_q[3 * 4], small_p[3 * 4], small_gradient[3 * 4];

static struct kld_request small(void) {
    for (int i = 0; i < 12; i++) {
        small_q[i] = (float)(i + 1);
        small_p[i] = 1;
        small_gradient[i] = 0;
    }
    struct kld_request request = small_request(3, 4, small_q, small_p, small_gradient);
    request.op.reduction = KLD_REDUCTION_SUM;
    return request;
}

static void check_small(const struct kld_result *result, const float *gradient) {
    ck_assert_double_eq(result->loss, 12 * 13 / 2 - 12);
    for (int i = 0; i < 12; i++)
        ck_assert_float_eq(gradient[i], 2 * (float)(i + 1));
}

/* What each of these does to one server, another one makes good. */
START_TEST(a_lost_server) {
    const enum fake_http_mode modes[] = {FAKE_HTTP_BUSY,     FAKE_HTTP_LOST,  FAKE_HTTP_HANG_UP,
                                         FAKE_HTTP_CUT,      FAKE_HTTP_SHORT, FAKE_HTTP_PLAIN_500,
                                         FAKE_HTTP_NONSENSE, FAKE_HTTP_SILENT};
    char url[256];
    struct kld_connection *connection = open_fakes(2, 300000000, url);
    struct kld_result result;
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++)
        for (int in_place = 0; in_place < 2; in_place++) {
            struct kld_request request = small();
            if (in_place)
                request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = small_q;
            server[0].mode = modes[i];
            server[0].times = 1000;
            enum kld_status status = kld_run(connection, &request, &result, &error);
            ck_assert_msg(status == KLD_OK, "mode %d: %s", modes[i], error.text);
            check_small(&result, in_place ? small_q : small_gradient);
            server[0].times = 0;
            /* And it is taken back. */
            int before = server[0].requests;
            for (int k = 0; k < TRIES_MAX && server[0].requests == before; k++) {
                request = small();
                ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
                usleep(20000);
                kld_process(connection, 0, NULL);
            }
            ck_assert_int_gt(server[0].requests, before);
        }
    kld_close(connection);
    close_fakes(2);
}
END_TEST

START_TEST(a_wrong_request_is_nobodys_loss) {
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    struct kld_request request = small();
    server[0].mode = server[1].mode = FAKE_HTTP_INVALID;
    server[0].times = server[1].times = 1000;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_INVALID);
    ck_assert_msg(strncmp(error.text, "http://127.0.0.1:", 17) == 0, "%s", error.text);
    ck_assert_int_le(server[0].requests + server[1].requests, 4);
    kld_close(connection);
    close_fakes(2);
}
END_TEST

START_TEST(parts_are_of_the_callers_trace) {
    char url[256];
    struct kld_connection *connection = open_fakes(1, 0, url);
    struct kld_request request = small();
    memset(&request.trace, 0xab, sizeof request.trace);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
    ck_assert_str_eq(server[0].last_traceparent,
                     "00-abababababababababababababababab-abababababababab-ab");
    kld_close(connection);
    close_fakes(1);
}
END_TEST

START_TEST(what_kills_devices_is_given_up) {
    char url[256];
    struct kld_connection *connection = open_fakes(3, 0, url);
    struct kld_request request = small();
    for (int i = 0; i < 3; i++) {
        server[i].mode = FAKE_HTTP_LOST;
        server[i].times = 1000;
    }
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_DEVICE_LOST);
    kld_close(connection);
    close_fakes(3);
}
END_TEST

START_TEST(no_server_is_left) {
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    struct kld_request request = small();
    request.timeout_ns = 1500000000;
    close_fakes(2);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_DEADLINE);
    ck_assert_msg(
        strstr(error.text, "deadline passed; none of 2 servers is left; http://127.0.0.1:"), "%s",
        error.text);
    kld_close(connection);
    connection = open_fakes(2, 0, url);
    for (int i = 0; i < 2; i++) {
        server[i].mode = FAKE_HTTP_SILENT;
        server[i].times = 1000;
    }
    request = small();
    request.timeout_ns = 300000000;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_DEADLINE);
    ck_assert_msg(strstr(error.text, "deadline passed"), "%s", error.text);
    kld_close(connection);
    close_fakes(2);
}
END_TEST

/* Who says "not now" is not lost: that is waited out as long as the caller waits, however often. */
START_TEST(all_servers_are_busy) {
    char url[256];
    struct kld_connection *connection = open_fakes(3, 0, url);
    struct kld_request request = small_request(1, 12, small_q, small_p, small_gradient);
    request.timeout_ns = 30000000000;
    for (int i = 0; i < 3; i++) {
        server[i].mode = FAKE_HTTP_BUSY_1S;
        server[i].times = 1000;
    }
    struct kld_result result;
    uint64_t id = 0;
    enum kld_status status = kld_run_slice(connection, &request, 10, &id, &result, &error);
    while (!status && id) {
        if (server[0].requests + server[1].requests + server[2].requests >= 12)
            server[0].times = server[1].times = server[2].times = 0;
        status = kld_wait_slice(connection, &id, 10, &result, &error);
    }
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    kld_close(connection);
    close_fakes(3);
}
END_TEST

/* All of them came back as something else: nobody is waited for. */
START_TEST(no_server_is_what_it_was) {
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    struct kld_request request = small();
    for (int i = 0; i < 2; i++) {
        server[i].metadata = METADATA("1.3", "cpu", "x (v)");
        server[i].mode = FAKE_HTTP_HANG_UP;
        server[i].times = 1;
    }
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_VERSION);
    ck_assert_msg(strstr(error.text, "none of 2 servers is left"), "%s", error.text);
    ck_assert_msg(strstr(error.text, "is of release 1.3, the others are of 1.2"), "%s", error.text);
    kld_close(connection);
    close_fakes(2);
}
END_TEST

/* The release or the back end is another one, or is not told: from the start, or after a loss. */
START_TEST(only_servers_of_one_kind) {
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    struct kld_request request = small();
    struct kld_result result;
    struct kld_server_info info;
    ck_assert_int_eq(kld_info(connection, &info, &error), KLD_OK);
    ck_assert_str_eq(info.version, "1.2");
    server[1].metadata = METADATA("1.3", "cpu", "x (v)");
    refused(url, KLD_VERSION, "is of release 1.3, the others are of 1.2");
    server[1].metadata = METADATA("1.2", "cuda", "x (v)");
    refused(url, KLD_UNIMPLEMENTED, "computes with cuda x (v), the others with cpu (v)");
    server[1].metadata = "{\"name\":\"fake\",\"version\":\"1.2\"}";
    refused(url, KLD_UNIMPLEMENTED, "does not say what it computes with");
    server[1].metadata = METADATA("1.2", "cpu", "y (v)");
    kld_close(connection);
    ck_assert_int_eq(kld_connect(url, NULL, &connection, &error), KLD_OK);
    server[1].metadata = METADATA("1.3", "cpu", "y (v)");
    server[1].mode = FAKE_HTTP_HANG_UP;
    server[1].times = 1;
    for (int i = 0; i < 60; i++) {
        request = small();
        ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
        check_small(&result, small_gradient);
        usleep(10000);
    }
    int before = server[1].requests;
    request = small();
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_int_eq(server[1].requests, before); /* it is refused for good */
    kld_close(connection);
    close_fakes(2);
}
END_TEST

/* Until the second of two fakes has had a part. */
static void expect_to_be_taken(struct kld_connection *connection) {
    struct kld_result result;
    int before = server[1].requests;
    for (int i = 0; i < TRIES_MAX && server[1].requests == before; i++) {
        struct kld_request request = small();
        enum kld_status status = kld_run(connection, &request, &result, &error);
        ck_assert_msg(status == KLD_OK, "%s", error.text);
        check_small(&result, small_gradient);
        usleep(10000);
        kld_process(connection, 0, NULL);
    }
    ck_assert_int_gt(server[1].requests, before);
}

/* It says who it is once it knows, which may be after the first of its devices is ready. */
START_TEST(a_server_that_is_only_starting) {
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    kld_close(connection);
    server[1].metadata = "{\"name\":\"fake\",\"version\":\"1.2\",\"state\":\"starting\"}";
    enum kld_status status = kld_connect(url, NULL, &connection, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    server[1].metadata = METADATA("1.2", "cpu", "x (v)");
    expect_to_be_taken(connection);
    kld_close(connection);
    close_fakes(2);
}
END_TEST

START_TEST(one_that_turned_a_question_away_is_asked_again) {
    const char *const lines[] = {"429 Too Many Requests", "500 Oops", "503 Service Unavailable"};
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    kld_close(connection);
    for (int i = 0; i < 3; i++) {
        server[1].turned_away = lines[i];
        enum kld_status status = kld_connect(url, NULL, &connection, &error);
        ck_assert_msg(status == KLD_OK, "%s", error.text);
        server[1].turned_away = NULL;
        expect_to_be_taken(connection);
        kld_close(connection);
    }
    close_fakes(2);
}
END_TEST

/* Its token was revoked: the others do what it does not, and only where all say so it is told. */
START_TEST(one_that_does_not_let_us_in_any_more) {
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    struct kld_result result;
    server[1].mode = FAKE_HTTP_LOCKED;
    server[1].times = 1000000;
    for (int i = 0; i < 20; i++) {
        struct kld_request request = small();
        enum kld_status status = kld_run(connection, &request, &result, &error);
        ck_assert_msg(status == KLD_OK, "%s", error.text);
        check_small(&result, small_gradient);
    }
    ck_assert_int_le(server[1].requests, 2);
    server[0].mode = FAKE_HTTP_LOCKED;
    server[0].times = 1000000;
    struct kld_request request = small();
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_UNAUTHENTICATED);
    ck_assert_msg(strstr(error.text, "none of 2 servers is left"), "%s", error.text);
    ck_assert_msg(strstr(error.text, "the token is not known here"), "%s", error.text);
    kld_close(connection);
    close_fakes(2);
}
END_TEST

/* They take connections and answer nothing; the one that is there comes last. */
START_TEST(silent_servers_do_not_add_up) {
    enum { SILENT = 6 };
    int listener[SILENT];
    char url[512], *at = url + sprintf(url, "split:");
    for (int i = 0; i < SILENT; i++) {
        struct sockaddr_in address = {.sin_family = AF_INET,
                                      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t bytes = sizeof address;
        listener[i] = socket(AF_INET, SOCK_STREAM, 0);
        ck_assert_int_eq(bind(listener[i], (struct sockaddr *)&address, bytes), 0);
        ck_assert_int_eq(listen(listener[i], 64), 0);
        getsockname(listener[i], (struct sockaddr *)&address, &bytes);
        at += sprintf(at, "http://127.0.0.1:%u,", ntohs(address.sin_port));
    }
    struct kld_connection *connection;
    struct kld_request request = small();
    memset(server, 0, sizeof server);
    fake_http_open(&server[0]);
    server[0].metadata = METADATA("1.2", "cpu", "x (v)");
    strcpy(at, server[0].url);
    uint64_t took_s = SILENT;
    for (int tried = 0; tried < 5 && took_s >= SILENT; tried++) { /* the quickest counts */
        uint64_t begin_ns = kld_now_ns();
        ck_assert_int_eq(kld_connect(url, NULL, &connection, &error), KLD_OK);
        for (int i = 0; i < 5; i++)
            ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
        kld_close(connection);
        took_s = (kld_now_ns() - begin_ns) / 1000000000;
    }
    ck_assert_uint_lt(took_s, SILENT); /* and not a second for each */
    close_fakes(1);
    for (int i = 0; i < SILENT; i++)
        close(listener[i]);
}
END_TEST

/* The rest behind a question in vain is that of those who are not there, however many are. */
START_TEST(who_is_away_rests_for_the_absent) {
    char url[256];
    struct kld_connection *connection = open_fakes(2, 0, url);
    struct split_connection *split = (struct split_connection *)connection;
    const struct {
        int server;
        uint64_t asked_ns, rest_ns;
    } left[] = {
        {1, 1000000000, 4000000000}, {0, 1000000000, 8000000000}, {1, 20000000000, 60000000000}};
    for (int i = 0; i < 3; i++) {
        struct split_server *one = &split->servers[left[i].server];
        uint64_t now = kld_now_ns();
        one->asked_ns = left[i].asked_ns;
        one->retry_at_ns = 0;
        kld_split_server_leave(one, &(struct kld_error){.status = KLD_UNAVAILABLE});
        ck_assert_uint_ge(one->retry_at_ns - now, left[i].rest_ns);
        ck_assert_uint_lt(one->retry_at_ns - now, left[i].rest_ns + 1000000000);
    }
    kld_close(connection);
    close_fakes(2);
}
END_TEST

static int tell(void *user, uint64_t done, uint64_t total) {
    ck_assert_uint_le(done, total);
    *(uint64_t *)user = done;
    return done >= total / 2;
}

START_TEST(progress_and_its_end) {
    struct kld_connection *connection;
    uint64_t told = 0;
    struct kld_connect_options options = {
        .progress = tell, .progress_user = &told, .part_bytes_max = 1};
    ck_assert_int_eq(kld_connect(THREE, &options, &connection, &error), KLD_OK);
    static struct results any;
    struct shape shape = {.gradients = true};
    fill();
    struct kld_request request = request_of(&shape, &any);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_CANCELLED);
    ck_assert_uint_ge(told, (uint64_t)COUNT * 2 * 4 / 2);
    kld_close(connection);
}
END_TEST

UNIT_MAIN("client/split", the_bits_of_one, unusual_weights, other_layouts,
          several_at_once_and_given_up, wrong_lists, a_lost_server, a_wrong_request_is_nobodys_loss,
          parts_are_of_the_callers_trace, what_kills_devices_is_given_up, no_server_is_left,
          all_servers_are_busy, no_server_is_what_it_was, only_servers_of_one_kind,
          a_server_that_is_only_starting, one_that_turned_a_question_away_is_asked_again,
          one_that_does_not_let_us_in_any_more, silent_servers_do_not_add_up,
          who_is_away_rests_for_the_absent, progress_and_its_end)
