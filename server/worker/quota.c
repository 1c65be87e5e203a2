/* quota.c - see quota.h. Counts nothing itself (region.c). Worker process, loop thread. */
#include "server/worker/quota.h"

#include <inttypes.h>

#include "server/worker/region.h"
#include "server/worker/worker.h"

#define REGIONS_MAX ((uint64_t)1 << KLD_REGION_SLOT_BITS)

static void move(uint64_t *from, uint64_t *to, uint64_t amount) {
    *from -= amount;
    *to += amount;
}

void kld_quota_recognise(struct kld_session *session) {
    struct kld_worker *worker = session->worker;
    struct kld_user *client = session->user, *gateway = &worker->users.gateway;
    session->is_gateway = true;
    session->user = gateway;
    kld_user_hold(&worker->users, gateway);
    move(&client->requests, &gateway->requests, session->requests_count);
    move(&client->pool_bytes, &gateway->pool_bytes, session->pool_bytes);
    move(&client->mapped, &gateway->mapped, session->mapped);
    worker->pool_bytes -= session->pool_bytes;
    worker->mapped -= session->mapped;
    kld_user_release(&worker->users, client);
}

/* ---- Requests -------------------------------------------------------------------------------- */

uint32_t kld_quota_gateway_requests(const struct kld_config *config) {
    uint64_t kept = config->http_requests_max, room = UINT32_MAX - config->requests_max;
    kept = kept < config->requests_max ? kept : config->requests_max;
    return (uint32_t)(kept < room ? kept : room);
}

uint32_t kld_quota_requests_max(const struct kld_session *session) {
    const struct kld_config *config = session->worker->options.config;
    uint64_t most = config->client_requests_max;
    uint64_t alone = kld_share_max(config->user_share, config->requests_max, 0);
    return (uint32_t)(session->is_gateway || most < alone ? most : alone);
}

enum kld_status kld_quota_check_request(const struct kld_session *session, struct kld_error *err) {
    const struct kld_worker *worker = session->worker;
    const struct kld_config *config = worker->options.config;
    const struct kld_user *user = session->user;
    uint64_t gateway = worker->users.gateway.requests, kept = kld_quota_gateway_requests(config);
    uint64_t all = config->requests_max, clients = worker->queue.in_use - gateway;
    if (session->is_gateway)
        return KLD_OK;
    all -= gateway > kept ? gateway - kept : 0;
    uint64_t most = kld_share_max(config->user_share, all, clients - user->requests);
    if (user->requests < most)
        return KLD_OK;
    if (clients >= all)
        return kld_error_set(err, KLD_BUSY, "%" PRIu64 " requests are in flight, the most allowed",
                             clients);
    return kld_error_set(err, KLD_BUSY,
                         "%" PRIu64 " requests of this user are in flight, the most allowed beside "
                         "those of others (user_share)",
                         user->requests);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static uint64_t sum(uint64_t a, uint64_t b) {
    return a < REGIONS_MAX && b < REGIONS_MAX ? a + b : REGIONS_MAX;
}

uint32_t kld_quota_regions_max(const struct kld_session *session) {
    const struct kld_config *config = session->worker->options.config;
    uint64_t most = config->client_regions_max;
    if (session->is_gateway)
        most = sum(sum(config->tensors_max, config->http_regions_max),
                   sum(config->http_requests_max, KLD_GATEWAY_REGIONS_BESIDE));
    return (uint32_t)(most < REGIONS_MAX ? most : REGIONS_MAX);
}

uint64_t kld_quota_region_bytes_max(const struct kld_session *session) {
    return session->is_gateway ? UINT64_MAX : session->worker->options.config->region_bytes_max;
}

enum kld_status kld_quota_check_count(const struct kld_session *session, struct kld_error *err) {
    if (session->worker->draining)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server is going away; connect again");
    if (session->regions_count >= kld_quota_regions_max(session))
        return kld_error_set(err, KLD_TOO_LARGE,
                             "%u regions of this connection exist, the most allowed",
                             session->regions_count);
    return KLD_OK;
}

/* One client leaves room for others, and all of them for what the device itself and the gateway
 * need to compute with tensors in host memory. */
static enum kld_status check_pool(const struct kld_session *session, uint64_t bytes,
                                  struct kld_error *err) {
    const struct kld_worker *worker = session->worker;
    uint64_t pool = worker->device->info.pool_bytes_max, total;
    uint64_t most = worker->options.config->client_pool_bytes_max;
    most = most ? most : pool / 2;
    if (session->is_gateway || !pool)
        return KLD_OK;
    if (__builtin_add_overflow(session->pool_bytes, bytes, &total) || total > most)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "this connection would have over %" PRIu64
                             " bytes of the device's pool, the most allowed",
                             most);
    most = pool - pool / KLD_POOL_FLOOR_PART;
    uint64_t own = session->user->pool_bytes;
    uint64_t share =
        kld_share_max(worker->options.config->user_share, most, worker->pool_bytes - own);
    if (__builtin_add_overflow(worker->pool_bytes, bytes, &total) || total > most)
        return kld_error_set(err, KLD_NO_MEMORY,
                             "the pool has no room for %" PRIu64 " bytes: %" PRIu64 " of %" PRIu64
                             " are in regions",
                             bytes, worker->pool_bytes, most);
    if (bytes > share || own > share - bytes)
        return kld_error_set(err, KLD_NO_MEMORY,
                             "the pool has no room for %" PRIu64 " bytes of this user's, who has "
                             "%" PRIu64 " of the %" PRIu64 " that others leave to one (user_share)",
                             bytes, own, share);
    return KLD_OK;
}

