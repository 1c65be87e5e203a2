/* metrics.c - reads Prometheus text, a line at a time, as far as `kld status` and `kld top`
 * need it. It knows
 * the names in its tables; a line of another name or form is skipped, since a newer server may say
 * more. Pure; any thread. */
#include "client/cli/metrics.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "kld_"
#define PROCESS "process_"
#define NAME_MAX_BYTES 64
#define LABEL_MAX_BYTES 80

const char *const kld_report_value_names[KLD_REPORT_VALUES] = {
#define X(name, metric, of_worker) #name,
    KLD_REPORT_MAP(X)
#undef X
};
const bool kld_report_of_worker[KLD_REPORT_VALUES] = {
#define X(name, metric, of_worker) of_worker,
    KLD_REPORT_MAP(X)
#undef X
};
const char *const kld_report_latency_names[KLD_REPORT_LATENCIES] = {
#define X(name) #name,
    KLD_REPORT_LATENCY_MAP(X)
#undef X
};
const char *const kld_report_front_names[KLD_REPORT_FRONTS] = {"http", "unix"};
const char *const kld_report_stage_names[KLD_REPORT_STAGES] = {
#define X(name) #name,
    KLD_REPORT_STAGE_MAP(X)
#undef X
};
static const char *const access_names[KLD_REPORT_ACCESSES] = {"read", "read_write"};

static const char *const metric_names[KLD_REPORT_VALUES] = {
#define X(name, metric, of_worker) #metric,
    KLD_REPORT_MAP(X)
#undef X
};

/* One line: kld_NAME{LABELS} NUMBER, or the same of process_NAME. */
struct sample {
    char name[NAME_MAX_BYTES]; /* without kld_ */
    const char *labels;        /* behind the brace, up to its end */
    size_t labels_bytes;
    uint64_t whole; /* 0 where the number is none */
    double number;
};

static bool read_sample(const char *line, size_t bytes, struct sample *ret_sample) {
    const char *end = line + bytes, *at = line;
    if (bytes > strlen(PREFIX) && strncmp(line, PREFIX, strlen(PREFIX)) == 0)
        at += strlen(PREFIX);
    else if (bytes < strlen(PROCESS) || strncmp(line, PROCESS, strlen(PROCESS)) != 0)
        return false;
    size_t name = strcspn(at, "{ \n");
    if (name == 0 || name >= NAME_MAX_BYTES || at + name >= end)
        return false;
    memcpy(ret_sample->name, at, name);
    ret_sample->name[name] = '\0';
    at += name;
    ret_sample->labels = at;
    ret_sample->labels_bytes = 0;
    if (*at == '{') {
        const char *close = memrchr(at, '}', (size_t)(end - at));
        if (!close || close + 1 >= end)
            return false;
        ret_sample->labels = at + 1;
        ret_sample->labels_bytes = (size_t)(close - at - 1);
        at = close + 1;
    }
    char *stop = NULL;
    if (*at != ' ')
        return false;
    ret_sample->number = strtod(at + 1, &stop);
    if (stop == at + 1 || stop != end)
        return false;
    errno = 0;
    ret_sample->whole = strtoull(at + 1, &stop, 10);
    if (stop != end || errno || at[1] == '-')
        ret_sample->whole = 0;
    return true;
}

/* The value of a label, what is not printable as '?'; false: there is none, or it is too long.
 * Values hold no quotes. */
static bool read_label(const struct sample *sample, const char *key, char *ret_value,
                       size_t capacity) {
    const char *at = sample->labels, *end = at + sample->labels_bytes;
    while (at < end) {
        const char *equal = memchr(at, '=', (size_t)(end - at));
        if (!equal || equal + 1 >= end || equal[1] != '"')
            return false;
        const char *value = equal + 2;
        const char *quote = memchr(value, '"', (size_t)(end - value));
        if (!quote)
            return false;
        if ((size_t)(equal - at) == strlen(key) && strncmp(at, key, strlen(key)) == 0) {
            size_t bytes = (size_t)(quote - value);
            if (bytes >= capacity)
                return false;
            for (size_t i = 0; i < bytes;
                 i++) /* it is shown on a terminal, which obeys some bytes */
                ret_value[i] = value[i] >= ' ' && value[i] <= '~' ? value[i] : '?';
            ret_value[bytes] = '\0';
            return true;
        }
        at = quote + 1;
        at += at < end && *at == ',';
    }
    return false;
}

/* The worker that a line is about; NULL: none, or one too many. */
static struct kld_report_worker *worker_of(const struct sample *sample, struct kld_report *report) {
    char text[8], *end;
    if (!read_label(sample, "worker", text, sizeof text) || !text[0])
        return NULL;
    unsigned long index = strtoul(text, &end, 10);
    if (*end || index >= KLD_WIRE_DEVICES_MAX)
        return NULL;
    if (report->workers <= index)
        report->workers = (uint32_t)index + 1;
    return &report->worker[index];
}

