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
    kld_stats_request(&page.common, KLD_FRONT_HTTP, KLD_INVALID);
    kld_stats_request(worker, KLD_FRONT_UNIX, KLD_BUSY);
    strcpy(worker->backend, "cpu");
    strcpy(worker->device, "a \"b\"\\\n");
    const char *text = render(&page);
    ck_assert_ptr_nonnull(strstr(text, "kld_build_info{version=\"" KLD_RELEASE
                                       "\",backend=\"cpu\",device=\"a b\"} 1\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_worker_info{worker=\"0\",backend=\"cpu\",device=\"a b\",uuid=\"\"} 1\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_requests_total{front=\"http\",status=\"invalid\"} 1\n"));
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
    memcpy(page.worker[1].uuid, "\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd", 15);
    const char *text = render(&page);
    ck_assert_ptr_nonnull(strstr(text, "\nkld_log_lines_lost_total 321\n"));
    ck_assert_ptr_nonnull(strstr(text, "\nkld_device_lost_total{worker=\"0\"} 0\n"
                                       "kld_device_lost_total{worker=\"1\"} 7\n"));
    ck_assert_ptr_nonnull(strstr(text, ",uuid=\"GPU-01234567-89ab-cdef-0123-456789abcd00\"} 1\n"));
}
END_TEST

static void fill(struct kld_stats *stats) {
    for (int i = 0; i < KLD_STAT_COUNT; i++)
        stats->value[i] = UINT64_MAX;
    for (int i = 0; i < KLD_STATUS_SLOTS; i++)
        stats->requests[0][i] = stats->requests[1][i] = UINT64_MAX;
    for (int i = 0; i < KLD_HISTOGRAM_COUNT; i++)
        for (int j = 0; j < KLD_BUCKETS; j++)
            stats->histogram[i].bucket[j] = stats->histogram[i].sum_ns = UINT64_MAX / KLD_BUCKETS;
    memset(stats->device, '<', sizeof stats->device); /* without its NUL */
    memset(stats->backend, 'b', sizeof stats->backend);
    memset(stats->uuid, 0xff, sizeof stats->uuid);
}

START_TEST(the_largest_numbers_fit) {
    static struct kld_stats_page page = {.workers = KLD_WIRE_DEVICES_MAX};
    fill(&page.common);
    for (int i = 0; i < KLD_WIRE_DEVICES_MAX; i++)
        fill(&page.worker[i]);
    ck_assert_ptr_nonnull(strstr(render(&page), "18446744073709551615"));
    static struct kld_gateway_common common;
    common.recent = kld_recent_open();
    struct kld_error error = {.status = KLD_INVALID};
    memset(error.text, '<', sizeof error.text - 1);
    for (int i = 0; i < 2 * KLD_RECENT_ERRORS; i++)
        kld_recent_error(common.recent, 1, &error);
    struct kld_gateway gateway = {.common = &common, .page = &page, .stats = &page.common};
    struct kld_oip_text text = {.data = buffer, .capacity = 16384};
    kld_page_append(&gateway, &text);
    ck_assert(!text.overflow);
    kld_recent_close(common.recent);
    struct kld_gateway_counts counts;
    memset((void *)&counts, 0xff, sizeof counts);
    text = (struct kld_oip_text){.data = buffer, .capacity = 4096};
    kld_metrics_append_model(&counts, &text);
    ck_assert(!text.overflow);
}
END_TEST

UNIT_MAIN("server/gateway/metrics", histograms_are_cumulative,
          each_family_has_its_help_and_type_once, what_anybody_counts_is_added_up,
          the_largest_numbers_fit)
