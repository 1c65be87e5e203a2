/* region.c - registers, pins and releases the memory of a client.
 * Never maps or unmaps on the loop: that runs on uv's pool, and the loop acts on the outcome. Does
 * not read the memory. Worker process: loop thread, except add_work() and remove_work(). */
#include "server/worker/region.h"

#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "server/worker/core.h"
#include "server/worker/cuda_file.h"
#include "server/worker/kept.h"
#include "server/worker/publish.h"
#include "server/worker/quota.h"
#include "server/worker/space.h"

#define SLOT_MASK (((uint64_t)1 << KLD_REGION_SLOT_BITS) - 1)

/* ---- Checks ---------------------------------------------------------------------------------- */

static bool all_zero(const uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i])
            return false;
    return true;
}

static enum kld_status check_memfd(const struct kld_frame_region_add *frame, int fd,
                                   struct stat *ret_stat, struct kld_error *err) {
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return kld_error_set(err, KLD_INVALID,
                             "the descriptor is not a memfd; expected one with F_SEAL_SHRINK");
    if (!(seals & F_SEAL_SHRINK))
        return kld_error_set(err, KLD_INVALID,
                             "the memfd is not sealed; expected F_SEAL_SHRINK, so that it cannot "
                             "be cut short while it is in use");
    if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR ||
        (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)))
        return kld_error_set(err, KLD_INVALID,
                             "the memfd cannot be written; expected read and write access");
    /* Huge pages can be punched out of a sealed memfd and then not be there: a fault in us. */
    struct statfs system;
    if (fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC)
        return kld_error_set(err, KLD_INVALID,
                             "the memfd is made of huge pages; expected ordinary ones");
    if (fstat(fd, ret_stat) != 0)
        return kld_error_set(err, KLD_INVALID, "the memfd's size cannot be read");
    if ((uint64_t)ret_stat->st_size < frame->bytes)
        return kld_error_set(err, KLD_INVALID,
                             "the memfd has %" PRIu64 " bytes; the region needs %" PRIu64,
                             (uint64_t)ret_stat->st_size, frame->bytes);
    return KLD_OK;
}

enum kld_status kld_worker_other_device(const struct kld_worker *worker, const uint8_t *uuid,
                                        const char *what, const char *why, struct kld_error *err) {
    const struct kld_stats_page *page = worker->options.page;
    for (uint32_t i = 0; i < kld_stats_workers(page); i++)
        if (memcmp(page->device[i].uuid, uuid, KLD_WIRE_UUID_BYTES) == 0)
            return kld_error_set(err, KLD_INVALID,
                                 "%s on device %u, this socket is that of device %u%s; "
                                 "register it at the socket of device %u",
                                 what, i, worker->options.index, why, i);
    return kld_error_set(err, KLD_INVALID,
                         "%s on another device than the one of this socket, and on none that this "
                         "server has",
                         what);
}

static enum kld_status check_cuda(const struct kld_worker *worker,
                                  const struct kld_frame_region_add *frame, struct kld_error *err) {
    const struct kld_device *device = worker->device;
    uint64_t end;
    if (!device->info.imports_cuda_ipc)
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "CUDA handles need the cuda back end; this server runs on %s",
                             device->info.backend);
    if (memcmp(frame->device_uuid, device->info.uuid, KLD_WIRE_UUID_BYTES) != 0 &&
        !(worker->options.backend->reaches &&
          worker->options.backend->reaches(worker->device, frame->device_uuid)))
        return kld_worker_other_device(
            worker, frame->device_uuid, "the memory lies",
            worker->options.config->peer_access ? ", whose card cannot reach it" : "", err);
    if (frame->kind == KLD_REGION_CUDA_SPACE)
        return KLD_OK;
    if (__builtin_add_overflow(frame->offset_bytes, frame->bytes, &end) || end > frame->base_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "%" PRIu64 " bytes at offset %" PRIu64
                             " do not fit a base allocation of %" PRIu64 " bytes",
                             frame->bytes, frame->offset_bytes, frame->base_bytes);
    return KLD_OK;
}

