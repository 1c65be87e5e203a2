/* metrics_families.c - the samples of each kind of metric, from the shared counters (metrics.h). A
 * reader may see a counter between two writers' additions; each value is right for some moment.
 * Label values are words of ours, numbers and the names of devices, never what a client sent. Any
 * thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "server/gateway/metrics.h"

static uint64_t load(const _Atomic uint64_t *value) {
    return atomic_load_explicit(value, memory_order_relaxed);
}

/* ---- Counters and gauges ----------------------------------------------------------------------*/

void kld_metric_sum(const struct kld_metric *metric, const struct kld_stats_page *page,
                    struct kld_oip_text *text) {
    uint64_t sum = load(&page->common.value[metric->index]);
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)
        sum += load(&page->worker[i].value[metric->index]);
    kld_oip_append(text, "%s %" PRIu64 "\n", metric->name, sum);
}

void kld_metric_of_workers(const struct kld_metric *metric, const struct kld_stats_page *page,
                           struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)
        kld_oip_append(text, "%s{worker=\"%u\"} %" PRIu64 "\n", metric->name, i,
                       load(&page->worker[i].value[metric->index]));
}

void kld_metric_draining(const struct kld_metric *metric, const struct kld_stats_page *page,
                         struct kld_oip_text *text) {
    kld_oip_append(text, "%s %u\n", metric->name, atomic_load(&page->draining));
}

void kld_metric_ready(const struct kld_metric *metric, const struct kld_stats_page *page,
                      struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)
        kld_oip_append(text, "%s{worker=\"%u\"} %u\n", metric->name, i,
                       atomic_load(&page->device[i].ready));
}

/* ---- Who it is --------------------------------------------------------------------------------*/

/* A label's value: the texts come from our own worker, quotes and backslashes are left out. */
static void append_label(struct kld_oip_text *text, const char *value, size_t size) {
    for (size_t i = 0; i < size && value[i]; i++)
        if (value[i] != '"' && value[i] != '\\' && value[i] >= 0x20 && value[i] < 0x7f)
            kld_oip_append(text, "%c", value[i]);
}

static void append_names(const struct kld_stats_device *device, struct kld_oip_text *text) {
    kld_oip_append(text, "backend=\"");
    append_label(text, device->backend, sizeof device->backend);
    kld_oip_append(text, "\",device=\"");
    append_label(text, device->name, sizeof device->name);
    kld_oip_append(text, "\"");
}

void kld_metrics_append_device(const struct kld_stats_page *page, struct kld_oip_text *text) {
    const struct kld_stats_device *first = &page->device[0];
    if (!kld_stats_described(page)) {
        kld_oip_append(text, ",\"state\":\"starting\"");
        return;
    }
    for (uint32_t i = 1; i < kld_stats_workers(page); i++)
        if (memcmp(first->backend, page->device[i].backend, sizeof first->backend) != 0 ||
            memcmp(first->name, page->device[i].name, sizeof first->name) != 0)
            return;
    kld_oip_append(text, ",\"backend\":\"");
    append_label(text, first->backend, sizeof first->backend);
    kld_oip_append(text, "\",\"device\":\"");
    append_label(text, first->name, sizeof first->name);
    kld_oip_append(text, "\"");
}

bool kld_metric_has_uuid(const uint8_t *uuid) {
    bool any = false;
    for (int i = 0; i < KLD_WIRE_UUID_BYTES; i++)
        any = any || uuid[i];
    return any;
}

/* As nvidia-smi writes it; of a CPU nothing. */
void kld_metric_append_uuid(const uint8_t *uuid, struct kld_oip_text *text) {
    bool any = kld_metric_has_uuid(uuid);
    for (int i = 0; i < KLD_WIRE_UUID_BYTES && any; i++)
        kld_oip_append(text, "%s%02x",
                       i == 0                                  ? "GPU-"
                       : i == 4 || i == 6 || i == 8 || i == 10 ? "-"
                                                               : "",
                       uuid[i]);
}

void kld_metric_build(const struct kld_metric *metric, const struct kld_stats_page *page,
                      struct kld_oip_text *text) {
    kld_oip_append(text, "%s{version=\"" KLD_RELEASE "\",", metric->name);
    append_names(&page->device[0], text);
    kld_oip_append(text, "} 1\n");
}

