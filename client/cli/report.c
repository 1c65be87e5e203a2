/* report.c - prints what a server's /metrics say: as one JSON object, or for a person. The thread
 * of the tool. */
#include <inttypes.h>
#include <math.h>

#include "client/cli/cli.h"
#include "client/cli/metrics.h"

static uint64_t requests_of(const struct kld_report *report, enum kld_report_front front,
                            bool errors) {
    uint64_t sum = 0;
    for (unsigned status = errors ? 1 : 0; status < KLD_REPORT_STATUSES; status++)
        sum += report->requests[front][status];
    return sum;
}

static void json_requests(FILE *out, const struct kld_report *report) {
    fprintf(out, ",\"requests\":{");
    for (unsigned front = 0; front < KLD_REPORT_FRONTS; front++) {
        fprintf(out, "%s\"%s\":{\"ok\":%" PRIu64, front ? "," : "", kld_report_front_names[front],
                report->requests[front][KLD_OK]);
        for (unsigned status = 1; status < KLD_REPORT_STATUSES; status++)
            if (report->requests[front][status])
                fprintf(out, ",\"%s\":%" PRIu64, kld_status_name((enum kld_status)status),
                        report->requests[front][status]);
        fprintf(out, "}");
    }
    fprintf(out, "}");
}

static void json_latency(FILE *out, const struct kld_report *report) {
    fprintf(out, ",\"latency\":{");
    for (unsigned i = 0; i < KLD_REPORT_LATENCIES; i++) {
        const struct kld_report_histogram *histogram = &report->latency[i];
        double mean_us = histogram->count ? histogram->sum_s * 1e6 / (double)histogram->count : 0;
        fprintf(out, "%s\"%s\":{\"count\":%" PRIu64 ",\"mean_us\":", i ? "," : "",
                kld_report_latency_names[i], histogram->count);
        kld_cli_json_number(out, mean_us, 6);
        fprintf(out, ",\"p50_below_us\":");
        kld_cli_json_number(out, kld_report_below_s(histogram, 50) * 1e6, 9);
        fprintf(out, ",\"p99_below_us\":");
        kld_cli_json_number(out, kld_report_below_s(histogram, 99) * 1e6, 9);
        fprintf(out, "}");
    }
    fprintf(out, "}");
}

static void json_workers(FILE *out, const struct kld_report *report) {
    fprintf(out, ",\"workers\":[");
    for (uint32_t i = 0; i < report->workers; i++) {
        const struct kld_report_worker *worker = &report->worker[i];
        fprintf(out, "%s{\"ready\":%s,\"backend\":", i ? "," : "",
                worker->ready ? "true" : "false");
        kld_cli_json_string(out, worker->backend);
        fprintf(out, ",\"device\":");
        kld_cli_json_string(out, worker->device);
        fprintf(out, ",\"uuid\":");
        kld_cli_json_string(out, worker->uuid);
        for (unsigned value = 0; value < KLD_REPORT_VALUES; value++)
            if (kld_report_of_worker[value])
                fprintf(out, ",\"%s\":%" PRIu64, kld_report_value_names[value],
                        worker->value[value]);
        fprintf(out, "}");
    }
    fprintf(out, "]");
}

void kld_cli_report_json(FILE *out, const struct kld_report *report) {
    fprintf(out, ",\"ready\":%s,\"draining\":%s,\"version\":",
            kld_report_ready(report) ? "true" : "false", report->draining ? "true" : "false");
    kld_cli_json_string(out, report->version);
    fprintf(out, ",\"backend\":");
    kld_cli_json_string(out, report->worker[0].backend);
    fprintf(out, ",\"device\":");
    kld_cli_json_string(out, report->worker[0].device);
    fprintf(out,
            ",\"device_index\":0,\"devices\":%" PRIu32 ",\"requests_total\":%" PRIu64
            ",\"errors_total\":%" PRIu64,
            report->workers, requests_of(report, KLD_REPORT_UNIX, false),
            requests_of(report, KLD_REPORT_UNIX, true));
    for (unsigned value = 0; value < KLD_REPORT_VALUES; value++)
        fprintf(out, ",\"%s\":%" PRIu64, kld_report_value_names[value], report->value[value]);
    json_requests(out, report);
    json_latency(out, report);
    json_workers(out, report);
}

