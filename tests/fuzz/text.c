/* text.c - libFuzzer over the texts that libkld and the command line tool read: the JSON of HTTP
 * replies and errors, /metrics, and the tool's own options.
 *
 * Input: 1 byte that chooses, the text; options are lines. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/cli/metrics.h"
#include "client/http.h"
#include "tests/fuzz/common/fuzz.h"

#define ARGUMENTS_MAX 12

static void read_reply(const char *text, size_t bytes) {
    struct http_reply reply;
    struct kld_error err;
    enum kld_status status = kld_http_reply_read(text, bytes, &reply, &err);
    if (status) {
        require_error(status, &err);
        return;
    }
    require(reply.count >= 1 && reply.count <= KLD_SLOT_COUNT);
    for (uint32_t i = 0; i < reply.count; i++)
        require(kld_slot_is_output(reply.output[i].slot));
}

static void read_member(const char *text, size_t bytes) {
    char member[24];
    memset(member, 'x', sizeof member);
    bool found = kld_http_text_read(text, bytes, "error", member, sizeof member);
    require(memchr(member, 0, sizeof member) != NULL && (member[0] != 0 || !found));
}

/* Header lines, as libcurl gives them: without a NUL behind them. */
static void read_headers(const char *text, size_t bytes) {
    static struct http_call call;
    memset(&call, 0, sizeof call);
    while (bytes) {
        const char *end = memchr(text, '\n', bytes);
        size_t line = end ? (size_t)(end + 1 - text) : bytes;
        char *exact = malloc(line);
        require(exact != NULL);
        memcpy(exact, text, line);
        require(kld_http_header(exact, 1, line, &call) == line);
        free(exact);
        text += line;
        bytes -= line;
    }
    require(call.retry_after_ns <= UINT64_C(3600) * 1000000000);
}

static void require_histogram(const struct kld_report_histogram *histogram) {
    require(histogram->buckets <= KLD_REPORT_BUCKETS_MAX);
    for (unsigned percent = 0; percent <= 100; percent += 50)
        require(!isnan(kld_report_below_s(histogram, percent)) || histogram->buckets);
}

static void read_metrics(const char *text, size_t bytes) {
    static struct kld_report report;
    struct kld_error err;
    char *ended = malloc(bytes + 1);
    require(ended != NULL);
    memcpy(ended, text, bytes);
    ended[bytes] = '\0';
    enum kld_status status = kld_report_read(ended, &report, &err);
    free(ended);
    if (status) {
        require_error(status, &err);
        return;
    }
    require(report.workers <= KLD_WIRE_DEVICES_MAX && report.ops <= KLD_REPORT_OPS_MAX);
    require(report.processes <= KLD_REPORT_PROCESSES_MAX);
    require(memchr(report.version, 0, sizeof report.version) != NULL);
    for (uint32_t i = 0; i < report.workers; i++) {
        require(memchr(report.worker[i].backend, 0, sizeof report.worker[i].backend) != NULL);
        require(memchr(report.worker[i].device, 0, sizeof report.worker[i].device) != NULL);
        require(memchr(report.worker[i].uuid, 0, sizeof report.worker[i].uuid) != NULL);
    }
    for (unsigned i = 0; i < KLD_REPORT_LATENCIES; i++)
        require_histogram(&report.latency[i]);
    for (unsigned i = 0; i < report.ops; i++) {
        require(memchr(report.op[i].name, 0, sizeof report.op[i].name) != NULL);
        require_histogram(&report.op[i].latency);
    }
    for (unsigned i = 0; i < report.processes; i++)
        require(memchr(report.process[i].name, 0, sizeof report.process[i].name) != NULL);
    (void)kld_report_ready(&report);
    char *out = NULL;
    size_t out_bytes = 0;
    FILE *stream = open_memstream(&out, &out_bytes);
    require(stream != NULL);
    kld_cli_report_text(stream, &report);
    kld_cli_report_json(stream, &report);
    fclose(stream);
    free(out);
}

static void read_options(struct fuzz_input *input) {
    static const struct kld_command *const commands[] = {&kld_command_div, &kld_command_status,
                                                         &kld_command_ping, &kld_command_top};
    static char to[4096]; /* larger than the options of any command */
    const struct kld_command *command = commands[fuzz_byte(input) % 4];
    const char *positional[KLD_POSITIONAL_MAX] = {NULL};
    char *arguments[ARGUMENTS_MAX + 1] = {NULL};
    struct kld_error err;
    int count = 0;
    for (; count < ARGUMENTS_MAX && input->at < input->end; count++) {
        arguments[count] = fuzz_text(input);
        if (strcmp(arguments[count], "-h") == 0 || strcmp(arguments[count], "--help") == 0)
            arguments[count][0] = 'h'; /* prints */
    }
    memset(to, 0, sizeof to);
    enum kld_status status = kld_options_parse(command, count, arguments, to, positional, &err);
    if (status)
        require_error(status, &err);
    else
        for (size_t i = 0; i < command->positional_min; i++)
            require(positional[i] != NULL);
    for (int i = 0; i < count; i++)
        free(arguments[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct fuzz_input input = {data, data + bytes};
    uint8_t what = fuzz_byte(&input);
    size_t left = (size_t)(input.end - input.at);
    char *text = malloc(left ? left : 1); /* of exactly its size */
    require(text != NULL);
    memcpy(text, input.at, left);
    switch (what % 5) {
    case 0: read_reply(text, left); break;
    case 1: read_member(text, left); break;
    case 2: read_headers(text, left); break;
    case 3: read_metrics(text, left); break;
    default: read_options(&input);
    }
    free(text);
    return 0;
}
