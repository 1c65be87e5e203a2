/* status.c - `kld status` and `kld ping`: what a server says about itself. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/cli/metrics.h"

#define READY_S 1.0

struct status_options {
    struct kld_server_options server;
    bool json;
    uint64_t count;
};

static void print_status(const char *url, const struct kld_server_info *info,
                         const struct kld_server_stats *stats) {
    struct kld_server_info shown = *info;
    if (strncmp(url, "local:", 6) ==
        0) /* else it would look like a server that has nothing to do */
        printf("server         none: this process (%s)\n", url);
    printf("backend        %s\n", kld_cli_printable(shown.backend));
    printf("device         %s", kld_cli_printable(shown.device));
    if (info->devices > 1)
        printf(" (%" PRIu32 " of 0 to %" PRIu32 ")", info->device_index, info->devices - 1);
    printf("\n");
    if (!stats)
        return;
    printf("up             %.1f s\n", (double)stats->uptime_ns / 1e9);
    printf("requests       %" PRIu64 " (%" PRIu64 " errors, %" PRIu32 " in flight)\n",
           stats->requests_total, stats->errors_total, stats->in_flight);
    printf("clients        %" PRIu32 "\n", stats->clients);
    printf("regions        %" PRIu64 " (%.3f GB)\n", stats->regions,
           (double)stats->region_bytes / 1e9);
    printf("pool           %.3f of %.3f GB\n", (double)stats->pool_bytes / 1e9,
           (double)stats->pool_bytes_max / 1e9);
    printf("kernels        %.3f s, %.3f GB\n", (double)stats->kernel_ns_total / 1e9,
           (double)stats->bytes_total / 1e9);
}

/* Members of an object, each behind a comma. */
static void print_status_json(const struct kld_server_info *info,
                              const struct kld_server_stats *stats) {
    printf(",\"backend\":");
    kld_cli_json_string(stdout, info->backend);
    printf(",\"device\":");
    kld_cli_json_string(stdout, info->device);
    printf(",\"device_index\":%" PRIu32 ",\"devices\":%" PRIu32, info->device_index, info->devices);
    if (!stats)
        return;
    const struct {
        const char *name;
        uint64_t value;
    } entries[] = {
        {"epoch", stats->epoch},
        {"uptime_ns", stats->uptime_ns},
        {"requests_total", stats->requests_total},
        {"errors_total", stats->errors_total},
        {"in_flight", stats->in_flight},
        {"clients", stats->clients},
        {"regions", stats->regions},
        {"region_bytes", stats->region_bytes},
        {"pool_bytes", stats->pool_bytes},
        {"pool_bytes_max", stats->pool_bytes_max},
        {"kernel_ns_total", stats->kernel_ns_total},
        {"bytes_total", stats->bytes_total},
    };
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
        printf(",\"%s\":%" PRIu64, entries[i].name, entries[i].value);
}

/* Over the Unix socket and in this process: who answered is ready. */
static enum kld_status ask_worker(struct kld_connection *connection, const char *url, bool json,
                                  struct kld_error *err) {
    struct kld_server_info info;
    struct kld_server_stats stats;
    enum kld_status status = kld_info(connection, &info, err);
    if (status)
        return status;
    status = kld_stats(connection, &stats, err);
    bool counted = !status;
    if (status && status != KLD_UNIMPLEMENTED) /* over http, by who may not read /metrics */
        return status;
    if (!json) {
        print_status(url, &info, counted ? &stats : NULL);
        return KLD_OK;
    }
    printf("{\"server\":");
    kld_cli_json_string(stdout, url);
    if (counted)
        printf(",\"ready\":true");
    print_status_json(&info, counted ? &stats : NULL);
    printf("}\n");
    return KLD_OK;
}

/* What /metrics does not say: kld_connect() asks for it, for a while. */
static enum kld_status ask_ready(const struct kld_server_options *server, bool *ret_ready,
                                 struct kld_error *err) {
    struct kld_server_options briefly = *server;
    struct kld_connection *connection = NULL;
    if (!(briefly.timeout_s > 0 && briefly.timeout_s < READY_S))
        briefly.timeout_s = READY_S;
    enum kld_status status = kld_cli_connect(&briefly, NULL, &connection, err);
    kld_close(connection);
    *ret_ready = status == KLD_OK;
    return status == KLD_UNAVAILABLE ? KLD_OK : status;
}

static void show(const struct kld_report *report, bool json, const char *url) {
    if (!json) {
        kld_cli_report_text(stdout, report);
        return;
    }
    printf("{\"server\":");
    kld_cli_json_string(stdout, url);
    kld_cli_report_json(stdout, report);
    printf("}\n");
}

