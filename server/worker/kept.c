/* kept.c - a list of regions that wait for memory which the gateway keeps, and the timer that has
 * them tried again (kept.h). Allocates nothing itself (region.c). Loop thread. */
#include "server/worker/kept.h"

#include "server/worker/region.h"
#include "server/worker/worker.h"

#define AGAIN_MS 5

static void try_all(struct kld_worker *worker) {
    struct kld_region *region;
    while ((region = TAILQ_FIRST(&worker->kept_waiting))) {
        TAILQ_REMOVE(&worker->kept_waiting, region, in_kept);
        kld_worker_region_add_again(region);
    }
}

static void again(uv_timer_t *timer) { try_all(timer->data); }

void kld_kept_init(struct kld_worker *worker) {
    TAILQ_INIT(&worker->kept_waiting);
    uv_timer_init(&worker->loop, &worker->kept_again);
    worker->kept_again.data = worker;
}

/* Would there be room if the gateway gave back what it keeps? */
static bool would_fit(struct kld_worker *worker, uint64_t bytes) {
    uint64_t kept = atomic_load(&worker->stats->value[KLD_STAT_pool_kept_bytes]), end;
    uint64_t most = worker->device->info.pool_bytes_max;
    uint64_t used = worker->options.backend->pool_bytes(worker->device);
    used = used > kept ? used - kept : 0;
    return kept && (!most || (!__builtin_add_overflow(used, bytes, &end) && end <= most));
}

bool kld_kept_wait(struct kld_region *region) {
    struct kld_worker *worker = region->session->worker;
    uint64_t now = kld_worker_now_ns();
    if (region->kind != KLD_REGION_POOL || region->session->state == KLD_SESSION_CLOSING ||
        worker->stopping)
        return false;
    if (!region->kept_until_ns) {
        if (!would_fit(worker, region->bytes))
            return false;
        region->kept_until_ns = now + KLD_KEPT_WAIT_MS * UINT64_C(1000000);
    }
    if (now >= region->kept_until_ns)
        return false;
    atomic_fetch_add(&worker->shown->pool_wanted, 1);
    TAILQ_INSERT_TAIL(&worker->kept_waiting, region, in_kept);
    if (!uv_is_active((uv_handle_t *)&worker->kept_again)) /* nobody puts off who waits already */
        uv_timer_start(&worker->kept_again, again, AGAIN_MS, 0);
    return true;
}

void kld_kept_close(struct kld_worker *worker) {
    try_all(worker);
    uv_close((uv_handle_t *)&worker->kept_again, NULL);
}
