/* device.h - the objects of the CUDA back end and who may touch which field. Private to this
 * folder.
 *
 * Two kinds of threads: the device thread, one per device, which launches, polls and completes; and
 * callers (any), which open, map and allocate. The one that submits may launch a job by itself if
 * the device thread is not at work this moment (`work`): the kernel then runs while that thread
 * is still waking up; and the one that polls completes such jobs by itself, while that thread
 * sleeps (`watched`). Else they meet in two places only: the list of incoming jobs (`mutex`) and
 * the bookkeeping of memory (`setup_mutex`, which is held while the driver opens and allocates: who
 * wants both takes it before `work`). */
#ifndef KLD_KERNELS_CUDA_DEVICE_H
#define KLD_KERNELS_CUDA_DEVICE_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.h"

#define CUDA_FLIGHTS_MAX 64                    /* jobs between launch and completion */
#define CUDA_STAGING_MAX ((uint64_t)256 << 20) /* bytes of one chunk of a job in host memory */
#define CUDA_IMPORTS_MAX 4096                  /* base allocations of other processes kept open */
#define CUDA_HEIR_NS UINT64_C(1000000000)      /* memory of a lost predecessor is waited for */
#define CUDA_PEERS_MAX 64                      /* other cards that can be reached */
#define CUDA_KEPT_MAX CUDA_FLIGHTS_MAX         /* blocks of staging kept between jobs ... */
#define CUDA_KEPT_BYTES (2 * CUDA_STAGING_MAX + ((uint64_t)64 << 20)) /* ... and the most of it */
/* While it can have its own, a job leaves alone what is over so many times its size, or this one.
 */
#define CUDA_BLOCK_SLACK 4
#define CUDA_BLOCK_SMALL ((uint64_t)64 << 10)
#define CUDA_LARGE_BYTES ((uint64_t)32 << 20)  /* a job that moves more is a large one */
#define CUDA_POOL_KEEP ((uint64_t)512 << 20)   /* free bytes that stay in the pool */
#define CUDA_SURPLUS_NS 1000000000u            /* idle so long, a device trims its pool */
#define CUDA_REACH_BYTES ((uint64_t)256 << 10) /* of tensors in pinned host memory, used there */
#define CUDA_SUMS_MAX 32                       /* groups of a job whose sums the host adds up */

/* One open base allocation of another process: the driver opens each once in a process and device.
 * What tells it from others is its handle, which the driver never gives twice, not even for memory
 * at the same address as some that was freed. Guarded by setup_mutex. */
struct cuda_import {
    struct cuda_import *next;
    uint8_t handle[64];
    char *base;
    uint64_t bytes; /* as the driver knows it */
    uint32_t users;
};

enum cuda_memory_kind {
    CUDA_MAPPED,
    CUDA_WRAPPED,
    CUDA_IMPORTED,
    CUDA_VMM,
    CUDA_SPACE,
    CUDA_POOLED
};

/* An allocation in a range of addresses that has several. */
struct cuda_piece {
    struct cuda_piece *next;
    unsigned long long at;
    uint64_t bytes;
};

/* Constant from creation on, but for `pieces`. */
struct cuda_memory {
    struct kld_memory base;
    enum cuda_memory_kind kind;
    char *at;       /* where copies and kernels find it */
    bool on_device; /* kernels use it in place; otherwise tensors are staged */
    char *reach;    /* CUDA_MAPPED, pinned: where kernels find it, by way of the bus; else NULL */
    struct cuda_import *import;
    char *mapped;          /* CUDA_VMM: the whole allocation; CUDA_SPACE: all of its addresses */
    uint64_t mapped_bytes; /* of it, of them */
    struct cuda_piece *pieces; /* CUDA_SPACE: of who adds to it, one at a time, or frees it */
};

/* Constant from creation on. */
struct cuda_event {
    struct kld_gpu_event base;
    cudaEvent_t event;       /* NULL: a fence, */
    unsigned long long word; /* whose word the device has here */
};

/* Small jobs go before large ones of the same priority, as soon as a block of theirs has ended. */
enum cuda_size { CUDA_SMALL, CUDA_LARGE, CUDA_SIZES };

struct cuda_stream {
    struct kld_stream base;
    cudaStream_t stream[CUDA_SIZES]; /* constant; the caller's: one in both places */
    bool adopted;                    /* constant: the caller's */
    /* Under work. */
    const struct cuda_flight *holder; /* a job that is not all enqueued yet; NULL: none */
    uint64_t sweep;                   /* of the poll that found an unfinished job in it */
    uint64_t round;                   /* of the launches that left a job of it where it was */
    struct cuda_flight *newest;       /* the last that was launched; NULL: none is in flight */
};