/* One that says something for which its kind has no use; NULL: none. */
static const char *field_in_vain(const struct kld_frame_region_add *frame) {
    bool ipc = frame->kind == KLD_REGION_CUDA_IPC, cuda = ipc || frame->kind == KLD_REGION_CUDA_FD;
    if (!cuda && frame->offset_bytes)
        return "offset_bytes";
    if (!cuda && frame->base_bytes)
        return "base_bytes";
    if (!cuda && frame->kind != KLD_REGION_CUDA_SPACE &&
        !all_zero(frame->device_uuid, sizeof frame->device_uuid))
        return "device_uuid";
    return !ipc && !all_zero(frame->ipc_handle, sizeof frame->ipc_handle) ? "ipc_handle" : NULL;
}

static enum kld_status check_frame(const struct kld_frame_region_add *frame,
                                   struct kld_error *err) {
    if (frame->kind < KLD_REGION_MEMFD || frame->kind > KLD_REGION_CUDA_SPACE)
        return kld_error_set(err, KLD_INVALID,
                             "unknown region kind %u; known: 1 memfd, 2 CUDA IPC, 3 pool, "
                             "4 CUDA fd, 5 CUDA space",
                             frame->kind);
    if (frame->reserved != 0)
        return kld_error_set(err, KLD_INVALID, "REGION_ADD: reserved field is not 0");
    if (frame->bytes == 0)
        return kld_error_set(err, KLD_INVALID, "a region of 0 bytes; expected at least 1");
    const char *field = field_in_vain(frame);
    if (field)
        return kld_error_set(err, KLD_INVALID,
                             "REGION_ADD of kind %u: %s is not 0; expected 0, it is part of a CUDA "
                             "handle",
                             frame->kind, field);
    return KLD_OK;
}

/* ---- The session's table --------------------------------------------------------------------- */

/* Puts the region in a free place and gives it an id that this connection never had. */
static enum kld_status table_insert(struct kld_session *session, struct kld_region *region,
                                    struct kld_error *err) {
    uint32_t slot = 0;
    while (slot < session->regions_size && session->regions[slot])
        slot++;
    if (slot == session->regions_size) {
        uint32_t size = session->regions_size ? 2 * session->regions_size : 16;
        struct kld_region **table = realloc(session->regions, size * sizeof(struct kld_region *));
        if (!table)
            return kld_error_set(err, KLD_NO_MEMORY, "no memory for another region");
        memset(table + slot, 0, (size - slot) * sizeof(struct kld_region *));
        session->regions = table;
        session->regions_size = size;
    }
    session->regions[slot] = region;
    region->id = ++session->region_serial << KLD_REGION_SLOT_BITS | slot;
    return KLD_OK;
}

static void gauges_add(struct kld_region *region, int sign) {
    struct kld_session *session = region->session;
    struct kld_worker *worker = session->worker;
    /* Those of a space count from the start; of an attached one they are its owner's. */
    uint64_t bytes = region->room_bytes ? region->room_bytes : region->bytes;
    bytes = region->attached ? 0 : bytes;
    if (!region->attached && kld_quota_is_mapped(worker, region->kind)) {
        session->mapped += (uint32_t)sign;
        session->user->mapped += (uint64_t)(int64_t)sign;
        worker->mapped += session->is_gateway ? 0 : (uint64_t)(int64_t)sign;
    }
    session->regions_count += (uint32_t)sign;
    session->region_bytes += sign > 0 ? bytes : -bytes;
    worker->regions += (uint64_t)(int64_t)sign;
    worker->region_bytes += sign > 0 ? bytes : -bytes;
    if (region->kind == KLD_REGION_MEMFD && region->state != KLD_REGION_REMOVING)
        session->shared_bytes += sign > 0 ? bytes : -bytes;
    if (region->kind == KLD_REGION_POOL) {
        session->pool_bytes += sign > 0 ? bytes : -bytes;
        session->user->pool_bytes += sign > 0 ? bytes : -bytes;
        worker->pool_bytes += session->is_gateway ? 0 : sign > 0 ? bytes : -bytes;
    }
    kld_stats_set(worker->stats, KLD_STAT_worker_regions, worker->regions);
    kld_stats_set(worker->stats, KLD_STAT_worker_region_bytes, worker->region_bytes);
    kld_worker_pool_counted(worker);
}

