/* machine.c - see machine.h. Each block's own thread, but for emulate_run(): any one, one at a
 * time. */
#undef _FORTIFY_SOURCE /* its longjmp() takes another stack for a frame that has gone */

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tests/emulate/inside.h"

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
__thread struct runner *emulate_me;

struct thread *emulate_current(void) {
    return &emulate_me->thread[emulate_me->current];
}

uint32_t emulate_draw(uint32_t below) {
    emulate_me->random ^= emulate_me->random << 13;
    emulate_me->random ^= emulate_me->random >> 7;
    emulate_me->random ^= emulate_me->random << 17;
    return (uint32_t)((emulate_me->random >> 16) % below);
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

void emulate_give_up(const char *what) {
    fprintf(stderr, "emulated kernel: %s\n", what);
    for (uint32_t number = 0; number < machine.wanted && number < machine.runners; number++)
        for (uint32_t first = 0; first < machine.runner[number]->threads; first += EMULATE_WARP)
            describe(machine.runner[number], first);
    abort();
}

/* ---- Threads of a block --------------------------------------------------------------------- */

static bool waits(const struct thread *thread) {
    return thread->waits_for &&
           (__atomic_load_n(thread->watched, __ATOMIC_SEQ_CST) & thread->bits) == thread->value;
}

/* While those bits of what another thread changes have this value. */
void emulate_wait_while(const uint64_t *watched, uint64_t bits, uint64_t value, const char *why) {
    struct thread *thread = emulate_current();
    thread->watched = watched;
    thread->bits = bits;
    thread->value = value;
    thread->waits_for = why;
    if (waits(thread) && !_setjmp(thread->at))
        _longjmp(emulate_me->at, 1);
    thread->waits_for = NULL;
}

/* Of the cluster; who has ended is not waited for. Returns how often all have met before. */
static uint64_t count_of_cluster(bool ended) {
    struct cluster *cluster = emulate_me->cluster;
    pthread_mutex_lock(&cluster->lock);
    uint64_t times = cluster->times;
    if (ended)
        cluster->ended++;
    else
        cluster->arrived++;
    if (cluster->arrived &&
        cluster->arrived + cluster->ended == cluster->size * emulate_me->threads) {
        cluster->arrived = 0;
        __atomic_fetch_add(&cluster->times, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&cluster->lock);
    return times;
}

static bool all_there(struct warp *warp, struct meeting *meeting);

static void end_of_thread(struct thread *thread) {
    uint32_t lane = thread->place.thread.x % EMULATE_WARP;
    struct warp *warp = &emulate_me->warp[thread->place.thread.x / EMULATE_WARP];
    if (*(const uint64_t *)thread->stack)
        emulate_give_up("a thread that needs more stack than it has");
    thread->ended = true;
    thread->copies = 0;
    warp->ended |= 1u << lane;
    emulate_me->moves++;
    count_of_cluster(true);
    for (unsigned i = 0; i < warp->meetings; i++)
        if (warp->meeting[i].arrived)
            all_there(warp, &warp->meeting[i]);
}

static void enter(void) {
    machine.launch->run(machine.launch->user);
    end_of_thread(emulate_current());
    _longjmp(emulate_me->at, 1);
}

/* Until it waits. */
static void step(uint32_t number) {
    struct thread *thread = &emulate_me->thread[number];
    emulate_me->current = number;
    emulate_here = &thread->place;
    if (_setjmp(emulate_me->at))
        return;
    if (thread->begun)
        _longjmp(thread->at, 1);
    thread->begun = true;
    getcontext(&emulate_me->context);
    emulate_me->context.uc_stack.ss_sp = thread->stack;
    emulate_me->context.uc_stack.ss_size = STACK_BYTES;
    emulate_me->context.uc_link = NULL;
    makecontext(&emulate_me->context, enter, 0);
    setcontext(&emulate_me->context);
}

static uint64_t seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec;
}

static void run_block(void) {
    uint64_t since = 0;
    for (uint32_t left = emulate_me->threads; left;) {
        uint64_t moves = emulate_me->moves;
        uint32_t first = emulate_draw(emulate_me->threads);
        bool backwards = emulate_draw(2);
        for (uint32_t i = 0; i < emulate_me->threads; i++) {
            uint32_t number =
                (first + (backwards ? emulate_me->threads - i : i)) % emulate_me->threads;
            if (emulate_me->thread[number].ended || waits(&emulate_me->thread[number]))
                continue;
            step(number);
            left -= emulate_me->thread[number].ended;
        }
        if (emulate_me->moves != moves || emulate_make_a_bulk()) {
            since = 0;
            continue;
        }
        if (!since)
            since = seconds();
        if (emulate_me->cluster->size == 1 || seconds() - since > STUCK_S)
            emulate_give_up("nobody can go on");
        sched_yield();
    }
    if (emulate_me->bulks)
        emulate_give_up("a block that ends before its copies");
    for (size_t at = machine.launch->shared_bytes; at < sizeof emulate_shared; at++)
        if (emulate_shared[at] != EMULATE_GARBAGE)
            emulate_give_up("a write beyond the shared memory of the launch");
}

static void open_block(uint32_t block) {
    const struct emulate_launch *launch = machine.launch;
    emulate_me->threads = launch->threads.x;
    emulate_me->bulks = 0;
    memset(emulate_me->warp, 0, sizeof emulate_me->warp);
    memset(emulate_me->named, 0, sizeof emulate_me->named);
    memset(emulate_shared, EMULATE_GARBAGE, sizeof emulate_shared);
    for (uint32_t i = 0; i < emulate_me->threads; i++) {
        struct thread *thread = &emulate_me->thread[i];
        thread->place.thread = (struct emulate_size){i, 0, 0};
        thread->place.block = (struct emulate_size){block, 0, 0};
        thread->place.threads = launch->threads;
        thread->place.blocks = launch->blocks;
        thread->place.rank = block % launch->cluster;
        thread->begun = thread->ended = false;
        thread->waits_for = NULL;
        thread->groups = thread->copies = 0;
    }
    for (uint32_t i = emulate_me->threads; i % EMULATE_WARP; i++)
        emulate_me->warp[i / EMULATE_WARP].ended |= 1u << i % EMULATE_WARP;
}

/* ---- Blocks --------------------------------------------------------------------------------- */

static void run_cluster(uint32_t rank) {
    emulate_me->cluster = &machine.cluster;
    for (uint32_t first = 0; first < machine.launch->blocks.x; first += emulate_me->cluster->size) {
        open_block(first + rank);
        emulate_me->cluster->anchor[rank] = emulate_shared;
        if (rank == 0)
            emulate_me->cluster->ended = 0;
        pthread_barrier_wait(&emulate_me->cluster->turn);
        run_block();
        pthread_barrier_wait(&emulate_me->cluster->turn);
    }
}

static void run_blocks(void) {
    uint32_t block;
    emulate_me->cluster = &emulate_me->alone;
    while ((block = atomic_fetch_add(&machine.next, 1)) < machine.launch->blocks.x) {
        open_block(block);
        emulate_me->alone.ended = 0;
        run_block();
    }
}

static void *serve(void *user) {
    uint64_t number = 0;
    emulate_me = user;
    for (;;) {
        pthread_mutex_lock(&machine.lock);
        while (machine.number == number || emulate_me->number >= machine.wanted)
            pthread_cond_wait(&machine.begun, &machine.lock);
        number = machine.number;
        pthread_mutex_unlock(&machine.lock);
        if (machine.cluster.size > 1)
            run_cluster(emulate_me->number);
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
        emulate_give_up("no memory");
    runner->thread = calloc(EMULATE_THREADS_MAX, sizeof *runner->thread);
    if (!runner->thread)
        emulate_give_up("no memory");
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
        emulate_give_up("no thread");
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

/* ---- Meeting -------------------------------------------------------------------------------- */

static struct meeting *meeting_of(struct warp *warp, uint32_t mask) {
    for (unsigned i = 0; i < warp->meetings; i++)
        if (warp->meeting[i].mask == mask)
            return &warp->meeting[i];
    if (warp->meetings == MASKS)
        emulate_give_up("too many different masks of lanes");
    warp->meeting[warp->meetings].mask = mask;
    return &warp->meeting[warp->meetings++];
}

static bool all_there(struct warp *warp, struct meeting *meeting) {
    if (((meeting->arrived | warp->ended) & meeting->mask) != meeting->mask)
        return false;
    meeting->met[meeting->times & 1].lanes = meeting->arrived;
    meeting->arrived = 0;
    meeting->times++;
    emulate_me->moves++;
    return true;
}

const struct emulate_met *emulate_meet(uint32_t mask, const char *what, uint64_t value) {
    uint32_t lane = emulate_here->thread.x % EMULATE_WARP;
    struct warp *warp = &emulate_me->warp[emulate_here->thread.x / EMULATE_WARP];
    struct meeting *meeting = meeting_of(warp, mask);
    if (!(mask >> lane & 1))
        emulate_give_up("a lane that is not of its own mask");
    if (meeting->arrived && meeting->what != what && strcmp(meeting->what, what) != 0)
        emulate_give_up("lanes that meet in different places");
    uint64_t time = meeting->times;
    meeting->what = what;
    meeting->met[time & 1].value[lane] = value;
    meeting->arrived |= 1u << lane;
    if (!all_there(warp, meeting))
        emulate_wait_while(&meeting->times, UINT64_MAX, time, what);
    return &meeting->met[time & 1];
}

uint64_t emulate_value_of(const struct emulate_met *met, uint32_t lane) {
    if (!(met->lanes >> lane & 1))
        emulate_give_up("the value of a lane that did not come");
    return met->value[lane];
}

void emulate_block_sync(unsigned name, uint32_t threads) {
    static const char *const what[NAMES] = {"bar.sync 0", "bar.sync 1", "bar.sync 2", "bar.sync 3"};
    struct named *named = &emulate_me->named[name];
    if (name >= NAMES)
        emulate_give_up("a barrier that nobody has named");
    if (threads % EMULATE_WARP || threads > emulate_me->threads)
        emulate_give_up("a barrier of no whole number of warps");
    emulate_meet(UINT32_MAX, what[name], 0);
    uint64_t time = named->times;
    if (++named->arrived == threads) {
        named->arrived = 0;
        named->times++;
        emulate_me->moves++;
    }
    emulate_wait_while(&named->times, UINT64_MAX, time, what[name]);
}

void emulate_cluster_sync(void) {
    emulate_meet(UINT32_MAX, "barrier.cluster", 0);
    uint64_t times = count_of_cluster(false);
    emulate_wait_while(&emulate_me->cluster->times, UINT64_MAX, times, "barrier.cluster");
    emulate_me->moves++;
}
