/* top_view.c - the lines of `kld top`, from two looks at a server's /metrics (top.h). Knows no
 * terminal. Pure. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/top.h"

/* What a line is made of. */
struct view {
    FILE *out;
    const struct kld_top_sample *before; /* NULL: nothing to compare with */
    const struct kld_top_sample *now;
    double seconds; /* in between */
};

/* Counters of a process begin again with it. */
static double grown(double before, double now) { return now > before ? now - before : 0; }

static uint64_t since(uint64_t before, uint64_t now) { return now > before ? now - before : 0; }

bool kld_top_restarted(const struct kld_top_sample *before, const struct kld_top_sample *now,
                       bool away) {
    for (unsigned front = 0; front < KLD_REPORT_FRONTS; front++)
        for (unsigned status = 0; status < KLD_REPORT_STATUSES; status++)
            if (now->report.requests[front][status] < before->report.requests[front][status])
                return true;
    for (unsigned i = 0; i < before->report.processes; i++)
        for (unsigned j = 0; j < now->report.processes; j++) {
            const struct kld_report_process *a = &before->report.process[i];
            const struct kld_report_process *b = &now->report.process[j];
            /* Clocks are set, by less than that; but seldom just while nobody answers. */
            if (strcmp(a->name, "supervisor") == 0 && strcmp(b->name, "supervisor") == 0 &&
                a->started_s > 0 && b->started_s > a->started_s + (away ? 0.1 : 0.5))
                return true;
        }
    return false;
}

double kld_top_quantile(const struct kld_report_histogram *before,
                        const struct kld_report_histogram *now, double q) {
    double count = (double)since(before->count, now->count), low_s = 0, below = 0;
    if (count <= 0)
        return -1;
    for (unsigned i = 0; i < now->buckets; i++) {
        double more = (double)since(i < before->buckets ? before->below[i] : 0, now->below[i]);
        if (!isfinite(now->limit_s[i]))
            break;
        if (more >= q * count && more > below)
            return low_s + (now->limit_s[i] - low_s) * (q * count - below) / (more - below);
        low_s = now->limit_s[i];
        below = more;
    }
    return low_s;
}

/* ---- Numbers ----------------------------------------------------------------------------------*/

static void put_duration(const struct view *view, double s) {
    if (s < 0)
        fprintf(view->out, " %10s", "-");
    else if (s < 0.9995e-3)
        fprintf(view->out, " %7.1f us", s * 1e6);
    else if (s < 0.9995)
        fprintf(view->out, " %7.2f ms", s * 1e3);
    else
        fprintf(view->out, " %8.2f s", s);
}

static void put_bytes(const struct view *view, double bytes) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    unsigned unit = 0;
    while (bytes >= 999.95 && unit < 4) {
        bytes /= 1000;
        unit++;
    }
    fprintf(view->out, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
}

static void put_rate(const struct view *view, uint64_t before, uint64_t now) {
    if (view->before)
        fprintf(view->out, " %10.1f", (double)since(before, now) / view->seconds);
    else
        fprintf(view->out, " %10s", "-");
}

/* bytes moved in seconds of kernels, and what part of the roofline that is; ideal_s: the time that
 * they would have taken at it, 0 where it is not known. */
static void put_bandwidth(const struct view *view, double bytes, double kernel_s, double ideal_s) {
    if (!view->before || kernel_s <= 0)
        fprintf(view->out, " %8s", "-");
    else
        fprintf(view->out, " %8.1f", bytes / kernel_s / 1e9);
    if (!view->before || kernel_s <= 0 || ideal_s <= 0)
        fprintf(view->out, "  %8s", "-");
    else
        fprintf(view->out, " %7.1f %%", 100 * ideal_s / kernel_s);
}

/* ---- Parts ------------------------------------------------------------------------------------*/

static void put_first(const struct view *view, const char *server, const char *message) {
    const struct kld_report *report = &view->now->report;
    fprintf(view->out, "kld %s  %s  %s", report->version, server,
            report->draining           ? "shutting down"
            : kld_report_ready(report) ? "ready"
                                       : "waiting for a worker");
    for (unsigned i = 0; i < report->processes; i++) {
        const struct kld_report_process *process = &report->process[i];
        double up_s = view->now->unix_s - process->started_s;
        if (strcmp(process->name, "supervisor") == 0 && process->started_s > 0 && up_s >= 0)
            fprintf(view->out, "  up %" PRIu64 ":%02u:%02u", (uint64_t)up_s / 3600,
                    (unsigned)((uint64_t)up_s / 60 % 60), (unsigned)((uint64_t)up_s % 60));
    }
    fprintf(view->out, "\n%s\n", message);
}

static uint64_t ended(const struct kld_report *report, unsigned front, bool errors) {
    uint64_t sum = 0;
    for (unsigned status = errors ? 1 : 0; report && status < KLD_REPORT_STATUSES; status++)
        sum += report->requests[front][status];
    return sum;
}

