/* region.c - the regions of a connection, its lists of calls, its timer: the bookkeeping that every
 * kind of connection shares. No tensor byte moves here but in kld_rows_copy(). The thread that owns
 * the connection. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "client/connection.h"

uint64_t kld_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint64_t kld_patience(const struct kld_connection *connection, const struct kld_call *call,
                      uint64_t since_ns) {
    if (connection->member) {
        uint64_t until = since_ns + KLD_MEMBER_RECONNECT_NS_MAX;
        return until < call->deadline_ns ? until : call->deadline_ns;
    }
    /* What was lost before it was asked for has waited for nobody yet. */
    uint64_t from = since_ns > call->started_ns ? since_ns : call->started_ns;
    return call->deadline_ns != KLD_NEVER ? call->deadline_ns : from + KLD_RECONNECT_NS_MAX;
}

void kld_connection_arm(struct kld_connection *connection, uint64_t at_ns) {
    if (at_ns >= connection->armed_ns)
        return;
    uint64_t at = at_ns ? at_ns : 1; /* 0 would disarm */
    struct itimerspec when = {
        .it_value = {.tv_sec = (time_t)(at / 1000000000), .tv_nsec = (long)(at % 1000000000)}};
    timerfd_settime(connection->timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
    connection->armed_ns = at_ns;
}

enum kld_status kld_connection_watch(struct kld_connection *connection, int fd, uint64_t tag,
                                     uint32_t events, struct kld_error *err) {
    struct epoll_event event = {.events = events, .data.u64 = tag};
    if (epoll_ctl(connection->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0 &&
        epoll_ctl(connection->epoll_fd, EPOLL_CTL_MOD, fd, &event) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "cannot watch a file descriptor");
    return KLD_OK;
}

enum kld_status kld_socket_lacks(int error_number, struct kld_error *err) {
    switch (error_number) {
    case EMFILE:
        return kld_error_set(err, KLD_NO_MEMORY, "no file descriptors left (RLIMIT_NOFILE)");
    case ENFILE:
        return kld_error_set(err, KLD_NO_MEMORY,
                             "no file descriptors left on this host (fs.file-max)");
    case ENOMEM:
    case ENOBUFS: return kld_error_set(err, KLD_NO_MEMORY, "no memory left for a socket");
    default: return KLD_OK;
    }
}

void kld_eventfd_raise(int fd) {
    uint64_t one = 1;
    /* A full counter is as good as one more: the descriptor is readable either way. */
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void kld_counter_drain(int fd) {
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

/* ---- Calls ---------------------------------------------------------------------------------- */

void kld_call_append(struct kld_call_list *list, struct kld_call *call) {
    call->list = list;
    call->next = NULL;
    call->previous = list->last;
    if (list->last)
        list->last->next = call;
    else
        list->first = call;
    list->last = call;
    list->count++;
}

void kld_call_unlink(struct kld_call *call) {
    struct kld_call_list *list = call->list;
    if (!list)
        return;
    if (call->previous)
        call->previous->next = call->next;
    else
        list->first = call->next;
    if (call->next)
        call->next->previous = call->previous;
    else
        list->last = call->previous;
    call->next = call->previous = NULL;
    call->list = NULL;
    list->count--;
}

static void region_user_drop(struct kld_region *region) {
    if (region && --region->users == 0 && region->dropped)
        region->connection->transport->region_release(region);
}

void kld_call_hold_regions(struct kld_call *call) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (call->request.bytes[slot].region)
            call->request.bytes[slot].region->users++;
    if (call->copy.destination) {
        call->copy.destination->users++;
        call->copy.source->users++;
    }
    if (call->request.wait)
        call->request.wait->users++;
    if (call->request.record)
        call->request.record->users++;
}

void kld_call_drop_regions(struct kld_call *call) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        region_user_drop(call->request.bytes[slot].region);
        call->request.bytes[slot].region = NULL;
    }
    region_user_drop(call->copy.destination);
    region_user_drop(call->copy.source);
    call->copy.destination = call->copy.source = NULL;
    kld_event_user_drop(call->request.wait);
    kld_event_user_drop(call->request.record);
    call->request.wait = call->request.record = NULL;
}

bool kld_call_uses_pool(const struct kld_call *call) {
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (call->request.bytes[slot].region && call->request.bytes[slot].region->pool)
            return true;
    return call->copy.destination && (call->copy.destination->pool || call->copy.source->pool);
}

/* ---- Regions -------------------------------------------------------------------------------- */

enum kld_status kld_region_open(struct kld_connection *connection, uint64_t bytes,
                                struct kld_region **ret_region, struct kld_error *err) {
    if (bytes == 0 || bytes > INT64_MAX)
        return kld_error_set(err, KLD_INVALID,
                             "a region has at least one byte and fewer than 2^63");
    struct kld_region *region = calloc(1, connection->transport->region_bytes);
    if (!region)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a region");
    region->connection = connection;
    region->bytes = bytes;
    region->local_id = ++connection->region_last_id;
    region->next = connection->regions;
    if (region->next)
        region->next->previous = region;
    connection->regions = region;
    connection->region_count++;
    *ret_region = region;
    return KLD_OK;
}

void kld_region_free(struct kld_region *region) {
    struct kld_connection *connection = region->connection;
    if (region->previous)
        region->previous->next = region->next;
    else
        connection->regions = region->next;
    if (region->next)
        region->next->previous = region->previous;
    connection->region_count--;
    free(region);
}

void kld_region_is_of(struct kld_region *region, int memfd) {
    struct stat about;
    if (fstat(memfd, &about) != 0)
        return;
    region->inode_device = about.st_dev;
    region->inode = about.st_ino;
}

bool kld_region_is_same(const struct kld_region *a, const struct kld_region *b) {
    return a == b || (a->inode && a->inode == b->inode && a->inode_device == b->inode_device);
}

enum kld_status kld_region_made(enum kld_status status, struct kld_region *region,
                                struct kld_region **ret_region) {
    if (status) {
        region->dropped = true;
        region->connection->transport->region_release(region);
        return status;
    }
    *ret_region = region;
    return KLD_OK;
}

enum kld_status kld_region_create(struct kld_connection *connection, uint64_t bytes,
                                  struct kld_region **ret_region, struct kld_error *err) {
    struct kld_region *region = NULL;
    enum kld_status status = kld_region_open(connection, bytes, &region, err);
    return status ? status
                  : kld_region_made(connection->transport->region_create(region, err), region,
                                    ret_region);
}

enum kld_status kld_memfd_check(int fd, uint64_t bytes, struct kld_error *err) {
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS), flags = seals < 0 ? 0 : fcntl(fd, F_GETFL);
    if ((seals < 0 && errno != EINVAL && errno != EBADF) || flags < 0)
        return kld_error_set(err, KLD_INTERNAL, "cannot look at the memfd: %s", strerror(errno));
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return kld_error_set(err, KLD_INVALID,
                             "the descriptor is not a memfd sealed with F_SEAL_SHRINK");
    if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) ||
        (flags & O_ACCMODE) != O_RDWR) /* the server asks for it, and a mapping here */
        return kld_error_set(err, KLD_INVALID,
                             "the memfd cannot be written; expected read and write access, and "
                             "neither F_SEAL_WRITE nor F_SEAL_FUTURE_WRITE");
    if (fstat(fd, &about) != 0 || (uint64_t)about.st_size < bytes)
        return kld_error_set(err, KLD_INVALID, "the memfd is shorter than the %llu bytes named",
                             (unsigned long long)bytes);
    return KLD_OK;
}