/* Over HTTP. *ret_asked: what was asked for. */
static enum kld_status ask_gateway(const struct status_options *options,
                                   struct kld_connection *connection, const char *url,
                                   const char **ret_asked, bool *ret_ready, struct kld_error *err) {
    bool json = options->json;
    struct kld_report *report = malloc(sizeof *report);
    char *text = malloc(KLD_METRICS_TEXT_MAX);
    enum kld_status status = KLD_OK;
    *ret_asked = "GET /metrics at ";
    if (!report || !text)
        status = kld_error_set(err, KLD_NO_MEMORY, "no memory for the server's metrics");
    if (!status)
        status = kld_metrics(connection, text, KLD_METRICS_TEXT_MAX, err);
    if (status == KLD_FORBIDDEN) {
        struct kld_error why = *err;
        *ret_asked = "GET /v2 at ";
        status = ask_worker(connection, url, json, err);
        if (!status) { /* else that says it: it was not the right to read them */
            fprintf(stderr, "kld: GET /metrics at %s: %s\n", url, kld_cli_printable(why.text));
            status = ask_ready(&options->server, ret_ready, err);
        }
    } else if (!status) {
        status = kld_report_read(text, report, err);
        *ret_ready = !status && kld_report_ready(report);
        if (*ret_ready) {
            *ret_asked = "GET /v2/health/ready at ";
            status = ask_ready(&options->server, ret_ready, err);
            report->unlinked = !*ret_ready;
        }
        if (!status)
            show(report, json, url);
    }
    free(report);
    free(text);
    return status;
}

static int run_status(int argc, char **argv, const struct kld_command *command) {
    struct status_options options = {0};
    struct kld_error error = {0};
    const char *positional[KLD_POSITIONAL_MAX], *asked = "";
    enum kld_status status = kld_options_parse(command, argc, argv, &options, positional, &error);
    if (status)
        return status == KLD_CANCELLED ? KLD_EXIT_OK : kld_cli_usage(command, &error);
    char url[KLD_CLI_URL_MAX];
    bool ready = true;
    struct kld_connection *connection = NULL;
    kld_cli_server_shown(&options.server, url, sizeof url);
    bool http = strncmp(url, "http", 4) == 0;
    /* lazy: a gateway whose workers are not ready tells what it knows all the same. */
    struct kld_connect_options lazy = {.lazy = http};
    status = kld_cli_connect(&options.server, &lazy, &connection, &error);
    if (!status && http)
        status = ask_gateway(&options, connection, url, &asked, &ready, &error);
    else if (!status)
        status = ask_worker(connection, url, options.json, &error);
    kld_close(connection);
    if (status)
        return kld_cli_fail_at(&error, &options.server, asked);
    return ready ? KLD_EXIT_OK : KLD_EXIT_SERVER;
}

static int run_ping(int argc, char **argv, const struct kld_command *command) {
    struct status_options options = {.count = 3};
    struct kld_error error = {0};
    const char *positional[KLD_POSITIONAL_MAX];
    enum kld_status status = kld_options_parse(command, argc, argv, &options, positional, &error);
    if (status)
        return status == KLD_CANCELLED ? KLD_EXIT_OK : kld_cli_usage(command, &error);
    struct kld_connection *connection = NULL;
    status = kld_cli_connect(&options.server, NULL, &connection, &error);
    for (uint64_t i = 0; i < options.count && !status; i++) {
        uint64_t ns;
        status = kld_ping(connection, &ns, &error);
        if (!status)
            printf(options.json ? "{\"us\":%.1f}\n" : "answer after %.1f us\n", (double)ns / 1e3);
    }
    kld_close(connection);
    return status ? kld_cli_fail_at(&error, &options.server, "") : KLD_EXIT_OK;
}

static const struct kld_option status_list[] = {
    {"json", KLD_OPTION_FLAG, NULL, "one JSON object", offsetof(struct status_options, json), 0},
    KLD_SERVER_OPTIONS(struct status_options, server),
    KLD_OPTIONS_END,
};
static const struct kld_option ping_list[] = {
    {"count", KLD_OPTION_COUNT, "N", "how many times (default 3)",
     offsetof(struct status_options, count), 0},
    {"json", KLD_OPTION_FLAG, NULL, "a JSON object a line", offsetof(struct status_options, json),
     0},
    KLD_SERVER_OPTIONS(struct status_options, server),
    KLD_OPTIONS_END,
};

const struct kld_command kld_command_status = {
    .name = "status",
    .arguments = "",
    .summary = "what the server is and has done",
    .details = "Over http it reads /metrics (with tokens: the right `metrics`) and tells of all\n"
               "workers, requests by outcome and latencies; over a Unix socket of that worker.\n"
               "A server that answers but is not ready is exit status 3.\n",
    .options = status_list,
    .run = run_status,
};
const struct kld_command kld_command_ping = {
    .name = "ping",
    .arguments = "",
    .summary = "how long an answer takes",
    .options = ping_list,
    .run = run_ping,
};
