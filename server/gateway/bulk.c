/* bulk.c - moves the large tensors of a bulk request between the client and their buffer on the
 * device: the binary tail as it comes, callers' shared memory piece by piece, results as they are
 * sent (infer.h). Holds KLD_PIECES pieces of staging whatever the size. Loop thread; shared memory
 * itself is read and written by steps on the thread pool. */
#include <string.h>

#include "server/gateway/infer.h"
#include "server/gateway/staging.h"

#define BLOCK_BYTES (256 << 10) /* that MHD asks for at a time */

static void go_on_gathering(struct kld_infer *infer);
static void go_on_scattering(struct kld_infer *infer);

static void moved(struct kld_pieces *pieces) {
    struct kld_infer *infer =
        (struct kld_infer *)(void *)((char *)pieces - offsetof(struct kld_infer, pieces));
    kld_infer_arrived(infer);
    if (!infer->exchange || (infer->exchange->replied && infer->move != KLD_MOVE_SEND)) {
        kld_infer_let_go(infer);
        return;
    }
    if (infer->move == KLD_MOVE_SEND) { /* the reader sees an error by itself */
        if (infer->starved)
            kld_exchange_release(infer->exchange);
        infer->starved = false;
        return;
    }
    if (pieces->status) {
        if (!infer->in_pool)
            kld_infer_fail(infer, &pieces->error);
        return;
    }
    switch (infer->move) {
    case KLD_MOVE_RECEIVE:
        if (infer->starved) {
            infer->starved = false;
            kld_exchange_continue(infer->exchange);
        }
        break;
    case KLD_MOVE_FLUSH:
    case KLD_MOVE_GATHER: go_on_gathering(infer); break;
    case KLD_MOVE_SCATTER: go_on_scattering(infer); break;
    case KLD_MOVE_SEND: break;
    }
}

void kld_bulk_begin(struct kld_infer *infer) {
    infer->pieces.mail = &infer->gateway->mail;
    infer->pieces.staging = infer->gateway->staging;
    infer->pieces.buffer = infer->buffer;
    infer->pieces.moved = moved;
    infer->move = KLD_MOVE_RECEIVE;
    kld_pieces_begin(&infer->pieces);
}

size_t kld_bulk_receive(struct kld_infer *infer, uint32_t index, uint64_t inside, const char *data,
                        size_t size) {
    uint64_t room;
    if (infer->pieces
            .status) { /* moved() may have left it to us: the thread pool had the request */
        kld_infer_fail(infer, &infer->pieces.error);
        return 0;
    }
    if (inside == 0)
        kld_pieces_write_at(&infer->pieces, infer->place[index]);
    void *to = kld_pieces_room(&infer->pieces, &room);
    if (room == 0) {
        infer->starved = true;
        kld_exchange_pause(infer->exchange);
        kld_infer_await(infer, KLD_LATE_PIECE);
        return 0;
    }
    size_t taken = size < room ? size : (size_t)room;
    memcpy(to, data, taken);
    kld_pieces_put(&infer->pieces, taken);
    return taken;
}

/* ---- Shared memory in
 * --------------------------------------------------------------------------*/

static bool next_region(struct kld_infer *infer, uint32_t end) {
    while (infer->move_index < end &&
           !(infer->in_buffer[infer->move_index] && infer->region[infer->move_index]))
        infer->move_index++;
    return infer->move_index < end;
}

static void go_on_gathering(struct kld_infer *infer) {
    uint64_t room;
    if (infer->in_pool)
        return;
    if (infer->pieces.status) {
        kld_infer_fail(infer, &infer->pieces.error);
        return;
    }
    if (!infer->move_begun && !next_region(infer, infer->request.input_count)) {
        kld_pieces_flush(&infer->pieces);
        if (kld_pieces_busy(&infer->pieces))
            kld_infer_await(infer, KLD_LATE_PIECE);
        else
            kld_infer_gathered(infer);
        return;
    }
    const struct kld_oip_tensor *tensor = kld_infer_tensor(infer, infer->move_index);
    infer->move = KLD_MOVE_GATHER;
    if (!infer->move_begun)
        kld_pieces_write_at(&infer->pieces, infer->place[infer->move_index]);
    infer->move_begun = true;
    infer->move_memory = kld_pieces_room(&infer->pieces, &room);
    uint64_t left = tensor->bytes - infer->move_done;
    infer->move_bytes = left < room ? left : room;
    if (infer->move_bytes)
        kld_infer_step(infer, KLD_INFER_READ_REGION, true);
    else
        kld_infer_await(infer, KLD_LATE_PIECE);
}

void kld_bulk_gather(struct kld_infer *infer) {
    infer->move = KLD_MOVE_FLUSH;
    infer->move_begun = false;
    infer->move_index = 0;
    infer->move_done = 0;
    kld_pieces_flush(&infer->pieces);
    go_on_gathering(infer);
}

/* ---- Shared memory out
 * -------------------------------------------------------------------------*/

