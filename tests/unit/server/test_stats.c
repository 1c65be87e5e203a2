/* test_stats.c - the shared page of counters. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/stats.h"
#include "tests/unit/unit.h"

static struct kld_stats_page *page;

static struct kld_stats_fds fds;

static struct kld_stats *make(void) {
    ck_assert_int_eq(kld_stats_create(&page, &fds, NULL), KLD_OK);
    return &page->common;
}

START_TEST(counts_across_processes) {
    struct kld_stats *stats = make();
    pid_t pid = fork();
    if (pid == 0) {
        struct kld_stats_page *attached = NULL;
        if (kld_stats_attach(fds.counters, fds.state, &attached, NULL) != KLD_OK)
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
    kld_stats_close(&fds);
}
END_TEST

START_TEST(page_cannot_be_cut) {
    make();
    const int all[] = {fds.counters, fds.state};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(ftruncate(all[i], 0), -1);
        ck_assert_int_eq(ftruncate(all[i], 1 << 20), -1);
    }
    kld_stats_detach(page);
    kld_stats_close(&fds);
}
END_TEST

/* What the gateway is given: it sees what the others say, and has no way to change it. */
START_TEST(who_counts_cannot_change_what_others_go_by) {
    make();
    struct kld_stats_page *seen = NULL;
    ck_assert_int_eq(kld_stats_attach(fds.counters, fds.state_read, &seen, NULL), KLD_OK);
    page->workers = 3;
    ck_assert_uint_eq(kld_stats_workers(seen), 3);
    kld_stats_add(&seen->worker[1], KLD_STAT_pool_kept_bytes, 5);
    ck_assert_uint_eq(page->worker[1].value[KLD_STAT_pool_kept_bytes], 5);
    /* By the mapping, by another one, by the descriptor, or by opening the file once more, which is
     * root's alone. */
    ck_assert_int_eq(mprotect(seen->state, sizeof seen->state, PROT_READ | PROT_WRITE), -1);
    ck_assert_ptr_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds.state_read, 0),
                     MAP_FAILED);
    ck_assert_int_eq(pwrite(fds.state_read, "x", 1, 0), -1);
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fds.state_read);
    if (geteuid() == 0)
        ck_assert_int_eq(setuid(65534), 0);
    ck_assert_int_eq(open(path, O_RDWR), -1);
    pid_t pid = fork();
    if (pid == 0) {
        seen->workers = 7; /* and is ended for it */
        _exit(0);
    }
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(!WIFEXITED(status) || WEXITSTATUS(status));
    ck_assert_uint_eq(page->workers, 3);
    kld_stats_detach(seen);
    kld_stats_detach(page);
    kld_stats_close(&fds);
}
END_TEST

START_TEST(there_are_no_more_workers_than_places) {
    make();
    page->workers = UINT32_MAX;
    ck_assert_uint_eq(kld_stats_workers(page), KLD_WIRE_DEVICES_MAX);
    for (uint32_t i = 0; i < KLD_WIRE_DEVICES_MAX; i++)
        page->device[i].described = 1;
    ck_assert(kld_stats_described(page));
    kld_stats_detach(page);
    kld_stats_close(&fds);
}
END_TEST

START_TEST(another_page_is_refused) {
    struct kld_stats_page *stats = NULL;
    struct kld_error err;
    make();
    kld_stats_detach(page);
    int fd = memfd_create("x", MFD_CLOEXEC);
    ck_assert_int_eq(kld_stats_attach(fds.counters, fd, &stats, &err), KLD_INVALID);
    ck_assert_int_eq(kld_stats_attach(fd, fds.state, &stats, &err), KLD_INVALID);
    ck_assert_str_eq(err.text, "the page of counters has the wrong size");
    ck_assert_int_eq(ftruncate(fd, KLD_STATS_STATE_BYTES), 0);
    ck_assert_int_eq(kld_stats_attach(fds.counters, fd, &stats, &err), KLD_INVALID);
    ck_assert_str_eq(err.text, "the page of counters is of another version");
    ck_assert_ptr_null(stats);
    close(fd);
    ck_assert_int_eq(kld_stats_attach(fds.counters, -1, &stats, &err), KLD_INVALID);
    ck_assert_int_eq(kld_stats_attach(-1, fds.state, &stats, &err), KLD_INVALID);
    kld_stats_detach(NULL);
    kld_stats_close(&fds);
}
END_TEST

START_TEST(observes_into_the_right_bucket) {
    struct kld_stats *stats = make();
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
    kld_stats_close(&fds);
}
END_TEST

START_TEST(requests_by_front_and_status) {
    struct kld_stats *stats = make();
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
    kld_stats_close(&fds);
}
END_TEST

START_TEST(a_role_resets_its_own_gauges_only) {
    struct kld_stats *stats = make();
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
    kld_stats_close(&fds);
}
END_TEST

START_TEST(a_server_is_described_when_all_its_workers_are) {
    make();
    ck_assert(!kld_stats_described(page)); /* nobody knows yet how many there are */
    page->workers = 2;
    ck_assert(!kld_stats_described(page));
    page->device[0].described = 1;
    ck_assert(!kld_stats_described(page));
    page->device[1].described = 1;
    ck_assert(kld_stats_described(page));
    ck_assert(!kld_stats_ready(page));
    page->device[1].ready = 1;
    ck_assert(kld_stats_ready(page));
    kld_stats_detach(page);
    kld_stats_close(&fds);
}
END_TEST

UNIT_MAIN("server/stats", a_server_is_described_when_all_its_workers_are, counts_across_processes,
          page_cannot_be_cut, who_counts_cannot_change_what_others_go_by,
          there_are_no_more_workers_than_places, another_page_is_refused,
          observes_into_the_right_bucket, requests_by_front_and_status,
          a_role_resets_its_own_gauges_only)
