/* test_staging.c - the shared memory that bodies land in. */
#include "server/gateway/staging.h"

#include <fcntl.h>
#include <string.h>
#include <time.h>

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
            const unsigned char *at = kld_staging_at(staging, slot[i].offset);
            uint64_t others = 0;
            for (uint64_t k = 0; k < slot[i].bytes; k++)
                others += at[k] != i;
            ck_assert_uint_eq(others, 0);
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
    ck_assert_int_eq(kld_staging_alloc(staging, kld_staging_range_bytes_max(staging), &all, NULL),
                     KLD_OK);
    ck_assert_uint_eq(all, 0);
    kld_staging_close(staging);
}
END_TEST

/* CPU time of a range given back and taken again, with `count` others in use. */
static double exchange_ns(struct kld_staging *staging, uint32_t count) {
    static uint64_t offset[1 << 14];
    struct timespec begin, end;
    for (uint32_t i = 0; i < count; i++)
        ck_assert_int_eq(kld_staging_alloc(staging, 64 + i % 5 * 64, &offset[i], NULL), KLD_OK);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    for (uint32_t k = 0; k < 20000; k++) {
        uint32_t i = k * 2654435761u % count;
        kld_staging_free(staging, offset[i]);
        ck_assert_int_eq(kld_staging_alloc(staging, 64 + i % 5 * 64, &offset[i], NULL), KLD_OK);
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    for (uint32_t i = 0; i < count; i++)
        kld_staging_free(staging, offset[i]);
    return ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) /
           20000;
}

START_TEST(many_in_use_cost_what_few_do) {
    struct kld_staging *staging;
    ck_assert_int_eq(kld_staging_open((uint64_t)1 << 30, NULL, &staging, NULL), KLD_OK);
    double few = exchange_ns(staging, 64), many = exchange_ns(staging, 1 << 14);
    for (int i = 0; i < 2 && many >= 20 * few; i++) /* another process had the caches */
        many = exchange_ns(staging, 1 << 14);
    ck_assert_msg(many < 20 * few, "%.0f ns with 64, %.0f ns with 16384", few, many);
    ck_assert_uint_eq(kld_staging_used_bytes(staging), 0);
    kld_staging_close(staging);
}
END_TEST

static struct kld_staging *queued;

static enum kld_status take(struct kld_staging_turn *turn, uint64_t bytes, uint64_t *ret_offset) {
    return kld_staging_take(queued, turn, bytes, false, ret_offset, NULL);
}

START_TEST(no_newcomer_overtakes) {
    struct kld_staging_turn first = {.queued = false}, second = first, third = first, gone = first;
    uint64_t all, a, b, c;
    ck_assert_int_eq(kld_staging_open(4096, NULL, &queued, NULL), KLD_OK);
    ck_assert_int_eq(kld_staging_alloc(queued, 3072, &all, NULL), KLD_OK);
    ck_assert_int_eq(take(&first, 2048, &a), KLD_BUSY);
    ck_assert_int_eq(take(&gone, 64, &b), KLD_BUSY); /* there is room for it, but not yet */
    ck_assert_int_eq(take(&second, 64, &b), KLD_BUSY);
    ck_assert_int_eq(take(&third, 5000, &b), KLD_TOO_LARGE); /* need not wait to hear that */
    uint64_t changes = kld_staging_changes(queued);
    ck_assert_int_eq(take(&first, 2048, &a), KLD_BUSY);
    ck_assert_uint_eq(kld_staging_changes(queued), changes);
    kld_staging_free(queued, all);
    ck_assert_uint_ne(kld_staging_changes(queued), changes);
    ck_assert_int_eq(take(&second, 64, &b), KLD_BUSY);
    ck_assert_int_eq(take(&first, 2048, &a), KLD_OK);
    ck_assert_int_eq(take(&second, 64, &b), KLD_BUSY); /* behind the one that goes */
    kld_staging_leave(queued, &gone);
    kld_staging_leave(queued, &gone);
    ck_assert_int_eq(take(&second, 64, &b), KLD_OK);
    ck_assert_int_eq(take(&third, 64, &c), KLD_OK);
    kld_staging_close(queued);
}
END_TEST

/* Who waits for more would wait for ever if those who have some had to stand behind him. */
START_TEST(who_has_some_gets_more_before_newcomers) {
    struct kld_staging_turn large = {.queued = false}, small = large, comer = large;
    uint64_t a, b, more, rest;
    ck_assert_int_eq(kld_staging_open(4096, NULL, &queued, NULL), KLD_OK);
    ck_assert_int_eq(take(&large, 64, &a), KLD_OK);
    ck_assert_int_eq(take(&small, 1024, &b), KLD_OK);
    ck_assert_int_eq(take(&large, 3072, &more), KLD_BUSY);
    ck_assert_int_eq(take(&comer, 64, &rest), KLD_BUSY);
    ck_assert_int_eq(take(&small, 512, &rest), KLD_OK);
    kld_staging_free(queued, rest);
    kld_staging_free(queued, b);
    ck_assert_int_eq(take(&comer, 64, &rest), KLD_BUSY);
    ck_assert_int_eq(take(&large, 3072, &more), KLD_OK);
    ck_assert_int_eq(take(&comer, 64, &rest), KLD_OK);
    ck_assert_int_eq(take(&large, 4000, &more), KLD_BUSY);
    kld_staging_leave(queued, &large);
    kld_staging_free(queued, rest);
    ck_assert_int_eq(take(&(struct kld_staging_turn){.queued = false}, 64, &rest), KLD_OK);
    kld_staging_close(queued);
}
END_TEST

