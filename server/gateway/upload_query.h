/* upload_query.h - the query of PUT /v2/tensors/NAME: what tensor it is, for how long, and where.
 * Pure; any thread. */
#ifndef KLD_SERVER_GATEWAY_UPLOAD_QUERY_H
#define KLD_SERVER_GATEWAY_UPLOAD_QUERY_H

#include <stdint.h>

#include "proto/op.h"

/* As they stand in the query; NULL: not there. */
struct kld_upload_query {
    const char *datatype, *shape, *lifetime_ms, *device;
};

struct kld_upload_tensor {
    uint32_t dtype, rank;
    uint64_t shape[KLD_RANK_MAX];
    uint64_t bytes; /* at most 2^43 */
    uint64_t lifetime_ms;
    uint32_t device; /* UINT32_MAX: any */
};

/* lifetime_ms_max: also what it is if none is named. devices: numbered from 0. */
enum kld_status kld_upload_query_read(const struct kld_upload_query *query,
                                      uint64_t lifetime_ms_max, uint32_t devices,
                                      struct kld_upload_tensor *ret_tensor, struct kld_error *err);

#endif
