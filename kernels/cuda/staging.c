/* staging.c - the device memory through which a job over host memory travels: taken from the pool
 * and kept for the next such job, so that a request like those before it allocates nothing. What is
 * kept gives way as soon as anybody else wants the room. Copies nothing (job.c). Under
 * device->work, but for cuda_staging_make_room(). */
#include "kernels/cuda/device.h"

/* A block that no work on the device uses any more. By the stream that is waited for before the
 * pool is trimmed: nobody waits for those of jobs, and the driver keeps what was freed there. */
static void give_back(struct cuda_device *device, char *at, uint64_t bytes) {
    if (at && !atomic_load(&device->lost) && cudaFreeAsync(at, device->setup) != cudaSuccess)
        cudaGetLastError();
    cuda_pool_release(device, bytes);
    if (at)
        atomic_store(&device->surplus, true);
}

static void drop(struct cuda_device *device, struct cuda_block *block) {
    atomic_fetch_sub(&device->kept_bytes, block->bytes); /* first: see cuda_pool_bytes() */
    give_back(device, block->at, block->bytes);
    block->at = NULL;
}

void cuda_staging_forget(struct cuda_device *device) {
    for (int i = 0; i < CUDA_KEPT_MAX; i++)
        if (device->kept[i].at)
            drop(device, &device->kept[i]);
}

/* Would the pool have so much if nothing were kept? */
static bool could_fit(struct cuda_device *device, uint64_t bytes) {
    uint64_t used = cuda_pool_bytes(&device->base), max = device->base.info.pool_bytes_max;
    return used <= max && bytes <= max - used;
}

bool cuda_staging_make_room(struct cuda_device *device, uint64_t bytes) {
    if (!could_fit(device, bytes))
        return false;
    /* In this order: setup_mutex may be held for long, and who holds work holds up every job. */
    pthread_mutex_lock(&device->setup_mutex);
    pthread_mutex_lock(&device->work);
    bool any = atomic_load(&device->kept_bytes) > 0;
    cuda_staging_forget(device);
    pthread_mutex_unlock(&device->work);
    pthread_mutex_unlock(&device->setup_mutex);
    return any;
}

/* The smallest kept block of at least `bytes` and at most `most`. */
static bool take_kept(struct cuda_device *device, struct cuda_flight *flight, uint64_t bytes,
                      uint64_t most) {
    struct cuda_block *best = NULL;
    for (int i = 0; i < CUDA_KEPT_MAX; i++) {
        struct cuda_block *block = &device->kept[i];
        if (block->at && block->bytes >= bytes && block->bytes <= most &&
            (!best || block->bytes < best->bytes))
            best = block;
    }
    if (!best)
        return false;
    flight->staging = best->at;
    flight->staging_bytes = best->bytes;
    atomic_fetch_sub(&device->kept_bytes, best->bytes);
    best->at = NULL;
    return true;
}

bool cuda_staging_reserve(struct cuda_device *device, struct cuda_flight *flight, uint64_t bytes) {
    /* A small job leaves the large blocks to large ones, as long as one of its own size can be made
     * and kept behind it. */
    uint64_t most = bytes > CUDA_BLOCK_SMALL ? bytes : CUDA_BLOCK_SMALL;
    if (take_kept(device, flight, bytes, most * CUDA_BLOCK_SLACK))
        return true;
    bool stays = atomic_load(&device->kept_bytes) + bytes <= CUDA_KEPT_BYTES;
    if (!(stays && cuda_pool_reserve(device, bytes))) {
        if (take_kept(device, flight, bytes, UINT64_MAX))
            return true;
        if (!cuda_pool_reserve(device, bytes)) {
            if (!could_fit(device, bytes))
                return false; /* a smaller piece may yet find a block that fits */
            cuda_staging_forget(device);
            if (!cuda_pool_reserve(device, bytes))
                return false;
        }
    }
    flight->staging_bytes = bytes;
    return true;
}

cudaError_t cuda_staging_allocate(struct cuda_device *device, struct cuda_flight *flight) {
    void *at = NULL;
    if (flight->staging)
        return cudaSuccess;
    atomic_fetch_add(&device->pool_allocations, 1);
    cudaError_t error =
        cudaMallocFromPoolAsync(&at, flight->staging_bytes, device->pool, cuda_stream_of(flight));
    flight->staging = at;
    return error;
}

/* Where a block of that size is kept: a free place, or else that of the smallest smaller one.
 * Smaller ones give way, the smallest first, until it is within the limit: what is kept follows
 * the jobs that come, and would else stay for ever as the first ones left it. NULL: nowhere. */
static struct cuda_block *place_for(struct cuda_device *device, uint64_t bytes) {
    uint64_t kept = atomic_load(&device->kept_bytes), smaller = 0;
    for (int i = 0; i < CUDA_KEPT_MAX; i++)
        if (device->kept[i].at && device->kept[i].bytes < bytes)
            smaller += device->kept[i].bytes;
    if (kept - smaller + bytes > CUDA_KEPT_BYTES)
        return NULL;
    for (;;) {
        struct cuda_block *empty = NULL, *smallest = NULL;
        for (int i = 0; i < CUDA_KEPT_MAX; i++) {
            struct cuda_block *block = &device->kept[i];
            if (!block->at)
                empty = block;
            else if (block->bytes < bytes && (!smallest || block->bytes < smallest->bytes))
                smallest = block;
        }
        if (empty && atomic_load(&device->kept_bytes) + bytes <= CUDA_KEPT_BYTES)
            return empty;
        if (!smallest)
            return NULL;
        drop(device, smallest);
    }
}

void cuda_staging_release(struct cuda_device *device, struct cuda_flight *flight) {
    char *at = flight->staging;
    uint64_t bytes = flight->staging_bytes;
    flight->staging = NULL;
    flight->staging_bytes = 0;
    struct cuda_block *place = NULL;
    if (at && !atomic_load(&device->lost))
        place = place_for(device, bytes);
    if (!place) {
        give_back(device, at, bytes);
        return;
    }
    *place = (struct cuda_block){at, bytes};
    atomic_fetch_add(&device->kept_bytes, bytes);
}
