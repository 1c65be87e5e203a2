/* main.c - the worker role: opens the device, reports to the supervisor, serves, exits.
 * Wiring only. Worker process, its first thread. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "server/log.h"
#include "server/role.h"
#include "server/worker/worker.h"

static int cannot_start(const char *event, const struct kld_error *error) {
    kld_log(KLD_LOG_ERROR, event, "status=%s text=\"%s\"", kld_status_name(error->status),
            error->text);
    kld_child_report_send(error->status, "", error->text);
    return 1;
}

int kld_worker_main(const struct kld_child *child) {
    struct kld_error err = {.status = KLD_OK}, passed_over;
    struct kld_worker_options options = {.config = child->config,
                                         .stats = child->stats,
                                         .index = child->index,
                                         .listen_fd = KLD_FD_LISTEN,
                                         .control_fd = KLD_FD_CONTROL};
    enum kld_status status =
        kld_worker_device_open(child->config, child->index, child->stats, &options.backend,
                               &options.device, &passed_over, &err);
    if (status)
        return cannot_start("device not opened", &err);
    const struct kld_device_info *info = &options.device->info;
    if (passed_over.status != KLD_OK)
        kld_log(KLD_LOG_INFO, "back end passed over", "text=\"%s\"", passed_over.text);
    kld_log(KLD_LOG_INFO, "device open", "backend=%s name=\"%s\" threads=%u pool_bytes_max=%llu",
            info->backend, info->name, info->threads, (unsigned long long)info->pool_bytes_max);
    memcpy(child->stats->backend, info->backend, sizeof child->stats->backend);
    memcpy(child->stats->device, info->name, sizeof child->stats->device);

    static struct kld_worker worker; /* large, and reachable from threads until the process ends */
    if ((status = kld_worker_init(&worker, &options, &err))) {
        options.backend->device_close(options.device);
        return cannot_start("worker not started", &err);
    }
    kld_child_report_send(KLD_OK, info->backend, "");
    int exit_status = kld_worker_run(&worker);
    if (worker.lost || worker.cut_short)
        _exit(exit_status); /* crash-only: jobs may still touch what would be released */
    kld_worker_done(&worker);
    kld_log(KLD_LOG_INFO, "worker ended", "%s", "");
    return exit_status;
}
