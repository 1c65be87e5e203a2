/* connection.h - what the kinds of connection have in common, inside libkld.
 *
 * A kind (unix.c, http.c, local.c) is a table of functions, struct kld_transport, beside its peers;
 * connection.c holds the public functions, checks every request once, and owns the calls until
 * their callbacks have run. Not public: nothing here is seen by users of kld.h.
 *
 * Threads: everything belongs to the thread that uses the connection. There are two exceptions,
 * with a lock of their own each: the back end's completion in local.c, which hands its calls over,
 * and the thread of unix_watch.c. */
#ifndef KLD_CLIENT_CONNECTION_H
#define KLD_CLIENT_CONNECTION_H

#include <sys/types.h>

#include "client/kld.h"

#define KLD_CALLS_MAX 4096 /* in flight on one connection, whatever the server allows */
#define KLD_RECONNECT_NS_MAX 30000000000ull /* a lost server is waited for so long ... */
/* ... and as a member of a split:, where others can do what it was asked, deadline or not. */
#define KLD_MEMBER_RECONNECT_NS_MAX 500000000ull
/* Times that one request is sent to servers that are lost meanwhile. */
#define KLD_ATTEMPTS_MAX 10
/* Of them, those that ended with the device: the request may be what kills it. */
#define KLD_DEVICE_LOSSES_MAX 2
#define KLD_NEVER UINT64_MAX
/* How long kld_run() polls for an answer before it sleeps, where the wait takes nothing from what
 * computes: longer than most GPU jobs, and a wake-up costs 50 to 90 us. */
#define KLD_POLL_NS 5000000u

enum kld_event_tag { KLD_TAG_WAKE, KLD_TAG_TIMER, KLD_TAG_TRANSPORT /* and above */ };

/* A region. Owned by its connection; freed by kld_region_free() once it was dropped and has no
 * users. */
struct kld_region {
    struct kld_connection *connection;
    struct kld_region *next, *previous; /* all regions of the connection */
    uint64_t local_id;                  /* not 0, never used twice in a connection */
    uint64_t bytes;
    void *data;     /* address in this process; NULL: none (yet) */
    uint32_t users; /* calls that name it */
    bool dropped;   /* the caller gave it up: released with its last user */
    bool pool;      /* its contents are lost with the worker */
    /* Of a memfd, from its first byte on: which one it is. Inode 0: none, or not known. */
    dev_t inode_device;
    ino_t inode;
};

/* An event. Owned by its connection; released by the transport once it was dropped and no call
 * names it. */
struct kld_event {
    struct kld_connection *connection;
    struct kld_event *next; /* all events of the connection */
    uint64_t local_id;      /* of the same sequence as those of regions */
    uint32_t users;         /* calls that name it */
    bool dropped;
};

/* Where kld_run() and kld_copy() wait; on their stack. */
struct kld_wait {
    bool ended;
    enum kld_status status;
    struct kld_result result;
    struct kld_error error;
};

struct kld_copy_request {
    struct kld_region *destination, *source; /* destination NULL: the call is an operator */
    uint64_t destination_offset_bytes, source_offset_bytes, bytes;
    uint32_t stream;
};

/* One request. Two parties hold it: the delivery (until the callback ran) and the transport (until
 * nothing outside can touch its memory any more); the last one releases it. */
struct kld_call {
    struct kld_call *next, *previous; /* the transport's list */
    struct kld_call_list *list;
    struct kld_call *next_done; /* connection.done */
    uint64_t id;                /* sequence << 16 | slot; the top two bits are 0 */
    unsigned references;
    bool ended; /* was handed to kld_call_end() */
    bool kept;  /* its outcome stays here for kld_wait_slice(), which drops the delivery's share */

    kld_callback callback;
    void *user;
    struct kld_wait *wait; /* instead of a callback; NULL: nobody waits */

    struct kld_request request; /* op.tensor[]: places as the checks see them */
    struct kld_geometry geometry;
    struct kld_copy_request copy;
    uint64_t started_ns, deadline_ns; /* CLOCK_MONOTONIC; KLD_NEVER: no deadline */

    enum kld_status status;
    struct kld_result result;
    struct kld_error error;
};

struct kld_call_list {
    struct kld_call *first, *last;
    uint32_t count;
};

struct kld_ipc_source {
    const uint8_t *handle, *device_uuid;
    uint64_t base_bytes, offset_bytes;
};

/* A kind of connection. An entry that is NULL answers KLD_UNIMPLEMENTED; open, close, info, submit,
 * cancel, event and region_release are never NULL. */
struct kld_transport {
    const char *prefix;                                /* of the URL: "unix:" */
    const char *name;                                  /* for error texts */
    size_t connection_bytes, call_bytes, region_bytes; /* of the structs that embed ours first */
    size_t event_bytes;                                /* the same; 0: no events */
    bool runs_here; /* in this process: early answers need no event, and any memory will do */