static void forget(struct kld_region *region) {
    struct kld_session *session = region->session;
    gauges_add(region, -1);
    session->regions[region->id & SLOT_MASK] = NULL;
    kld_cuda_file_release(session, region->cuda_file);
    kld_space_forget(region);
    if (region->limit.user)
        kld_user_release(&session->worker->users, region->limit.user);
    free(region);
}

/* ---- Work on uv's pool ----------------------------------------------------------------------- */

static void add_work(uv_work_t *work) {
    struct kld_region *region = work->data;
    struct kld_device *device = region->session->worker->device;
    const struct kld_backend *backend = region->session->worker->options.backend;
    switch (region->kind) {
    case KLD_REGION_MEMFD:
        region->status =
            kld_mapping_acquire(&region->session->worker->mappings, region->fd, region->bytes,
                                region->limit.user ? &region->limit : NULL, &region->mapping,
                                &region->memory, &region->limited, &region->error);
        region->fd = -1;
        break;
    case KLD_REGION_CUDA_FD:
        region->status =
            backend->memory_import_fd(device, region->fd, region->base_bytes, region->space_offset,
                                      region->bytes, &region->memory, &region->error);
        break;
    case KLD_REGION_CUDA_IPC:
        region->status = backend->memory_import_ipc(device, region->ipc_handle, region->base_bytes,
                                                    region->space_offset, region->bytes,
                                                    &region->memory, &region->error);
        break;
    case KLD_REGION_CUDA_SPACE:
        region->status =
            backend->memory_reserve(device, region->room_bytes, &region->memory, &region->error);
        break;
    default:
        region->status =
            backend->memory_alloc(device, region->bytes, &region->memory, &region->error);
    }
    if (region->fd >= 0)
        kld_strays_close(region->session->worker->strays, region->session->uid, &region->fd, 1);
    region->fd = -1;
}

static void remove_work(uv_work_t *work) {
    struct kld_region *region = work->data;
    struct kld_worker *worker = region->session->worker;
    region->status = region->mapping ? kld_mapping_release(&worker->mappings, region->mapping)
                                     : worker->options.backend->memory_free(region->memory);
}

static void task_ended(struct kld_session *session) {
    session->tasks--;
    kld_session_poll(session);
    kld_session_collect(session);
}

static void remove_after(uv_work_t *work, int cancelled) {
    struct kld_region *region = work->data;
    struct kld_session *session = region->session;
    enum kld_status status = region->status;
    (void)cancelled; /* never asked for */
    forget(region);
    if (status == KLD_DEVICE_LOST) { /* who asks next would be the first to be told */
        struct kld_error error;
        kld_error_set(&error, status, "the memory of a region could not be let go of");
        kld_core_device_lost(session->worker, &error);
    }
    task_ended(session);
}

/* CONDEMNED and without users -> REMOVING. */
static void remove_unused(struct kld_region *region) {
    if (region->state != KLD_REGION_CONDEMNED || region->users)
        return;
    struct kld_session *session = region->session;
    /* Its owner may share as much again: what all share counts it until that begins. */
    session->shared_bytes -= region->kind == KLD_REGION_MEMFD ? region->bytes : 0;
    region->state = KLD_REGION_REMOVING;
    session->tasks++;
    kld_task_queue(&region->task, session->worker, session->user, remove_work, remove_after);
}

static bool same_memory(const struct kld_region *a, const struct kld_region *b) {
    if (a->memory == b->memory)
        return true;
    if (a->kind != b->kind)
        return false;
    switch (a->kind) {
    case KLD_REGION_MEMFD: return a->inode == b->inode && a->inode_device == b->inode_device;
    case KLD_REGION_CUDA_IPC:
        return memcmp(a->ipc_handle, b->ipc_handle, sizeof a->ipc_handle) == 0;
    case KLD_REGION_CUDA_FD: return a->cuda_file && a->cuda_file == b->cuda_file;
    default: return false;
    }
}

/* Memory that another LIVE region of this client shows too gets that one's space. */
static void find_space(struct kld_region *region) {
    struct kld_session *session = region->session;
    region->space = region->id;
    for (uint32_t i = 0; i < session->regions_size; i++) {
        const struct kld_region *other = session->regions[i];
        if (other && other != region && other->state == KLD_REGION_LIVE && other->memory &&
            same_memory(region, other)) {
            region->space = other->space;
            session->aliased = true;
            return;
        }
    }
}

