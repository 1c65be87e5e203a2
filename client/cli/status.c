/* status.c - `kld status` and `kld ping`: what a server says about itself. */
#include <inttypes.h>
#include <string.h>

#include "client/cli/cli.h"

struct status_options {
    struct kld_server_options server;
    bool json;
    uint64_t count;
};

static void print_status(const struct kld_server_info *info, const struct kld_server_stats *stats) {
    printf("backend        %s\n", info->backend);
    printf("device         %s", info->device);
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

static void print_status_json(const struct kld_server_info *info,
                              const struct kld_server_stats *stats) {
    printf("{\"backend\":");
    kld_cli_json_string(stdout, info->backend);
    printf(",\"device\":");
    kld_cli_json_string(stdout, info->device);
    printf(",\"device_index\":%" PRIu32 ",\"devices\":%" PRIu32, info->device_index, info->devices);
    if (stats) {
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
    printf("}\n");
}

static int run_status(int argc, char **argv, const struct kld_command *command) {
    struct status_options options = {0};
    struct kld_error error = {0};
    const char *positional[KLD_POSITIONAL_MAX];
    enum kld_status status = kld_options_parse(command, argc, argv, &options, positional, &error);
    if (status)
        return status == KLD_CANCELLED ? KLD_EXIT_OK : kld_cli_usage(command, &error);
    struct kld_connection *connection = NULL;
    struct kld_server_info info;
    struct kld_server_stats stats;
    status = kld_cli_connect(&options.server, NULL, &connection, &error);
    if (!status)
        status = kld_info(connection, &info, &error);
    bool counted = false;
    if (!status) {
        enum kld_status asked = kld_stats(connection, &stats, &error);
        counted = asked == KLD_OK;
        status = asked == KLD_UNIMPLEMENTED ? KLD_OK : asked; /* over http: see /metrics */
    }
    if (!status && options.json)
        print_status_json(&info, counted ? &stats : NULL);
    else if (!status)
        print_status(&info, counted ? &stats : NULL);
    kld_close(connection);
    return status ? kld_cli_fail(&error) : KLD_EXIT_OK;
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
    return status ? kld_cli_fail(&error) : KLD_EXIT_OK;
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
