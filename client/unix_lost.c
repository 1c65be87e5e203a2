/* unix_lost.c - what happens when the worker goes away: which requests may be sent to the next one,
 * and in which order. Connecting again is unix.c's, registering regions again unix_memory.c's. The
 * thread that owns the connection. */
#include <linux/kcmp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/unix.h"
#include "proto/overlap.h"

/* Memory of a region that a call reads or writes. */
struct extent {
    const struct unix_region *region; /* NULL: none, or staged: such memory is the call's own */
    uint64_t first;                   /* in the memfd or base allocation behind the region */
    struct kld_slot_geometry rows;
};

static struct extent extent_of(const struct kld_region *region, uint64_t at,
                               const struct kld_slot_geometry *rows) {
    const struct unix_region *mine = (const struct unix_region *)region;
    return (struct extent){mine, mine ? mine->offset_bytes + at : 0, *rows};
}

/* What a call reads (outputs false) or writes (true), slot by slot; a copy has one of each. */
static struct extent extent_at(const struct unix_call *call, uint32_t slot, bool outputs) {
    const struct kld_request *request = &call->base.request;
    const struct kld_copy_request *copy = &call->base.copy;
    const struct kld_slot_geometry whole = {1, copy->bytes, copy->bytes, copy->bytes};
    if (copy->destination && slot == 0)
        return outputs ? extent_of(copy->destination, copy->destination_offset_bytes, &whole)
                       : extent_of(copy->source, copy->source_offset_bytes, &whole);
    if (copy->destination || !request->op.tensor[slot].dtype || kld_slot_is_output(slot) != outputs)
        return (struct extent){0};
    return extent_of(request->bytes[slot].region, request->bytes[slot].offset_bytes,
                     &call->base.geometry.slot[slot]);
}

/* Duplicates of one descriptor? Not known where the kernel does not tell. */
static bool same_file(int a, int b) {
    pid_t self = getpid();
    return syscall(SYS_kcmp, self, self, KCMP_FILE, (unsigned long)a, (unsigned long)b) == 0;
}

/* Two regions may show the same memory. */
static bool same_memory(const struct unix_region *a, const struct unix_region *b) {
    if (a == b || a->kind != b->kind)
        return a == b;
    switch (a->kind) {
    case KLD_REGION_MEMFD: return kld_region_is_same(&a->base, &b->base);
    case KLD_REGION_CUDA_IPC:
        return memcmp(a->ipc_handle, b->ipc_handle, sizeof a->ipc_handle) == 0;
    case KLD_REGION_CUDA_FD: return same_file(a->fd, b->fd);
    default: return false;
    }
}

/* Does `writer` write over anything that `reader` reads? */
static bool overwrites(const struct unix_call *writer, const struct unix_call *reader) {
    for (uint32_t i = 0; i < KLD_SLOT_COUNT; i++) {
        struct extent to = extent_at(writer, i, true);
        for (uint32_t j = 0; to.region && j < KLD_SLOT_COUNT; j++) {
            struct extent from = extent_at(reader, j, false);
            if (from.region && same_memory(to.region, from.region) &&
                kld_rows_overlap(to.first, &to.rows, from.first, &from.rows))
                return true;
        }
    }
    return false;
}

/* May a call that was sent run again? Not if a pool region is gone with the worker, nor if what it
 * read may have been written over since: by itself, as a gradient over its tensor, or by one that
 * was sent after it. Plain memory is staged, inputs apart from outputs. */
static bool repeatable(const struct unix_call *call) {
    if (kld_call_uses_pool(&call->base))
        return false;
    for (const struct kld_call *later = &call->base; later; later = later->next)
        if (overwrites((const struct unix_call *)later, call))
            return false;
    return true;
}

/* A sent call of a lost worker: ended, or queued again. */
static void settle(struct unix_connection *u, struct unix_call *call) {
    call->device_losses += call->lost_device;
    /* The worker that refused what frees its memory may yet be writing it, until it ends. */
    bool guards = call->fence && call->refused;
    if (call->cancelled && !guards) {
        kld_unix_call_fail(u, call, KLD_CANCELLED, "cancelled; the server was lost meanwhile");
    } else if (u->fatal.status == KLD_VERSION) {
        kld_unix_call_fail(u, call, KLD_VERSION, u->fatal.text);
    } else if (!call->refused && !repeatable(call)) {
        kld_unix_call_fail(
            u, call, call->lost_device ? KLD_DEVICE_LOST : KLD_UNAVAILABLE,
            call->lost_device
                ? "the device failed while the request was in flight"
                : "the server was lost while a request that must not run twice was in flight");
    } else if (!guards && call->device_losses >= KLD_DEVICE_LOSSES_MAX) {
        /* Not UNAVAILABLE: whoever reads that gives the next device the request that kills it. */
        kld_unix_call_fail(u, call, KLD_DEVICE_LOST,
                           "the device failed twice while the request was in flight; it is not "
                           "sent again, because it may be the cause");
    } else if (!guards && call->base.result.attempts >= KLD_ATTEMPTS_MAX) {
        kld_unix_call_fail(u, call, KLD_UNAVAILABLE,
                           "the server was lost each time this request was sent");
    } else {
        call->lost_device = call->refused = false;
        kld_call_unlink(&call->base);
        kld_call_append(&u->queued, &call->base);
    }
}

void kld_unix_hang_up(struct unix_connection *u) {
    /* A child made by fork() has the socket too, and would keep the server from seeing its end; its
     * own close does not end what is its parent's. */
    if (u->socket >= 0 && u->owner == getpid()) {
        (void)shutdown(u->socket, SHUT_RDWR);
        /* Nor does a close that is not the last one take it out of the set, where its end would be
         * told for ever. */
        (void)epoll_ctl(u->base.epoll_fd, EPOLL_CTL_DEL, u->socket, NULL);
    }
    if (u->socket >= 0)
        close(u->socket);
    u->socket = -1;
}

void kld_unix_lose(struct unix_connection *u) {
    kld_unix_watch_lost(u);
    kld_unix_hang_up(u);
    u->want_write = false;
    if (u->state == UNIX_UP) {
        u->down_since_ns = kld_now_ns();
        u->base.losses++;
    }
    u->state = UNIX_DOWN;
    u->doomed = u->leaving = false;
    if (u->control.wanted && u->control.sent && u->fatal.status == KLD_VERSION) {
        u->control.ended = true;
        u->control.error = u->fatal;
    }
    u->control.sent = false;
    kld_unix_regions_lost(u);
    kld_unix_shares_lost(u);

    /* What was sent goes before what was queued behind it, in its old order. */
    struct kld_call *behind = u->queued.first;
    memset(&u->queued, 0, sizeof u->queued);
    while (u->sent.first)
        settle(u, (struct unix_call *)u->sent.first);
    while (behind) {
        struct kld_call *next = behind->next;
        kld_call_append(&u->queued, behind);
        behind = next;
    }
    for (struct kld_call *call = u->queued.first; call; call = call->next)
        kld_connection_arm(&u->base, kld_patience(&u->base, call, u->down_since_ns));
    kld_unix_retry_later(u);
}
