/* test_metrics.c - the text of /metrics. */
#include "server/gateway/metrics.h"

#include <stdio.h>
#include <string.h>

#include "tests/unit/unit.h"

static char buffer[KLD_METRICS_BYTES_MAX + 1];

static const char *render(const struct kld_stats *stats) {
    struct kld_oip_text text = {.data = buffer, .capacity = KLD_METRICS_BYTES_MAX};
    kld_metrics_append(stats, &text);
    ck_assert(!text.overflow);
    buffer[text.length] = '\0';
    return buffer;
}

START_TEST(histograms_are_cumulative) {
    static struct kld_stats stats;
    kld_stats_observe(&stats, KLD_HISTOGRAM_queue, 1); /* the first bucket */
    kld_stats_observe(&stats, KLD_HISTOGRAM_queue,
                      kld_bucket_limit_ns[0]); /* its limit is inside */
    kld_stats_observe(&stats, KLD_HISTOGRAM_queue, kld_bucket_limit_ns[1]);
    kld_stats_observe(&stats, KLD_HISTOGRAM_queue, 3600000000000u); /* an hour */
    const char *text = render(&stats);
    char line[128];
    snprintf(line, sizeof line, "kld_queue_seconds_bucket{le=\"%.9g\"} 2\n",
             (double)kld_bucket_limit_ns[0] / 1e9);
    ck_assert_ptr_nonnull(strstr(text, line));
    snprintf(line, sizeof line, "kld_queue_seconds_bucket{le=\"%.9g\"} 3\n",
             (double)kld_bucket_limit_ns[1] / 1e9);
    ck_assert_ptr_nonnull(strstr(text, line));
    ck_assert_ptr_nonnull(strstr(text, "kld_queue_seconds_bucket{le=\"+Inf\"} 4\n"));
    ck_assert_ptr_nonnull(strstr(text, "kld_queue_seconds_count 4\n"));
    ck_assert_ptr_nonnull(strstr(text, "kld_queue_seconds_sum 3600.00003"));
}
END_TEST

START_TEST(each_family_has_its_help_and_type_once) {
    static struct kld_stats stats;
    kld_stats_request(&stats, KLD_FRONT_HTTP, KLD_INVALID);
    strcpy(stats.backend, "cpu");
    strcpy(stats.device, "a \"b\"\\\n");
    const char *text = render(&stats);
    ck_assert_ptr_nonnull(strstr(text, "kld_build_info{version=\"" KLD_RELEASE
                                       "\",backend=\"cpu\",device=\"a b\"} 1\n"));
    ck_assert_ptr_nonnull(
        strstr(text, "kld_requests_total{front=\"http\",status=\"invalid\"} 1\n"));
#define X(name, type, owner, help)                                                                 \
    do {                                                                                           \
        const char *first = strstr(text, "# TYPE kld_" #name " " #type "\n");                      \
        ck_assert_msg(first != NULL, #name);                                                       \
        ck_assert_ptr_null(strstr(first + 1, "# TYPE kld_" #name " "));                            \
        ck_assert_msg(strstr(first, "\nkld_" #name " 0\n") != NULL, #name);                        \
    } while (0);
    KLD_STAT_MAP(X)
#undef X
}
END_TEST

START_TEST(the_largest_numbers_fit) {
    static struct kld_stats stats;
    for (int i = 0; i < KLD_STAT_COUNT; i++)
        stats.value[i] = UINT64_MAX;
    for (int i = 0; i < KLD_STATUS_SLOTS; i++)
        stats.requests[0][i] = stats.requests[1][i] = UINT64_MAX;
    for (int i = 0; i < KLD_HISTOGRAM_COUNT; i++)
        for (int j = 0; j < KLD_BUCKETS; j++)
            stats.histogram[i].bucket[j] = stats.histogram[i].sum_ns = UINT64_MAX / KLD_BUCKETS;
    memset(stats.device, '<', sizeof stats.device); /* without its NUL */
    memset(stats.backend, 'b', sizeof stats.backend);
    ck_assert_ptr_nonnull(strstr(render(&stats), "18446744073709551615"));
    static struct kld_gateway gateway = {.stats = &stats};
    struct kld_oip_text text = {.data = buffer, .capacity = 8192};
    kld_page_append(&gateway, &text);
    ck_assert(!text.overflow);
    struct kld_gateway_counts counts;
    memset(&counts, 0xff, sizeof counts);
    text = (struct kld_oip_text){.data = buffer, .capacity = 4096};
    kld_metrics_append_model(&counts, &text);
    ck_assert(!text.overflow);
}
END_TEST

UNIT_MAIN("server/gateway/metrics", histograms_are_cumulative,
          each_family_has_its_help_and_type_once, the_largest_numbers_fit)
