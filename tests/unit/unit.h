/* unit.h - what every unit test program includes: the Check library, and one main().
 *
 * Each START_TEST runs in a process of its own with a time limit. A test file lies at the path of
 * the source it tests: proto/op.c -> tests/unit/proto/test_op.c. It ends with UNIT_MAIN("proto/op",
 * test_a, test_b, ...). */
#ifndef KLD_TESTS_UNIT_H
#define KLD_TESTS_UNIT_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of one test, for what hangs: the longest takes 20 s, ten times as long under a sanitizer, and the
 * machine may be busy with a dozen other things. */
#define UNIT_TIMEOUT_S 300

/* How often a test looks for what must come, 1 to 10 ms apart: what comes late on a busy machine
 * still comes, and what never comes is told before the limit above ends the test. */
#define TRIES_MAX 5000

/* What this machine cannot test is left out, which tests/run counts and says; where all is to be
 * tested, in CI, it is a failure. */
#define UNIT_NEEDS(condition, what)                                                                \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            unit_left_out(__func__, what);                                                         \
            return;                                                                                \
        }                                                                                          \
    } while (0)

static inline void unit_left_out(const char *test, const char *what) {
    const char *ci = getenv("CI");
    ck_assert_msg(!ci || strcmp(ci, "true") != 0, "needs %s", what);
    fprintf(stderr, "left out: %s: needs %s\n", test, what);
}

static inline int unit_run(const char *name, const TTest *const *tests, size_t count) {
    Suite *suite = suite_create(name);
    TCase *cases = tcase_create(name);
    tcase_set_timeout(cases, UNIT_TIMEOUT_S);
    for (size_t i = 0; i < count; i++)
        tcase_add_test(cases, tests[i]);
    suite_add_tcase(suite, cases);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

#define UNIT_MAIN(name, ...)                                                                       \
    int main(void) {                                                                               \
        const TTest *const tests[] = {__VA_ARGS__};                                                \
        return unit_run(name, tests, sizeof tests / sizeof tests[0]);                              \
    }

#endif
