/* cuda_shm.h - GPU memory of callers on this host, known by name ("CUDA shared memory"): registered
 * by its IPC handle, which goes on to the worker of that device; the gateway never sees a byte of
 * it.
 *
 * Off until cuda_shm is configured. A region belongs to the caller (auth.h) who registered it. It
 * is imported anew when its worker was replaced; requests that use it keep it when it is
 * unregistered. The caller keeps the memory alive until then. Any thread, but
 * kld_cuda_shm_register(). */
#ifndef KLD_SERVER_GATEWAY_CUDA_SHM_H
#define KLD_SERVER_GATEWAY_CUDA_SHM_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/oip.h"
#include "server/gateway/auth.h"
#include "server/gateway/http.h"
#include "server/gateway/pool.h"

struct kld_cuda_shm;

enum kld_status kld_cuda_shm_open(const struct kld_config *config, struct kld_stats *stats,
                                  struct kld_cuda_shm **ret_shm, struct kld_error *err);
/* NULL is allowed. After the loops, before the pools are closed. */
void kld_cuda_shm_close(struct kld_cuda_shm *shm);

/* Is it on, and does a worker have a card? */
bool kld_cuda_shm_works(const struct kld_gateway *gateway);
/* Answers the exchange, at once or when the worker has taken the handle. Its loop. */
void kld_cuda_shm_register(struct kld_exchange *exchange, const char *name, const char *body,
                           size_t bytes);
/* name NULL: all of this owner; unknown: nothing. */
void kld_cuda_shm_unregister(struct kld_cuda_shm *shm, const struct kld_caller *owner,
                             const char *name);
bool kld_cuda_shm_has(struct kld_cuda_shm *shm, const struct kld_caller *owner, const char *name);

/* [{"name","device_id","byte_size"}]; of one name or of all (NULL). False: no such name. */
bool kld_cuda_shm_append_status(struct kld_cuda_shm *shm, const struct kld_caller *owner,
                                const char *name, struct kld_oip_text *text);
uint32_t kld_cuda_shm_count(struct kld_cuda_shm *shm);

/* The buffer behind a name, held until kld_pool_drop(). KLD_NOT_FOUND; KLD_INVALID: so many bytes
 * at this offset are not in it. */
enum kld_status kld_cuda_shm_acquire(struct kld_cuda_shm *shm, const struct kld_caller *owner,
                                     const char *name, uint64_t offset_bytes, uint64_t bytes,
                                     struct kld_pool_buffer **ret_buffer, struct kld_error *err);

#endif
