/* unix_memory.c - regions of a Unix-socket connection: made, registered, registered again after a
 * lost worker, dropped. Sends only REGION_ADD and REGION_DROP. The thread that owns the connection.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "client/unix.h"

#define PAGE_BYTES 4096ull

static struct unix_connection *connection_of(const struct kld_region *region) {
    return (struct unix_connection *)region->connection;
}

static uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

static enum kld_status no_descriptor(struct kld_error *err) {
    return kld_error_set(err, KLD_NO_MEMORY,
                         "no file descriptors left for a region, which takes one (RLIMIT_NOFILE)");
}

/* ---- Regions -------------------------------------------------------------------------------- */

/* The server counts what was released until it is told, which it is once it has answered: to
 * register memory may take it long. Who was refused meanwhile may have room behind that. */
static bool some_leave(const struct unix_connection *u) {
    const struct kld_region *base = u->base.regions;
    while (base && !((const struct unix_region *)base)->released)
        base = base->next;
    return base != NULL;
}

/* Limits of WELCOME are checked here, where the caller still sees the error. Who sees the server's
 * answer is told by that: it may have learned since that it allows this client more. */
enum kld_status kld_unix_region_begin(struct unix_region *region, enum kld_region_kind kind,
                                      struct kld_error *err) {
    struct unix_connection *u = connection_of(&region->base);
    region->fd = -1;
    region->kind = kind;
    region->state = UNIX_REGION_MAKING; /* until kld_unix_region_add_later() */
    if (!u->welcomed || kind == KLD_REGION_POOL || kind == KLD_REGION_CUDA_IPC)
        return KLD_OK;
    if (region->base.bytes > u->welcome.region_bytes_max)
        return kld_error_set(err, KLD_TOO_LARGE, "a region of %llu bytes; the server allows %llu",
                             (unsigned long long)region->base.bytes,
                             (unsigned long long)u->welcome.region_bytes_max);
    if (u->base.region_count > u->welcome.regions_max && !some_leave(u))
        return kld_error_set(err, KLD_TOO_LARGE, "the server allows %u regions on one connection",
                             u->welcome.regions_max);
    return KLD_OK;
}

void kld_unix_region_add_later(struct unix_region *region) {
    struct unix_connection *u = connection_of(&region->base);
    region->state = UNIX_REGION_NEW;
    u->region_work++;
    kld_unix_flush(u);
}

static enum kld_status map(struct unix_region *region, struct kld_error *err) {
    uint64_t bytes = round_up(region->base.bytes, PAGE_BYTES);
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region->fd, 0);
    if (data == MAP_FAILED)
        return kld_error_set(err, KLD_NO_MEMORY, "cannot map a region of %llu bytes",
                             (unsigned long long)region->base.bytes);
    region->base.data = data;
    region->mapped_bytes = bytes;
    return KLD_OK;
}

/* What was dropped counts, and takes descriptors, until the server has answered for it, which
 * nobody may have read. Where there is no room but theirs, that is waited for. */
enum kld_status kld_unix_room(struct unix_region *region, struct kld_error *err) {
    struct unix_connection *u = connection_of(&region->base);
    enum kld_status status = KLD_OK;
    region->fd = -1;
    if (some_leave(u))
        status = kld_connection_step(&u->base, 0, err);
    uint64_t deadline = kld_now_ns() + u->base.options.connect_timeout_ns;
    while (!status && u->welcomed && u->base.region_count > u->welcome.regions_max &&
           some_leave(u) && kld_now_ns() < deadline)
        status = kld_connection_step(&u->base, deadline, err);
    kld_connection_waited(&u->base);
    return status;
}

enum kld_status kld_unix_region_create(struct kld_region *base, struct kld_error *err) {
    enum kld_status status = kld_unix_room((struct unix_region *)base, err);
    return status ? status : kld_unix_region_make(base, err);
}

uint64_t kld_unix_file_bytes_max(void) {
    struct rlimit limit;
    bool limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return limited ? limit.rlim_cur : UINT64_MAX;
}