START_TEST(who_would_wait_for_himself_is_told) {
    struct kld_staging_turn turn = {.queued = false};
    uint64_t mine, others, more;
    ck_assert_int_eq(kld_staging_open(4096, NULL, &queued, NULL), KLD_OK);
    ck_assert_int_eq(kld_staging_alloc(queued, 64, &others, NULL), KLD_OK);
    ck_assert_int_eq(take(&turn, 3000, &mine), KLD_OK);
    ck_assert_int_eq(take(&turn, 2000, &more), KLD_BUSY);
    kld_staging_free(queued, others);
    ck_assert_int_eq(take(&turn, 2000, &more), KLD_TOO_LARGE);
    ck_assert(!turn.queued);
    kld_staging_close(queued);
}
END_TEST

#define STAGING ((uint64_t)64 << 20)

static enum kld_status take_json(struct kld_staging_turn *turn, uint64_t bytes,
                                 uint64_t *ret_offset) {
    return kld_staging_take(queued, turn, bytes, true, ret_offset, NULL);
}

/* JSON among the small ones says nothing about the large ones, which are others'. */
START_TEST(who_has_a_small_one_alone_waits_for_large_ones) {
    struct kld_staging_turn turn = {.queued = false}, other = turn;
    uint64_t mine, all, tensors;
    ck_assert_int_eq(kld_staging_open(STAGING, NULL, &queued, NULL), KLD_OK);
    ck_assert_int_eq(take(&other, kld_staging_range_bytes_max(queued), &all), KLD_OK);
    ck_assert_int_eq(take_json(&turn, 1000, &mine), KLD_OK);
    ck_assert_int_eq(take(&turn, 1 << 20, &tensors), KLD_BUSY);
    ck_assert(turn.queued);
    kld_staging_free(queued, all);
    ck_assert_int_eq(take(&turn, 1 << 20, &tensors), KLD_OK);
    kld_staging_close(queued);
}
END_TEST

START_TEST(json_leaves_half_for_tensors) {
    struct kld_staging_turn first = {.queued = false}, second = first, third = first, other = first;
    uint64_t most, a, b, c, tensors;
    ck_assert_int_eq(kld_staging_open(STAGING, NULL, &queued, NULL), KLD_OK);
    most = kld_staging_range_bytes_max(queued);
    ck_assert_int_eq(take_json(&first, most / 3, &a), KLD_OK);
    ck_assert_int_eq(take_json(&second, most / 3, &b), KLD_BUSY);
    ck_assert_int_eq(take_json(&third, 1 << 20, &c), KLD_BUSY); /* would fit, but came later */
    ck_assert_int_eq(take(&other, most / 3, &c), KLD_OK);       /* tensors need not wait for it */
    ck_assert_int_eq(take(&first, most / 3 - 4096, &tensors), KLD_OK);
    kld_staging_free(queued, tensors);
    kld_staging_free(queued, c);
    ck_assert_int_eq(take_json(&second, most / 3, &b), KLD_BUSY);
    kld_staging_free(queued, a);
    ck_assert_int_eq(take_json(&second, most / 3, &b), KLD_OK);
    ck_assert_int_eq(take_json(&third, 1 << 20, &c), KLD_OK);
    kld_staging_free(queued, b);
    kld_staging_free(queued, c);
    ck_assert_int_eq(take_json(&first, most - 4096, &a), KLD_OK); /* alone: all that it needs */
    kld_staging_close(queued);
}
END_TEST

