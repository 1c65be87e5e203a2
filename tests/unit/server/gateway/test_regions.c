/* test_regions.c - names and limits of what HTTP callers register, of either kind. */
#include "server/gateway/regions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/auth.h"
#include "server/gateway/pool.h"
#include "tests/unit/unit.h"

static const struct kld_config config = {.http_regions_max = 4,
                                         .http_region_bytes_max = 1000,
                                         .token_regions_max = 3,
                                         .token_region_bytes_max = 600};
static struct kld_stats stats;
static struct kld_regions *regions;
static struct kld_error err;
static struct kld_caller everybody, one = {.name = "one"}, two = {.name = "two"};
static struct kld_pool_buffer buffer = {.users = 1}; /* ours: it never goes to a pool */

static void open_all(void) {
    ck_assert_int_eq(kld_regions_open(&config, &stats, &regions, &err), KLD_OK);
}

static void close_all(void) {
    kld_regions_close(regions);
    ck_assert_uint_eq(buffer.users, 1);
}

static enum kld_status reserve(enum kld_registered_kind kind, const struct kld_caller *owner,
                               const char *name, uint64_t bytes,
                               struct kld_registered **ret_registered) {
    struct kld_registered wanted = {.kind = kind, .owner = owner, .bytes = bytes, .key = "/k\""};
    enum kld_status status = kld_regions_name(&wanted, name, &err);
    return status ? status : kld_regions_reserve(regions, &wanted, ret_registered, &err);
}

static struct kld_region_use use_of_buffer(void) {
    buffer.users++;
    return (struct kld_region_use){.buffer = &buffer};
}

static enum kld_status add(const struct kld_caller *owner, const char *name, uint64_t bytes) {
    struct kld_registered *registered;
    enum kld_status status = reserve(KLD_REGISTERED_CUDA, owner, name, bytes, &registered);
    if (status == KLD_OK)
        kld_regions_publish(regions, registered, use_of_buffer());
    return status;
}

static enum kld_status acquire(const struct kld_caller *owner, const char *name, uint64_t offset,
                               uint64_t bytes) {
    struct kld_region_use use;
    enum kld_status status = kld_regions_acquire(regions, owner, name, offset, bytes, &use, &err);
    if (status == KLD_OK) {
        ck_assert_ptr_eq(use.buffer, &buffer);
        ck_assert_ptr_null(use.object);
        buffer.users--;
    }
    return status;
}

/* While a handle is on its way its name is taken, for both kinds, and its bytes count; but nobody
 * sees it. */
START_TEST(a_name_is_taken_before_it_is_there) {
    struct kld_registered *coming, *other;
    struct kld_oip_text text;
    open_all();
    ck_assert_int_eq(reserve(KLD_REGISTERED_CUDA, &one, "a", 500, &coming), KLD_OK);
    ck_assert_int_eq(reserve(KLD_REGISTERED_SYSTEM, &one, "a", 1, &other), KLD_EXISTS);
    ck_assert_int_eq(reserve(KLD_REGISTERED_CUDA, &one, "a", 1, &other), KLD_EXISTS);
    ck_assert_int_eq(acquire(&one, "a", 0, 1), KLD_NOT_FOUND);
    kld_regions_unregister(regions, KLD_REGISTERED_CUDA, &one, NULL, NULL);
    ck_assert_int_eq(kld_regions_list(regions, KLD_REGISTERED_CUDA, &one, "a", &text, &err),
                     KLD_NOT_FOUND);
    ck_assert_int_eq(reserve(KLD_REGISTERED_SYSTEM, &one, "b", 101, &other), KLD_THROTTLED);
    kld_regions_publish(regions, coming, use_of_buffer());
    ck_assert_int_eq(reserve(KLD_REGISTERED_SYSTEM, &one, "a", 1, &other), KLD_EXISTS);
    ck_assert_int_eq(acquire(&one, "a", 400, 100), KLD_OK);
    ck_assert_int_eq(acquire(&one, "a", 400, 101), KLD_INVALID);
    ck_assert_int_eq(acquire(&one, "a", UINT64_MAX, 2), KLD_INVALID);
    ck_assert_int_eq(acquire(&one, "a", 2, UINT64_MAX), KLD_INVALID);
    kld_regions_unregister(regions, KLD_REGISTERED_SYSTEM, &one, "a", NULL); /* it is not such */
    ck_assert_int_eq(acquire(&one, "a", 0, 500), KLD_OK);
    kld_regions_unregister(regions, KLD_REGISTERED_CUDA, &one, "a", NULL);
    ck_assert_int_eq(acquire(&one, "a", 0, 1), KLD_NOT_FOUND);
    ck_assert_int_eq(reserve(KLD_REGISTERED_SYSTEM, &one, "a", 600, &other), KLD_OK);
    kld_regions_give_up(regions, other);
    close_all();
}
END_TEST

