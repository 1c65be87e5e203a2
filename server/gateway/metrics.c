/* metrics.c - Prometheus text format 0.0.4 from the shared counters, and Triton's statistics.
 * Counts nothing itself. A reader may see a counter between two writers' additions; each value is
 * right for some moment. Any thread. */
#include "server/gateway/metrics.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static uint64_t load(const _Atomic uint64_t *value) {
    return atomic_load_explicit(value, memory_order_relaxed);
}

static void append_head(struct kld_oip_text *text, const char *name, const char *suffix,
                        const char *type, const char *help) {
    kld_oip_append(text, "# HELP kld_%s%s %s\n# TYPE kld_%s%s %s\n", name, suffix, help, name,
                   suffix, type);
}

/* The blocks of workers that a server of this kind has. */
static uint32_t workers_of(const struct kld_stats_page *page) {
    uint32_t workers = atomic_load(&page->workers);
    return workers < KLD_WIRE_DEVICES_MAX ? workers : KLD_WIRE_DEVICES_MAX;
}

static void append_value(const struct kld_stats_page *page, enum kld_stat stat, const char *name,
                         const char *type, bool of_workers, const char *help,
                         struct kld_oip_text *text) {
    uint64_t sum = load(&page->common.value[stat]);
    append_head(text, name, "", type, help);
    for (uint32_t i = 0; i < workers_of(page); i++) {
        uint64_t value = load(&page->worker[i].value[stat]);
        sum += value;
        if (of_workers)
            kld_oip_append(text, "kld_%s{worker=\"%u\"} %" PRIu64 "\n", name, i, value);
    }
    if (!of_workers)
        kld_oip_append(text, "kld_%s %" PRIu64 "\n", name, sum);
}

#define OF_WORKERS(owner) (strcmp(#owner, "worker") == 0)

