/* machine.c - see machine.h. Each block's own thread, but for emulate_run(): any one, one at a
 * time. */
#undef _FORTIFY_SOURCE /* its longjmp() takes another stack for a frame that has gone */

#include "tests/emulate/machine.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#define STACK_BYTES ((size_t)256 << 10)
#define BLOCK_STACK_BYTES ((size_t)256 << 20) /* the C library keeps __thread variables there */
#define SIDE_BY_SIDE 2                        /* blocks that are no cluster */
#define WARPS (EMULATE_THREADS_MAX / EMULATE_WARP)
#define MASKS 16 /* of a warp, different ones that lanes meet by */
#define NAMES 16
#define COPIES 64 /* of a thread, on their way */
#define BULKS 256 /* of a block */
#define STUCK_S 60
#define GARBAGE 0xa5 /* what shared memory holds before anybody writes to it */

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
    uint64_t value[2][EMULATE_WARP]; /* of this time, and of the one before */
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

static struct machine {
    pthread_mutex_t lock;
    pthread_cond_t begun, done;
    uint32_t runners, left;
    uint64_t number; /* of launches */
    uint32_t wanted; /* runners of this one */
    const struct emulate_launch *launch;
    _Atomic uint32_t next; /* block */
    struct cluster cluster;
    struct runner *runner[EMULATE_CLUSTER_MAX];
} machine = {.lock = PTHREAD_MUTEX_INITIALIZER,
             .begun = PTHREAD_COND_INITIALIZER,
             .done = PTHREAD_COND_INITIALIZER,
             .cluster.lock = PTHREAD_MUTEX_INITIALIZER};

__thread const struct emulate_place *emulate_here;
__thread __attribute__((aligned(1024))) unsigned char emulate_shared[EMULATE_SHARED_MAX];
static __thread struct runner *me;

static struct thread *current(void) { return &me->thread[me->current]; }

static uint32_t draw(uint32_t below) {
    me->random ^= me->random << 13;
    me->random ^= me->random >> 7;
    me->random ^= me->random << 17;
    return (uint32_t)((me->random >> 16) % below);
}

static const char *state_of(const struct thread *thread) {
    return thread->ended ? "ended" : thread->waits_for ? thread->waits_for : "runs";
}

/* The lanes of a warp, put together where they are in the same place. */
static void describe(const struct runner *runner, uint32_t first) {
    uint32_t told = 0;
    for (uint32_t lane = 0; lane < EMULATE_WARP && first + lane < runner->threads; lane++) {
        const struct thread *thread = &runner->thread[first + lane];
        uint32_t same = 0;
        if (told >> lane & 1)
            continue;
        for (uint32_t i = lane; i < EMULATE_WARP && first + i < runner->threads; i++)
            if (strcmp(state_of(&runner->thread[first + i]), state_of(thread)) == 0)
                same |= 1u << i;
        told |= same;
        fprintf(stderr, "  block %u warp %u lanes %08x: %s", thread->place.block.x,
                first / EMULATE_WARP, same, state_of(thread));
        if (!thread->ended && thread->waits_for)
            fprintf(stderr, " (%p: %016llx)", (const void *)thread->watched,
                    (unsigned long long)*thread->watched);
        fprintf(stderr, "\n");
    }
}

static void give_up(const char *what) {
    fprintf(stderr, "emulated kernel: %s\n", what);
    for (uint32_t number = 0; number < machine.wanted; number++)
        for (uint32_t first = 0; first < machine.runner[number]->threads; first += EMULATE_WARP)
            describe(machine.runner[number], first);
    abort();
}

/* ---- Threads of a block -----------------------------------------------------------------------
 */

static bool waits(const struct thread *thread) {
    return thread->waits_for &&
           (__atomic_load_n(thread->watched, __ATOMIC_SEQ_CST) & thread->bits) == thread->value;
}

/* While those bits of what another thread changes have this value. */
static void wait_while(const uint64_t *watched, uint64_t bits, uint64_t value, const char *why) {
    struct thread *thread = current();
    thread->watched = watched;
    thread->bits = bits;
    thread->value = value;
    thread->waits_for = why;
    if (waits(thread) && !_setjmp(thread->at))
        _longjmp(me->at, 1);
    thread->waits_for = NULL;
}

