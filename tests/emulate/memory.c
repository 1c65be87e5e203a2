/* memory.c - addresses, barriers in shared memory, copies in the background: see machine.h. Each
 * block's own thread. */
#include <stdatomic.h>
#include <string.h>

#include "tests/emulate/inside.h"

/* ---- Addresses ------------------------------------------------------------------------------ */

uint32_t emulate_shared_at(const void *at) {
    ptrdiff_t offset = (const unsigned char *)at - emulate_shared;
    if (offset != (int32_t)offset)
        emulate_give_up("an address that is not of shared memory");
    return (uint32_t)offset;
}
void *emulate_shared_of(uint32_t at) { return emulate_shared + (int32_t)at; }
void *emulate_of_rank(const void *at, uint32_t rank) {
    if (rank >= emulate_me->cluster->size)
        emulate_give_up("a block that is not of this cluster");
    unsigned char *anchor =
        emulate_me->cluster->size == 1 ? emulate_shared : emulate_me->cluster->anchor[rank];
    return anchor + ((const unsigned char *)at - emulate_shared);
}

/* ---- Barriers in shared memory -------------------------------------------------------------- */

/* Bits: 0 to 15 arrivals of a phase, 16 to 31 those that are missing, 32 to 62 bytes that are
 * missing with an offset, 63 the phase's parity. */
#define COUNT(x) ((uint32_t)(x)&0xffff)
#define MISSING(x) ((uint32_t)((x) >> 16) & 0xffff)
#define NO_BYTES ((uint64_t)1 << 30)
#define BYTES(x) ((x) >> 32 & 0x7fffffff)
#define PARITY(x) ((uint32_t)((x) >> 63))

static uint64_t packed(uint32_t count, uint32_t missing, uint64_t bytes, uint32_t parity) {
    return count | (uint64_t)missing << 16 | bytes << 32 | (uint64_t)parity << 63;
}

static void change(uint64_t *barrier, uint32_t arrivals, int64_t bytes) {
    _Atomic uint64_t *at = (_Atomic uint64_t *)barrier;
    uint64_t old = atomic_load(at), new;
    do {
        if (MISSING(old) < arrivals)
            emulate_give_up("more arrivals than a barrier has");
        uint32_t missing = MISSING(old) - arrivals, parity = PARITY(old);
        uint64_t left = BYTES(old) + (uint64_t)bytes;
        if (missing == 0 && left == NO_BYTES) {
            missing = COUNT(old);
            parity ^= 1;
        }
        new = packed(COUNT(old), missing, left, parity);
    } while (!atomic_compare_exchange_weak(at, &old, new));
    emulate_me->moves++;
}

void emulate_barrier_init(uint64_t *barrier, uint32_t count) {
    atomic_store((_Atomic uint64_t *)barrier, packed(count, count, NO_BYTES, 0));
}
void emulate_barrier_arrive(uint64_t *barrier, uint32_t expected_bytes) {
    if (expected_bytes)
        change(barrier, 0, expected_bytes);
    change(barrier, 1, 0);
}
void emulate_barrier_complete(uint64_t *barrier, uint32_t bytes) {
    change(barrier, 0, -(int64_t)bytes);
}
/* The phase of a parity is over when the barrier is in one of the other. */
void emulate_barrier_wait(uint64_t *barrier, uint32_t parity) {
    emulate_wait_while(barrier, (uint64_t)1 << 63, (uint64_t)(parity & 1) << 63, "mbarrier");
    emulate_me->moves++;
}

/* ---- Copies --------------------------------------------------------------------------------- */

static void make(const struct copy *copy) {
    memcpy(copy->to, copy->from, copy->bytes);
    memset((char *)copy->to + copy->bytes, 0, copy->size - copy->bytes);
    if (copy->barrier)
        emulate_barrier_complete(copy->barrier, copy->bytes);
    emulate_me->moves++;
}

bool emulate_make_a_bulk(void) {
    if (!emulate_me->bulks)
        return false;
    uint32_t which = emulate_draw(emulate_me->bulks);
    struct copy copy = emulate_me->bulk[which];
    emulate_me->bulk[which] = emulate_me->bulk[--emulate_me->bulks];
    make(&copy);
    return true;
}

static void make_oldest(struct thread *thread) {
    struct copy copy = thread->copy[0];
    memmove(thread->copy, thread->copy + 1, --thread->copies * sizeof copy);
    make(&copy);
}

void emulate_copy(void *to, const void *from, uint32_t bytes, uint32_t size) {
    struct thread *thread = emulate_current();
    if (((uintptr_t)to | (uintptr_t)from) % size)
        emulate_give_up("a copy that is not aligned");
    if (thread->copies == COPIES)
        make_oldest(thread);
    thread->copy[thread->copies++] = (struct copy){to, from, bytes, size, NULL, thread->groups};
}
void emulate_copies_end(void) { emulate_current()->groups++; }
void emulate_copies_wait(uint32_t groups) {
    struct thread *thread = emulate_current();
    while (thread->copies && thread->groups - thread->copy[0].group > groups)
        make_oldest(thread);
}

void emulate_copy_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    struct copy copy = {to, from, bytes, bytes, barrier, 0};
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16)
        emulate_give_up("a copy in bulk that is not aligned");
    if (emulate_draw(2) || emulate_me->bulks == BULKS)
        make(&copy);
    else
        emulate_me->bulk[emulate_me->bulks++] = copy;
}
