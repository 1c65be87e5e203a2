/* device.c - opens the worker's device; hands completed jobs from its thread to the loop.
 * Launches nothing and answers nobody (core.c). Opening runs before the loop starts; push runs on
 * the back end's thread, take on the loop thread. */
#include "server/worker/device.h"

#include <string.h>

static enum kld_status backend_choose(const struct kld_config *config,
                                      const struct kld_stats_device *known,
                                      const struct kld_backend **ret_backend,
                                      struct kld_error *ret_passed_over, struct kld_error *err) {
    if (strcmp(kld_backends_release(), KLD_BUILD) != 0)
        return kld_error_set(err, KLD_VERSION,
                             "libkld.so is of build %.40s, this server of %s; install both from "
                             "one build and restart the server",
                             kld_backends_release(), KLD_BUILD);
    enum kld_status status = kld_backend_find(config->backend, ret_backend, err);
    if (status || strcmp(config->backend, "auto") != 0)
        return status;
    const struct kld_backend *const *all = kld_backends();
    for (size_t i = 0; all[i] && all[i] != *ret_backend; i++) {
        uint32_t count = 0;
        struct kld_error why = {.status = KLD_OK};
        if (all[i]->device_count(&count, &why) == KLD_OK && count > 0)
            continue;
        kld_error_set(ret_passed_over, KLD_UNAVAILABLE, "%s: %.200s", all[i]->name,
                      why.text[0] ? why.text : "no device");
    }
    if (known->backend[0] && strcmp(known->backend, (*ret_backend)->name) != 0)
        return kld_error_set(err, KLD_UNAVAILABLE,
                             "the %.15s back end that served so far has no device now: %.160s",
                             known->backend, ret_passed_over->text);
    return KLD_OK;
}

static uint64_t host_pool_bytes(const struct kld_config *config, uint64_t host_bytes) {
    uint64_t half = host_bytes / 2, least = host_bytes / KLD_HOST_POOL_LEAST_PART;
    uint64_t kept = host_bytes / KLD_HOST_POOL_KEPT_PART + config->staging_bytes_max;
    return half > kept && half - kept > least ? half - kept : least;
}

enum kld_status kld_worker_device_open(const struct kld_config *config, uint32_t index,
                                       const struct kld_stats_device *known, uint64_t host_bytes,
                                       const struct kld_backend **ret_backend,
                                       struct kld_device **ret_device,
                                       struct kld_error *ret_passed_over, struct kld_error *err) {
    const struct kld_backend *backend = NULL;
    *ret_passed_over = (struct kld_error){.status = KLD_OK};
    enum kld_status status = backend_choose(config, known, &backend, ret_passed_over, err);
    if (status)
        return status;
    uint32_t count = 0;
    if ((status = backend->device_count(&count, err)))
        return status;
    uint32_t device = kld_config_device(config, index);
    if (device >= count)
        return kld_error_set(err, KLD_NOT_FOUND,
                             "device %u of back end %s does not exist; it has %u", device,
                             backend->name, count);
    uint32_t workers = kld_config_devices(config);
    struct kld_device_options options = {
        .device = device,
        .threads = (uint32_t)config->threads,
        .pool_bytes_max = config->pool_bytes_max,
        .host_pool_bytes = host_pool_bytes(config, host_bytes) / (workers ? workers : count),
        .spin_us = (uint32_t)config->spin_us,
        /* Who comes in the place of a lost worker has clients who wait. */
        .kernels_load = known->described ? KLD_KERNELS_WHEN_IDLE : KLD_KERNELS_AT_OPEN,
        .stays_current = true, /* of the loop's thread */
        .peer_access = config->peer_access,
    };
    if ((status = backend->device_open(&options, ret_device, err)))
        return status;
    if (known->described &&
        memcmp(known->uuid, (*ret_device)->info.uuid, sizeof known->uuid) != 0) {
        backend->device_close(*ret_device);
        return kld_error_set(err, KLD_UNAVAILABLE,
                             "device %u is another card than the one that served so far", device);
    }
    *ret_backend = backend;
    return KLD_OK;
}

/* Whoever pushed on a non-empty list can rely on the wake-up of the one before. The loop says that
 * it no longer looks before it looks once more: either it sees this push, or this sees that. */
static void wake(struct kld_completions *completions, bool first) {
    if (first && !atomic_load(&completions->polled))
        uv_async_send(&completions->wake);
}

void kld_completions_push(struct kld_completions *completions, struct kld_request *request) {
    struct kld_request *newest = atomic_load_explicit(&completions->newest, memory_order_relaxed);
    do
        request->next = newest;
    while (!atomic_compare_exchange_weak(&completions->newest, &newest, request));
    wake(completions, !newest);
}

void kld_completions_push_launched(struct kld_completions *completions,
                                   struct kld_request *request) {
    struct kld_request *newest =
        atomic_load_explicit(&completions->newest_launched, memory_order_relaxed);
    do
        request->next_launched = newest;
    while (!atomic_compare_exchange_weak(&completions->newest_launched, &newest, request));
    wake(completions, !newest);
}

bool kld_completions_waiting(struct kld_completions *completions) {
    return atomic_load(&completions->newest) || atomic_load(&completions->newest_launched);
}

struct kld_request *kld_completions_take_launched(struct kld_completions *completions) {
    return atomic_exchange_explicit(&completions->newest_launched, NULL, memory_order_acquire);
}

struct kld_request *kld_completions_take(struct kld_completions *completions) {
    struct kld_request *newest =
        atomic_exchange_explicit(&completions->newest, NULL, memory_order_acquire);
    struct kld_request *oldest = NULL;
    while (newest) {
        struct kld_request *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    return oldest;
}
