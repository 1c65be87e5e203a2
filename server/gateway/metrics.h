/* metrics.h - the counters as Prometheus text, the model's statistics as Triton names them, and the
 * status page. They read the shared page of server/stats.h and write text; any thread.
 *
 * metrics.c has the one table of all metrics: what /metrics says of each and the documentation
 * come from there. */
#ifndef KLD_SERVER_GATEWAY_METRICS_H
#define KLD_SERVER_GATEWAY_METRICS_H

#include "proto/oip.h"
#include "server/gateway/gateway.h"

/* Room that is enough for kld_metrics_append(), whatever the counters hold. */
#define KLD_METRICS_BYTES_MAX (512 << 10)

void kld_metrics_append(const struct kld_stats_page *page, struct kld_oip_text *text);
/* ,"backend":"...","device":"..." for a JSON object, where all workers are alike; nothing where
 * they are not; ,"state":"starting" until all have said what they are, which may be after
 * readiness. */
void kld_metrics_append_device(const struct kld_stats_page *page, struct kld_oip_text *text);
/* {"model_stats":[...]} */
void kld_metrics_append_model(const struct kld_stats_model *counts, struct kld_oip_text *text);
/* HTML for a person's browser; it shows no name of a client and no path. host: what the browser
 * calls this server, which is shown where it is the text of a host; NULL: it did not say. */
void kld_page_append(const struct kld_gateway *gateway, const char *host,
                     struct kld_oip_text *text);

/* ---- The table and what it is made of: metrics.c, metrics_families.c, metrics_triton.c --------*/

struct kld_metric;
typedef void kld_metric_append(const struct kld_metric *metric, const struct kld_stats_page *page,
                               struct kld_oip_text *text);

struct kld_metric {
    const char *name; /* ends in its unit, as Prometheus wants it; else it is a number of things */
    const char *type; /* counter, gauge, histogram */
    const char *help; /* one line */
    const char *labels;        /* their names, by comma */
    kld_metric_append *append; /* its samples */
    unsigned index;            /* append's own */
};

enum kld_process_value {
    KLD_PROCESS_CPU,
    KLD_PROCESS_RESIDENT,
    KLD_PROCESS_VIRTUAL,
    KLD_PROCESS_FDS,
    KLD_PROCESS_FDS_MAX,
    KLD_PROCESS_STARTED,
};

kld_metric_append kld_metric_sum, kld_metric_of_workers, kld_metric_draining, kld_metric_ready,
    kld_metric_build, kld_metric_worker_info, kld_metric_requests, kld_metric_op_requests,
    kld_metric_rejected, kld_metric_http_replies, kld_metric_histogram, kld_metric_http_duration,
    kld_metric_unix_duration, kld_metric_op_duration, kld_metric_stages, kld_metric_work,
    kld_metric_roofline, kld_metric_faults, kld_metric_device_worked, kld_metric_process,
    kld_metric_triton_success, kld_metric_triton_failure, kld_metric_triton_us,
    kld_metric_triton_input, kld_metric_triton_output, kld_metric_gpu_memory;

bool kld_metric_has_uuid(const uint8_t *uuid);
void kld_metric_append_uuid(const uint8_t *uuid, struct kld_oip_text *text);

#endif
