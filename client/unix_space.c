/* unix_space.c - regions in pieces of a Unix-socket connection: CUDA allocations that come as
 * descriptors, one behind the other in a range of addresses. Keeps a descriptor of each, because
 * the next worker is to have them again; when they are sent is unix_memory.c's to say. The thread
 * that owns the connection. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "client/unix.h"

#define PIECES_FIRST 16
#define DESCRIPTORS_SHARE 2 /* one in so many of the process's: a connection's pieces at most */

enum kld_status kld_unix_region_reserve_cuda(struct kld_region *base, const uint8_t *device_uuid,
                                             struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    struct unix_connection *u = (struct unix_connection *)base->connection;
    enum kld_status status = kld_unix_region_begin(region, KLD_REGION_CUDA_SPACE, err);
    if (status || (status = kld_unix_go_to_memory(u, device_uuid, region, err)))
        return status;
    if (!(u->welcome.flags & KLD_WELCOME_SPACES))
        return kld_error_set(err, KLD_UNIMPLEMENTED,
                             "this server has no regions in pieces: it computes on a CPU, or is of "
                             "an older release");
    memcpy(region->device_uuid, device_uuid, sizeof region->device_uuid);
    region->room_bytes = base->bytes;
    region->growth = UNIX_REGION_READY;
    base->bytes = 0;
    return kld_unix_region_add_and_wait(region, err);
}

/* The process is the user's, and has other files to open. */
static enum kld_status check_descriptors(const struct unix_connection *u, struct kld_error *err) {
    uint64_t pieces = 0;
    struct rlimit limit;
    for (const struct kld_region *base = u->base.regions; base; base = base->next)
        pieces += ((const struct unix_region *)base)->pieces_count;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && pieces >= limit.rlim_cur / DESCRIPTORS_SHARE)
        return kld_error_set(err, KLD_NO_MEMORY,
                             "the regions of this connection have %llu pieces with a file "
                             "descriptor each, of %llu that the process may have open",
                             (unsigned long long)pieces, (unsigned long long)limit.rlim_cur);
    return KLD_OK;
}

static enum kld_status piece_append(struct unix_region *region, int fd, uint64_t bytes,
                                    struct kld_error *err) {
    if (region->pieces_count == region->pieces_size) {
        uint32_t size = region->pieces_size ? 2 * region->pieces_size : PIECES_FIRST;
        struct unix_piece *pieces = realloc(region->pieces, size * sizeof *pieces);
        if (!pieces)
            return kld_error_set(err, KLD_NO_MEMORY, "no memory for another piece of a region");
        region->pieces = pieces;
        region->pieces_size = size;
    }
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return errno == EBADF ? kld_error_set(err, KLD_INVALID, "not a file descriptor")
                              : kld_error_set(err, KLD_NO_MEMORY, "no file descriptors are left");
    region->pieces[region->pieces_count++] = (struct unix_piece){copy, bytes};
    region->growth = UNIX_REGION_ADDING;
    return KLD_OK;
}

static void piece_remove(struct unix_region *region) {
    close(region->pieces[--region->pieces_count].fd);
}

/* Nobody waits for the newest any more: it is taken back, unless the worker may have it. */
static void piece_give_up(struct unix_connection *u, struct unix_region *region) {
    bool known = kld_unix_space_is_known(region);
    if (known && region->state == UNIX_REGION_ADDING &&
        region->pieces_there + 1 == region->pieces_count) {
        region->growth = UNIX_REGION_LOST;
        return;
    }
    piece_remove(region);
    region->growth = UNIX_REGION_READY;
    if (!known || region->pieces_there < region->pieces_count)
        return;
    u->region_work -= region->state == UNIX_REGION_NEW;
    region->state = UNIX_REGION_READY;
    kld_unix_flush(u); /* for what waits for the region */
}

enum kld_status kld_unix_region_grow_cuda_fd(struct kld_region *base, int fd, uint64_t bytes,
                                             struct kld_error *err) {
    struct unix_region *region = (struct unix_region *)base;
    if (!region->room_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "only what kld_region_reserve_cuda() made grows in pieces");
    if (bytes == 0 || bytes > region->room_bytes - base->bytes)
        return kld_error_set(err, KLD_INVALID,
                             "a piece of %llu bytes; the region has %llu and may grow to %llu",
                             (unsigned long long)bytes, (unsigned long long)base->bytes,
                             (unsigned long long)region->room_bytes);
    struct unix_connection *u = (struct unix_connection *)base->connection;
    kld_unix_region_wanted(u, base);
    if (region->state == UNIX_REGION_FAILED) {
        if (err)
            *err = region->error;
        return region->error.status;
    }
    if (region->growth == UNIX_REGION_LOST)
        return kld_error_set(err, KLD_UNAVAILABLE,
                             "the piece before this one was not answered in time: whether the "
                             "server has it is not known, so the region grows no more");
    enum kld_status status = check_descriptors(u, err);
    if (status || (status = piece_append(region, fd, bytes, err)))
        return status;
    if (region->state == UNIX_REGION_READY)
        kld_unix_region_add_later(region);
    else
        kld_unix_flush(u); /* it comes behind those that are on their way */
    status = kld_unix_wait_state(u, &region->growth, &region->error, kld_unix_patience(u), err);
    if (!status)
        base->bytes += bytes;
    else if (region->growth == UNIX_REGION_ADDING)
        piece_give_up(u, region);
    return status;
}

bool kld_unix_space_is_known(const struct unix_region *region) {
    return region->room_bytes && region->wire_id;
}

enum unix_sent kld_unix_space_send(struct unix_connection *u, const struct unix_region *region) {
    const struct unix_piece *piece = &region->pieces[region->pieces_there];
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_REGION_GROW, KLD_NUMBER_REGION | region->base.local_id);
    frame.as_REGION_GROW.region = region->wire_id;
    frame.as_REGION_GROW.offset_bytes = region->there_bytes;
    frame.as_REGION_GROW.bytes = piece->bytes;
    return kld_unix_send(u, &frame, piece->fd);
}

bool kld_unix_space_lacks_more(struct unix_region *region, const union kld_frame *reply) {
    if (kld_unix_space_is_known(region)) /* else it is the answer to REGION_ADD */
        region->pieces_there++;
    region->there_bytes = reply->as_REGION.bytes;
    bool more = region->pieces_there < region->pieces_count;
    if (!more && region->growth == UNIX_REGION_ADDING)
        region->growth = UNIX_REGION_READY;
    return more;
}

bool kld_unix_space_refused(struct unix_region *region) {
    if (region->growth != UNIX_REGION_ADDING && region->growth != UNIX_REGION_LOST)
        return false;
    bool newest =
        kld_unix_space_is_known(region) && region->pieces_there + 1 == region->pieces_count;
    piece_remove(region);
    region->growth = region->growth == UNIX_REGION_ADDING ? UNIX_REGION_FAILED : UNIX_REGION_READY;
    return newest;
}

void kld_unix_space_lost(struct unix_region *region) {
    if (region->growth == UNIX_REGION_LOST) {
        piece_remove(region);
        region->growth = UNIX_REGION_READY;
    }
    region->pieces_there = 0;
    region->there_bytes = 0;
}

void kld_unix_space_free(struct unix_region *region) {
    while (region->pieces_count)
        piece_remove(region);
    free(region->pieces);
}
