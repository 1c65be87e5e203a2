/* test_top.c - what `kld top` makes of two looks at what the gateway writes. */
#include "tests/unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/top.h"
#include "server/gateway/metrics.h"

static struct kld_top_sample before, now;
static char *shown;

static void look(struct kld_stats_page *page, struct kld_top_sample *sample, double at_s) {
    static char buffer[KLD_METRICS_BYTES_MAX + 1];
    struct kld_oip_text text = {.data = buffer, .capacity = KLD_METRICS_BYTES_MAX};
    struct kld_error error;
    kld_metrics_append(page, &text);
    buffer[text.length] = '\0';
    sample->at_s = at_s;
    sample->unix_s = 5000 + at_s;
    ck_assert_int_eq(kld_report_read(buffer, &sample->report, &error), KLD_OK);
}

static const char *render(const char *message, bool first) {
    size_t bytes = 0;
    free(shown);
    shown = NULL;
    FILE *out = open_memstream(&shown, &bytes);
    kld_top_render(out, "http://x", message, first ? NULL : &before, first ? NULL : &before, &now);
    fclose(out);
    return shown;
}

static void must_show(const char *part) {
    ck_assert_msg(strstr(shown, part), "%s\n%s", part, shown);
}

/* A server with two workers that did something, more in the second look. */
static void work(struct kld_stats_page *page, int times) {
    struct kld_stats *worker = &page->worker[1];
    for (int i = 0; i < times; i++) {
        kld_stats_request(&page->common, KLD_FRONT_HTTP, KLD_ASKED_JS, KLD_OK);
        kld_stats_request(worker, KLD_FRONT_UNIX, KLD_ASKED_JS, KLD_OK);
        kld_stats_duration(worker, KLD_FRONT_UNIX, KLD_ASKED_JS, 200000);
        kld_stats_work(worker, KLD_ASKED_JS, KLD_ACCESS_READ, 3000000, 1000000);
        for (int stage = 0; stage < KLD_STAGE_COUNT; stage++)
            kld_stats_stage(&page->common, (enum kld_stage)stage, 1000u * (unsigned)(stage + 1));
        page->process[KLD_PROCESS_GATEWAY].cpu_ms += 10;
    }
    kld_stats_request(worker, KLD_FRONT_UNIX, KLD_ASKED_COPY, KLD_GONE);
    page->process[KLD_PROCESS_SUPERVISOR].started_ms = 5000000 - 3600000 - 62000;
    page->process[KLD_PROCESS_GATEWAY].started_ms = 4000000;
    page->process[KLD_PROCESS_GATEWAY].resident_bytes = 9000000;
}

static struct kld_stats_page *page_of(void) {
    static struct kld_stats_page page;
    memset((void *)&page, 0, sizeof page);
    page.workers = 2;
    page.device[1].ready = 1;
    page.device[1].roofline_bytes_per_s[KLD_ACCESS_READ] = 12000000000u;
    strcpy(page.device[1].backend, "cuda");
    kld_stats_set(&page.worker[1], KLD_STAT_worker_requests_queued, 7);
    return &page;
}

START_TEST(rates_of_what_lies_between) {
    struct kld_stats_page *page = page_of();
    work(page, 5);
    look(page, &before, 0);
    work(page, 20);
    kld_stats_add(&page->common, KLD_STAT_http_received_bytes_total, 4000000);
    look(page, &now, 2);
    render("", false);
    must_show("kld " KLD_RELEASE "  http://x  ready  up 1:01:04\n\n");
    must_show("\nhttp                   10.0        0.0 ");
    must_show("\nunix                   10.5        0.5 ");
    must_show("receive 1.0, gateway 2.0, queue 3.0, copy 4.0, kernel 5.0, reply 6.0 us\n");
    must_show("in 2.0 MB/s, out 0 B/s\n");
    must_show("supervisor 0 % 0 B, gateway 10 % 9.0 MB\n");
    must_show("\n0       starting ");
    must_show("\n1       ready            0       7        0    1.0 %      3.0    25.0 %");
    must_show("\njs                     10.0        0.0 ");
    must_show("      3.0    25.0 %\n");
    must_show(
        "\ncopy                    0.5        0.5          -          -        -         -\n");
    ck_assert_ptr_null(strstr(shown, "\nforward_kl")); /* nobody asked for it */
    render("a message", true);
    must_show("\na message\n");
    must_show(
        "\nhttp                      -          -          -          -          0        0\n");
    must_show(
        "\njs                        -          -          -          -        -         -\n");
    ck_assert_ptr_null(strstr(shown, "nan"));
    ck_assert_ptr_null(strstr(shown, "inf"));
}
END_TEST

