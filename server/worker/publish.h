/* publish.h - tensors that one client shows to others of the same worker, by name.
 *
 * A publication names a part of one LIVE region of its owner. Who attaches gets a region of its own
 * whose memory is the owner's: read-only, and pinned by each request that names it (the owner's
 * region is what is pinned). The publication ends when its owner detaches it, drops the region or
 * leaves. From then on whoever names an attached region is told KLD_GONE; memory stays until the
 * last request that had pinned it is through.
 *
 * A name is its user's: two users may publish the same one, neither shadows or occupies the
 * other's, and who attaches to another user's tensor says whose. Loop thread. */
#ifndef KLD_SERVER_WORKER_PUBLISH_H
#define KLD_SERVER_WORKER_PUBLISH_H

#include "server/worker/region.h"

struct kld_publication {
    TAILQ_ENTRY(kld_publication) in_worker;
    struct kld_region *region; /* the owner's */
    uint64_t offset_bytes, bytes;
    struct kld_wire_description tensor;
    char name[KLD_WIRE_NAME_MAX];
    uint32_t uids_count;
    uint32_t uids[KLD_WIRE_UIDS_MAX];
    struct kld_region_list attached; /* regions of those who attached */
};

/* Both answer the frame themselves if KLD_OK is returned. */
enum kld_status kld_publication_open(struct kld_session *session,
                                     const struct kld_frame_publish *frame, struct kld_error *err);
enum kld_status kld_publication_attach(struct kld_session *session,
                                       const struct kld_frame_attach *frame, struct kld_error *err);
/* By its name; only its owner's. */
enum kld_status kld_publication_detach(struct kld_session *session,
                                       const struct kld_frame_name *frame, struct kld_error *err);
/* The region is about to be condemned: all publications of it end. */
void kld_publication_end_region(struct kld_region *region);

#endif