struct cuda_peer {
    uint8_t uuid[16];
    int ordinal;
    uint32_t card; /* as of cuda_card_number() */
};

struct cuda_block {
    char *at; /* NULL: none */
    uint64_t bytes;
};

/* The beginning of a struct kld_cuda_scratch, for jobs of few groups: pinned, so that the host
 * finds there what the kernels have summed up, and no second one need do it. */
struct cuda_sums {
    double divisor, total;
    double partial[CUDA_SUMS_MAX];
};

enum cuda_mark { MARK_START, MARK_COPIED, MARK_COMPUTED, MARK_END, MARK_COUNT };

/* A job between launch and done(). Under work; events, scratch and result live as long as
 * the device. */
struct cuda_flight {
    struct kld_job *job; /* NULL: free */
    struct cuda_stream *stream;
    enum cuda_size size; /* which of its two it is on */
    cudaEvent_t mark[MARK_COUNT];
    struct kld_cuda_scratch *scratch; /* on the device; allocated at first use */
    double *result;                   /* pinned, written by the last kernel */
    struct cuda_sums *sums;           /* pinned, written by the rows' kernels */
    enum kld_status status;           /* what went wrong at launch */
    bool unmarked;                    /* MARK_END is yet to be recorded */

    bool reduces;          /* the reduction gives one number */
    bool staged;           /* some tensor is in host memory, and copied */
    uint32_t sums_count;   /* groups whose sums the host adds up; 0: a kernel does */
    uint32_t slots_staged; /* bit 1 << enum kld_slot */
    enum cuda_mark until;  /* what is in flight of it ends with this one; MARK_COUNT: nothing is */
    uint64_t chunk_first;  /* row of the chunk that is in flight */
    uint64_t next_row;     /* first row of the next chunk */
    uint64_t chunk_rows, segment_rows;
    char *staging;
    uint64_t staging_bytes; /* reserved in the pool */
    uint64_t staging_at[KLD_SLOT_COUNT];
    struct kld_cuda_args args; /* of the whole job: pointers of tensors on the device */
};

struct cuda_device {
    struct kld_device base;
    int ordinal;                 /* constant */
    uint32_t spin_us;            /* constant */
    CUcontext context;           /* constant: NULL where it cannot be changed, see visit.c */
    uint64_t heir_until_ns;      /* constant: see cuda_heir_waits() */
    uint32_t shared_bytes_max;   /* constant: of one block */
    bool has_fp64, begins_early; /* constant: see struct kld_cuda_args */
    bool stays_current;          /* constant: the process is ours, and nobody captures in it */
    uint32_t card;               /* constant: its PCI address */
    cudaMemPool_t pool;          /* constant; thread-safe */
    _Atomic uint64_t pool_used;  /* bytes reserved; any thread */
    _Atomic uint64_t kept_bytes; /* of them: of kept blocks. Written under work, read by any */
    _Atomic uint64_t pool_allocations; /* calls of the allocator so far; any thread */
    _Atomic bool lost;                 /* set once; any thread */
    _Atomic bool surplus;   /* staging went back to the pool since it was trimmed; any thread */
    _Atomic bool fail_next; /* for tests: any thread sets it, a launch takes it */
    _Atomic bool watched;   /* whoever submits looks after jobs in place; set by it alone */

    struct cuda_peer peers[CUDA_PEERS_MAX]; /* with peers_count: constant */
    uint32_t peers_count;

    _Atomic bool handles_unread; /* some were imported that handle.c cannot read; any thread */

    pthread_mutex_t setup_mutex;
    bool handles_name_cards;    /* handle.c can read them; with what follows under setup_mutex */
    uint32_t handles_looked_at; /* times that it was tried to learn how */
    cudaStream_t setup;         /* allocations and measurements of callers, under setup_mutex; what
                                 * the pool gets back, by any thread */
    struct cuda_import *imports;
    uint32_t imports_count;

    pthread_t thread;
    pthread_mutex_t mutex; /* guards the five below */
    pthread_cond_t wake;
    struct kld_job *incoming_head, *incoming_tail;
    bool sleeping, stop;
    bool launched;                   /* by a caller, since the device thread last slept */
    _Atomic uint32_t incoming_count; /* so that polling needs no lock */

