/* test_queue.c - the pool never gives more than it has, and the heap keeps its order whatever is
 * taken out of it. */
#include "server/worker/queue.h"

#include "tests/unit/unit.h"

#define MAX 200

START_TEST(pool_is_bounded_and_gives_again) {
    struct kld_queue queue;
    struct kld_error err;
    struct kld_request *taken[3];
    ck_assert_int_eq(kld_queue_init(&queue, 3, &err), KLD_OK);
    for (int i = 0; i < 3; i++)
        ck_assert_ptr_nonnull(taken[i] = kld_queue_acquire(&queue));
    ck_assert(taken[0] != taken[1] && taken[1] != taken[2] && taken[0] != taken[2]);
    ck_assert_ptr_null(kld_queue_acquire(&queue));
    ck_assert_uint_eq(queue.in_use, 3);
    taken[1]->deadline_ns = 5;
    taken[1]->answered = true;
    kld_queue_release(&queue, taken[1]);
    struct kld_request *again = kld_queue_acquire(&queue);
    ck_assert_ptr_eq(again, taken[1]);
    ck_assert_uint_eq(again->deadline_ns, 0);
    ck_assert(!again->answered);
    kld_queue_done(&queue);
}
END_TEST

START_TEST(heap_keeps_order_under_random_removal) {
    struct kld_queue queue;
    struct kld_error err;
    struct kld_request *all[MAX];
    ck_assert_int_eq(kld_queue_init(&queue, MAX, &err), KLD_OK);
    ck_assert_ptr_null(kld_queue_earliest(&queue));
    srand(1);
    for (int i = 0; i < MAX; i++) {
        all[i] = kld_queue_acquire(&queue);
        all[i]->deadline_ns = 1 + (uint64_t)(rand() % 50);
        kld_queue_watch(&queue, all[i]);
    }
    for (int i = 0; i < MAX; i += 3) {
        kld_queue_unwatch(&queue, all[i]);
        kld_queue_unwatch(&queue, all[i]); /* not being there is allowed */
        ck_assert_uint_eq(all[i]->heap_place, 0);
    }
    uint64_t last = 0;
    int seen = 0;
    for (struct kld_request *first; (first = kld_queue_earliest(&queue)); seen++) {
        ck_assert_uint_ge(first->deadline_ns, last);
        last = first->deadline_ns;
        kld_queue_unwatch(&queue, first);
    }
    ck_assert_int_eq(seen, MAX - (MAX + 2) / 3);
    kld_queue_done(&queue);
}
END_TEST

UNIT_MAIN("server/worker/queue", pool_is_bounded_and_gives_again,
          heap_keeps_order_under_random_removal)
