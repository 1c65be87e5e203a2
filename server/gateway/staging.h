/* staging.h - the one piece of shared memory into which HTTP bodies land and out of which results
 * are sent.
 *
 * A sealed memfd of staging_bytes_max, mapped here and registered with the worker as one region, so
 * that a body is where the worker computes as soon as it is received. Ranges of it are handed out
 * first-fit at 64-byte boundaries and coalesce when they come back. Pages are taken by first use.
 *
 * Any thread; the bytes of an allocated range may be touched by whoever its holder lets (MHD, the
 * thread pool, the worker). Does not wait: full is KLD_BUSY. */
#ifndef KLD_SERVER_GATEWAY_STAGING_H
#define KLD_SERVER_GATEWAY_STAGING_H

#include <stdint.h>

#include "proto/status.h"
#include "server/stats.h"

#define KLD_STAGING_ALIGN 64

struct kld_staging;

/* bytes is rounded up to whole pages. stats: keeps the gauge staging_bytes; NULL: nobody does. */
enum kld_status kld_staging_open(uint64_t bytes, struct kld_stats *stats,
                                 struct kld_staging **ret_staging, struct kld_error *err);
void kld_staging_close(struct kld_staging *staging); /* NULL is allowed */

int kld_staging_fd(const struct kld_staging *staging);
uint64_t kld_staging_bytes(const struct kld_staging *staging);
uint64_t kld_staging_used_bytes(struct kld_staging *staging);

/* KLD_TOO_LARGE: more than there is at all; KLD_BUSY: more than is free in one piece now. */
enum kld_status kld_staging_alloc(struct kld_staging *staging, uint64_t bytes, uint64_t *ret_offset,
                                  struct kld_error *err);
/* offset: of a range that is allocated. */
void kld_staging_free(struct kld_staging *staging, uint64_t offset);
void *kld_staging_at(const struct kld_staging *staging, uint64_t offset);

#endif