    pthread_mutex_t
        work; /* guards the rest; the device thread has it while it launches and polls */
    struct kld_job *pending_head, *pending_tail;
    struct cuda_flight flights[CUDA_FLIGHTS_MAX];
    struct cuda_flight *order[CUDA_FLIGHTS_MAX]; /* in flight, in order of launch */
    uint32_t order_count;
    uint64_t sweep, round;
    uint32_t kernels_loaded; /* of those that preload.c knows */
    bool loads_when_idle;    /* the rest of them: callers launch in a device that is idle only */
    struct cuda_block kept[CUDA_KEPT_MAX]; /* staging that no job has */
    double *results;        /* pinned, one a flight; the last: cuda_check()'s, under setup_mutex */
    struct cuda_sums *sums; /* pinned, one a flight */
    uint16_t active_clusters[KLD_CUDA_ACTIVE_CLUSTERS]; /* see struct kld_cuda_args */
};

/* error.c: the one place that classes a CUDA error. Names what was being done; marks the device as
 * lost where it is. device may be NULL. */
enum kld_status cuda_fail(struct cuda_device *device, cudaError_t error, const char *doing,
                          struct kld_error *err);

/* It says that somebody captures a stream into a graph, and nothing of the device. */
bool cuda_is_of_capture(cudaError_t error);

/* A handle or descriptor of a peer was not taken. Bad ones meet with all kinds of errors: as long
 * as the device answers otherwise, it was the peer's fault, and no peer can end the device so. */
bool cuda_is_refusal(struct cuda_device *device, cudaError_t error);

/* Has a fault ended the context, and with it all of its kernels? Asks the driver, because errors
 * that are not known count as a lost device too. Any thread. */
bool cuda_is_dead(struct kld_device *device);

/* Copies a number from the device: what a lost context cannot. */
enum kld_status cuda_check(struct kld_device *device, struct kld_error *err);

/* visit.c */
/* What a caller's thread had before cuda_visit(); all 0: it has not come yet. */
struct cuda_visit {
    CUcontext before;
    CUstreamCaptureMode mode;
    bool changed, relaxed; /* the context, the mode */
};
#define CUDA_LEAVES __attribute__((cleanup(cuda_leave))) /* at the end of its scope */
/* The calling thread works in the device's context from here to cuda_leave(). */
cudaError_t cuda_visit(struct cuda_device *device, struct cuda_visit *visit);
void cuda_leave(struct cuda_visit *visit);
/* The same; an error where the device is lost. */
enum kld_status cuda_enter(struct cuda_device *device, struct cuda_visit *visit,
                           struct kld_error *err);
/* The calling thread works in it for good. */
cudaError_t cuda_settle(struct cuda_device *device);
/* Once, in a thread that has settled and worked in it. */
void cuda_context_find(struct cuda_device *device);

/* memory.c: any thread but the device's own, except the two reservations (any). */
struct cuda_memory *cuda_memory_new(struct cuda_device *device, enum cuda_memory_kind kind,
                                    uint64_t bytes, struct kld_error *err);
/* A process that just took a lost one's place finds the card's memory still taken: for so long
 * after it opened the device an allocation that fails is tried again. Sleeps; false: that time is
 * over. Not on the device's thread. */
