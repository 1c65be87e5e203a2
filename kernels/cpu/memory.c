/* memory.c - the memories of a CPU device: mapped, wrapped, and of its bounded pool.
 * It does not count users of a memory; that is the caller's business. Any thread but the device's
 * own. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cpu/device.h"

static enum kld_status memory_new(struct kld_device *device, uint64_t bytes,
                                  struct cpu_memory **ret_memory, struct kld_error *err) {
    struct cpu_memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory for a region");
    memory->head.device = device;
    memory->head.bytes = bytes;
    *ret_memory = memory;
    return KLD_OK;
}

static void memory_link(struct cpu_memory *memory, struct kld_memory **ret_memory) {
    struct cpu_device *device = (struct cpu_device *)memory->head.device;
    pthread_mutex_lock(&device->lock);
    memory->following = device->memories;
    if (memory->following)
        memory->following->previous = memory;
    device->memories = memory;
    pthread_mutex_unlock(&device->lock);
    *ret_memory = &memory->head;
}

enum kld_status kld_cpu_memory_map(struct kld_device *device, int fd, uint64_t bytes,
                                   struct kld_memory **ret_memory, struct kld_error *err) {
    if (bytes == 0 || bytes > PTRDIFF_MAX)
        return kld_error_set(err, KLD_INVALID, "a region of %" PRIu64 " bytes cannot be mapped",
                             bytes);
    struct cpu_memory *memory = NULL;
    enum kld_status status = memory_new(device, bytes, &memory, err);
    if (status)
        return status;
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        int error = errno;
        free(memory);
        return kld_error_set(err, error == ENOMEM ? KLD_NO_MEMORY : KLD_INVALID,
                             "cannot map %" PRIu64 " bytes of shared memory: %s", bytes,
                             strerror(error));
    }
    memory->mapped = memory->head.host = address;
    memory->mapped_bytes = bytes;
    memory->head.pinned = true;
    memory_link(memory, ret_memory);
    return KLD_OK;
}

enum kld_status kld_cpu_memory_wrap(struct kld_device *device, void *address, uint64_t bytes,
                                    struct kld_memory **ret_memory, struct kld_error *err) {
    if (!address)
        return kld_error_set(err, KLD_INVALID, "a null address cannot be wrapped");
    struct cpu_memory *memory = NULL;
    enum kld_status status = memory_new(device, bytes, &memory, err);
    if (status)
        return status;
    memory->head.host = address;
    memory_link(memory, ret_memory);
    return KLD_OK;
}

enum kld_status kld_cpu_memory_import_ipc(struct kld_device *device, const uint8_t handle[64],
                                          uint64_t base_bytes, uint64_t offset_bytes,
                                          uint64_t bytes, struct kld_memory **ret_memory,
                                          struct kld_error *err) {
    return kld_error_set(err, KLD_UNIMPLEMENTED,
                         "a CUDA IPC handle needs a CUDA device; this server computes on the CPU "
                         "and takes shared memory (memfd)");
}

static enum kld_status no_allocations(struct kld_error *err) {
    return kld_error_set(err, KLD_UNIMPLEMENTED,
                         "a CUDA allocation needs a CUDA device; this server computes on the CPU "
                         "and takes shared memory (memfd)");
}

enum kld_status kld_cpu_memory_import_fd(struct kld_device *device, int fd, uint64_t base_bytes,
                                         uint64_t offset_bytes, uint64_t bytes,
                                         struct kld_memory **ret_memory, struct kld_error *err) {
    return no_allocations(err);
}

enum kld_status kld_cpu_memory_reserve(struct kld_device *device, uint64_t bytes,
                                       struct kld_memory **ret_memory, struct kld_error *err) {
    return no_allocations(err);
}

enum kld_status kld_cpu_memory_grow_fd(struct kld_memory *memory, int fd, uint64_t offset_bytes,
                                       uint64_t bytes, struct kld_error *err) {
    return no_allocations(err);
}

/* Adds to the pool's count unless it would pass the limit. */
static bool pool_take(struct cpu_device *device, uint64_t bytes, uint64_t *ret_used) {
    uint_fast64_t used = atomic_load(&device->pool_bytes);
    do {
        *ret_used = used;
        if (bytes > device->head.info.pool_bytes_max - used)
            return false;
    } while (!atomic_compare_exchange_weak(&device->pool_bytes, &used, used + bytes));
    return true;
}

enum kld_status kld_cpu_memory_alloc(struct kld_device *device, uint64_t bytes,
                                     struct kld_memory **ret_memory, struct kld_error *err) {
    struct cpu_device *cpu = (struct cpu_device *)device;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), taken, used;
    if (bytes == 0 || bytes > PTRDIFF_MAX - page)
        return kld_error_set(err, KLD_INVALID, "a buffer of %" PRIu64 " bytes is not possible",
                             bytes);
    taken = (bytes + page - 1) / page * page;
    struct cpu_memory *memory = NULL;
    enum kld_status status = memory_new(device, bytes, &memory, err);
    if (status)
        return status;
    if (!pool_take(cpu, taken, &used)) {
        free(memory);
        return kld_error_set(err, KLD_NO_MEMORY,
                             "the pool has no room for %" PRIu64 " bytes: %" PRIu64 " of %" PRIu64
                             " in use",
                             bytes, used, cpu->head.info.pool_bytes_max);
    }
    atomic_fetch_add(&cpu->pool_allocations, 1);
    /* Anonymous pages come zeroed. */
    void *address = mmap(NULL, taken, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        atomic_fetch_sub(&cpu->pool_bytes, taken);
        free(memory);
        return kld_error_set(err, KLD_NO_MEMORY, "out of host memory for %" PRIu64 " bytes", bytes);
    }
    if (taken >= (4u << 20))
        madvise(address, taken, MADV_HUGEPAGE);
    memory->mapped = memory->head.host = address;
    memory->mapped_bytes = memory->pool_bytes = taken;
    memory_link(memory, ret_memory);
    return KLD_OK;
}

enum kld_status kld_cpu_memory_free(struct kld_memory *head) {
    if (!head)
        return KLD_OK;
    struct cpu_memory *memory = (struct cpu_memory *)head;
    struct cpu_device *device = (struct cpu_device *)head->device;
    pthread_mutex_lock(&device->lock);
    if (memory->previous)
        memory->previous->following = memory->following;
    else
        device->memories = memory->following;
    if (memory->following)
        memory->following->previous = memory->previous;
    pthread_mutex_unlock(&device->lock);
    if (memory->mapped)
        munmap(memory->mapped, memory->mapped_bytes);
    atomic_fetch_sub(&device->pool_bytes, memory->pool_bytes);
    free(memory);
    return KLD_OK;
}

uint64_t kld_cpu_pool_bytes(struct kld_device *device) {
    return atomic_load(&((struct cpu_device *)device)->pool_bytes);
}

uint64_t kld_cpu_pool_allocations(struct kld_device *device) {
    return atomic_load(&((struct cpu_device *)device)->pool_allocations);
}
