/* space.c - see space.h. Maps nothing on the loop: a piece is mapped on uv's pool, which counts as
 * a user of the region meanwhile. Does not read the memory. Worker process: loop thread, except
 * grow_work(). */
#include "server/worker/space.h"

#include <inttypes.h>
#include <stdlib.h>

#include "server/worker/core.h"
#include "server/worker/cuda_file.h"

/* May the allocation with this number be a piece of a space (whole), or lie in a region of its own?
 * Pieces have no place in common with other regions by which an overlap could be seen. */
static enum kld_status check_shown(const struct kld_session *session, uint64_t number, bool whole,
                                   struct kld_error *err) {
    bool shared = kld_cuda_file_is_shared(session, number);
    for (uint32_t i = 0; shared && i < session->regions_size; i++) {
        const struct kld_region *region = session->regions[i];
        if (!region || region->attached || region->state > KLD_REGION_LIVE)
            continue;
        bool shows = whole && region->cuda_file == number;
        for (uint32_t j = 0; j < region->pieces_count && !shows; j++)
            shows = region->pieces[j] == number;
        if (shows)
            return kld_error_set(err, KLD_INVALID,
                                 "region %" PRIu64 " shows this CUDA allocation already; a piece "
                                 "of a space is shown by that alone",
                                 region->id);
    }
    return KLD_OK;
}

enum kld_status kld_space_check_apart(const struct kld_session *session, uint64_t cuda_file,
                                      struct kld_error *err) {
    return check_shown(session, cuda_file, false, err);
}

void kld_space_forget(struct kld_region *region) {
    while (region->pieces_count)
        kld_cuda_file_release(region->session, region->pieces[--region->pieces_count]);
    free(region->pieces);
}

static void grow_work(uv_work_t *work) {
    struct kld_region *region = work->data;
    const struct kld_worker *worker = region->session->worker;
    region->status = worker->options.backend->memory_grow_fd(
        region->memory, region->fd, region->bytes, region->growing_bytes, &region->error);
    kld_strays_close(worker->strays, region->session->uid, &region->fd, 1);
    region->fd = -1;
}

/* What was dropped meanwhile has the piece too, until it goes. */
static void grow_after(uv_work_t *work, int cancelled) {
    struct kld_region *region = work->data;
    struct kld_session *session = region->session;
    struct kld_error error = region->error;
    enum kld_status status = region->status;
    (void)cancelled;
    kld_session_awaited(session);
    if (status == KLD_OK) {
        region->bytes += region->growing_bytes;
        kld_worker_region_reply(region);
    } else {
        if (status != KLD_DEVICE_LOST)
            kld_stats_fault(session->worker->stats, status);
        kld_cuda_file_release(session, region->pieces[--region->pieces_count]);
        kld_session_reply_error(session, region->request, &error);
    }
    region->growing_bytes = 0;
    kld_worker_region_release(region);
    if (status == KLD_DEVICE_LOST)
        kld_core_device_lost(session->worker, &error);
    session->tasks--;
    kld_session_poll(session);
    kld_session_collect(session);
}

/* There is place for the number of one more. */
static bool pieces_reserve(struct kld_region *region) {
    if (region->pieces_count < region->pieces_size)
        return true;
    uint32_t size = region->pieces_size ? 2 * region->pieces_size : 16;
    uint64_t *pieces = realloc(region->pieces, size * sizeof *pieces);
    if (!pieces)
        return false;
    region->pieces = pieces;
    region->pieces_size = size;
    return true;
}

static enum kld_status check_growth(const struct kld_region *region,
                                    const struct kld_frame_region_grow *frame,
                                    struct kld_error *err) {
    uint64_t most = region->session->worker->options.config->region_pieces_max;
    if (region->attached || region->kind != KLD_REGION_CUDA_SPACE)
        return kld_error_set(err, KLD_INVALID,
                             "REGION_GROW: region %" PRIu64 " is no CUDA space of this connection",
                             region->id);
    if (region->growing_bytes)
        return kld_error_set(err, KLD_BUSY,
                             "REGION_GROW: the piece before this one is still being mapped; "
                             "expected to come once that was answered");
    if (frame->bytes == 0 || frame->offset_bytes != region->bytes ||
        frame->bytes > region->room_bytes - region->bytes)
        return kld_error_set(err, KLD_INVALID,
                             "REGION_GROW: %" PRIu64 " bytes at offset %" PRIu64
                             "; expected at offset %" PRIu64 ", where the pieces before end, and "
                             "up to the %" PRIu64 " bytes of the region",
                             frame->bytes, frame->offset_bytes, region->bytes, region->room_bytes);
    if (region->pieces_count >= most)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "REGION_GROW: the region has %u pieces, the most allowed",
                             region->pieces_count);
    return KLD_OK;
}

enum kld_status kld_space_grow(struct kld_session *session,
                               const struct kld_frame_region_grow *frame, int fd,
                               struct kld_error *err) {
    struct kld_worker *worker = session->worker;
    enum kld_status status;
    if (worker->draining)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server is going away; connect again");
    struct kld_region *region = kld_worker_region_find(session, frame->region, "REGION_GROW", err);
    if (!region)
        return err->status;
    if ((status = check_growth(region, frame, err)) || (status = kld_cuda_file_check(fd, err)))
        return status;
    if (!pieces_reserve(region))
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for another piece of a region");
    uint64_t number = kld_cuda_file_acquire(session, fd);
    if ((status = check_shown(session, number, true, err))) {
        kld_cuda_file_release(session, number);
        return status;
    }
    region->pieces[region->pieces_count++] = number;
    region->growing_bytes = frame->bytes;
    region->request = frame->header.request;
    region->fd = fd;
    kld_worker_region_acquire(region);
    session->tasks++;
    kld_session_awaits(session);
    kld_task_queue(&region->task, worker, session->user, grow_work, grow_after);
    return KLD_OK;
}
