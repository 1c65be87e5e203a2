/* unix.h - the inside of a connection over the Unix socket: shared by unix.c (greeting, answers),
 * unix_send.c (what is sent), unix_lost.c (a worker that is gone), unix_device.c and unix_probe.c
 * (which of several workers), unix_calls.c (entry points), unix_memory.c (regions), unix_stage.c
 * (memory for plain tensors), unix_share.c (published tensors, priorities), unix_event.c (events,
 * fences) and unix_watch.c (the words of fences, and a thread). Everything else belongs to the
 * thread that owns the connection.
 */
#ifndef KLD_CLIENT_UNIX_H
#define KLD_CLIENT_UNIX_H

#include <sys/types.h>

#include "client/connection.h"
#include "proto/wire.h"

#define KLD_TAG_SOCKET KLD_TAG_TRANSPORT
#define KLD_STAGES_MAX 16
#define KLD_CORKED_MAX 16     /* requests that are held back; then they are sent */
#define KLD_PRIORITIES_MAX 64 /* streams whose priority can be set */

/* What the request number of a frame says about it: the top two bits. */
#define KLD_NUMBER_KIND (3ull << 62)
#define KLD_NUMBER_CALL (0ull << 62)    /* the rest is the id of a call */
#define KLD_NUMBER_REGION (1ull << 62)  /* the local id of a region, event or publication */
#define KLD_NUMBER_CONTROL (2ull << 62) /* the one control frame that is waited for */
#define KLD_NUMBER_IGNORED (3ull << 62) /* nobody waits */

enum unix_state { UNIX_DOWN, UNIX_GREETING, UNIX_UP };

/* Of regions, events and publications. */
enum unix_region_state {
    UNIX_REGION_MAKING,  /* not yet complete, so that nothing is sent about it */
    UNIX_REGION_NEW,     /* to be registered as soon as the connection is up */
    UNIX_REGION_ADDING,  /* REGION_ADD was sent */
    UNIX_REGION_READY,   /* wire_id is valid on this connection */
    UNIX_REGION_FAILED,  /* the server refused it: `error` */
    UNIX_REGION_LOST,    /* a pool region or done event whose worker is gone: `error` */
    UNIX_REGION_BEHIND,  /* refused for want of room while others of ours left: asked again then */
    UNIX_REGION_WAITING, /* attached: nobody has published it yet; asked again at retry_at_ns */
};

/* A CUDA allocation in a region that has several. */
struct unix_piece {
    int fd; /* owned */
    uint64_t bytes;
};

struct unix_region {
    struct kld_region base;
    enum unix_region_state state;
    enum kld_region_kind kind;
    bool released; /* no user is left; waits for REGION or for room on the socket, then is freed */
    int fd;        /* memfd: owned; -1 otherwise */
    uint64_t mapped_bytes;
    uint64_t wire_id;
    uint64_t base_bytes, offset_bytes; /* CUDA */
    /* CUDA_SPACE, of unix_space.c: what it may grow to; its pieces, and how many of them the worker
     * has, with their bytes. The last piece is ADDING while its caller waits, FAILED (and none of
     * ours any more) when refused, LOST when the caller waits no longer. */
    uint64_t room_bytes, there_bytes;
    struct unix_piece *pieces;
    uint32_t pieces_count, pieces_size, pieces_there;
    enum unix_region_state growth;
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES], device_uuid[KLD_WIRE_UUID_BYTES];
    struct kld_error error;

    bool attached; /* to this name, with this contents (rank 0: not yet known) */
    char name[KLD_WIRE_NAME_MAX];
    uint32_t uid, owner_uid; /* whose name that is, or KLD_WIRE_UID_OWN; what the worker said */
    struct kld_wire_description tensor;
    uint64_t retry_at_ns, until_ns; /* WAITING; and how long to go on */
    uint32_t looks;                 /* for a name that nobody had published, in a row */
};

struct unix_event {
    struct kld_event base;
    enum unix_region_state state;
    enum kld_event_kind kind;
    bool released;             /* as of a region */
    struct kld_region *region; /* FENCE, until its worker is lost: where the word is */
    struct unix_word *word;    /* FENCE: of unix_watch.c */
    uint64_t wire_id;
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES], device_uuid[KLD_WIRE_UUID_BYTES];
    struct kld_error error;
};

/* A tensor that this connection shows to others. Goes with its region. */
struct unix_publication {
    struct unix_publication *next;
    uint64_t local_id;
    enum unix_region_state state;
    bool ended; /* its region was dropped: DETACH is to be sent, then it is freed */
    struct unix_region *region;
    union kld_frame frame; /* PUBLISH, but for the region's wire id */
    struct kld_error error;
};

