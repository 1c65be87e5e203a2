/* pool_keep.c - buffers that nobody uses are kept for a moment for who wants about as much next,
 * and given back at once where somebody else wants memory (pool.h). Asks the worker for nothing.
 * The pool's thread. */
#include <stdlib.h>

#include "server/gateway/pool_state.h"

#define KEPT_PART 4 /* of the device's pool, what is kept at most: others want it too */

uint64_t kld_pool_bytes_max(const struct kld_pool *pool) {
    return atomic_load(&pool->shown->pool_bytes_max);
}

static bool is_just_now(uint64_t ns) {
    uint64_t now = uv_hrtime();
    return ns && (now < ns || now - ns < KLD_POOL_WANTED_MS * UINT64_C(1000000));
}

/* A full pool refuses clients of the Unix socket, who do not wait: it is not to come to that, and
 * where it does, for who wants more than half, they mostly ask again. */
bool kld_pool_is_wanted(const struct kld_pool *pool) {
    uint64_t used = atomic_load(&pool->shown->pool_bytes), most = kld_pool_bytes_max(pool);
    uint64_t kept = atomic_load(&pool->stats->value[KLD_STAT_pool_kept_bytes]);
    used = used > kept ? used - kept : 0;
    return (most && used > most / 2) || is_just_now(atomic_load(&pool->starved_ns)) ||
           is_just_now(atomic_load(&pool->shown->pool_refused_ns));
}

void kld_pool_offer_kept(struct kld_pool *pool, bool offered) {
    kld_stats_set(pool->stats, KLD_STAT_pool_kept_bytes, offered ? pool->kept_bytes : 0);
}

static void count_kept(struct kld_pool *pool, const struct kld_pool_buffer *buffer, bool kept) {
    pool->kept_bytes += kept ? buffer->room_bytes : -buffer->room_bytes;
    pool->kept_count += kept ? 1 : -1u;
    kld_pool_offer_kept(pool, true);
}

void kld_pool_forget(struct kld_pool *pool, struct kld_pool_buffer **at) {
    struct kld_pool_buffer *buffer = *at;
    *at = buffer->after;
    if (pool->connection)
        kld_region_drop(buffer->region);
    if (buffer->kept_ns)
        count_kept(pool, buffer, false);
    free(buffer);
}

/* Where as many are kept as may be, the smallest goes for a larger one: who drops many small ones
 * does not have those of others dropped. */
static bool has_place(struct kld_pool *pool, uint64_t bytes) {
    struct kld_pool_buffer **smallest = NULL;
    if (pool->kept_count < KLD_POOL_KEPT_MAX)
        return true;
    for (struct kld_pool_buffer **at = &pool->buffers; *at; at = &(*at)->after)
        if ((*at)->kept_ns && (!smallest || (*at)->room_bytes < (*smallest)->room_bytes))
            smallest = at;
    if (!smallest || (*smallest)->room_bytes >= bytes)
        return false;
    kld_pool_forget(pool, smallest);
    return true;
}

bool kld_pool_keep(struct kld_pool_buffer *buffer) {
    struct kld_pool *pool = buffer->pool;
    uint64_t now = uv_hrtime(), most = kld_pool_bytes_max(pool) / KEPT_PART;
    kld_pool_look_at_wanted(pool);
    if (most > pool->config->keep_buffer_bytes)
        most = pool->config->keep_buffer_bytes;
    if (buffer->imported || pool->stopping || !pool->config->keep_buffer_ms ||
        atomic_load(&buffer->lost) || now < pool->kept_again_ns || buffer->room_bytes > most ||
        pool->kept_bytes > most - buffer->room_bytes ||
        buffer->room_bytes < KLD_POOL_KEPT_BYTES_MIN || !has_place(pool, buffer->room_bytes))
        return false;
    buffer->kept_ns = now;
    count_kept(pool, buffer, true);
    return true;
}

void kld_pool_forget_kept(struct kld_pool *pool, uint64_t ns) {
    uint64_t now = uv_hrtime();
    for (struct kld_pool_buffer **at = &pool->buffers; *at;) {
        const struct kld_pool_buffer *one = *at;
        if (one->kept_ns && (!ns || now - one->kept_ns >= ns || atomic_load(&one->lost)))
            kld_pool_forget(pool, at);
        else
            at = &(*at)->after;
    }
}

struct kld_pool_buffer *kld_pool_take_kept(struct kld_pool *pool, uint64_t bytes) {
    struct kld_pool_buffer *buffer = pool->buffers;
    while (buffer && (!buffer->kept_ns || atomic_load(&buffer->lost) ||
                      buffer->room_bytes < bytes || buffer->room_bytes - bytes > bytes / 4))
        buffer = buffer->after;
    if (!buffer)
        return NULL;
    count_kept(pool, buffer, false);
    buffer->kept_ns = 0;
    buffer->bytes = bytes;
    buffer->users = 1;
    return buffer;
}

bool kld_pool_gives_way(struct kld_pool *pool) {
    uint64_t now = uv_hrtime(), aside_ns = KLD_POOL_ASIDE_MS * UINT64_C(1000000);
    if (pool->kept_count) {
        pool->given_back_ns = now;
        kld_pool_forget_kept(pool, 0);
    }
    return pool->given_back_ns && now - pool->given_back_ns < aside_ns;
}

void kld_pool_look_at_wanted(struct kld_pool *pool) {
    uint32_t wanted = atomic_load(&pool->shown->pool_wanted);
    if (wanted == pool->wanted_seen)
        return;
    pool->wanted_seen = wanted;
    atomic_store(&pool->starved_ns, uv_hrtime());
    pool->kept_again_ns = uv_hrtime() + KLD_POOL_ASIDE_MS * UINT64_C(1000000);
    kld_pool_forget_kept(pool, 0);
}
