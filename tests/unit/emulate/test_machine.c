/* test_machine.c - the threads of emulated kernels: meet, wait, copy in the background, and do not
 * get away with what a card would not forgive. */
#undef _FORTIFY_SOURCE /* as in machine.c, before anybody includes setjmp.h */

#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/unit.h"

#include "tests/emulate/machine.c"
#include "tests/emulate/memory.c"

#define LAUNCHED_BYTES 4096

static int run(uint32_t blocks, uint32_t cluster, uint32_t threads, void (*kernel)(void *user),
               void *user) {
    struct emulate_launch launch = {.threads = {threads, 1, 1},
                                    .blocks = {blocks, 1, 1},
                                    .cluster = cluster,
                                    .shared_bytes = LAUNCHED_BYTES,
                                    .run = kernel,
                                    .user = user};
    return emulate_run(&launch);
}
static bool aborts(void (*kernel)(void *user), uint32_t threads) {
    int status = 0;
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        run(1, 1, threads, kernel, NULL);
        _exit(0);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}
static uint32_t number(void) { return emulate_here->thread.x; }

/* ---- Lanes ---------------------------------------------------------------------------------- */

static void add_lanes(void *user) {
    uint64_t *sums = user;
    for (uint64_t time = 0; time < 3; time++) {
        const uint64_t *all = emulate_meet(UINT32_MAX, "sum", number() + time)->value;
        uint64_t sum = 0;
        for (int lane = 0; lane < 32; lane++)
            sum += all[lane];
        sums[emulate_here->block.x * 64 + number()] += sum;
    }
}

START_TEST(lanes_meet_each_time) {
    uint64_t sums[5 * 64] = {0};
    ck_assert_int_eq(run(5, 1, 64, add_lanes, sums), 0);
    for (int i = 0; i < 5 * 64; i++)
        ck_assert_uint_eq(sums[i], i % 64 < 32 ? 3 * 496 + 3 * 32 : 3 * (496 + 1024) + 3 * 32);
}
END_TEST

static void add_halves(void *user) {
    uint64_t *sums = user;
    uint32_t half = number() < 16 ? 0xffff : 0xffff0000;
    for (uint32_t time = 0; time < (number() < 16 ? 5 : 2); time++) {
        const uint64_t *all = emulate_meet(half, "half", 1)->value;
        for (int lane = 0; lane < 32; lane++)
            sums[number()] += half >> lane & 1 ? all[lane] : 0;
    }
}

START_TEST(halves_of_a_warp_meet_as_often_as_they_like) {
    uint64_t sums[32] = {0};
    ck_assert_int_eq(run(1, 1, 32, add_halves, sums), 0);
    for (int i = 0; i < 32; i++)
        ck_assert_uint_eq(sums[i], i < 16 ? 80 : 32);
}
END_TEST

static void meet_elsewhere(void *user) {
    emulate_meet(UINT32_MAX, number() == 7 ? "there" : "here", 0);
}
static void ask_who_has_left(void *user) {
    if (number() == 5)
        return;
    const struct emulate_met *met = emulate_meet(UINT32_MAX, "ask", 0);
    if (met->lanes != ~(1u << 5))
        _exit(1);
    emulate_value_of(met, 4);
    if (number() == 6)
        emulate_value_of(met, 5);
}
START_TEST(a_value_of_a_lane_that_has_left_ends_it) { ck_assert(aborts(ask_who_has_left, 32)); }
END_TEST

START_TEST(lanes_that_meet_in_different_places_end_it) { ck_assert(aborts(meet_elsewhere, 32)); }
END_TEST

static void leave_one_alone(void *user) {
    if (number() < 32)
        emulate_block_sync(1, 64);
}
START_TEST(a_barrier_that_some_never_reach_ends_it) { ck_assert(aborts(leave_one_alone, 64)); }
END_TEST

/* ---- Blocks --------------------------------------------------------------------------------- */

static void part_of_block(void *user) {
    _Atomic int *seen = user;
    if (number() >= 96)
        return;
    atomic_fetch_add(seen, 1);
    emulate_block_sync(2, 96);
    if (number() == 0)
        ck_assert_int_eq(atomic_load(seen), 96);
}
START_TEST(a_part_of_a_block_waits_for_itself) {
    _Atomic int seen = 0;
    ck_assert_int_eq(run(1, 1, 128, part_of_block, &seen), 0);
}
END_TEST

static void pass_on(void *user) {
    _Atomic int *wrong = user;
    uint32_t *mine = (uint32_t *)emulate_shared;
    uint32_t next = (emulate_here->rank + 1) % 4;
    if (mine[number()] != EMULATE_GARBAGE * 0x01010101u)
        atomic_fetch_add(wrong, 1);
    emulate_cluster_sync();
    ((uint32_t *)emulate_of_rank(mine, next))[number()] = emulate_here->rank * 100 + number();
    emulate_cluster_sync();
    if (mine[number()] != (emulate_here->rank + 3) % 4 * 100 + number())
        atomic_fetch_add(wrong, 1);
}
START_TEST(blocks_of_a_cluster_write_to_each_other) {
    _Atomic int wrong = 0;
    ck_assert_int_eq(run(12, 4, 64, pass_on, &wrong), 0);
    ck_assert_int_eq(atomic_load(&wrong), 0);
}
END_TEST

