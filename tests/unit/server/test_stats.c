/* test_stats.c - the shared page of counters. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/stats.h"
#include "tests/unit/unit.h"

static struct kld_stats_page *page;

static struct kld_stats *make(int *ret_fd) {
    ck_assert_int_eq(kld_stats_create(&page, ret_fd, NULL), KLD_OK);
    return &page->common;
}

START_TEST(counts_across_processes) {
    int fd;
    struct kld_stats *stats = make(&fd);
    pid_t pid = fork();
    if (pid == 0) {
        struct kld_stats_page *attached = NULL;
        if (kld_stats_attach(fd, &attached, NULL) != KLD_OK)
            _exit(1);
        struct kld_stats *mine = &attached->common;
        for (int i = 0; i < 1000; i++)
            kld_stats_add(mine, KLD_STAT_unix_clients, 1);
        kld_stats_add(mine, KLD_STAT_unix_clients, -400);
        kld_stats_detach(attached);
        _exit(0);
    }
    for (int i = 0; i < 1000; i++)
        kld_stats_add(stats, KLD_STAT_unix_clients, 1);
    int status;
    waitpid(pid, &status, 0);
    ck_assert_int_eq(status, 0);
    ck_assert_uint_eq(stats->value[KLD_STAT_unix_clients], 1600);
    kld_stats_detach(page);
    close(fd);
}
END_TEST

START_TEST(page_cannot_be_cut) {
    int fd;
    make(&fd);
    ck_assert_int_eq(ftruncate(fd, 0), -1);
    ck_assert_int_eq(ftruncate(fd, 1 << 20), -1);
    kld_stats_detach(page);
    close(fd);
}
END_TEST

START_TEST(another_page_is_refused) {
    struct kld_stats_page *stats = NULL;
    struct kld_error err;
    int fd = memfd_create("x", MFD_CLOEXEC);
    ck_assert_int_eq(kld_stats_attach(fd, &stats, &err), KLD_INVALID);
    ck_assert_int_eq(ftruncate(fd, sizeof(struct kld_stats_page)), 0);
    ck_assert_int_eq(kld_stats_attach(fd, &stats, &err), KLD_INVALID);
    ck_assert_str_eq(err.text, "the page of counters is of another version");
    ck_assert_ptr_null(stats);
    close(fd);
    ck_assert_int_eq(kld_stats_attach(-1, &stats, &err), KLD_INVALID);
    kld_stats_detach(NULL);
}
END_TEST

START_TEST(observes_into_the_right_bucket) {
    int fd;
    struct kld_stats *stats = make(&fd);
    for (size_t i = 1; i < KLD_BUCKETS; i++)
        ck_assert_uint_lt(kld_bucket_limit_ns[i - 1], kld_bucket_limit_ns[i]);
    ck_assert_uint_eq(kld_bucket_limit_ns[KLD_BUCKETS - 1], UINT64_MAX);
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, 0);
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, kld_bucket_limit_ns[0]);
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, kld_bucket_limit_ns[0] + 1);
    kld_stats_observe(stats, KLD_HISTOGRAM_queue, kld_bucket_limit_ns[KLD_BUCKETS - 2] + 1);
    ck_assert_uint_eq(stats->histogram[KLD_HISTOGRAM_queue].bucket[0], 2);
    ck_assert_uint_eq(stats->histogram[KLD_HISTOGRAM_queue].bucket[1], 1);
    ck_assert_uint_eq(stats->histogram[KLD_HISTOGRAM_queue].bucket[KLD_BUCKETS - 1], 1);
    ck_assert_uint_eq(stats->histogram[KLD_HISTOGRAM_queue].sum_ns,
                      2 * kld_bucket_limit_ns[0] + 1 + kld_bucket_limit_ns[KLD_BUCKETS - 2] + 1);
    ck_assert_uint_eq(stats->histogram[KLD_HISTOGRAM_copy].sum_ns, 0);
    kld_stats_detach(page);
    close(fd);
}
END_TEST

START_TEST(requests_by_front_and_status) {
    int fd;
    struct kld_stats *stats = make(&fd);
    kld_stats_request(stats, KLD_FRONT_UNIX, KLD_ASKED_TV, KLD_OK);
    kld_stats_request(stats, KLD_FRONT_UNIX, KLD_ASKED_COPY, KLD_OK);
    kld_stats_request(stats, KLD_FRONT_UNIX, KLD_ASKED_UNKNOWN, KLD_BUSY);
    kld_stats_request(stats, KLD_FRONT_HTTP, KLD_ASKED_UNKNOWN,
                      (enum kld_status)4000); /* counted, not out of bounds */
    ck_assert_uint_eq(stats->requests[KLD_FRONT_UNIX][KLD_ASKED_TV][KLD_OK], 1);
    ck_assert_uint_eq(kld_stats_requests_of(stats, KLD_FRONT_UNIX, KLD_OK), 2);
    ck_assert_uint_eq(kld_stats_requests_of(stats, KLD_FRONT_UNIX, KLD_BUSY), 1);
    ck_assert_uint_eq(kld_stats_requests_of(stats, KLD_FRONT_HTTP, KLD_OK), 0);
    ck_assert_uint_eq(kld_stats_requests_of(stats, KLD_FRONT_HTTP, KLD_INTERNAL), 1);
    kld_stats_request(stats, KLD_FRONT_HTTP, KLD_ASKED_PUT, KLD_INTERNAL);
    ck_assert_uint_eq(kld_stats_requests_of(stats, KLD_FRONT_HTTP, KLD_INTERNAL), 2);
    ck_assert_uint_eq(kld_stats_inferences_of(stats, KLD_INTERNAL), 1);
    kld_stats_http_reply(stats, 200);
    kld_stats_http_reply(stats, 200);
    kld_stats_http_reply(stats, 418); /* one that has no place of its own */
    ck_assert_uint_eq(stats->http_replies[0], 2);
    ck_assert_uint_eq(stats->http_replies[KLD_HTTP_CODES_COUNT - 1], 1);
    kld_stats_fault(stats, KLD_OK);
    kld_stats_fault(stats, KLD_GONE);
    kld_stats_fault(stats, KLD_NO_MEMORY);
    kld_stats_fault(stats, KLD_DEVICE_LOST);
    kld_stats_fault(stats, KLD_INVALID);
    for (int i = 0; i < KLD_FAULT_COUNT; i++)
        ck_assert_uint_eq(stats->faults[i], 1);
    kld_stats_work(stats, KLD_ASKED_JS, KLD_ACCESS_READ_WRITE, 7, 11);
    kld_stats_work(stats, KLD_ASKED_COPY, KLD_ACCESS_READ, 7, 11); /* is no operator */
    ck_assert_uint_eq(stats->work[KLD_ASKED_JS][KLD_ACCESS_READ_WRITE].bytes, 7);
    ck_assert_uint_eq(stats->work[KLD_ASKED_JS][KLD_ACCESS_READ_WRITE].kernel_ns, 11);
    ck_assert_str_eq(kld_asked_name(KLD_ASKED_JS), "js");
    ck_assert_str_eq(kld_asked_name(KLD_ASKED_COPY), "copy");
    ck_assert_str_eq(kld_asked_name(KLD_ASKED_PUT), "put_tensor");
    ck_assert_str_eq(kld_asked_name(KLD_ASKED_UNKNOWN), "unknown");
    kld_stats_detach(page);
    close(fd);
}
END_TEST

