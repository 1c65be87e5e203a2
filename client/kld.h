/* kld.h - libkld: KL-family divergences and their gradients, computed by a kld server or in this
 * process.
 *
 * One API over four kinds of connection, named by a URL:
 *   unix:/run/kld/kld.sock   a worker on this host; tensors travel in shared memory or as GPU
 *                            handles, never through the socket
 *   http://host:8080         the HTTP gateway (also https://); tensors are sent as binary
 *   local:                   the same kernels in the caller's own process, no server; also
 *                            local:cpu, local:cuda, local:cuda:1. Which CUDA device is current in a
 *                            thread, or that none is, stays as it was
 *   split:URL,URL,...        several of the above: each request's rows are spread over them
 *
 * A request is a struct kld_op (proto/op.h: dtypes, shapes, divergence, reduction, forms) and, for
 * each tensor in it, where its bytes are: a plain pointer, or a region made by this connection.
 * Regions are the fast way on unix: a plain pointer there is copied through one, inside
 * kld_submit() and kld_process(). Each call says the same over every connection and the answers are
 * bit-identical for the same back end.
 *
 * A lost server. Over unix: and http: a request that can safely run again is sent again by itself
 * until its deadline (without one: for 30 s from its start or the loss, whichever is later), to at
 * most 10 servers that are lost; others end with KLD_DEVICE_LOST or KLD_UNAVAILABLE. One during
 * which the device failed twice (as a server over http says after it tried again: ten times) ends
 * with KLD_DEVICE_LOST: it may be what kills it.
 * Not safe are: a gradient over its own tensor in a region (over http: once its reply has begun), a
 * request whose inputs a later one in flight writes over (over http: and split: it is sent again
 * all the same, so nobody may write there before it has ended), and whatever names a pool region or
 * a done event. Regions are registered again by themselves, all but pool regions, whose contents
 * are gone; published tensors are published again (see kld_published()), attached ones attached
 * again. What a server that shuts down no longer took is sent to the next one. Over http a server
 * that answers 503 is asked again until that deadline, however often it says so: not before its
 * Retry-After has passed, and 20 to 640 ms behind it, more with each answer and never all callers
 * at once.
 *
 * Several devices. A server with more than one has a socket for each, PATH, PATH.1, PATH.2, ...,
 * and a connection works on one of them. Connect to any: the first import of GPU memory or of an
 * event takes the connection to where that lies, and attaching to a tensor to where it is
 * published. From then on memory of another device is refused; it needs a connection of its own,
 * unless the server was started with peer_access and the cards reach each other: then requests run
 * where the connection is, so import the memory of the predictions first.
 * Where all tensors lie in host memory the socket decides.
 *
 * Several servers. Over split: a request too large for one server, or too slow, is cut into parts
 * of some rows, which go to whichever server is free, two at a time to each. What comes back is
 * what one of them would have given, to the bit, however many there are and whatever became of them
 * meanwhile; only may, where GPUs compute, a loss that is one number differ in the last bit of the
 * FP64 sum from that of a request that was not split, and those of rows in the eighth digit where
 * the weights of rowmean sum to 0; and row weights whose sum is not finite are KLD_INVALID with
 * rowmean. For that all of them must be of one release
 * and compute with the same back end (CPUs: with the same vectors; GPUs: the same model): others
 * are refused. A part whose server is lost, busy or silent for part_timeout_ns goes to another one,
 * gradients over their own tensors included; a lost server is looked for again after 0.1 s, then
 * less often, up to every 5 s. Without any server a request waits until its deadline, without one
 * 30 s, then it ends with what each of them said. Tensors are plain host memory, which is not
 * copied as a whole, or regions, which are plain memory here; 8 bytes a row are needed besides.
 *
 * Order. Requests of one stream run in order over unix: and local:. Over http: and split: they are
 * independent: wait for one before the next reads what it wrote.
 *
 * Ownership: whatever a function returns through ret_... is the caller's to release. Threads: a
 * connection and all that it made belong to one thread at a time; different connections are
 * independent. Errors: enum kld_status, described in *err, which may be NULL. libkld never writes
 * to stdout or stderr and never exits. Once loaded it stays so, whatever dlclose() is told: over
 * http: a thread of libcurl's may still look a name up. */
