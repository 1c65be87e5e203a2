/* cuda_shm.c - how callers' GPU memory gets on the list of regions (cuda_shm.h). Opens no handle
 * itself (pool.c, and there the worker). The exchange's loop. */
#include "server/gateway/cuda_shm.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/deadline.h"
#include "server/gateway/pool.h"
#include "server/gateway/regions.h"

/* A handle on its way to the worker. */
struct registering {
    struct kld_pool_job job;
    struct kld_deadline deadline;
    struct kld_gateway *gateway;
    struct kld_exchange *exchange;     /* NULL: nobody waits any more */
    struct kld_registered *registered; /* reserved */
};

static void answer(struct registering *registering, const struct kld_error *error) {
    struct kld_exchange *exchange = registering->exchange;
    registering->exchange = NULL;
    if (!exchange)
        return;
    exchange->waiting = NULL;
    if (error->status)
        kld_exchange_reply_error(exchange, error);
    else
        kld_exchange_reply_text(exchange, 200, "", "", 0);
}

static void imported(struct kld_pool_job *job) {
    struct registering *registering =
        (struct registering *)(void *)((char *)job - offsetof(struct registering, job));
    struct kld_gateway *gateway = registering->gateway;
    struct kld_error error = job->error;
    kld_deadline_clear(gateway, &registering->deadline);
    error.status = job->status;
    if (error.status == KLD_OK && registering->exchange) {
        kld_regions_publish(gateway->regions, registering->registered,
                            (struct kld_region_use){.buffer = job->buffer});
    } else { /* nobody knows of it who was told that it failed, or who has gone */
        if (error.status == KLD_OK)
            kld_pool_drop(job->buffer);
        kld_regions_give_up(gateway->regions, registering->registered);
    }
    answer(registering, &error);
    free(registering);
}

static void too_late(struct kld_deadline *deadline) {
    struct registering *registering =
        (struct registering *)(void *)((char *)deadline - offsetof(struct registering, deadline));
    struct kld_error error;
    kld_error_set(&error, KLD_DEADLINE, "the deadline passed before the worker took the handle");
    kld_pool_unwant(&registering->job);
    answer(registering, &error);
}

static void client_gone(void *waiting) {
    struct registering *registering = waiting;
    kld_pool_unwant(&registering->job);
    registering->exchange = NULL;
}

static bool has_card(const struct kld_gateway *gateway, uint32_t index) {
    return strcmp(gateway->page->device[index].backend, "cuda") == 0;
}

bool kld_cuda_shm_works(const struct kld_gateway *gateway) {
    bool any = false;
    for (uint32_t i = 0; i < gateway->pools; i++)
        any = any || has_card(gateway, i);
    return any && gateway->config->cuda_shm;
}

/* Which worker has the device that the caller calls so. */
static enum kld_status find_device(const struct kld_gateway *gateway, uint64_t device_id,
                                   uint32_t *ret_index, struct kld_error *err) {
    for (uint32_t i = 0; i < gateway->pools; i++)
        if (kld_config_device(gateway->config, i) == device_id) {
            *ret_index = i;
            if (has_card(gateway, i))
                return KLD_OK;
            return kld_error_set(err, KLD_UNIMPLEMENTED,
                                 "this server computes on the CPU and has no CUDA memory");
        }
    return kld_error_set(err, KLD_INVALID, "device_id %" PRIu64 " is none of this server's",
                         device_id);
}

static enum kld_status reserve(struct kld_exchange *exchange, const char *name, const char *body,
                               size_t bytes, struct kld_oip_register_cuda *ret_wanted,
                               uint32_t *ret_index, struct kld_registered **ret_registered,
                               struct kld_error *err) {
    struct kld_gateway *gateway = exchange->gateway;
    struct kld_registered region = {.kind = KLD_REGISTERED_CUDA, .owner = exchange->caller};
    enum kld_status status;
    if (!gateway->config->cuda_shm)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "CUDA shared memory over HTTP is off; the operator may set cuda_shm");
    if ((status = kld_regions_name(&region, name, err)) ||
        (status = kld_oip_parse_register_cuda(body, bytes, ret_wanted, err)) ||
        (status = find_device(gateway, ret_wanted->device_id, ret_index, err)))
        return status;
    region.bytes = ret_wanted->byte_size;
    region.device_id = (uint32_t)ret_wanted->device_id;
    return kld_regions_reserve(gateway->regions, &region, ret_registered, err);
}

void kld_cuda_shm_register(struct kld_exchange *exchange, const char *name, const char *body,
                           size_t bytes) {
    struct kld_gateway *gateway = exchange->gateway;
    struct kld_oip_register_cuda wanted;
    struct kld_registered *registered;
    struct kld_error error;
    uint32_t index = 0;
    if (reserve(exchange, name, body, bytes, &wanted, &index, &registered, &error)) {
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    struct registering *registering = calloc(1, sizeof *registering);
    if (!registering) {
        kld_regions_give_up(gateway->regions, registered);
        kld_error_set(&error, KLD_NO_MEMORY, "out of memory");
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    registering->gateway = gateway;
    registering->exchange = exchange;
    registering->registered = registered;
    registering->job.kind = KLD_POOL_IMPORT;
    registering->job.bytes = wanted.byte_size;
    memcpy(registering->job.handle, wanted.handle, sizeof wanted.handle);
    memcpy(registering->job.uuid, gateway->page->device[index].uuid, sizeof registering->job.uuid);
    registering->job.done = imported;
    exchange->waiting = registering;
    exchange->waiting_gone = client_gone;
    uint64_t ms = gateway->config->http_deadline_ms;
    kld_deadline_set(gateway, &registering->deadline, ms ? uv_hrtime() + ms * 1000000 : UINT64_MAX,
                     too_late);
    kld_pool_submit(gateway->pool[index], &gateway->mail, &registering->job);
}