enum kld_status kld_region_import_memfd(struct kld_connection *connection, int fd, uint64_t bytes,
                                        struct kld_region **ret_region, struct kld_error *err) {
    if (!connection->transport->region_import_memfd)
        return kld_unimplemented(connection, "memfd regions", err);
    struct kld_region *region = NULL;
    enum kld_status status = kld_memfd_check(fd, bytes, err);
    if (!status)
        status = kld_region_open(connection, bytes, &region, err);
    if (status)
        return status;
    kld_region_is_of(region, fd);
    return kld_region_made(connection->transport->region_import_memfd(region, fd, err), region,
                           ret_region);
}

enum kld_status kld_region_import_cuda_ipc(struct kld_connection *connection,
                                           const uint8_t handle[64], const uint8_t device_uuid[16],
                                           uint64_t base_bytes, uint64_t offset_bytes,
                                           uint64_t bytes, struct kld_region **ret_region,
                                           struct kld_error *err) {
    if (!connection->transport->region_import_cuda_ipc)
        return kld_unimplemented(connection, "CUDA IPC regions", err);
    if (offset_bytes > base_bytes || bytes > base_bytes - offset_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "the region does not lie inside its base allocation");
    struct kld_ipc_source source = {handle, device_uuid, base_bytes, offset_bytes};
    struct kld_region *region = NULL;
    enum kld_status status = kld_region_open(connection, bytes, &region, err);
    return status ? status
                  : kld_region_made(
                        connection->transport->region_import_cuda_ipc(region, &source, err), region,
                        ret_region);
}