START_TEST(quantiles_lie_inside_their_bucket) {
    struct kld_report_histogram old = {.buckets = 3, .limit_s = {1, 2, INFINITY}};
    struct kld_report_histogram new = old;
    ck_assert(kld_top_quantile(&old, &new, 0.5) < 0);
    old.count = old.below[0] = old.below[1] = old.below[2] = 100; /* of before */
    new.count = new.below[2] = 200;
    new.below[0] = 100;
    new.below[1] = 180;
    ck_assert_double_eq_tol(kld_top_quantile(&old, &new, 0.4), 1.5, 1e-9);
    ck_assert_double_eq_tol(kld_top_quantile(&old, &new, 0.8), 2, 1e-9);
    ck_assert_double_eq_tol(kld_top_quantile(&old, &new, 0.99), 2, 1e-9); /* beyond the last */
    new.below[0] = 120;
    ck_assert_double_eq_tol(kld_top_quantile(&old, &new, 0.1), 0.5, 1e-9);
    old.buckets = 0; /* the first look knew none */
    ck_assert(kld_top_quantile(&old, &new, 0.5) >= 0);
}
END_TEST

START_TEST(a_server_that_began_anew) {
    struct kld_stats_page *page = page_of();
    work(page, 5);
    look(page, &before, 0);
    work(page, 1);
    page->process[KLD_PROCESS_GATEWAY].started_ms += 500000; /* one of its processes did */
    page->process[KLD_PROCESS_GATEWAY].cpu_ms = 3;
    page->process[KLD_PROCESS_SUPERVISOR].started_ms += 400; /* a clock was set */
    look(page, &now, 1);
    ck_assert(!kld_top_restarted(&before, &now, false));
    ck_assert(kld_top_restarted(&before, &now, true)); /* it was away meanwhile */
    render("", false);
    must_show("gateway 9.0 MB\n"); /* its time cannot be compared */
    page->process[KLD_PROCESS_SUPERVISOR].started_ms += 600;
    look(page, &now, 1);
    ck_assert(kld_top_restarted(&before, &now, false));
    page = page_of(); /* before anybody looked at its processes */
    work(page, 4);
    page->process[KLD_PROCESS_SUPERVISOR].started_ms = 0;
    look(page, &now, 1);
    ck_assert(kld_top_restarted(&before, &now, false));
}
END_TEST

START_TEST(more_than_there_is_room_for) {
    static char text[8192];
    size_t at = (size_t)sprintf(text, "kld_build_info{version=\"1\"} 1\n");
    for (int i = 0; i < 40; i++) {
        at += (size_t)sprintf(text + at, "kld_op_requests_total{front=\"unix\",op=\"o%d\"} 1\n", i);
        at += (size_t)sprintf(text + at, "process_open_fds{role=\"r\",worker=\"%d\"} 1\n", i);
    }
    sprintf(text + at,
            "kld_op_requests_total{front=\"unix\",op=\"%060d\",status=\"ok\"} 1\n"
            "kld_stage_seconds_sum{front=\"http\",stage=\"other\"} 1\n"
            "kld_op_bytes_total{worker=\"0\",op=\"js\",access=\"no\"} 1\nprocess_ 1\n",
            1);
    struct kld_error error;
    ck_assert_int_eq(kld_report_read(text, &now.report, &error), KLD_OK);
    ck_assert_uint_eq(now.report.ops, KLD_REPORT_OPS_MAX);
    ck_assert_uint_eq(now.report.processes, KLD_REPORT_PROCESSES_MAX);
    render("", true);
    free(shown);
    shown = NULL;
}
END_TEST

UNIT_MAIN("client/cli/top", rates_of_what_lies_between, quantiles_lie_inside_their_bucket,
          a_server_that_began_anew, more_than_there_is_room_for)
