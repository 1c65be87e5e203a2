/* region.h - a range of memory that a client registered, and who is using it.
 *
 * States: ADDING (uv's pool maps, imports or allocates it), LIVE (the client may name it),
 * CONDEMNED (dropped, or its client left: cannot be named, but requests still use it), REMOVING
 * (uv's pool unmaps it), then freed. `users` counts the requests that pinned it; it is CONDEMNED
 * until they are gone (R2). A session outlives its regions.
 *
 * A space (space.h) grows while it is LIVE. Its `bytes` are those of the pieces that are there, so
 * whatever looks whether a tensor lies in its region sees as well that there is memory.
 *
 * An attached region (publish.h) has no memory of its own but its owner's. What a request pins is
 * the owner's region; the attached one is only a name for it and can go at any time.
 *
 * Two regions of one client may show the same memory: one memfd registered twice, two parts of one
 * GPU allocation. Such regions get one `space`, so that outputs that overlap are seen. What is a
 * piece of one region may not be shown by another at all. */
#ifndef KLD_SERVER_WORKER_REGION_H
#define KLD_SERVER_WORKER_REGION_H

#include <sys/stat.h>

#include "kernels/backend.h"
#include "server/worker/mapping.h"
#include "server/worker/session.h"

enum kld_region_state {
    KLD_REGION_ADDING,
    KLD_REGION_LIVE,
    KLD_REGION_CONDEMNED,
    KLD_REGION_REMOVING,
};

struct kld_publication;

struct kld_region {
    /* Loop thread. */
    struct kld_session *session;
    enum kld_region_state state;
    uint64_t id;      /* serial << KLD_REGION_SLOT_BITS | place in the session's table */
    uint64_t request; /* the REGION_ADD or REGION_GROW to answer */
    uint32_t users;
    uint64_t space;                      /* id of the first region that showed this memory */
    uint32_t publications;               /* of it */
    struct kld_publication *publication; /* attached: to this; NULL: the owner took it back */
    TAILQ_ENTRY(kld_region) in_publication;
    TAILQ_ENTRY(kld_region) in_kept; /* while it waits, see kept.h */
    uint64_t kept_until_ns;          /* CLOCK_MONOTONIC; 0: it never waited */
    uint64_t bytes;                  /* constant, but of a space */
    uint64_t *pieces;                /* space: the cuda_file of each, 0: unknown */
    uint32_t pieces_count, pieces_size;
    uint64_t growing_bytes; /* of the piece that the pool maps; 0: none */
    struct kld_task task;

    /* Constant from creation on. */
    uint32_t kind; /* enum kld_region_kind */
    bool attached;
    uint64_t room_bytes;            /* space: what it may grow to; else 0 */
    uint64_t memory_offset;         /* attached: where it begins in `memory`; else 0 */
    uint64_t space_offset;          /* where it begins in its space: what it is aligned by */
    uint64_t base_bytes;            /* CUDA IPC, CUDA fd */
    struct kld_mapping_limit limit; /* memfd; user NULL: none */
    uint8_t ipc_handle[KLD_WIRE_IPC_HANDLE_BYTES];
    dev_t inode_device; /* memfd */
    ino_t inode;
    uint64_t cuda_file; /* CUDA fd: of cuda_file.h; 0: unknown, and of attached ones */

    /* ADDING, REMOVING, and but for `memory` while it grows: the pool's. Else the loop's. */
    int fd;                      /* memfd or CUDA allocation, until it is mapped */
    struct kld_memory *memory;   /* attached: the owner's; NULL: it took it back */
    struct kld_mapping *mapping; /* memfd: of mapping.h, which has the memory; else NULL */
    enum kld_status status;
    bool limited; /* memfd: see mapping.h */
    struct kld_error error;
};

TAILQ_HEAD(kld_region_list, kld_region);

#define KLD_REGION_SLOT_BITS 20 /* regions of a client: at most 2^20 */

/* Checks the frame, the descriptor (sealed, large enough; -1 if none came) and the quotas, then
 * starts mapping; REGION or ERROR follows. The descriptor is taken over if KLD_OK is returned. */
enum kld_status kld_worker_region_add(struct kld_session *session,
                                      const struct kld_frame_region_add *frame, int fd,
                                      struct kld_error *err);
/* What lies (what: "the memory lies") on the device with this UUID is refused here: says where that
 * is, because a request runs where its memory lies. why: what else there is to say of it, behind a
 * comma, or "". */
enum kld_status kld_worker_other_device(const struct kld_worker *worker, const uint8_t *uuid,
                                        const char *what, const char *why, struct kld_error *err);
/* REGION: what the client asked for is there. */
void kld_worker_region_reply(const struct kld_region *region);
/* Of one that waited for memory (kept.h). */
void kld_worker_region_add_again(struct kld_region *region);
/* LIVE -> CONDEMNED: no request can name it from here on. */
enum kld_status kld_worker_region_drop(struct kld_session *session, uint64_t id,
                                       struct kld_error *err);
void kld_worker_region_drop_all(struct kld_session *session);

/* The LIVE region of this id, or NULL with KLD_NOT_FOUND described, or KLD_GONE where it was
 * attached to what is no longer published. what: who named it. */
struct kld_region *kld_worker_region_find(struct kld_session *session, uint64_t id,
                                          const char *what, struct kld_error *err);
/* A region for whoever attaches to the publication; LIVE at once. */
enum kld_status kld_worker_region_attach(struct kld_session *session,
                                         struct kld_publication *publication,
                                         struct kld_region **ret_region, struct kld_error *err);
/* An attached region whose publication ends. */
void kld_worker_region_orphan(struct kld_region *region);
/* The region whose memory this one is: itself, or its owner's. Of a region that find() gave. */
struct kld_region *kld_worker_region_owner(struct kld_region *region);
void kld_worker_region_acquire(struct kld_region *region);
/* The last user of a condemned region has it unmapped. */
void kld_worker_region_release(struct kld_region *region);

#endif
