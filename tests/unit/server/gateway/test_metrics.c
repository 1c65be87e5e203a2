/* test_metrics.c - the text of /metrics. */
#include "server/gateway/metrics.h"
#include "server/gateway/recent.h"

#include <stdio.h>
#include <string.h>

#include "tests/unit/unit.h"

static char buffer[KLD_METRICS_BYTES_MAX + 1];

static const char *render(const struct kld_stats_page *page) {
    struct kld_oip_text text = {.data = buffer, .capacity = KLD_METRICS_BYTES_MAX};
    kld_metrics_append(page, &text);
    ck_assert(!text.overflow);
    buffer[text.length] = '\0';
    return buffer;
}

START_TEST(histograms_are_cumulative) {
    static struct kld_stats_page page = {.workers = 2};
    struct kld_stats *stats = &page.worker[1];
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, 1);                      /* the first bucket */
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, kld_bucket_limit_ns[0]); /* its limit is inside */
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, kld_bucket_limit_ns[1]);
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, 3600000000000u); /* an hour */
    const char *text = render(&page);
    char line[128];
    snprintf(line, sizeof line, "kld_queue_seconds_bucket{worker=\"1\",le=\"%.9g\"} 2\n",
             (double)kld_bucket_limit_ns[0] / 1e9);
    ck_assert_ptr_nonnull(strstr(text, line));
    snprintf(line, sizeof line, "kld_queue_seconds_bucket{worker=\"1\",le=\"%.9g\"} 3\n",
             (double)kld_bucket_limit_ns[1] / 1e9);
    ck_assert_ptr_nonnull(strstr(text, line));
    for (int i = 0; i < KLD_BUCKETS - 1; i++) {
        snprintf(line, sizeof line, "kld_queue_seconds_bucket{worker=\"1\",le=\"%.9g\"} ",
                 (double)kld_bucket_limit_ns[i] / 1e9);
        ck_assert_msg(strstr(text, line) != NULL, "%s", line);
    }
    ck_assert_ptr_nonnull(strstr(text, "kld_queue_seconds_bucket{worker=\"1\",le=\"+Inf\"} 4\n"));
    ck_assert_ptr_nonnull(strstr(text, "kld_queue_seconds_count{worker=\"1\"} 4\n"));
    ck_assert_ptr_nonnull(strstr(text, "kld_queue_seconds_sum{worker=\"1\"} 3600.00003"));
    ck_assert_ptr_nonnull(strstr(text, "kld_queue_seconds_count{worker=\"0\"} 0\n"));
    ck_assert_ptr_nonnull(strstr(text, "kld_http_request_seconds_count 0\n"));
}
END_TEST

