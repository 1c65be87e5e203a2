/* stats.h - a shared page that outlives every child: what each goes by, and counters.
 *
 * The supervisor makes the page and hands it to each child. It is two memfds that are mapped one
 * behind the other. The first is what others act on: how many workers there are, which devices they
 * have, whether they serve. Supervisor and workers write it; the gateway, which reads what
 * strangers send, gets a descriptor that only reads. The second is counters: everybody adds with
 * relaxed atomics, the gateway renders them for /metrics, and no process may be led by what it
 * finds there. It has a block for each worker and one for supervisor and gateway; a block's gauges
 * are set to 0 when its process starts. Any thread, any process. */
#ifndef KLD_SERVER_STATS_H
#define KLD_SERVER_STATS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/op.h"
#include "proto/status.h"
#include "proto/wire.h"

/* X(name, metric type, owner, help). Exposed as kld_<name>; counters end in _total. owner: the role
 * that counts and that resets a gauge; those of a worker are exposed for each worker. */
#define KLD_STAT_MAP(X)                                                                            \
    X(http_requests_in_flight, gauge, gateway,                                                     \
      "HTTP requests being received, computed or answered")                                        \
    X(http_requests_waiting, gauge, gateway,                                                       \
      "of them, waiting for their turn or for staging memory with their bytes not read")           \
    X(http_connections, gauge, gateway, "open HTTP connections")                                   \
    X(http_parting, gauge, gateway,                                                                \
      "HTTP connections that were ended and whose clients' last bytes are read and dropped")       \
    X(http_threads, gauge, gateway, "HTTP loops; each takes one CPU at most")                      \
    X(http_connections_total, counter, any, "HTTP connections accepted")                           \
    X(http_slow_total, counter, any, "connections cut off because the client was too slow")        \
    X(http_received_bytes_total, counter, any, "bytes of HTTP bodies received")                    \
    X(http_sent_bytes_total, counter, any, "bytes of HTTP replies")                                \
    X(http_regions, gauge, gateway, "memory regions registered over HTTP")                         \
    X(http_region_bytes, gauge, gateway, "bytes of memory regions registered over HTTP")           \
    X(http_tensors, gauge, gateway, "tensors kept for HTTP callers")                               \
    X(http_tensor_bytes, gauge, gateway, "their bytes")                                            \
    X(staging_bytes, gauge, gateway, "staging memory in use")                                      \
    X(unix_clients, gauge, worker, "connections on the Unix socket, those of the gateway too")     \
    X(unix_clients_total, counter, worker, "connections accepted on the Unix socket")              \
    X(unix_frames_invalid_total, counter, worker, "frames answered by an error of form")           \
    X(worker_requests_in_flight, gauge, worker, "operators and copies queued or running")          \
    X(worker_requests_queued, gauge, worker, "of them, not yet given to the device")               \
    X(worker_regions, gauge, worker, "regions registered by Unix clients")                         \
    X(worker_region_bytes, gauge, worker, "their bytes")                                           \
    X(pinned_bytes, gauge, worker,                                                                 \
      "shared memory of clients that is mapped, and on a GPU pinned; what several show, once")     \
    X(device_memory_bytes, gauge, worker, "memory of the device, in use or not")                   \
    X(pool_bytes, gauge, worker, "device pool in use")                                             \
    X(pool_kept_bytes, gauge, worker,                                                              \
      "of it, kept by the gateway for its next request and given back to who wants it")            \
    X(pool_bytes_max, gauge, worker, "limit of the device pool")                                   \
    X(pool_allocations_total, counter, worker, "allocations from the device pool")                 \
    X(kernel_bytes_total, counter, worker, "bytes that kernels had to move, each once")            \
    X(kernel_ns_total, counter, worker,                                                            \
      "time spent in kernels, ns; kld_kernel_seconds_sum says the same in seconds")                \
    X(copied_bytes_total, counter, worker, "bytes that COPY requests moved between regions")       \
    X(requests_detached_total, counter, any,                                                       \
      "requests whose client left or gave up before the end")                                      \
    X(requests_repeated_total, counter, any,                                                       \
      "requests that the gateway sent again after a lost worker")                                  \
    X(device_lost_total, counter, worker, "times a device was lost")                               \
    X(worker_stuck_total, counter, worker, "times a worker was ended that gave no sign of life")   \
    X(worker_restarts_total, counter, worker, "times a worker was started again")                  \
    X(gateway_stuck_total, counter, any, "times a gateway was ended that gave no sign of life")    \
    X(gateway_restarts_total, counter, any, "times a gateway was started again")                   \
    X(config_reloads_total, counter, any, "configurations taken over on SIGHUP")                   \
    X(config_reloads_failed_total, counter, any,                                                   \
      "those that were refused: all stayed as it was, and the log says why")                       \
    X(config_reload_success_timestamp_seconds, gauge, any,                                         \
      "when the last one was taken over, since 1970; 0: none since the start")                     \
    X(config_last_reload_failed, gauge, any, "1: the last one was refused")                        \
    X(log_lines_lost_total, counter, any, "log lines that could not be written")