START_TEST(both_kinds_share_the_limits) {
    struct kld_registered *of[4], *more;
    open_all();
    ck_assert_int_eq(reserve(KLD_REGISTERED_CUDA, &one, "a", 1, &of[0]), KLD_OK);
    ck_assert_int_eq(reserve(KLD_REGISTERED_SYSTEM, &one, "b", 1, &of[1]), KLD_OK);
    ck_assert_int_eq(reserve(KLD_REGISTERED_CUDA, &one, "c", 1, &of[2]), KLD_OK);
    ck_assert_int_eq(reserve(KLD_REGISTERED_CUDA, &one, "d", 1, &more), KLD_THROTTLED);
    ck_assert_ptr_nonnull(strstr(err.text, "token_regions_max"));
    ck_assert_int_eq(reserve(KLD_REGISTERED_CUDA, &two, "a", 1, &of[3]), KLD_OK);
    ck_assert_int_eq(reserve(KLD_REGISTERED_SYSTEM, &two, "b", 1, &more), KLD_BUSY);
    ck_assert_ptr_nonnull(strstr(err.text, "http_regions_max"));
    for (int i = 0; i < 4; i++)
        kld_regions_give_up(regions, of[i]);
    ck_assert_int_eq(add(&one, "a", 601), KLD_TOO_LARGE);
    ck_assert_ptr_nonnull(strstr(err.text, "token_region_bytes_max"));
    ck_assert_int_eq(add(&one, "a", 600), KLD_OK);
    ck_assert_int_eq(add(&one, "b", 1), KLD_THROTTLED);
    ck_assert_ptr_nonnull(strstr(err.text, "token_region_bytes_max"));
    ck_assert_int_eq(add(&two, "a", 401), KLD_BUSY);
    ck_assert_ptr_nonnull(strstr(err.text, "http_region_bytes_max"));
    ck_assert_uint_eq(stats.rejected[KLD_REJECT_http_regions_full], 2);
    ck_assert_int_eq(add(&two, "a", 400), KLD_OK);
    kld_regions_unregister(regions, KLD_REGISTERED_CUDA, &one, NULL, NULL);
    ck_assert_int_eq(add(&everybody, "a", 601), KLD_BUSY); /* 400 are taken */
    ck_assert_int_eq(add(&everybody, "a", 1001), KLD_TOO_LARGE);
    ck_assert_int_eq(add(&two, "b", UINT64_MAX), KLD_TOO_LARGE);
    kld_regions_unregister(regions, KLD_REGISTERED_CUDA, &two, NULL, NULL);
    for (int i = 0; i < 4; i++) /* where there are no tokens there are no limits of one */
        ck_assert_int_eq(add(&everybody, (char[]){(char)('a' + i), 0}, 250), KLD_OK);
    close_all();
}
END_TEST

START_TEST(a_region_is_its_owners_alone) {
    struct kld_oip_text text;
    open_all();
    ck_assert_int_eq(add(&one, "a", 16), KLD_OK);
    ck_assert_int_eq(acquire(&two, "a", 0, 1), KLD_NOT_FOUND);
    ck_assert_int_eq(kld_regions_list(regions, KLD_REGISTERED_CUDA, &two, "a", &text, &err),
                     KLD_NOT_FOUND);
    kld_regions_unregister(regions, KLD_REGISTERED_CUDA, &two, NULL, NULL);
    kld_regions_unregister(regions, KLD_REGISTERED_CUDA, &two, "a", NULL);
    ck_assert_int_eq(add(&two, "a", 8), KLD_OK);
    kld_regions_unregister(regions, KLD_REGISTERED_CUDA, &one, NULL, NULL);
    ck_assert_int_eq(acquire(&two, "a", 0, 8), KLD_OK);
    ck_assert_int_eq(acquire(&one, "a", 0, 8), KLD_NOT_FOUND);
    close_all();
}
END_TEST

