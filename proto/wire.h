/* wire.h - the frames of the Unix-socket protocol, version 1.
 *
 * The socket is SOCK_SEQPACKET: a packet is a frame, its boundaries kept by the kernel, or several
 * (kld_packet_check()). Each type of frame has one size. The structs below are the wire format:
 * little-endian, naturally aligned, every hole a named `reserved` field that must be 0. File
 * descriptors travel as SCM_RIGHTS beside the frame that announces them.
 *
 * Replies carry the request number of the frame they answer and may come in any order. A frame that
 * the receiver cannot even number (short, wrong length, unknown version) is answered by ERROR with
 * the number read, or 0, and the connection stays usable: packets keep their boundaries.
 *
 * Versions. HELLO says the lowest and the highest version that the client speaks, WELCOME the one
 * that is spoken from there on; who has none in common is told so (KLD_VERSION) and by which. A
 * version fixes the size and the meaning of every frame. Until release 1.0 version 1 is whatever a
 * release has: there ATTACH, ATTACHED and WELCOME have grown, and client and server are taken from
 * one release. A frame that is whole in itself, but of the size that another release gives its
 * type, is answered by KLD_VERSION and never read in part. From 1.0 on every such change is a new
 * version. What does not change a frame's size needs none:
 * a new type, a new bit of flags, a use of a reserved field; who does not know it refuses it.
 *
 * No allocation, no I/O; any thread. Both sides use kld_frame_check() before they look inside. */
#ifndef KLD_PROTO_WIRE_H
#define KLD_PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/op.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KLD_WIRE_VERSION 1
#define KLD_WIRE_FDS_MAX 1      /* descriptors that may accompany a frame */
#define KLD_WIRE_DEVICES_MAX 16 /* devices that WELCOME can list */
#define KLD_WIRE_NAME_MAX 64    /* bytes of a name, NUL included */
#define KLD_WIRE_IPC_HANDLE_BYTES 64
#define KLD_WIRE_UUID_BYTES 16
#define KLD_WIRE_PACKET_BYTES_MAX 8192 /* of several frames */
#define KLD_WIRE_PACKET_FRAMES_MAX 32
#define KLD_WIRE_UIDS_MAX 8         /* users that PUBLISH can name */
#define KLD_WIRE_UID_OWN UINT32_MAX /* nobody has it: the user of the connection itself */

/* X(NAME, number, struct suffix). From the client: 1-63. From the worker: 64-. */
#define KLD_FRAME_MAP(X)                                                                           \
    X(HELLO, 1, hello)              /* first frame of a connection -> WELCOME */                   \
    X(REGION_ADD, 2, region_add)    /* -> REGION. Kinds memfd and CUDA_FD: with one descriptor */  \
    X(REGION_DROP, 3, region_drop)  /* -> DONE; the id is free at once, the memory later */        \
    X(COPY, 4, copy)                /* -> DONE */                                                  \
    X(SUBMIT, 5, submit)            /* -> DONE */                                                  \
    X(CANCEL, 6, cancel)            /* -> DONE for itself; the cancelled one gets its own */       \
    X(STATS, 7, plain)              /* -> STATS_REPLY */                                           \
    X(PING, 8, plain)               /* -> PONG */                                                  \
    X(EVENT_ADD, 9, event_add)      /* -> EVENT */                                                 \
    X(EVENT_DROP, 10, event_drop)   /* -> DONE; the id is free at once, the event later */         \
    X(PUBLISH, 11, publish)         /* -> DONE */                                                  \
    X(ATTACH, 12, attach)           /* -> ATTACHED */                                              \
    X(DETACH, 13, name)             /* -> DONE; ends a publication of this connection */           \
    X(STREAM, 14, stream)           /* -> DONE; before the first request of that stream */         \
    X(TRACE, 15, trace)             /* -> nothing; right before its SUBMIT */                      \
    X(FENCE_ADD, 16, fence_add)     /* -> EVENT; dropped by EVENT_DROP */                          \
    X(REGION_GROW, 17, region_grow) /* -> REGION; with one descriptor */                           \
    X(WELCOME, 64, welcome)                                                                        \
    X(REGION, 65, region)                                                                          \
    X(DONE, 66, done)                                                                              \
    X(STATS_REPLY, 67, stats_reply)                                                                \
    X(PONG, 68, plain)                                                                             \
    X(ERROR, 69, error)                                                                            \
    X(EVENT, 70, event)                                                                            \
    X(ATTACHED, 71, attached)