#ifndef KLD_CLIENT_KLD_H
#define KLD_CLIENT_KLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/op.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KLD_EXPORT __attribute__((visibility("default")))

struct kld_connection;
struct kld_region;
struct kld_event;

struct kld_connect_options {
    const char *client_name;     /* printable ASCII, for the server's logs; NULL: "libkld" */
    uint64_t connect_timeout_ns; /* how long to wait for a server; 0: 5 s */
    bool lazy; /* unix, http: kld_connect() does not wait; the connection is made inside
                * kld_process(), or by the first import of GPU memory or of an event, which waits */
    uint64_t staging_bytes_max; /* unix: most shared memory for plain-pointer tensors; 0: 4 GiB */
    const char *token;          /* http: bearer token; NULL: none */
    const char *ca_file;        /* https: certificates to trust; NULL: the system's */
    uint32_t threads;           /* local: on the CPU; 0: all */
    uint64_t pool_bytes_max;    /* local: see kernels/backend.h; 0: its default */
    /* http: called while a body travels; split: after each part. total_bytes is not 0. Return
     * non-zero to abort with KLD_CANCELLED. Calls no function of libkld, kld_cancel() among them.
     */
    int (*progress)(void *user, uint64_t sent_bytes, uint64_t total_bytes);
    void *progress_user;
    /* split: inputs and outputs of one part at most, of a row at least; 0: 64 MiB. */
    uint64_t part_bytes_max;
    uint64_t part_timeout_ns; /* split: a server that has not answered a part by then; 0: 60 s */
    const char *cert_file;    /* https: PEM, the certificate to show; NULL: none */
    const char *key_file;     /* https: PEM, its key, without a passphrase; NULL: in cert_file */
};

/* options may be NULL. */
KLD_EXPORT enum kld_status kld_connect(const char *url, const struct kld_connect_options *options,
                                       struct kld_connection **ret_connection,
                                       struct kld_error *err);
/* Releases the connection and every region it made. Requests in flight are dropped, their callbacks
 * not called; over local: it waits until the device has let go of the caller's memory. Not from a
 * callback. NULL is allowed. A child made by fork() connects by itself; of its parent's connection
 * it may call this alone, which leaves the parent's as it was, and over unix: alone gives back
 * memory; over http: its copies of the sockets stay open until it ends. What it executes has none
 * of libkld's descriptors, but for a pair of libcurl's own, over http:, that leads nowhere. */
KLD_EXPORT void kld_close(struct kld_connection *connection);

struct kld_server_info {
    char backend[16];
    char device[64];           /* over split: of how many servers, too: "1 of 2 servers: ..." */
    uint64_t epoch;            /* changes when the worker was restarted; 0 where unknown */
    uint64_t region_bytes_max; /* 0: no limit known */
    uint32_t requests_max;     /* in flight on this connection; 0: no limit known */
    uint32_t streams_max;      /* 0: no limit known */
    uint32_t events_max;       /* of this connection; 0: no events, and no `early` */
    uint8_t device_uuid[16];   /* of the card; all 0: a CPU, or unknown */
    uint32_t device_index;     /* of the server's devices, the one of this connection */
    uint32_t devices;          /* that the server has; 0: unknown, as over split: */
    char version[24];          /* release of the server; "": unknown, as over unix: */
};
KLD_EXPORT enum kld_status kld_info(struct kld_connection *connection,
                                    struct kld_server_info *ret_info, struct kld_error *err);
/* Over split:, the index-th of the servers that have not answered since kld_connect(): ret_why says
 * its address and why. False: there are no more of them. Asks nobody. */
KLD_EXPORT bool kld_missing(const struct kld_connection *connection, uint32_t index,
                            struct kld_error *ret_why);
/* How often the server was lost so far, as libkld has noticed in a call: what
 * kld_region_create_pool() made before the last time is lost, also where the server has stayed. 0
 * but over unix:. Asks nobody. */
KLD_EXPORT uint64_t kld_losses(const struct kld_connection *connection);
/* A round trip that computes nothing. */
KLD_EXPORT enum kld_status kld_ping(struct kld_connection *connection, uint64_t *ret_ns,
                                    struct kld_error *err);

/* ---- Regions -------------------------------------------------------------------------------- */