static void put_fronts(const struct view *view) {
    static const enum kld_report_latency latency[] = {KLD_REPORT_LATENCY_http_request,
                                                      KLD_REPORT_LATENCY_unix_request};
    static const enum kld_report_value in_flight[] = {KLD_REPORT_http_in_flight,
                                                      KLD_REPORT_in_flight};
    static const enum kld_report_value waiting[] = {KLD_REPORT_http_waiting, KLD_REPORT_queued};
    const struct kld_report *before = view->before ? &view->before->report : NULL;
    const struct kld_report *now = &view->now->report;
    fprintf(view->out, "%-16s %10s %10s %10s %10s %10s %8s\n", "front", "requests/s", "failed/s",
            "p50", "p99", "in flight", "waiting");
    for (unsigned front = 0; front < KLD_REPORT_FRONTS; front++) {
        const struct kld_report_histogram *old =
            before ? &before->latency[latency[front]] : &now->latency[latency[front]];
        fprintf(view->out, "%-16s", kld_report_front_names[front]);
        put_rate(view, ended(before, front, false), ended(now, front, false));
        put_rate(view, ended(before, front, true), ended(now, front, true));
        put_duration(view, kld_top_quantile(old, &now->latency[latency[front]], 0.5));
        put_duration(view, kld_top_quantile(old, &now->latency[latency[front]], 0.99));
        fprintf(view->out, " %10" PRIu64 " %8" PRIu64 "\n", now->value[in_flight[front]],
                now->value[waiting[front]]);
    }
}

/* Means: they add up. */
static void put_stages(const struct view *view) {
    fprintf(view->out, "stages of http  ");
    for (unsigned i = 0; i < KLD_REPORT_STAGES; i++) {
        const struct kld_report_stage_time *now = &view->now->report.stage[i];
        struct kld_report_stage_time none = *now;
        const struct kld_report_stage_time *old =
            view->before ? &view->before->report.stage[i] : &none;
        uint64_t count = since(old->count, now->count);
        fprintf(view->out, "%s%s", i ? ", " : "", kld_report_stage_names[i]);
        if (count)
            fprintf(view->out, " %.1f", grown(old->sum_s, now->sum_s) * 1e6 / (double)count);
        else
            fprintf(view->out, " -");
    }
    fprintf(view->out, " us\n");
}

static void put_clients(const struct view *view) {
    const uint64_t *now = view->now->report.value;
    const uint64_t *old = view->before ? view->before->report.value : now;
    double seconds = view->before ? view->seconds : 1;
    fprintf(view->out, "clients         %" PRIu64 " unix, %" PRIu64 " http; bodies in ",
            now[KLD_REPORT_clients], now[KLD_REPORT_http_connections]);
    put_bytes(view, (double)since(old[KLD_REPORT_http_received_bytes_total],
                                  now[KLD_REPORT_http_received_bytes_total]) /
                        seconds);
    fprintf(view->out, "/s, out ");
    put_bytes(view, (double)since(old[KLD_REPORT_http_sent_bytes_total],
                                  now[KLD_REPORT_http_sent_bytes_total]) /
                        seconds);
    fprintf(view->out, "/s\nmemory          staging ");
    put_bytes(view, (double)now[KLD_REPORT_staging_bytes]);
    fprintf(view->out, ", regions %" PRIu64 " (",
            now[KLD_REPORT_regions] + now[KLD_REPORT_http_regions]);
    put_bytes(view,
              (double)now[KLD_REPORT_region_bytes] + (double)now[KLD_REPORT_http_region_bytes]);
    fprintf(view->out, "), pinned ");
    put_bytes(view, (double)now[KLD_REPORT_pinned_bytes]);
    fprintf(view->out, ", tensors kept %" PRIu64 " (", now[KLD_REPORT_http_tensors]);
    put_bytes(view, (double)now[KLD_REPORT_http_tensor_bytes]);
    fprintf(view->out, ")\n");
}

static void put_processes(const struct view *view, const struct kld_top_sample *earlier) {
    const struct kld_report *now = &view->now->report;
    unsigned compared = earlier ? earlier->report.processes : 0;
    fprintf(view->out, "processes       ");
    for (unsigned i = 0; i < now->processes; i++) {
        const struct kld_report_process *process = &now->process[i], *old = NULL;
        for (unsigned j = 0; j < compared; j++)
            if (strcmp(earlier->report.process[j].name, process->name) == 0)
                old = &earlier->report.process[j];
        fprintf(view->out, "%s%s ", i ? ", " : "", process->name);
        if (old && old->started_s > process->started_s - 1)
            fprintf(view->out, "%.0f %% ",
                    100 * grown(old->cpu_s, process->cpu_s) / (view->now->at_s - earlier->at_s));
        put_bytes(view, process->resident_bytes);
    }
    fprintf(view->out, "%s\n", now->processes ? "" : "-");
}

