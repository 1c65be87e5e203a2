/* regions.c - names, limits and uses of registered memory (regions.h). Opens, reads and writes none
 * of it (shm.c, cuda_shm.c). Any thread: the list is under a mutex. */
#include "server/gateway/regions.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/auth.h"
#include "server/gateway/pool.h"
#include "server/gateway/shm.h"

/* Of one region in the list; every byte of a name and a key may be escaped, which makes it six. */
#define LISTED_BYTES_MAX (6 * (KLD_OIP_NAME_MAX + KLD_OIP_KEY_MAX) + 160)

struct kld_regions {
    const struct kld_config *config;
    struct kld_stats *stats;
    uv_mutex_t mutex; /* of all below */
    struct kld_registered *first;
    uint32_t count; /* with those that are not published yet, as bytes */
    uint64_t bytes;
};

enum kld_status kld_regions_open(const struct kld_config *config, struct kld_stats *stats,
                                 struct kld_regions **ret_regions, struct kld_error *err) {
    struct kld_regions *regions = calloc(1, sizeof *regions);
    if (!regions || uv_mutex_init(&regions->mutex) != 0) {
        free(regions);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    regions->config = config;
    regions->stats = stats;
    *ret_regions = regions;
    return KLD_OK;
}

static void count(struct kld_regions *regions, int32_t sign, uint64_t bytes) {
    regions->count += (uint32_t)sign;
    regions->bytes += (uint64_t)(int64_t)sign * bytes;
    kld_stats_set(regions->stats, KLD_STAT_http_regions, regions->count);
    kld_stats_set(regions->stats, KLD_STAT_http_region_bytes, regions->bytes);
}

static void take_out(struct kld_regions *regions, struct kld_registered **at, uv_loop_t *loop) {
    struct kld_registered *registered = *at;
    *at = registered->next;
    count(regions, -1, registered->bytes);
    kld_shm_release(registered->use.object, loop);
    kld_pool_drop(registered->use.buffer);
    free(registered);
}

void kld_regions_close(struct kld_regions *regions) {
    if (!regions)
        return;
    while (regions->first)
        take_out(regions, &regions->first, NULL);
    uv_mutex_destroy(&regions->mutex);
    free(regions);
}

static struct kld_registered *find(const struct kld_regions *regions,
                                   const struct kld_caller *owner, const char *name) {
    struct kld_registered *registered = regions->first;
    while (registered && (registered->owner != owner || strcmp(registered->name, name) != 0))
        registered = registered->next;
    return registered;
}

static bool is_published(const struct kld_registered *registered) {
    return registered->use.object || registered->use.buffer;
}

/* ---- Limits -----------------------------------------------------------------------------------*/

struct held {
    uint64_t count, bytes;
};

static struct held held_by(const struct kld_regions *regions, const struct kld_caller *owner) {
    struct held held = {.count = 0};
    for (const struct kld_registered *one = regions->first; one; one = one->next)
        if (one->owner == owner) {
            held.bytes += one->bytes;
            held.count++;
        }
    return held;
}

/* What no wait and no unregistering would help. */
static enum kld_status check_alone(const struct kld_config *config,
                                   const struct kld_registered *wanted, struct kld_error *err) {
    if (wanted->bytes > config->http_region_bytes_max)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the region has %" PRIu64 " bytes; all of them at most %" PRIu64
                             " (http_region_bytes_max)",
                             wanted->bytes, config->http_region_bytes_max);
    if (wanted->owner->name[0] && wanted->bytes > config->token_region_bytes_max)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the region has %" PRIu64 " bytes; those of one token at most %" PRIu64
                             " (token_region_bytes_max)",
                             wanted->bytes, config->token_region_bytes_max);
    return KLD_OK;
}