enum kld_frame_type {
#define X(NAME, number, suffix) KLD_FRAME_##NAME = number,
    KLD_FRAME_MAP(X)
#undef X
};

struct kld_frame_header {
    uint32_t length; /* of the whole frame, this header included */
    uint16_t version;
    uint16_t type;    /* enum kld_frame_type */
    uint64_t request; /* chosen by the client, not 0; unique among its requests in flight */
};

/* PING, PONG, STATS. */
struct kld_frame_plain {
    struct kld_frame_header header;
};

struct kld_frame_hello {
    struct kld_frame_header header;
    uint16_t version_min, version_max; /* that the client speaks */
    uint32_t reserved;
    char client_name[KLD_WIRE_NAME_MAX]; /* for logs and statistics: printable ASCII, NUL-padded */
};

struct kld_wire_device {
    uint8_t uuid[KLD_WIRE_UUID_BYTES]; /* all 0 for the CPU */
    char name[KLD_WIRE_NAME_MAX];      /* NUL-padded */
};

/* The worker takes memory of other cards of this host too: of each that it sees and that its own
 * can read and write in place, whether or not the server computes on that one. */
#define KLD_WELCOME_PEERS 1u
/* The worker takes packets of several frames. To a client that has sent one it sends such. */
#define KLD_WELCOME_PACKETS 2u
/* The worker takes regions of the kind CUDA_SPACE. */
#define KLD_WELCOME_SPACES 4u

struct kld_frame_welcome {
    struct kld_frame_header header;
    uint64_t epoch;   /* of this worker process; a new one after each restart. Never 0 */
    uint16_t version; /* spoken from here on */
    uint16_t device;  /* index of the device behind this socket */
    uint32_t devices; /* entries used in device_list; socket i is PATH (i = 0) or PATH.i */
    char backend[16]; /* "cpu", "cuda" */
    /* Limits of one connection. */
    uint32_t regions_max, requests_max, streams_max;
    uint32_t events_max;       /* 0: this back end has none, and no EARLY */
    uint64_t region_bytes_max; /* of one region */
    uint64_t pool_bytes_max;   /* of all pool regions of the worker */
    struct kld_wire_device device_list[KLD_WIRE_DEVICES_MAX];
    uint32_t publications_max; /* of one user */
    uint32_t flags;            /* KLD_WELCOME_* */
};

enum kld_region_kind {
    KLD_REGION_MEMFD = 1,      /* one memfd with F_SEAL_SHRINK, from its byte 0 */
    KLD_REGION_CUDA_IPC = 2,   /* a cudaIpcMemHandle_t of the whole base allocation */
    KLD_REGION_POOL = 3,       /* memory of the worker's device pool; gone with the worker */
    KLD_REGION_CUDA_FD = 4,    /* a CUDA VMM allocation, exported as a POSIX file descriptor */
    KLD_REGION_CUDA_SPACE = 5, /* addresses, in which REGION_GROW puts such allocations */
};

struct kld_frame_region_add {
    struct kld_frame_header header;
    uint32_t kind; /* enum kld_region_kind */
    uint32_t reserved;
    uint64_t bytes;        /* of the region; CUDA_SPACE: what it may grow to */
    uint64_t offset_bytes; /* CUDA: where the region starts in the base allocation; else 0 */
    uint64_t base_bytes;   /* CUDA: size of the base allocation; else 0 */
    uint8_t device_uuid[KLD_WIRE_UUID_BYTES];      /* CUDA: where the memory lies; else 0 */
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES]; /* CUDA IPC; else 0 */
};

/* A whole CUDA VMM allocation, `bytes` long and exported as for CUDA_FD, for a region of the kind
 * CUDA_SPACE: the next piece, right behind those that it has. Such a region begins without memory,
 * has as many bytes as its pieces, and loses none before it is dropped, so that every byte of it
 * can be read at any time. One at a time: the next is sent when this one was answered. */
struct kld_frame_region_grow {
    struct kld_frame_header header;
    uint64_t region;
    uint64_t offset_bytes; /* where it begins: the bytes that the region has */
    uint64_t bytes;
};

struct kld_frame_region_drop {
    struct kld_frame_header header;
    uint64_t region;
};

struct kld_frame_copy {
    struct kld_frame_header header;
    uint64_t destination, destination_offset_bytes;
    uint64_t source, source_offset_bytes;
    uint64_t bytes;
    uint32_t stream; /* below streams_max; requests of one stream run in order */
    uint32_t reserved;
};

