/* shm.c - opens callers' POSIX shared-memory objects and reads and writes them without mapping them
 * (shm.h). Keeps no list (regions.c). Reading, writing and closing on the thread pool. */
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
#include <uv.h>

#include "server/gateway/regions.h"

#define PIECE_BYTES_MAX ((uint64_t)1 << 30) /* of one pread(); the kernel moves at most 2 GiB */

struct kld_shm_object {
    uv_work_t close;
    int fd; /* constant, as all but users */
    _Atomic uint32_t users;
    uint64_t offset_bytes, byte_size;
    dev_t device; /* with inode: which object, whatever its key and its regions' names */
    ino_t inode;
    char name[KLD_OIP_NAME_MAX]; /* of its region, for errors */
};

static enum kld_status check_key(const char *prefix, const char *key, struct kld_error *err) {
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
                                   struct stat *ret_about, struct kld_error *err) {
    struct stat about;
    int fd = shm_open(wanted->key, O_RDWR | O_NONBLOCK, 0);
    if (fd < 0 && errno == ENOENT)
        return kld_error_set(err, KLD_NOT_FOUND, "there is no shared memory with this key");
    if (fd < 0) { /* what we are short of is not forbidden: it may be there the next time */
        bool ours = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EINTR;
        return kld_error_set(err, ours ? KLD_UNAVAILABLE : KLD_FORBIDDEN,
                             "the shared memory cannot be opened: %s", strerror(errno));
    }
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
    *ret_about = about;
    return KLD_OK;
}

static struct kld_shm_object *make_object(const struct kld_oip_register *wanted, const char *name,
                                          int fd, const struct stat *about) {
    struct kld_shm_object *object = calloc(1, sizeof *object);
    if (!object)
        return NULL;
    object->fd = fd;
    object->device = about->st_dev;
    object->inode = about->st_ino;
    object->users = 1;
    object->offset_bytes = wanted->offset_bytes;
    object->byte_size = wanted->byte_size;
    strcpy(object->name, name);
    return object;
}

static enum kld_status open_into(struct kld_regions *regions, struct kld_registered *registered,
                                 const struct kld_oip_register *wanted, struct kld_error *err) {
    int fd = -1;
    struct stat about = {.st_ino = 0};
    enum kld_status status = open_object(wanted, &fd, &about, err);
    if (status)
        return status;
    struct kld_region_use use = {.object = make_object(wanted, registered->name, fd, &about)};
    if (!use.object) {
        close(fd);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    kld_regions_publish(regions, registered, use);
    return KLD_OK;
}

enum kld_status kld_shm_register(struct kld_regions *regions, const struct kld_config *config,
                                 const struct kld_caller *owner, const char *name,
                                 const struct kld_oip_register *wanted, struct kld_error *err) {
    struct kld_registered *registered, region = {.kind = KLD_REGISTERED_SYSTEM,
                                                 .owner = owner,
                                                 .bytes = wanted->byte_size,
                                                 .offset_bytes = wanted->offset_bytes};
    enum kld_status status;
    strcpy(region.key, wanted->key);
    if ((status = check_key(config->shm_prefix, wanted->key, err)) ||
        (status = kld_regions_name(&region, name, err)) ||
        (status = kld_regions_reserve(regions, &region, &registered, err)))
        return status;
    if ((status = open_into(regions, registered, wanted, err)))
        kld_regions_give_up(regions, registered);
    return status;
}

void kld_shm_hold(struct kld_shm_object *object) { atomic_fetch_add(&object->users, 1); }

static void close_work(uv_work_t *work) {
    const struct kld_shm_object *object = work->data;
    close(object->fd);
}

static void close_ended(uv_work_t *work, int status) { free(work->data); }

void kld_shm_release(struct kld_shm_object *object, uv_loop_t *loop) {
    if (!object || atomic_fetch_sub(&object->users, 1) != 1)
        return;
    object->close.data = object;
    if (loop && uv_queue_work(loop, &object->close, close_work, close_ended) == 0)
        return;
    close(object->fd);
    free(object);
}

bool kld_shm_is_same(const struct kld_shm_object *a, const struct kld_shm_object *b) {
    return a->device == b->device && a->inode == b->inode;
}

uint64_t kld_shm_offset(const struct kld_shm_object *object) { return object->offset_bytes; }

static enum kld_status cut_short(const struct kld_shm_object *object, struct kld_error *err) {
    return kld_error_set(err, KLD_INVALID, "region '%.60s' is shorter than when it was registered",
                         object->name);
}

enum kld_status kld_shm_read(const struct kld_shm_object *object, uint64_t offset_bytes, void *to,
                             uint64_t bytes, struct kld_error *err) {
    uint64_t at = object->offset_bytes + offset_bytes;
    for (uint64_t done = 0; done < bytes;) {
        uint64_t piece = bytes - done < PIECE_BYTES_MAX ? bytes - done : PIECE_BYTES_MAX;
        ssize_t got = pread(object->fd, (char *)to + done, piece, (off_t)(at + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return kld_error_set(err, KLD_INTERNAL, "region '%.60s' cannot be read: %s",
                                 object->name, strerror(errno));
        if (got == 0)
            return cut_short(object, err);
        done += (uint64_t)got;
    }
    return KLD_OK;
}

enum kld_status kld_shm_write(const struct kld_shm_object *object, uint64_t offset_bytes,
                              const void *from, uint64_t bytes, struct kld_error *err) {
    uint64_t at = object->offset_bytes + offset_bytes;
    struct stat about; /* pwrite() would make a cut object grow again */
    if (fstat(object->fd, &about) != 0 || (uint64_t)about.st_size < at + bytes)
        return cut_short(object, err);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t piece = bytes - done < PIECE_BYTES_MAX ? bytes - done : PIECE_BYTES_MAX;
        ssize_t put = pwrite(object->fd, (const char *)from + done, piece, (off_t)(at + done));
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return kld_error_set(err, KLD_NO_MEMORY, "region '%.60s' cannot be written: %s",
                                 object->name, strerror(errno));
        done += (uint64_t)put;
    }
    return KLD_OK;
}