void kld_metric_worker_info(const struct kld_metric *metric, const struct kld_stats_page *page,
                            struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
        kld_oip_append(text, "%s{worker=\"%u\",", metric->name, i);
        append_names(&page->device[i], text);
        kld_oip_append(text, ",uuid=\"");
        kld_metric_append_uuid(page->device[i].uuid, text);
        kld_oip_append(text, "\"} 1\n");
    }
}

/* ---- Requests ---------------------------------------------------------------------------------*/

/* labels: those in front of the status. */
static void append_front(const struct kld_metric *metric, const struct kld_stats *stats,
                         enum kld_front front, const char *labels, struct kld_oip_text *text) {
    for (unsigned status = 0; status < KLD_STATUS_SLOTS; status++)
        if (kld_status_known(status))
            kld_oip_append(text, "%s{%s,status=\"%s\"} %" PRIu64 "\n", metric->name, labels,
                           kld_status_name((enum kld_status)status),
                           kld_stats_requests_of(stats, front, status));
}

void kld_metric_requests(const struct kld_metric *metric, const struct kld_stats_page *page,
                         struct kld_oip_text *text) {
    append_front(metric, &page->common, KLD_FRONT_HTTP, "front=\"http\"", text);
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
        char labels[40];
        snprintf(labels, sizeof labels, "front=\"unix\",worker=\"%u\"", i);
        append_front(metric, &page->worker[i], KLD_FRONT_UNIX, labels, text);
    }
}

static uint64_t asked_so(const struct kld_stats_page *page, int front, int asked, unsigned status) {
    uint64_t sum = load(&page->common.requests[front][asked][status]);
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)
        sum += load(&page->worker[i].requests[front][asked][status]);
    return sum;
}

static const char *const front_names[KLD_FRONT_COUNT] = {"http", "unix"};

/* What never was but could be is left out, but for successes: most of it never will be. */
void kld_metric_op_requests(const struct kld_metric *metric, const struct kld_stats_page *page,
                            struct kld_oip_text *text) {
    for (int front = 0; front < KLD_FRONT_COUNT; front++)
        for (int asked = 0; asked < KLD_ASKED_COUNT; asked++)
            for (unsigned status = 0; status < KLD_STATUS_SLOTS; status++) {
                uint64_t count = asked_so(page, front, asked, status);
                bool may_be = asked < (front == KLD_FRONT_HTTP ? KLD_ASKED_COPY : KLD_ASKED_PUT);
                if (kld_status_known(status) && (count || (status == KLD_OK && may_be)))
                    kld_oip_append(text, "%s{front=\"%s\",op=\"%s\",status=\"%s\"} %" PRIu64 "\n",
                                   metric->name, front_names[front],
                                   kld_asked_name((enum kld_asked)asked),
                                   kld_status_name((enum kld_status)status), count);
            }
}

