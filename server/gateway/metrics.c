/* metrics.c - Prometheus text format 0.0.4 from the shared counters, and Triton's statistics.
 * Counts nothing itself. A reader may see a counter between two writers' additions; each value is
 * right for some moment. Any thread. */
#include "server/gateway/metrics.h"

#include <inttypes.h>
#include <string.h>

static uint64_t load(const _Atomic uint64_t *value) {
    return atomic_load_explicit(value, memory_order_relaxed);
}

static void append_head(struct kld_oip_text *text, const char *name, const char *suffix,
                        const char *type, const char *help) {
    kld_oip_append(text, "# HELP kld_%s%s %s\n# TYPE kld_%s%s %s\n", name, suffix, help, name,
                   suffix, type);
}

static void append_values(const struct kld_stats *stats, struct kld_oip_text *text) {
#define X(name, type, owner, help)                                                                 \
    append_head(text, #name, "", #type, help);                                                     \
    kld_oip_append(text, "kld_" #name " %" PRIu64 "\n", load(&stats->value[KLD_STAT_##name]));
    KLD_STAT_MAP(X)
#undef X
}

static void append_requests(const struct kld_stats *stats, struct kld_oip_text *text) {
    static const char *const fronts[KLD_FRONT_COUNT] = {
        [KLD_FRONT_HTTP] = "http", [KLD_FRONT_UNIX] = "unix"};
    append_head(text, "requests_total", "", "counter",
                "operators asked for, by outcome; those over http reach the worker over unix too");
    for (int front = 0; front < KLD_FRONT_COUNT; front++)
        for (unsigned status = 0; status < KLD_STATUS_SLOTS; status++)
            if (kld_status_known(status))
                kld_oip_append(text, "kld_requests_total{front=\"%s\",status=\"%s\"} %" PRIu64 "\n",
                               fronts[front], kld_status_name((enum kld_status)status),
                               load(&stats->requests[front][status]));
}

static void append_histogram(const struct kld_stats *stats, enum kld_histogram index,
                             const char *name, const char *help, struct kld_oip_text *text) {
    uint64_t count = 0;
    append_head(text, name, "_seconds", "histogram", help);
    for (int i = 0; i < KLD_BUCKETS; i++) {
        count += load(&stats->histogram[index].bucket[i]);
        kld_oip_append(text, "kld_%s_seconds_bucket{le=\"", name);
        if (i + 1 < KLD_BUCKETS)
            kld_oip_append(text, "%.9g", (double)kld_bucket_limit_ns[i] / 1e9);
        else
            kld_oip_append(text, "+Inf");
        kld_oip_append(text, "\"} %" PRIu64 "\n", count);
    }
    kld_oip_append(text, "kld_%s_seconds_sum %.9f\nkld_%s_seconds_count %" PRIu64 "\n", name,
                   (double)load(&stats->histogram[index].sum_ns) / 1e9, name, count);
}

/* A label's value: the texts come from our own worker, quotes and backslashes are left out. */
static void append_label(struct kld_oip_text *text, const char *value, size_t size) {
    for (size_t i = 0; i < size && value[i]; i++)
        if (value[i] != '"' && value[i] != '\\' && value[i] >= 0x20 && value[i] < 0x7f)
            kld_oip_append(text, "%c", value[i]);
}

void kld_metrics_append(const struct kld_stats *stats, struct kld_oip_text *text) {
    append_head(text, "build_info", "", "gauge", "always 1; what is running");
    kld_oip_append(text, "kld_build_info{version=\"" KLD_RELEASE "\",backend=\"");
    append_label(text, stats->backend, sizeof stats->backend);
    kld_oip_append(text, "\",device=\"");
    append_label(text, stats->device, sizeof stats->device);
    kld_oip_append(text, "\"} 1\n");
    append_head(text, "worker_ready", "", "gauge", "1 while the worker serves");
    kld_oip_append(text, "kld_worker_ready %u\n", atomic_load(&stats->worker_ready));
    append_head(text, "draining", "", "gauge", "1 while the server is shutting down");
    kld_oip_append(text, "kld_draining %u\n", atomic_load(&stats->draining));
    append_values(stats, text);
    append_requests(stats, text);
#define X(name, help) append_histogram(stats, KLD_HISTOGRAM_##name, #name, help, text);
    KLD_HISTOGRAM_MAP(X)
#undef X
}

static void append_duration(struct kld_oip_text *text, const char *name, uint64_t count,
                            uint64_t ns, const char *behind) {
    kld_oip_append(text, "\"%s\":{\"count\":%" PRIu64 ",\"ns\":%" PRIu64 "}%s", name, count, ns,
                   behind);
}

void kld_metrics_append_model(const struct kld_gateway_counts *counts, struct kld_oip_text *text) {
    uint64_t done = counts->success;
    kld_oip_append(text,
                   "{\"model_stats\":[{\"name\":\"" KLD_OIP_MODEL
                   "\",\"version\":\"" KLD_OIP_MODEL_VERSION "\",\"last_inference\":%" PRIu64
                   ",\"inference_count\":%" PRIu64 ",\"execution_count\":%" PRIu64
                   ",\"inference_stats\":{",
                   counts->last_ms, done, done);
    append_duration(text, "success", done, counts->success_ns, ",");
    append_duration(text, "fail", counts->fail, counts->fail_ns, ",");
    append_duration(text, "queue", done, counts->queue_ns, ",");
    append_duration(text, "compute_input", done, counts->copy_ns, ",");
    append_duration(text, "compute_infer", done, counts->kernel_ns, ",");
    append_duration(text, "compute_output", done, 0, ",");
    append_duration(text, "cache_hit", 0, 0, ",");
    append_duration(text, "cache_miss", 0, 0, "},\"response_stats\":{},\"batch_stats\":[");
    if (done) {
        kld_oip_append(text, "{\"batch_size\":1,");
        append_duration(text, "compute_input", done, counts->copy_ns, ",");
        append_duration(text, "compute_infer", done, counts->kernel_ns, ",");
        append_duration(text, "compute_output", done, 0, "}");
    }
    kld_oip_append(text, "],\"memory_usage\":[]}]}");
}
