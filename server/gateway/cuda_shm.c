/* cuda_shm.c - the list of callers' GPU memory, and how it gets on it (cuda_shm.h). Opens no handle
 * itself (pool.c, and there the worker). The list under a mutex; registering on the exchange's
 * loop. */
#include "server/gateway/cuda_shm.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/deadline.h"
#include "server/gateway/shm.h"

struct region {
    struct region *next;
    const struct kld_caller *owner; /* compared, never read */
    struct kld_pool_buffer *buffer; /* one of its users */
    uint32_t device_id;
    char name[KLD_OIP_NAME_MAX];
};

struct kld_cuda_shm {
    const struct kld_config *config;
    struct kld_stats *stats;
    uv_mutex_t mutex;
    struct region *first; /* under the mutex, as count */
    uint32_t count;
};

/* A handle on its way to the worker. */
struct registering {
    struct kld_pool_job job;
    struct kld_deadline deadline;
    struct kld_gateway *gateway;
    struct kld_exchange *exchange; /* NULL: nobody waits any more */
    struct region *region;
};

/* ---- The list ---------------------------------------------------------------------------------*/

enum kld_status kld_cuda_shm_open(const struct kld_config *config, struct kld_stats *stats,
                                  struct kld_cuda_shm **ret_shm, struct kld_error *err) {
    struct kld_cuda_shm *shm = calloc(1, sizeof *shm);
    if (!shm || uv_mutex_init(&shm->mutex) != 0) {
        free(shm);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    shm->config = config;
    shm->stats = stats;
    *ret_shm = shm;
    return KLD_OK;
}

static void forget(struct region *region) {
    kld_pool_drop(region->buffer);
    free(region);
}

void kld_cuda_shm_close(struct kld_cuda_shm *shm) {
    if (!shm)
        return;
    while (shm->first) {
        struct region *region = shm->first;
        shm->first = region->next;
        forget(region);
    }
    uv_mutex_destroy(&shm->mutex);
    free(shm);
}

static struct region *find(const struct kld_cuda_shm *shm, const struct kld_caller *owner,
                           const char *name) {
    struct region *region = shm->first;
    while (region && (region->owner != owner || strcmp(region->name, name) != 0))
        region = region->next;
    return region;
}

bool kld_cuda_shm_has(struct kld_cuda_shm *shm, const struct kld_caller *owner, const char *name) {
    uv_mutex_lock(&shm->mutex);
    bool found = find(shm, owner, name) != NULL;
    uv_mutex_unlock(&shm->mutex);
    return found;
}

uint32_t kld_cuda_shm_count(struct kld_cuda_shm *shm) {
    uv_mutex_lock(&shm->mutex);
    uint32_t count = shm->count;
    uv_mutex_unlock(&shm->mutex);
    return count;
}

/* region NULL: could one of this name be added? */
static enum kld_status add(struct kld_cuda_shm *shm, const struct kld_caller *owner,
                           const char *name, struct region *region, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    uv_mutex_lock(&shm->mutex);
    if (find(shm, owner, name)) {
        status = kld_error_set(err, KLD_EXISTS, "a region of this name is registered already");
    } else if (shm->count >= shm->config->http_regions_max) {
        status = kld_error_set(err, KLD_TOO_LARGE,
                               "there are %" PRIu32 " regions, the most allowed (http_regions_max)",
                               shm->count);
    } else if (region) {
        region->next = shm->first;
        shm->first = region;
        shm->count++;
        kld_stats_add(shm->stats, KLD_STAT_http_regions, 1);
    }
    uv_mutex_unlock(&shm->mutex);
    return status;
}

void kld_cuda_shm_unregister(struct kld_cuda_shm *shm, const struct kld_caller *owner,
                             const char *name) {
    uv_mutex_lock(&shm->mutex);
    for (struct region **at = &shm->first; *at;) {
        struct region *region = *at;
        if (region->owner != owner || (name && strcmp(region->name, name) != 0)) {
            at = &region->next;
            continue;
        }
        *at = region->next;
        shm->count--;
        kld_stats_add(shm->stats, KLD_STAT_http_regions, -1);
        forget(region);
    }
    uv_mutex_unlock(&shm->mutex);
}

bool kld_cuda_shm_append_status(struct kld_cuda_shm *shm, const struct kld_caller *owner,
                                const char *name, struct kld_oip_text *text) {
    bool found = false;
    kld_oip_append(text, "[");
    uv_mutex_lock(&shm->mutex);
    for (const struct region *region = shm->first; region; region = region->next) {
        if (region->owner != owner || (name && strcmp(region->name, name) != 0))
            continue;
        kld_oip_append(text, "%s{\"name\":", found ? "," : "");
        kld_oip_append_string(text, region->name);
        kld_oip_append(text, ",\"device_id\":%" PRIu32 ",\"byte_size\":%" PRIu64 "}",
                       region->device_id, region->buffer->bytes);
        found = true;
    }
    uv_mutex_unlock(&shm->mutex);
    kld_oip_append(text, "]");
    return found || !name;
}

enum kld_status kld_cuda_shm_acquire(struct kld_cuda_shm *shm, const struct kld_caller *owner,
                                     const char *name, uint64_t offset_bytes, uint64_t bytes,
                                     struct kld_pool_buffer **ret_buffer, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    uv_mutex_lock(&shm->mutex);
    const struct region *region = find(shm, owner, name);
    uint64_t has = region ? region->buffer->bytes : 0;
    if (!region) {
        status = kld_error_set(err, KLD_NOT_FOUND, "no shared-memory region '%.60s' is registered",
                               name);
    } else if (offset_bytes > has || bytes > has - offset_bytes) {
        status = kld_error_set(err, KLD_INVALID,
                               "region '%.60s' has %" PRIu64 " bytes; %" PRIu64
                               " at offset %" PRIu64 " do not fit",
                               name, has, bytes, offset_bytes);
    } else {
        kld_pool_hold(region->buffer);
        *ret_buffer = region->buffer;
    }
    uv_mutex_unlock(&shm->mutex);
    return status;
}

/* ---- Registering ------------------------------------------------------------------------------*/

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
    struct region *region = registering->region;
    struct kld_error error = job->error;
    kld_deadline_clear(gateway, &registering->deadline);
    region->buffer = job->buffer;
    error.status = job->status;
    /* Nobody knows of it who was told that it failed, or who has gone. */
    if (error.status == KLD_OK && (!registering->exchange || add(gateway->cuda_shm, region->owner,
                                                                 region->name, region, &error)))
        forget(region);
    else if (error.status)
        free(region);
    answer(registering, &error);
    free(registering);
}