/* Memory that both sides see without a copy. unix: a sealed memfd, mapped here and registered in
 * the background (should the server refuse it, the requests that name it end with that error),
 * which takes a file descriptor of this process until the drop, as each import of a descriptor
 * does: KLD_NO_MEMORY where none is left, or where the process may make no file of that size
 * (RLIMIT_FSIZE); http, local: plain memory. Page-aligned, zeroed. Where this connection has as
 * many regions as it may, and some that were dropped count until the server answers, both wait for
 * that, up to connect_timeout_ns. */
KLD_EXPORT enum kld_status kld_region_create(struct kld_connection *connection, uint64_t bytes,
                                             struct kld_region **ret_region, struct kld_error *err);
/* A memfd of the caller's, with F_SEAL_SHRINK and open for reading and writing: one that is sealed
 * against writing is KLD_INVALID, also for inputs alone; the descriptor is duplicated. One that was
 * imported twice is one memory: what overlaps is refused as in one region. */
KLD_EXPORT enum kld_status kld_region_import_memfd(struct kld_connection *connection, int fd,
                                                   uint64_t bytes, struct kld_region **ret_region,
                                                   struct kld_error *err);
/* GPU memory of this process, by the cudaIpcMemHandle_t of its base allocation (base_bytes long, on
 * the card with that UUID); the region is `bytes` bytes at offset_bytes. The caller keeps the
 * allocation alive until the region is dropped. unix only. */
KLD_EXPORT enum kld_status
kld_region_import_cuda_ipc(struct kld_connection *connection, const uint8_t handle[64],
                           const uint8_t device_uuid[16], uint64_t base_bytes,
                           uint64_t offset_bytes, uint64_t bytes, struct kld_region **ret_region,
                           struct kld_error *err);
/* The same for memory that was made with cuMemCreate() (expandable segments of caching allocators,
 * for one): the descriptor is what cuMemExportToShareableHandle() gives for
 * CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; it is duplicated. base_bytes: of the whole allocation.
 * An output that overlaps another tensor is noticed when both regions were made with the same
 * descriptor or a duplicate, not when the allocation was exported twice, nor beyond the server's
 * cuda_files_max allocations (1024 unless it is configured, half of them for one connection). unix
 * only. */
KLD_EXPORT enum kld_status kld_region_import_cuda_fd(struct kld_connection *connection, int fd,
                                                     const uint8_t device_uuid[16],
                                                     uint64_t base_bytes, uint64_t offset_bytes,
                                                     uint64_t bytes, struct kld_region **ret_region,
                                                     struct kld_error *err);
/* GPU memory that is in pieces, cuMemCreate() allocations mapped side by side, as one region
 * without a copy: reserve makes one on the card with that UUID, without memory, that may grow to
 * `bytes`; grow puts a whole allocation of `bytes` bytes, exported as for
 * kld_region_import_cuda_fd(), behind those that it has. kld_region_bytes() is what it has:
 * requests may name that. Pieces stay until the region is dropped, and what is a piece cannot be
 * shown by another region as well, as far as the server can tell (as above): KLD_INVALID. After an
 * error of grow the region is what it was and may grow by another piece; only where that was
 * KLD_UNAVAILABLE, no answer within connect_timeout_ns, it grows no more until its worker was
 * replaced. Each piece takes a file descriptor of this process, until the drop; where those of a
 * connection are half of RLIMIT_NOFILE (soft), grow says KLD_NO_MEMORY. Not while a request that
 * names it is being made. unix only; KLD_UNIMPLEMENTED where the server has no such regions.
 * Blocking. */
KLD_EXPORT enum kld_status kld_region_reserve_cuda(struct kld_connection *connection,
                                                   const uint8_t device_uuid[16], uint64_t bytes,
                                                   struct kld_region **ret_region,
                                                   struct kld_error *err);
KLD_EXPORT enum kld_status kld_region_grow_cuda_fd(struct kld_region *region, int fd,
                                                   uint64_t bytes, struct kld_error *err);
/* A buffer in the server's device pool, of which a connection may have half, or what the server's
 * client_pool_bytes_max says: filled and read by kld_copy(), lost with the worker, and
 * with the connection to it (kld_losses()). unix and local. */
KLD_EXPORT enum kld_status kld_region_create_pool(struct kld_connection *connection, uint64_t bytes,
                                                  struct kld_region **ret_region,
                                                  struct kld_error *err);