struct kld_wire_tensor {
    uint32_t dtype; /* 0: absent, everything else 0 then */
    uint32_t reserved;
    uint64_t region, offset_bytes, row_stride_bytes; /* region: an id from REGION, never 0 */
};

/* DONE is sent when all of the work was given to the device, not when it has ended: it holds no
 * loss and no times. Only where every tensor lies in device memory. */
#define KLD_SUBMIT_EARLY 1u

struct kld_frame_submit {
    struct kld_frame_header header;
    uint32_t stream;
    uint32_t flags;      /* KLD_SUBMIT_EARLY */
    uint64_t timeout_ns; /* from arrival; 0: none */
    uint32_t divergence, reduction, predictions_form, targets_form;
    uint32_t rank, given;
    uint64_t shape[KLD_RANK_MAX];     /* entries from rank on are 0 */
    double number[7];                 /* the order of KLD_NUMBER_MAP; read only where `given` */
    struct kld_wire_tensor tensor[9]; /* the order of KLD_SLOT_MAP */
    uint64_t ready_event; /* the device waits for it before it touches a tensor; 0: none */
    /* An event of kind done, which the device records behind the work, or a fence, to which it
     * writes DONE's fence_number; enqueued before DONE is sent. 0: none */
    uint64_t done_event;
};

/* Whose part a request is, for the line that the worker's log has of it (W3C Trace Context). */
struct kld_frame_trace {
    struct kld_frame_header header;
    uint64_t target;         /* request number of the SUBMIT that comes next on this connection */
    uint8_t id[16], span[8]; /* not all 0, either of them */
    uint32_t flags;          /* up to 255 */
    uint32_t reserved;
};

struct kld_frame_cancel {
    struct kld_frame_header header;
    uint64_t target; /* request number of a SUBMIT or COPY of this connection */
};

enum kld_event_kind {
    KLD_EVENT_READY = 1, /* the client's: a cudaIpcEventHandle_t */
    KLD_EVENT_DONE = 2,  /* the worker makes one and hands out its handle */
    KLD_EVENT_FENCE = 3, /* by FENCE_ADD, and not by EVENT_ADD */
};

struct kld_frame_event_add {
    struct kld_frame_header header;
    uint32_t kind; /* enum kld_event_kind */
    uint32_t reserved;
    uint8_t device_uuid[KLD_WIRE_UUID_BYTES];      /* of the card */
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES]; /* READY; else 0 */
};

/* A 32-bit word, of the client's host memory, that takes the place of a done event. The worker sets
 * it to 0; the device writes 1, 2, 3, ... there, one number for each SUBMIT that names it, 0 left
 * out when 32 bits are through. Of requests of one stream only: the first that names it says which.
 */
struct kld_frame_fence_add {
    struct kld_frame_header header;
    uint64_t region;       /* memfd */
    uint64_t offset_bytes; /* a multiple of 4 */
};

struct kld_frame_event {
    struct kld_frame_header header;
    uint64_t event; /* its id: not 0, never given twice in one connection */
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES]; /* DONE: a cudaIpcEventHandle_t; else 0 */
};

struct kld_frame_event_drop {
    struct kld_frame_header header;
    uint64_t event;
};

/* A tensor in a region: what PUBLISH says about it and ATTACHED repeats. */
struct kld_wire_description {
    uint32_t dtype, form;
    uint32_t rank, reserved;
    uint64_t shape[KLD_RANK_MAX]; /* entries from rank on are 0 */
    uint64_t row_stride_bytes;    /* 0: rows follow each other */
};

struct kld_frame_publish {
    struct kld_frame_header header;
    char name[KLD_WIRE_NAME_MAX];  /* printable ASCII without blanks, NUL-padded; of one user */
    uint64_t region, offset_bytes; /* where the tensor begins */
    struct kld_wire_description tensor;
    uint32_t uids_count; /* 0: whoever has the publisher's uid may attach */
    uint32_t reserved;
    uint32_t uids[KLD_WIRE_UIDS_MAX]; /* else these too; entries from uids_count on are 0 */
};

struct kld_frame_attach {
    struct kld_frame_header header;
    char name[KLD_WIRE_NAME_MAX];
    uint32_t uid; /* whose name: a user has no part in another one's. Or KLD_WIRE_UID_OWN */
    uint32_t reserved;
};

/* DETACH. */
struct kld_frame_name {
    struct kld_frame_header header;
    char name[KLD_WIRE_NAME_MAX];
};

/* The attached region begins where the tensor does. It can be read, not written, and is let go of
 * by REGION_DROP. */
