/* main.c - the worker role: opens the device, reports to the supervisor, serves, exits.
 * Wiring only. Worker process, its first thread. */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/descriptors.h"
#include "server/host_memory.h"
#include "server/log.h"
#include "server/role.h"
#include "server/signals.h"
#include "server/worker/places.h"
#include "server/worker/quota.h"
#include "server/worker/worker.h"

static int cannot_start(const char *event, const struct kld_error *error) {
    kld_log(KLD_LOG_ERROR, event, "status=%s text=\"%s\"", kld_status_name(error->status),
            error->text);
    kld_child_report_send(error->status, "", 0, error->text);
    return 1;
}

/* The next worker can open the device while this process is still being taken apart; but MPS
 * refuses it until the last of the processes that a fault hit has gone. */
static void device_dead(const struct kld_worker_options *options) {
    const struct kld_device_info *info = &options->device->info;
    bool mps = info->offloads && !info->takes_turns;
    if (!mps)
        kld_child_report_send(KLD_DEVICE_LOST, info->backend, 0, "the device is lost");
}

/* Sockets and processes of clients, also of those whose work outlives them, memory on its way to
 * uv's pool, what waits to be closed and one packet's worth, and what is kept. */
static uint64_t descriptors_wanted(const struct kld_config *config) {
    uint64_t clients = kld_places_max(config) - KLD_GATEWAY_PLACES; /* which is a socket each */
    uint64_t kept =
        clients - config->clients_max; /* for users who have next to none: a task each */
    return KLD_DESCRIPTORS_OWN + KLD_GATEWAY_PLACES + 4 * clients + KLD_REFUSALS_MAX +
           config->clients_max * KLD_SESSION_TASKS_MAX + kept + KLD_STRAYS_MAX +
           KLD_STRAYS_CONNECTIONS_MAX + KLD_SESSION_FDS_MAX + config->cuda_files_max;
}

#define ROOFLINE_BYTES ((uint64_t)128 << 20) /* of each of three arrays: more than caches hold */

/* What kernels are compared with: as configured, or measured by the first process of this worker.
 * Its successors find it in the page, because a client waits for them. */
static void learn_roofline(const struct kld_child *child,
                           const struct kld_worker_options *options) {
    const struct kld_config *config = child->config;
    struct kld_error err = {.status = KLD_OK};
    struct kld_stats_device *shown = &child->page->device[child->index];
    double read = (double)config->roofline_bytes_per_s, both = read;
    if (atomic_load(&shown->described))
        return;
    if (!config->roofline_bytes_per_s && config->measure_roofline &&
        options->backend->measure_ceiling(options->device, ROOFLINE_BYTES, &read, &both, &err)) {
        kld_log(KLD_LOG_WARN, "roofline not measured", "status=%s text=\"%s\"",
                kld_status_name(err.status), err.text);
        return;
    }
    atomic_store(&shown->roofline_bytes_per_s[KLD_ACCESS_READ], (uint64_t)read);
    atomic_store(&shown->roofline_bytes_per_s[KLD_ACCESS_READ_WRITE], (uint64_t)both);
    if (read > 0)
        kld_log(KLD_LOG_INFO, "roofline", "read_gb_per_s=%.1f read_write_gb_per_s=%.1f measured=%s",
                read / 1e9, both / 1e9, config->roofline_bytes_per_s ? "false" : "true");
}

/* Queues to the card, as the driver has them without MPS. Under it a process that does not say how
 * many seems to have fewer, and small jobs wait behind the large ones of others. More make a
 * context take longer. */
#define CUDA_QUEUES "8"

int kld_worker_main(const struct kld_child *child) {
    struct kld_error err = {.status = KLD_OK}, passed_over;
    const char *test_faults = getenv("KLD_TEST_FAULTS");
    struct kld_worker_options options = {.config = child->config,
                                         .page = child->page,
                                         .index = child->index,
                                         .listen_fd = KLD_FD_LISTEN,
                                         .device_dead = device_dead,
                                         .test_faults =
                                             test_faults && strcmp(test_faults, "1") == 0,
                                         .control_fd = KLD_FD_CONTROL};
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", CUDA_QUEUES,
           0); /* before CUDA looks; nobody else does yet */
    kld_descriptors_raise(descriptors_wanted(child->config)); /* the driver opens files too */
    sigset_t taken;
    kld_signals_block(&taken); /* by threads of the back end, of its driver and of OpenMP */
    enum kld_status status = kld_worker_device_open(
        child->config, child->index, &child->page->device[child->index], kld_host_memory_bytes(),
        &options.backend, &options.device, &passed_over, &err);
    if (status)
        return cannot_start("device not opened", &err);
    const struct kld_device_info *info = &options.device->info;
    if (passed_over.status != KLD_OK)
        kld_log(KLD_LOG_INFO, "back end passed over", "text=\"%s\"", passed_over.text);
    kld_log(KLD_LOG_INFO, "device open",
            "backend=%s name=\"%s\" threads=%u pool_bytes_max=%llu mappings_max=%llu",
            info->backend, info->name, info->threads, (unsigned long long)info->pool_bytes_max,
            (unsigned long long)kld_quota_mappings_max(child->config, kld_host_mappings()));

    learn_roofline(child, &options);
    static struct kld_worker worker; /* large, and reachable from threads until the process ends */
    if ((status = kld_worker_init(&worker, &options, &err))) {
        options.backend->device_close(options.device);
        return cannot_start("worker not started", &err);
    }
    if (worker.peers.nobody_uid != KLD_PEER_NONE)
        kld_log(KLD_LOG_INFO, "user namespace", "nobody_uid=%u text=\"%s\"",
                worker.peers.nobody_uid,
                worker.peers.uids_known
                    ? "not every user has a uid here; Unix clients that come as this one are "
                      "refused"
                    : "whether every user has a uid here cannot be read (/proc/self/uid_map); Unix "
                      "clients that come as this one are refused");
    pthread_sigmask(SIG_SETMASK, &taken, NULL);
    uint32_t devices = 1;
    options.backend->device_count(&devices, NULL);
    kld_child_report_send(KLD_OK, info->backend, devices, "");
    int exit_status = kld_worker_run(&worker);
    if (worker.lost || worker.cut_short)
        _exit(exit_status); /* crash-only: jobs may still touch what would be released */
    kld_worker_done(&worker);
    kld_log(KLD_LOG_INFO, "worker ended", "%s", "");
    return exit_status;
}