void kld_metric_rejected(const struct kld_metric *metric, const struct kld_stats_page *page,
                         struct kld_oip_text *text) {
#define X(front, reason)                                                                           \
    {                                                                                              \
        uint64_t sum = load(&page->common.rejected[KLD_REJECT_##front##_##reason]);                \
        for (uint32_t i = 0; i < kld_stats_workers(page); i++)                                     \
            sum += load(&page->worker[i].rejected[KLD_REJECT_##front##_##reason]);                 \
        kld_oip_append(text, "%s{front=\"" #front "\",reason=\"" #reason "\"} %" PRIu64 "\n",      \
                       metric->name, sum);                                                         \
    }
    KLD_REJECT_MAP(X)
#undef X
}

void kld_metric_http_replies(const struct kld_metric *metric, const struct kld_stats_page *page,
                             struct kld_oip_text *text) {
    for (int i = 0; i < KLD_HTTP_CODES_COUNT; i++) {
        char code[12] = "other";
        if (kld_http_codes[i])
            snprintf(code, sizeof code, "%u", kld_http_codes[i]);
        kld_oip_append(text, "%s{code=\"%s\"} %" PRIu64 "\n", metric->name, code,
                       load(&page->common.http_replies[i]));
    }
}

/* ---- Durations --------------------------------------------------------------------------------*/

struct snapshot {
    uint64_t bucket[KLD_BUCKETS]; /* not cumulative */
    uint64_t sum_ns, count;
};

static void take(const struct kld_stats_histogram *histogram, struct snapshot *to) {
    for (int i = 0; i < KLD_BUCKETS; i++) {
        uint64_t value = load(&histogram->bucket[i]);
        to->bucket[i] += value;
        to->count += value;
    }
    to->sum_ns += load(&histogram->sum_ns);
}

/* kld_bucket_limit_ns in seconds: texts, because there are hundreds of buckets. */
static const char *const limit_texts[KLD_BUCKETS] = {
    "1e-05", "2.5e-05", "5e-05", "0.0001", "0.00025", "0.0005", "0.001", "0.0025", "0.005",
    "0.01",  "0.025",   "0.05",  "0.1",    "0.25",    "1",      "2.5",   "10",     "+Inf"};

/* labels: "", or some without a comma at the end. */
static void append_snapshot(const struct kld_metric *metric, const char *labels,
                            const struct snapshot *snapshot, struct kld_oip_text *text) {
    uint64_t count = 0;
    char head[160], alone[96] = "";
    snprintf(head, sizeof head, "%s_bucket{%s%sle=", metric->name, labels, *labels ? "," : "");
    for (int i = 0; i < KLD_BUCKETS; i++) {
        count += snapshot->bucket[i];
        kld_oip_append(text, "%s\"%s\"} %" PRIu64 "\n", head, limit_texts[i], count);
    }
    if (*labels)
        snprintf(alone, sizeof alone, "{%s}", labels);
    kld_oip_append(text, "%s_sum%s %.9f\n%s_count%s %" PRIu64 "\n", metric->name, alone,
                   (double)snapshot->sum_ns / 1e9, metric->name, alone, count);
}

void kld_metric_histogram(const struct kld_metric *metric, const struct kld_stats_page *page,
                          struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
        struct snapshot snapshot = {.count = 0};
        char labels[32];
        take(&page->worker[i].histogram[metric->index], &snapshot);
        snprintf(labels, sizeof labels, "worker=\"%u\"", i);
        append_snapshot(metric, labels, &snapshot, text);
    }
}

static void take_durations(const struct kld_stats *stats, enum kld_front front,
                           struct snapshot *to) {
    for (int asked = 0; asked < KLD_ASKED_COUNT; asked++)
        take(&stats->duration[front][asked], to);
}

void kld_metric_http_duration(const struct kld_metric *metric, const struct kld_stats_page *page,
                              struct kld_oip_text *text) {
    struct snapshot snapshot = {.count = 0};
    take_durations(&page->common, KLD_FRONT_HTTP, &snapshot);
    append_snapshot(metric, "", &snapshot, text);
}

void kld_metric_unix_duration(const struct kld_metric *metric, const struct kld_stats_page *page,
                              struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
        struct snapshot snapshot = {.count = 0};
        char labels[32];
        take_durations(&page->worker[i], KLD_FRONT_UNIX, &snapshot);
        snprintf(labels, sizeof labels, "worker=\"%u\"", i);
        append_snapshot(metric, labels, &snapshot, text);
    }
}

void kld_metric_op_duration(const struct kld_metric *metric, const struct kld_stats_page *page,
                            struct kld_oip_text *text) {
    for (int front = 0; front < KLD_FRONT_COUNT; front++)
        for (int asked = 0; asked < KLD_ASKED_COUNT; asked++) {
            struct snapshot snapshot = {.count = 0};
            char labels[64];
            take(&page->common.duration[front][asked], &snapshot);
            for (uint32_t i = 0; i < kld_stats_workers(page); i++)
                take(&page->worker[i].duration[front][asked], &snapshot);
            if (!snapshot.count && asked != KLD_ASKED_FORWARD_KL)
                continue;
            snprintf(labels, sizeof labels, "front=\"%s\",op=\"%s\"", front_names[front],
                     kld_asked_name((enum kld_asked)asked));
            append_snapshot(metric, labels, &snapshot, text);
        }
}

/* Those of the Unix socket are the workers' own, together. */
void kld_metric_stages(const struct kld_metric *metric, const struct kld_stats_page *page,
                       struct kld_oip_text *text) {
    struct snapshot snapshot;
#define X(name)                                                                                    \
    snapshot = (struct snapshot){.count = 0};                                                      \
    take(&page->common.stage[KLD_STAGE_##name], &snapshot);                                        \
    append_snapshot(metric, "front=\"http\",stage=\"" #name "\"", &snapshot, text);
    KLD_STAGE_MAP(X)
#undef X
#define X(name, owner, help)                                                                       \
    snapshot = (struct snapshot){.count = 0};                                                      \
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)                                         \
        take(&page->worker[i].histogram[KLD_HISTOGRAM_##name], &snapshot);                         \
    append_snapshot(metric, "front=\"unix\",stage=\"" #name "\"", &snapshot, text);
    KLD_HISTOGRAM_MAP(X)
#undef X
}

/* ---- Devices ----------------------------------------------------------------------------------*/

static const char *const access_names[KLD_ACCESS_COUNT] = {"read", "read_write"};

/* index 0: bytes, 1: seconds. What never ran is left out. */
void kld_metric_work(const struct kld_metric *metric, const struct kld_stats_page *page,
                     struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)
        for (int asked = 0; asked < KLD_ASKED_COPY; asked++)
            for (int access = 0; access < KLD_ACCESS_COUNT; access++) {
                uint64_t bytes = load(&page->worker[i].work[asked][access].bytes);
                uint64_t ns = load(&page->worker[i].work[asked][access].kernel_ns);
                if (!bytes && !ns)
                    continue;
                kld_oip_append(text, "%s{worker=\"%u\",op=\"%s\",access=\"%s\"} ", metric->name, i,
                               kld_asked_name((enum kld_asked)asked), access_names[access]);
                if (metric->index)
                    kld_oip_append(text, "%.9f\n", (double)ns / 1e9);
                else
                    kld_oip_append(text, "%" PRIu64 "\n", bytes);
            }
}

void kld_metric_roofline(const struct kld_metric *metric, const struct kld_stats_page *page,
                         struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)
        for (int access = 0; access < KLD_ACCESS_COUNT; access++) {
            uint64_t most = load(&page->device[i].roofline_bytes_per_s[access]);
            if (most)
                kld_oip_append(text, "%s{worker=\"%u\",access=\"%s\"} %" PRIu64 "\n", metric->name,
                               i, access_names[access], most);
        }
}

void kld_metric_faults(const struct kld_metric *metric, const struct kld_stats_page *page,
                       struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
#define X(fault)                                                                                   \
    kld_oip_append(text, "%s{worker=\"%u\",class=\"" #fault "\"} %" PRIu64 "\n", metric->name, i,  \
                   load(&page->worker[i].faults[KLD_FAULT_##fault]));
        KLD_FAULT_MAP(X)
#undef X
    }
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void kld_metric_device_worked(const struct kld_metric *metric, const struct kld_stats_page *page,
                              struct kld_oip_text *text) {
    double zero = seconds(CLOCK_REALTIME) - seconds(CLOCK_MONOTONIC);
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
        uint64_t at_ns = load(&page->worker[i].device_worked_ns);
        if (at_ns)
            kld_oip_append(text, "%s{worker=\"%u\"} %.3f\n", metric->name, i,
                           zero + (double)at_ns / 1e9);
    }
}

/* ---- Processes --------------------------------------------------------------------------------*/

static double process_value(const struct kld_stats_process *process, enum kld_process_value value) {
    switch (value) {
    case KLD_PROCESS_CPU: return (double)load(&process->cpu_ms) / 1e3;
    case KLD_PROCESS_RESIDENT: return (double)load(&process->resident_bytes);
    case KLD_PROCESS_VIRTUAL: return (double)load(&process->virtual_bytes);
    case KLD_PROCESS_FDS: return (double)load(&process->open_fds);
    case KLD_PROCESS_FDS_MAX: return (double)load(&process->max_fds);
    default: return (double)load(&process->started_ms) / 1e3;
    }
}

void kld_metric_process(const struct kld_metric *metric, const struct kld_stats_page *page,
                        struct kld_oip_text *text) {
    enum kld_process_value value = (enum kld_process_value)metric->index;
    for (uint32_t i = 0; i < KLD_PROCESS_WORKER + kld_stats_workers(page); i++) {
        const struct kld_stats_process *process = &page->process[i];
        if (!load(&process->started_ms))
            continue; /* does not run, or nobody has looked yet */
        if (i >= KLD_PROCESS_WORKER)
            kld_oip_append(text, "%s{role=\"worker\",worker=\"%u\"}", metric->name,
                           i - KLD_PROCESS_WORKER);
        else
            kld_oip_append(text, "%s{role=\"%s\"}", metric->name,
                           i == KLD_PROCESS_GATEWAY ? "gateway" : "supervisor");
        kld_oip_append(text, " %.15g\n", process_value(process, value));
    }
}
