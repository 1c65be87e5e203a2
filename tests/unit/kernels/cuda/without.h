/* without.h - what the tests of this folder find in a build without CUDA: that there is none, and
 * that it is said. */
#ifndef KLD_TESTS_UNIT_KERNELS_CUDA_WITHOUT_H
#define KLD_TESTS_UNIT_KERNELS_CUDA_WITHOUT_H

#include <string.h>

#include "kernels/backend.h"
#include "tests/unit/unit.h"

START_TEST(built_without_cuda) {
    const struct kld_backend *backend;
    struct kld_error err;
    ck_assert_int_eq(kld_backend_find("cuda", &backend, &err), KLD_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.text, "no back end 'cuda' in this build"));
}
END_TEST

#endif
