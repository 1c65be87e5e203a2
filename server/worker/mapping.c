/* mapping.c - a list of mappings under a mutex (mapping.h). Checks no descriptor (region.c). Worker
 * process: uv's pool. */
#include "server/worker/mapping.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/kcmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/log.h"
#include "server/stats.h"

enum state { MAPPING, MAPPED, FAILED };

struct kld_mapping {
    TAILQ_ENTRY(kld_mapping) entry;
    uint64_t bytes;        /* constant, as user */
    struct kld_user *user; /* for whom it counts, held; NULL: it does not */
    int fd;                /* -1: not on the list, and nobody else's */
    uint32_t users;        /* the rest under the mutex */
    enum state state;
    struct kld_memory *memory; /* MAPPED */
    struct kld_error error;    /* FAILED */
};

enum kld_status kld_mappings_init(struct kld_mappings *mappings, const struct kld_backend *backend,
                                  struct kld_device *device, struct kld_users *users,
                                  struct kld_error *err) {
    mappings->users = users;
    mappings->backend = backend;
    mappings->device = device;
    mappings->stats = NULL;
    mappings->count = mappings->clients = 0;
    mappings->shared_bytes = 0;
    mappings->told = mappings->told_slow = false;
    TAILQ_INIT(&mappings->list);
    if (uv_mutex_init(&mappings->mutex) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    if (uv_cond_init(&mappings->mapped) != 0) {
        uv_mutex_destroy(&mappings->mutex);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    return KLD_OK;
}

void kld_mappings_done(struct kld_mappings *mappings) {
    uv_cond_destroy(&mappings->mapped);
    uv_mutex_destroy(&mappings->mutex);
}

/* Two descriptors of one inode show the same at any moment. The inode's number alone would not do:
 * of memfds the kernel gives it again after 2^32 others. */
static bool same_inode(int a, int b) {
    struct stat x, y;
    return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino &&
           x.st_size == y.st_size && x.st_uid == y.st_uid && x.st_ctim.tv_sec == y.st_ctim.tv_sec &&
           x.st_ctim.tv_nsec == y.st_ctim.tv_nsec && x.st_mtim.tv_sec == y.st_mtim.tv_sec &&
           x.st_mtim.tv_nsec == y.st_mtim.tv_nsec;
}

/* kcmp is refused in some containers, and some kernels have none. */
static bool same_file(struct kld_mappings *mappings, int a, int b) {
    pid_t self = getpid();
    long order = syscall(SYS_kcmp, self, self, KCMP_FILE, (unsigned long)a, (unsigned long)b);
    if (order >= 0)
        return order == 0;
    if (!mappings->told) {
        mappings->told = true;
        kld_log(KLD_LOG_INFO, "no kcmp",
                "text=\"shared memory is known again by its inode; error: %s\"", strerror(errno));
    }
    return same_inode(a, b);
}

/* ---- Under the mutex --------------------------------------------------------------------------*/

static struct kld_mapping *find(struct kld_mappings *mappings, int fd, uint64_t bytes) {
    struct kld_mapping *mapping;
    TAILQ_FOREACH(mapping, &mappings->list, entry)
    if (mapping->bytes == bytes && mapping->state != FAILED && same_file(mappings, mapping->fd, fd))
        return mapping;
    return NULL;
}

/* One more that is known again? */
static bool has_place(const struct kld_mappings *mappings, const struct kld_mapping_limit *limit) {
    const struct kld_user *user = limit ? limit->user : NULL;
    if (!user || mappings->count == KLD_MAPPINGS_MAX)
        return mappings->count < KLD_MAPPINGS_MAX;
    return user->listed < kld_share_max(limit->user_share, KLD_MAPPINGS_MAX - KLD_MAPPINGS_GATEWAY,
                                        mappings->clients - user->listed);
}

static struct kld_mapping *make(struct kld_mappings *mappings, int fd, uint64_t bytes,
                                const struct kld_mapping_limit *limit) {
    struct kld_user *user = limit ? limit->user : NULL;
    struct kld_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return NULL;
    *mapping = (struct kld_mapping){.bytes = bytes, .user = user, .fd = -1, .users = 1};
    if (user) {
        kld_user_hold(mappings->users, user);
        user->shared_bytes += bytes;
        mappings->shared_bytes += bytes;
    }
    if (bytes < KLD_MAPPING_BYTES_MIN || !has_place(mappings, limit))
        return mapping;
    mapping->fd = fd;
    mappings->count++;
    if (user) {
        mappings->clients++;
        user->listed++;
    }
    TAILQ_INSERT_TAIL(&mappings->list, mapping, entry);
    return mapping;
}

static enum kld_status check_room(const struct kld_mappings *mappings, uint64_t bytes,
                                  const struct kld_mapping_limit *limit, struct kld_error *err) {
    uint64_t total, most = limit ? limit->bytes_max : 0;
    if (!limit)
        return KLD_OK;
    uint64_t alone = kld_share_max(limit->user_share, most, 0);
    if (bytes > alone) /* whatever others have: who asks for less may get it */
        return kld_error_set(err, KLD_TOO_LARGE,
                             "%" PRIu64 " bytes; a user may share %" PRIu64
                             " of the host's memory at most (user_share)",
                             bytes, alone);
    if (__builtin_add_overflow(mappings->shared_bytes, bytes, &total) || total > most)
        return kld_error_set(err, KLD_NO_MEMORY,
                             "there is no room for %" PRIu64 " bytes: clients share %" PRIu64
                             " of %" PRIu64 " of the host's memory",
                             bytes, mappings->shared_bytes, most);
    uint64_t own = limit->user->shared_bytes;
    most = kld_share_max(limit->user_share, most, mappings->shared_bytes - own);
    if (bytes > most || own > most - bytes)
        return kld_error_set(err, KLD_NO_MEMORY,
                             "there is no room for %" PRIu64 " bytes of this user's, who shares "
                             "%" PRIu64 " of the %" PRIu64 " of the host's memory that others "
                             "leave to one (user_share)",
                             bytes, own, most);
    return KLD_OK;
}

/* True: that was the last one; it is nobody else's from here on. */
static bool drop(struct kld_mappings *mappings, struct kld_mapping *mapping) {
    if (--mapping->users)
        return false;
    if (mapping->fd >= 0) {
        TAILQ_REMOVE(&mappings->list, mapping, entry);
        mappings->count--;
    }
    if (mapping->user) {
        mappings->shared_bytes -= mapping->bytes;
        mapping->user->shared_bytes -= mapping->bytes;
        mappings->clients -= mapping->fd >= 0;
        mapping->user->listed -= mapping->fd >= 0;
        kld_user_release(mappings->users, mapping->user);
    }
    return true;
}

/* ---- Without ----------------------------------------------------------------------------------*/

/* Of memory that has come (1) or goes (-1). */
static void tell(const struct kld_mappings *mappings, const struct kld_memory *memory, int sign) {
    if (mappings->stats && memory->pinned)
        kld_stats_add(mappings->stats, KLD_STAT_pinned_bytes, sign * (int64_t)memory->bytes);
}

static enum kld_status end(struct kld_mappings *mappings, struct kld_mapping *mapping) {
    enum kld_status status = KLD_OK;
    if (mapping->state == MAPPED) {
        tell(mappings, mapping->memory, -1);
        status = mappings->backend->memory_free(mapping->memory);
    }
    if (mapping->fd >= 0)
        close(mapping->fd);
    free(mapping);
    return status;
}

static void map(struct kld_mappings *mappings, struct kld_mapping *mapping, int fd) {
    struct kld_memory *memory = NULL;
    struct kld_error error = {.status = KLD_OK};
    enum kld_status status =
        mappings->backend->memory_map(mappings->device, fd, mapping->bytes, &memory, &error);
    bool pinned = status || memory->pinned;
    if (!status)
        tell(mappings, memory, 1);
    uv_mutex_lock(&mappings->mutex);
    bool first = !pinned && !mappings->told_slow;
    mappings->told_slow |= first;
    mapping->memory = memory;
    mapping->error = error;
    mapping->error.status = status;
    mapping->state = status ? FAILED : MAPPED;
    uv_cond_broadcast(&mappings->mapped);
    uv_mutex_unlock(&mappings->mutex);
    if (first)
        kld_log(KLD_LOG_WARN, "not pinned", "bytes=%" PRIu64 " text=\"%s\"", mapping->bytes,
                "a client's shared memory could not be pinned, and copies between it and the GPU "
                "are slower, 10 GB/s where it can be 55; see the limit on locked memory (memlock)");
}

enum kld_status kld_mapping_acquire(struct kld_mappings *mappings, int fd, uint64_t bytes,
                                    const struct kld_mapping_limit *limit,
                                    struct kld_mapping **ret_mapping,
                                    struct kld_memory **ret_memory, bool *ret_limited,
                                    struct kld_error *err) {
    uv_mutex_lock(&mappings->mutex);
    struct kld_mapping *mapping = find(mappings, fd, bytes);
    bool there = mapping != NULL;
    enum kld_status status = KLD_OK;
    if (there)
        mapping->users++;
    else if (!(status = check_room(mappings, bytes, limit, err)))
        mapping = make(mappings, fd, bytes, limit);
    while (there && mapping->state == MAPPING) /* another thread of the pool is at it */
        uv_cond_wait(&mappings->mapped, &mappings->mutex);
    uv_mutex_unlock(&mappings->mutex);
    *ret_limited = status != KLD_OK;
    if (!mapping) {
        close(fd);
        return status ? status : kld_error_set(err, KLD_NO_MEMORY, "no memory for another region");
    }
    if (!there)
        map(mappings, mapping, fd);
    if (there || mapping->fd < 0)
        close(fd);
    if (mapping->state == MAPPED) {
        *ret_mapping = mapping;
        *ret_memory = mapping->memory;
        return KLD_OK;
    }
    status = mapping->error.status;
    if (err)
        *err = mapping->error;
    kld_mapping_release(mappings, mapping);
    return status;
}

enum kld_status kld_mapping_release(struct kld_mappings *mappings, struct kld_mapping *mapping) {
    uv_mutex_lock(&mappings->mutex);
    bool last = drop(mappings, mapping);
    uv_mutex_unlock(&mappings->mutex);
    return last ? end(mappings, mapping) : KLD_OK;
}
