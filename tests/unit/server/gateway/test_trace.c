/* test_trace.c - which `traceparent` is one. */
#include "server/gateway/trace.h"

#include <string.h>

#include "tests/unit/unit.h"

#define ID "0af7651916cd43dd8448eb211c80319c"
#define SPAN "b7ad6b7169203331"

static struct kld_trace trace;

START_TEST(good_ones_are_taken) {
    ck_assert(kld_trace_read("00-" ID "-" SPAN "-01", &trace));
    ck_assert_str_eq(trace.id, ID);
    ck_assert_str_eq(trace.span, SPAN);
    ck_assert_uint_eq(trace.flags, 1);
    ck_assert(kld_trace_read("00-" ID "-" SPAN "-00", &trace) && trace.flags == 0);
    ck_assert(kld_trace_read("00-" ID "-" SPAN "-fe", &trace) && trace.flags == 0xfe);
    /* Later versions begin alike. */
    ck_assert(kld_trace_read("cc-" ID "-" SPAN "-01", &trace));
    ck_assert(kld_trace_read("01-" ID "-" SPAN "-01-what the future will be like", &trace));
    ck_assert_str_eq(trace.id, ID);
    ck_assert(kld_trace_read("00-00000000000000000000000000000001-0000000000000001-00", &trace));
}
END_TEST

static const char *const bad[] = {
    "",
    "00",
    "00-" ID "-" SPAN,
    "00-" ID "-" SPAN "-",
    "00-" ID "-" SPAN "-0",
    "00-" ID "-" SPAN "-01-",
    "00-" ID "-" SPAN "-01-more",
    "00-" ID "-" SPAN "-010",
    "01-" ID "-" SPAN "-01more",
    "00-" ID "-" SPAN "-01 ",
    " 00-" ID "-" SPAN "-01",
    "ff-" ID "-" SPAN "-01",
    "0-" ID "-" SPAN "-0001",
    "0x-" ID "-" SPAN "-01",
    "00-" ID "-" SPAN "-0g",
    "00-00000000000000000000000000000000-" SPAN "-01",
    "00-" ID "-0000000000000000-01",
    "00-0AF7651916CD43DD8448EB211C80319C-" SPAN "-01",
    "00-" ID "-B7AD6B7169203331-01",
    "00-" ID "-b7ad6b71692033-3101",
    "00_" ID "_" SPAN "_01",
    "00-" ID SPAN "--01-",
    "00-0af7651916cd43dd8448eb211c80319\"-" SPAN "-01",
};

START_TEST(others_are_ignored) {
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memset(&trace, 'x', sizeof trace);
        ck_assert_msg(!kld_trace_read(bad[i], &trace), "'%s'", bad[i]);
        ck_assert(!trace.id[0] && !trace.span[0] && !trace.flags);
    }
    ck_assert(!kld_trace_read(NULL, &trace));
}
END_TEST

/* Cut anywhere, in memory of just that size: nothing is read behind its end. */
START_TEST(a_short_one_is_not_read_beyond) {
    const char *whole = "00-" ID "-" SPAN "-01";
    for (size_t bytes = 0; bytes < strlen(whole); bytes++) {
        char *cut = malloc(bytes + 1);
        ck_assert_ptr_nonnull(cut);
        memcpy(cut, whole, bytes);
        cut[bytes] = '\0';
        ck_assert(!kld_trace_read(cut, &trace));
        free(cut);
    }
}
END_TEST

UNIT_MAIN("server/gateway/trace", good_ones_are_taken, others_are_ignored,
          a_short_one_is_not_read_beyond)
