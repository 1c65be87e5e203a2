/* pieces.c - double buffering between staging and the device (pieces.h). Copies nothing itself.
 * Loop thread. */
#include "server/gateway/pieces.h"

#include <string.h>

static struct kld_piece *current_of(struct kld_pieces *pieces) {
    return &pieces->piece[pieces->current];
}

static uint64_t place_of(const struct kld_pieces *pieces, const struct kld_piece *one) {
    return pieces->staging_offset + (uint64_t)(one - pieces->piece) * pieces->piece_bytes;
}

static void travelled(struct kld_pool_job *job) {
    struct kld_piece *one =
        (struct kld_piece *)(void *)((char *)job - offsetof(struct kld_piece, job));
    struct kld_pieces *pieces = one->pieces;
    one->travels = false;
    pieces->travelling--;
    if (job->status && !pieces->status) {
        pieces->status = job->status;
        pieces->error = job->error;
    }
    if (job->kind == KLD_POOL_FILL)
        one->have = 0;
    else
        one->have = job->status ? 0 : job->bytes;
    pieces->moved(pieces);
}

static void travel(struct kld_pieces *pieces, struct kld_piece *one, enum kld_pool_kind kind,
                   uint64_t offset, uint64_t bytes) {
    struct kld_pool_job *job = &one->job;
    memset(job, 0, sizeof *job);
    job->kind = kind;
    job->buffer = pieces->buffer;
    job->bytes = bytes;
    job->buffer_offset = offset;
    job->staging_offset = place_of(pieces, one);
    job->done = travelled;
    one->pieces = pieces;
    one->travels = true;
    pieces->travelling++;
    kld_pool_submit(pieces->pool, pieces->mail, job);
}

void kld_pieces_begin(struct kld_pieces *pieces) {
    memset(pieces->piece, 0, sizeof pieces->piece);
    pieces->current = pieces->travelling = 0;
    pieces->at = pieces->end = 0;
    pieces->status = KLD_OK;
}

/* ---- Writing ----------------------------------------------------------------------------------*/

void kld_pieces_write_at(struct kld_pieces *pieces, uint64_t offset) {
    kld_pieces_flush(pieces);
    pieces->at = offset;
}

void *kld_pieces_room(struct kld_pieces *pieces, uint64_t *ret_room) {
    const struct kld_piece *one = current_of(pieces);
    *ret_room = one->travels || pieces->status ? 0 : pieces->piece_bytes - one->have;
    return (char *)kld_staging_at(pieces->staging, place_of(pieces, one)) + one->have;
}

void kld_pieces_put(struct kld_pieces *pieces, uint64_t bytes) {
    struct kld_piece *one = current_of(pieces);
    one->have += bytes;
    if (one->have == pieces->piece_bytes)
        kld_pieces_flush(pieces);
}

void kld_pieces_flush(struct kld_pieces *pieces) {
    struct kld_piece *one = current_of(pieces);
    if (one->travels || !one->have || pieces->status)
        return;
    travel(pieces, one, KLD_POOL_FILL, pieces->at, one->have);
    pieces->at += one->have;
    pieces->current = (pieces->current + 1) % KLD_PIECES;
}

/* ---- Reading ----------------------------------------------------------------------------------*/

static void fetch(struct kld_pieces *pieces, struct kld_piece *one) {
    uint64_t left = pieces->end - pieces->at;
    uint64_t bytes = left < pieces->piece_bytes ? left : pieces->piece_bytes;
    if (!bytes || pieces->status)
        return;
    one->have = one->taken = 0;
    travel(pieces, one, KLD_POOL_READ, pieces->at, bytes);
    pieces->at += bytes;
}

void kld_pieces_read_at(struct kld_pieces *pieces, uint64_t offset, uint64_t bytes) {
    pieces->at = offset;
    pieces->end = offset + bytes;
    pieces->current = 0;
    for (int i = 0; i < KLD_PIECES; i++) {
        pieces->piece[i].have = pieces->piece[i].taken = 0;
        fetch(pieces, &pieces->piece[i]);
    }
}

const void *kld_pieces_next(struct kld_pieces *pieces, uint64_t *ret_bytes) {
    const struct kld_piece *one = current_of(pieces);
    *ret_bytes = one->travels || pieces->status ? 0 : one->have - one->taken;
    return (const char *)kld_staging_at(pieces->staging, place_of(pieces, one)) + one->taken;
}

void kld_pieces_take(struct kld_pieces *pieces, uint64_t bytes) {
    struct kld_piece *one = current_of(pieces);
    one->taken += bytes;
    if (one->taken < one->have)
        return;
    fetch(pieces, one);
    pieces->current = (pieces->current + 1) % KLD_PIECES;
}
