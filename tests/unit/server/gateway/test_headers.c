/* test_headers.c - which libraries heads can be looked at with. Heads themselves: tests/e2e. */
#include "tests/unit/unit.h"

#include "server/gateway/headers.h"

START_TEST(a_library_too_old_is_refused) {
    static const struct {
        const char *version;
        enum kld_status status;
    } cases[] = {{"0.9.73", KLD_UNIMPLEMENTED},
                 {"0.9.8", KLD_UNIMPLEMENTED},
                 {"0.8.99", KLD_UNIMPLEMENTED},
                 {"", KLD_UNIMPLEMENTED},
                 {"0.9.74", KLD_OK},
                 {"0.9.75", KLD_OK},
                 {"0.10.0", KLD_OK},
                 {"1.0.1", KLD_OK}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct kld_error err = {0};
        ck_assert_int_eq(kld_headers_check_library(cases[i].version, &err), cases[i].status);
    }
}
END_TEST

UNIT_MAIN("server/gateway/headers", a_library_too_old_is_refused)