static void check_list(enum kld_registered_kind kind, const char *name, const char *wanted) {
    struct kld_oip_text text;
    ck_assert_int_eq(kld_regions_list(regions, kind, &one, name, &text, &err), KLD_OK);
    ck_assert(!text.overflow);
    ck_assert_uint_eq(text.length, strlen(wanted));
    ck_assert_mem_eq(text.data, wanted, text.length);
    free(text.data);
}

START_TEST(the_list_is_json) {
    struct kld_registered *system;
    open_all();
    check_list(KLD_REGISTERED_SYSTEM, NULL, "[]");
    ck_assert_int_eq(add(&one, "c", 16), KLD_OK);
    ck_assert_int_eq(reserve(KLD_REGISTERED_SYSTEM, &one, "q\"", 8, &system), KLD_OK);
    kld_regions_publish(regions, system, use_of_buffer());
    check_list(KLD_REGISTERED_CUDA, NULL, "[{\"name\":\"c\",\"device_id\":0,\"byte_size\":16}]");
    check_list(KLD_REGISTERED_SYSTEM, "q\"",
               "[{\"name\":\"q\\\"\",\"key\":\"/k\\\"\",\"offset\":0,\"byte_size\":8}]");
    close_all();
}
END_TEST

/* Names of the worst letters, as many as there may be: the list has room for all of them. */
START_TEST(a_full_list_of_control_characters) {
    struct kld_oip_text text;
    char name[KLD_OIP_NAME_MAX];
    open_all();
    memset(name, 1, sizeof name - 1);
    name[sizeof name - 1] = '\0';
    for (int i = 0; i < 3; i++, name[0]++)
        ck_assert_int_eq(add(&one, name, 1), KLD_OK);
    ck_assert_int_eq(kld_regions_list(regions, KLD_REGISTERED_CUDA, &one, NULL, &text, &err),
                     KLD_OK);
    ck_assert(!text.overflow && text.length > (size_t)3 * 6 * (KLD_OIP_NAME_MAX - 1));
    free(text.data);
    ck_assert_int_eq(add(&two, "", 1), KLD_INVALID);
    char longer[KLD_OIP_NAME_MAX + 1];
    memset(longer, 'x', KLD_OIP_NAME_MAX);
    longer[KLD_OIP_NAME_MAX] = '\0';
    ck_assert_int_eq(add(&two, longer, 1), KLD_INVALID);
    close_all();
}
END_TEST

/* Once their owner's last request has ended; what is just being registered then, a moment later. */
START_TEST(regions_of_who_left_go) {
    struct kld_registered *coming;
    open_all();
    ck_assert_int_eq(add(&one, "a", 100), KLD_OK);
    ck_assert_int_eq(add(&two, "a", 100), KLD_OK);
    ck_assert_int_eq(reserve(KLD_REGISTERED_CUDA, &one, "b", 100, &coming), KLD_OK);
    ck_assert(!kld_regions_drop_left(regions, NULL));
    atomic_store(&one.requests, 1);
    atomic_store(&one.gone, true);
    ck_assert(kld_regions_drop_left(regions, NULL));
    ck_assert_int_eq(acquire(&one, "a", 0, 100), KLD_OK);
    atomic_store(&one.requests, 0);
    ck_assert(kld_regions_drop_left(regions, NULL));
    ck_assert_int_eq(acquire(&one, "a", 0, 100), KLD_NOT_FOUND);
    ck_assert_int_eq(acquire(&two, "a", 0, 100), KLD_OK);
    kld_regions_publish(regions, coming, use_of_buffer());
    ck_assert(!kld_regions_drop_left(regions, NULL));
    ck_assert_int_eq(acquire(&one, "b", 0, 100), KLD_NOT_FOUND);
    close_all();
}
END_TEST

UNIT_MAIN("server/gateway/regions", regions_of_who_left_go, a_name_is_taken_before_it_is_there,
          both_kinds_share_the_limits, a_region_is_its_owners_alone, the_list_is_json,
          a_full_list_of_control_characters)
