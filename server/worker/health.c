/* health.c - see health.h. Worker process, loop thread; look() runs on uv's pool. */
#include "server/worker/health.h"

#include "server/worker/core.h"

static void look(uv_work_t *work) {
    struct kld_worker *worker = work->data;
    worker->health_status = worker->options.backend->check(worker->device, &worker->health_error);
}

static void looked(uv_work_t *work, int cancelled) {
    struct kld_worker *worker = work->data;
    (void)cancelled; /* never asked for */
    worker->health_looks = false;
    if (worker->health_status == KLD_DEVICE_LOST)
        kld_core_device_lost(worker, &worker->health_error);
    else if (!worker->health_status)
        atomic_store(&worker->stats->device_worked_ns, kld_worker_now_ns());
}

/* Whoever has work finds out by it. */
static void due(uv_timer_t *timer) {
    struct kld_worker *worker = timer->data;
    if (worker->health_looks || worker->queue.in_use || worker->lost)
        return;
    worker->health_looks = true;
    uv_queue_work(&worker->loop, &worker->health_work, look, looked);
}

void kld_health_init(struct kld_worker *worker) {
    uv_timer_init(&worker->loop, &worker->health);
    uv_unref((uv_handle_t *)&worker->health);
    worker->health.data = worker->health_work.data = worker;
}

void kld_health_start(struct kld_worker *worker) {
    const struct kld_device_info *info = &worker->device->info;
    uint64_t every = worker->options.health_ms ? worker->options.health_ms : KLD_HEALTH_MS;
    if (worker->options.backend->check && info->offloads && !info->takes_turns)
        uv_timer_start(&worker->health, due, every, every);
}