enum kld_stat {
#define X(name, type, owner, help) KLD_STAT_##name,
    KLD_STAT_MAP(X)
#undef X
        KLD_STAT_COUNT
};

/* X(name, owner, help): durations in seconds when exposed, kept in ns; kld_<name>_seconds. */
#define KLD_HISTOGRAM_MAP(X)                                                                       \
    X(queue, worker, "from admission to launch")                                                   \
    X(copy, worker, "moving tensors between host and device")                                      \
    X(kernel, worker, "computing")

enum kld_histogram {
#define X(name, owner, help) KLD_HISTOGRAM_##name,
    KLD_HISTOGRAM_MAP(X)
#undef X
        KLD_HISTOGRAM_COUNT
};

/* X(name): the parts that the time of an HTTP request which succeeded consists of, in their order.
 * gateway: what is none of the others: parsing, waiting for memory, the way to the worker. */
#define KLD_STAGE_MAP(X) X(receive) X(gateway) X(queue) X(copy) X(kernel) X(reply)

enum kld_stage {
#define X(name) KLD_STAGE_##name,
    KLD_STAGE_MAP(X)
#undef X
        KLD_STAGE_COUNT
};

/* What was asked for: a divergence, by its number; a COPY; over HTTP, that a tensor be stored; or
 * something that was refused before that was known. */
enum kld_asked {
#define X(NAME, name, number) KLD_ASKED_##NAME = number,
    KLD_DIVERGENCE_MAP(X)
#undef X
        KLD_ASKED_COPY,
    KLD_ASKED_PUT,
    KLD_ASKED_UNKNOWN,
    KLD_ASKED_COUNT
};

/* How an operator uses the device's memory: gradients, or a loss for each element, are written
 * beside what is read. */
enum kld_access { KLD_ACCESS_READ, KLD_ACCESS_READ_WRITE, KLD_ACCESS_COUNT };

/* X(front, reason): who was turned away before any work was done for him, and by what. */
#define KLD_REJECT_MAP(X)                                                                          \
    X(http, unauthenticated)                                                                       \
    X(http, forbidden)                                                                             \
    X(http, no_path)                                                                               \
    X(http, framing)                                                                               \
    X(http, not_http)                                                                              \
    X(http, body_bytes_max)                                                                        \
    X(http, http_requests_max)                                                                     \
    X(http, token_limit)                                                                           \
    X(http, staging_full)                                                                          \
    X(http, tensors_full)                                                                          \
    X(http, regions_full)                                                                          \
    X(http, draining)                                                                              \
    X(unix, not_allowed)                                                                           \
    X(unix, clients_max)                                                                           \
    X(unix, no_memory)                                                                             \
    X(unix, requests_max)                                                                          \
    X(unix, client_requests_max)                                                                   \
    X(unix, draining)

enum kld_reject {
#define X(front, reason) KLD_REJECT_##front##_##reason,
    KLD_REJECT_MAP(X)
#undef X
        KLD_REJECT_COUNT
};

/* X(name): what a device failed by: the request itself, memory of a client that is gone, no room,
 * or the device. */
#define KLD_FAULT_MAP(X) X(request) X(peer) X(memory) X(device)

