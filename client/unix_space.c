/* unix_space.c - regions in pieces of a Unix-socket connection: CUDA allocations that come as
 * descriptors, one behind the other in a range of addresses. Keeps a descriptor of each, because
 * the next worker is to have them again; when they are sent is unix_memory.c's to say. The thread
 * that owns the connection. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/unix.h"

#define PIECES_FIRST 16

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
    base->bytes = 0;
    return kld_unix_region_add_and_wait(region, err);
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
    return KLD_OK;
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
    if (region->state == UNIX_REGION_FAILED) {
        if (err)
            *err = region->error;
        return region->error.status;
    }
    enum kld_status status = piece_append(region, fd, bytes, err);
    if (status)
        return status;
    if (region->state == UNIX_REGION_READY)
        status = kld_unix_region_add_and_wait(region, err);
    else /* its pieces are on their way to the next worker, this one behind them */
        status = kld_unix_wait_state(
            (struct unix_connection *)base->connection, &region->state, &region->error,
            kld_now_ns() + base->connection->options.connect_timeout_ns, err);
    if (!status)
        base->bytes += bytes;
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
    return region->pieces_there < region->pieces_count;
}

void kld_unix_space_lost(struct unix_region *region) {
    region->pieces_there = 0;
    region->there_bytes = 0;
}

void kld_unix_space_free(struct unix_region *region) {
    while (region->pieces_count)
        close(region->pieces[--region->pieces_count].fd);
    free(region->pieces);
}
