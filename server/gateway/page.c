/* page.c - the status page: what runs, how much, how to ask it something. One page without scripts
 * or anything loaded from elsewhere. Loop thread. */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "server/gateway/metrics.h"
#include "server/gateway/recent.h"

#define HOST_BYTES_MAX 255

static void append_text(struct kld_oip_text *text, const char *value, size_t size) {
    for (size_t i = 0; i < size && value[i]; i++)
        switch (value[i]) {
        case '<': kld_oip_append(text, "&lt;"); break;
        case '>': kld_oip_append(text, "&gt;"); break;
        case '&': kld_oip_append(text, "&amp;"); break;
        default: kld_oip_append(text, "%c", value[i]);
        }
}

static uint64_t value(const struct kld_stats *stats, enum kld_stat stat) {
    return atomic_load_explicit(&stats->value[stat], memory_order_relaxed);
}

static void append_row(struct kld_oip_text *text, const char *name, uint64_t number) {
    kld_oip_append(text, "<tr><td>%s<td>%" PRIu64 "\n", name, number);
}

static void append_workers(const struct kld_stats_page *page, struct kld_oip_text *text) {
    kld_oip_append(text, "<table><tr><th>device<th>state<th>clients<th>in flight<th>restarts\n");
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
        const struct kld_stats *stats = &page->worker[i];
        const struct kld_stats_device *device = &page->device[i];
        kld_oip_append(text, "<tr><td>%u: <b>", i);
        append_text(text, device->backend, sizeof device->backend);
        kld_oip_append(text, "</b>, ");
        append_text(text, device->name, sizeof device->name);
        kld_oip_append(text, "<td>%s<td>%" PRIu64 "<td>%" PRIu64 "<td>%" PRIu64 "\n",
                       atomic_load(&device->ready) ? "ready" : "starting",
                       value(stats, KLD_STAT_unix_clients),
                       value(stats, KLD_STAT_worker_requests_in_flight),
                       value(stats, KLD_STAT_worker_restarts_total));
    }
    kld_oip_append(text, "</table>\n");
}

/* Of whatever was asked for. */
static uint64_t bucket(const struct kld_stats *stats, int index) {
    uint64_t sum = 0;
    for (int asked = 0; asked < KLD_ASKED_COUNT; asked++)
        sum += atomic_load(&stats->duration[KLD_FRONT_HTTP][asked].bucket[index]);
    return sum;
}

/* The upper limit of the bucket that holds this share of all requests: "under 0.5 ms". */
static void append_latency(const struct kld_stats *stats, unsigned percent,
                           struct kld_oip_text *text) {
    uint64_t count = 0, below = 0;
    int i = 0;
    for (int k = 0; k < KLD_BUCKETS; k++)
        count += bucket(stats, k);
    for (; i < KLD_BUCKETS - 1; i++) {
        below += bucket(stats, i);
        if (below * 100 >= count * percent)
            break;
    }
    if (!count)
        return;
    kld_oip_append(text, "<tr><td>%u %% of requests took %s<td>%.6g ms\n", percent,
                   i == KLD_BUCKETS - 1 ? "over" : "under",
                   (double)kld_bucket_limit_ns[i == KLD_BUCKETS - 1 ? i - 1 : i] / 1e6);
}

/* The page takes up little room: who wants all has /metrics. */
static void append_errors(struct kld_recent *recent, struct kld_oip_text *text) {
    struct kld_recent_error errors[KLD_RECENT_ERRORS];
    unsigned count = kld_recent_errors(recent, errors);
    uint64_t now = uv_hrtime();
    if (!count)
        return;
    kld_oip_append(text, "<h2>Last errors</h2>\n<table id=errors>\n"
                         "<tr><th>s ago<th>status<th>what was said, without what clients sent\n");
    for (unsigned i = 0; i < count; i++) {
        kld_oip_append(text, "<tr><td>%" PRIu64 "<td>%d<td>", (now - errors[i].at_ns) / 1000000000,
                       kld_status_http(errors[i].status));
        append_text(text, errors[i].text, sizeof errors[i].text);
        kld_oip_append(text, "\n");
    }
    kld_oip_append(text, "</table>\n");
}

static void append_time(struct kld_oip_text *text) {
    char said[sizeof "2026-01-01 00:00:00"];
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc) && strftime(said, sizeof said, "%F %T", &utc))
        kld_oip_append(text, " As of <time>%s</time> UTC.", said);
}

