/* test_shm.c - the shared memory that HTTP callers register. */
#include "server/gateway/shm.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/gateway/auth.h"
#include "tests/unit/unit.h"

static struct kld_config config = {
    .shm_prefix = "/kld-unit-", .http_regions_max = 2, .http_region_bytes_max = 8192};
static struct kld_stats stats;
static struct kld_regions *regions;
static uv_loop_t loop;
static struct kld_error err;
static struct kld_caller caller[2], *const owner = &caller[0];
static char key[64];
static int object;

static void open_all(void) {
    snprintf(key, sizeof key, "/kld-unit-%d", (int)getpid());
    object = shm_open(key, O_RDWR | O_CREAT | O_EXCL, 0600);
    ck_assert_int_ge(object, 0);
    ck_assert_int_eq(ftruncate(object, 4096), 0);
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    ck_assert_int_eq(kld_regions_open(&config, &stats, &regions, &err), KLD_OK);
}

static void close_all(void) {
    uv_run(&loop, UV_RUN_DEFAULT);
    kld_regions_close(regions);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    close(object);
    shm_unlink(key);
}

static enum kld_status add(const char *name, uint64_t offset, uint64_t bytes) {
    struct kld_oip_register wanted = {.offset_bytes = offset, .byte_size = bytes};
    strcpy(wanted.key, key);
    return kld_shm_register(regions, &config, owner, name, &wanted, &err);
}

static enum kld_status acquire(const struct kld_caller *who, const char *name, uint64_t offset,
                               uint64_t bytes, struct kld_shm_object **ret_object) {
    struct kld_region_use use;
    enum kld_status status = kld_regions_acquire(regions, who, name, offset, bytes, &use, &err);
    if (status == KLD_OK) {
        ck_assert_ptr_null(use.buffer);
        *ret_object = use.object;
    }
    return status;
}

static void unregister(const char *name) {
    kld_regions_unregister(regions, KLD_REGISTERED_SYSTEM, owner, name, &loop);
}

START_TEST(a_region_is_a_window) {
    struct kld_shm_object *region;
    char got[8];
    open_all();
    ck_assert_int_eq(pwrite(object, "abcdefgh", 8, 100), 8);
    ck_assert_int_eq(add("a", 100, 3000), KLD_OK);
    ck_assert_int_eq(add("a", 0, 1), KLD_EXISTS);
    ck_assert_int_eq(acquire(owner, "a", 2, 4, &region), KLD_OK);
    ck_assert_int_eq(kld_shm_read(region, 2, got, 4, &err), KLD_OK);
    ck_assert_mem_eq(got, "cdef", 4);
    ck_assert_int_eq(kld_shm_write(region, 0, "AB", 2, &err), KLD_OK);
    ck_assert_int_eq(pread(object, got, 4, 100), 4);
    ck_assert_mem_eq(got, "ABcd", 4);
    kld_shm_release(region, &loop);
    ck_assert_int_eq(acquire(owner, "b", 0, 1, &region), KLD_NOT_FOUND);
    ck_assert_int_eq(acquire(owner, "a", 2999, 2, &region), KLD_INVALID);
    ck_assert_int_eq(acquire(owner, "a", UINT64_MAX, 2, &region), KLD_INVALID);
    ck_assert_int_eq(acquire(owner, "a", 2, UINT64_MAX, &region), KLD_INVALID);
    close_all();
}
END_TEST

START_TEST(its_last_user_closes_it) {
    struct kld_shm_object *region;
    char got[4];
    open_all();
    ck_assert_int_eq(add("a", 0, 4096), KLD_OK);
    ck_assert_int_eq(acquire(owner, "a", 0, 4, &region), KLD_OK);
    unregister("a");
    ck_assert_int_eq(acquire(owner, "a", 0, 4, &region), KLD_NOT_FOUND);
    ck_assert_int_eq(kld_shm_read(region, 0, got, 4, &err), KLD_OK);
    ck_assert(!uv_loop_alive(&loop));
    kld_shm_release(region, &loop);
    ck_assert_msg(uv_loop_alive(&loop), "it is closed on the pool");
    uv_run(&loop, UV_RUN_DEFAULT);
    kld_shm_release(NULL, &loop);
    close_all();
}
END_TEST

START_TEST(a_cut_object_is_an_error_and_does_not_grow_again) {
    struct kld_shm_object *region;
    struct stat about;
    char got[8];
    open_all();
    ck_assert_int_eq(add("a", 0, 4096), KLD_OK);
    ck_assert_int_eq(acquire(owner, "a", 0, 4096, &region), KLD_OK);
    ck_assert_int_eq(ftruncate(object, 4), 0);
    ck_assert_int_eq(kld_shm_read(region, 0, got, 8, &err), KLD_INVALID);
    ck_assert_int_eq(kld_shm_write(region, 0, got, 8, &err), KLD_INVALID);
    ck_assert_int_eq(fstat(object, &about), 0);
    ck_assert_int_eq(about.st_size, 4);
    kld_shm_release(region, &loop);
    close_all();
}
END_TEST

START_TEST(what_may_be_registered) {
    open_all();
    ck_assert_int_eq(add("a", 4096, 1), KLD_INVALID);
    ck_assert_int_eq(add("", 0, 1), KLD_INVALID);
    ck_assert_int_eq(add("a", 0, 1), KLD_OK);
    ck_assert_int_eq(add("b", 0, 1), KLD_OK);
    ck_assert_int_eq(add("c", 0, 1), KLD_BUSY);
    unregister(NULL);
    const struct {
        const char *key;
        enum kld_status status;
    } keys[] = {{"/other", KLD_FORBIDDEN},
                {"kld-unit-x", KLD_FORBIDDEN},
                {"/kld-unit-none", KLD_NOT_FOUND},
                {"/kld-unit-/../x", KLD_INVALID}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        struct kld_oip_register wanted = {.byte_size = 1};
        strcpy(wanted.key, keys[i].key);
        ck_assert_int_eq(kld_shm_register(regions, &config, owner, "a", &wanted, &err),
                         keys[i].status);
        ck_assert_ptr_null(strstr(err.text, "kld-unit"));
    }
    ck_assert_int_eq(add("a", 0, 1), KLD_OK); /* those have left nothing behind */
    config.shm_prefix[0] = '\0';
    ck_assert_int_eq(add("a", 0, 1), KLD_FORBIDDEN);
    close_all();
}
END_TEST

UNIT_MAIN("server/gateway/shm", a_region_is_a_window, its_last_user_closes_it,
          a_cut_object_is_an_error_and_does_not_grow_again, what_may_be_registered)