enum kld_status kld_unix_region_make(struct kld_region *base, struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    enum kld_status status = kld_unix_region_begin(region, KLD_REGION_MEMFD, err);
    if (status)
        return status;
    uint64_t bytes = round_up(base->bytes, PAGE_BYTES), most = kld_unix_file_bytes_max();
    if (bytes > most) /* the kernel would tell by SIGXFSZ, which ends a process */
        return kld_error_set(err, KLD_NO_MEMORY,
                             "shared memory of %llu bytes is a file; those of this process may "
                             "have %llu (RLIMIT_FSIZE)",
                             (unsigned long long)bytes, (unsigned long long)most);
    region->fd = memfd_create("kld-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (region->fd < 0 && (errno == EMFILE || errno == ENFILE))
        return no_descriptor(err);
    if (region->fd < 0 || ftruncate(region->fd, (off_t)bytes) != 0 ||
        fcntl(region->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "cannot make shared memory of %llu bytes",
                             (unsigned long long)base->bytes);
    kld_region_is_of(base, region->fd);
    status = map(region, err);
    if (!status)
        kld_unix_region_add_later(region);
    return status;
}

enum kld_status kld_unix_region_import_memfd(struct kld_region *base, int fd,
                                             struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    enum kld_status status = kld_unix_room(region, err);
    if (!status)
        status = kld_unix_region_begin(region, KLD_REGION_MEMFD, err);
    if (status)
        return status;
    region->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (region->fd < 0)
        return no_descriptor(err);
    kld_unix_region_add_later(region);
    return KLD_OK;
}

/* These are answered before they return: only the server can tell whether they work. */
enum kld_status kld_unix_region_add_and_wait(struct unix_region *region, struct kld_error *err) {
    kld_unix_region_add_later(region);
    struct unix_connection *u = connection_of(&region->base);
    return kld_unix_wait_state(u, &region->state, &region->error,
                               kld_now_ns() + u->base.options.connect_timeout_ns, err);
}

enum kld_status kld_unix_region_import_cuda_ipc(struct kld_region *base,
                                                const struct kld_ipc_source *source,
                                                struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    enum kld_status status = kld_unix_region_begin(region, KLD_REGION_CUDA_IPC, err);
    if (status ||
        (status = kld_unix_go_to_memory(connection_of(base), source->device_uuid, region, err)))
        return status;
    memcpy(region->ipc_handle, source->handle, sizeof region->ipc_handle);
    memcpy(region->device_uuid, source->device_uuid, sizeof region->device_uuid);
    region->base_bytes = source->base_bytes;
    region->offset_bytes = source->offset_bytes;
    return kld_unix_region_add_and_wait(region, err);
}

enum kld_status kld_unix_region_import_cuda_fd(struct kld_region *base, int fd,
                                               const struct kld_ipc_source *source,
                                               struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    enum kld_status status = kld_unix_region_begin(region, KLD_REGION_CUDA_FD, err);
    if (status ||
        (status = kld_unix_go_to_memory(connection_of(base), source->device_uuid, region, err)))
        return status;
    region->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (region->fd < 0)
        return errno == EBADF ? kld_error_set(err, KLD_INVALID, "not a file descriptor")
                              : no_descriptor(err);
    memcpy(region->device_uuid, source->device_uuid, sizeof region->device_uuid);
    region->base_bytes = source->base_bytes;
    region->offset_bytes = source->offset_bytes;
    return kld_unix_region_add_and_wait(region, err);
}

enum kld_status kld_unix_region_create_pool(struct kld_region *base, struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    enum kld_status status = kld_unix_region_begin(region, KLD_REGION_POOL, err);
    return status ? status : kld_unix_region_add_and_wait(region, err);
}

void *kld_unix_region_data(struct kld_region *base) {
    struct unix_region *region = (struct unix_region *)base;
    if (!base->data && region->fd >= 0 && region->kind == KLD_REGION_MEMFD)
        (void)map(region, NULL); /* an imported memfd is mapped when first asked for */
    return base->data;
}

static void region_free(struct unix_region *region) {
    kld_unix_publications_drop(connection_of(&region->base), region);
    if (region->base.data)
        munmap(region->base.data, region->mapped_bytes);
    if (region->fd >= 0)
        close(region->fd);
    kld_unix_space_free(region);
    kld_region_free(&region->base);
}

void kld_unix_region_release(struct kld_region *base) {
    struct unix_region *region = (struct unix_region *)base;
    struct unix_connection *u = connection_of(base);
    if (region->state == UNIX_REGION_NEW)
        u->region_work--;
    if (kld_unix_space_is_known(region) && region->state != UNIX_REGION_ADDING)
        region->state = UNIX_REGION_READY; /* there is something to drop */
    if (u->closing || u->state != UNIX_UP ||
        (region->state != UNIX_REGION_ADDING && region->state != UNIX_REGION_READY)) {
        region_free(region);
        return;
    }
    region->released = true;
    kld_unix_publications_end(u, region); /* it may have to wait, and is not to be found then */
    if (region->state == UNIX_REGION_READY) {
        u->region_work++;
        kld_unix_flush(u);
    }
}

void kld_unix_regions_lost(struct unix_connection *u) {
    u->region_work = 0;
    for (struct kld_region *base = u->base.regions, *next; base; base = next) {
        next = base->next;
        struct unix_region *region = (struct unix_region *)base;
        if (region->released) {
            region_free(region);
            continue;
        }
        if (region->state == UNIX_REGION_MAKING)
            continue;
        region->wire_id = 0;
        kld_unix_space_lost(region);
        region->looks = 0;
        /* A pool region that was never registered holds nothing that could be lost. */
        region->state = base->pool && region->state != UNIX_REGION_NEW &&
                                region->state != UNIX_REGION_ADDING &&
                                region->state != UNIX_REGION_BEHIND
                            ? UNIX_REGION_LOST
                            : UNIX_REGION_NEW;
        u->region_work += region->state == UNIX_REGION_NEW;
        if (region->state == UNIX_REGION_LOST)
            kld_error_set(&region->error, KLD_DEVICE_LOST,
                          "a pool region of the request was lost with its worker; create and fill "
                          "it again");
    }
}

static void left(struct unix_connection *u, struct unix_region *region) {
    region_free(region);
    for (struct kld_region *base = u->base.regions; base && u->regions_behind; base = base->next) {
        struct unix_region *behind = (struct unix_region *)base;
        if (behind->state != UNIX_REGION_BEHIND)
            continue;
        behind->state = UNIX_REGION_NEW;
        u->region_work++;
    }
    u->regions_behind = false;
}

static enum unix_sent send_add(struct unix_connection *u, const struct unix_region *region) {
    union kld_frame frame;
    uint64_t number = KLD_NUMBER_REGION | region->base.local_id;
    if (region->attached) {
        kld_frame_init(&frame, KLD_FRAME_ATTACH, number);
        memcpy(frame.as_ATTACH.name, region->name, sizeof frame.as_ATTACH.name);
        frame.as_ATTACH.uid = region->uid;
        return kld_unix_send(u, &frame, -1);
    }
    kld_frame_init(&frame, KLD_FRAME_REGION_ADD, number);
    struct kld_frame_region_add *add = &frame.as_REGION_ADD;
    add->kind = region->kind;
    add->bytes = region->room_bytes ? region->room_bytes : region->base.bytes;
    add->offset_bytes = region->offset_bytes;
    add->base_bytes = region->base_bytes;
    memcpy(add->ipc_handle, region->ipc_handle, sizeof add->ipc_handle);
    memcpy(add->device_uuid, region->device_uuid, sizeof add->device_uuid);
    return kld_unix_send(u, &frame, region->fd);
}

static enum unix_sent send_drop(struct unix_connection *u, const struct unix_region *region) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_REGION_DROP, KLD_NUMBER_IGNORED | region->base.local_id);
    frame.as_REGION_DROP.region = region->wire_id;
    return kld_unix_send(u, &frame, -1);
}

