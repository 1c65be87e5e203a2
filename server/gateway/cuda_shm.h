/* cuda_shm.h - GPU memory of callers on this host, known by name ("CUDA shared memory"): registered
 * by its IPC handle, which goes on to the worker of that device; the gateway never sees a byte of
 * it.
 *
 * Off until cuda_shm is configured. A region belongs to the caller (auth.h) who registered it. It
 * is imported anew when its worker was replaced; requests that use it keep it when it is
 * unregistered. The caller keeps the memory alive until then. The list of regions is in regions.h.
 */
#ifndef KLD_SERVER_GATEWAY_CUDA_SHM_H
#define KLD_SERVER_GATEWAY_CUDA_SHM_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/oip.h"
#include "server/gateway/auth.h"
#include "server/gateway/http.h"
#include "server/gateway/pool.h"

/* Is it on, and does a worker have a card? */
bool kld_cuda_shm_works(const struct kld_gateway *gateway);
/* Answers the exchange, at once or when the worker has taken the handle. Its loop. */
void kld_cuda_shm_register(struct kld_exchange *exchange, const char *name, const char *body,
                           size_t bytes);

#endif