/* Of the cluster; who has ended is not waited for. Returns how often all have met before. */
static uint64_t count_of_cluster(bool ended) {
    struct cluster *cluster = me->cluster;
    pthread_mutex_lock(&cluster->lock);
    uint64_t times = cluster->times;
    if (ended)
        cluster->ended++;
    else
        cluster->arrived++;
    if (cluster->arrived && cluster->arrived + cluster->ended == cluster->size * me->threads) {
        cluster->arrived = 0;
        __atomic_fetch_add(&cluster->times, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&cluster->lock);
    return times;
}

static bool all_there(struct warp *warp, struct meeting *meeting);

static void end_of_thread(struct thread *thread) {
    uint32_t lane = thread->place.thread.x % EMULATE_WARP;
    struct warp *warp = &me->warp[thread->place.thread.x / EMULATE_WARP];
    thread->ended = true;
    thread->copies = 0;
    warp->ended |= 1u << lane;
    me->moves++;
    count_of_cluster(true);
    for (unsigned i = 0; i < warp->meetings; i++)
        if (warp->meeting[i].arrived)
            all_there(warp, &warp->meeting[i]);
}

static void enter(void) {
    machine.launch->run(machine.launch->user);
    end_of_thread(current());
    _longjmp(me->at, 1);
}

/* Until it waits. */
static void step(uint32_t number) {
    struct thread *thread = &me->thread[number];
    me->current = number;
    emulate_here = &thread->place;
    if (_setjmp(me->at))
        return;
    if (thread->begun)
        _longjmp(thread->at, 1);
    thread->begun = true;
    getcontext(&me->context);
    me->context.uc_stack.ss_sp = thread->stack;
    me->context.uc_stack.ss_size = STACK_BYTES;
    me->context.uc_link = NULL;
    makecontext(&me->context, enter, 0);
    setcontext(&me->context);
}

static void make(const struct copy *copy) {
    memcpy(copy->to, copy->from, copy->bytes);
    memset((char *)copy->to + copy->bytes, 0, copy->size - copy->bytes);
    if (copy->barrier)
        emulate_barrier_complete(copy->barrier, copy->bytes);
    me->moves++;
}

static bool make_a_bulk(void) {
    if (!me->bulks)
        return false;
    uint32_t which = draw(me->bulks);
    struct copy copy = me->bulk[which];
    me->bulk[which] = me->bulk[--me->bulks];
    make(&copy);
    return true;
}

static uint64_t seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec;
}

static void run_block(void) {
    uint64_t since = 0;
    for (uint32_t left = me->threads; left;) {
        uint64_t moves = me->moves;
        uint32_t first = draw(me->threads);
        bool backwards = draw(2);
        for (uint32_t i = 0; i < me->threads; i++) {
            uint32_t number = (first + (backwards ? me->threads - i : i)) % me->threads;
            if (me->thread[number].ended || waits(&me->thread[number]))
                continue;
            step(number);
            left -= me->thread[number].ended;
        }
        if (me->moves != moves || make_a_bulk()) {
            since = 0;
            continue;
        }
        if (!since)
            since = seconds();
        if (me->cluster->size == 1 || seconds() - since > STUCK_S)
            give_up("nobody can go on");
        sched_yield();
    }
    while (make_a_bulk()) {
    }
}

static void open_block(uint32_t block) {
    const struct emulate_launch *launch = machine.launch;
    me->threads = launch->threads.x;
    me->bulks = 0;
    memset(me->warp, 0, sizeof me->warp);
    memset(me->named, 0, sizeof me->named);
    memset(emulate_shared, GARBAGE, sizeof emulate_shared);
    for (uint32_t i = 0; i < me->threads; i++) {
        struct thread *thread = &me->thread[i];
        thread->place.thread = (struct emulate_size){i, 0, 0};
        thread->place.block = (struct emulate_size){block, 0, 0};
        thread->place.threads = launch->threads;
        thread->place.blocks = launch->blocks;
        thread->place.rank = block % launch->cluster;
        thread->begun = thread->ended = false;
        thread->waits_for = NULL;
        thread->groups = thread->copies = 0;
    }
    for (uint32_t i = me->threads; i % EMULATE_WARP; i++)
        me->warp[i / EMULATE_WARP].ended |= 1u << i % EMULATE_WARP;
}

/* ---- Blocks -----------------------------------------------------------------------------------
 */