START_TEST(each_family_has_its_help_and_type_once) {
    static struct kld_stats_page page = {.workers = 1};
    struct kld_stats *worker = &page.worker[0];
    kld_stats_request(&page.common, KLD_FRONT_HTTP, KLD_ASKED_TV, KLD_INVALID);
    kld_stats_request(&page.common, KLD_FRONT_HTTP, KLD_ASKED_UNKNOWN, KLD_INVALID);
    kld_stats_request(worker, KLD_FRONT_UNIX, KLD_ASKED_UNKNOWN, KLD_BUSY);
    strcpy(page.device[0].backend, "cpu");
    strcpy(page.device[0].name, "a \"b\"\\\n");
    const char *text = render(&page);
    ck_assert_ptr_nonnull(strstr(text, "kld_build_info{version=\"" KLD_RELEASE
                                       "\",backend=\"cpu\",device=\"a b\"} 1\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_worker_info{worker=\"0\",backend=\"cpu\",device=\"a b\",uuid=\"\"} 1\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_requests_total{front=\"http\",status=\"invalid\"} 2\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_op_requests_total{front=\"http\",op=\"tv\",status=\"invalid\"} 1\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_op_requests_total{front=\"unix\",op=\"unknown\",status=\"busy\"} 1\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_op_requests_total{front=\"unix\",op=\"copy\",status=\"ok\"} 0\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_requests_total{front=\"unix\",worker=\"0\",status=\"busy\"} 1\n"));
    ck_assert_ptr_null(strstr(text, "worker=\"1\""));
#define X(name, type, owner, help)                                                                 \
    do {                                                                                           \
        const char *first = strstr(text, "# TYPE kld_" #name " " #type "\n");                      \
        const char *line = strcmp(#owner, "worker") == 0 ? "\nkld_" #name "{worker=\"0\"} 0\n"     \
                                                         : "\nkld_" #name " 0\n";                  \
        ck_assert_msg(first != NULL, #name);                                                       \
        ck_assert_ptr_null(strstr(first + 1, "# TYPE kld_" #name " "));                            \
        ck_assert_msg(strstr(first, line) != NULL, #name);                                         \
    } while (0);
    KLD_STAT_MAP(X)
#undef X
}
END_TEST

START_TEST(what_anybody_counts_is_added_up) {
    static struct kld_stats_page page = {.workers = 2};
    kld_stats_add(&page.common, KLD_STAT_log_lines_lost_total, 1);
    kld_stats_add(&page.worker[0], KLD_STAT_log_lines_lost_total, 20);
    kld_stats_add(&page.worker[1], KLD_STAT_log_lines_lost_total, 300);
    kld_stats_add(&page.worker[1], KLD_STAT_device_lost_total, 7);
    memcpy(page.device[1].uuid, "\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd", 15);
    const char *text = render(&page);
    ck_assert_ptr_nonnull(strstr(text, "\nkld_log_lines_lost_total 321\n"));
    ck_assert_ptr_nonnull(strstr(text, "\nkld_device_lost_total{worker=\"0\"} 0\n"
                                       "kld_device_lost_total{worker=\"1\"} 7\n"));
    ck_assert_ptr_nonnull(strstr(text, ",uuid=\"GPU-01234567-89ab-cdef-0123-456789abcd00\"} 1\n"));
}
END_TEST

/* Every sample belongs to the metric above it, and has the labels that its table says. */
static void check_samples(const char *text) {
    char name[64] = "", line[512];
    while (*text) {
        size_t bytes = strcspn(text, "\n");
        ck_assert_uint_lt(bytes, sizeof line);
        memcpy(line, text, bytes);
        line[bytes] = '\0';
        text += bytes + (text[bytes] == '\n');
        if (sscanf(line, "# TYPE %63s", name) == 1 || line[0] == '#')
            continue;
        ck_assert_msg(strncmp(line, name, strlen(name)) == 0, "%s after %s", line, name);
        const char *rest = line + strlen(name);
        ck_assert_msg(strchr("{ _", *rest) != NULL, "%s after %s", line, name);
    }
}

START_TEST(what_is_known_of_devices_and_processes) {
    static struct kld_stats_page page = {.workers = 2};
    struct kld_stats *worker = &page.worker[1];
    check_samples(render(&page));
    ck_assert_ptr_null(strstr(buffer, "\nkld_roofline_bytes_per_second{")); /* nobody told */
    ck_assert_ptr_null(strstr(buffer, "\nkld_device_worked_timestamp_seconds{"));
    ck_assert_ptr_null(strstr(buffer, "\nkld_op_bytes_total{"));
    ck_assert_ptr_null(strstr(buffer, "\nprocess_cpu_seconds_total{"));
    ck_assert_ptr_null(strstr(buffer, "\nnv_gpu_memory_total_bytes{"));
    page.device[1].roofline_bytes_per_s[KLD_ACCESS_READ] = 3000;
    page.device[1].uuid[0] = 1;
    kld_stats_set(worker, KLD_STAT_device_memory_bytes, 80);
    kld_stats_work(worker, KLD_ASKED_JS, KLD_ACCESS_READ_WRITE, 4000, 2500000000u);
    kld_stats_fault(worker, KLD_GONE);
    kld_stats_rejected(worker, KLD_REJECT_unix_clients_max);
    page.process[KLD_PROCESS_WORKER + 1].started_ms = 1500;
    page.process[KLD_PROCESS_WORKER + 1].cpu_ms = 250;
    page.process[KLD_PROCESS_GATEWAY].started_ms = 1;
    page.process[KLD_PROCESS_GATEWAY].open_fds = 9;
    check_samples(render(&page));
    static const char *const lines[] = {
        "kld_roofline_bytes_per_second{worker=\"1\",access=\"read\"} 3000",
        "kld_op_bytes_total{worker=\"1\",op=\"js\",access=\"read_write\"} 4000",
        "kld_op_kernel_seconds_total{worker=\"1\",op=\"js\",access=\"read_write\"} 2.500000000",
        "kld_device_errors_total{worker=\"1\",class=\"peer\"} 1",
        "kld_rejected_total{front=\"unix\",reason=\"clients_max\"} 1",
        "process_start_time_seconds{role=\"worker\",worker=\"1\"} 1.5",
        "process_cpu_seconds_total{role=\"worker\",worker=\"1\"} 0.25",
        "process_open_fds{role=\"gateway\"} 9",
        "nv_gpu_memory_total_bytes{gpu_uuid=\"GPU-01000000-0000-0000-0000-000000000000\"} 80",
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        const char *at = strstr(buffer, lines[i]);
        ck_assert_msg(at && at[-1] == '\n' && at[strlen(lines[i])] == '\n', "%s", lines[i]);
    }
}
END_TEST

/* A GPU that is named several times has several workers, and one sample: two of one name would
 * make Prometheus drop one. */
START_TEST(a_gpu_is_told_once) {
    static struct kld_stats_page page = {.workers = 3};
    page.device[0].uuid[0] = page.device[1].uuid[0] = 1;
    page.device[2].uuid[0] = 2;
    int samples = 0;
    for (const char *at = render(&page); (at = strstr(at, "\nnv_gpu_memory_total_bytes{")); at++)
        samples++;
    ck_assert_int_eq(samples, 2);
}
END_TEST

static const char *devices_of(const struct kld_stats_page *page) {
    struct kld_oip_text text = {.data = buffer, .capacity = KLD_METRICS_BYTES_MAX};
    kld_metrics_append_device(page, &text);
    buffer[text.length] = '\0';
    return buffer;
}

START_TEST(what_it_computes_with_is_known_of_all_or_not_yet) {
    static struct kld_stats_page page;
    ck_assert_str_eq(devices_of(&page), ",\"state\":\"starting\"");
    page.workers = 2;
    for (int i = 0; i < 2; i++) {
        strcpy(page.device[i].backend, "cpu");
        strcpy(page.device[i].name, "x");
        ck_assert_str_eq(devices_of(&page), ",\"state\":\"starting\"");
        page.device[i].described = page.device[i].ready = 1;
    }
    ck_assert_str_eq(devices_of(&page), ",\"backend\":\"cpu\",\"device\":\"x\"");
    strcpy(page.device[1].name, "y");
    ck_assert_str_eq(devices_of(&page), "");
}
END_TEST

START_TEST(triton_s_names) {
    static struct kld_stats_page page = {.workers = 1};
    for (int i = 0; i < KLD_STAGE_COUNT; i++)
        kld_stats_stage(&page.common, (enum kld_stage)i, 1000u * (1u << i));
    for (int i = 0; i < 3; i++)
        kld_stats_request(&page.common, KLD_FRONT_HTTP, KLD_ASKED_JS, KLD_OK);
    page.model.input_ns = 5999;
    page.model.output_ns = 7999;
    kld_stats_request(&page.common, KLD_FRONT_HTTP, KLD_ASKED_JS, KLD_INVALID);
    kld_stats_request(&page.common, KLD_FRONT_HTTP, KLD_ASKED_UNKNOWN, KLD_BUSY);
    kld_stats_request(&page.worker[0], KLD_FRONT_UNIX, KLD_ASKED_JS, KLD_OK); /* not counted */
    const char *text = render(&page);
    const struct {
        const char *name;
        unsigned value;
    } expected[] = {{"request_success", 3},
                    {"request_failure", 2},
                    {"count", 3},
                    {"exec_count", 3},
                    {"request_duration_us", (1 << KLD_STAGE_COUNT) - 1},
                    {"queue_duration_us", 1 << KLD_STAGE_queue},
                    {"compute_input_duration_us", 5},
                    {"compute_infer_duration_us", 1 << KLD_STAGE_kernel},
                    {"compute_output_duration_us", 7}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        char line[128];
        snprintf(line, sizeof line, "\nnv_inference_%s{model=\"kl_div\",version=\"1\"} %u\n",
                 expected[i].name, expected[i].value);
        ck_assert_msg(strstr(text, line) != NULL, "%s", line);
    }
}
END_TEST

static void fill_histograms(struct kld_stats_histogram *histogram, int count) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < KLD_BUCKETS; j++)
            histogram[i].bucket[j] = histogram[i].sum_ns = UINT64_MAX / KLD_BUCKETS;
}

static void fill(struct kld_stats *stats) {
    for (int i = 0; i < KLD_STAT_COUNT; i++)
        stats->value[i] = UINT64_MAX;
    memset(stats->requests, 0xff, sizeof stats->requests);
    memset(stats->rejected, 0xff, sizeof stats->rejected);
    memset(stats->faults, 0xff, sizeof stats->faults);
    memset(stats->http_replies, 0xff, sizeof stats->http_replies);
    memset(stats->work, 0xff, sizeof stats->work);
    stats->device_worked_ns = UINT64_MAX;
    fill_histograms(stats->duration[0], 2 * KLD_ASKED_COUNT);
    fill_histograms(stats->histogram, KLD_HISTOGRAM_COUNT);
    fill_histograms(stats->stage, KLD_STAGE_COUNT);
}

static void fill_device(struct kld_stats_device *device) {
    memset(device->roofline_bytes_per_s, 0xff, sizeof device->roofline_bytes_per_s);
    memset(device->name, '<', sizeof device->name); /* without its NUL */
    memset(device->backend, 'b', sizeof device->backend);
    memset(device->uuid, 0xff, sizeof device->uuid);
}

START_TEST(the_largest_numbers_fit) {
    static struct kld_stats_page page = {.workers = KLD_WIRE_DEVICES_MAX};
    fill(&page.common);
    memset(page.process, 0xff, sizeof page.process);
    for (int i = 0; i < KLD_WIRE_DEVICES_MAX; i++) {
        fill(&page.worker[i]);
        fill_device(&page.device[i]);
    }
    ck_assert_ptr_nonnull(strstr(render(&page), "18446744073709551615"));
    static struct kld_gateway_common common;
    common.recent = kld_recent_open();
    struct kld_error error = {.status = KLD_INVALID};
    memset(error.text, '<', sizeof error.text - 1);
    for (int i = 0; i < 2 * KLD_RECENT_ERRORS; i++)
        kld_recent_error(common.recent, 1, &error);
    struct kld_gateway gateway = {.common = &common, .page = &page, .stats = &page.common};
    struct kld_oip_text text = {.data = buffer, .capacity = 16384};
    char host[256];
    memset(host, 'h', sizeof host);
    host[sizeof host - 1] = '\0';
    kld_page_append(&gateway, host, &text);
    ck_assert(!text.overflow);
    kld_recent_close(common.recent);
    struct kld_stats_model counts;
    memset((void *)&counts, 0xff, sizeof counts);
    text = (struct kld_oip_text){.data = buffer, .capacity = 4096};
    kld_metrics_append_model(&counts, &text);
    ck_assert(!text.overflow);
}
END_TEST

UNIT_MAIN("server/gateway/metrics", histograms_are_cumulative,
          each_family_has_its_help_and_type_once, what_anybody_counts_is_added_up,
          what_is_known_of_devices_and_processes, a_gpu_is_told_once,
          what_it_computes_with_is_known_of_all_or_not_yet, triton_s_names, the_largest_numbers_fit)