uint64_t kld_quota_shared_bytes_max(const struct kld_worker *worker) {
    uint64_t most = worker->options.config->shared_bytes_max;
    uint32_t workers = kld_stats_workers(worker->options.page);
    if (most)
        return most;
    return worker->host_bytes ? worker->host_bytes / 2 / (workers ? workers : 1) : UINT64_MAX;
}

struct kld_mapping_limit kld_quota_mapping_limit(const struct kld_session *session) {
    return (struct kld_mapping_limit){
        .bytes_max = kld_quota_shared_bytes_max(session->worker),
        .user_share = session->worker->options.config->user_share,
        .user = session->user,
    };
}

static enum kld_status check_shared(const struct kld_session *session, uint64_t bytes,
                                    struct kld_error *err) {
    const struct kld_worker *worker = session->worker;
    uint64_t most = worker->options.config->client_shared_bytes_max, total;
    most = most ? most : kld_quota_shared_bytes_max(worker) / 2;
    if (!session->is_gateway &&
        (__builtin_add_overflow(session->shared_bytes, bytes, &total) || total > most))
        return kld_error_set(err, KLD_TOO_LARGE,
                             "this connection would share over %" PRIu64
                             " bytes of the host's memory, the most allowed",
                             most);
    return KLD_OK;
}

/* On a GPU the pool is elsewhere, and what the driver maps is not for each region. */
bool kld_quota_is_mapped(const struct kld_worker *worker, uint32_t kind) {
    return kind == KLD_REGION_MEMFD || (kind == KLD_REGION_POOL && !worker->device->info.offloads);
}

uint64_t kld_quota_mappings_max(const struct kld_config *config, uint64_t host_mappings) {
    if (config->mappings_max)
        return config->mappings_max;
    uint64_t most = host_mappings ? host_mappings : KLD_MAPPINGS_USUAL;
    return most - most / KLD_MAPPINGS_KEPT_PART;
}

/* The kernel gives a process so many mappings and no more, for memory, threads and the driver. */
static enum kld_status check_mapped(const struct kld_session *session, struct kld_error *err) {
    const struct kld_worker *worker = session->worker;
    uint64_t own = session->user->mapped;
    if (session->is_gateway || own < kld_share_max(worker->options.config->user_share,
                                                   worker->mapped_max, worker->mapped - own))
        return KLD_OK;
    if (worker->mapped >= worker->mapped_max)
        return kld_error_set(err, KLD_NO_MEMORY,
                             "%" PRIu64 " regions are mapped, the most allowed (mappings_max)",
                             worker->mapped);
    return kld_error_set(err, KLD_NO_MEMORY,
                         "%" PRIu64 " regions of this user are mapped, the most allowed beside "
                         "those of others (user_share)",
                         own);
}

enum kld_status kld_quota_check(const struct kld_session *session, uint32_t kind, uint64_t bytes,
                                struct kld_error *err) {
    const struct kld_config *config = session->worker->options.config;
    uint64_t total;
    enum kld_status status = kld_quota_check_count(session, err);
    if (status)
        return status;
    if (bytes > kld_quota_region_bytes_max(session))
        return kld_error_set(err, KLD_TOO_LARGE,
                             "a region of %" PRIu64 " bytes; at most %" PRIu64 " are allowed",
                             bytes, config->region_bytes_max);
    if (!session->is_gateway && (__builtin_add_overflow(session->region_bytes, bytes, &total) ||
                                 total > config->client_region_bytes_max))
        return kld_error_set(err, KLD_TOO_LARGE,
                             "all regions of this connection would have over %" PRIu64
                             " bytes, the most allowed",
                             config->client_region_bytes_max);
    if (kld_quota_is_mapped(session->worker, kind) && (status = check_mapped(session, err)))
        return status;
    if (kind == KLD_REGION_MEMFD)
        return check_shared(session, bytes, err);
    return kind == KLD_REGION_POOL ? check_pool(session, bytes, err) : KLD_OK;
}
