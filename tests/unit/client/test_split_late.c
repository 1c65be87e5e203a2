/* test_split_late.c - requests over several servers whose own time is too short: that is nothing
 * that a server could be blamed for. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <stdio.h>

#include "client/split.h"
#include "tests/unit/client/fake_http.h"

#define ROWS 3
#define CLASSES 4
#define COUNT 2

static struct fake_http server[COUNT];
static struct kld_connection *connection;
static struct kld_error error;
static float q[ROWS * CLASSES], p[ROWS * CLASSES], gradient[ROWS * CLASSES];

/* Parts of one row. */
static void setup(uint64_t part_timeout_ns) {
    struct kld_connect_options options = {.part_bytes_max = 1, .part_timeout_ns = part_timeout_ns};
    char url[256];
    for (int i = 0; i < COUNT; i++) {
        fake_http_open(&server[i]);
        server[i].metadata =
            "{\"name\":\"fake\",\"version\":\"1.2\",\"backend\":\"cpu\",\"device\":\"x (v)\"}";
    }
    snprintf(url, sizeof url, "split:%s,%s", server[0].url, server[1].url);
    ck_assert_msg(kld_connect(url, &options, &connection, &error) == KLD_OK, "%s", error.text);
}

static void teardown(void) {
    kld_close(connection);
    for (int i = 0; i < COUNT; i++)
        fake_http_close(&server[i]);
}

static const struct split_server *member(int i) {
    return &((const struct split_connection *)connection)->servers[i];
}

static enum kld_status run(uint64_t timeout_ns) {
    struct kld_request request = small_request(ROWS, CLASSES, q, p, gradient);
    request.timeout_ns = timeout_ns;
    return kld_run(connection, &request, NULL, &error);
}

START_TEST(a_short_deadline_is_no_servers_fault) {
    setup(0);
    for (int turn = 0; turn < 8; turn++) {
        ck_assert_int_eq(run(1), KLD_DEADLINE); /* over before a part is sent */
        ck_assert_msg(strcmp(error.text, "deadline passed; 0 of 3 rows were done") == 0, "%s",
                      error.text);
        for (int i = 0; i < COUNT; i++) {
            ck_assert_int_eq(member(i)->state, SPLIT_READY);
            ck_assert_uint_eq(member(i)->pause_ns, 0);
        }
    }
    ck_assert_msg(run(5000000000) == KLD_OK, "%s", error.text);
    teardown();
}
END_TEST

/* part_timeout_ns is another matter. */
START_TEST(who_is_silent_for_a_part_is_left) {
    setup(50000000);
    for (int i = 0; i < COUNT; i++) {
        server[i].mode = FAKE_HTTP_SILENT;
        server[i].times = 1000;
    }
    ck_assert_int_eq(run(1000000000), KLD_DEADLINE);
    ck_assert(member(0)->pause_ns > 0 && member(1)->pause_ns > 0);
    teardown();
}
END_TEST

/* Deadlines that would do: the second one that it lets pass, the others have its parts. */
START_TEST(who_is_silent_is_left_by_callers_with_deadlines) {
    enum kld_status status = KLD_DEADLINE;
    setup(0);
    server[0].mode = FAKE_HTTP_SILENT;
    server[0].times = 1000;
    ck_assert_int_eq(run(300000000), KLD_DEADLINE);
    ck_assert_int_eq(member(0)->state, SPLIT_READY);
    for (int turn = 0; turn < 10 && status; turn++)
        status = run(300000000);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    ck_assert_int_eq(member(0)->state, SPLIT_AWAY);
    ck_assert_int_eq(member(1)->state, SPLIT_READY);
    teardown();
}
END_TEST

UNIT_MAIN("client/split_late", who_is_silent_is_left_by_callers_with_deadlines,
          a_short_deadline_is_no_servers_fault, who_is_silent_for_a_part_is_left)