struct unix_call {
    struct kld_call base;
    bool abandoned;                     /* ended here at its deadline; the server still has it */
    bool cancelled;                     /* not to be sent again */
    bool cancel_wanted;                 /* a CANCEL is to be sent */
    bool lost_device;                   /* the server answered DEVICE_LOST: to be sent again */
    uint32_t device_losses;             /* times that it was so, of all sendings */
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
    char path[108];      /* of the socket */
    char base_path[108]; /* of device 0's socket, once it went elsewhere; "": not yet known */
    int socket;          /* -1 while down */
    pid_t owner;         /* whose socket it is: not that of a child made by fork() */
    enum unix_state state;
    bool welcomed;        /* at least once: `welcome` is valid */
    bool doomed;          /* the worker told that its device is lost */
    bool leaving;         /* the worker takes nothing new, but answers what it has */
    bool nobody;          /* the last try found no server at the socket */
    bool want_write;      /* EPOLLOUT is asked for */
    bool closing;         /* inside close() */
    bool locked;          /* lists are being walked: kld_unix_flush() does nothing */
    uint32_t cancels;     /* calls with cancel_wanted */
    uint32_t region_work; /* regions in state NEW, or released ones that are to be dropped */
    bool regions_behind;  /* there may be some in state BEHIND */
    uint32_t share_work;  /* the same of events and publications */
    struct unix_publication *publications;
    int8_t priorities[KLD_PRIORITIES_MAX];        /* of streams; told to each worker */
    uint64_t away_until_ns[KLD_WIRE_DEVICES_MAX]; /* workers that did not answer a probe */
    uint64_t down_since_ns, retry_at_ns, backoff_ns;
    uint64_t control_sequence;
    struct kld_frame_welcome welcome;
    struct kld_error fatal;   /* why the last greeting was refused, or that a frame was another
                               * release's; status OK: neither, or greeted since */
    struct kld_error lacking; /* the last try found no descriptor or memory; OK: it did */
    struct kld_error put_off; /* the last greeting was refused for what may pass; OK: it was not */
    struct kld_call_list queued, sent;
    struct unix_control control;
    struct unix_stage stages[KLD_STAGES_MAX];
    uint64_t stage_bytes_total;
    struct unix_watch *watch; /* NULL: it has had no fence */
    bool watched;             /* the thread knows this socket */
};

enum unix_sent { UNIX_SENT, UNIX_FULL, UNIX_LOST };

/* unix_send.c */
enum unix_sent kld_unix_send(struct unix_connection *u, const union kld_frame *frame, int fd);
void kld_unix_flush(struct unix_connection *u); /* sends whatever is due */

/* unix.c */
/* Out of the lists and off its memory; delivered unless that was done before. */
void kld_unix_call_end(struct unix_connection *u, struct unix_call *call, enum kld_status status,
                       const struct kld_error *error);
void kld_unix_connect(struct unix_connection *u);
void kld_unix_retry_later(struct unix_connection *u);
void kld_unix_call_fail(struct unix_connection *u, struct unix_call *call, enum kld_status status,
                        const char *text);
void kld_unix_event(struct kld_connection *connection, uint64_t tag, uint32_t events);

/* unix_lost.c: the connection is gone. What may run again is queued again; the next try is armed.
 */
void kld_unix_lose(struct unix_connection *u);
/* Why it is not up, where something else is known than that nobody answered; else NULL. */
const struct kld_error *kld_unix_down_reason(const struct unix_connection *u);
/* Why connect_timeout_ns did not do. hint: behind the text, where nothing at all was heard. */
enum kld_status kld_unix_not_greeted(const struct unix_connection *u, const char *hint,
                                     struct kld_error *err);
/* Closes the socket, if there is one: for the server at once, whoever else has it. */
void kld_unix_hang_up(struct unix_connection *u);

/* unix_device.c */
/* What is about to be registered, a region or an event, lies on the card with this UUID: goes over
 * to the worker of that device, or says why that cannot be. Waits for the first greeting, and for
 * what is computed where the connection is now. */
enum kld_status kld_unix_go_to_memory(struct unix_connection *u, const uint8_t *uuid,
                                      const void *what, struct kld_error *err);
/* What `region` attaches to is not here: true if it is at another worker, and the connection on its
 * way there. */
bool kld_unix_look_further(struct unix_connection *u, struct unix_region *region);

