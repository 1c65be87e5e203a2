/* bench.c - `kld bench`: how many losses a second a server gives, and whether every answer has the
 * same bits. Measures what a client sees, the connection included; tests/bench measures kernels. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/cli/bench_data.h"
#include "client/cli/cli.h"

#define FLIGHT_MAX 1024
#define LATENCIES_MAX (1u << 20) /* kept for the percentiles; later ones are left out */
#define CEILING_BYTES_MAX (256ull << 20)

struct bench_options {
    struct kld_server_options server;
    const char *shape, *dtype, *form, *divergence;
    bool gradient, check, json;
    uint64_t in_flight;
    double seconds;
};

struct bench;

/* One of the requests in flight: its own results, the inputs of all. */
struct flight {
    struct bench *bench;
    struct kld_request request;
    struct kld_region *gradient; /* NULL: none is asked for */
    bool running;
};

struct bench {
    const struct bench_options *options;
    struct kld_connection *connection;
    struct kld_op op;
    struct kld_geometry geometry;
    struct kld_region *inputs, *first_gradient;
    struct flight *flights;
    uint64_t running, done, failed, different, repeated, bytes, end_ns;
    double first_loss;
    bool has_first;
    double *latencies; /* ms */
    struct kld_error last_error;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static enum kld_status parse_shape(const char *text, struct kld_op *op, struct kld_error *err) {
    op->rank = 0;
    for (const char *at = text; *at && op->rank < KLD_RANK_MAX;) {
        char *end;
        op->shape[op->rank++] = strtoull(at, &end, 10);
        if (end == at || (*end && *end != 'x') || (*end && !end[1]))
            break;
        at = *end ? end + 1 : end;
        if (!*at)
            return KLD_OK;
    }
    return kld_error_set(err, KLD_INVALID, "--shape is '%.40s'; expected sizes as 4096x32000",
                         text);
}

static enum kld_status make_op(const struct bench_options *options, struct bench *bench,
                               struct kld_error *err) {
    struct kld_op *op = &bench->op;
    enum kld_dtype dtype;
    kld_op_init(op);
    enum kld_status status = parse_shape(options->shape, op, err);
    if (!status)
        status = kld_op_set_text(op, "divergence", options->divergence, err);
    if (!status)
        status = kld_op_set_text(op, "predictions_form", options->form, err);
    if (!status)
        status = kld_op_set_text(op, "targets_form", options->form, err);
    if (!status && (!kld_dtype_from_name(options->dtype, &dtype) || !kld_dtype_is_float(dtype)))
        status = kld_error_set(err, KLD_INVALID, "--dtype is '%.20s'; expected one of %s",
                               options->dtype, kld_dtype_list());
    if (status)
        return status;
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    for (uint64_t i = 0; i < (options->gradient ? 3 : 2); i++) {
        op->tensor[slots[i]].dtype = dtype;
        op->tensor[slots[i]].region = i + 1;
    }
    return kld_op_check(op, &bench->geometry, err);
}

/* The inputs once, a gradient for each request in flight. */
static enum kld_status make_memory(struct bench *bench, struct kld_error *err) {
    const struct bench_options *options = bench->options;
    uint64_t bytes = bench->geometry.slot[KLD_SLOT_PREDICTIONS].span_bytes;
    uint64_t second = (bytes + 4095) / 4096 * 4096;
    enum kld_status status =
        kld_region_create(bench->connection, second + bytes, &bench->inputs, err);
    if (status)
        return status;
    char *data = kld_region_data(bench->inputs);
    enum kld_dtype dtype = bench->op.tensor[KLD_SLOT_PREDICTIONS].dtype;
    for (uint64_t i = 0; i < 2; i++)
        kld_bench_fill(data + i * second, dtype, bench->op.predictions_form, bench->geometry.rows,
                       bench->geometry.classes, i + 1);
    for (uint64_t i = 0; i < options->in_flight; i++) {
        struct flight *flight = &bench->flights[i];
        flight->bench = bench;
        flight->request.op = bench->op;
        flight->request.stream = (uint32_t)i;
        flight->request.timeout_ns = kld_cli_timeout_ns(&options->server);
        flight->request.bytes[KLD_SLOT_PREDICTIONS].region = bench->inputs;
        flight->request.bytes[KLD_SLOT_TARGETS] =
            (struct kld_bytes){.region = bench->inputs, .offset_bytes = second};
        if (!options->gradient)
            continue;
        if ((status = kld_region_create(bench->connection, bytes, &flight->gradient, err)))
            return status;
        flight->request.bytes[KLD_SLOT_GRAD_PREDICTIONS].region = flight->gradient;
    }
    return KLD_OK;
}

/* Same loss, and with --check the same gradient, as the first answer? */
static bool same_answer(struct bench *bench, const struct flight *flight, double loss) {
    uint64_t bytes = bench->geometry.slot[KLD_SLOT_GRAD_PREDICTIONS].span_bytes;
    bool compare = bench->options->check && flight->gradient;
    if (!bench->has_first) {
        bench->has_first = true;
        bench->first_loss = loss;
        if (compare && !kld_region_create(bench->connection, bytes, &bench->first_gradient, NULL))
            memcpy(kld_region_data(bench->first_gradient), kld_region_data(flight->gradient),
                   bytes);
    }
    return memcmp(&loss, &bench->first_loss, sizeof loss) == 0 &&
           (!compare ||
            (bench->first_gradient && memcmp(kld_region_data(flight->gradient),
                                             kld_region_data(bench->first_gradient), bytes) == 0));
}

static void start(struct flight *flight);

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *error) {
    struct flight *flight = user;
    struct bench *bench = flight->bench;
    flight->running = false;
    bench->running--;
    if (status) {
        bench->failed++;
        bench->last_error = *error;
    } else {
        if (bench->done < LATENCIES_MAX)
            bench->latencies[bench->done] = (double)result->total_ns / 1e6;
        bench->done++;
        bench->bytes += result->bytes;
        bench->repeated += result->attempts - 1;
        bench->different += !same_answer(bench, flight, result->loss);
    }
    bool hopeless = bench->failed > 100 && bench->done == 0;
    if (now_ns() < bench->end_ns && !hopeless)
        start(flight);
}