static void take_worker_info(const struct sample *sample, struct kld_report_worker *worker) {
    (void)read_label(sample, "backend", worker->backend, sizeof worker->backend);
    (void)read_label(sample, "device", worker->device, sizeof worker->device);
    (void)read_label(sample, "uuid", worker->uuid, sizeof worker->uuid);
}

static void take_requests(const struct sample *sample, struct kld_report *report) {
    char front[8], name[LABEL_MAX_BYTES];
    if (!read_label(sample, "front", front, sizeof front) ||
        !read_label(sample, "status", name, sizeof name))
        return;
    for (unsigned f = 0; f < KLD_REPORT_FRONTS; f++)
        for (unsigned status = 0; status < KLD_REPORT_STATUSES; status++)
            if (strcmp(front, kld_report_front_names[f]) == 0 && kld_status_known(status) &&
                strcmp(name, kld_status_name((enum kld_status)status)) == 0)
                report->requests[f][status] += sample->whole;
}

static void take_bucket(const struct sample *sample, struct kld_report_histogram *histogram) {
    char text[LABEL_MAX_BYTES], *end;
    if (!read_label(sample, "le", text, sizeof text))
        return;
    double limit = strcmp(text, "+Inf") == 0 ? (double)INFINITY : strtod(text, &end);
    unsigned i = 0;
    while (i < histogram->buckets && histogram->limit_s[i] < limit)
        i++;
    if (i == KLD_REPORT_BUCKETS_MAX)
        return;
    if (i == histogram->buckets) { /* limits come in order; each worker says the same ones */
        histogram->limit_s[i] = limit;
        histogram->buckets++;
    }
    histogram->below[i] += sample->whole;
}

static void take_latency(const struct sample *sample, struct kld_report *report) {
    for (unsigned i = 0; i < KLD_REPORT_LATENCIES; i++) {
        const char *name = kld_report_latency_names[i];
        size_t length = strlen(name);
        if (strncmp(sample->name, name, length) != 0)
            continue;
        const char *suffix = sample->name + length;
        if (strcmp(suffix, "_seconds_bucket") == 0)
            take_bucket(sample, &report->latency[i]);
        else if (strcmp(suffix, "_seconds_sum") == 0)
            report->latency[i].sum_s += sample->number;
        else if (strcmp(suffix, "_seconds_count") == 0)
            report->latency[i].count += sample->whole;
    }
}

/* The place of the label's value among `names`; count: it is none of them. */
static unsigned place_of(const struct sample *sample, const char *key, const char *const *names,
                         unsigned count) {
    char value[LABEL_MAX_BYTES];
    unsigned i = 0;
    if (!read_label(sample, key, value, sizeof value))
        return count;
    while (i < count && strcmp(value, names[i]) != 0)
        i++;
    return i;
}

static void take_stage(const struct sample *sample, struct kld_report *report) {
    unsigned stage = place_of(sample, "stage", kld_report_stage_names, KLD_REPORT_STAGES);
    if (stage == KLD_REPORT_STAGES ||
        place_of(sample, "front", kld_report_front_names, KLD_REPORT_FRONTS) != KLD_REPORT_HTTP)
        return;
    if (strcmp(sample->name, "stage_seconds_sum") == 0)
        report->stage[stage].sum_s += sample->number;
    else if (strcmp(sample->name, "stage_seconds_count") == 0)
        report->stage[stage].count += sample->whole;
}

/* NULL: the line names none, or there is no room for another. */
static struct kld_report_op *op_of(const struct sample *sample, struct kld_report *report) {
    char name[sizeof report->op[0].name];
    if (!read_label(sample, "op", name, sizeof name) || !name[0])
        return NULL;
    unsigned i = 0;
    while (i < report->ops && strcmp(report->op[i].name, name) != 0)
        i++;
    if (i == KLD_REPORT_OPS_MAX)
        return NULL;
    if (i == report->ops)
        memcpy(report->op[report->ops++].name, name, sizeof name);
    return &report->op[i];
}

/* Of the workers: what came over HTTP is there, too. */
static void take_op(const struct sample *sample, struct kld_report *report) {
    char status[LABEL_MAX_BYTES];
    struct kld_report_op *op =
        place_of(sample, "front", kld_report_front_names, KLD_REPORT_FRONTS) == KLD_REPORT_UNIX
            ? op_of(sample, report)
            : NULL;
    if (!op)
        return;
    if (strcmp(sample->name, "op_seconds_bucket") == 0) {
        take_bucket(sample, &op->latency);
    } else if (strcmp(sample->name, "op_seconds_count") == 0) {
        op->latency.count += sample->whole;
    } else if (strcmp(sample->name, "op_requests_total") == 0 &&
               read_label(sample, "status", status, sizeof status)) {
        op->requests += sample->whole;
        op->errors += strcmp(status, kld_status_name(KLD_OK)) == 0 ? 0 : sample->whole;
    }
}