/* The bytes, for regions that this process can address; NULL for others. Valid until the drop. */
KLD_EXPORT void *kld_region_data(struct kld_region *region);
KLD_EXPORT uint64_t kld_region_bytes(const struct kld_region *region);
/* The region may be dropped while requests use it: they finish first. NULL is allowed. */
KLD_EXPORT void kld_region_drop(struct kld_region *region);

/* ---- Published tensors ---------------------------------------------------------------------- */

/* One process publishes a tensor under a name, others read it in its place: a teacher's logits,
 * say, and students that each take them at a temperature of their own. No byte is copied. unix
 * only, and among connections to the same server. When the tensor may be read is for the processes
 * to settle: a request reads what is there when it runs. */

#define KLD_TENSOR_NAME_MAX 64 /* bytes of a name, NUL included: letters from '!' to '~' */

struct kld_tensor_view {
    uint32_t dtype, form; /* enum kld_dtype, enum kld_form */
    uint32_t rank;        /* 1 to KLD_RANK_MAX; the last dimension holds the classes */
    uint32_t owner_uid;   /* of an attached tensor; kld_publish() does not look at it */
    uint64_t shape[KLD_RANK_MAX];
    uint64_t row_stride_bytes; /* 0: rows follow each other */
    uint64_t offset_bytes;     /* in the region; of an attached tensor 0 */
};

/* Publishes a tensor in a region of this connection. Who may attach: this process's user, and the
 * uids named (at most 8). Ends with kld_detach(), the drop of the region, whatever still uses that,
 * and kld_close(). A name is its user's, other users may use it too. KLD_EXISTS: this user
 * publishes it already. KLD_TOO_LARGE: as many as one user may publish. Blocking. */
KLD_EXPORT enum kld_status kld_publish(struct kld_connection *connection, const char *name,
                                       struct kld_region *region,
                                       const struct kld_tensor_view *tensor, const uint32_t *uids,
                                       uint32_t uids_count, struct kld_error *err);
/* KLD_OK: the tensor that this connection published under the name still is; or will be, as far as
 * is known, when a lost server is back and libkld has waited or handled answers. Else why it could
 * not be published again (KLD_EXISTS: by now another connection of this user has that name): it is
 * not published, until kld_publish() is called again. KLD_NOT_FOUND: this connection published none
 * of that name. Never blocks. */
KLD_EXPORT enum kld_status kld_published(struct kld_connection *connection, const char *name,
                                         struct kld_error *err);
/* Takes a tensor that this connection published off its name. Requests in flight that read it end
 * as if nothing had happened; later ones end with KLD_GONE. Blocking. */
KLD_EXPORT enum kld_status kld_detach(struct kld_connection *connection, const char *name,
                                      struct kld_error *err);
/* A region that is the tensor published by this process's user and nothing else; *ret_tensor says
 * what it holds. It can be read by requests and copies and not written; kld_region_data() is NULL.
 * Waits up to timeout_ns (0: not at all) for the name to be published, looking for it every 5 to
 * 320 ms, less often with time, then KLD_NOT_FOUND,
 * as where it is not for this user. After a lost server it is attached again by itself, waiting up
 * to 30 s for its publisher to be back; requests that name it, and those behind them, wait as long.
 * Published again in another shape, it is KLD_GONE. Let go of it with kld_region_drop(). Blocking.
 */
KLD_EXPORT enum kld_status kld_attach(struct kld_connection *connection, const char *name,
                                      uint64_t timeout_ns, struct kld_region **ret_region,
                                      struct kld_tensor_view *ret_tensor, struct kld_error *err);
/* The same of a tensor that the user `uid` published and whose owner named this process's user. */
KLD_EXPORT enum kld_status kld_attach_from(struct kld_connection *connection, uint32_t uid,
                                           const char *name, uint64_t timeout_ns,
                                           struct kld_region **ret_region,
                                           struct kld_tensor_view *ret_tensor,
                                           struct kld_error *err);

/* ---- Events of a GPU ------------------------------------------------------------------------ */