enum kld_status kld_region_create_pool(struct kld_connection *connection, uint64_t bytes,
                                       struct kld_region **ret_region, struct kld_error *err) {
    if (!connection->transport->region_create_pool)
        return kld_unimplemented(connection, "pool regions", err);
    struct kld_region *region = NULL;
    enum kld_status status = kld_region_open(connection, bytes, &region, err);
    if (status)
        return status;
    region->pool = true;
    return kld_region_made(connection->transport->region_create_pool(region, err), region,
                           ret_region);
}

void *kld_region_data(struct kld_region *region) {
    const struct kld_transport *transport = region->connection->transport;
    return transport->region_data ? transport->region_data(region) : region->data;
}

uint64_t kld_region_bytes(const struct kld_region *region) { return region->bytes; }

void kld_region_drop(struct kld_region *region) {
    if (!region || region->dropped)
        return;
    region->dropped = true;
    const struct kld_transport *transport = region->connection->transport;
    if (region->users == 0)
        transport->region_release(region);
    else if (transport->region_dropped)
        transport->region_dropped(region);
}

void kld_rows_copy(void *to, uint64_t to_stride_bytes, const void *from, uint64_t from_stride_bytes,
                   uint64_t row_bytes, uint64_t rows) {
    if (to_stride_bytes == row_bytes && from_stride_bytes == row_bytes) {
        memcpy(to, from, row_bytes * rows);
        return;
    }
    for (uint64_t row = 0; row < rows; row++)
        memcpy((char *)to + row * to_stride_bytes, (const char *)from + row * from_stride_bytes,
               row_bytes);
}

/* ---- Regions that are plain memory of this process ---------------------------------------------
 */

static enum kld_status plain_map(struct kld_region *region, int flags, int fd,
                                 struct kld_error *err) {
    void *data = mmap(NULL, region->bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (data == MAP_FAILED)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a region of %llu bytes",
                             (unsigned long long)region->bytes);
    region->data = data;
    return KLD_OK;
}

enum kld_status kld_plain_region_create(struct kld_region *region, struct kld_error *err) {
    return plain_map(region, MAP_PRIVATE | MAP_ANONYMOUS, -1, err);
}

enum kld_status kld_plain_region_import_memfd(struct kld_region *region, int fd,
                                              struct kld_error *err) {
    return plain_map(region, MAP_SHARED, fd, err);
}

void kld_plain_region_release(struct kld_region *region) {
    if (region->data)
        munmap(region->data, region->bytes);
    kld_region_free(region);
}
