/* metrics.c - the one table of all metrics: Prometheus text format 0.0.4 and its documentation.
 * Counts nothing and knows no counter; the samples are metrics_families.c's and, of those that
 * NVIDIA Triton has too, metrics_triton.c's. Any thread. */
#include "server/gateway/metrics.h"

#include <stdio.h>
#include <string.h>

#include "server/role.h"

#define OF_gateway "", kld_metric_sum
#define OF_any "", kld_metric_sum
#define OF_worker "worker", kld_metric_of_workers
#define TRITON "model, version"
#define PROCESS "role, worker"

static const struct kld_metric metrics[] = {
    {"kld_build_info", "gauge", "always 1; what is running, on the first device",
     "version, backend, device", kld_metric_build, 0},
    {"kld_worker_info", "gauge", "always 1; which device a worker has",
     "worker, backend, device, uuid", kld_metric_worker_info, 0},
    {"kld_worker_ready", "gauge", "1 while the worker serves", "worker", kld_metric_ready, 0},
    {"kld_draining", "gauge",
     "1 while the gateway finishes because somebody told the server to stop", "",
     kld_metric_draining, 0},
#define X(name, type, owner, help) {"kld_" #name, #type, help, OF_##owner, KLD_STAT_##name},
    KLD_STAT_MAP(X)
#undef X
        {"kld_requests_total", "counter",
         "operators, and tensors to store, asked for, by outcome; those over http reach a worker "
         "over unix too",
         "front, worker, status", kld_metric_requests, 0},
    {"kld_op_requests_total", "counter",
     "the same by what was asked for: a divergence, copy, put_tensor, or unknown where it was "
     "refused before",
     "front, op, status", kld_metric_op_requests, 0},
    {"kld_rejected_total", "counter",
     "turned away before any work was done, by the limit or rule that was met", "front, reason",
     kld_metric_rejected, 0},
    {"kld_http_replies_total", "counter", "HTTP replies of every path, by status code", "code",
     kld_metric_http_replies, 0},
    {"kld_http_request_seconds", "histogram",
     "from the first byte of an infer request to the last of its reply", "",
     kld_metric_http_duration, 0},
    {"kld_unix_request_seconds", "histogram", "from SUBMIT to DONE in the worker", "worker",
     kld_metric_unix_duration, 0},
    {"kld_op_seconds", "histogram", "those two by what was asked for, once it was", "front, op",
     kld_metric_op_duration, 0},
    {"kld_stage_seconds", "histogram",
     "parts of a request's time; http: of those that succeeded, which they add up to (gateway: "
     "parsing, waiting for memory, the way to the worker); unix: in the workers",
     "front, stage", kld_metric_stages, 0},
#define X(name, owner, help)                                                                       \
    {"kld_" #name "_seconds", "histogram",         help, "worker",                                 \
     kld_metric_histogram,    KLD_HISTOGRAM_##name},
    KLD_HISTOGRAM_MAP(X)
#undef X
        {"kld_op_bytes_total", "counter",
         "bytes that kernels had to move, each once; access: read, or read_write where gradients "
         "or a "
         "loss for each element are written; what never ran is left out",
         "worker, op, access", kld_metric_work, 0},
    {"kld_op_kernel_seconds_total", "counter", "time that their kernels took", "worker, op, access",
     kld_metric_work, 1},
    {"kld_roofline_bytes_per_second", "gauge",
     "what the device's memory moves at best, to compare kernels with; only with "
     "--measure-roofline or --roofline-bytes-per-s",
     "worker, access", kld_metric_roofline, 0},
    {"kld_device_errors_total", "counter",
     "failures that the device's back end told of: of the request, of a peer's memory, of room, or "
     "of the device (which ends the worker)",
     "worker, class", kld_metric_faults, 0},
    {"kld_device_worked_timestamp_seconds", "gauge",
     "when the device last did what it was asked, since 1970", "worker", kld_metric_device_worked,
     0},
    {"process_cpu_seconds_total", "counter",
     "processor time; of each process of the server, looked at once a second", PROCESS,
     kld_metric_process, KLD_PROCESS_CPU},
    {"process_resident_memory_bytes", "gauge", "memory that is resident", PROCESS,
     kld_metric_process, KLD_PROCESS_RESIDENT},
    {"process_virtual_memory_bytes", "gauge", "addresses that are in use", PROCESS,
     kld_metric_process, KLD_PROCESS_VIRTUAL},
    {"process_open_fds", "gauge", "open file descriptors", PROCESS, kld_metric_process,
     KLD_PROCESS_FDS},
    {"process_max_fds", "gauge", "most file descriptors it may open", PROCESS, kld_metric_process,
     KLD_PROCESS_FDS_MAX},
    {"process_start_time_seconds", "gauge", "when it was started, since 1970", PROCESS,
     kld_metric_process, KLD_PROCESS_STARTED},
    {"nv_inference_request_success", "counter", "as Triton counts: requests over HTTP, answered",
     TRITON, kld_metric_triton_success, 0},
    {"nv_inference_request_failure", "counter", "the same, refused or failed", TRITON,
     kld_metric_triton_failure, 0},
    {"nv_inference_count", "counter", "inferences; each request is one", TRITON,
     kld_metric_triton_success, 0},
    {"nv_inference_exec_count", "counter", "executions; requests are not batched", TRITON,
     kld_metric_triton_success, 0},
    {"nv_inference_request_duration_us", "counter", "time of those that succeeded, us", TRITON,
     kld_metric_triton_us, KLD_STAGE_COUNT},
    {"nv_inference_queue_duration_us", "counter", "of it, waiting for the device, us", TRITON,
     kld_metric_triton_us, KLD_STAGE_queue},
    {"nv_inference_compute_input_duration_us", "counter",
     "of it, reading JSON and shared memory, and moving tensors between host and device, both "
     "ways, us",
     TRITON, kld_metric_triton_input, 0},
    {"nv_inference_compute_infer_duration_us", "counter", "of it, computing, us", TRITON,
     kld_metric_triton_us, KLD_STAGE_kernel},
    {"nv_inference_compute_output_duration_us", "counter",
     "of it, from the worker's answer until the reply began: writing JSON and shared memory, us",
     TRITON, kld_metric_triton_output, 0},
    {"nv_gpu_memory_total_bytes", "gauge", "memory of a GPU; nothing of a CPU", "gpu_uuid",
     kld_metric_gpu_memory, 0},
};
#define METRICS (sizeof metrics / sizeof metrics[0])

void kld_metrics_append(const struct kld_stats_page *page, struct kld_oip_text *text) {
    for (size_t i = 0; i < METRICS; i++) {
        kld_oip_append(text, "# HELP %s %s\n# TYPE %s %s\n", metrics[i].name, metrics[i].help,
                       metrics[i].name, metrics[i].type);
        metrics[i].append(&metrics[i], page, text);
    }
}

static const char *unit_of(const char *name) {
    static const struct {
        const char *part, *unit;
    } units[] = {{"_bytes_per_second", "bytes a second"},
                 {"_seconds", "seconds"},
                 {"_bytes", "bytes"},
                 {"_duration_us", "us"},
                 {"_ns_", "ns"}};
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strstr(name, units[i].part))
            return units[i].unit;
    return "";
}

void kld_metrics_table(FILE *out) {
    fputs("| metric | type | unit | labels | what it says |\n|---|---|---|---|---|\n", out);
    for (size_t i = 0; i < METRICS; i++)
        fprintf(out, "| `%s` | %s | %s | %s | %s |\n", metrics[i].name, metrics[i].type,
                unit_of(metrics[i].name), metrics[i].labels, metrics[i].help);
}
