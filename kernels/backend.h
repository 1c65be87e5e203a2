/* backend.h - the one interface between "what is asked" and "what computes it".
 *
 * Two back ends implement it, cpu and cuda, as peers: a table of functions each, no test of "which
 * one" anywhere else. It knows no socket and no JSON; above it are the worker (server/worker) and
 * libkld's `local:` (client/local.c).
 *
 * Objects and their lifetimes
 *   device   One per process and physical device. Owns its threads, its pool of memory and
 * everything below. Outlives its memories and streams; device_close() waits for jobs in flight.
 *   memory   A range of bytes that jobs may name: a mapped memfd, a caller's own pointer, an
 * imported GPU allocation, or a buffer of the device's pool. It must stay until every job that
 * names it has completed; counting users is the caller's business (R2 of server/worker/region.h).
 *   stream   Jobs of one stream run in order of submission; streams are independent of each other.
 *   event    A point in the work of a GPU that two processes share: a client's, imported, or one of
 * ours whose handle is given out, or a fence: a word of mapped memory, which a process can also
 * write to by itself. It must stay until every job that names it has completed.
 *   job      One unit of work, in memory owned by the caller, untouched by the caller from submit()
 * until done() was called. No allocation is made per job on the host.
 *
 * Threads. device_open/close, memory_* and stream_* may be called from any thread but the device's
 * own, may take milliseconds (pinning, mapping, opening a handle), and are safe to call side by
 * side; so may event_*. submit() and poll() may be called from any one thread at a time and never
 * block. submit() calls neither done() nor launched() itself. Both are called on the back end's own
 * thread, done() also from poll(), for jobs of one stream in order; they must be short.
 *
 * Errors. A function returns enum kld_status and describes it in *err. KLD_DEVICE_LOST means that
 * the device is gone for good in this process: every job in flight and every later one completes
 * with it.
 *
 * The meaning of the numbers (forms, divergences, zeros, reductions, gradients, accuracy) is in
 * kernels/README.md. Two promises that callers build on: the same job on the same device gives the
 * same bits on every run, whatever the alignment or kind of its memories; and a row's value and
 * gradient depend on that row alone. */
#ifndef KLD_KERNELS_BACKEND_H
#define KLD_KERNELS_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/op.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kld_backend;

/* cuda: when kernels are loaded, of which the first launch may have to wait for what others have on
 * the device. */
enum kld_kernels_load {
    KLD_KERNELS_WHEN_USED,
    KLD_KERNELS_AT_OPEN,   /* all of them, 0.2 s */
    KLD_KERNELS_WHEN_IDLE, /* one by one, while the device has nothing to do */
};

struct kld_device_options {
    uint32_t device;  /* index, below device_count() */
    uint32_t threads; /* cpu: threads that compute; 0: one for each CPU this process may use */
    uint64_t pool_bytes_max;  /* most that memory_alloc() buffers and the device's own temporary
                               * copies may take together; 0: 1/2 of the device's memory. For cpu
                               * the pool is host memory. Beyond it: KLD_NO_MEMORY. */
    uint64_t host_pool_bytes; /* cpu: what 0 above stands for instead; 0: that half */
    uint32_t spin_us;         /* how long the device thread polls before it sleeps */
    enum kld_kernels_load kernels_load;
    bool stays_current; /* cuda: the device stays the current one of the thread that opens it, whose
                         * calls are then a little quicker. Else what is current in a caller's
                         * thread, or that nothing is, stays as it was, whatever it calls. */
    bool peer_access; /* cuda: memory of other cards is taken too, where the hardware lets this one
                       * read and write it in place */
};

struct kld_device_info {
    char backend[16];
    char name[64];           /* model of the card or of the processor */
    uint8_t uuid[16];        /* of the card; all 0 for cpu */
    uint64_t memory_bytes;   /* of the device */
    uint64_t pool_bytes_max; /* resolved */
    uint32_t threads;        /* cpu: computing threads; cuda: multiprocessors */
    bool offloads; /* it computes on a processor of its own: a host thread that polls takes nothing
                    * from it */
    bool takes_turns; /* cuda without MPS: while other processes compute on the card, it switches
                       * between their contexts and ours, which takes some 0.3 ms */
    bool imports_cuda_ipc; /* memory_import_ipc() and _fd(), event_* and kld_job.launched work */
};