static void append_values(const struct kld_stats_page *page, struct kld_oip_text *text) {
#define X(name, type, owner, help)                                                                 \
    append_value(page, KLD_STAT_##name, #name, #type, OF_WORKERS(owner), help, text);
    KLD_STAT_MAP(X)
#undef X
}

/* labels: those in front of the status. */
static void append_front(const struct kld_stats *stats, enum kld_front front, const char *labels,
                         struct kld_oip_text *text) {
    for (unsigned status = 0; status < KLD_STATUS_SLOTS; status++)
        if (kld_status_known(status))
            kld_oip_append(text, "kld_requests_total{%s,status=\"%s\"} %" PRIu64 "\n", labels,
                           kld_status_name((enum kld_status)status),
                           load(&stats->requests[front][status]));
}

static void append_requests(const struct kld_stats_page *page, struct kld_oip_text *text) {
    append_head(text, "requests_total", "", "counter",
                "operators asked for, by outcome; those over http reach a worker over unix too");
    append_front(&page->common, KLD_FRONT_HTTP, "front=\"http\"", text);
    for (uint32_t i = 0; i < workers_of(page); i++) {
        char labels[40];
        snprintf(labels, sizeof labels, "front=\"unix\",worker=\"%u\"", i);
        append_front(&page->worker[i], KLD_FRONT_UNIX, labels, text);
    }
}

/* label: "", or one that ends in a comma. */
static void append_histogram(const struct kld_stats *stats, enum kld_histogram index,
                             const char *name, const char *label, struct kld_oip_text *text) {
    uint64_t count = 0;
    for (int i = 0; i < KLD_BUCKETS; i++) {
        count += load(&stats->histogram[index].bucket[i]);
        kld_oip_append(text, "kld_%s_seconds_bucket{%sle=\"", name, label);
        if (i + 1 < KLD_BUCKETS)
            kld_oip_append(text, "%.9g", (double)kld_bucket_limit_ns[i] / 1e9);
        else
            kld_oip_append(text, "+Inf");
        kld_oip_append(text, "\"} %" PRIu64 "\n", count);
    }
    char alone[24] = "";
    if (*label)
        snprintf(alone, sizeof alone, "{%.*s}", (int)strlen(label) - 1, label);
    kld_oip_append(text, "kld_%s_seconds_sum%s %.9f\nkld_%s_seconds_count%s %" PRIu64 "\n", name,
                   alone, (double)load(&stats->histogram[index].sum_ns) / 1e9, name, alone, count);
}

static void append_histograms(const struct kld_stats_page *page, enum kld_histogram index,
                              const char *name, bool of_workers, const char *help,
                              struct kld_oip_text *text) {
    append_head(text, name, "_seconds", "histogram", help);
    if (!of_workers)
        append_histogram(&page->common, index, name, "", text);
    for (uint32_t i = 0; of_workers && i < workers_of(page); i++) {
        char label[sizeof "worker=\"4294967295\","];
        snprintf(label, sizeof label, "worker=\"%u\",", i);
        append_histogram(&page->worker[i], index, name, label, text);
    }
}

/* A label's value: the texts come from our own worker, quotes and backslashes are left out. */
static void append_label(struct kld_oip_text *text, const char *value, size_t size) {
    for (size_t i = 0; i < size && value[i]; i++)
        if (value[i] != '"' && value[i] != '\\' && value[i] >= 0x20 && value[i] < 0x7f)
            kld_oip_append(text, "%c", value[i]);
}

static void append_names(const struct kld_stats *stats, struct kld_oip_text *text) {
    kld_oip_append(text, "backend=\"");
    append_label(text, stats->backend, sizeof stats->backend);
    kld_oip_append(text, "\",device=\"");
    append_label(text, stats->device, sizeof stats->device);
    kld_oip_append(text, "\"");
}

/* As nvidia-smi writes it; of a CPU nothing. */
static void append_uuid(const uint8_t *uuid, struct kld_oip_text *text) {
    bool any = false;
    for (int i = 0; i < KLD_WIRE_UUID_BYTES; i++)
        any = any || uuid[i];
    for (int i = 0; i < KLD_WIRE_UUID_BYTES && any; i++)
        kld_oip_append(text, "%s%02x",
                       i == 0                                  ? "GPU-"
                       : i == 4 || i == 6 || i == 8 || i == 10 ? "-"
                                                               : "",
                       uuid[i]);
}

static void append_workers(const struct kld_stats_page *page, struct kld_oip_text *text) {
    append_head(text, "worker_info", "", "gauge", "always 1; which device a worker has");
    for (uint32_t i = 0; i < workers_of(page); i++) {
        kld_oip_append(text, "kld_worker_info{worker=\"%u\",", i);
        append_names(&page->worker[i], text);
        kld_oip_append(text, ",uuid=\"");
        append_uuid(page->worker[i].uuid, text);
        kld_oip_append(text, "\"} 1\n");
    }
    append_head(text, "worker_ready", "", "gauge", "1 while the worker serves");
    for (uint32_t i = 0; i < workers_of(page); i++)
        kld_oip_append(text, "kld_worker_ready{worker=\"%u\"} %u\n", i,
                       atomic_load(&page->worker[i].worker_ready));
}

void kld_metrics_append(const struct kld_stats_page *page, struct kld_oip_text *text) {
    append_head(text, "build_info", "", "gauge", "always 1; what is running, on the first device");
    kld_oip_append(text, "kld_build_info{version=\"" KLD_RELEASE "\",");
    append_names(&page->worker[0], text);
    kld_oip_append(text, "} 1\n");
    append_workers(page, text);
    append_head(text, "draining", "", "gauge", "1 while the server is shutting down");
    kld_oip_append(text, "kld_draining %u\n", atomic_load(&page->draining));
    append_values(page, text);
    append_requests(page, text);
#define X(name, owner, help)                                                                       \
    append_histograms(page, KLD_HISTOGRAM_##name, #name, OF_WORKERS(owner), help, text);
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