static void put_workers(const struct view *view) {
    const struct kld_report *now = &view->now->report;
    fprintf(view->out, "\n%-7s %-8s %9s %7s %8s %8s %8s %9s  %-20s %s\n", "worker", "state",
            "in flight", "queued", "clients", "busy", "GB/s", "roofline", "pool", "device");
    for (uint32_t i = 0; i < now->workers; i++) {
        const struct kld_report_worker *worker = &now->worker[i];
        const struct kld_report_worker *old =
            view->before ? &view->before->report.worker[i] : worker;
        double bytes = 0, kernel_s = 0, ideal_s = 0;
        for (unsigned a = 0; a < KLD_REPORT_ACCESSES; a++) {
            double moved = grown(old->work_bytes[a], worker->work_bytes[a]);
            bytes += moved;
            kernel_s += grown(old->work_s[a], worker->work_s[a]);
            if (worker->roofline_bytes_per_s[a] > 0)
                ideal_s += moved / worker->roofline_bytes_per_s[a];
        }
        fprintf(view->out, "%-7" PRIu32 " %-8s %9" PRIu64 " %7" PRIu64 " %8" PRIu64, i,
                worker->ready ? "ready" : "starting", worker->value[KLD_REPORT_in_flight],
                worker->value[KLD_REPORT_queued], worker->value[KLD_REPORT_clients]);
        if (view->before)
            fprintf(view->out, " %6.1f %%", 100 * kernel_s / view->seconds);
        else
            fprintf(view->out, " %8s", "-");
        put_bandwidth(view, bytes, kernel_s, ideal_s);
        fprintf(view->out, "  %5.1f of %5.1f GB    %s %s\n",
                (double)worker->value[KLD_REPORT_pool_bytes] / 1e9,
                (double)worker->value[KLD_REPORT_pool_bytes_max] / 1e9, worker->backend,
                worker->device);
    }
}

/* Of the workers' rooflines their mean: of one server they are mostly equal. */
static double roofline_of(const struct kld_report *report, unsigned access) {
    double sum = 0;
    unsigned known = 0;
    for (uint32_t i = 0; i < report->workers; i++) {
        sum += report->worker[i].roofline_bytes_per_s[access];
        known += report->worker[i].roofline_bytes_per_s[access] > 0;
    }
    return known ? sum / known : 0;
}

/* Those that were asked for in between, or, with nothing to compare with, ever. */
static void put_op(const struct view *view, const struct kld_report_op *op) {
    static const struct kld_report_op none;
    const struct kld_report_op *old = view->before ? &none : op;
    for (unsigned i = 0; view->before && i < view->before->report.ops; i++)
        if (strcmp(view->before->report.op[i].name, op->name) == 0)
            old = &view->before->report.op[i];
    if (view->before ? op->requests <= old->requests : !op->requests)
        return;
    double bytes = 0, kernel_s = 0, ideal_s = 0;
    for (unsigned a = 0; a < KLD_REPORT_ACCESSES; a++) {
        double moved = grown(old->work_bytes[a], op->work_bytes[a]);
        double most = roofline_of(&view->now->report, a);
        bytes += moved;
        kernel_s += grown(old->work_s[a], op->work_s[a]);
        ideal_s += most > 0 ? moved / most : 0;
    }
    fprintf(view->out, "%-16s", op->name);
    put_rate(view, old->requests, op->requests);
    put_rate(view, old->errors, op->errors);
    put_duration(view, kld_top_quantile(&old->latency, &op->latency, 0.5));
    put_duration(view, kld_top_quantile(&old->latency, &op->latency, 0.99));
    put_bandwidth(view, bytes, kernel_s, ideal_s);
    fprintf(view->out, "\n");
}

static void put_ops(const struct view *view) {
    fprintf(view->out, "\n%-16s %10s %10s %10s %10s %8s %9s\n", "in workers", "requests/s",
            "failed/s", "p50", "p99", "GB/s", "roofline");
    for (unsigned i = 0; i < view->now->report.ops; i++)
        put_op(view, &view->now->report.op[i]);
}

void kld_top_render(FILE *out, const char *server, const char *message,
                    const struct kld_top_sample *before, const struct kld_top_sample *processes,
                    const struct kld_top_sample *now) {
    struct view view = {.out = out, .before = before, .now = now};
    view.seconds = before ? now->at_s - before->at_s : 0;
    if (view.seconds <= 0)
        view.before = NULL;
    if (processes && now->at_s <= processes->at_s)
        processes = NULL;
    put_first(&view, server, message);
    put_fronts(&view);
    put_stages(&view);
    put_clients(&view);
    put_processes(&view, processes);
    put_workers(&view);
    put_ops(&view);
}
