/* pieces.h - moves bytes between a caller and a buffer on the device (pool.h) through KLD_PIECES
 * pieces of staging, one of which is filled or read here while the other travels. Either way, one
 * direction at a time.
 *
 * Belongs to the loop thread whose mail it was opened with; while one of its pieces is being filled
 * by another thread that thread's user keeps it from everybody else. */
#ifndef KLD_SERVER_GATEWAY_PIECES_H
#define KLD_SERVER_GATEWAY_PIECES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/gateway/pool.h"

#define KLD_PIECES 2 /* larger ones rather than more: each costs six wake-ups */

struct kld_pieces {
    /* The caller's, before kld_pieces_begin(). */
    struct kld_pool *pool;
    struct kld_mail *mail;
    struct kld_staging *staging;
    uint64_t staging_offset, piece_bytes; /* KLD_PIECES pieces follow each other there */
    struct kld_pool_buffer *buffer;
    void (*moved)(struct kld_pieces *pieces); /* one has travelled: there is room, or bytes */

    enum kld_status status; /* the first that went wrong; nothing moves any more */
    struct kld_error error;

    /* Its own. */
    int current, travelling;
    uint64_t at;  /* writing: where the current piece goes; reading: what is asked for next */
    uint64_t end; /* reading: where to stop */
    struct kld_piece {
        struct kld_pool_job job;
        struct kld_pieces *pieces;
        bool travels;
        uint64_t have, taken; /* writing: filled so far; reading: what has come, and was taken */
    } piece[KLD_PIECES]; /* last; until kld_pieces_begin() anything, where all before is zeros */
};

void kld_pieces_begin(struct kld_pieces *pieces);
/* Do pieces travel? Then the struct and what it names must stay. */
static inline bool kld_pieces_busy(const struct kld_pieces *pieces) {
    return pieces->travelling > 0;
}

/* ---- Writing. What follows goes to this offset of the buffer. */
void kld_pieces_write_at(struct kld_pieces *pieces, uint64_t offset);
/* Room for bytes; *ret_room 0: all travel, wait for moved(). */
void *kld_pieces_room(struct kld_pieces *pieces, uint64_t *ret_room);
void kld_pieces_put(struct kld_pieces *pieces, uint64_t bytes); /* so many of the room are filled */
void kld_pieces_flush(struct kld_pieces *pieces);               /* sends what there is */

/* ---- Reading. Starts fetching offset .. offset + bytes - 1. */
void kld_pieces_read_at(struct kld_pieces *pieces, uint64_t offset, uint64_t bytes);
/* The next bytes; *ret_bytes 0: not here yet, wait for moved(). */
const void *kld_pieces_next(struct kld_pieces *pieces, uint64_t *ret_bytes);
void kld_pieces_take(struct kld_pieces *pieces, uint64_t bytes); /* so many of them are done with */

#endif
