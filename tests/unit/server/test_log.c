/* test_log.c - the lines, in both formats, and a standard error that takes none. */
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/log.h"
#include "server/stats.h"
#include "tests/unit/unit.h"

static int reader;

/* Standard error becomes this one's other end. */
static void read_stderr(int ours, int theirs) {
    reader = ours;
    fcntl(reader, F_SETFL, O_NONBLOCK);
    dup2(theirs, STDERR_FILENO);
    close(theirs);
}

/* It becomes a pipe (or socket) that the test reads. */
static void capture(const char *level, const char *format, bool as_socket) {
    int pair[2];
    ck_assert_int_eq(as_socket ? socketpair(AF_UNIX, SOCK_STREAM, 0, pair) : pipe(pair), 0);
    read_stderr(pair[0], pair[1]);
    ck_assert_int_eq(kld_log_init("worker0", level, format, NULL), KLD_OK);
}

static const char *line(void) {
    static char text[8192];
    ssize_t bytes = read(reader, text, sizeof text - 1);
    text[bytes > 0 ? bytes : 0] = '\0';
    return text;
}

START_TEST(text_line) {
    capture("info", "text", false);
    kld_log(KLD_LOG_WARN, "child died", "child_pid=%d reason=\"%s\"", 7, "by\nhand\033[0m");
    const char *text = line();
    ck_assert_ptr_nonnull(
        strstr(text, "Z warn  worker0: child died child_pid=7 reason=\"by?hand?[0m\"\n"));
    ck_assert_int_eq(text[4], '-');
    ck_assert_ptr_eq(strchr(text, '\n'), text + strlen(text) - 1);
}
END_TEST

START_TEST(level_is_respected) {
    capture("warn", "text", false);
    ck_assert(!kld_log_wants(KLD_LOG_INFO));
    ck_assert(kld_log_wants(KLD_LOG_ERROR));
    kld_log(KLD_LOG_INFO, "chatter", "x=%d", 1);
    ck_assert_str_eq(line(), "");
}
END_TEST

START_TEST(json_line) {
    capture("debug", "json", true);
    kld_log(KLD_LOG_DEBUG, "request", "front=http id=%d ms=1.50 zero=007 name=\"a b\\\t\" ok=yes",
            12);
    cJSON *root = cJSON_Parse(line());
    ck_assert_ptr_nonnull(root);
    ck_assert_str_eq(cJSON_GetObjectItem(root, "level")->valuestring, "debug");
    ck_assert_str_eq(cJSON_GetObjectItem(root, "role")->valuestring, "worker0");
    ck_assert_str_eq(cJSON_GetObjectItem(root, "event")->valuestring, "request");
    ck_assert_str_eq(cJSON_GetObjectItem(root, "front")->valuestring, "http");
    ck_assert_double_eq(cJSON_GetObjectItem(root, "id")->valuedouble, 12);
    ck_assert_double_eq(cJSON_GetObjectItem(root, "ms")->valuedouble, 1.5);
    ck_assert_str_eq(cJSON_GetObjectItem(root, "zero")->valuestring, "007");
    ck_assert_str_eq(cJSON_GetObjectItem(root, "name")->valuestring, "a b\\\t");
    ck_assert_str_eq(cJSON_GetObjectItem(root, "ok")->valuestring, "yes");
    cJSON_Delete(root);
}
END_TEST

/* A text may quote what somebody said: it ends no value and makes no key. */
START_TEST(quotes_in_a_value_are_its_own) {
    static const char *const texts[] = {"/x\"y z=1", "\" status=\"ok", "\"", "\1\" z=1 \2",
                                        "a\\\" b"};
    capture("debug", "json", false);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        kld_log(KLD_LOG_INFO, "x", "text=\"%s\" more=%d%s", texts[i], 1, " token=\"a b\" last=2");
        cJSON *root = cJSON_Parse(line());
        ck_assert_ptr_nonnull(root);
        ck_assert_str_eq(cJSON_GetObjectItem(root, "text")->valuestring, texts[i]);
        ck_assert_double_eq(cJSON_GetObjectItem(root, "more")->valuedouble, 1);
        ck_assert_str_eq(cJSON_GetObjectItem(root, "token")->valuestring, "a b");
        ck_assert_double_eq(cJSON_GetObjectItem(root, "last")->valuedouble, 2);
        ck_assert_int_eq(cJSON_GetArraySize(root), 9);
        cJSON_Delete(root);
    }
}
END_TEST

START_TEST(json_stays_json) {
    capture("debug", "json", false);
    char huge[3000];
    memset(huge, '\1', sizeof huge - 1); /* six bytes each once escaped */
    huge[sizeof huge - 1] = '\0';
    const char *const details[] = {
        "free text", "a=\"open", "=", "a=", "a=1 b", "key=\"x\"y=2", huge};
    for (size_t i = 0; i < sizeof details / sizeof details[0]; i++) {
        kld_log(KLD_LOG_INFO, "x", "%s", details[i]);
        const char *text = line();
        cJSON *root = cJSON_Parse(text);
        if (!root)
            ck_abort_msg("not JSON: %s", text);
        ck_assert_int_eq(text[strlen(text) - 1], '\n');
        cJSON_Delete(root);
    }
}
END_TEST