START_TEST(json_of_one_caller_leaves_some_for_others) {
    struct kld_staging_share one = {{0}}, two = {{0}};
    struct kld_staging_turn first = {.share = &one, .capped = true}, second = first, third = first,
                            other = {.share = &two, .capped = true};
    uint64_t most, a, b, c, more, small;
    ck_assert_int_eq(kld_staging_open(STAGING, NULL, &queued, NULL), KLD_OK);
    most = kld_staging_range_bytes_max(queued);
    ck_assert_int_eq(take_json(&first, most / 5, &a), KLD_OK);
    ck_assert_int_eq(take_json(&second, most / 10, &b), KLD_THROTTLED);
    ck_assert(!second.queued);
    ck_assert_int_eq(take_json(&second, most / 25, &b), KLD_OK);
    ck_assert_int_eq(take_json(&other, most / 5, &c), KLD_OK);
    ck_assert_int_eq(take(&second, most / 4, &more), KLD_OK); /* tensors are something else */
    kld_staging_free(queued, more);
    ck_assert_int_eq(take_json(&third, 1000, &small), KLD_OK); /* and so are small ones */
    ck_assert_int_eq(take_json(&first, most / 5, &more), KLD_THROTTLED);
    kld_staging_free(queued, b);
    ck_assert_int_eq(take_json(&first, most / 5, &more), KLD_OK); /* alone: what it needs */
    ck_assert_int_eq(take_json(&third, most / 5, &b), KLD_THROTTLED);
    third.capped = false; /* there is nobody else any more */
    ck_assert_int_eq(take_json(&third, most / 5, &b), KLD_BUSY);
    kld_staging_leave(queued, &third);
    kld_staging_free(queued, small);
    kld_staging_free(queued, more);
    kld_staging_free(queued, a);
    kld_staging_free(queued, c);
    for (int i = 0; i < 2; i++)
        ck_assert_uint_eq(one.json_bytes[i] | two.json_bytes[i] | first.json_bytes[i], 0);
    kld_staging_close(queued);
}
END_TEST

START_TEST(who_would_wait_for_each_other_are_not_left_to_it) {
    struct kld_staging_turn first = {.queued = false}, second = first, third = first;
    uint64_t a, b, c, more;
    ck_assert_int_eq(kld_staging_open(4096, NULL, &queued, NULL), KLD_OK);
    ck_assert_int_eq(take(&first, 1024, &a), KLD_OK);
    ck_assert_int_eq(take(&second, 1024, &b), KLD_OK);
    ck_assert_int_eq(take(&third, 1024, &c), KLD_OK);
    ck_assert_int_eq(take(&first, 2048, &more), KLD_BUSY);
    ck_assert_int_eq(take(&second, 3072, &more), KLD_BUSY); /* the third may yet end */
    kld_staging_free(queued, c);
    ck_assert_int_eq(take(&second, 3072, &more), KLD_BUSY); /* and now the first gets on */
    ck_assert_int_eq(take(&first, 2048, &more), KLD_OK);
    ck_assert_int_eq(take(&second, 3072, &c), KLD_BUSY);
    ck_assert_int_eq(take(&first, 2048, &c), KLD_UNAVAILABLE);
    ck_assert(!first.queued && second.queued);
    kld_staging_free(queued, a);
    kld_staging_free(queued, more);
    ck_assert_int_eq(take(&second, 2048, &c), KLD_OK);
    kld_staging_close(queued);
}
END_TEST

START_TEST(small_ones_do_not_wait_for_large_ones) {
    struct kld_staging_turn large = {.queued = false}, small = large, more = large;
    uint64_t a, b, most;
    ck_assert_int_eq(kld_staging_open(STAGING, NULL, &queued, NULL), KLD_OK);
    most = kld_staging_range_bytes_max(queued);
    ck_assert_uint_lt(most, STAGING);
    ck_assert_int_eq(kld_staging_alloc(queued, most + 1, &a, NULL), KLD_TOO_LARGE);
    ck_assert_int_eq(take(&large, most, &a), KLD_OK);
    ck_assert_int_eq(take(&more, most, &b), KLD_BUSY);
    uint64_t count = 0, last = 0;
    struct kld_staging_turn many = {.queued = false};
    while (take(&many, KLD_STAGING_SMALL_BYTES, &b) == KLD_OK) {
        ck_assert_uint_ge(b, most);
        last = b;
        count++;
    }
    kld_staging_leave(queued, &many);
    ck_assert_uint_eq(count, (STAGING - most) / KLD_STAGING_SMALL_BYTES);
    kld_staging_free(queued, last);
    ck_assert_uint_eq(kld_staging_used_bytes(queued), most + (count - 1) * KLD_STAGING_SMALL_BYTES);
    kld_staging_free(queued, a);
    /* Who has a small one only is a newcomer among the large. */
    small.has[1] = true;
    ck_assert_int_eq(take(&small, most, &b), KLD_BUSY);
    ck_assert_int_eq(take(&more, most, &b), KLD_OK);
    kld_staging_close(queued);
}
END_TEST

UNIT_MAIN("server/gateway/staging", memory_is_sealed_and_zeroed,
          full_is_busy_and_more_than_all_is_too_large, ranges_never_overlap_and_coalesce,
          many_in_use_cost_what_few_do, no_newcomer_overtakes,
          who_has_some_gets_more_before_newcomers, who_would_wait_for_himself_is_told,
          who_has_a_small_one_alone_waits_for_large_ones, json_leaves_half_for_tensors,
          json_of_one_caller_leaves_some_for_others,
          who_would_wait_for_each_other_are_not_left_to_it, small_ones_do_not_wait_for_large_ones)