/* unix_probe.c */
enum unix_probe { UNIX_PROBE_THERE, UNIX_PROBE_NOT_THERE, UNIX_PROBE_AWAY };
/* Is what `region` attaches to known at the worker of this socket? AWAY also when the deadline came
 * first. */
enum unix_probe kld_unix_probe(const struct unix_connection *u, const char *path,
                               uint64_t deadline_ns, const struct unix_region *region);

/* unix_calls.c */
enum kld_status kld_unix_wait_state(struct unix_connection *u, const enum unix_region_state *state,
                                    const struct kld_error *error, uint64_t deadline_ns,
                                    struct kld_error *err);
/* Sends a frame, made but for its number, and runs the loop until it is answered, by a frame of the
 * expected type (in u->control.reply) or an error; sent again if the worker was lost meanwhile. */
enum kld_status kld_unix_ask(struct unix_connection *u, const union kld_frame *frame,
                             enum kld_frame_type expected, struct kld_error *err);

/* unix_memory.c */
enum kld_status kld_unix_region_create(struct kld_region *region, struct kld_error *err);
/* For whoever makes a region and may wait: reads what was answered, and where there is no room but
 * that of regions that were dropped, waits for the server's answers about them. */
enum kld_status kld_unix_room(struct unix_region *region, struct kld_error *err);
/* Without that, where a request is being sent: for stages. */
enum kld_status kld_unix_region_make(struct kld_region *region, struct kld_error *err);
/* Most of one that is a file: what this process may make, now (RLIMIT_FSIZE). */
uint64_t kld_unix_file_bytes_max(void);
enum kld_status kld_unix_region_import_memfd(struct kld_region *region, int fd,
                                             struct kld_error *err);
enum kld_status kld_unix_region_import_cuda_ipc(struct kld_region *region,
                                                const struct kld_ipc_source *source,
                                                struct kld_error *err);
enum kld_status kld_unix_region_import_cuda_fd(struct kld_region *region, int fd,
                                               const struct kld_ipc_source *source,
                                               struct kld_error *err);
/* Registers it, and waits for the answer. */
enum kld_status kld_unix_region_add_and_wait(struct unix_region *region, struct kld_error *err);
enum kld_status kld_unix_region_create_pool(struct kld_region *region, struct kld_error *err);
void *kld_unix_region_data(struct kld_region *region);
void kld_unix_region_release(struct kld_region *region);
/* The connection is gone: nothing is registered any more. */
void kld_unix_regions_lost(struct unix_connection *u);
/* Registers and drops what is due. */
enum unix_sent kld_unix_regions_flush(struct unix_connection *u);
/* False: no region has this number. */
bool kld_unix_region_answered(struct unix_connection *u, uint64_t local_id,
                              const union kld_frame *reply, const struct kld_error *error);
/* Another call uses it (NULL: none): what was refused for want of memory is asked for again. */
void kld_unix_region_wanted(struct unix_connection *u, struct kld_region *region);
/* The first steps of a region, and its registration in the background. */
enum kld_status kld_unix_region_begin(struct unix_region *region, enum kld_region_kind kind,
                                      struct kld_error *err);
void kld_unix_region_add_later(struct unix_region *region);

/* unix_space.c: regions in pieces. */
enum kld_status kld_unix_region_reserve_cuda(struct kld_region *region, const uint8_t *device_uuid,
                                             struct kld_error *err);
enum kld_status kld_unix_region_grow_cuda_fd(struct kld_region *region, int fd, uint64_t bytes,
                                             struct kld_error *err);
/* The worker has the region, if not all of it. */
bool kld_unix_space_is_known(const struct unix_region *region);
/* The next piece that the worker lacks. */
enum unix_sent kld_unix_space_send(struct unix_connection *u, const struct unix_region *region);
/* REGION came for it: true if the worker lacks another piece. */
bool kld_unix_space_lacks_more(struct unix_region *region, const union kld_frame *reply);
/* The worker refused it, or a piece: true if that was a new one, without which the region is what
 * it was. */
bool kld_unix_space_refused(struct unix_region *region);
void kld_unix_space_lost(struct unix_region *region);
void kld_unix_space_free(struct unix_region *region);

/* unix_share.c */
enum kld_status kld_unix_region_attach(struct kld_region *region, uint32_t uid, const char *name,
                                       uint64_t timeout_ns, struct kld_tensor_view *ret_tensor,
                                       struct kld_error *err);
/* What ATTACH was answered with. */
void kld_unix_attach_answered(struct unix_connection *u, struct unix_region *region,
                              const union kld_frame *reply, const struct kld_error *error);
