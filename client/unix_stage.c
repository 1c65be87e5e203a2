/* unix_stage.c - the staging of a Unix-socket connection, regions that plain-pointer tensors travel
 * through: made, shared out to calls, given back. Sends nothing. The thread that owns the
 * connection. */
#include <string.h>

#include "client/unix.h"

#define PAGE_BYTES 4096ull
#define PART_ALIGN 4096ull /* of a call's part; its tensors start at multiples of TENSOR_ALIGN */
#define TENSOR_ALIGN 256ull
#define STAGE_BYTES_MIN (1ull << 20)

static uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

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
    uint64_t file_most = kld_unix_file_bytes_max() & ~(PAGE_BYTES - 1);
    if (size > file_most)
        size = bytes > file_most ? bytes : file_most;
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
    enum kld_status status = kld_region_open(&u->base, size, &region, err);
    if (!status)
        status = kld_region_made(kld_unix_region_make(region, err), region, &region);
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

/* A stage is made larger than what is asked for needs; the server may not share as much with this
 * connection, which WELCOME does not say. So much of it as the calls in it need may do. */
bool kld_unix_stage_shrinks(struct unix_connection *u, struct unix_region *region) {
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