/* The head of every device, memory and stream; a back end embeds it first in its own struct. Fields
 * are constant from creation on, except where noted. */
struct kld_device {
    const struct kld_backend *backend;
    struct kld_device_info info;
};
struct kld_memory {
    struct kld_device *device;
    uint64_t bytes;
    void *host;  /* address in this process through which a CPU may read and write, or NULL */
    bool pinned; /* of memory_map(): the device copies straight to and from it, or is a CPU */
};
struct kld_stream {
    struct kld_device *device;
};
struct kld_gpu_event {
    struct kld_device *device;
};

/* Which streams a busy device serves first; no stream is shut out by another. */
enum kld_priority { KLD_PRIORITY_LOW = -1, KLD_PRIORITY_NORMAL = 0, KLD_PRIORITY_HIGH = 1 };

struct kld_stream_options {
    enum kld_priority priority; /* cuda */
    /* cpu: whose it is, any number. Those with work take turns, and each one's streams take turns
     * among themselves, so that nobody gets more of a device by having more streams. A card goes by
     * streams alone. */
    uint64_t owner;
};

enum kld_job_kind { KLD_JOB_OP, KLD_JOB_COPY };

struct kld_place {
    struct kld_memory *memory;
    uint64_t offset_bytes;
};

struct kld_job {
    /* Set by the caller before submit(). */
    enum kld_job_kind kind;
    struct kld_op op; /* KLD_JOB_OP: passed kld_op_check(); its regions are not looked at */
    struct kld_geometry geometry;           /* what kld_op_check() returned for it */
    struct kld_place place[KLD_SLOT_COUNT]; /* present slots: bounds and alignment were checked */
    struct kld_place copy_to, copy_from;    /* KLD_JOB_COPY: may not overlap */
    uint64_t copy_bytes;
    struct kld_gpu_event *wait;   /* the device begins when what was recorded in it by the launch
                                   * has passed; NULL: at once */
    struct kld_gpu_event *record; /* recorded behind the last work of the job; NULL: none */
    uint32_t record_number;       /* `record` is a fence: what is written to it */
    /* Not NULL: told, before done(), when all of the work was given to the device, `record`
     * included; not told for a job that fails before. Every tensor must lie in device memory. */
    void (*launched)(struct kld_job *job);
    void (*done)(struct kld_job *job);
    void *owner; /* for done() */

    /* Set by the back end before done(). */
    enum kld_status status;
    struct kld_error error; /* described if status is not KLD_OK */
    double loss;            /* geometry.scalar: the loss rounded to its dtype; else 0 */
    uint64_t launch_ns;     /* CLOCK_MONOTONIC when the work was started */
    uint64_t copy_ns;       /* time spent moving tensors between host and device */
    uint64_t kernel_ns;     /* time spent computing */
    uint64_t bytes;         /* that the computation must read and write at least; or copied */

    /* The back end's own while the job is with it. */
    struct kld_job *next;
    uint64_t backend_private[16];
};

enum kld_job_stage {
    KLD_JOB_UNKNOWN, /* cannot be told just now */
    KLD_JOB_WAITS,   /* not begun: what was recorded in its `wait` has not come */
    KLD_JOB_BEHIND,  /* not begun, for any other reason */
    KLD_JOB_BEGUN,   /* the device is at work on it, or has been; of a job in chunks on this one */
};

struct kld_backend {
    const char *name; /* "cpu", "cuda" */

    /* How many devices work here. KLD_UNAVAILABLE with a reason ("no NVIDIA driver") counts as 0;
     * KLD_BUSY: there is one, which does not let this process in, but may let in a later one. */
    enum kld_status (*device_count)(uint32_t *ret_count, struct kld_error *err);
    enum kld_status (*device_open)(const struct kld_device_options *options,
                                   struct kld_device **ret_device, struct kld_error *err);
    void (*device_close)(struct kld_device *device); /* NULL is allowed */

