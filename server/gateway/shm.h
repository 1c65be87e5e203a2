/* shm.h - POSIX shared memory that HTTP callers registered by name ("system shared memory").
 *
 * Such an object is not sealed: its owner may cut it short at any time. So it is never mapped here:
 * tensors are read with pread() into staging and results written with pwrite(), and a cut object is
 * an error, not a SIGBUS. Registering is off until shm_prefix is configured, and open to keys under
 * it only.
 *
 * A region belongs to the caller (auth.h) who registered it: nobody else sees, uses or unregisters
 * it, and two callers may use the same name.
 *
 * A region is counted: unregistering takes it off the list at once, its descriptor is closed after
 * its last user, on the thread pool: the last close of a large object frees its pages. Any thread;
 * kld_shm_read() and kld_shm_write() by who holds the region. */
#ifndef KLD_SERVER_GATEWAY_SHM_H
#define KLD_SERVER_GATEWAY_SHM_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "proto/oip.h"
#include "server/config.h"
#include "server/stats.h"

struct kld_caller;
struct kld_shm;
struct kld_shm_region;

enum kld_status kld_shm_open(const struct kld_config *config, struct kld_stats *stats,
                             struct kld_shm **ret_shm, struct kld_error *err);
/* NULL is allowed. No region is in use and no loop runs any more. */
void kld_shm_close(struct kld_shm *shm);

/* KLD_FORBIDDEN: off, or not under the prefix; KLD_EXISTS: the name is taken; KLD_NOT_FOUND: no
 * object with this key; KLD_TOO_LARGE: http_regions_max. */
enum kld_status kld_shm_register(struct kld_shm *shm, const struct kld_caller *owner,
                                 const char *name, const struct kld_oip_register *wanted,
                                 struct kld_error *err);
/* name NULL: all of this owner; unknown: nothing. loop: the calling thread's, whose pool closes. */
void kld_shm_unregister(struct kld_shm *shm, const struct kld_caller *owner, const char *name,
                        uv_loop_t *loop);

/* [{"name","key","offset","byte_size"}]; of one name or of all (NULL). False: no such name. */
bool kld_shm_append_status(struct kld_shm *shm, const struct kld_caller *owner, const char *name,
                           struct kld_oip_text *text);
bool kld_shm_has(struct kld_shm *shm, const struct kld_caller *owner, const char *name);
uint32_t kld_shm_count(struct kld_shm *shm);

/* Are there `bytes` bytes at offset of this region? If so it is held until kld_shm_release(). */
enum kld_status kld_shm_acquire(struct kld_shm *shm, const struct kld_caller *owner,
                                const char *name, uint64_t offset_bytes, uint64_t bytes,
                                struct kld_shm_region **ret_region, struct kld_error *err);
/* NULL is allowed. loop: as above. */
void kld_shm_release(struct kld_shm_region *region, uv_loop_t *loop);

enum kld_status kld_shm_read(const struct kld_shm_region *region, uint64_t offset_bytes, void *to,
                             uint64_t bytes, struct kld_error *err);
enum kld_status kld_shm_write(const struct kld_shm_region *region, uint64_t offset_bytes,
                              const void *from, uint64_t bytes, struct kld_error *err);

#endif