enum kld_fault {
#define X(name) KLD_FAULT_##name,
    KLD_FAULT_MAP(X)
#undef X
        KLD_FAULT_COUNT
};

/* HTTP statuses that replies are counted by; every other one under 0. */
#define KLD_HTTP_CODES                                                                             \
    { 200, 400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 429, 500, 501, 503, 0 }
#define KLD_HTTP_CODES_COUNT 16
extern const unsigned kld_http_codes[KLD_HTTP_CODES_COUNT];

#define KLD_BUCKETS 18                                  /* the last is +Inf */
extern const uint64_t kld_bucket_limit_ns[KLD_BUCKETS]; /* upper limits; the last UINT64_MAX */
#define KLD_STATUS_SLOTS 32                             /* status numbers are below this */

enum kld_front { KLD_FRONT_HTTP, KLD_FRONT_UNIX, KLD_FRONT_COUNT };

struct kld_stats_histogram {
    _Atomic uint64_t bucket[KLD_BUCKETS]; /* not cumulative */
    _Atomic uint64_t sum_ns;
};

/* A block: of one worker, or of supervisor and gateway together. */
struct kld_stats {
    _Atomic uint64_t value[KLD_STAT_COUNT];
    /* Ended, by enum kld_status. */
    _Atomic uint64_t requests[KLD_FRONT_COUNT][KLD_ASKED_COUNT][KLD_STATUS_SLOTS];
    /* http: from the first byte of an infer request to the last of its reply; unix: from SUBMIT or
     * COPY to DONE in the worker. */
    struct kld_stats_histogram duration[KLD_FRONT_COUNT][KLD_ASKED_COUNT];
    struct kld_stats_histogram histogram[KLD_HISTOGRAM_COUNT];
    struct kld_stats_histogram stage[KLD_STAGE_COUNT]; /* common */
    _Atomic uint64_t rejected[KLD_REJECT_COUNT];
    _Atomic uint64_t faults[KLD_FAULT_COUNT];            /* of a worker's device */
    _Atomic uint64_t http_replies[KLD_HTTP_CODES_COUNT]; /* common */
    struct {
        _Atomic uint64_t bytes, kernel_ns;
    } work[KLD_ASKED_COPY][KLD_ACCESS_COUNT]; /* of a worker's operators that the device ran */
    /* CLOCK_MONOTONIC when the device last did what it was asked; 0: it never did. */
    _Atomic uint64_t device_worked_ns;
};

/* A worker and its device. */
struct kld_stats_device {
    _Atomic uint32_t ready;       /* 1 while the worker serves */
    _Atomic uint32_t pool_wanted; /* times that somebody wanted what of pool_kept_bytes is kept */
    /* CLOCK_MONOTONIC when somebody was last refused what only others are in the way of. */
    _Atomic uint64_t pool_refused_ns;
    _Atomic uint64_t pool_bytes, pool_bytes_max; /* as the gauges say */
    /* What is below was written by its first process, and is the same for those that replace it. */
    _Atomic uint32_t described;
    char backend[16], name[64];
    uint8_t uuid[KLD_WIRE_UUID_BYTES];
    _Atomic uint64_t roofline_bytes_per_s[KLD_ACCESS_COUNT]; /* of its memory; 0: not known */
};

/* Infer requests over HTTP, for the model's statistics. Durations in ns. */
struct kld_stats_model {
    _Atomic uint64_t success, success_ns, fail, fail_ns;
    /* Of successes. input: to read JSON and shared memory, and the worker's copies, both ways;
     * output: from the worker's answer until the reply began. */
    _Atomic uint64_t queue_ns, input_ns, kernel_ns, output_ns;
    _Atomic uint64_t last_ms; /* since 1970, of the last request; 0: none */
};

/* A process as the kernel sees it, now and then; written by the supervisor. */
struct kld_stats_process {
    _Atomic uint64_t cpu_ms, started_ms; /* since 1970 */
    _Atomic uint64_t resident_bytes, virtual_bytes, open_fds, max_fds;
};
/* Their places in the page; that of worker i is KLD_PROCESS_WORKER + i. */
enum kld_process { KLD_PROCESS_SUPERVISOR, KLD_PROCESS_GATEWAY, KLD_PROCESS_WORKER };

