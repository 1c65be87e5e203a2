/* unix.h - the inside of a connection over the Unix socket: shared by unix.c (socket, requests),
 * unix_lost.c (a worker that is gone), unix_calls.c (entry points) and unix_memory.c (regions,
 * staging). Everything belongs to the thread that owns the connection. */
#ifndef KLD_CLIENT_UNIX_H
#define KLD_CLIENT_UNIX_H

#include <sys/types.h>

#include "client/connection.h"
#include "proto/wire.h"

#define KLD_TAG_SOCKET KLD_TAG_TRANSPORT
#define KLD_STAGES_MAX 16

/* What the request number of a frame says about it: the top two bits. */
#define KLD_NUMBER_KIND (3ull << 62)
#define KLD_NUMBER_CALL (0ull << 62)    /* the rest is the id of a call */
#define KLD_NUMBER_REGION (1ull << 62)  /* the rest is the local id of a region */
#define KLD_NUMBER_CONTROL (2ull << 62) /* the one control frame that is waited for */
#define KLD_NUMBER_IGNORED (3ull << 62) /* nobody waits */

enum unix_state { UNIX_DOWN, UNIX_GREETING, UNIX_UP };

enum unix_region_state {
    UNIX_REGION_NEW,    /* to be registered as soon as the connection is up */
    UNIX_REGION_ADDING, /* REGION_ADD was sent */
    UNIX_REGION_READY,  /* wire_id is valid on this connection */
    UNIX_REGION_FAILED, /* the server refused it: `error` */
    UNIX_REGION_LOST,   /* a pool region whose worker is gone */
};

struct unix_region {
    struct kld_region base;
    enum unix_region_state state;
    enum kld_region_kind kind;
    bool released; /* no user is left; waits for REGION or for room on the socket, then is freed */
    int fd;        /* memfd: owned; -1 otherwise */
    dev_t inode_device; /* with inode: which memfd it is */
    ino_t inode;
    uint64_t mapped_bytes;
    uint64_t wire_id;
    uint64_t base_bytes, offset_bytes; /* CUDA IPC */
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES], device_uuid[KLD_WIRE_UUID_BYTES];
    struct kld_error error;
};

struct unix_call {
    struct kld_call base;
    bool abandoned;                     /* ended here at its deadline; the server still has it */
    bool cancelled;                     /* not to be sent again */
    bool cancel_wanted;                 /* a CANCEL is to be sent */
    bool lost_device;                   /* the server answered DEVICE_LOST: to be sent again */
    bool refused;                       /* a server that is leaving did not take it */
    bool fence;                         /* ended and answered: see kld_unix_fence() */
    struct unix_stage *stage;           /* the part of it that is this call's; NULL: none */
    uint64_t stage_offset, stage_bytes; /* of the part */
    struct unix_call *stage_next;       /* parts of one stage, by offset */
    uint64_t staged_at[KLD_SLOT_COUNT]; /* offset in the stage of a tensor with plain memory */
};

/* Shared memory of libkld's own, through which tensors in plain memory travel. Owned by the
 * connection; the region lives as long as it. */
struct unix_stage {
    struct unix_region *region; /* NULL: the entry is free */
    struct unix_call *parts;    /* by offset */
};

/* A frame whose answer somebody waits for: PING, STATS. */
struct unix_control {
    bool wanted, sent, ended;
    union kld_frame frame, reply;
    struct kld_error error; /* status set if it failed */
};

struct unix_connection {
    struct kld_connection base;
    char path[108]; /* of the socket */
    int socket;     /* -1 while down */
    enum unix_state state;
    bool welcomed;        /* at least once: `welcome` is valid */
    bool doomed;          /* the worker told that its device is lost */
    bool leaving;         /* the worker takes nothing new, but answers what it has */
    bool want_write;      /* EPOLLOUT is asked for */
    bool closing;         /* inside close() */
    bool locked;          /* lists are being walked: kld_unix_flush() does nothing */
    uint32_t cancels;     /* calls with cancel_wanted */
    uint32_t region_work; /* regions in state NEW, or released ones that are to be dropped */
    uint64_t down_since_ns, retry_at_ns, backoff_ns;
    uint64_t control_sequence;
    struct kld_frame_welcome welcome;
    struct kld_error fatal; /* why the last greeting was refused; status OK: it was not */
    struct kld_call_list queued, sent;
    struct unix_control control;
    struct unix_stage stages[KLD_STAGES_MAX];
    uint64_t stage_bytes_total;
};

enum unix_sent { UNIX_SENT, UNIX_FULL, UNIX_LOST };

/* unix.c */
enum unix_sent kld_unix_send(struct unix_connection *u, const union kld_frame *frame, int fd);
void kld_unix_flush(struct unix_connection *u); /* sends whatever is due */
void kld_unix_connect(struct unix_connection *u);
void kld_unix_retry_later(struct unix_connection *u);
void kld_unix_call_fail(struct unix_connection *u, struct unix_call *call, enum kld_status status,
                        const char *text);
void kld_unix_event(struct kld_connection *connection, uint64_t tag, uint32_t events);

/* unix_lost.c: the connection is gone. What may run again is queued again; the next try is armed.
 */
void kld_unix_lose(struct unix_connection *u);

/* unix_calls.c */
enum kld_status kld_unix_wait_region(struct unix_connection *u, struct unix_region *region,
                                     struct kld_error *err);

/* unix_memory.c */
enum kld_status kld_unix_region_create(struct kld_region *region, struct kld_error *err);
enum kld_status kld_unix_region_import_memfd(struct kld_region *region, int fd,
                                             struct kld_error *err);
enum kld_status kld_unix_region_import_cuda_ipc(struct kld_region *region,
                                                const struct kld_ipc_source *source,
                                                struct kld_error *err);
enum kld_status kld_unix_region_create_pool(struct kld_region *region, struct kld_error *err);
void *kld_unix_region_data(struct kld_region *region);
void kld_unix_region_release(struct kld_region *region);
/* The connection is gone: nothing is registered any more. */
void kld_unix_regions_lost(struct unix_connection *u);
/* Registers and drops what is due. */
enum unix_sent kld_unix_regions_flush(struct unix_connection *u);
void kld_unix_region_answered(struct unix_connection *u, uint64_t local_id,
                              const struct kld_frame_region *reply, const struct kld_error *error);

/* Staging. put: finds room for the call's plain tensors and copies its inputs there. */
enum kld_status kld_unix_stage_put(struct unix_connection *u, struct unix_call *call,
                                   struct kld_error *err);
/* The worker answered a cancelled or late call, which it may yet be writing into its part of a
 * stage: ends the call, and queues a COPY inside that part, of the same stream, in its place. When
 * that is answered the part is free. */
void kld_unix_fence(struct unix_connection *u, struct unix_call *call,
                    const struct kld_error *error);
void kld_unix_stage_get(struct unix_call *call);  /* outputs to the caller's memory */
void kld_unix_stage_free(struct unix_call *call); /* the part */

#endif