/* There is a worker again: who published what is attached has his time from now on. */
void kld_unix_attached_welcomed(struct unix_connection *u);
/* Those that wait for their publisher and whose time has come are asked for again. */
void kld_unix_attach_again(struct unix_connection *u, uint64_t now_ns);
enum kld_status kld_unix_publish(struct kld_region *region, const char *name,
                                 const struct kld_tensor_view *tensor, const uint32_t *uids,
                                 uint32_t uids_count, struct kld_error *err);
enum kld_status kld_unix_published(struct kld_connection *connection, const char *name,
                                   struct kld_error *err);
enum kld_status kld_unix_detach(struct kld_connection *connection, const char *name,
                                struct kld_error *err);
/* The worker knows no more of them: the region is not registered. */
void kld_unix_publications_drop(struct unix_connection *u, const struct unix_region *region);
/* Their names are free from now on; what the worker has of them is taken off with the next flush.
 */
void kld_unix_publications_end(struct unix_connection *u, const struct unix_region *region);
void kld_unix_region_dropped(struct kld_region *region);
enum kld_status kld_unix_stream_priority(struct kld_connection *connection, uint32_t stream,
                                         int priority, struct kld_error *err);
/* As for regions. */
void kld_unix_shares_lost(struct unix_connection *u);
enum unix_sent kld_unix_shares_flush(struct unix_connection *u);
void kld_unix_share_answered(struct unix_connection *u, uint64_t local_id,
                             const union kld_frame *reply, const struct kld_error *error);
/* The worker does not know them yet. */
enum unix_sent kld_unix_priorities_send(struct unix_connection *u);

/* How long what is asked for inside a call is waited for. */
uint64_t kld_unix_patience(const struct unix_connection *u);
/* The worker is leaving or its device is lost: not the fault of what was asked. */
bool kld_unix_is_passing(struct unix_connection *u, const struct kld_error *error);

/* unix_event.c */
enum kld_status kld_unix_event_open(struct kld_event *event, uint8_t handle[64],
                                    const uint8_t *device_uuid, struct kld_error *err);
enum kld_status kld_unix_fence_open(struct kld_event *event, uint32_t **ret_word,
                                    struct kld_error *err);
bool kld_unix_fence_passed(const struct kld_event *event, uint32_t number);
void kld_unix_event_release(struct kld_event *event);
void kld_unix_events_lost(struct unix_connection *u);
enum unix_sent kld_unix_events_flush(struct unix_connection *u);
/* False: no event has this number. */
bool kld_unix_event_answered(struct unix_connection *u, uint64_t local_id,
                             const union kld_frame *reply, const struct kld_error *error);

/* unix_watch.c */
/* The word of a fence, in the first bytes of a memfd of KLD_FENCE_BYTES, which stays the caller's.
 * The first of a connection starts the thread. */
enum kld_status kld_unix_word_open(struct unix_connection *u, int memfd,
                                   struct unix_word **ret_word, struct kld_error *err);
void kld_unix_word_close(struct unix_connection *u, struct unix_word *word); /* or NULL */
/* The worker at the other end, which is watched, writes it from now on. */
void kld_unix_word_arm(struct unix_connection *u, struct unix_word *word);
uint32_t *kld_unix_word_at(const struct unix_word *word);
/* Has the device reached the number? What the thread wrote does not count. */
bool kld_unix_word_passed(const struct unix_connection *u, struct unix_word *word, uint32_t number);
/* The connection is up: its end is what to look for. */
void kld_unix_watch_link(struct unix_connection *u);
/* It is lost, as far as is known: sets free who waits. Before the socket is closed. */
void kld_unix_watch_lost(struct unix_connection *u);
/* Ends the thread and unmaps the words; nobody is set free. */
void kld_unix_watch_end(struct unix_connection *u);

/* unix_stage.c. put: finds room for the call's plain tensors and copies its inputs there. */
enum kld_status kld_unix_stage_put(struct unix_connection *u, struct unix_call *call,
                                   struct kld_error *err);
/* The worker answered a cancelled or late call, which it may yet be writing into its part of a
 * stage: ends the call, and queues a COPY inside that part, of the same stream, in its place. When
 * that is answered the part is free. */
void kld_unix_fence(struct unix_connection *u, struct unix_call *call,
                    const struct kld_error *error);
void kld_unix_stage_get(struct unix_call *call);  /* outputs to the caller's memory */
void kld_unix_stage_free(struct unix_call *call); /* the part */
/* Is this region a stage that the calls in it need less of than the server refused? So much it has
 * from now on. */
bool kld_unix_stage_shrinks(struct unix_connection *u, struct unix_region *region);

#endif