static void text_front(FILE *out, const struct kld_report *report, enum kld_report_front front) {
    fprintf(out, "requests, %-5s%" PRIu64 " (%" PRIu64 " errors", kld_report_front_names[front],
            requests_of(report, front, false), requests_of(report, front, true));
    for (unsigned status = 1; status < KLD_REPORT_STATUSES; status++)
        if (report->requests[front][status])
            fprintf(out, ", %" PRIu64 " %s", report->requests[front][status],
                    kld_status_name((enum kld_status)status));
    fprintf(out, ")\n");
}

static void text_latency(FILE *out, const struct kld_report *report) {
    for (unsigned i = 0; i < KLD_REPORT_LATENCIES; i++) {
        const struct kld_report_histogram *histogram = &report->latency[i];
        if (!histogram->count)
            continue;
        fprintf(out, "%-15smean %.1f us", kld_report_latency_names[i],
                histogram->sum_s * 1e6 / (double)histogram->count);
        for (unsigned percent = 50; percent < 100; percent += 49) {
            double below_us = kld_report_below_s(histogram, percent) * 1e6;
            bool known = isfinite(below_us);
            double last_us =
                histogram->buckets > 1 ? histogram->limit_s[histogram->buckets - 2] * 1e6 : 0;
            fprintf(out, ", p%u %s %.0f us", percent, known ? "under" : "over",
                    known ? below_us : last_us);
        }
        putc('\n', out);
    }
}

void kld_cli_report_text(FILE *out, const struct kld_report *report) {
    const uint64_t *value = report->value;
    fprintf(out, "version        %s\nstate          %s\n", report->version,
            report->draining           ? "shutting down"
            : kld_report_ready(report) ? "ready"
                                       : "waiting for a worker");
    for (uint32_t i = 0; i < report->workers; i++)
        fprintf(out, "device %-8" PRIu32 "%s, %s, %s, %" PRIu64 " restarts\n", i,
                report->worker[i].backend, report->worker[i].device,
                report->worker[i].ready ? "ready" : "starting",
                report->worker[i].value[KLD_REPORT_worker_restarts_total]);
    text_front(out, report, KLD_REPORT_HTTP);
    text_front(out, report, KLD_REPORT_UNIX);
    fprintf(out, "in flight      %" PRIu64 " (queued or running in workers: %" PRIu64 ")\n",
            value[KLD_REPORT_http_in_flight], value[KLD_REPORT_in_flight]);
    fprintf(out, "clients        %" PRIu64 " unix, %" PRIu64 " http\n", value[KLD_REPORT_clients],
            value[KLD_REPORT_http_connections]);
    fprintf(out, "regions        %" PRIu64 " (%.3f GB) unix, %" PRIu64 " (%.3f GB) http\n",
            value[KLD_REPORT_regions], (double)value[KLD_REPORT_region_bytes] / 1e9,
            value[KLD_REPORT_http_regions], (double)value[KLD_REPORT_http_region_bytes] / 1e9);
    fprintf(out, "tensors kept   %" PRIu64 " (%.3f GB)\n", value[KLD_REPORT_http_tensors],
            (double)value[KLD_REPORT_http_tensor_bytes] / 1e9);
    fprintf(out, "staging        %.3f GB\n", (double)value[KLD_REPORT_staging_bytes] / 1e9);
    fprintf(out, "pool           %.3f of %.3f GB\n", (double)value[KLD_REPORT_pool_bytes] / 1e9,
            (double)value[KLD_REPORT_pool_bytes_max] / 1e9);
    fprintf(out, "kernels        %.3f s, %.3f GB\n",
            (double)value[KLD_REPORT_kernel_ns_total] / 1e9,
            (double)value[KLD_REPORT_bytes_total] / 1e9);
    text_latency(out, report);
}