static void too_late(struct kld_deadline *deadline) {
    struct registering *registering =
        (struct registering *)(void *)((char *)deadline - offsetof(struct registering, deadline));
    struct kld_error error;
    kld_error_set(&error, KLD_DEADLINE, "the deadline passed before the worker took the handle");
    answer(registering, &error);
}

static void client_gone(void *waiting) {
    struct registering *registering = waiting;
    registering->exchange = NULL;
}

static bool has_card(const struct kld_gateway *gateway, uint32_t index) {
    return strcmp(gateway->page->worker[index].backend, "cuda") == 0;
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

static enum kld_status check(struct kld_exchange *exchange, const char *name, const char *body,
                             size_t bytes, struct kld_oip_register_cuda *ret_wanted,
                             uint32_t *ret_index, struct kld_error *err) {
    struct kld_gateway *gateway = exchange->gateway;
    enum kld_status status;
    if (!gateway->config->cuda_shm)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "CUDA shared memory over HTTP is off; the operator may set cuda_shm");
    if (!*name || strlen(name) >= KLD_OIP_NAME_MAX)
        return kld_error_set(err, KLD_INVALID, "the name of a region has 1 to %d bytes",
                             KLD_OIP_NAME_MAX - 1);
    if ((status = kld_oip_parse_register_cuda(body, bytes, ret_wanted, err)) ||
        (status = find_device(gateway, ret_wanted->device_id, ret_index, err)))
        return status;
    if (kld_shm_has(gateway->shm, exchange->caller, name))
        return kld_error_set(err, KLD_EXISTS, "a region of this name is registered already");
    return add(gateway->cuda_shm, exchange->caller, name, NULL, err);
}

void kld_cuda_shm_register(struct kld_exchange *exchange, const char *name, const char *body,
                           size_t bytes) {
    struct kld_gateway *gateway = exchange->gateway;
    struct kld_oip_register_cuda wanted;
    struct kld_error error;
    uint32_t index = 0;
    if (check(exchange, name, body, bytes, &wanted, &index, &error)) {
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    struct registering *registering = calloc(1, sizeof *registering);
    struct region *region = calloc(1, sizeof *region);
    if (!registering || !region) {
        free(registering);
        free(region);
        kld_error_set(&error, KLD_NO_MEMORY, "out of memory");
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    strcpy(region->name, name);
    region->owner = exchange->caller;
    region->device_id = (uint32_t)wanted.device_id;
    registering->gateway = gateway;
    registering->exchange = exchange;
    registering->region = region;
    registering->job.kind = KLD_POOL_IMPORT;
    registering->job.bytes = wanted.byte_size;
    memcpy(registering->job.handle, wanted.handle, sizeof wanted.handle);
    memcpy(registering->job.uuid, gateway->page->worker[index].uuid, sizeof registering->job.uuid);
    registering->job.done = imported;
    exchange->waiting = registering;
    exchange->waiting_gone = client_gone;
    uint64_t ms = gateway->config->http_deadline_ms;
    kld_deadline_set(gateway, &registering->deadline, ms ? uv_hrtime() + ms * 1000000 : UINT64_MAX,
                     too_late);
    kld_pool_submit(gateway->pool[index], &gateway->mail, &registering->job);
}