#define KLD_STATS_STATE_BYTES 65536 /* a page of memory on any machine, as mmap() wants it */

struct kld_stats_page {
    union {
        struct {                       /* the gateway cannot write it */
            uint64_t magic;            /* size and layout, checked when attached */
            _Atomic uint32_t draining; /* 1 from SIGTERM on, not where it fails; supervisor */
            _Atomic uint32_t workers;  /* supervisor; 0: not yet known. kld_stats_workers() */
            struct kld_stats_device device[KLD_WIRE_DEVICES_MAX]; /* each its worker */
            struct kld_stats_process process[KLD_PROCESS_WORKER + KLD_WIRE_DEVICES_MAX];
        };
        unsigned char state[KLD_STATS_STATE_BYTES];
    };
    struct kld_stats_model model; /* gateway */
    struct kld_stats common;      /* supervisor, gateway */
    struct kld_stats worker[KLD_WIRE_DEVICES_MAX];
};
_Static_assert(offsetof(struct kld_stats_page, model) == KLD_STATS_STATE_BYTES,
               "the counters begin where the second memfd is mapped");

/* What children are handed. None: -1. */
struct kld_stats_fds {
    int counters;
    int state;      /* for workers */
    int state_read; /* for the gateway: the same memfd, and no writing */
};
#define KLD_STATS_NO_FDS ((struct kld_stats_fds){-1, -1, -1})

/* A new page. */
enum kld_status kld_stats_create(struct kld_stats_page **ret_page, struct kld_stats_fds *ret_fds,
                                 struct kld_error *err);
void kld_stats_close(struct kld_stats_fds *fds); /* the descriptors, not the page */
/* state_fd: either; of one that only reads that part of the page is not to be written. */
enum kld_status kld_stats_attach(int counters_fd, int state_fd, struct kld_stats_page **ret_page,
                                 struct kld_error *err);
void kld_stats_detach(struct kld_stats_page *page); /* NULL is allowed */

/* How many there are of page->device and page->worker. */
uint32_t kld_stats_workers(const struct kld_stats_page *page);
/* Has every worker said which device it has? */
bool kld_stats_described(const struct kld_stats_page *page);
/* Does any worker serve? */
bool kld_stats_ready(const struct kld_stats_page *page);

void kld_stats_add(struct kld_stats *stats, enum kld_stat stat, int64_t amount);
void kld_stats_set(struct kld_stats *stats, enum kld_stat stat, uint64_t value);
void kld_stats_observe(struct kld_stats *stats, enum kld_histogram histogram, uint64_t ns);
void kld_stats_request(struct kld_stats *stats, enum kld_front front, enum kld_asked asked,
                       enum kld_status status);
void kld_stats_duration(struct kld_stats *stats, enum kld_front front, enum kld_asked asked,
                        uint64_t ns);
void kld_stats_stage(struct kld_stats *stats, enum kld_stage stage, uint64_t ns);
void kld_stats_rejected(struct kld_stats *stats, enum kld_reject reject);
/* A device failed with this status; KLD_OK: nothing. */
void kld_stats_fault(struct kld_stats *stats, enum kld_status status);
void kld_stats_http_reply(struct kld_stats *stats, unsigned http_status);
/* What an operator that ran had to move, and how long its kernels took. */
void kld_stats_work(struct kld_stats *stats, enum kld_asked asked, enum kld_access access,
                    uint64_t bytes, uint64_t kernel_ns);
const char *kld_asked_name(enum kld_asked asked);
/* Requests of a front that ended so, whatever they asked for. */
uint64_t kld_stats_requests_of(const struct kld_stats *stats, enum kld_front front,
                               unsigned status);

/* The same of infer requests over HTTP alone: without tensors that were to be stored. */
uint64_t kld_stats_inferences_of(const struct kld_stats *stats, unsigned status);

/* Sets the gauges of a role ("worker", "gateway") in its block to 0. */
void kld_stats_reset_role(struct kld_stats *stats, const char *role);

#endif