static void start(struct flight *flight) {
    struct bench *bench = flight->bench;
    if (bench->options->check && flight->gradient) /* an answer that was never written is seen */
        memset(kld_region_data(flight->gradient), 0x55,
               bench->geometry.slot[KLD_SLOT_GRAD_PREDICTIONS].span_bytes);
    if (kld_submit(bench->connection, &flight->request, on_end, flight, NULL, &bench->last_error)) {
        bench->failed++;
        return;
    }
    flight->running = true;
    bench->running++;
}

static int compare_numbers(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static uint64_t moved_bytes(const struct bench *bench) {
    uint64_t bytes = 0;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        bytes += bench->geometry.slot[slot].rows * bench->geometry.slot[slot].row_bytes;
    return bytes * bench->done;
}

static void report(struct bench *bench, double seconds) {
    const struct bench_options *options = bench->options;
    size_t kept = bench->done < LATENCIES_MAX ? bench->done : LATENCIES_MAX;
    qsort(bench->latencies, kept, sizeof bench->latencies[0], compare_numbers);
    double p50 = kept ? bench->latencies[kept / 2] : 0;
    double p99 = kept ? bench->latencies[kept - 1 - kept / 100] : 0;
    double rate = (double)bench->done / seconds;
    double speed = (double)(bench->bytes ? bench->bytes : moved_bytes(bench)) / seconds;
    double read = 0, both = 0;
    uint64_t tensor = bench->geometry.slot[KLD_SLOT_PREDICTIONS].span_bytes;
    bool measured = kld_measure_ceiling(bench->connection,
                                        tensor < CEILING_BYTES_MAX ? tensor : CEILING_BYTES_MAX,
                                        &read, &both, NULL) == KLD_OK;
    double share = measured ? speed / (options->gradient ? both : read) : 0;
    if (options->json) {
        printf("{\"losses\":%" PRIu64 ",\"losses_per_s\":%.3f,\"gb_per_s\":%.3f,\"p50_ms\":%.4f,"
               "\"p99_ms\":%.4f,\"failed\":%" PRIu64 ",\"different\":%" PRIu64
               ",\"repeated\":%" PRIu64,
               bench->done, rate, speed / 1e9, p50, p99, bench->failed, bench->different,
               bench->repeated);
        if (measured)
            printf(",\"of_ceiling\":%.3f", share);
        printf(",\"loss\":");
        kld_cli_json_number(stdout, bench->first_loss, 17);
        printf("}\n");
        return;
    }
    printf("%s %s %s %s%s, %" PRIu64 " in flight\n", options->divergence, options->shape,
           options->dtype, options->form, options->gradient ? ", loss and gradient" : ", loss",
           options->in_flight);
    printf("%.1f losses/s   %.2f GB/s   p50 %.3f ms   p99 %.3f ms", rate, speed / 1e9, p50, p99);
    if (measured)
        printf("   %.0f%% of the measured %s ceiling", 100 * share,
               options->gradient ? "read-and-write" : "read");
    printf("\n%" PRIu64 " answers, %" PRIu64 " differ from the first, %" PRIu64 " failed, %" PRIu64
           " sent again\n",
           bench->done, bench->different, bench->failed, bench->repeated);
}

static enum kld_status measure(struct bench *bench, struct kld_error *err) {
    enum kld_status status =
        kld_cli_connect(&bench->options->server, NULL, &bench->connection, err);
    if (!status)
        status = make_memory(bench, err);
    struct kld_result warm;
    if (!status) /* the first request registers and pins memory */
        status = kld_run(bench->connection, &bench->flights[0].request, &warm, err);
    if (status)
        return status;
    uint64_t start_ns = now_ns();
    bench->end_ns = start_ns + (uint64_t)(bench->options->seconds * 1e9);
    for (uint64_t i = 0; i < bench->options->in_flight; i++)
        start(&bench->flights[i]);
    while (bench->running > 0 && !status)
        status = kld_process(bench->connection, -1, err);
    if (status)
        return status;
    if (bench->done == 0) {
        *err = bench->last_error;
        return err->status;
    }
    report(bench, (double)(now_ns() - start_ns) / 1e9);
    if (bench->failed && !bench->options->json)
        fprintf(stderr, "kld: last failure: %s\n", kld_cli_printable(bench->last_error.text));
    return KLD_OK;
}

static int run_bench(int argc, char **argv, const struct kld_command *command) {
    struct bench_options options = {.shape = "1024x32768",
                                    .dtype = "FP32",
                                    .form = "probs",
                                    .divergence = "forward_kl",
                                    .in_flight = 1,
                                    .seconds = 3};
    struct bench bench = {.options = &options};
    struct kld_error error = {0};
    const char *positional[KLD_POSITIONAL_MAX];
    enum kld_status status = kld_options_parse(command, argc, argv, &options, positional, &error);
    if (status)
        return status == KLD_CANCELLED ? KLD_EXIT_OK : kld_cli_usage(command, &error);
    if (options.in_flight < 1 || options.in_flight > FLIGHT_MAX)
        status = kld_error_set(&error, KLD_INVALID, "--in-flight is 1 to %d", FLIGHT_MAX);
    else if (options.check && !options.gradient)
        status =
            kld_error_set(&error, KLD_INVALID, "--check compares gradients; expected --grad too");
    if (!status)
        status = make_op(&options, &bench, &error);
    if (status)
        return kld_cli_usage(command, &error);
    bench.flights = calloc(options.in_flight, sizeof *bench.flights);
    bench.latencies = malloc(LATENCIES_MAX * sizeof *bench.latencies);
    status = bench.flights && bench.latencies ? measure(&bench, &error)
                                              : kld_error_set(&error, KLD_NO_MEMORY, "no memory");
    kld_close(bench.connection);
    free(bench.flights);
    free(bench.latencies);
    if (status)
        return kld_cli_fail_at(&error, &options.server, "");
    return bench.different || bench.failed ? KLD_EXIT_FAILED : KLD_EXIT_OK;
}

#define TEXT(flag, field, value, help)                                                             \
    { flag, KLD_OPTION_TEXT, value, help, offsetof(struct bench_options, field), 0 }

static const struct kld_option options_list[] = {
    TEXT("shape", shape, "NxC", "rows and classes (default 1024x32768)"),
    TEXT("dtype", dtype, "DTYPE", "FP32 (default), FP64, FP16, BF16"),
    TEXT("form", form, "FORM", "probs (default), logprobs, logits"),
    TEXT("divergence", divergence, "NAME", "one that needs no parameter (default: forward_kl)"),
    {"grad", KLD_OPTION_FLAG, NULL, "with the gradient of the predictions",
     offsetof(struct bench_options, gradient), 0},
    {"check", KLD_OPTION_FLAG, NULL, "compare every gradient with the first one, bit by bit",
     offsetof(struct bench_options, check), 0},
    {"in-flight", KLD_OPTION_COUNT, "N", "requests at a time (default 1)",
     offsetof(struct bench_options, in_flight), 0},
    {"seconds", KLD_OPTION_TIME, "S", "how long (default 3)",
     offsetof(struct bench_options, seconds), 0},
    {"json", KLD_OPTION_FLAG, NULL, "one JSON object", offsetof(struct bench_options, json), 0},
    KLD_SERVER_OPTIONS(struct bench_options, server),
    KLD_OPTIONS_END,
};

const struct kld_command kld_command_bench = {
    .name = "bench",
    .arguments = "",
    .summary = "losses a second, latency, and whether all answers agree",
    .details =
        "Sends the same request again and again for some seconds. GB/s counts the bytes of the\n"
        "tensors that are read and written. Exit status 1: answers differed, or some failed.",
    .options = options_list,
    .run = run_bench,
};
