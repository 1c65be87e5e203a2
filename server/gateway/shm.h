/* shm.h - POSIX shared memory that HTTP callers registered by name ("system shared memory").
 *
 * Such an object is not sealed: its owner may cut it short at any time. So it is never mapped here:
 * tensors are read with pread() into staging and results written with pwrite(), and a cut object is
 * an error, not a SIGBUS. Registering is off until shm_prefix is configured, and open to keys under
 * it only. The list of regions is in regions.h.
 *
 * An object is counted: its descriptor is closed after its last user, on the thread pool: the last
 * close of a large object frees its pages. Any thread; kld_shm_read() and kld_shm_write() by who
 * holds the object. */
#ifndef KLD_SERVER_GATEWAY_SHM_H
#define KLD_SERVER_GATEWAY_SHM_H

#include <stdint.h>
#include <uv.h>

#include "proto/oip.h"
#include "server/config.h"
#include "server/gateway/regions.h"

/* KLD_FORBIDDEN: off, or not under the prefix; KLD_NOT_FOUND: no object with this key; else as
 * kld_regions_reserve(). */
enum kld_status kld_shm_register(struct kld_regions *regions, const struct kld_config *config,
                                 const struct kld_caller *owner, const char *name,
                                 const struct kld_oip_register *wanted, struct kld_error *err);

void kld_shm_hold(struct kld_shm_object *object);
/* NULL is allowed. loop: the calling thread's, whose pool closes; NULL: it is closed at once. */
void kld_shm_release(struct kld_shm_object *object, uv_loop_t *loop);

/* Of the same shared memory, by whatever keys; and where in it the region begins. */
bool kld_shm_is_same(const struct kld_shm_object *a, const struct kld_shm_object *b);
uint64_t kld_shm_offset(const struct kld_shm_object *object);

enum kld_status kld_shm_read(const struct kld_shm_object *object, uint64_t offset_bytes, void *to,
                             uint64_t bytes, struct kld_error *err);
enum kld_status kld_shm_write(const struct kld_shm_object *object, uint64_t offset_bytes,
                              const void *from, uint64_t bytes, struct kld_error *err);

#endif