    /* Maps bytes [0, bytes) of a shared memfd that is sealed against shrinking (the caller checked)
     * and makes it reachable by the device (cuda: pinned). The descriptor stays the caller's. */
    enum kld_status (*memory_map)(struct kld_device *device, int fd, uint64_t bytes,
                                  struct kld_memory **ret_memory, struct kld_error *err);
    /* The caller's own address range, host or (cuda) device memory; not pinned, not freed. */
    enum kld_status (*memory_wrap)(struct kld_device *device, void *address, uint64_t bytes,
                                   struct kld_memory **ret_memory, struct kld_error *err);
    /* bytes at offset_bytes of the base allocation behind a cudaIpcMemHandle_t. KLD_UNIMPLEMENTED
     * on cpu. */
    enum kld_status (*memory_import_ipc)(struct kld_device *device, const uint8_t handle[64],
                                         uint64_t base_bytes, uint64_t offset_bytes, uint64_t bytes,
                                         struct kld_memory **ret_memory, struct kld_error *err);
    /* The same of a CUDA VMM allocation that was exported as a POSIX file descriptor; that stays
     * the caller's. base_bytes: of the whole allocation. */
    enum kld_status (*memory_import_fd)(struct kld_device *device, int fd, uint64_t base_bytes,
                                        uint64_t offset_bytes, uint64_t bytes,
                                        struct kld_memory **ret_memory, struct kld_error *err);
    /* Addresses of the device with nothing behind them: no job may name a byte of them before
     * memory_grow_fd() has put memory there. They are let go of by memory_free(), all at once.
     * KLD_UNIMPLEMENTED on cpu. */
    enum kld_status (*memory_reserve)(struct kld_device *device, uint64_t bytes,
                                      struct kld_memory **ret_memory, struct kld_error *err);
    /* A whole allocation, `bytes` long and exported as for memory_import_fd(), at offset_bytes of
     * what memory_reserve() gave, where the one before it ends. One at a time; jobs may use those
     * before it meanwhile. After an error nothing is there. KLD_UNIMPLEMENTED on cpu. */
    enum kld_status (*memory_grow_fd)(struct kld_memory *memory, int fd, uint64_t offset_bytes,
                                      uint64_t bytes, struct kld_error *err);
    /* May memory of the card with this UUID be imported: its own, or with peer_access that of
     * another? NULL: only its own. Any thread; takes no time. */
    bool (*reaches)(struct kld_device *device, const uint8_t uuid[16]);
    /* Was a handle imported that does not say which card it is of? Then one of another card is
     * taken as it is. NULL: none says or needs to. Any thread; takes no time. */
    bool (*handles_unread)(struct kld_device *device);
    /* A buffer of the device's pool; zeroed, so that no client reads what another left. */
    enum kld_status (*memory_alloc)(struct kld_device *device, uint64_t bytes,
                                    struct kld_memory **ret_memory, struct kld_error *err);
    /* Any of the above; NULL is allowed. KLD_DEVICE_LOST: it could not be let go of, and the device
     * is of no more use. */
    enum kld_status (*memory_free)(struct kld_memory *memory);

    /* options: NULL: all 0. */
    enum kld_status (*stream_open)(struct kld_device *device,
                                   const struct kld_stream_options *options,
                                   struct kld_stream **ret_stream, struct kld_error *err);
    /* A stream of the caller's own process, cuda: a cudaStream_t of this device, NULL the default
     * one: its jobs run in the order of all that the caller enqueues there. It stays the caller's.
     * NULL on cpu. */
    enum kld_status (*stream_adopt)(struct kld_device *device, void *native,
                                    struct kld_stream **ret_stream, struct kld_error *err);
    void (*stream_close)(struct kld_stream *stream); /* no job in flight; NULL is allowed */