static void run_cluster(uint32_t rank) {
    me->cluster = &machine.cluster;
    for (uint32_t first = 0; first < machine.launch->blocks.x; first += me->cluster->size) {
        open_block(first + rank);
        me->cluster->anchor[rank] = emulate_shared;
        if (rank == 0)
            me->cluster->ended = 0;
        pthread_barrier_wait(&me->cluster->turn);
        run_block();
        pthread_barrier_wait(&me->cluster->turn);
    }
}

static void run_blocks(void) {
    uint32_t block;
    me->cluster = &me->alone;
    while ((block = atomic_fetch_add(&machine.next, 1)) < machine.launch->blocks.x) {
        open_block(block);
        me->alone.ended = 0;
        run_block();
    }
}

static void *serve(void *user) {
    uint64_t number = 0;
    me = user;
    for (;;) {
        pthread_mutex_lock(&machine.lock);
        while (machine.number == number || me->number >= machine.wanted)
            pthread_cond_wait(&machine.begun, &machine.lock);
        number = machine.number;
        pthread_mutex_unlock(&machine.lock);
        if (machine.cluster.size > 1)
            run_cluster(me->number);
        else
            run_blocks();
        pthread_mutex_lock(&machine.lock);
        if (--machine.left == 0)
            pthread_cond_signal(&machine.done);
        pthread_mutex_unlock(&machine.lock);
    }
    return NULL;
}

static void add_runner(void) {
    struct runner *runner = calloc(1, sizeof *runner);
    size_t bytes = EMULATE_THREADS_MAX * STACK_BYTES;
    char *stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pthread_attr_t attributes;
    if (!runner || stacks == MAP_FAILED)
        give_up("no memory");
    runner->thread = calloc(EMULATE_THREADS_MAX, sizeof *runner->thread);
    if (!runner->thread)
        give_up("no memory");
    for (size_t i = 0; i < EMULATE_THREADS_MAX; i++)
        runner->thread[i].stack = stacks + i * STACK_BYTES;
    runner->number = machine.runners;
    runner->alone.size = 1;
    pthread_mutex_init(&runner->alone.lock, NULL);
    const char *seed = getenv("KLD_EMULATE_SEED");
    runner->random =
        (seed ? strtoull(seed, NULL, 0) : 1) * 0x9e3779b97f4a7c15u + runner->number + 1;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, BLOCK_STACK_BYTES);
    if (pthread_create(&runner->id, &attributes, serve, runner) != 0)
        give_up("no thread");
    pthread_attr_destroy(&attributes);
    machine.runner[machine.runners++] = runner;
}

int emulate_run(const struct emulate_launch *launch) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    uint32_t cluster = launch->cluster;
    if (!launch->threads.x || launch->threads.x > EMULATE_THREADS_MAX || !launch->blocks.x ||
        launch->threads.y > 1 || launch->blocks.y > 1 || !cluster ||
        cluster > EMULATE_CLUSTER_MAX || launch->blocks.x % cluster ||
        launch->shared_bytes > EMULATE_SHARED_MAX)
        return 9;
    pthread_mutex_lock(&one);
    pthread_mutex_lock(&machine.lock);
    machine.launch = launch;
    machine.cluster.size = cluster;
    atomic_store(&machine.next, 0);
    machine.wanted = cluster > 1 ? cluster : launch->blocks.x < SIDE_BY_SIDE ? 1 : SIDE_BY_SIDE;
    while (machine.runners < machine.wanted)
        add_runner();
    pthread_barrier_init(&machine.cluster.turn, NULL, cluster);
    machine.left = machine.wanted;
    machine.number++;
    pthread_cond_broadcast(&machine.begun);
    while (machine.left)
        pthread_cond_wait(&machine.done, &machine.lock);
    pthread_mutex_unlock(&machine.lock);
    pthread_barrier_destroy(&machine.cluster.turn);
    pthread_mutex_unlock(&one);
    return 0;
}

/* ---- Meeting ----------------------------------------------------------------------------------
 */

static struct meeting *meeting_of(struct warp *warp, uint32_t mask) {
    for (unsigned i = 0; i < warp->meetings; i++)
        if (warp->meeting[i].mask == mask)
            return &warp->meeting[i];
    if (warp->meetings == MASKS)
        give_up("too many different masks of lanes");
    warp->meeting[warp->meetings].mask = mask;
    return &warp->meeting[warp->meetings++];
}

static bool all_there(struct warp *warp, struct meeting *meeting) {
    if (((meeting->arrived | warp->ended) & meeting->mask) != meeting->mask)
        return false;
    meeting->arrived = 0;
    meeting->times++;
    me->moves++;
    return true;
}