static void append_rate(struct kld_oip_text *text, const char *name, double rate) {
    kld_oip_append(text, "<tr><td>requests a second, last %s<td>%.*f\n", name,
                   rate < 10    ? 2
                   : rate < 100 ? 1
                                : 0,
                   rate);
}

static void append_rates(struct kld_recent *recent, struct kld_oip_text *text) {
    uint64_t now = uv_hrtime();
    append_rate(text, "10 s", kld_recent_rate(recent, now, 10));
    append_rate(text, "minute", kld_recent_rate(recent, now, KLD_RECENT_SECONDS_MAX));
}

/* As the page was asked for, where that can be nothing but a name or an address and a port. */
static void append_address(const struct kld_gateway *gateway, const char *host,
                           struct kld_oip_text *text) {
    static const char of_hosts[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                   "0123456789.-_:[]";
    size_t bytes = host ? strlen(host) : 0;
    bool shown = bytes > 0 && bytes <= HOST_BYTES_MAX && host[strspn(host, of_hosts)] == '\0';
    kld_oip_append(text, "%s%s", gateway->tls ? "https://" : "http://",
                   shown ? host : "THIS-SERVER");
}

/* By what they were. */
static void append_failures(const struct kld_stats *stats, struct kld_oip_text *text) {
    for (unsigned status = 1; status < KLD_STATUS_SLOTS; status++) {
        uint64_t count = kld_stats_inferences_of(stats, status);
        if (count && kld_status_known(status))
            kld_oip_append(text, "<tr><td>of those: %s<td>%" PRIu64 "\n",
                           kld_status_name((enum kld_status)status), count);
    }
}

void kld_page_append(const struct kld_gateway *gateway, const char *host,
                     struct kld_oip_text *text) {
    const struct kld_stats *stats = gateway->stats;
    const char *state = kld_gateway_is_draining(gateway) ? "shutting down"
                        : kld_gateway_is_ready(gateway)  ? "ready"
                                                         : "waiting for a worker";
    kld_oip_append(
        text,
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        "<meta http-equiv=Content-Security-Policy "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        "<title>kld</title><style>body{font:16px/1.5 system-ui,sans-serif;"
        "max-width:44em;margin:2em auto;padding:0 1em}td,th{padding:0 2em 0 0;text-align:left}"
        "pre{background:#8882;padding:1em;white-space:pre-wrap;overflow-wrap:anywhere}</style>\n");
    kld_oip_append(text,
                   "<h1>kld " KLD_RELEASE "</h1>\n<p>This server computes Kullback-Leibler "
                   "divergences and their gradients. It is <b>%s</b>",
                   state);
    kld_oip_append(text, ".");
    append_time(text);
    kld_oip_append(text, "\n");
    append_workers(gateway->page, text);
    kld_oip_append(text, "<table>\n");
    append_rates(gateway->common->recent, text);
    append_row(text, "requests answered since it started", gateway->page->model.success);
    append_latency(stats, 50, text);
    append_latency(stats, 99, text);
    append_row(text, "requests refused or failed", gateway->page->model.fail);
    append_failures(stats, text);
    append_row(text, "requests in flight", gateway->common->infers);
    append_row(text, "HTTP connections", value(stats, KLD_STAT_http_connections));
    append_row(text, "shared-memory regions", value(stats, KLD_STAT_http_regions));
    append_row(text, "stored tensors", value(stats, KLD_STAT_http_tensors));
    append_row(text, "staging memory in use, bytes", value(stats, KLD_STAT_staging_bytes));
    kld_oip_append(text, "</table>\n");
    append_errors(gateway->common->recent, text);
    kld_oip_append(text, "<p>Ask it something:\n<pre>");
    kld_oip_append(text, "curl -s ");
    append_address(gateway, host, text);
    kld_oip_append(text, "/v2/models/kl_div/infer -d '{\"inputs\":[\n"
                         " {\"name\":\"predictions\",\"shape\":[1,2],\"datatype\":\"FP32\",\n"
                         "  \"data\":[0.5,0.5]},\n");
    kld_oip_append(text, " {\"name\":\"targets\",\"shape\":[1,2],\"datatype\":\"FP32\",\n"
                         "  \"data\":[0.25,0.75]}]}'</pre>\n");
    kld_oip_append(text, "<p><a href=/v2>/v2</a> &middot; "
                         "<a href=/v2/models/kl_div>/v2/models/kl_div</a> &middot; "
                         "<a href=/v2/models/kl_div/config>config</a> &middot; "
                         "<a href=/v2/models/kl_div/stats>stats</a> &middot; "
                         "<a href=/metrics>/metrics</a>\n");
}
