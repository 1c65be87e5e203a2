/* test_http_request.c - the JSON that libkld writes. */
#include "tests/unit/unit.h"

#include <locale.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/http.h"

static struct http_call call;

static const char *head_of(double scale) {
    struct kld_op *op = &call.base.request.op;
    memset(&call, 0, sizeof call);
    kld_op_init(op);
    call.base.deadline_ns = KLD_NEVER;
    op->rank = 1;
    op->shape[0] = 4;
    for (int slot = KLD_SLOT_PREDICTIONS; slot <= KLD_SLOT_TARGETS; slot++)
        op->tensor[slot] = (struct kld_tensor){.dtype = KLD_DTYPE_FP32, .region = 1u + slot};
    ck_assert_int_eq(kld_op_set_number(op, "scale", scale, NULL), KLD_OK);
    ck_assert_int_eq(kld_op_check(op, &call.base.geometry, NULL), KLD_OK);
    ck_assert_int_eq(kld_http_head_write(&call, NULL), KLD_OK);
    call.head[call.head_bytes] = '\0';
    return call.head;
}

static void check_numbers(void) {
    ck_assert_ptr_nonnull(strstr(head_of(2.5), ",\"scale\":2.5}"));
    ck_assert_ptr_nonnull(strstr(head_of(-0.1), ",\"scale\":-0.10000000000000001}"));
    ck_assert_ptr_nonnull(strstr(head_of(3), ",\"scale\":3}"));
    ck_assert_ptr_nonnull(strstr(head_of(1e300), ",\"scale\":1.0000000000000001e+300}"));
    ck_assert_ptr_nonnull(strstr(head_of(1e-5), ",\"scale\":1.0000000000000001e-05}"));
    ck_assert_ptr_nonnull(strstr(head_of(1e20), ",\"scale\":1e+20}"));
}

START_TEST(test_numbers) { check_numbers(); }
END_TEST

/* A process with a decimal comma; its locale is made here where the sources of locales are there.
 */
START_TEST(test_numbers_whatever_the_locale) {
    char folder[] = "/tmp/kld-locale-XXXXXX", command[256];
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8 2>/dev/null",
             folder);
    int made = system(command);
    if (made == 0)
        setenv("LOCPATH", folder, 1);
    const char *set = setlocale(LC_ALL, "de_DE.UTF-8");
    ck_assert(made != 0 || (set && localeconv()->decimal_point[0] == ','));
    check_numbers();
    snprintf(command, sizeof command, "rm -r %s", folder);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

/* "For ever", as a caller may say it, is more than the protocol has numbers for. */
START_TEST(test_timeouts) {
    head_of(1);
    uint64_t now = kld_now_ns();
    const struct {
        uint64_t ns;
        bool told;
    } cases[] = {{1000000000, true},
                 {(1ull << 52) * 1000, true},
                 {(1ull << 54) * 1000, false},
                 {INT64_MAX, false},
                 {UINT64_MAX - 1 - now, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        call.base.deadline_ns = now + cases[i].ns;
        ck_assert_int_eq(kld_http_head_write(&call, NULL), KLD_OK);
        call.head[call.head_bytes] = '\0';
        ck_assert_msg((strstr(call.head, "\"timeout\":") != NULL) == cases[i].told, "%zu: %s", i,
                      call.head);
    }
}
END_TEST

UNIT_MAIN("client/http_request", test_numbers, test_numbers_whatever_the_locale, test_timeouts)