/* Two points in the work of a GPU by which a whole training step needs no CPU that waits:
 *   1 record your ready event on your stream, behind what writes the tensors;
 *   2 kld_run() with wait = that event, record = a done event, early = true: returns as soon as the
 *     server's stream has the work;
 *   3 let your stream wait for the done event.
 * Record the ready event again only after kld_run() has returned or the callback came. A fence (see
 * kld_fence_create()) takes the done event's place where the end of the server must not hold up
 * your stream for good. unix with a CUDA server only; else KLD_UNIMPLEMENTED. Blocking. */

/* An event of this process, made with cudaEventDisableTiming | cudaEventInterprocess, by its
 * cudaIpcEventHandle_t; the caller keeps it until the drop. Registered again after a lost server.
 */
KLD_EXPORT enum kld_status kld_event_import(struct kld_connection *connection,
                                            const uint8_t handle[64], const uint8_t device_uuid[16],
                                            struct kld_event **ret_event, struct kld_error *err);
/* A done event of the server: open ret_handle with cudaIpcOpenEventHandle(). Lost with the server:
 * requests that name it then end with KLD_DEVICE_LOST; drop it and create another. */
KLD_EXPORT enum kld_status kld_event_create(struct kld_connection *connection,
                                            uint8_t ret_handle[64], struct kld_event **ret_event,
                                            struct kld_error *err);
/* May be dropped while requests name it. NULL is allowed. */
KLD_EXPORT void kld_event_drop(struct kld_event *event);

/* A done fence, in the place of a done event: a stream that waits for it goes on when the server is
 * lost, which no event can do. It is a word of host memory, alone in a page of KLD_FENCE_BYTES, to
 * which the device writes a number behind each request that names it:
 *   1 create it; pin its page for your GPU (cudaHostRegister(word, KLD_FENCE_BYTES,
 *     cudaHostRegisterMapped)) and ask for the device's address of it (cudaHostGetDevicePointer());
 *   2 kld_run() with record = the fence, early = true;
 *   3 if that was KLD_OK, let your stream wait for the result's fence_number:
 *     cuStreamWaitValue32(stream, address, fence_number, CU_STREAM_WAIT_VALUE_GEQ). After an error
 *     there is nothing to wait for.
 * When the connection to the server ends, libkld writes a number to the word that is ahead of all,
 * and does so again if the dying device should write over it: in the next call, or at once in a
 * thread of its own, since all of yours may be waiting. That thread starts with a connection's
 * first fence and ends with kld_close(); it does nothing else. Your streams then go on without what
 * they waited for, and the fence is lost: the next request that names it ends with KLD_DEVICE_LOST,
 * and kld_fence_passed() says which of those before it were computed; behind your last one, ask
 * that. Drop the fence and create another.
 * A fence is that of one stream number, the one of the first request that names it: KLD_INVALID for
 * another one. It counts as an event. Before it is dropped, and before kld_close(), what waits for
 * it has ended and its page is no longer pinned. unix with a CUDA server (a driver of CUDA 11.7 or
 * newer) only; else KLD_UNIMPLEMENTED. Blocking. */
#define KLD_FENCE_BYTES 4096
KLD_EXPORT enum kld_status kld_fence_create(struct kld_connection *connection, uint32_t **ret_word,
                                            struct kld_event **ret_fence, struct kld_error *err);
/* Has the server's device reached this number, of a result? What libkld wrote does not count: false
 * after a loss means that the request was not computed, or may not have been; so it does in a child
 * made by fork(). Never blocks. */
KLD_EXPORT bool kld_fence_passed(const struct kld_event *fence, uint32_t number);

/* ---- Requests ------------------------------------------------------------------------------- */

/* Where the bytes of one tensor of the op are. Exactly one of data and region is set for a tensor
 * that the op has (dtype not 0); op.tensor[].region and offset_bytes are ignored and set by libkld.
 */
struct kld_bytes {
    void *data; /* plain memory of this process, valid until the request has ended; host memory, or,
                 * over local:cuda, also device memory. Not written to for inputs. */
    struct kld_region *region;
    uint64_t offset_bytes; /* in the region */
};

/* Whose part a request is: the trace and the span of the caller (W3C Trace Context, the parts of a
 * `traceparent`). id all 0: none. */
struct kld_trace_context {
    uint8_t id[16], span[8];
    uint8_t flags;
};

