/* metrics.h - what an operator asks of a server's /metrics: read from the Prometheus text into one
 * struct. Pure; any thread. */
#ifndef KLD_CLIENT_CLI_METRICS_H
#define KLD_CLIENT_CLI_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"
#include "proto/wire.h"

/* X(name in our output, name in /metrics, of a worker). Those of a worker are told for each and
 * added up. */
#define KLD_REPORT_MAP(X)                                                                          \
    X(in_flight, worker_requests_in_flight, true)                                                  \
    X(queued, worker_requests_queued, true)                                                        \
    X(clients, unix_clients, true)                                                                 \
    X(regions, worker_regions, true)                                                               \
    X(region_bytes, worker_region_bytes, true)                                                     \
    X(pinned_bytes, pinned_bytes, true)                                                            \
    X(pool_bytes, pool_bytes, true)                                                                \
    X(pool_bytes_max, pool_bytes_max, true)                                                        \
    X(kernel_ns_total, kernel_ns_total, true)                                                      \
    X(bytes_total, kernel_bytes_total, true)                                                       \
    X(worker_restarts_total, worker_restarts_total, true)                                          \
    X(device_lost_total, device_lost_total, true)                                                  \
    X(gateway_restarts_total, gateway_restarts_total, false)                                       \
    X(http_in_flight, http_requests_in_flight, false)                                              \
    X(http_waiting, http_requests_waiting, false)                                                  \
    X(http_connections, http_connections, false)                                                   \
    X(http_received_bytes_total, http_received_bytes_total, false)                                 \
    X(http_sent_bytes_total, http_sent_bytes_total, false)                                         \
    X(http_regions, http_regions, false)                                                           \
    X(http_region_bytes, http_region_bytes, false)                                                 \
    X(http_tensors, http_tensors, false)                                                           \
    X(http_tensor_bytes, http_tensor_bytes, false)                                                 \
    X(staging_bytes, staging_bytes, false)

enum kld_report_value {
#define X(name, metric, of_worker) KLD_REPORT_##name,
    KLD_REPORT_MAP(X)
#undef X
        KLD_REPORT_VALUES
};

/* X(name): histograms, kld_<name>_seconds. */
#define KLD_REPORT_LATENCY_MAP(X) X(http_request) X(unix_request) X(queue) X(copy) X(kernel)

enum kld_report_latency {
#define X(name) KLD_REPORT_LATENCY_##name,
    KLD_REPORT_LATENCY_MAP(X)
#undef X
        KLD_REPORT_LATENCIES
};

/* X(name): kld_stage_seconds of HTTP requests. */
#define KLD_REPORT_STAGE_MAP(X) X(receive) X(gateway) X(queue) X(copy) X(kernel) X(reply)

enum kld_report_stage {
#define X(name) KLD_REPORT_STAGE_##name,
    KLD_REPORT_STAGE_MAP(X)
#undef X
        KLD_REPORT_STAGES
};

#define KLD_REPORT_BUCKETS_MAX 32
#define KLD_REPORT_OPS_MAX 16 /* kinds of what is asked for, copies and the unknown too */
#define KLD_REPORT_ACCESSES 2 /* read, read_write */
#define KLD_REPORT_PROCESSES_MAX (2 + KLD_WIRE_DEVICES_MAX)
#define KLD_REPORT_STATUSES 32 /* status numbers are below this */

enum kld_report_front { KLD_REPORT_HTTP, KLD_REPORT_UNIX, KLD_REPORT_FRONTS };

struct kld_report_histogram {
    uint64_t count;
    double sum_s;
    unsigned buckets;
    double limit_s[KLD_REPORT_BUCKETS_MAX]; /* infinite: the last */
    uint64_t below[KLD_REPORT_BUCKETS_MAX]; /* cumulative */
};

struct kld_report_worker {
    char backend[16], device[64], uuid[48];
    bool ready;
    uint64_t value[KLD_REPORT_VALUES];
    double roofline_bytes_per_s[KLD_REPORT_ACCESSES]; /* 0: not known */
    /* What its kernels had to move, and how long they took. */
    double work_bytes[KLD_REPORT_ACCESSES], work_s[KLD_REPORT_ACCESSES];
};

/* What was asked for, in workers. */
struct kld_report_op {
    char name[24];
    uint64_t requests, errors; /* that ended, errors among them */
    struct kld_report_histogram latency;
    double work_bytes[KLD_REPORT_ACCESSES], work_s[KLD_REPORT_ACCESSES];
};

struct kld_report_process {
    char name[24]; /* "gateway", "worker0" */
    double cpu_s, resident_bytes, started_s;
};

struct kld_report {
    char version[24];
    bool draining;
    bool unlinked; /* not said by the metrics: no worker that is ready hears the gateway yet */
    uint32_t workers;
    struct kld_report_worker worker[KLD_WIRE_DEVICES_MAX];
    uint64_t value[KLD_REPORT_VALUES]; /* of all workers together */
    uint64_t requests[KLD_REPORT_FRONTS][KLD_REPORT_STATUSES];
    struct kld_report_histogram latency[KLD_REPORT_LATENCIES];
    struct kld_report_stage_time {
        double sum_s;
        uint64_t count;
    } stage[KLD_REPORT_STAGES];
    unsigned ops, processes; /* of the next two */
    struct kld_report_op op[KLD_REPORT_OPS_MAX];
    struct kld_report_process process[KLD_REPORT_PROCESSES_MAX];
};

/* Takes what it knows and skips the rest. KLD_INVALID: no text of a kld server. */
enum kld_status kld_report_read(const char *text, struct kld_report *ret_report,
                                struct kld_error *err);
/* Does any worker serve, and will go on to? */
bool kld_report_ready(const struct kld_report *report);
/* The upper limit of the bucket that holds this share of all, in seconds; infinite: beyond the last
 * limit; 0 of none. */
double kld_report_below_s(const struct kld_report_histogram *histogram, unsigned percent);

extern const char *const kld_report_value_names[KLD_REPORT_VALUES];
extern const bool kld_report_of_worker[KLD_REPORT_VALUES];
extern const char *const kld_report_latency_names[KLD_REPORT_LATENCIES];
extern const char *const kld_report_front_names[KLD_REPORT_FRONTS];
extern const char *const kld_report_stage_names[KLD_REPORT_STAGES];

#endif
