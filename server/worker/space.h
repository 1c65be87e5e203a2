/* space.h - regions whose memory comes piece by piece (KLD_REGION_CUDA_SPACE): how they grow. A
 * space has no byte without memory: pieces come one behind the other and stay until the region
 * goes. Loop thread. */
#ifndef KLD_SERVER_WORKER_SPACE_H
#define KLD_SERVER_WORKER_SPACE_H

#include "server/worker/region.h"

/* Puts the next piece behind those of a space; REGION or ERROR follows, and after an error the
 * space is as it was. The descriptor is taken over if KLD_OK is returned. */
enum kld_status kld_space_grow(struct kld_session *session,
                               const struct kld_frame_region_grow *frame, int fd,
                               struct kld_error *err);
/* May a region of its own show the CUDA allocation with this number (cuda_file.h)? Not if it is a
 * piece of a space of this client. */
enum kld_status kld_space_check_apart(const struct kld_session *session, uint64_t cuda_file,
                                      struct kld_error *err);
/* Of any region that goes. */
void kld_space_forget(struct kld_region *region);

#endif
