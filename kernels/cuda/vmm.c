/* vmm.c - allocations of other processes that come as POSIX file descriptors (CUDA VMM: expandable
 * segments of caching allocators, for one): imported, mapped and let go of. Each import has a
 * mapping of its own, or is a piece of a range of addresses that has several, one behind the other;
 * the descriptor is not needed once it is made. Which bytes of such a range jobs may name is for
 * its caller to see to. Any thread but the device's own. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/driver.h"

/* A driver's error is numbered as the runtime's. */
static enum kld_status fail(struct cuda_device *device, CUresult result, const char *doing,
                            struct kld_error *err) {
    return cuda_fail(device, (cudaError_t)result, doing, err);
}

static CUmemLocation location_of(const struct cuda_device *device) {
    return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal};
}

static enum kld_status check_size(struct cuda_device *device, const struct cuda_driver *driver,
                                  uint64_t base_bytes, struct kld_error *err) {
    CUmemAllocationProp properties;
    memset(&properties, 0, sizeof properties);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location_of(device);
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t unit = 0;
    CUresult result = driver->granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result)
        return fail(device, result, "asking for the granularity of allocations", err);
    if (base_bytes == 0 || unit == 0 || base_bytes % unit != 0)
        return kld_error_set(err, KLD_INVALID,
                             "an allocation of %llu bytes; expected the size it was made with, a "
                             "multiple of %llu",
                             (unsigned long long)base_bytes, (unsigned long long)unit);
    return KLD_OK;
}

static enum kld_status import(struct cuda_device *device, const struct cuda_driver *driver, int fd,
                              CUmemGenericAllocationHandle *ret_handle, struct kld_error *err) {
    CUresult result = driver->import_handle(ret_handle, (void *)(intptr_t)fd,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result && cuda_is_refusal(device, (cudaError_t)result))
        return kld_error_set(err, KLD_INVALID,
                             "the descriptor is not a CUDA allocation of this device exported as a "
                             "file descriptor");
    if (result)
        return fail(device, result, "importing a CUDA allocation", err);
    CUmemAllocationProp properties;
    memset(&properties, 0, sizeof properties);
    result = driver->handle_properties(&properties, *ret_handle);
    enum kld_status status = KLD_OK;
    if (result)
        status = fail(device, result, "looking at a CUDA allocation", err);
    else if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
             !cuda_reaches_ordinal(device, properties.location.id))
        status =
            kld_error_set(err, KLD_INVALID, "the allocation lies on another device than this one");
    if (status)
        driver->release_handle(*ret_handle);
    return status;
}

static enum kld_status reserve(struct cuda_device *device, const struct cuda_driver *driver,
                               uint64_t bytes, CUdeviceptr *ret_at, struct kld_error *err) {
    CUresult result = driver->reserve(ret_at, bytes, 0, 0, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY ||
        (result && cuda_is_refusal(device, (cudaError_t)result)))
        return kld_error_set(err, KLD_NO_MEMORY, "no addresses are left for %llu bytes",
                             (unsigned long long)bytes);
    return result ? fail(device, result, "reserving addresses", err) : KLD_OK;
}

/* The mapping holds the allocation from here on, whatever its owner does. */
static enum kld_status map(struct cuda_device *device, const struct cuda_driver *driver,
                           CUmemGenericAllocationHandle handle, CUdeviceptr at, uint64_t bytes,
                           struct kld_error *err) {
    CUresult result;
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location = location_of(device);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if ((result = driver->map(at, bytes, 0, handle, 0)) == CUDA_SUCCESS &&
        (result = driver->set_access(at, bytes, &access, 1)) != CUDA_SUCCESS)
        driver->unmap(at, bytes);
    if (result == CUDA_SUCCESS)
        return KLD_OK;
    if (cuda_is_refusal(device, (cudaError_t)result))
        return kld_error_set(err, KLD_INVALID,
                             "the allocation behind the descriptor does not have %llu bytes",
                             (unsigned long long)bytes);
    return fail(device, result, "mapping a CUDA allocation", err);
}

/* The whole allocation behind the descriptor, at these addresses. */
static enum kld_status map_fd(struct cuda_device *device, const struct cuda_driver *driver, int fd,
                              CUdeviceptr at, uint64_t bytes, struct kld_error *err) {
    CUmemGenericAllocationHandle handle = 0;
    enum kld_status status = import(device, driver, fd, &handle, err);
    if (status)
        return status;
    status = map(device, driver, handle, at, bytes, err);
    driver->release_handle(handle);
    return status;
}

/* The driver's functions, where it has all of them. */
static enum kld_status enter(struct cuda_device *device, struct cuda_visit *visit,
                             const struct cuda_driver **ret_driver, struct kld_error *err) {
    bool mappable = false;
    enum kld_status status = cuda_enter(device, visit, err);
    if (status)
        return status;
    *ret_driver = cuda_driver_get(&mappable);
    return mappable ? KLD_OK
                    : kld_error_set(err, KLD_UNIMPLEMENTED,
                                    "this driver maps no allocations of other processes");
}

