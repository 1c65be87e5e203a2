/* test_staging.c - the shared memory that bodies land in. */
#include "server/gateway/staging.h"

#include <fcntl.h>
#include <string.h>

#include "tests/unit/unit.h"

START_TEST(memory_is_sealed_and_zeroed) {
    struct kld_staging *staging;
    ck_assert_int_eq(kld_staging_open(5000, NULL, &staging, NULL), KLD_OK);
    ck_assert_uint_eq(kld_staging_bytes(staging), 8192);
    ck_assert(fcntl(kld_staging_fd(staging), F_GET_SEALS) & F_SEAL_SHRINK);
    ck_assert_int_eq(((char *)kld_staging_at(staging, 8191))[0], 0);
    kld_staging_close(staging);
    kld_staging_close(NULL);
    ck_assert_int_eq(kld_staging_open(UINT64_MAX, NULL, &staging, NULL), KLD_INVALID);
}
END_TEST

START_TEST(full_is_busy_and_more_than_all_is_too_large) {
    struct kld_staging *staging;
    uint64_t a, b;
    ck_assert_int_eq(kld_staging_open(4096, NULL, &staging, NULL), KLD_OK);
    ck_assert_int_eq(kld_staging_alloc(staging, 4097, &a, NULL), KLD_TOO_LARGE);
    ck_assert_int_eq(kld_staging_alloc(staging, UINT64_MAX, &a, NULL), KLD_TOO_LARGE);
    ck_assert_int_eq(kld_staging_alloc(staging, 4096, &a, NULL), KLD_OK);
    ck_assert_int_eq(kld_staging_alloc(staging, 0, &b, NULL), KLD_BUSY);
    kld_staging_free(staging, a);
    ck_assert_int_eq(kld_staging_alloc(staging, 0, &b, NULL), KLD_OK);
    ck_assert_uint_eq(kld_staging_used_bytes(staging), KLD_STAGING_ALIGN);
    kld_staging_close(staging);
}
END_TEST

/* Random work against a map of bytes: no overlap, alignment, and everything comes together again.
 */
START_TEST(ranges_never_overlap_and_coalesce) {
    enum { BYTES = 65536, SLOTS = 64 };
    struct kld_staging *staging;
    struct {
        uint64_t offset, bytes;
        int used;
    } slot[SLOTS] = {{0}};
    unsigned random = 1;
    ck_assert_int_eq(kld_staging_open(BYTES, NULL, &staging, NULL), KLD_OK);
    for (int step = 0; step < 20000; step++) {
        random = random * 1103515245u + 12345u;
        unsigned i = (random >> 16) % SLOTS;
        if (slot[i].used) {
            for (uint64_t k = 0; k < slot[i].bytes; k++)
                ck_assert_int_eq(((unsigned char *)kld_staging_at(staging, slot[i].offset))[k], i);
            kld_staging_free(staging, slot[i].offset);
            slot[i].used = 0;
            continue;
        }
        random = random * 1103515245u + 12345u;
        slot[i].bytes = (random >> 16) % 3000;
        enum kld_status status = kld_staging_alloc(staging, slot[i].bytes, &slot[i].offset, NULL);
        if (status) {
            ck_assert_int_eq(status, KLD_BUSY);
            continue;
        }
        ck_assert_uint_eq(slot[i].offset % KLD_STAGING_ALIGN, 0);
        ck_assert_uint_le(slot[i].offset + slot[i].bytes, BYTES);
        memset(kld_staging_at(staging, slot[i].offset), (int)i, slot[i].bytes);
        slot[i].used = 1;
    }
    for (int i = 0; i < SLOTS; i++)
        if (slot[i].used)
            kld_staging_free(staging, slot[i].offset);
    ck_assert_uint_eq(kld_staging_used_bytes(staging), 0);
    uint64_t all;
    ck_assert_int_eq(kld_staging_alloc(staging, BYTES, &all, NULL), KLD_OK);
    ck_assert_uint_eq(all, 0);
    kld_staging_close(staging);
}
END_TEST

UNIT_MAIN("server/gateway/staging", memory_is_sealed_and_zeroed,
          full_is_busy_and_more_than_all_is_too_large, ranges_never_overlap_and_coalesce)