enum unix_sent kld_unix_regions_flush(struct unix_connection *u) {
    for (struct kld_region *base = u->base.regions, *next; base && u->region_work; base = next) {
        next = base->next;
        struct unix_region *region = (struct unix_region *)base;
        bool add = region->state == UNIX_REGION_NEW;
        bool drop = region->state == UNIX_REGION_READY && region->released;
        if (!add && !drop)
            continue;
        enum unix_sent sent = !add                              ? send_drop(u, region)
                              : kld_unix_space_is_known(region) ? kld_unix_space_send(u, region)
                                                                : send_add(u, region);
        if (sent != UNIX_SENT)
            return sent;
        u->region_work--;
        if (add)
            region->state = UNIX_REGION_ADDING;
        else
            left(u, region);
    }
    return UNIX_SENT;
}

static bool is_full(const struct kld_error *error) {
    return error->status == KLD_NO_MEMORY || error->status == KLD_TOO_LARGE;
}

bool kld_unix_region_answered(struct unix_connection *u, uint64_t local_id,
                              const union kld_frame *reply, const struct kld_error *error) {
    struct kld_region *base = u->base.regions;
    while (base && base->local_id != local_id)
        base = base->next;
    struct unix_region *region = (struct unix_region *)base;
    if (!region)
        return false;
    enum kld_frame_type expected = region->attached ? KLD_FRAME_ATTACHED : KLD_FRAME_REGION;
    if (region->state != UNIX_REGION_ADDING || (!error && reply->header.type != expected))
        return true;
    /* Not the region's fault: it is registered with the next worker. */
    if (error && (error->status == KLD_DEVICE_LOST || error->status == KLD_UNAVAILABLE)) {
        u->doomed = u->doomed || error->status == KLD_DEVICE_LOST;
        u->leaving = true;
        return true;
    }
    if (region->attached) {
        kld_unix_attach_answered(u, region, reply, error);
    } else if (error && is_full(error) && !region->released && region->growth != UNIX_REGION_LOST &&
               some_leave(u)) {
        region->state = UNIX_REGION_BEHIND;
        u->regions_behind = true;
    } else if (error && error->status == KLD_TOO_LARGE && kld_unix_stage_shrinks(u, region)) {
        region->state = UNIX_REGION_NEW;
        u->region_work++;
    } else if (error) {
        bool is_to_drop = kld_unix_space_is_known(region) && region->released;
        bool stands = kld_unix_space_refused(region) || is_to_drop;
        region->state = stands ? UNIX_REGION_READY : UNIX_REGION_FAILED;
        region->error = *error;
    } else {
        bool more = kld_unix_space_lacks_more(region, reply) && !region->released;
        region->state = more ? UNIX_REGION_NEW : UNIX_REGION_READY;
        region->wire_id = reply->as_REGION.region;
        u->region_work += more;
    }
    if (region->released && region->state == UNIX_REGION_READY)
        u->region_work++;
    else if (region->released)
        left(u, region);
    return true;
}

void kld_unix_region_wanted(struct unix_connection *u, struct kld_region *base) {
    struct unix_region *region = (struct unix_region *)base;
    if (!region || region->state != UNIX_REGION_FAILED || region->attached || region->released ||
        !is_full(&region->error))
        return;
    region->state = UNIX_REGION_NEW;
    u->region_work++;
}
