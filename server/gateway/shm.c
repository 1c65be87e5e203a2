/* shm.c - the list of registered POSIX shared-memory objects, read and written without mapping them
 * (shm.h). The list under a mutex; reading, writing and closing on the thread pool. */
#include "server/gateway/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIECE_BYTES_MAX ((uint64_t)1 << 30) /* of one pread(); the kernel moves at most 2 GiB */

struct kld_shm_region {
    struct kld_shm_region *next;    /* under the mutex of the list; the rest is constant */
    const struct kld_caller *owner; /* compared, never read */
    uv_work_t close;
    int fd;
    _Atomic uint32_t users; /* the list is one */
    uint64_t offset_bytes, byte_size;
    char name[KLD_OIP_NAME_MAX];
    char key[KLD_OIP_KEY_MAX];
};

struct kld_shm {
    const struct kld_config *config;
    struct kld_stats *stats;
    uv_mutex_t mutex;
    struct kld_shm_region *first; /* under the mutex, as count */
    uint32_t count;
};

enum kld_status kld_shm_open(const struct kld_config *config, struct kld_stats *stats,
                             struct kld_shm **ret_shm, struct kld_error *err) {
    struct kld_shm *shm = calloc(1, sizeof *shm);
    if (!shm || uv_mutex_init(&shm->mutex) != 0) {
        free(shm);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    shm->config = config;
    shm->stats = stats;
    *ret_shm = shm;
    return KLD_OK;
}

void kld_shm_close(struct kld_shm *shm) {
    if (!shm)
        return;
    while (shm->first) {
        struct kld_shm_region *region = shm->first;
        shm->first = region->next;
        kld_shm_release(region, NULL);
    }
    uv_mutex_destroy(&shm->mutex);
    free(shm);
}

static struct kld_shm_region *find(const struct kld_shm *shm, const struct kld_caller *owner,
                                   const char *name) {
    struct kld_shm_region *region = shm->first;
    while (region && (region->owner != owner || strcmp(region->name, name) != 0))
        region = region->next;
    return region;
}

static enum kld_status check_key(const struct kld_shm *shm, const char *key,
                                 struct kld_error *err) {
    const char *prefix = shm->config->shm_prefix;
    const char *bare = key[0] == '/' ? key + 1 : key;
    if (!*prefix)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "shared memory over HTTP is off; the operator may set shm_prefix");
    if (strncmp(key, prefix, strlen(prefix)) != 0)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "this key may not be registered; keys must start with the configured "
                             "prefix");
    if (!*bare || strchr(bare, '/') || strcmp(bare, ".") == 0 || strcmp(bare, "..") == 0)
        return kld_error_set(err, KLD_INVALID, "the key is not the name of shared memory");
    return KLD_OK;
}

static enum kld_status open_object(const struct kld_oip_register *wanted, int *ret_fd,
                                   struct kld_error *err) {
    struct stat about;
    int fd = shm_open(wanted->key, O_RDWR | O_NONBLOCK, 0);
    if (fd < 0)
        return errno == ENOENT
                   ? kld_error_set(err, KLD_NOT_FOUND, "there is no shared memory with this key")
                   : kld_error_set(err, KLD_FORBIDDEN, "the shared memory cannot be opened: %s",
                                   strerror(errno));
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) {
        close(fd);
        return kld_error_set(err, KLD_INVALID, "the key is not shared memory");
    }
    uint64_t end = wanted->offset_bytes + wanted->byte_size; /* the parser checked the sum */
    if ((uint64_t)about.st_size < end) {
        close(fd);
        return kld_error_set(err, KLD_INVALID,
                             "offset and byte_size reach to byte %" PRIu64
                             "; the shared memory has %" PRIu64,
                             end, (uint64_t)about.st_size);
    }
    *ret_fd = fd;
    return KLD_OK;
}

/* Under the mutex. */
static enum kld_status add(struct kld_shm *shm, struct kld_shm_region *region,
                           struct kld_error *err) {
    if (find(shm, region->owner, region->name))
        return kld_error_set(err, KLD_EXISTS, "a region of this name is registered already");
    if (shm->count >= shm->config->http_regions_max)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "there are %" PRIu32 " regions, the most allowed (http_regions_max)",
                             shm->count);
    region->next = shm->first;
    shm->first = region;
    shm->count++;
    kld_stats_add(shm->stats, KLD_STAT_http_regions, 1);
    return KLD_OK;
}

