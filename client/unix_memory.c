/* unix_memory.c - shared memory of a Unix-socket connection: regions (made, registered, registered
 * again after a lost worker, dropped) and the staging that plain-pointer tensors travel through.
 * Sends only REGION_ADD and REGION_DROP. The thread that owns the connection. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/unix.h"

#define PAGE_BYTES 4096ull
#define PART_ALIGN 4096ull /* of a call's part; its tensors start at multiples of TENSOR_ALIGN */
#define TENSOR_ALIGN 256ull
#define STAGE_BYTES_MIN (1ull << 20)

static struct unix_connection *connection_of(const struct kld_region *region) {
    return (struct unix_connection *)region->connection;
}

static uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

/* ---- Regions -------------------------------------------------------------------------------- */

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
    if (u->base.region_count > u->welcome.regions_max)
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

static void memfd_add_later(struct unix_region *region) {
    struct stat about;
    if (fstat(region->fd, &about) == 0) {
        region->inode_device = about.st_dev;
        region->inode = about.st_ino;
    }
    kld_unix_region_add_later(region);
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

enum kld_status kld_unix_region_create(struct kld_region *base, struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    enum kld_status status = kld_unix_region_begin(region, KLD_REGION_MEMFD, err);
    if (status)
        return status;
    region->fd = memfd_create("kld-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (region->fd < 0 || ftruncate(region->fd, (off_t)round_up(base->bytes, PAGE_BYTES)) != 0 ||
        fcntl(region->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "cannot make shared memory of %llu bytes",
                             (unsigned long long)base->bytes);
    status = map(region, err);
    if (!status)
        memfd_add_later(region);
    return status;
}

enum kld_status kld_unix_region_import_memfd(struct kld_region *base, int fd,
                                             struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    enum kld_status status = kld_unix_region_begin(region, KLD_REGION_MEMFD, err);
    if (status)
        return status;
    region->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (region->fd < 0)
        return kld_error_set(err, KLD_NO_MEMORY, "no file descriptors left for a region");
    memfd_add_later(region);
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
        return kld_error_set(err, KLD_INVALID, "not a file descriptor, or none are left");
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

/* The server counts what was released until it is told, which it is once it has answered: to
 * register memory may take it long. Who was refused meanwhile may have room behind that. */
static bool some_leave(const struct unix_connection *u) {
    const struct kld_region *base = u->base.regions;
    while (base && !((const struct unix_region *)base)->released)
        base = base->next;
    return base != NULL;
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

/* A stage is made larger than what is asked for needs; the server may not share as much with this
 * connection, which WELCOME does not say. So much of it as the calls in it need may do. */
static bool stage_shrinks(struct unix_connection *u, struct unix_region *region) {
    uint64_t bytes = 0;
    int i = 0;
    while (i < KLD_STAGES_MAX && u->stages[i].region != region)
        i++;
    if (i == KLD_STAGES_MAX || region->released)
        return false;
    for (const struct unix_call *call = u->stages[i].parts; call; call = call->stage_next)
        bytes = call->stage_offset + call->stage_bytes; /* by offset: the last one counts */
    if (bytes == 0 || bytes >= region->base.bytes)
        return false;
    u->stage_bytes_total -= region->base.bytes - bytes;
    region->base.bytes = bytes;
    return true;
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
    } else if (error && error->status == KLD_TOO_LARGE && stage_shrinks(u, region)) {
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

/* ---- Staging -------------------------------------------------------------------------------- */

static bool staged(const struct kld_call *call, int slot) {
    return call->request.op.tensor[slot].dtype && call->request.bytes[slot].data;
}

/* First fit among the parts of a stage, which are sorted by offset. */
static bool part_take(struct unix_stage *stage, struct unix_call *call, uint64_t bytes) {
    if (!stage->region || stage->region->state == UNIX_REGION_FAILED ||
        stage->region->base.bytes < bytes)
        return false;
    uint64_t at = 0;
    struct unix_call **link = &stage->parts;
    while (*link && (*link)->stage_offset - at < bytes) {
        at = (*link)->stage_offset + (*link)->stage_bytes;
        link = &(*link)->stage_next;
    }
    if (!*link && stage->region->base.bytes - at < bytes)
        return false;
    call->stage = stage;
    call->stage_offset = at;
    call->stage_bytes = bytes;
    call->stage_next = *link;
    *link = call;
    return true;
}

static void stage_close(struct unix_connection *u, struct unix_stage *stage) {
    u->stage_bytes_total -= stage->region->base.bytes;
    struct kld_region *region = &stage->region->base;
    stage->region = NULL;
    kld_region_drop(region);
}

static uint64_t limit_of(const struct unix_connection *u) {
    uint64_t limit = u->base.options.staging_bytes_max;
    return u->welcomed && u->welcome.region_bytes_max < limit ? u->welcome.region_bytes_max : limit;
}

/* A new stage, twice the largest so far; idle ones, all smaller, make room for it. */
static enum kld_status stage_open(struct unix_connection *u, uint64_t bytes,
                                  struct unix_stage **ret_stage, struct kld_error *err) {
    uint64_t size = STAGE_BYTES_MIN, most = limit_of(u);
    struct unix_stage *unused = NULL;
    for (int i = 0; i < KLD_STAGES_MAX; i++) {
        struct unix_stage *stage = &u->stages[i];
        /* One that was refused is no measure: it may have been too large. */
        while (stage->region && stage->region->state != UNIX_REGION_FAILED &&
               size < 2 * stage->region->base.bytes)
            size *= 2;
        if (stage->region && !stage->parts)
            stage_close(u, stage);
        if (!stage->region)
            unused = stage;
    }
    while (size < bytes)
        size *= 2;
    uint64_t total = u->base.options.staging_bytes_max;
    uint64_t left = total - u->stage_bytes_total;
    size = size > most ? most : size;
    size = size > left ? left & ~(PAGE_BYTES - 1) : size;
    if (!unused || size < bytes)
        return kld_error_set(err, KLD_BUSY,
                             "staging memory is taken by other requests in flight: %llu of %llu "
                             "bytes; wait for one, use regions or raise staging_bytes_max",
                             (unsigned long long)u->stage_bytes_total, (unsigned long long)total);
    struct kld_region *region;
    enum kld_status status = kld_region_create(&u->base, size, &region, err);
    if (status)
        return status;
    unused->region = (struct unix_region *)region;
    unused->parts = NULL;
    u->stage_bytes_total += size;
    *ret_stage = unused;
    return KLD_OK;
}

enum kld_status kld_unix_stage_put(struct unix_connection *u, struct unix_call *call,
                                   struct kld_error *err) {
    struct kld_call *base = &call->base;
    uint64_t bytes = 0, most = limit_of(u);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *at = &base->geometry.slot[slot];
        if (!staged(base, slot))
            continue;
        call->staged_at[slot] = bytes;
        /* rows * row_bytes is at most 2^43; nine of them do not overflow. */
        bytes += round_up(at->rows * at->row_bytes, TENSOR_ALIGN);
    }
    if (bytes == 0)
        return KLD_OK;
    bytes = round_up(bytes, PART_ALIGN);
    if (bytes > most)
        return kld_error_set(
            err, KLD_TOO_LARGE,
            "tensors in plain memory need %llu bytes of staging; at most %llu: put "
            "them into regions (kld_region_create) or raise staging_bytes_max",
            (unsigned long long)bytes, (unsigned long long)most);
    bool found = false;
    for (int i = 0; i < KLD_STAGES_MAX && !found; i++)
        found = part_take(&u->stages[i], call, bytes);
    if (!found) {
        struct unix_stage *stage = NULL;
        enum kld_status status = stage_open(u, bytes, &stage, err);
        if (status)
            return status;
        (void)part_take(stage, call, bytes); /* an empty stage of at least that size */
    }
    call->stage->region->base.users++;
    char *data = (char *)call->stage->region->base.data + call->stage_offset;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *at = &base->geometry.slot[slot];
        if (staged(base, (int)slot) && !kld_slot_is_output(slot))
            kld_rows_copy(data + call->staged_at[slot], at->row_bytes,
                          base->request.bytes[slot].data, at->stride_bytes, at->row_bytes,
                          at->rows);
    }
    return KLD_OK;
}

void kld_unix_stage_get(struct unix_call *call) {
    if (!call->stage)
        return;
    const char *data = (const char *)call->stage->region->base.data + call->stage_offset;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const struct kld_slot_geometry *at = &call->base.geometry.slot[slot];
        if (staged(&call->base, (int)slot) && kld_slot_is_output(slot))
            kld_rows_copy(call->base.request.bytes[slot].data, at->stride_bytes,
                          data + call->staged_at[slot], at->row_bytes, at->row_bytes, at->rows);
    }
}

void kld_unix_fence(struct unix_connection *u, struct unix_call *call,
                    const struct kld_error *error) {
    struct kld_call *base = &call->base;
    struct kld_region *region = &call->stage->region->base;
    if (!call->abandoned)
        kld_call_end(&u->base, base, error->status, error);
    u->cancels -= call->cancel_wanted;
    call->cancel_wanted = false;
    call->abandoned = call->cancelled = call->fence = true;
    kld_call_drop_regions(base);
    base->copy = (struct kld_copy_request){.destination = region,
                                           .source = region,
                                           .destination_offset_bytes = call->stage_offset,
                                           .source_offset_bytes = call->stage_offset + 1,
                                           .bytes = 1,
                                           .stream = base->request.stream};
    kld_call_hold_regions(base);
    base->deadline_ns = KLD_NEVER;
    kld_call_unlink(base);
    kld_call_append(&u->queued, base);
}

void kld_unix_stage_free(struct unix_call *call) {
    if (!call->stage)
        return;
    struct unix_call **link = &call->stage->parts;
    while (*link != call)
        link = &(*link)->stage_next;
    *link = call->stage_next;
    call->stage->region->base.users--;
    call->stage = NULL;
}