    /* A cudaIpcEventHandle_t of another process. KLD_UNIMPLEMENTED on cpu. */
    enum kld_status (*event_import)(struct kld_device *device, const uint8_t handle[64],
                                    struct kld_gpu_event **ret_event, struct kld_error *err);
    /* An event of our own, and the handle by which other processes open it. */
    enum kld_status (*event_create)(struct kld_device *device, struct kld_gpu_event **ret_event,
                                    uint8_t ret_handle[64], struct kld_error *err);
    /* A fence: the 32-bit word at offset_bytes (aligned, inside the memory) of what memory_map()
     * made, which outlives it. Sets the word to 0. NULL on cpu. */
    enum kld_status (*event_create_fence)(struct kld_device *device, struct kld_memory *memory,
                                          uint64_t offset_bytes, struct kld_gpu_event **ret_event,
                                          struct kld_error *err);
    void (*event_free)(struct kld_gpu_event *event); /* NULL is allowed */

    /* True: the job was launched within the call, and launched() is not going to be called. Then,
     * as in launched(), launch_ns is set. */
    bool (*submit)(struct kld_stream *stream, struct kld_job *job);

    /* Calls done() for jobs that have ended, as far as that takes no time. more: the caller will do
     * so again within microseconds, so the back end's own thread need not get up for jobs that
     * submit() launched; false: it has to again. A caller that never polls leaves all of it to that
     * thread. On cpu, where the caller's processor is what computes: runs the small jobs, of some
     * 10 us, that nothing is before, within the call, for 200 us at most; `more` is a promise to
     * poll after each submit(), without it nothing is run here. */
    void (*poll)(struct kld_device *device, bool more);

    /* How far is a job that submit() took? From submit()'s thread, before done(). NULL on cpu,
     * which has no events. */
    enum kld_job_stage (*stage)(struct kld_device *device, const struct kld_job *job);

    /* For tests: the next operator ends the device. cuda: a kernel reads an address that is not
     * there; cpu: the job ends with KLD_DEVICE_LOST. Any thread. */
    void (*fail_next)(struct kld_device *device);

    /* After KLD_DEVICE_LOST: is it certain that nothing of this process runs on the device any
     * more, so that no memory of a client is written to from now on? NULL: never, before the
     * process has ended. Any thread; does not block. */
    bool (*is_dead)(struct kld_device *device);

    /* Does the device still work? Asks it by a little work of its own, which may take as long as
     * any. KLD_DEVICE_LOST if not. NULL: cannot be lost without work. Any thread but the device's
     * own. */
    enum kld_status (*check)(struct kld_device *device, struct kld_error *err);

    /* Bytes of the pool in use now. */
    uint64_t (*pool_bytes)(struct kld_device *device);
    /* Allocations made from it so far, for buffers and for jobs. NULL: not counted. Any thread. */
    uint64_t (*pool_allocations)(struct kld_device *device);
    /* Bytes per second at which the device can read two arrays of `bytes` each, and what it reaches
     * when it also writes a third: the ceilings that kernels are compared with. Best of a few runs,
     * some 100 ms. */
    enum kld_status (*measure_ceiling)(struct kld_device *device, uint64_t bytes,
                                       double *ret_read_per_s, double *ret_read_write_per_s,
                                       struct kld_error *err);
};

/* libkld.so has these two for the server, which has its kernels from there. Not part of libkld's
 * API.
 */
#define KLD_BACKEND_EXPORT __attribute__((visibility("default")))

/* The list of back ends, best first; NULL-terminated. Built without nvcc it holds only cpu. */
KLD_BACKEND_EXPORT const struct kld_backend *const *kld_backends(void);
/* KLD_BUILD of the library, its version and a sum over this header and those that it needs: a
 * program that was built with another one must not use its tables. */
KLD_BACKEND_EXPORT const char *kld_backends_release(void);
/* "cpu", "cuda", or "auto": the best that has a device. KLD_NOT_FOUND: not built in, the text lists
 * those that are. KLD_BUSY: the best has one, but not now. */
KLD_BACKEND_EXPORT enum kld_status
kld_backend_find(const char *name, const struct kld_backend **ret_backend, struct kld_error *err);

#ifdef __cplusplus
}
#endif
#endif
