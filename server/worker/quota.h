/* quota.h - how much memory a client may register: how many regions, their bytes, and what of them
 * may lie in the device's pool. Loop thread. */
#ifndef KLD_SERVER_WORKER_QUOTA_H
#define KLD_SERVER_WORKER_QUOTA_H

#include <stdint.h>

#include "proto/status.h"

struct kld_session;

/* One more region, of no bytes of its own? */
enum kld_status kld_quota_check_count(const struct kld_session *session, struct kld_error *err);
/* One more of this enum kld_region_kind and size? */
enum kld_status kld_quota_check(const struct kld_session *session, uint32_t kind, uint64_t bytes,
                                struct kld_error *err);

#endif