    enum kld_status (*open)(struct kld_connection *connection, const char *url,
                            struct kld_error *err);
    void (*close)(struct kld_connection *connection); /* also after a failed open */
    enum kld_status (*info)(struct kld_connection *connection, struct kld_server_info *ret_info,
                            struct kld_error *err);
    /* NULL: one server, which is there or it is an error. */
    bool (*missing)(const struct kld_connection *connection, uint32_t index,
                    struct kld_error *ret_why);
    enum kld_status (*ping)(struct kld_connection *connection, struct kld_error *err);
    enum kld_status (*region_create)(struct kld_region *region, struct kld_error *err);
    enum kld_status (*region_import_memfd)(struct kld_region *region, int fd,
                                           struct kld_error *err);
    enum kld_status (*region_import_cuda_ipc)(struct kld_region *region,
                                              const struct kld_ipc_source *source,
                                              struct kld_error *err);
    enum kld_status (*region_import_cuda_fd)(struct kld_region *region, int fd,
                                             const struct kld_ipc_source *source,
                                             struct kld_error *err);
    /* Both or none. */
    enum kld_status (*region_reserve_cuda)(struct kld_region *region, const uint8_t *device_uuid,
                                           struct kld_error *err);
    enum kld_status (*region_grow_cuda_fd)(struct kld_region *region, int fd, uint64_t bytes,
                                           struct kld_error *err);
    enum kld_status (*region_create_pool)(struct kld_region *region, struct kld_error *err);
    /* Sets region->bytes. uid: whose name it is, or KLD_WIRE_UID_OWN. */
    enum kld_status (*region_attach)(struct kld_region *region, uint32_t uid, const char *name,
                                     uint64_t timeout_ns, struct kld_tensor_view *ret_tensor,
                                     struct kld_error *err);
    enum kld_status (*publish)(struct kld_region *region, const char *name,
                               const struct kld_tensor_view *tensor, const uint32_t *uids,
                               uint32_t uids_count, struct kld_error *err);
    enum kld_status (*published)(struct kld_connection *connection, const char *name,
                                 struct kld_error *err);
    enum kld_status (*detach)(struct kld_connection *connection, const char *name,
                              struct kld_error *err);
    /* Together with event_bytes. handle: of an event to import, or where to write that of one to
     * create (device_uuid NULL). */
    enum kld_status (*event_open)(struct kld_event *event, uint8_t handle[64],
                                  const uint8_t *device_uuid, struct kld_error *err);
    void (*event_release)(struct kld_event *event);
    /* A fence, which is an event that was created; false: it is none. */
    enum kld_status (*fence_open)(struct kld_event *event, uint32_t **ret_word,
                                  struct kld_error *err);
    bool (*fence_passed)(const struct kld_event *event, uint32_t number);
    enum kld_status (*stream_priority)(struct kld_connection *connection, uint32_t stream,
                                       int priority, struct kld_error *err);
    enum kld_status (*stream_adopt)(struct kld_connection *connection, uint32_t stream,
                                    void *native, struct kld_error *err);
    void *(*region_data)(struct kld_region *region); /* NULL: region->data */
    /* Its owner let go of it, and requests that use it are still in flight. NULL: not needed. */
    void (*region_dropped)(struct kld_region *region);
    /* No user is left. Ends in kld_region_free(), now or when the server has let go. Also called
     * for half-made regions. */
    void (*region_release)(struct kld_region *region);
    /* Takes the call on KLD_OK. Never blocks, never calls back. */
    enum kld_status (*submit)(struct kld_connection *connection, struct kld_call *call,
                              struct kld_error *err);
    /* What submit() held back while `corked`. NULL: it holds back nothing. */
    void (*send)(struct kld_connection *connection);
    void (*cancel)(struct kld_connection *connection, struct kld_call *call);
    /* close() is right in a child made by fork(), too. Else leave(), or NULL, lets go there of what
     * is no memory; the connection itself stays. */
    bool closes_in_a_child;
    void (*leave)(struct kld_connection *connection);
    /* NULL: not needed. The caller waits for an answer and looks again within microseconds (more),
     * or no longer does. */
    void (*poll)(struct kld_connection *connection, bool more);
    void (*event)(struct kld_connection *connection, uint64_t tag, uint32_t events);
    void (*timer)(struct kld_connection *connection, uint64_t now_ns);
    enum kld_status (*stats)(struct kld_connection *connection, struct kld_server_stats *ret_stats,
                             struct kld_error *err);
    enum kld_status (*metrics)(struct kld_connection *connection, char *ret_text, size_t capacity,
                               struct kld_error *err);
    enum kld_status (*measure_ceiling)(struct kld_connection *connection, uint64_t bytes,
                                       double *ret_read_per_s, double *ret_read_write_per_s,
                                       struct kld_error *err);
};

extern const struct kld_transport kld_transport_unix, kld_transport_http, kld_transport_https,
    kld_transport_local, kld_transport_split;

