/* inside.h - what machine.c and memory.c share: runners of blocks, and the threads of a block. Each
 * block's own thread, but for what a cluster has a lock for. */
#ifndef KLD_TESTS_EMULATE_INSIDE_H
#define KLD_TESTS_EMULATE_INSIDE_H

#include <pthread.h>
#include <setjmp.h>
#include <stdbool.h>
#include <ucontext.h>

#include "tests/emulate/machine.h"

#define STACK_BYTES ((size_t)256 << 10)
#define BLOCK_STACK_BYTES ((size_t)256 << 20) /* the C library keeps __thread variables there */
#define SIDE_BY_SIDE 2                        /* blocks that are no cluster */
#define WARPS (EMULATE_THREADS_MAX / EMULATE_WARP)
#define MASKS 16 /* of a warp, different ones that lanes meet by */
#define NAMES 4
#define COPIES 64 /* of a thread, on their way */
#define BULKS 256 /* of a block */
#define STUCK_S 60
#define EMULATE_GARBAGE 0xa5 /* what shared memory holds before anybody writes to it */

struct copy {
    void *to;
    const void *from;
    uint32_t bytes, size;
    uint64_t *barrier; /* in bulk */
    uint32_t group;
};

struct thread {
    struct emulate_place place;
    jmp_buf at;
    void *stack;
    bool begun, ended;
    const char *waits_for; /* where it is not NULL: while (*watched & bits) == value */
    const uint64_t *watched;
    uint64_t bits, value;
    uint32_t groups, copies; /* ended so far; on their way, oldest first */
    struct copy copy[COPIES];
};

struct meeting {
    uint32_t mask, arrived;
    uint64_t times;
    const char *what;
    struct emulate_met met[2]; /* of this time, and of the one before */
};

struct warp {
    uint32_t ended;
    unsigned meetings;
    struct meeting meeting[MASKS];
};

struct named {
    uint32_t arrived;
    uint64_t times;
};

struct cluster {
    uint32_t size;
    pthread_mutex_t lock; /* the next three */
    uint32_t arrived, ended;
    uint64_t times;
    pthread_barrier_t turn; /* all its blocks have begun, or ended */
    unsigned char *anchor[EMULATE_CLUSTER_MAX];
};

/* One that runs blocks. Its own thread's. */
struct runner {
    pthread_t id;
    uint32_t number;
    struct cluster *cluster; /* the machine's, or `alone` */
    struct cluster alone;
    struct thread *thread; /* [EMULATE_THREADS_MAX] */
    struct warp warp[WARPS];
    struct named named[NAMES];
    struct copy bulk[BULKS];
    uint32_t bulks;
    uint32_t threads, current;
    uint64_t moves; /* each that something has become of */
    uint64_t random;
    jmp_buf at;
    ucontext_t context;
};

extern __thread struct runner *emulate_me;

struct thread *emulate_current(void);
uint32_t emulate_draw(uint32_t below);
/* Says what is wrong and where everybody is, and ends the program. */
_Noreturn void emulate_give_up(const char *what);
/* While those bits of what another thread changes have this value. */
void emulate_wait_while(const uint64_t *watched, uint64_t bits, uint64_t value, const char *why);
/* One of the copies in bulk that are on their way, if there are any. */
bool emulate_make_a_bulk(void);

#endif