/* Half of the threads of every second block. */
static void leave_before_the_others_meet(void *user) {
    _Atomic int *met = user;
    if (emulate_here->rank % 2 && number() >= 32)
        return;
    emulate_cluster_sync();
    atomic_fetch_add(met, 1);
    emulate_cluster_sync();
}
START_TEST(a_cluster_does_not_wait_for_who_has_ended) {
    _Atomic int met = 0;
    ck_assert_int_eq(run(8, 4, 64, leave_before_the_others_meet, &met), 0);
    ck_assert_int_eq(atomic_load(&met), 2 * (64 + 32 + 64 + 32));
    atomic_store(&met, 0); /* each by itself, two side by side */
    ck_assert_int_eq(run(8, 1, 64, leave_before_the_others_meet, &met), 0);
    ck_assert_int_eq(atomic_load(&met), 8 * 64);
}
END_TEST

START_TEST(what_no_card_takes) {
    ck_assert_int_eq(run(1, 1, EMULATE_THREADS_MAX + 1, add_lanes, NULL), 9);
    ck_assert_int_eq(run(0, 1, 32, add_lanes, NULL), 9);
    ck_assert_int_eq(run(3, 2, 32, add_lanes, NULL), 9);
    ck_assert_int_eq(run(32, 32, 32, add_lanes, NULL), 9);
}
END_TEST

/* ---- Copies --------------------------------------------------------------------------------- */

static _Alignas(16) uint32_t source[8] = {1, 2, 3, 4, 5, 6, 7, 8};

static void copy_late(void *user) {
    bool *fine = user;
    uint32_t *to = (uint32_t *)emulate_shared + 8 * number();
    emulate_copy(to, source, 16, 16);
    emulate_copies_end();
    emulate_copy(to + 4, source + 4, 8, 16);
    emulate_copies_end();
    bool late = to[0] != 1;
    emulate_copies_wait(1);
    bool first = to[3] == 4 && to[4] != 5;
    emulate_copies_wait(0);
    fine[number()] = late && first && to[5] == 6 && to[6] == 0 && to[7] == 0;
}
START_TEST(copies_land_when_they_are_waited_for) {
    bool fine[32] = {0};
    ck_assert_int_eq(run(1, 1, 32, copy_late, fine), 0);
    for (int i = 0; i < 32; i++)
        ck_assert(fine[i]);
}
END_TEST

/* The first thread brings, the second warp reads, a place for each of two rounds at a time. */
static void feed(void *user) {
    _Atomic int *wrong = user;
    uint64_t *full = (uint64_t *)emulate_shared, *empty = full + 2;
    uint32_t *place = (uint32_t *)(full + 4);
    if (number() == 0)
        for (int i = 0; i < 2; i++) {
            emulate_barrier_init(full + i, 1);
            emulate_barrier_init(empty + i, 32);
        }
    emulate_block_sync(0, 64);
    for (uint32_t turn = 0; turn < 9; turn++) {
        uint32_t which = turn % 2, parity = turn / 2 % 2;
        if (number() == 0) {
            if (turn >= 2)
                emulate_barrier_wait(empty + which, parity ^ 1);
            emulate_barrier_arrive(full + which, 32);
            emulate_copy_bulk(place + 8 * which, source, 16, full + which);
            emulate_copy_bulk(place + 8 * which + 4, source + 4, 16, full + which);
        } else if (number() >= 32) {
            emulate_barrier_wait(full + which, parity);
            if (place[8 * which + number() % 8] != 1 + number() % 8)
                atomic_fetch_add(wrong, 1);
            emulate_meet(UINT32_MAX, "read", 0);
            if (number() == 32)
                memset(place + 8 * which, 0, 32);
            emulate_meet(UINT32_MAX, "cleared", 0);
            emulate_barrier_arrive(empty + which, 0);
        }
    }
}
START_TEST(copies_in_bulk_end_a_phase) {
    _Atomic int wrong = 0;
    ck_assert_int_eq(run(3, 1, 64, feed, &wrong), 0);
    ck_assert_int_eq(atomic_load(&wrong), 0);
}
END_TEST

static void leave_a_copy(void *user) {
    uint64_t *full = (uint64_t *)emulate_shared;
    emulate_barrier_init(full, 1);
    emulate_barrier_arrive(full, 256);
    for (int i = 0; i < 16; i++)
        emulate_copy_bulk(emulate_shared + 16 + 16 * i, source, 16, full);
}
static void write_too_far(void *user) { emulate_shared[LAUNCHED_BYTES + number()] = 1; }
START_TEST(what_a_card_might_forgive_ends_it) {
    ck_assert(aborts(leave_a_copy, 1));
    ck_assert(aborts(write_too_far, 32));
}
END_TEST

static void look_too_early(void *user) {
    _Atomic int *early = user;
    uint64_t *full = (uint64_t *)emulate_shared;
    uint32_t *place = (uint32_t *)(full + 2);
    emulate_barrier_init(full, 1);
    emulate_barrier_arrive(full, 16);
    emulate_copy_bulk(place, source, 16, full);
    if (place[0] != 1)
        atomic_fetch_add(early, 1);
    emulate_barrier_wait(full, 0);
}
START_TEST(who_does_not_wait_finds_nothing_now_and_then) {
    _Atomic int early = 0;
    ck_assert_int_eq(run(100, 1, 1, look_too_early, &early), 0);
    ck_assert_int_gt(atomic_load(&early), 10);
    ck_assert_int_lt(atomic_load(&early), 90);
}
END_TEST

UNIT_MAIN("emulate/machine", lanes_meet_each_time, halves_of_a_warp_meet_as_often_as_they_like,
          a_value_of_a_lane_that_has_left_ends_it, lanes_that_meet_in_different_places_end_it,
          a_barrier_that_some_never_reach_ends_it, a_part_of_a_block_waits_for_itself,
          blocks_of_a_cluster_write_to_each_other, a_cluster_does_not_wait_for_who_has_ended,
          what_no_card_takes, copies_land_when_they_are_waited_for, copies_in_bulk_end_a_phase,
          what_a_card_might_forgive_ends_it, who_does_not_wait_finds_nothing_now_and_then)
