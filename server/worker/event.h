/* event.h - a point in the work of a GPU that a client shares with its worker: the client's own,
 * by its handle (READY), or one that the worker makes and hands out (DONE); or, in the place of the
 * latter, a word in a region of the client that the device writes numbers to (FENCE), which the
 * client can do as well when the worker is gone. The region stays as long as its fences.
 *
 * States and users are those of a region (region.h): ADDING, LIVE, CONDEMNED, REMOVING. A request
 * that names an event pins it until the back end is through with the request.
 *
 * What a back end has no events answers is said here once, with KLD_UNIMPLEMENTED. Loop thread,
 * but for the work on uv's pool. */
#ifndef KLD_SERVER_WORKER_EVENT_H
#define KLD_SERVER_WORKER_EVENT_H

#include "server/worker/region.h"

#define KLD_EVENT_SLOT_BITS 8 /* at least those of KLD_SESSION_EVENTS_MAX */

struct kld_worker_event {
    /* Loop thread. */
    struct kld_session *session;
    enum kld_region_state state;
    uint64_t id;      /* serial << KLD_EVENT_SLOT_BITS | place in the session's table */
    uint64_t request; /* the EVENT_ADD to answer */
    uint32_t users;
    uint32_t number; /* FENCE: of the newest request that named it; 0: none did */
    uint32_t stream; /* FENCE: of those requests */
    struct kld_task task;

    /* Constant from creation on. */
    uint32_t kind;             /* enum kld_event_kind */
    struct kld_region *region; /* FENCE: acquired; else NULL */
    uint64_t offset_bytes;     /* FENCE: in the region */

    /* ADDING, REMOVING: the pool's. Else the loop's. */
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES];
    struct kld_gpu_event *gpu;
    enum kld_status status;
    struct kld_error error;
};

/* EVENT or ERROR follows if KLD_OK is returned. */
enum kld_status kld_worker_event_add(struct kld_session *session,
                                     const struct kld_frame_event_add *frame,
                                     struct kld_error *err);
enum kld_status kld_worker_fence_add(struct kld_session *session,
                                     const struct kld_frame_fence_add *frame,
                                     struct kld_error *err);
enum kld_status kld_worker_event_drop(struct kld_session *session, uint64_t id,
                                      struct kld_error *err);
void kld_worker_event_drop_all(struct kld_session *session);

/* The LIVE event of this id and kind (DONE: or a fence that is not another stream's), or NULL with
 * the error described. */
struct kld_worker_event *kld_worker_event_find(struct kld_session *session, uint64_t id,
                                               enum kld_event_kind kind, uint32_t stream,
                                               struct kld_error *err);
/* The number of a request that was admitted and names this as its done event; 0: it is no fence. */
uint32_t kld_worker_event_count(struct kld_worker_event *event, uint32_t stream);
void kld_worker_event_acquire(struct kld_worker_event *event);
void kld_worker_event_release(struct kld_worker_event *event);

#endif