struct kld_connection {
    const struct kld_transport *transport;
    struct kld_connect_options options; /* defaults resolved; texts are copies, owned here */
    int epoll_fd, timer_fd, wake_fd;
    pid_t process;     /* that made it: not a child made by fork() */
    uint64_t armed_ns; /* when timer_fd fires; KLD_NEVER: not armed */
    bool opened;       /* transport->open() was called */
    bool offloaded;    /* what computes is no processor of this host; set by the transport */
    bool dispatching;  /* inside kld_connection_step() */
    bool corked;       /* by kld_cork(); nothing is held back once the connection steps */
    bool watching;     /* transport->poll() was last told that we look again */
    bool interrupted;  /* the last kld_connection_step() ended with a signal */
    bool member;       /* of a split:, set by split.c */
    uint64_t links;    /* network connections made so far: each may lead to another process */
    uint64_t losses;   /* of them, those that ended; where there are regions that end with them */

    struct kld_region *regions;
    uint32_t region_count;
    uint64_t region_last_id;
    struct kld_event *events;

    struct kld_call **slots; /* by the low 16 bits of an id; slots_max of them */
    uint32_t slots_max, calls, calls_max;
    uint32_t unended; /* calls without an outcome yet */
    uint64_t sequence;
    struct kld_call *spare;            /* released calls, by `next` */
    struct kld_call *done, *done_last; /* ended, callback to run, by `next_done` */
};

uint64_t kld_now_ns(void);
/* Makes an eventfd readable; takes what there is to read of one, or of a timerfd. */
void kld_eventfd_raise(int fd);
void kld_counter_drain(int fd);
/* Until when a call waits for a server that was lost at since_ns: a member's from then on, where
 * others can do it meanwhile; any other from then or from its own start, the later of both. */
uint64_t kld_patience(const struct kld_connection *connection, const struct kld_call *call,
                      uint64_t since_ns);
/* Somewhere from half of it to all of it, so that many who wait for one thing come one by one. */
uint64_t kld_jitter(uint64_t pause_ns);
enum kld_status kld_unimplemented(const struct kld_connection *connection, const char *what,
                                  struct kld_error *err);

/* Events. step: one round of epoll_wait and dispatch, at most until deadline_ns. */
enum kld_status kld_connection_step(struct kld_connection *connection, uint64_t deadline_ns,
                                    struct kld_error *err);
/* After the last step of whoever waited for something of his own: what ended meanwhile has used up
 * what would have woken kld_process(), or whoever polls kld_fd(), for its callback. */
void kld_connection_waited(struct kld_connection *connection);
/* The timer function will be called at at_ns or earlier. */
void kld_connection_arm(struct kld_connection *connection, uint64_t at_ns);
enum kld_status kld_connection_watch(struct kld_connection *connection, int fd, uint64_t tag,
                                     uint32_t events, struct kld_error *err);
/* KLD_NO_MEMORY if socket() failed with this errno since something has run out here, which is not
 * the server's doing; KLD_OK: it says something else. */
enum kld_status kld_socket_lacks(int error_number, struct kld_error *err);

/* check.c: sets the places in call->request.op and call->geometry. */
enum kld_status kld_call_check(struct kld_connection *connection, struct kld_call *call,
                               struct kld_error *err);

/* Calls. end: the outcome is fixed and will be delivered; drops the delivery's reference after
 * that. error may be NULL with KLD_OK. */
void kld_call_end(struct kld_connection *connection, struct kld_call *call, enum kld_status status,
                  const struct kld_error *error);
void kld_call_release(struct kld_connection *connection, struct kld_call *call);
struct kld_call *kld_call_find(struct kld_connection *connection, uint64_t id);
void kld_call_append(struct kld_call_list *list, struct kld_call *call);
void kld_call_unlink(struct kld_call *call);
/* Each region that the call names: count a user, or let go. */
void kld_call_hold_regions(struct kld_call *call);
void kld_call_drop_regions(struct kld_call *call); /* and events */
bool kld_call_uses_pool(const struct kld_call *call);

/* open: one of `bytes` bytes for the transport to fill in. made: hands it out, or undoes it where
 * that failed. */
enum kld_status kld_region_open(struct kld_connection *connection, uint64_t bytes,
                                struct kld_region **ret_region, struct kld_error *err);
enum kld_status kld_region_made(enum kld_status status, struct kld_region *region,
                                struct kld_region **ret_region);
void kld_region_free(struct kld_region *region);
/* Sets which memfd it shows. */
void kld_region_is_of(struct kld_region *region, int memfd);
/* One region, or two of one memfd, whose offsets mean the same bytes then. */
bool kld_region_is_same(const struct kld_region *a, const struct kld_region *b);
/* Of connections whose regions are plain memory of this process: for their tables. */
enum kld_status kld_plain_region_create(struct kld_region *region, struct kld_error *err);
enum kld_status kld_plain_region_import_memfd(struct kld_region *region, int fd,
                                              struct kld_error *err);
void kld_plain_region_release(struct kld_region *region);
/* share.c */
void kld_event_free(struct kld_event *event);
void kld_event_user_drop(struct kld_event *event);
/* Checks a memfd of the caller's: sealed against shrinking, and long enough. */
enum kld_status kld_memfd_check(int fd, uint64_t bytes, struct kld_error *err);

/* Rows between two strides. */
void kld_rows_copy(void *to, uint64_t to_stride_bytes, const void *from, uint64_t from_stride_bytes,
                   uint64_t row_bytes, uint64_t rows);

#endif
