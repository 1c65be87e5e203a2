/* test_users.c - what of something shared one user may have, and who is counted as one. */
#include "server/worker/users.h"

#include "tests/unit/unit.h"

START_TEST(there_is_always_a_rest) {
    ck_assert_uint_eq(kld_share_max(75, 1000, 0), 750);
    ck_assert_uint_eq(kld_share_max(75, 1000, 750), 187);
    ck_assert_uint_eq(kld_share_max(75, 1000, 937), 47);
    ck_assert_uint_eq(kld_share_max(100, 1000, 900), 100);
    ck_assert_uint_eq(kld_share_max(1, 1, 0), 1);
    ck_assert_uint_eq(kld_share_max(75, 8, 8), 0);
    ck_assert_uint_eq(kld_share_max(75, 8, 9), 0);
    ck_assert_uint_eq(kld_share_max(100, UINT64_MAX, 0), UINT64_MAX);
}
END_TEST

START_TEST(a_uid_is_one_user_as_long_as_it_is_held) {
    struct kld_users users;
    struct kld_error err;
    ck_assert_int_eq(kld_users_init(&users, &err), KLD_OK);
    struct kld_user *user = kld_user_acquire(&users, 5), *other = kld_user_acquire(&users, 6);
    ck_assert_ptr_ne(user, other);
    ck_assert_ptr_eq(kld_user_acquire(&users, 5), user);
    user->requests = 3;
    kld_user_release(&users, user);
    kld_user_hold(&users, user);
    kld_user_release(&users, user);
    ck_assert_uint_eq(kld_user_acquire(&users, 5)->requests, 3);
    kld_user_release(&users, user);
    kld_user_release(&users, user);
    kld_user_release(&users, other);
    ck_assert_ptr_null(TAILQ_FIRST(&users.list));
    kld_users_done(&users);
}
END_TEST

UNIT_MAIN("server/worker/users", there_is_always_a_rest, a_uid_is_one_user_as_long_as_it_is_held)