/* KLD_THROTTLED: what is in the way is the token's own; KLD_BUSY: it is others' as well. */
static enum kld_status check_limits(const struct kld_regions *regions,
                                    const struct kld_registered *wanted, struct kld_error *err) {
    const struct kld_config *config = regions->config;
    uint64_t most = config->http_region_bytes_max, mine = config->token_region_bytes_max;
    struct held owned = held_by(regions, wanted->owner);
    bool named = wanted->owner->name[0];
    enum kld_status status = check_alone(config, wanted, err);
    if (status)
        return status;
    if (named && owned.count >= config->token_regions_max)
        return kld_error_set(err, KLD_THROTTLED,
                             "this token has registered %" PRIu64
                             " regions, the most allowed (token_regions_max); unregister one",
                             owned.count);
    if (named && owned.bytes > mine - wanted->bytes)
        return kld_error_set(err, KLD_THROTTLED,
                             "the region has %" PRIu64 " bytes and those of this token %" PRIu64
                             "; at most %" PRIu64 " (token_region_bytes_max); unregister one",
                             wanted->bytes, owned.bytes, mine);
    if (regions->count >= config->http_regions_max)
        return kld_error_set(err, named && owned.count == regions->count ? KLD_THROTTLED : KLD_BUSY,
                             "there are %" PRIu32
                             " regions, the most allowed (http_regions_max); unregister one",
                             regions->count);
    if (regions->bytes > most - wanted->bytes)
        return kld_error_set(err, named && owned.bytes == regions->bytes ? KLD_THROTTLED : KLD_BUSY,
                             "the region has %" PRIu64 " bytes and the others %" PRIu64
                             "; at most %" PRIu64 " (http_region_bytes_max); unregister one",
                             wanted->bytes, regions->bytes, most);
    return KLD_OK;
}

static enum kld_status check(const struct kld_regions *regions, const struct kld_registered *wanted,
                             struct kld_error *err) {
    const struct kld_registered *there = find(regions, wanted->owner, wanted->name);
    if (atomic_load(&wanted->owner->gone)) /* since its headers: nobody could unregister it */
        return kld_error_set(err, KLD_UNAUTHENTICATED, "this token is no longer accepted");
    if (there)
        return kld_error_set(err, KLD_EXISTS, "a region of this name is %s",
                             is_published(there) ? "registered already" : "just being registered");
    return check_limits(regions, wanted, err);
}

/* ---- A region's life --------------------------------------------------------------------------*/

enum kld_status kld_regions_name(struct kld_registered *wanted, const char *name,
                                 struct kld_error *err) {
    enum kld_status status = kld_oip_check_name(name, "region", err);
    if (!status)
        strcpy(wanted->name, name);
    return status;
}

bool kld_regions_drop_left(struct kld_regions *regions, uv_loop_t *loop) {
    bool more = false;
    uv_mutex_lock(&regions->mutex);
    for (struct kld_registered **at = &regions->first; *at;)
        if (is_published(*at) && kld_caller_left((*at)->owner)) {
            take_out(regions, at, loop);
        } else {
            more = more || atomic_load(&(*at)->owner->gone);
            at = &(*at)->next;
        }
    uv_mutex_unlock(&regions->mutex);
    return more;
}

enum kld_status kld_regions_reserve(struct kld_regions *regions,
                                    const struct kld_registered *wanted,
                                    struct kld_registered **ret_registered, struct kld_error *err) {
    struct kld_registered *registered = malloc(sizeof *registered);
    if (!registered)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    *registered = *wanted;
    registered->use = (struct kld_region_use){.object = NULL};
    uv_mutex_lock(&regions->mutex);
    enum kld_status status = check(regions, wanted, err);
    if (status == KLD_OK) {
        registered->next = regions->first;
        regions->first = registered;
        count(regions, 1, registered->bytes);
    }
    uv_mutex_unlock(&regions->mutex);
    if (status == KLD_BUSY)
        kld_stats_rejected(regions->stats, KLD_REJECT_http_regions_full);
    if (status)
        free(registered);
    else
        *ret_registered = registered;
    return status;
}

void kld_regions_publish(struct kld_regions *regions, struct kld_registered *registered,
                         struct kld_region_use use) {
    uv_mutex_lock(&regions->mutex);
    registered->use = use;
    uv_mutex_unlock(&regions->mutex);
}