struct kld_frame_attached {
    struct kld_frame_header header;
    uint64_t region, bytes;
    struct kld_wire_description tensor;
    uint32_t uid; /* of the owner */
    uint32_t reserved;
};

struct kld_frame_stream {
    struct kld_frame_header header;
    uint32_t stream;
    int32_t priority; /* -1 low, 0 normal, 1 high */
};

struct kld_frame_region {
    struct kld_frame_header header;
    uint64_t region; /* its id: not 0, never given twice in one connection */
    uint64_t bytes;  /* that requests may name; CUDA_SPACE: of its pieces so far */
};

/* The answer to whatever says "-> DONE" above and worked. A failure is an ERROR. */
struct kld_frame_done {
    struct kld_frame_header header;
    double loss;       /* scalar reductions: the loss, rounded to its dtype; else 0 */
    uint64_t queue_ns; /* from arrival to launch */
    uint64_t copy_ns;  /* moving tensors between host and device, if that was needed */
    uint64_t kernel_ns;
    uint64_t bytes;  /* read and written by the kernels, or copied */
    uint32_t scalar; /* 1 if loss holds the loss */
    uint32_t
        fence_number; /* what the device writes to the fence of the request; 0: it named none */
};

struct kld_frame_error {
    struct kld_frame_header header; /* request: of the frame that failed, 0 if it had none */
    uint32_t status;                /* enum kld_status, not OK */
    uint32_t reserved;
    char text[KLD_ERROR_TEXT_MAX];
};

struct kld_frame_stats_reply {
    struct kld_frame_header header;
    uint64_t epoch;
    uint64_t uptime_ns;
    uint64_t requests_total, errors_total; /* of the worker since it started */
    uint32_t in_flight, clients;
    uint64_t regions, region_bytes;
    uint64_t pool_bytes, pool_bytes_max;
    uint64_t kernel_ns_total, bytes_total;
};

union kld_frame {
    struct kld_frame_header header;
#define X(NAME, number, suffix) struct kld_frame_##suffix as_##NAME;
    KLD_FRAME_MAP(X)
#undef X
};

/* The size of a frame of this type; 0 if there is no such type. */
size_t kld_frame_bytes(uint16_t type);
const char *kld_frame_name(uint16_t type);

/* Zeroes *frame and fills in the header. */
void kld_frame_init(union kld_frame *frame, enum kld_frame_type type, uint64_t request);

/* Are these `bytes` bytes a whole frame of a known version and type, of that type's length? fds:
 * how many descriptors came along. `truncated`: MSG_TRUNC or MSG_CTRUNC was set. *ret_request is
 * set whenever 16 bytes are there, so that the error can be addressed. */
enum kld_status kld_frame_check(const void *data, size_t bytes, unsigned fds, int truncated,
                                uint64_t *ret_request, struct kld_error *err);

/* May it share a packet with others? SUBMIT, COPY, TRACE; DONE, ERROR. */
bool kld_frame_may_follow(uint16_t type);
/* The same of a packet, which is a frame, or up to KLD_WIRE_PACKET_FRAMES_MAX of those that may
 * follow each other, one right behind another and without a descriptor. *ret_frames: how many
 * there are. One that is not whole makes the packet a bad one: nothing of it is done, and the error
 * goes to its first frame. */
enum kld_status kld_packet_check(const void *data, size_t bytes, unsigned fds, int truncated,
                                 unsigned *ret_frames, uint64_t *ret_request,
                                 struct kld_error *err);

/* Between SUBMIT and the op. Decoding checks only what the op cannot hold (flags, reserved fields,
 * a region 0); everything else is kld_op_check()'s. */
void kld_submit_encode(const struct kld_op *op, struct kld_frame_submit *submit);
enum kld_status kld_submit_decode(const struct kld_frame_submit *submit, struct kld_op *ret_op,
                                  struct kld_error *err);

/* Is this a name under which a tensor can be published? 1 to KLD_WIRE_NAME_MAX - 1 letters from '!'
 * to '~', then NUL. */
enum kld_status kld_name_check(const char name[KLD_WIRE_NAME_MAX], struct kld_error *err);
/* Is this a tensor that lies inside a region of region_bytes? *ret_bytes: from its first byte to
 * behind its last. */
enum kld_status kld_description_check(const struct kld_wire_description *tensor,
                                      uint64_t offset_bytes, uint64_t region_bytes,
                                      uint64_t *ret_bytes, struct kld_error *err);

#ifdef __cplusplus
}
#endif
#endif