enum kld_status cuda_memory_import_fd(struct kld_device *base, int fd, uint64_t base_bytes,
                                      uint64_t offset_bytes, uint64_t bytes,
                                      struct kld_memory **ret_memory, struct kld_error *err) {
    struct cuda_device *device = (struct cuda_device *)base;
    if (bytes == 0 || offset_bytes > base_bytes || bytes > base_bytes - offset_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "%llu bytes at offset %llu of an allocation of %llu bytes",
                             (unsigned long long)bytes, (unsigned long long)offset_bytes,
                             (unsigned long long)base_bytes);
    const struct cuda_driver *driver = NULL;
    struct cuda_visit visit CUDA_LEAVES = {0};
    enum kld_status status = enter(device, &visit, &driver, err);
    if (status || (status = check_size(device, driver, base_bytes, err)))
        return status;
    struct cuda_memory *memory = cuda_memory_new(device, CUDA_VMM, bytes, err);
    if (!memory)
        return KLD_NO_MEMORY;
    CUdeviceptr at = 0;
    if ((status = reserve(device, driver, base_bytes, &at, err)) == KLD_OK &&
        (status = map_fd(device, driver, fd, at, base_bytes, err)) != KLD_OK)
        driver->unreserve(at, base_bytes);
    if (status) {
        free(memory);
        return status;
    }
    memory->mapped = (char *)(uintptr_t)at;
    memory->mapped_bytes = base_bytes;
    memory->at = memory->mapped + offset_bytes;
    memory->on_device = true;
    *ret_memory = &memory->base;
    return KLD_OK;
}

enum kld_status cuda_memory_reserve(struct kld_device *base, uint64_t bytes,
                                    struct kld_memory **ret_memory, struct kld_error *err) {
    struct cuda_device *device = (struct cuda_device *)base;
    const struct cuda_driver *driver = NULL;
    struct cuda_visit visit CUDA_LEAVES = {0};
    enum kld_status status = enter(device, &visit, &driver, err);
    if (status || (status = check_size(device, driver, bytes, err)))
        return status;
    struct cuda_memory *memory = cuda_memory_new(device, CUDA_SPACE, bytes, err);
    if (!memory)
        return KLD_NO_MEMORY;
    CUdeviceptr at = 0;
    if ((status = reserve(device, driver, bytes, &at, err))) {
        free(memory);
        return status;
    }
    memory->mapped = memory->at = (char *)(uintptr_t)at;
    memory->mapped_bytes = bytes;
    memory->on_device = true;
    *ret_memory = &memory->base;
    return KLD_OK;
}

enum kld_status cuda_memory_grow_fd(struct kld_memory *base, int fd, uint64_t offset_bytes,
                                    uint64_t bytes, struct kld_error *err) {
    struct cuda_memory *memory = (struct cuda_memory *)base;
    struct cuda_device *device = (struct cuda_device *)base->device;
    const struct cuda_driver *driver = NULL;
    if (memory->kind != CUDA_SPACE || bytes > memory->mapped_bytes ||
        offset_bytes > memory->mapped_bytes - bytes)
        return kld_error_set(err, KLD_INVALID,
                             "%llu bytes at offset %llu do not fit addresses of %llu bytes",
                             (unsigned long long)bytes, (unsigned long long)offset_bytes,
                             (unsigned long long)memory->mapped_bytes);
    struct cuda_visit visit CUDA_LEAVES = {0};
    enum kld_status status = enter(device, &visit, &driver, err);
    if (status || (status = check_size(device, driver, bytes, err)))
        return status;
    struct cuda_piece *piece = malloc(sizeof *piece);
    if (!piece)
        return kld_error_set(err, KLD_NO_MEMORY, "no host memory for a piece of a region");
    *piece = (struct cuda_piece){.next = memory->pieces,
                                 .at = (CUdeviceptr)(uintptr_t)(memory->mapped + offset_bytes),
                                 .bytes = bytes};
    if ((status = map_fd(device, driver, fd, piece->at, bytes, err))) {
        free(piece);
        return status;
    }
    memory->pieces = piece;
    return KLD_OK;
}

void cuda_vmm_unmap(struct cuda_memory *memory) {
    const struct cuda_driver *driver = cuda_driver_get(NULL);
    const struct cuda_device *device = (struct cuda_device *)memory->base.device;
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory->mapped;
    bool lost = atomic_load(&device->lost);
    /* One call for each mapping: the driver takes whole ones, and says nothing of several. */
    for (struct cuda_piece *piece = memory->pieces, *next; piece; piece = next) {
        next = piece->next;
        if (!lost)
            driver->unmap(piece->at, piece->bytes);
        free(piece);
    }
    if (!lost && memory->kind == CUDA_VMM)
        driver->unmap(at, memory->mapped_bytes);
    if (!lost)
        driver->unreserve(at, memory->mapped_bytes);
}