struct kld_request {
    struct kld_op
        op; /* kld_op_init(), then shape, parameters, tensor[slot].dtype and row_stride_bytes */
    struct kld_bytes bytes[KLD_SLOT_COUNT];
    uint32_t stream; /* requests of one stream run in order. Numbers from the streams_max of
                      * kld_info() on share streams with those below: stream % streams_max */

    /* From now; 0: none. Over it: KLD_DEADLINE. Plain memory is then left alone; a region may be
     * written until a later request of the same stream has ended, and so after kld_cancel(). local:
     * KLD_DEADLINE comes when the work has ended, which nobody interrupts. http: a server has a
     * limit of its own besides, 60 s unless its --http-deadline-ms says otherwise, which ends what
     * is 0 or longer here with KLD_DEADLINE, too. */
    uint64_t timeout_ns;

    struct kld_event *wait;   /* imported: the work begins when it has passed; NULL: at once */
    struct kld_event *record; /* created, or a fence: recorded behind the work; NULL: none */
    /* The answer comes when the device has the work, not when it has ended: no loss, no times, no
     * error of the computation. Every tensor in regions of device memory. Needs `record`: if the
     * device is lost behind such an answer, so is that event, and the next request that names it
     * ends with KLD_DEVICE_LOST: what was answered early before that may not have been computed.
     * A stream of the caller's that was already waiting for the event then waits for good: only the
     * end of its context, or process, frees it, so wait for such streams with a time limit, or use
     * a fence, which has no such end.
     * local:cuda: without events, see kld_stream_adopt(); where a tensor lies in host memory, and
     * on a CPU, the answer comes when the work has ended. */
    bool early;
    struct kld_trace_context trace; /* for the server's log; local: for nothing */
};

/* local:cuda. Requests of that stream number run on a stream of the caller's own from now on, a
 * cudaStream_t of the connection's device (NULL: the default stream), in the order of all that is
 * enqueued there: with `early` a step needs neither events nor a CPU that waits. While the stream
 * is being captured into a graph, requests there are KLD_BUSY. It stays the caller's, who keeps it
 * until kld_close() or until the number is given another, which waits for what runs.
 * cudaStreamPerThread, which is another one in each thread, is refused. */
KLD_EXPORT enum kld_status kld_stream_adopt(struct kld_connection *connection, uint32_t stream,
                                            void *cuda_stream, struct kld_error *err);
/* Which streams a busy server serves first; -1 low, 0 normal (from the start), 1 high. Before the
 * first request of that stream. On a CPU users take turns, and each one's streams among themselves,
 * whatever it was told. unix and local. Blocking. */
KLD_EXPORT enum kld_status kld_stream_priority(struct kld_connection *connection, uint32_t stream,
                                               int priority, struct kld_error *err);

struct kld_result {
    double loss; /* scalar reductions; else 0. NaN and infinities as they are */
    bool scalar; /* loss holds the loss */
    uint64_t queue_ns, copy_ns, kernel_ns; /* as the server measured them; 0 where unknown */
    uint64_t bytes;                        /* moved by the kernels */
    uint64_t total_ns;                     /* from call to answer, as seen here */
    uint32_t attempts;     /* 1, or more where a lost server made libkld send again */
    uint32_t fence_number; /* what `record`, a fence, has when it was computed; 0: it is none */
};

/* Blocking. ret_result may be NULL. */
KLD_EXPORT enum kld_status kld_run(struct kld_connection *connection,
                                   const struct kld_request *request, struct kld_result *ret_result,
                                   struct kld_error *err);
/* kld_run() for callers that have to look after something else at times, an interpreter after its
 * signals, say: it returns when the request has ended, with its status and *ret_id 0; or after
 * slice_ms, or when a signal was handled in this thread, with KLD_OK and the request's *ret_id.
 * Then the request goes on and kld_wait_slice() waits for it, a slice each call, until *id is 0;
 * its tensors stay until then. kld_cancel() does what it says; its end is still to be waited for.
 */
KLD_EXPORT enum kld_status kld_run_slice(struct kld_connection *connection,
                                         const struct kld_request *request, uint32_t slice_ms,
                                         uint64_t *ret_id, struct kld_result *ret_result,
                                         struct kld_error *err);
KLD_EXPORT enum kld_status kld_wait_slice(struct kld_connection *connection, uint64_t *id,
                                          uint32_t slice_ms, struct kld_result *ret_result,
                                          struct kld_error *err);