/* Not for what would never fit: nobody is in the way of that. */
static void note_refusal(const struct kld_region *region) {
    const struct kld_worker *worker = region->session->worker;
    uint64_t most = worker->device->info.pool_bytes_max;
    if (region->kind == KLD_REGION_POOL && region->status == KLD_NO_MEMORY &&
        (!most || region->bytes <= most))
        atomic_store(&worker->shown->pool_refused_ns, kld_worker_now_ns());
}

void kld_worker_region_reply(const struct kld_region *region) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_REGION, region->request);
    frame.as_REGION.region = region->id;
    frame.as_REGION.bytes = region->bytes;
    kld_session_reply(region->session, &frame);
}

static void add_after(uv_work_t *work, int cancelled) {
    struct kld_region *region = work->data;
    struct kld_session *session = region->session;
    (void)cancelled;
    if (region->kind == KLD_REGION_CUDA_IPC)
        kld_worker_handle_came(session->worker);
    if (region->status == KLD_NO_MEMORY && kld_kept_wait(region))
        return; /* is tried again */
    kld_session_awaited(session);
    if (region->status != KLD_OK) {
        struct kld_error error = region->error;
        enum kld_status status = region->status;
        if (status != KLD_DEVICE_LOST && !region->limited) /* the one is told below */
            kld_stats_fault(session->worker->stats, status);
        note_refusal(region);
        kld_session_reply_error(session, region->request, &error);
        forget(region);
        if (status == KLD_DEVICE_LOST)
            kld_core_device_lost(session->worker, &error);
        task_ended(session);
        return;
    }
    if (session->state == KLD_SESSION_CLOSING) {
        region->state = KLD_REGION_CONDEMNED;
        remove_unused(region);
    } else {
        find_space(region);
        region->state = KLD_REGION_LIVE;
        if (region->kind == KLD_REGION_CUDA_IPC || region->kind == KLD_REGION_CUDA_FD ||
            region->kind == KLD_REGION_CUDA_SPACE)
            kld_worker_shares_card(session->worker);
        kld_worker_pool_counted(session->worker);
        kld_worker_region_reply(region);
    }
    task_ended(session);
}

void kld_worker_region_add_again(struct kld_region *region) {
    kld_task_queue(&region->task, region->session->worker, region->session->user, add_work,
                   add_after);
}

/* ---- What sessions and requests call --------------------------------------------------------- */

enum kld_status kld_worker_region_add(struct kld_session *session,
                                      const struct kld_frame_region_add *frame, int fd,
                                      struct kld_error *err) {
    struct kld_worker *worker = session->worker;
    struct stat stat = {0};
    enum kld_status status;
    if ((status = check_frame(frame, err)) ||
        (status = kld_quota_check(session, frame->kind, frame->bytes, err)))
        return status;
    if (frame->kind == KLD_REGION_MEMFD)
        status = check_memfd(frame, fd, &stat, err);
    else if (frame->kind != KLD_REGION_POOL)
        status = check_cuda(worker, frame, err);
    if (!status && frame->kind == KLD_REGION_CUDA_FD)
        status = kld_cuda_file_check(fd, err);
    if (status)
        return status;
    struct kld_region *region = calloc(1, sizeof *region);
    if (!region)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for another region");
    region->session = session;
    region->state = KLD_REGION_ADDING;
    region->request = frame->header.request;
    region->kind = frame->kind;
    region->bytes = frame->kind == KLD_REGION_CUDA_SPACE ? 0 : frame->bytes;
    region->room_bytes = frame->bytes - region->bytes;
    region->space_offset = frame->offset_bytes;
    region->base_bytes = frame->base_bytes;
    memcpy(region->ipc_handle, frame->ipc_handle, sizeof region->ipc_handle);
    region->inode_device = stat.st_dev;
    region->inode = stat.st_ino;
    region->fd = fd;
    region->task.work.data = region;
    if ((status = table_insert(session, region, err))) {
        free(region);
        return status;
    }
    if (!session->is_gateway) {
        region->limit = kld_quota_mapping_limit(session);
        kld_user_hold(&worker->users, region->limit.user); /* while the pool may look at it */
    }
    gauges_add(region, 1);
    if (frame->kind == KLD_REGION_CUDA_FD)
        region->cuda_file = kld_cuda_file_acquire(session, fd);
    if ((status = kld_space_check_apart(session, region->cuda_file, err))) {
        forget(region);
        return status;
    }
    session->tasks++;
    kld_session_awaits(session);
    kld_task_queue(&region->task, worker, session->user, add_work, add_after);
    return KLD_OK;
}

