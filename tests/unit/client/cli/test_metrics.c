/* test_metrics.c - what `kld status` reads from the text that the gateway writes, and from others.
 */
#include "tests/unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "client/cli/metrics.h"
#include "server/gateway/metrics.h"

static struct kld_report report;
static struct kld_error error;

START_TEST(test_labels_cannot_steer_a_terminal) {
    ck_assert_int_eq(kld_report_read("kld_build_info{version=\"\033[2J1\"} 1\n"
                                     "kld_worker_info{worker=\"0\",device=\"a\x9b\r\x7f~ \"} 1\n",
                                     &report, &error),
                     KLD_OK);
    ck_assert_str_eq(report.version, "?[2J1");
    ck_assert_str_eq(report.worker[0].device, "a???~ ");
}
END_TEST

START_TEST(test_what_the_gateway_writes) {
    static char buffer[KLD_METRICS_BYTES_MAX + 1];
    static struct kld_stats_page page = {.workers = 2};
    strcpy(page.device[0].backend, "cuda");
    strcpy(page.device[0].name, "a card, {a} = b");
    strcpy(page.device[1].backend, "cpu");
    page.device[1].ready = 1;
    kld_stats_set(&page.worker[0], KLD_STAT_pool_bytes, 5);
    kld_stats_set(&page.worker[1], KLD_STAT_pool_bytes, 70);
    kld_stats_set(&page.worker[1], KLD_STAT_kernel_bytes_total, UINT64_MAX - 8);
    kld_stats_set(&page.worker[0], KLD_STAT_kernel_bytes_total, 3);
    kld_stats_set(&page.worker[0], KLD_STAT_copied_bytes_total, 4);
    kld_stats_set(&page.common, KLD_STAT_staging_bytes, 4096);
    kld_stats_request(&page.common, KLD_FRONT_HTTP, KLD_ASKED_UNKNOWN, KLD_INVALID);
    kld_stats_request(&page.worker[0], KLD_FRONT_UNIX, KLD_ASKED_JS, KLD_OK);
    kld_stats_request(&page.worker[1], KLD_FRONT_UNIX, KLD_ASKED_COPY, KLD_OK);
    kld_stats_request(&page.worker[1], KLD_FRONT_UNIX, KLD_ASKED_JS, KLD_GONE);
    for (int i = 0; i < 98; i++)
        kld_stats_observe(&page.worker[i & 1], KLD_HISTOGRAM_queue, kld_bucket_limit_ns[2]);
    kld_stats_observe(&page.worker[0], KLD_HISTOGRAM_queue, kld_bucket_limit_ns[5]);
    kld_stats_observe(&page.worker[1], KLD_HISTOGRAM_queue, 3600000000000u); /* beyond the last */
    kld_stats_observe(&page.worker[1], KLD_HISTOGRAM_copy, 3600000000000u);
    struct kld_oip_text text = {.data = buffer, .capacity = KLD_METRICS_BYTES_MAX};
    kld_metrics_append(&page, &text);
    buffer[text.length] = '\0';

    ck_assert_int_eq(kld_report_read(buffer, &report, &error), KLD_OK);
    ck_assert_str_eq(report.version, KLD_RELEASE);
    ck_assert_uint_eq(report.workers, 2);
    ck_assert(kld_report_ready(&report) && !report.draining && !report.worker[0].ready);
    ck_assert_str_eq(report.worker[0].backend, "cuda");
    ck_assert_str_eq(report.worker[0].device, "a card, {a} = b");
    ck_assert_str_eq(report.worker[1].backend, "cpu");
    ck_assert_uint_eq(report.worker[0].value[KLD_REPORT_pool_bytes], 5);
    ck_assert_uint_eq(report.value[KLD_REPORT_pool_bytes], 75);
    ck_assert_uint_eq(report.worker[0].value[KLD_REPORT_bytes_total], 7);
    ck_assert_uint_eq(report.value[KLD_REPORT_bytes_total], UINT64_MAX - 1);
    ck_assert_uint_eq(report.value[KLD_REPORT_staging_bytes], 4096);
    ck_assert_uint_eq(report.requests[KLD_REPORT_HTTP][KLD_INVALID], 1);
    ck_assert_uint_eq(report.requests[KLD_REPORT_UNIX][KLD_OK], 2);
    ck_assert_uint_eq(report.requests[KLD_REPORT_UNIX][KLD_GONE], 1);
    const struct kld_report_histogram *queue = &report.latency[KLD_REPORT_LATENCY_queue];
    ck_assert_uint_eq(queue->count, 100);
    ck_assert_uint_eq(queue->buckets, KLD_BUCKETS);
    ck_assert(fabs(queue->sum_s - 3600) < 60);
    ck_assert(fabs(kld_report_below_s(queue, 50) * 1e9 / (double)kld_bucket_limit_ns[2] - 1) <
              1e-8);
    ck_assert(fabs(kld_report_below_s(queue, 99) * 1e9 / (double)kld_bucket_limit_ns[5] - 1) <
              1e-8);
    ck_assert(isinf(kld_report_below_s(&report.latency[KLD_REPORT_LATENCY_copy], 50)));
    ck_assert(kld_report_below_s(&report.latency[KLD_REPORT_LATENCY_kernel], 50) == 0);
    page.draining = 1;
    text.length = 0;
    kld_metrics_append(&page, &text);
    ck_assert_int_eq(kld_report_read(buffer, &report, &error), KLD_OK);
    ck_assert(report.draining && !kld_report_ready(&report));
}
END_TEST