static void go_on_scattering(struct kld_infer *infer) {
    uint64_t here;
    if (infer->in_pool)
        return;
    if (infer->pieces.status) {
        kld_infer_fail(infer, &infer->pieces.error);
        return;
    }
    if (!infer->move_begun && !next_region(infer, kld_infer_tensors(infer))) {
        kld_infer_scattered(infer);
        return;
    }
    const struct kld_oip_tensor *tensor = kld_infer_tensor(infer, infer->move_index);
    if (!infer->move_begun)
        kld_pieces_read_at(&infer->pieces, infer->place[infer->move_index], tensor->bytes);
    infer->move_begun = true;
    infer->move_memory = (void *)(uintptr_t)kld_pieces_next(&infer->pieces, &here);
    infer->move_bytes = here;
    if (infer->move_bytes)
        kld_infer_step(infer, KLD_INFER_WRITE_REGION, true);
    else
        kld_infer_await(infer, KLD_LATE_PIECE);
}

void kld_bulk_scatter(struct kld_infer *infer) {
    infer->move_index = infer->request.input_count;
    infer->move_done = 0;
    infer->move = KLD_MOVE_SCATTER;
    infer->move_begun = false;
    go_on_scattering(infer);
}

void kld_bulk_region_moved(struct kld_infer *infer) {
    bool in = infer->step == KLD_INFER_READ_REGION;
    infer->move_done += infer->move_bytes;
    if (in)
        kld_pieces_put(&infer->pieces, infer->move_bytes);
    else
        kld_pieces_take(&infer->pieces, infer->move_bytes);
    if (infer->move_done == kld_infer_tensor(infer, infer->move_index)->bytes) {
        infer->move_index++;
        infer->move_done = 0;
        infer->move_begun = false;
    }
    if (infer->pieces.status)
        kld_infer_fail(infer, &infer->pieces.error);
    else if (in)
        go_on_gathering(infer);
    else
        go_on_scattering(infer);
}

/* ---- The reply --------------------------------------------------------------------------------*/

/* Part 0 is the JSON, part i + 1 output i, if it is binary. */
static uint64_t part_bytes(const struct kld_infer *infer, uint32_t part) {
    if (part == 0)
        return infer->reply.length;
    const struct kld_oip_tensor *output = &infer->request.output[part - 1];
    return output->where == KLD_OIP_BINARY ? output->bytes : 0;
}

static const void *part_memory(struct kld_infer *infer, uint32_t part, uint64_t *ret_bytes) {
    uint32_t index = infer->request.input_count + part - 1;
    *ret_bytes = part_bytes(infer, part) - infer->move_done;
    if (part == 0)
        return infer->reply.data + infer->move_done;
    if (!infer->in_buffer[index])
        return (char *)kld_infer_bytes(infer, index) + infer->move_done;
    if (infer->move_done == 0 && infer->move_index != index) {
        infer->move_index = index;
        kld_pieces_read_at(&infer->pieces, infer->place[index], part_bytes(infer, part));
    }
    return kld_pieces_next(&infer->pieces, ret_bytes);
}

static ssize_t read_reply(void *user, uint64_t position, char *to, size_t most) {
    struct kld_infer *infer = user;
    while (infer->send_part <= infer->request.output_count &&
           infer->move_done == part_bytes(infer, infer->send_part)) {
        infer->send_part++;
        infer->move_done = 0;
    }
    if (infer->send_part > infer->request.output_count)
        return MHD_CONTENT_READER_END_OF_STREAM;
    uint64_t here;
    const void *from = part_memory(infer, infer->send_part, &here);
    if (infer->pieces.status || !infer->exchange || infer->exchange->gone)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (here == 0) {
        infer->starved = true;
        kld_infer_await(infer, KLD_LATE_PIECE);
        return kld_exchange_hold(infer->exchange) ? 0 : MHD_CONTENT_READER_END_WITH_ERROR;
    }
    uint64_t bytes = here < most ? here : most;
    memcpy(to, from, bytes);
    infer->move_done += bytes;
    if (infer->send_part && infer->in_buffer[infer->request.input_count + infer->send_part - 1])
        kld_pieces_take(&infer->pieces, bytes);
    return (ssize_t)bytes;
}

/* What was sent cannot be taken back: the connection ends, and the client sees a reply cut short.
 */
void kld_bulk_give_up(struct kld_infer *infer) {
    infer->pieces.status = KLD_DEADLINE;
    kld_stats_add(infer->gateway->stats, KLD_STAT_requests_detached_total, 1);
    if (infer->starved)
        kld_exchange_release(infer->exchange);
    infer->starved = false;
}

struct MHD_Response *kld_bulk_response(struct kld_infer *infer, uint64_t bytes,
                                       void (*sent)(void *user)) {
    infer->move = KLD_MOVE_SEND;
    infer->move_index = UINT32_MAX;
    infer->move_done = 0;
    infer->send_part = 0;
    return MHD_create_response_from_callback(bytes, BLOCK_BYTES, read_reply, infer, sent);
}