void kld_regions_give_up(struct kld_regions *regions, struct kld_registered *registered) {
    uv_mutex_lock(&regions->mutex);
    struct kld_registered **at = &regions->first;
    while (*at != registered)
        at = &(*at)->next;
    take_out(regions, at, NULL);
    uv_mutex_unlock(&regions->mutex);
}

static bool is_meant(const struct kld_registered *registered, enum kld_registered_kind kind,
                     const struct kld_caller *owner, const char *name) {
    return is_published(registered) && registered->kind == kind && registered->owner == owner &&
           (!name || strcmp(registered->name, name) == 0);
}

void kld_regions_unregister(struct kld_regions *regions, enum kld_registered_kind kind,
                            const struct kld_caller *owner, const char *name, uv_loop_t *loop) {
    uv_mutex_lock(&regions->mutex);
    for (struct kld_registered **at = &regions->first; *at;)
        if (is_meant(*at, kind, owner, name))
            take_out(regions, at, loop);
        else
            at = &(*at)->next;
    uv_mutex_unlock(&regions->mutex);
}

enum kld_status kld_regions_acquire(struct kld_regions *regions, const struct kld_caller *owner,
                                    const char *name, uint64_t offset_bytes, uint64_t bytes,
                                    struct kld_region_use *ret_use, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    uv_mutex_lock(&regions->mutex);
    const struct kld_registered *registered = find(regions, owner, name);
    if (!registered || !is_published(registered)) {
        status = kld_error_set(err, KLD_NOT_FOUND, "no shared-memory region '%.60s' is registered",
                               name);
    } else if (offset_bytes > registered->bytes || bytes > registered->bytes - offset_bytes) {
        status = kld_error_set(err, KLD_INVALID,
                               "region '%.60s' has %" PRIu64 " bytes; %" PRIu64
                               " at offset %" PRIu64 " do not fit",
                               name, registered->bytes, bytes, offset_bytes);
    } else {
        *ret_use = registered->use;
        if (ret_use->object)
            kld_shm_hold(ret_use->object);
        else
            kld_pool_hold(ret_use->buffer);
    }
    uv_mutex_unlock(&regions->mutex);
    return status;
}

/* ---- The list ---------------------------------------------------------------------------------*/

static void append(const struct kld_registered *registered, struct kld_oip_text *text) {
    kld_oip_append(text, "%s{\"name\":", text->length > 1 ? "," : "");
    kld_oip_append_string(text, registered->name);
    if (registered->kind == KLD_REGISTERED_SYSTEM) {
        kld_oip_append(text, ",\"key\":");
        kld_oip_append_string(text, registered->key);
        kld_oip_append(text, ",\"offset\":%" PRIu64, registered->offset_bytes);
    } else {
        kld_oip_append(text, ",\"device_id\":%" PRIu32, registered->device_id);
    }
    kld_oip_append(text, ",\"byte_size\":%" PRIu64 "}", registered->bytes);
}

/* Under the mutex from its size to its last byte: nothing comes in between. */
enum kld_status kld_regions_list(struct kld_regions *regions, enum kld_registered_kind kind,
                                 const struct kld_caller *owner, const char *name,
                                 struct kld_oip_text *ret_text, struct kld_error *err) {
    uint32_t found = 0;
    uv_mutex_lock(&regions->mutex);
    size_t most = 3 + (size_t)regions->count * LISTED_BYTES_MAX;
    struct kld_oip_text text = {.data = malloc(most), .capacity = most};
    if (text.data)
        kld_oip_append(&text, "[");
    for (const struct kld_registered *one = regions->first; one && text.data; one = one->next)
        if (is_meant(one, kind, owner, name)) {
            append(one, &text);
            found++;
        }
    uv_mutex_unlock(&regions->mutex);
    if (!text.data)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    kld_oip_append(&text, "]");
    if (name && !found) {
        free(text.data);
        return kld_error_set(err, KLD_NOT_FOUND,
                             "no shared-memory region of this name is registered");
    }
    *ret_text = text;
    return KLD_OK;
}