START_TEST(a_role_resets_its_own_gauges_only) {
    int fd;
    struct kld_stats *stats = make(&fd);
    for (int i = 0; i < KLD_STAT_COUNT; i++)
        kld_stats_set(stats, (enum kld_stat)i, 7);
    kld_stats_reset_role(stats, "worker");
    ck_assert_uint_eq(stats->value[KLD_STAT_unix_clients], 0);
    ck_assert_uint_eq(stats->value[KLD_STAT_pool_bytes], 0);
    ck_assert_uint_eq(stats->value[KLD_STAT_http_connections], 7);
    ck_assert_uint_eq(stats->value[KLD_STAT_unix_clients_total], 7);
    kld_stats_reset_role(stats, "gateway");
    ck_assert_uint_eq(stats->value[KLD_STAT_http_connections], 0);
    ck_assert_uint_eq(stats->value[KLD_STAT_http_connections_total], 7);
    kld_stats_detach(page);
    close(fd);
}
END_TEST

START_TEST(a_server_is_described_when_all_its_workers_are) {
    int fd;
    make(&fd);
    ck_assert(!kld_stats_described(page)); /* nobody knows yet how many there are */
    page->workers = 2;
    ck_assert(!kld_stats_described(page));
    page->worker[0].described = 1;
    ck_assert(!kld_stats_described(page));
    page->worker[1].described = 1;
    ck_assert(kld_stats_described(page));
    ck_assert(!kld_stats_ready(page));
    page->worker[1].worker_ready = 1;
    ck_assert(kld_stats_ready(page));
    kld_stats_detach(page);
    close(fd);
}
END_TEST

UNIT_MAIN("server/stats", a_server_is_described_when_all_its_workers_are, counts_across_processes,
          page_cannot_be_cut, another_page_is_refused, observes_into_the_right_bucket,
          requests_by_front_and_status, a_role_resets_its_own_gauges_only)