enum kld_status kld_shm_register(struct kld_shm *shm, const struct kld_caller *owner,
                                 const char *name, const struct kld_oip_register *wanted,
                                 struct kld_error *err) {
    enum kld_status status = check_key(shm, wanted->key, err);
    int fd = -1;
    if (status)
        return status;
    if (!*name || strlen(name) >= KLD_OIP_NAME_MAX)
        return kld_error_set(err, KLD_INVALID, "the name of a region has 1 to %d bytes",
                             KLD_OIP_NAME_MAX - 1);
    if ((status = open_object(wanted, &fd, err)))
        return status;
    struct kld_shm_region *region = calloc(1, sizeof *region);
    if (!region) {
        close(fd);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    region->fd = fd;
    region->users = 1;
    region->owner = owner;
    region->offset_bytes = wanted->offset_bytes;
    region->byte_size = wanted->byte_size;
    strcpy(region->name, name);
    strcpy(region->key, wanted->key);
    uv_mutex_lock(&shm->mutex);
    status = add(shm, region, err);
    uv_mutex_unlock(&shm->mutex);
    if (status) {
        close(fd);
        free(region);
    }
    return status;
}

void kld_shm_unregister(struct kld_shm *shm, const struct kld_caller *owner, const char *name,
                        uv_loop_t *loop) {
    uv_mutex_lock(&shm->mutex);
    for (struct kld_shm_region **at = &shm->first; *at;) {
        struct kld_shm_region *region = *at;
        if (region->owner != owner || (name && strcmp(region->name, name) != 0)) {
            at = &region->next;
            continue;
        }
        *at = region->next;
        shm->count--;
        kld_stats_add(shm->stats, KLD_STAT_http_regions, -1);
        kld_shm_release(region, loop);
    }
    uv_mutex_unlock(&shm->mutex);
}

bool kld_shm_append_status(struct kld_shm *shm, const struct kld_caller *owner, const char *name,
                           struct kld_oip_text *text) {
    bool found = false;
    kld_oip_append(text, "[");
    uv_mutex_lock(&shm->mutex);
    for (const struct kld_shm_region *region = shm->first; region; region = region->next) {
        if (region->owner != owner || (name && strcmp(region->name, name) != 0))
            continue;
        kld_oip_append(text, "%s{\"name\":", found ? "," : "");
        kld_oip_append_string(text, region->name);
        kld_oip_append(text, ",\"key\":");
        kld_oip_append_string(text, region->key);
        kld_oip_append(text, ",\"offset\":%" PRIu64 ",\"byte_size\":%" PRIu64 "}",
                       region->offset_bytes, region->byte_size);
        found = true;
    }
    uv_mutex_unlock(&shm->mutex);
    kld_oip_append(text, "]");
    return found || !name;
}

bool kld_shm_has(struct kld_shm *shm, const struct kld_caller *owner, const char *name) {
    uv_mutex_lock(&shm->mutex);
    bool found = find(shm, owner, name) != NULL;
    uv_mutex_unlock(&shm->mutex);
    return found;
}

uint32_t kld_shm_count(struct kld_shm *shm) {
    uv_mutex_lock(&shm->mutex);
    uint32_t count = shm->count;
    uv_mutex_unlock(&shm->mutex);
    return count;
}

enum kld_status kld_shm_acquire(struct kld_shm *shm, const struct kld_caller *owner,
                                const char *name, uint64_t offset_bytes, uint64_t bytes,
                                struct kld_shm_region **ret_region, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    uv_mutex_lock(&shm->mutex);
    struct kld_shm_region *region = find(shm, owner, name);
    if (!region)
        status = kld_error_set(err, KLD_NOT_FOUND, "no shared-memory region '%.60s' is registered",
                               name);
    else if (offset_bytes > region->byte_size || bytes > region->byte_size - offset_bytes)
        status = kld_error_set(err, KLD_INVALID,
                               "region '%.60s' has %" PRIu64 " bytes; %" PRIu64
                               " at offset %" PRIu64 " do not fit",
                               name, region->byte_size, bytes, offset_bytes);
    else
        atomic_fetch_add(&region->users, 1);
    uv_mutex_unlock(&shm->mutex);
    if (status == KLD_OK)
        *ret_region = region;
    return status;
}

static void close_work(uv_work_t *work) {
    const struct kld_shm_region *region = work->data;
    close(region->fd);
}

static void close_ended(uv_work_t *work, int status) { free(work->data); }

void kld_shm_release(struct kld_shm_region *region, uv_loop_t *loop) {
    if (!region || atomic_fetch_sub(&region->users, 1) != 1)
        return;
    region->close.data = region;
    if (loop && uv_queue_work(loop, &region->close, close_work, close_ended) == 0)
        return;
    close(region->fd);
    free(region);
}

static enum kld_status cut_short(const struct kld_shm_region *region, struct kld_error *err) {
    return kld_error_set(err, KLD_INVALID, "region '%.60s' is shorter than when it was registered",
                         region->name);
}

enum kld_status kld_shm_read(const struct kld_shm_region *region, uint64_t offset_bytes, void *to,
                             uint64_t bytes, struct kld_error *err) {
    uint64_t at = region->offset_bytes + offset_bytes;
    for (uint64_t done = 0; done < bytes;) {
        uint64_t piece = bytes - done < PIECE_BYTES_MAX ? bytes - done : PIECE_BYTES_MAX;
        ssize_t got = pread(region->fd, (char *)to + done, piece, (off_t)(at + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return cut_short(region, err);
        done += (uint64_t)got;
    }
    return KLD_OK;
}

enum kld_status kld_shm_write(const struct kld_shm_region *region, uint64_t offset_bytes,
                              const void *from, uint64_t bytes, struct kld_error *err) {
    uint64_t at = region->offset_bytes + offset_bytes;
    struct stat about; /* pwrite() would make a cut object grow again */
    if (fstat(region->fd, &about) != 0 || (uint64_t)about.st_size < at + bytes)
        return cut_short(region, err);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t piece = bytes - done < PIECE_BYTES_MAX ? bytes - done : PIECE_BYTES_MAX;
        ssize_t put = pwrite(region->fd, (const char *)from + done, piece, (off_t)(at + done));
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return kld_error_set(err, KLD_NO_MEMORY, "region '%.60s' cannot be written: %s",
                                 region->name, strerror(errno));
        done += (uint64_t)put;
    }
    return KLD_OK;
}
