/* staging.c - a sealed memfd and a first-fit allocator over it (staging.h).
 * The list of ranges covers the whole memory, in order, with no two free neighbours. A list is
 * enough: there are at most a few ranges for each request in flight. Any thread: the list is under
 * a mutex. */
#include "server/gateway/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <uv.h>

struct range {
    struct range *before, *after;
    uint64_t offset, bytes;
    bool used;
};

struct kld_staging {
    int fd; /* constant once open, as bytes, memory and stats */
    uint64_t bytes;
    char *memory;
    struct kld_stats *stats; /* NULL: none */
    uv_mutex_t mutex;
    struct range *first; /* under the mutex, as all ranges and used_bytes */
    uint64_t used_bytes;
};

static enum kld_status make_memory(struct kld_staging *staging, struct kld_error *err) {
    staging->fd = memfd_create("kld-staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (staging->fd < 0 || ftruncate(staging->fd, (off_t)staging->bytes) != 0 ||
        fcntl(staging->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "no shared memory for staging: %s",
                             strerror(errno));
    void *memory = mmap(NULL, staging->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, staging->fd, 0);
    if (memory == MAP_FAILED)
        return kld_error_set(err, KLD_NO_MEMORY, "staging memory cannot be mapped: %s",
                             strerror(errno));
    staging->memory = memory;
    return KLD_OK;
}

enum kld_status kld_staging_open(uint64_t bytes, struct kld_stats *stats,
                                 struct kld_staging **ret_staging, struct kld_error *err) {
    struct kld_staging *staging = calloc(1, sizeof *staging);
    struct range *all = calloc(1, sizeof *all);
    enum kld_status status;
    if (!staging || !all || uv_mutex_init(&staging->mutex) != 0) {
        free(staging);
        free(all);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    staging->fd = -1;
    staging->stats = stats;
    staging->first = all;
    staging->bytes = all->bytes = (bytes ? bytes + 4095 : 4096) & ~(uint64_t)4095;
    if (bytes > (uint64_t)1 << 50)
        status = kld_error_set(err, KLD_INVALID, "staging_bytes_max is over 2^50 bytes");
    else
        status = make_memory(staging, err);
    if (status) {
        kld_staging_close(staging);
        return status;
    }
    *ret_staging = staging;
    return KLD_OK;
}

void kld_staging_close(struct kld_staging *staging) {
    if (!staging)
        return;
    for (struct range *range = staging->first, *after; range; range = after) {
        after = range->after;
        free(range);
    }
    if (staging->memory)
        munmap(staging->memory, staging->bytes);
    if (staging->fd >= 0)
        close(staging->fd);
    uv_mutex_destroy(&staging->mutex);
    free(staging);
}

int kld_staging_fd(const struct kld_staging *staging) { return staging->fd; }
uint64_t kld_staging_bytes(const struct kld_staging *staging) { return staging->bytes; }
void *kld_staging_at(const struct kld_staging *staging, uint64_t offset) {
    return staging->memory + offset;
}

uint64_t kld_staging_used_bytes(struct kld_staging *staging) {
    uv_mutex_lock(&staging->mutex);
    uint64_t used = staging->used_bytes;
    uv_mutex_unlock(&staging->mutex);
    return used;
}

/* Under the mutex, so that the gauge ends with the last value. */
static void count(struct kld_staging *staging, uint64_t used_bytes) {
    staging->used_bytes = used_bytes;
    if (staging->stats)
        kld_stats_set(staging->stats, KLD_STAT_staging_bytes, used_bytes);
}

static enum kld_status alloc(struct kld_staging *staging, uint64_t bytes, uint64_t *ret_offset,
                             struct kld_error *err) {
    if (bytes > staging->bytes)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the request needs %" PRIu64 " bytes of staging memory; there are "
                             "%" PRIu64 " (staging_bytes_max)",
                             bytes, staging->bytes);
    uint64_t rounded = (bytes + KLD_STAGING_ALIGN - 1) & ~(uint64_t)(KLD_STAGING_ALIGN - 1);
    if (rounded == 0)
        rounded = KLD_STAGING_ALIGN;
    struct range *range = staging->first;
    while (range && (range->used || range->bytes < rounded))
        range = range->after;
    if (!range)
        return kld_error_set(err, KLD_BUSY, "the staging memory is in use; try again");
    if (range->bytes > rounded) {
        struct range *rest = calloc(1, sizeof *rest);
        if (!rest)
            return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
        *rest = (struct range){.before = range,
                               .after = range->after,
                               .offset = range->offset + rounded,
                               .bytes = range->bytes - rounded};
        if (rest->after)
            rest->after->before = rest;
        range->after = rest;
        range->bytes = rounded;
    }
    range->used = true;
    count(staging, staging->used_bytes + range->bytes);
    *ret_offset = range->offset;
    return KLD_OK;
}

enum kld_status kld_staging_alloc(struct kld_staging *staging, uint64_t bytes, uint64_t *ret_offset,
                                  struct kld_error *err) {
    uv_mutex_lock(&staging->mutex);
    enum kld_status status = alloc(staging, bytes, ret_offset, err);
    uv_mutex_unlock(&staging->mutex);
    return status;
}

/* Joins range with the free one behind it. */
static void join(struct range *range) {
    struct range *gone = range->after;
    range->bytes += gone->bytes;
    range->after = gone->after;
    if (range->after)
        range->after->before = range;
    free(gone);
}

static void give_back(struct kld_staging *staging, struct range *range) {
    range->used = false;
    count(staging, staging->used_bytes - range->bytes);
    if (range->after && !range->after->used)
        join(range);
    if (range->before && !range->before->used)
        join(range->before);
}

void kld_staging_free(struct kld_staging *staging, uint64_t offset) {
    uv_mutex_lock(&staging->mutex);
    struct range *range = staging->first;
    while (range && range->offset != offset)
        range = range->after;
    if (range && range->used)
        give_back(staging, range);
    uv_mutex_unlock(&staging->mutex);
}
