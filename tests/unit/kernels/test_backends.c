/* test_backends.c - finding a back end by name. */
#include "tests/unit/unit.h"

#include <string.h>

#include "kernels/backend.h"

START_TEST(test_list) {
    const struct kld_backend *const *list = kld_backends();
    size_t count = 0;
    while (list[count])
        count++;
    ck_assert_uint_ge(count, 1);
    ck_assert_str_eq(list[count - 1]->name, "cpu"); /* the one that always works is the last */
}
END_TEST

START_TEST(test_find) {
    const struct kld_backend *backend = NULL;
    struct kld_error err;
    ck_assert_int_eq(kld_backend_find("cpu", &backend, &err), KLD_OK);
    ck_assert_str_eq(backend->name, "cpu");
    backend = NULL;
    ck_assert_int_eq(kld_backend_find("auto", &backend, &err), KLD_OK);
    uint32_t devices = 0;
    ck_assert_int_eq(backend->device_count(&devices, &err), KLD_OK);
    ck_assert_uint_ge(devices, 1);
}
END_TEST

START_TEST(test_unknown) {
    const struct kld_backend *backend = NULL;
    struct kld_error err;
    ck_assert_int_eq(kld_backend_find("tpu", &backend, &err), KLD_NOT_FOUND);
    ck_assert_ptr_null(backend);
    ck_assert_ptr_nonnull(strstr(err.text, "tpu"));
    ck_assert_ptr_nonnull(strstr(err.text, "cpu"));
    ck_assert_int_eq(kld_backend_find("", &backend, &err), KLD_NOT_FOUND);
}
END_TEST

UNIT_MAIN("kernels/backends", test_list, test_find, test_unknown)