static const char *const odd[] = {
    "kld_pool_bytes{worker=\"99\"} 7",
    "kld_pool_bytes{worker=\"-1\" 7",
    "kld_pool_bytes{worker=\"0",
    "kld_pool_bytes{worker=",
    "kld_pool_bytes",
    "kld_pool_bytes ",
    "kld_pool_bytes x",
    "kld_pool_bytes 7 x",
    "kld_pool_bytes -7",
    "kld_",
    "pool_bytes 7",
    "kld_pool_bytes{} ",
    "kld_pool_bytes{worker=\"0\"}",
    "kld_queue_seconds_bucket 3",
    "kld_worker_ready{worker=\"zero\"} 1",
    "kld_requests_total{front=\"http\"} 1",
};

START_TEST(test_odd_lines_are_skipped) {
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, "# HELP\n\n%s\nkld_build_info{version=\"1.2\"} 1", odd[i]);
        ck_assert_int_eq(kld_report_read(text, &report, &error), KLD_OK);
        ck_assert_str_eq(report.version, "1.2");
        /* A worker beyond those that we have room for still counts in the sum. */
        ck_assert_msg(report.value[KLD_REPORT_pool_bytes] == (i == 0 ? 7 : 0), "%s", odd[i]);
        ck_assert_msg(report.workers == 0, "%s", odd[i]);
        ck_assert(!kld_report_ready(&report));
    }
}
END_TEST

START_TEST(test_more_buckets_than_room) {
    static char text[64 * 80];
    size_t at = (size_t)sprintf(text, "kld_build_info{version=\"1\"} 1\n");
    for (int i = 1; i <= 2 * KLD_REPORT_BUCKETS_MAX; i++)
        at += (size_t)sprintf(text + at, "kld_copy_seconds_bucket{le=\"%d\"} %d\n", i, i);
    ck_assert_int_eq(kld_report_read(text, &report, &error), KLD_OK);
    ck_assert_uint_eq(report.latency[KLD_REPORT_LATENCY_copy].buckets, KLD_REPORT_BUCKETS_MAX);
}
END_TEST

START_TEST(test_not_a_kld_server) {
    ck_assert_int_eq(kld_report_read("go_threads 7\n", &report, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "kld_build_info"));
    ck_assert_int_eq(kld_report_read("", &report, &error), KLD_INVALID);
}
END_TEST

UNIT_MAIN("client/cli/metrics", test_labels_cannot_steer_a_terminal, test_what_the_gateway_writes,
          test_odd_lines_are_skipped, test_more_buckets_than_room, test_not_a_kld_server)
