/* machine.h - the threads of a CUDA kernel, on a host: what tests/emulate/cuda.h and the headers
 * beside it make CUDA C++ of.
 *
 * A block is a thread of the operating system, its shared memory that thread's __thread variables.
 * A thread of the block is a context of its own that runs until it waits for another one. The
 * blocks of a cluster run side by side, all others as they come.
 *
 * What the hardware leaves open is decided against the kernel: each round of a block's threads
 * begins at one that is drawn, in a direction that is, and a copy in the background is made when it
 * is waited for, of those in bulk half, of the others all but the 64 before. What waits for ever,
 * lanes that meet in different places, copies that are left behind and writes beyond a launch's
 * shared memory end the program with a word of where everybody is: a program of tests, and no
 * other. */
#ifndef KLD_TESTS_EMULATE_MACHINE_H
#define KLD_TESTS_EMULATE_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMULATE_WARP 32
#define EMULATE_THREADS_MAX 1024   /* of a block */
#define EMULATE_CLUSTER_MAX 16     /* blocks */
#define EMULATE_SHARED_MAX 233472u /* bytes of a block, what it has no name for */

struct emulate_size {
    uint32_t x, y, z;
};

/* Of the running thread of the kernel. Constant while it runs. */
struct emulate_place {
    struct emulate_size thread, block, threads, blocks;
    uint32_t rank; /* of its block in the cluster */
};
extern __thread const struct emulate_place *emulate_here;
/* Of the running block. */
extern __thread __attribute__((aligned(1024))) unsigned char emulate_shared[EMULATE_SHARED_MAX];

struct emulate_launch {
    struct emulate_size threads, blocks;
    uint32_t cluster; /* blocks */
    size_t shared_bytes;
    void (*run)(void *user); /* the kernel, once for each thread */
    void *user;
};
/* Until all of it has ended. 0, or what CUDA would say: cudaErrorInvalidConfiguration. */
int emulate_run(const struct emulate_launch *launch);

struct emulate_met {
    uint32_t lanes; /* that came: of the mask all but those that have ended */
    uint64_t value[EMULATE_WARP];
};
/* The lanes of `mask` of this warp meet, each with a value; `what` is the same for all, or the
 * program ends. Returns what they brought, until the next time. */
const struct emulate_met *emulate_meet(uint32_t mask, const char *what, uint64_t value);
/* The value of one of them; the program ends where that lane did not come. */
uint64_t emulate_value_of(const struct emulate_met *met, uint32_t lane);
/* `threads` threads of this block. */
void emulate_block_sync(unsigned name, uint32_t threads);
void emulate_cluster_sync(void);

/* An address as a 32-bit one of shared memory, and back; where the same lies in another block. */
uint32_t emulate_shared_at(const void *at);
void *emulate_shared_of(uint32_t at);
void *emulate_of_rank(const void *at, uint32_t rank);

/* A barrier in shared memory (PTX: mbarrier). */
void emulate_barrier_init(uint64_t *barrier, uint32_t count);
void emulate_barrier_arrive(uint64_t *barrier, uint32_t expected_bytes);
void emulate_barrier_complete(uint64_t *barrier, uint32_t bytes);
void emulate_barrier_wait(uint64_t *barrier, uint32_t parity);

/* Copies in the background: of this thread (cp.async), `bytes` of `size` and 0 behind; in bulk,
 * which `barrier` counts. */
void emulate_copy(void *to, const void *from, uint32_t bytes, uint32_t size);
void emulate_copies_end(void);
void emulate_copies_wait(uint32_t groups);
void emulate_copy_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier);

#ifdef __cplusplus
}
#endif
#endif