/* Blocking. Copies between two regions of this connection (they may not overlap). */
KLD_EXPORT enum kld_status kld_copy(struct kld_connection *connection,
                                    struct kld_region *destination,
                                    uint64_t destination_offset_bytes, struct kld_region *source,
                                    uint64_t source_offset_bytes, uint64_t bytes,
                                    struct kld_error *err);

/* ---- Without blocking ----------------------------------------------------------------------- */

/* kld_submit() returns at once. KLD_BUSY: as many requests are in flight as the server allows, or
 * staging memory for plain pointers is taken. The callback runs inside kld_process(), once for each
 * submitted request, never inside kld_submit() or kld_run(). A connection may be lost and found
 * again in between; kld_fd() stays the same. */
typedef void (*kld_callback)(void *user, enum kld_status status, const struct kld_result *result,
                             const struct kld_error *error);
KLD_EXPORT enum kld_status kld_submit(struct kld_connection *connection,
                                      const struct kld_request *request, kld_callback callback,
                                      void *user, uint64_t *ret_id, struct kld_error *err);
/* kld_copy() without blocking. */
KLD_EXPORT enum kld_status
kld_submit_copy(struct kld_connection *connection, struct kld_region *destination,
                uint64_t destination_offset_bytes, struct kld_region *source,
                uint64_t source_offset_bytes, uint64_t bytes, uint32_t stream, uint64_t timeout_ns,
                kld_callback callback, void *user, uint64_t *ret_id, struct kld_error *err);
/* Asks for a request to be given up; its callback still comes (KLD_CANCELLED, or its result if that
 * was faster: always over local:). */
KLD_EXPORT void kld_cancel(struct kld_connection *connection, uint64_t id);
/* Holds back the requests that are submitted from here on, to send them together: several small
 * ones over the Unix socket in one packet, which costs the two processes less. They go when there
 * are many, at kld_uncork(), and whenever libkld waits or handles answers. */
KLD_EXPORT void kld_cork(struct kld_connection *connection);
KLD_EXPORT void kld_uncork(struct kld_connection *connection);
/* A descriptor for the caller's own loop: when it is readable, call kld_process(). */
KLD_EXPORT int kld_fd(const struct kld_connection *connection);
/* Handles what has arrived and returns; waits up to timeout_ms for something first (0: not at all,
 * -1: until something; at once if nothing is in flight). Over split: it may take up to a second
 * more, where a server was lost and is asked what it is. After an early answer of a connection with
 * no server, call it once, with 0, before a loop of your own waits for kld_fd(). */
KLD_EXPORT enum kld_status kld_process(struct kld_connection *connection, int timeout_ms,
                                       struct kld_error *err);

/* ---- Statistics and ceilings ---------------------------------------------------------------- */

struct kld_server_stats {
    uint64_t epoch, uptime_ns;
    uint64_t requests_total, errors_total;
    uint32_t in_flight, clients;
    uint64_t regions, region_bytes;
    uint64_t pool_bytes, pool_bytes_max;
    uint64_t kernel_ns_total, bytes_total;
};
/* unix and local; over http KLD_UNIMPLEMENTED (see kld_metrics()). */
KLD_EXPORT enum kld_status kld_stats(struct kld_connection *connection,
                                     struct kld_server_stats *ret_stats, struct kld_error *err);
/* http only: what the server counts, its /metrics, as Prometheus text that ends in a NUL. All of it
 * fits in KLD_METRICS_TEXT_MAX bytes; KLD_TOO_LARGE: not in `capacity`. */
#define KLD_METRICS_TEXT_MAX (1u << 20)
KLD_EXPORT enum kld_status kld_metrics(struct kld_connection *connection, char *ret_text,
                                       size_t capacity, struct kld_error *err);
/* local only: bytes per second this device can read two arrays of `bytes` each, and with a third
 * one written. */
KLD_EXPORT enum kld_status kld_measure_ceiling(struct kld_connection *connection, uint64_t bytes,
                                               double *ret_read_per_s, double *ret_read_write_per_s,
                                               struct kld_error *err);
KLD_EXPORT const char *kld_version(void); /* "0.1.0" */

#ifdef __cplusplus
}
#endif
#endif