bool cuda_heir_waits(const struct cuda_device *device);
/* From the pool, with that patience. */
cudaError_t cuda_pool_take(struct cuda_device *device, uint64_t bytes, void **ret_at);
bool cuda_pool_reserve(struct cuda_device *device, uint64_t bytes);
void cuda_pool_release(struct cuda_device *device, uint64_t bytes);
/* Loads so many more kernels; false: there are none left. When opening, or under work. */
bool cuda_preload(struct cuda_device *device, uint32_t most);
/* Of the device thread, when it has nothing to do. */
void cuda_pool_trim_surplus(struct cuda_device *device);
enum kld_status cuda_memory_map(struct kld_device *device, int fd, uint64_t bytes,
                                struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status cuda_memory_wrap(struct kld_device *device, void *address, uint64_t bytes,
                                 struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status cuda_memory_import_ipc(struct kld_device *device, const uint8_t handle[64],
                                       uint64_t base_bytes, uint64_t offset_bytes, uint64_t bytes,
                                       struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status cuda_memory_alloc(struct kld_device *device, uint64_t bytes,
                                  struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status cuda_memory_free(struct kld_memory *memory);
uint64_t cuda_pool_bytes(struct kld_device *device);
uint64_t cuda_pool_allocations(struct kld_device *device);
enum kld_status cuda_measure_ceiling(struct kld_device *device, uint64_t bytes,
                                     double *ret_read_per_s, double *ret_read_write_per_s,
                                     struct kld_error *err);

/* peer.c */
void cuda_peers_find(struct cuda_device *device, uint32_t count);
bool cuda_reaches(struct kld_device *device, const uint8_t uuid[16]);
bool cuda_reaches_ordinal(const struct cuda_device *device, int ordinal);

/* handle.c */
/* The PCI address of a card as one number; 0: unknown. */
uint32_t cuda_card_number(int ordinal);
/* When the device is opened, before any handle comes. */
bool cuda_handles_unread(struct kld_device *device);
/* KLD_INVALID: its memory is known to lie on a card that this device does not reach. */
enum kld_status cuda_handle_check(struct cuda_device *device, const uint8_t handle[64],
                                  struct kld_error *err);

/* vmm.c */
enum kld_status cuda_memory_import_fd(struct kld_device *device, int fd, uint64_t base_bytes,
                                      uint64_t offset_bytes, uint64_t bytes,
                                      struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status cuda_memory_reserve(struct kld_device *device, uint64_t bytes,
                                    struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status cuda_memory_grow_fd(struct kld_memory *memory, int fd, uint64_t offset_bytes,
                                    uint64_t bytes, struct kld_error *err);
/* Of a lost device only what is the host's. */
void cuda_vmm_unmap(struct cuda_memory *memory);

/* stream.c */
enum kld_status cuda_stream_open(struct kld_device *device,
                                 const struct kld_stream_options *options,
                                 struct kld_stream **ret_stream, struct kld_error *err);
enum kld_status cuda_stream_adopt(struct kld_device *device, void *native,
                                  struct kld_stream **ret_stream, struct kld_error *err);
void cuda_stream_close(struct kld_stream *stream);
/* Under work. Where the flight's job, of so many bytes, is enqueued; then, before its first work
 * is: behind what its stream has in flight. */
void cuda_stream_choose(struct cuda_flight *flight, uint64_t bytes);
cudaError_t cuda_stream_enter(const struct cuda_flight *flight);
cudaStream_t cuda_stream_of(const struct cuda_flight *flight);
/* An error: into a graph, by its owner. */
cudaError_t cuda_stream_captured(const struct cuda_flight *flight);

/* event.c */
enum kld_status cuda_event_import(struct kld_device *device, const uint8_t handle[64],
                                  struct kld_gpu_event **ret_event, struct kld_error *err);
enum kld_status cuda_event_create(struct kld_device *device, struct kld_gpu_event **ret_event,
                                  uint8_t ret_handle[64], struct kld_error *err);
enum kld_status cuda_event_create_fence(struct kld_device *device, struct kld_memory *memory,
                                        uint64_t offset_bytes, struct kld_gpu_event **ret_event,
                                        struct kld_error *err);
void cuda_event_free(struct kld_gpu_event *event);
/* Enqueues the event, or the number of a fence, behind what the stream has. */
cudaError_t cuda_event_record(const struct cuda_event *event, uint32_t number, cudaStream_t stream);

/* staging.c: under work. */
/* Takes room for a job, a kept block or a part of the pool; false: there is none. */
bool cuda_staging_reserve(struct cuda_device *device, struct cuda_flight *flight, uint64_t bytes);
/* The memory itself, where that was no kept block: on the job's stream. */
cudaError_t cuda_staging_allocate(struct cuda_device *device, struct cuda_flight *flight);
/* All of the job has ended: keeps the block, or gives it back. */
void cuda_staging_release(struct cuda_device *device, struct cuda_flight *flight);
/* Gives back all that is kept. */
void cuda_staging_forget(struct cuda_device *device);
/* The same for a caller that has neither work nor setup_mutex and wants so much of the pool; false:
 * nothing was given back, or would have been in vain. */
bool cuda_staging_make_room(struct cuda_device *device, uint64_t bytes);

/* job.c: under work. */
/* Every tensor lies on the device: starting the job enqueues kernels and nothing else. */
bool cuda_job_in_place(const struct kld_job *job);
/* Enqueues a job, or its first chunk. False: not now (memory is with other jobs); try again when a
 * job has ended. */
bool cuda_job_start(struct cuda_device *device, struct cuda_flight *flight);
/* Its marks have passed: adds up its times and enqueues the next chunk. True: it has ended and
 * everything of it is released; job->status, loss and times are set. */
bool cuda_job_advance(struct cuda_device *device, struct cuda_flight *flight);
/* Behind what was enqueued of it by now. */
void cuda_job_mark(struct cuda_device *device, struct cuda_flight *flight, enum cuda_mark which);
/* Ends a job of a lost device. */
void cuda_job_lose(struct cuda_device *device, struct cuda_flight *flight);

/* thread.c */
void *cuda_thread_main(void *device);
void cuda_fail_next(struct kld_device *device);
bool cuda_submit(struct kld_stream *stream, struct kld_job *job);
void cuda_poll(struct kld_device *device, bool more);
enum kld_job_stage cuda_stage(struct kld_device *device, const struct kld_job *job);
uint64_t cuda_now_ns(void);

#endif