/* Strict readers of JSON take no other text. */
START_TEST(json_is_utf8) {
    capture("debug", "json", false);
    kld_log(KLD_LOG_INFO, "x", "a=%s b=\"%s\"", "\xff\xc3=1", "gr\xc3\xbcn \xe2\x82");
    ck_assert_ptr_nonnull(
        strstr(line(), ",\"a\":\"\\ufffd\\ufffd=1\",\"b\":\"gr\xc3\xbcn \\ufffd\\ufffd\"}"));
}
END_TEST

static struct kld_stats_page *page;

static uint64_t lost_lines(void) { return page->common.value[KLD_STAT_log_lines_lost_total]; }

/* More than a pipe holds, 64 KiB; a write that blocks would hang here. What the reader finds are
 * whole lines, the first ones, in their order, and after that there is room again. */
static void fill_and_count(void) {
    struct kld_stats_fds fds;
    int count = 0;
    ck_assert_int_eq(kld_stats_create(&page, &fds, NULL), KLD_OK);
    kld_log_count_lost_in(&page->common);
    for (int i = 0; i < 4000; i++)
        kld_log(KLD_LOG_INFO, "filling", "i=%d text=\"%s\"", i, "0123456789012345678901234567890");
    uint64_t lost = lost_lines();
    ck_assert_uint_gt(lost, 1000);
    ck_assert_uint_lt(lost, 4000);
    FILE *stream = fdopen(dup(reader), "r");
    for (char text[4096], wanted[40]; fgets(text, sizeof text, stream); count++) {
        snprintf(wanted, sizeof wanted, "filling i=%d text=", count);
        ck_assert_ptr_nonnull(strstr(text, wanted));
        ck_assert_int_eq(text[strlen(text) - 1], '\n');
    }
    fclose(stream);
    ck_assert_uint_eq(lost, 4000 - (uint64_t)count);
    kld_log(KLD_LOG_INFO, "again", "x=%d", 1);
    ck_assert_ptr_nonnull(strstr(line(), "again x=1\n"));
    ck_assert_uint_eq(lost_lines(), lost);
    close(reader);
    kld_log(KLD_LOG_INFO, "closed", "x=%d", 1);
    ck_assert_uint_eq(lost_lines(), lost + 1);
    /* The mode of the inherited descriptor, which others share, is as it was. */
    ck_assert_int_eq(fcntl(STDERR_FILENO, F_GETFL) & O_NONBLOCK, 0);
    kld_log_count_lost_in(NULL);
    kld_stats_detach(page);
    kld_stats_close(&fds);
}

START_TEST(full_pipe_loses_and_counts) {
    capture("info", "text", false);
    fill_and_count();
}
END_TEST

/* This process may not open what it has as standard error. */
static void begin_as_another_user(void) {
    ck_assert_int_eq(fchmod(STDERR_FILENO, 0), 0);
    if (geteuid() == 0)
        ck_assert_int_eq(setuid(65534), 0);
    ck_assert_int_lt(open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK), 0);
    ck_assert_int_eq(kld_log_init("worker0", "info", "text", NULL), KLD_OK);
}

START_TEST(a_full_pipe_of_another_user_loses_and_counts) {
    int pair[2];
    ck_assert_int_eq(pipe(pair), 0);
    read_stderr(pair[0], pair[1]);
    begin_as_another_user();
    fill_and_count();
}
END_TEST

/* Which the kernel has to be asked about first. */
START_TEST(a_full_pipe_with_a_name_of_another_user_loses_and_counts) {
    char name[64];
    snprintf(name, sizeof name, "/tmp/kld-unit-log-%d", (int)getpid());
    ck_assert_int_eq(mkfifo(name, 0600), 0);
    int ours = open(name, O_RDONLY | O_NONBLOCK), theirs = open(name, O_WRONLY);
    unlink(name);
    ck_assert_int_ge(theirs, 0);
    read_stderr(ours, theirs);
    begin_as_another_user();
    fill_and_count();
}
END_TEST

START_TEST(wrong_settings) {
    struct kld_error err;
    ck_assert_int_eq(kld_log_init("x", "loud", "text", &err), KLD_INVALID);
    ck_assert_int_eq(kld_log_init("x", "info", "xml", &err), KLD_INVALID);
}
END_TEST

START_TEST(the_level_changes) {
    capture("warn", "text", false);
    kld_log_set_level("debug");
    kld_log(KLD_LOG_DEBUG, "chatter", "x=%d", 1);
    ck_assert_ptr_nonnull(strstr(line(), "chatter"));
    kld_log_set_level("error");
    ck_assert(!kld_log_wants(KLD_LOG_WARN) && kld_log_wants(KLD_LOG_ERROR));
    kld_log_set_level("loud"); /* is none, and changes nothing */
    ck_assert(!kld_log_wants(KLD_LOG_WARN) && kld_log_wants(KLD_LOG_ERROR));
}
END_TEST

int main(void) {
    signal(SIGPIPE, SIG_IGN); /* as main.c does */
    const TTest *const tests[] = {text_line,
                                  level_is_respected,
                                  json_line,
                                  quotes_in_a_value_are_its_own,
                                  json_stays_json,
                                  json_is_utf8,
                                  full_pipe_loses_and_counts,
                                  a_full_pipe_of_another_user_loses_and_counts,
                                  a_full_pipe_with_a_name_of_another_user_loses_and_counts,
                                  wrong_settings,
                                  the_level_changes};
    return unit_run("server/log", tests, sizeof tests / sizeof tests[0]);
}