struct kld_region *kld_worker_region_find(struct kld_session *session, uint64_t id,
                                          const char *what, struct kld_error *err) {
    uint64_t slot = id & SLOT_MASK;
    struct kld_region *region = slot < session->regions_size ? session->regions[slot] : NULL;
    bool live = region && region->id == id && region->state == KLD_REGION_LIVE;
    if (live && (!region->attached || region->publication))
        return region;
    if (live)
        kld_error_set(err, KLD_GONE,
                      "%s: the tensor behind region %" PRIu64
                      " is no longer published; its owner took it back or is gone",
                      what, id);
    else
        kld_error_set(err, KLD_NOT_FOUND, "%s: no region %" PRIu64 " on this connection", what, id);
    return NULL;
}

/* No request can name it from here on. */
static void condemn(struct kld_region *region) {
    if (region->attached) {
        if (region->publication)
            kld_worker_region_orphan(region);
        forget(region);
        return;
    }
    if (region->publications)
        kld_publication_end_region(region);
    region->state = KLD_REGION_CONDEMNED;
    remove_unused(region);
}

enum kld_status kld_worker_region_drop(struct kld_session *session, uint64_t id,
                                       struct kld_error *err) {
    uint64_t slot = id & SLOT_MASK;
    struct kld_region *region = slot < session->regions_size ? session->regions[slot] : NULL;
    if (!region || region->id != id || region->state != KLD_REGION_LIVE)
        return kld_error_set(err, KLD_NOT_FOUND,
                             "REGION_DROP: no region %" PRIu64 " on this connection", id);
    condemn(region);
    return KLD_OK;
}

void kld_worker_region_drop_all(struct kld_session *session) {
    for (uint32_t i = 0; i < session->regions_size; i++)
        if (session->regions[i] && session->regions[i]->state == KLD_REGION_LIVE)
            condemn(session->regions[i]);
}

/* ---- Memory of others ------------------------------------------------------------------------ */

enum kld_status kld_worker_region_attach(struct kld_session *session,
                                         struct kld_publication *publication,
                                         struct kld_region **ret_region, struct kld_error *err) {
    const struct kld_region *owner = publication->region;
    enum kld_status status = kld_quota_check_count(session, err);
    if (status)
        return status;
    struct kld_region *region = calloc(1, sizeof *region);
    if (!region)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for another region");
    region->session = session;
    region->kind = owner->kind;
    region->attached = true;
    region->bytes = publication->bytes;
    region->memory = owner->memory;
    region->memory_offset = publication->offset_bytes;
    region->space_offset = owner->space_offset + publication->offset_bytes;
    memcpy(region->ipc_handle, owner->ipc_handle, sizeof region->ipc_handle);
    region->inode_device = owner->inode_device;
    region->inode = owner->inode;
    region->fd = -1;
    if ((status = table_insert(session, region, err))) {
        free(region);
        return status;
    }
    region->publication = publication;
    TAILQ_INSERT_TAIL(&publication->attached, region, in_publication);
    gauges_add(region, 1);
    find_space(region);
    region->state = KLD_REGION_LIVE;
    *ret_region = region;
    return KLD_OK;
}

void kld_worker_region_orphan(struct kld_region *region) {
    TAILQ_REMOVE(&region->publication->attached, region, in_publication);
    region->publication = NULL;
    region->memory = NULL;
}

struct kld_region *kld_worker_region_owner(struct kld_region *region) {
    return region->attached ? region->publication->region : region;
}

void kld_worker_region_acquire(struct kld_region *region) { region->users++; }

void kld_worker_region_release(struct kld_region *region) {
    region->users--;
    remove_unused(region);
}