static void take_work(const struct sample *sample, struct kld_report_worker *worker,
                      struct kld_report *report) {
    unsigned access = place_of(sample, "access", access_names, KLD_REPORT_ACCESSES);
    struct kld_report_op *op = op_of(sample, report);
    if (access == KLD_REPORT_ACCESSES)
        return;
    if (strcmp(sample->name, "roofline_bytes_per_second") == 0) {
        worker->roofline_bytes_per_s[access] = sample->number;
    } else if (op && strcmp(sample->name, "op_bytes_total") == 0) {
        worker->work_bytes[access] += sample->number;
        op->work_bytes[access] += sample->number;
    } else if (op && strcmp(sample->name, "op_kernel_seconds_total") == 0) {
        worker->work_s[access] += sample->number;
        op->work_s[access] += sample->number;
    }
}

static void take_process(const struct sample *sample, struct kld_report *report) {
    char role[16], worker[8] = "";
    struct kld_report_process named = {.cpu_s = 0}, *process = report->process;
    if (!read_label(sample, "role", role, sizeof role))
        return;
    (void)read_label(sample, "worker", worker, sizeof worker);
    snprintf(named.name, sizeof named.name, "%s%s", role, worker);
    while (process < report->process + report->processes && strcmp(process->name, named.name) != 0)
        process++;
    if (process == report->process + KLD_REPORT_PROCESSES_MAX)
        return;
    if (process == report->process + report->processes) {
        *process = named;
        report->processes++;
    }
    if (strcmp(sample->name, "process_cpu_seconds_total") == 0)
        process->cpu_s = sample->number;
    else if (strcmp(sample->name, "process_resident_memory_bytes") == 0)
        process->resident_bytes = sample->number;
    else if (strcmp(sample->name, "process_start_time_seconds") == 0)
        process->started_s = sample->number;
}

static void take(const struct sample *sample, struct kld_report *report) {
    struct kld_report_worker *worker = worker_of(sample, report);
    if (strcmp(sample->name, "build_info") == 0)
        (void)read_label(sample, "version", report->version, sizeof report->version);
    else if (strcmp(sample->name, "draining") == 0)
        report->draining = sample->whole != 0;
    else if (strcmp(sample->name, "requests_total") == 0)
        take_requests(sample, report);
    else if (worker && strcmp(sample->name, "worker_info") == 0)
        take_worker_info(sample, worker);
    else if (worker && strcmp(sample->name, "worker_ready") == 0)
        worker->ready = sample->whole != 0;
    else if (strncmp(sample->name, PROCESS, strlen(PROCESS)) == 0)
        take_process(sample, report);
    else if (strncmp(sample->name, "stage_", 6) == 0)
        take_stage(sample, report);
    else if (worker &&
             (strncmp(sample->name, "op_", 3) == 0 || strncmp(sample->name, "roofline_", 9) == 0))
        take_work(sample, worker, report);
    else if (strncmp(sample->name, "op_", 3) == 0)
        take_op(sample, report);
    else
        take_latency(sample, report);
    for (unsigned i = 0; i < KLD_REPORT_VALUES; i++) {
        /* A worker by itself counts the bytes of both as one. */
        bool copies =
            i == KLD_REPORT_bytes_total && strcmp(sample->name, "copied_bytes_total") == 0;
        if (strcmp(sample->name, metric_names[i]) != 0 && !copies)
            continue;
        report->value[i] += sample->whole;
        if (worker)
            worker->value[i] += sample->whole;
    }
}

enum kld_status kld_report_read(const char *text, struct kld_report *ret_report,
                                struct kld_error *err) {
    memset(ret_report, 0, sizeof *ret_report);
    for (const char *line = text; *line;) {
        size_t bytes = strcspn(line, "\n");
        struct sample sample;
        if (read_sample(line, bytes, &sample))
            take(&sample, ret_report);
        line += bytes + (line[bytes] == '\n');
    }
    return ret_report->version[0]
               ? KLD_OK
               : kld_error_set(err, KLD_INVALID,
                               "its /metrics have no kld_build_info; is it a kld server?");
}

bool kld_report_ready(const struct kld_report *report) {
    for (uint32_t i = 0; i < report->workers; i++)
        if (report->worker[i].ready)
            return !report->draining && !report->unlinked;
    return false;
}

double kld_report_below_s(const struct kld_report_histogram *histogram, unsigned percent) {
    if (!histogram->count)
        return 0;
    for (unsigned i = 0; i < histogram->buckets; i++)
        if ((double)histogram->below[i] * 100 >= (double)histogram->count * percent)
            return histogram->limit_s[i];
    return (double)INFINITY;
}
