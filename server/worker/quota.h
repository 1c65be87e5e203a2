/* quota.h - how much memory a client may register: how many regions, their bytes, and what of them
 * may lie in the device's pool or in memory of the host. Loop thread. */
#ifndef KLD_SERVER_WORKER_QUOTA_H
#define KLD_SERVER_WORKER_QUOTA_H

#include <stdint.h>

#include "proto/status.h"

struct kld_session;
struct kld_worker;

/* One more region, of no bytes of its own? */
enum kld_status kld_quota_check_count(const struct kld_session *session, struct kld_error *err);
/* One more of this enum kld_region_kind and size? */
enum kld_status kld_quota_check(const struct kld_session *session, uint32_t kind, uint64_t bytes,
                                struct kld_error *err);
/* Of the host's memory, for all clients of this worker together. Who touches a page of a memfd
 * first has to pay for it, and of what a client never touched that is the worker. */
uint64_t kld_quota_shared_bytes_max(const struct kld_worker *worker);

#endif