const uint64_t *emulate_meet(uint32_t mask, const char *what, uint64_t value) {
    uint32_t lane = emulate_here->thread.x % EMULATE_WARP;
    struct warp *warp = &me->warp[emulate_here->thread.x / EMULATE_WARP];
    struct meeting *meeting = meeting_of(warp, mask);
    if (!(mask >> lane & 1))
        give_up("a lane that is not of its own mask");
    if (meeting->arrived && meeting->what != what && strcmp(meeting->what, what) != 0)
        give_up("lanes that meet in different places");
    uint64_t time = meeting->times;
    meeting->what = what;
    meeting->value[time & 1][lane] = value;
    meeting->arrived |= 1u << lane;
    if (!all_there(warp, meeting))
        wait_while(&meeting->times, UINT64_MAX, time, what);
    return meeting->value[time & 1];
}

void emulate_block_sync(unsigned name, uint32_t threads) {
    struct named *named = &me->named[name];
    uint64_t time = named->times;
    if (threads % EMULATE_WARP || threads > me->threads)
        give_up("a barrier of no whole number of warps");
    emulate_meet(UINT32_MAX, "bar.sync", 0);
    if (++named->arrived == threads) {
        named->arrived = 0;
        named->times++;
        me->moves++;
    }
    wait_while(&named->times, UINT64_MAX, time, "bar.sync");
}

void emulate_cluster_sync(void) {
    emulate_meet(UINT32_MAX, "barrier.cluster", 0);
    uint64_t times = count_of_cluster(false);
    wait_while(&me->cluster->times, UINT64_MAX, times, "barrier.cluster");
    me->moves++;
}

/* ---- Addresses ---------------------------------------------------------------------------------
 */

uint32_t emulate_shared_at(const void *at) {
    ptrdiff_t offset = (const unsigned char *)at - emulate_shared;
    if (offset != (int32_t)offset)
        give_up("an address that is not of shared memory");
    return (uint32_t)offset;
}
void *emulate_shared_of(uint32_t at) { return emulate_shared + (int32_t)at; }
void *emulate_of_rank(const void *at, uint32_t rank) {
    if (rank >= me->cluster->size)
        give_up("a block that is not of this cluster");
    unsigned char *anchor = me->cluster->size == 1 ? emulate_shared : me->cluster->anchor[rank];
    return anchor + ((const unsigned char *)at - emulate_shared);
}

/* ---- Barriers in shared memory ------------------------------------------------------------------
 */

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
            give_up("more arrivals than a barrier has");
        uint32_t missing = MISSING(old) - arrivals, parity = PARITY(old);
        uint64_t left = BYTES(old) + (uint64_t)bytes;
        if (missing == 0 && left == NO_BYTES) {
            missing = COUNT(old);
            parity ^= 1;
        }
        new = packed(COUNT(old), missing, left, parity);
    } while (!atomic_compare_exchange_weak(at, &old, new));
    me->moves++;
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
    wait_while(barrier, (uint64_t)1 << 63, (uint64_t)(parity & 1) << 63, "mbarrier");
    me->moves++;
}

/* ---- Copies -------------------------------------------------------------------------------------
 */

static void make_oldest(struct thread *thread) {
    struct copy copy = thread->copy[0];
    memmove(thread->copy, thread->copy + 1, --thread->copies * sizeof copy);
    make(&copy);
}

void emulate_copy(void *to, const void *from, uint32_t bytes, uint32_t size) {
    struct thread *thread = current();
    if (((uintptr_t)to | (uintptr_t)from) % size)
        give_up("a copy that is not aligned");
    if (thread->copies == COPIES)
        make_oldest(thread);
    thread->copy[thread->copies++] = (struct copy){to, from, bytes, size, NULL, thread->groups};
}
void emulate_copies_end(void) { current()->groups++; }
void emulate_copies_wait(uint32_t groups) {
    struct thread *thread = current();
    while (thread->copies && thread->groups - thread->copy[0].group > groups)
        make_oldest(thread);
}

void emulate_copy_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    struct copy copy = {to, from, bytes, bytes, barrier, 0};
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16)
        give_up("a copy in bulk that is not aligned");
    if (draw(2) || me->bulks == BULKS)
        make(&copy);
    else
        me->bulk[me->bulks++] = copy;
}
