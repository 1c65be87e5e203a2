/* cpu.c - opening and closing the CPU device, and its table of functions.
 * It does not compute and holds no state outside the device. Any thread but the device's own. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/device.h"
#include "proto/cpus.h"
#include "proto/thread.h"

static enum kld_status device_count(uint32_t *ret_count, struct kld_error *err) {
    *ret_count = 1;
    return KLD_OK;
}

/* The model of the processor and the vector code in use. */
static void name_device(char *text, size_t text_max, const char *variant) {
    char line[256], model[64] = "CPU";
    FILE *file = fopen("/proc/cpuinfo", "re");
    while (file && fgets(line, sizeof line, file)) {
        const char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !value)
            continue;
        snprintf(model, sizeof model, "%.*s", (int)strcspn(value + 2, "\n"), value + 2);
        break;
    }
    if (file)
        fclose(file);
    snprintf(text, text_max, "%.48s (%s)", model, variant);
}

static enum kld_status describe(struct cpu_device *device, const struct kld_device_options *options,
                                struct kld_error *err) {
    struct kld_device_info *info = &device->head.info;
    if (options->device != 0)
        return kld_error_set(err, KLD_NOT_FOUND, "no CPU device %u; there is only device 0",
                             options->device);
    if (options->threads > KLD_CPU_THREADS_MAX)
        return kld_error_set(err, KLD_INVALID, "%u threads; expected at most %d", options->threads,
                             KLD_CPU_THREADS_MAX);
    info->threads = options->threads ? options->threads : kld_cpus_usable();
    if (info->threads > KLD_CPU_THREADS_MAX)
        info->threads = KLD_CPU_THREADS_MAX;
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    info->memory_bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    info->pool_bytes_max =
        options->host_pool_bytes ? options->host_pool_bytes : info->memory_bytes / 2;
    if (options->pool_bytes_max)
        info->pool_bytes_max = options->pool_bytes_max;
    snprintf(info->backend, sizeof info->backend, "cpu");
    name_device(info->name, sizeof info->name, device->run.kernels->name);
    device->head.backend = &kld_backend_cpu;
    device->spin_us = options->spin_us;
    return KLD_OK;
}

static enum kld_status start_thread(struct cpu_device *device, struct kld_error *err) {
    if (kld_thread_start(&device->thread, kld_cpu_device_main, device) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "cannot start the device thread");
    return KLD_OK;
}

static void device_free(struct cpu_device *device) {
    pthread_mutex_destroy(&device->lock);
    pthread_mutex_destroy(&device->team_lock);
    pthread_cond_destroy(&device->wake);
    kld_cpu_run_done(&device->run);
    free(device);
}

static enum kld_status device_open(const struct kld_device_options *options,
                                   struct kld_device **ret_device, struct kld_error *err) {
    struct cpu_device *device = calloc(1, sizeof *device);
    if (!device)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory for a device");
    STAILQ_INIT(&device->ready);
    pthread_mutex_init(&device->lock, NULL);
    pthread_mutex_init(&device->team_lock, NULL);
    pthread_cond_init(&device->wake, NULL);
    enum kld_status status = kld_cpu_run_init(&device->run, err);
    if (!status)
        status = describe(device, options, err);
    if (!status)
        status = kld_cpu_team_open(&device->team, device->head.info.threads, options->spin_us, err);
    if (status) {
        device_free(device);
        return status;
    }
    status = start_thread(device, err);
    if (status) {
        kld_cpu_team_close(&device->team);
        device_free(device);
        return status;
    }
    *ret_device = &device->head;
    return KLD_OK;
}

/* The device thread finishes what was submitted; then memories and streams that are still open go
 * with the device. */
static void device_close(struct kld_device *head) {
    if (!head)
        return;
    struct cpu_device *device = (struct cpu_device *)head;
    pthread_mutex_lock(&device->lock);
    device->stop = true;
    pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->lock);
    pthread_join(device->thread, NULL);
    kld_cpu_team_close(&device->team);
    while (!LIST_EMPTY(&device->owners))
        kld_cpu_stream_close(&LIST_FIRST(&LIST_FIRST(&device->owners)->streams)->head);
    while (device->memories)
        kld_cpu_memory_free(&device->memories->head);
    device_free(device);
}

const struct kld_backend kld_backend_cpu = {
    .name = "cpu",
    .device_count = device_count,
    .device_open = device_open,
    .device_close = device_close,
    .memory_map = kld_cpu_memory_map,
    .memory_wrap = kld_cpu_memory_wrap,
    .memory_import_ipc = kld_cpu_memory_import_ipc,
    .memory_import_fd = kld_cpu_memory_import_fd,
    .memory_reserve = kld_cpu_memory_reserve,
    .memory_grow_fd = kld_cpu_memory_grow_fd,
    .memory_alloc = kld_cpu_memory_alloc,
    .memory_free = kld_cpu_memory_free,
    .stream_open = kld_cpu_stream_open,
    .stream_close = kld_cpu_stream_close,
    .event_import = kld_cpu_event_import,
    .event_create = kld_cpu_event_create,
    .event_free = kld_cpu_event_free,
    .submit = kld_cpu_submit,
    .poll = kld_cpu_poll,
    .fail_next = kld_cpu_fail_next,
    .pool_bytes = kld_cpu_pool_bytes,
    .pool_allocations = kld_cpu_pool_allocations,
    .measure_ceiling = kld_cpu_measure_ceiling,
};
