/* split.c - a connection to several servers (split.h): which part of a request goes to which of
 * them, what happens to parts that come back undone, and the connection's table. Computes nothing
 * and sends nothing itself: that is its members' business. The thread that owns the connection. */
#include "client/split.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EARLY_NS 10000000ull /* by a server's clock a deadline may pass so much before ours */
/* A caller's deadline says nothing about a server; a second one in which a part had so long does.
 */
#define TIME_NS 200000000ull
#define LATE_MAX 2

static struct split_connection *split_of(struct kld_connection *connection) {
    return (struct split_connection *)connection;
}

/* ---- Calls and parts --------------------------------------------------------------------------
 */

static void cancel_parts(struct split_connection *split, const struct split_call *call) {
    for (uint32_t i = 0; i < split->count; i++)
        for (uint32_t k = 0; k < SPLIT_DEPTH; k++)
            if (split->servers[i].part[k].call == call)
                kld_cancel(split->servers[i].member, split->servers[i].part[k].id);
}

/* It ends so, as soon as nobody uses its memory any more. */
static void call_fail(struct split_connection *split, struct split_call *call,
                      const struct kld_error *error) {
    if (call->error.status)
        return;
    call->error = *error;
    cancel_parts(split, call);
}

static bool any_is(const struct split_connection *split, enum split_state state) {
    for (uint32_t i = 0; i < split->count; i++)
        if (split->servers[i].state == state)
            return true;
    return false;
}

static void too_late(struct split_connection *split, struct split_call *call) {
    struct kld_error said, error;
    if (any_is(split, SPLIT_READY))
        kld_error_set(&said, KLD_DEADLINE, "%llu of %llu rows were done",
                      (unsigned long long)call->done_rows,
                      (unsigned long long)call->base.geometry.rows);
    else
        kld_split_none_left(split, &said);
    kld_error_set(&error, KLD_DEADLINE, "deadline passed; %.230s", said.text);
    call_fail(split, call, &error);
}

/* It ended with the caller's own time, of a server that has not failed: that says nothing about the
 * server. One with a limit of its own says so long before, and who was lost meanwhile was asked
 * more than once. */
static bool is_callers_fault(const struct split_part *part, enum kld_status status,
                             const struct kld_result *result) {
    return status == KLD_DEADLINE && part->until_deadline && result->attempts <= 1 &&
           kld_now_ns() + EARLY_NS >= part->call->base.deadline_ns;
}

/* The range of a part that a server could not do goes back; where the request itself is at fault,
 * it fails, with the address of who says so. */
static void part_back(struct split_part *part, const struct kld_error *error) {
    struct split_server *server = part->server;
    struct split_call *call = part->call;
    struct kld_error named;
    kld_error_set(&named, error->status, "%s: %.180s", server->name, error->text);
    /* Who says "not now" has not failed: that ends with the caller's patience. */
    bool busy = error->status == KLD_BUSY || error->status == KLD_THROTTLED;
    bool waits = call->base.deadline_ns != KLD_NEVER ||
                 kld_now_ns() < call->progress_ns + KLD_RECONNECT_NS_MAX;
    part->range.tries += !busy;
    part->range.device_losses += error->status == KLD_DEVICE_LOST;
    if (kld_split_is_refusal(error->status)) {
        server->state = SPLIT_REFUSED; /* its part is the others' */
        server->error = *error;
    }
    bool moves = server->state == SPLIT_REFUSED || kld_split_is_of_server(error->status);
    if (!moves || (busy && !waits) || part->range.tries >= KLD_ATTEMPTS_MAX ||
        part->range.device_losses >= KLD_DEVICE_LOSSES_MAX)
        call_fail(server->split, call, &named);
    else if (server->state != SPLIT_REFUSED)
        kld_split_server_leave(server, error);
    call->again[call->again_count++] = part->range;
    call->base.result.attempts++;
}

static int told(const struct split_connection *split, const struct split_call *call) {
    const struct kld_connect_options *options = &split->base.options;
    uint64_t row_bytes = 0;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (!kld_slot_is_output(slot))
            row_bytes += call->base.geometry.slot[slot].row_bytes;
    return options->progress
               ? options->progress(options->progress_user, call->done_rows * row_bytes,
                                   call->base.geometry.rows * row_bytes)
               : 0;
}

/* A member's callback. */
static void part_ended(void *user, enum kld_status status, const struct kld_result *result,
                       const struct kld_error *error) {
    struct split_part *part = user;
    struct split_server *server = part->server;
    struct split_call *call = part->call;
    server->busy--;
    call->in_flight--;
    if (call->error.status) {
        /* It was cancelled, or is not wanted any more. */
    } else if (is_callers_fault(part, status, result)) {
        if (part->has_time && ++server->late >= LATE_MAX)
            kld_split_server_leave(server, error);
        too_late(server->split, call);
    } else if (status) {
        part_back(part, error);
    } else if (server->links != server->member->links && kld_split_server_ask(server)) {
        struct kld_error said = server->error; /* whoever answered is none of ours, or gone again */
        said.status = KLD_UNAVAILABLE;
        part_back(part, &said);
    } else {
        server->pause_ns = 0;
        server->late = 0;
        call->progress_ns = kld_now_ns();
        kld_split_part_take(part, result);
        if (told(server->split, call))
            call_fail(server->split, call, &(struct kld_error){KLD_CANCELLED, "cancelled"});
    }
    kld_split_part_free(part);
}

/* The next range of a call; false: there is none. */
static bool range_next(struct split_call *call, struct split_range *ret_range) {
    uint64_t rows = call->base.geometry.rows;
    if (call->again_count > 0) {
        *ret_range = call->again[--call->again_count];
        return true;
    }
    if (call->next_row == rows)
        return false;
    *ret_range = (struct split_range){
        .first = call->next_row, .rows = kld_split_smaller(call->part_rows, rows - call->next_row)};
    call->next_row += ret_range->rows;
    return true;
}

static void part_send(struct split_server *server, struct split_call *call,
                      const struct split_range *range) {
    struct split_connection *split = server->split;
    struct split_part *part = server->part;
    struct kld_request request;
    struct kld_error error;
    while (part->call)
        part++;
    part->call = call;
    part->range = *range;
    uint64_t now = kld_now_ns(), limit = split->base.options.part_timeout_ns, left = KLD_NEVER;
    if (call->base.deadline_ns != KLD_NEVER)
        left = call->base.deadline_ns > now ? call->base.deadline_ns - now : 1;
    part->until_deadline = left <= limit;
    part->has_time = left >= TIME_NS;
    limit = kld_split_smaller(limit, left);
    enum kld_status status = kld_split_part_make(part, &request, &error);
    bool ours = status != KLD_OK; /* no memory here */
    request.timeout_ns = limit;
    if (!status)
        status = kld_submit(server->member, &request, part_ended, part, &part->id, &error);
    if (!status) {
        server->busy++;
        call->in_flight++;
        return;
    }
    if (ours)
        call_fail(split, call, &error);
    else
        part_back(part, &error);
    kld_split_part_free(part);
}

/* The one with the least to do. */
static struct split_server *server_free(struct split_connection *split) {
    struct split_server *best = NULL;
    for (uint32_t k = 0; k < split->count; k++) {
        struct split_server *server = &split->servers[(split->next + k) % split->count];
        if (server->state == SPLIT_READY && server->busy < SPLIT_DEPTH &&
            (!best || server->busy < best->busy))
            best = server;
    }
    if (best)
        split->next = (uint32_t)(best - split->servers) + 1;
    return best;
}

static void call_end(struct split_connection *split, struct split_call *call) {
    if (!call->error.status)
        kld_split_finish(call);
    kld_split_call_free(call);
    kld_call_unlink(&call->base);
    kld_call_drop_regions(&call->base);
    kld_call_end(&split->base, &call->base, call->error.status, &call->error);
    kld_call_release(&split->base, &call->base);
}

/* No server takes parts: how long does a call wait for one? Those that refuse do not come back. Its
 * deadline is split_timer()'s business. */
static void check_hope(struct split_connection *split, struct split_call *call, uint64_t now) {
    struct kld_error error;
    if (call->in_flight > 0 || call->error.status || any_is(split, SPLIT_READY))
        return;
    if (any_is(split, SPLIT_AWAY)) {
        uint64_t until = call->progress_ns + KLD_RECONNECT_NS_MAX;
        bool hopes = now < until; /* else its deadline alone ends it */
        if (call->base.deadline_ns != KLD_NEVER || hopes) {
            kld_connection_arm(
                &split->base, kld_split_smaller(hopes ? until : KLD_NEVER, call->base.deadline_ns));
            return;
        }
    }
    kld_split_none_left(split, &error);
    call_fail(split, call, &error);
}

/* Gives free servers what there is to do, and ends what is done. */
static void pump(struct split_connection *split) {
    uint64_t now = kld_now_ns();
    for (struct kld_call *base = split->calls.first, *next; base; base = next) {
        struct split_call *call = (struct split_call *)base;
        struct split_server *server;
        struct split_range range;
        next = base->next;
        while (!call->error.status && (server = server_free(split)) && range_next(call, &range))
            part_send(server, call, &range);
        check_hope(split, call, now);
        if (call->in_flight == 0 && (call->error.status || call->done_rows == base->geometry.rows))
            call_end(split, call);
    }
}

/* ---- The connection's table -------------------------------------------------------------------
 */

static void split_event(struct kld_connection *connection, uint64_t tag, uint32_t events) {
    struct split_connection *split = split_of(connection);
    kld_process(split->servers[tag - KLD_TAG_TRANSPORT].member, 0, NULL);
    pump(split);
}

static void split_timer(struct kld_connection *connection, uint64_t now) {
    struct split_connection *split = split_of(connection);
    /* One in a turn: a question may wait for its answer, and the others have something to do. */
    struct split_server *due = NULL;
    for (uint32_t i = 0; i < split->count; i++) {
        struct split_server *server = &split->servers[i];
        if (server->state == SPLIT_AWAY && now >= server->retry_at_ns &&
            (!due || server->retry_at_ns < due->retry_at_ns))
            due = server;
    }
    if (due && kld_split_server_ask(due) && due->state == SPLIT_AWAY)
        kld_split_server_leave(due, &due->error);
    for (uint32_t i = 0; i < split->count; i++)
        if (split->servers[i].state == SPLIT_AWAY)
            kld_connection_arm(connection, split->servers[i].retry_at_ns);
    for (struct kld_call *call = split->calls.first; call; call = call->next) {
        if (now >= call->deadline_ns)
            too_late(split, (struct split_call *)call);
        else if (call->deadline_ns != KLD_NEVER)
            kld_connection_arm(connection, call->deadline_ns);
    }
    pump(split);
}

static enum kld_status split_submit(struct kld_connection *connection, struct kld_call *base,
                                    struct kld_error *err) {
    struct split_connection *split = split_of(connection);
    struct split_call *call = (struct split_call *)base;
    base->result.attempts = 1;
    if (base->copy.destination) { /* both are memory of this process */
        const struct kld_copy_request *copy = &base->copy;
        memcpy((char *)copy->destination->data + copy->destination_offset_bytes,
               (const char *)copy->source->data + copy->source_offset_bytes, copy->bytes);
        memset(&base->copy, 0, sizeof base->copy); /* its regions were not held */
        kld_call_end(connection, base, KLD_OK, NULL);
        kld_call_release(connection, base);
        return KLD_OK;
    }
    enum kld_status status =
        kld_split_plan(call, split->count, connection->options.part_bytes_max, err);
    if (status) {
        kld_split_call_free(call);
        return status;
    }
    call->progress_ns = base->started_ns;
    kld_call_hold_regions(base);
    kld_call_append(&split->calls, base);
    if (base->deadline_ns != KLD_NEVER)
        kld_connection_arm(connection, base->deadline_ns);
    pump(split);
    return KLD_OK;
}

static void split_cancel(struct kld_connection *connection, struct kld_call *base) {
    call_fail(split_of(connection), (struct split_call *)base,
              &(struct kld_error){KLD_CANCELLED, "cancelled"});
    pump(split_of(connection));
}

static void split_close(struct kld_connection *connection) {
    struct split_connection *split = split_of(connection);
    for (uint32_t i = 0; i < split->count; i++) {
        kld_close(split->servers[i].member);
        for (uint32_t k = 0; k < SPLIT_DEPTH; k++)
            kld_split_part_free(&split->servers[i].part[k]);
    }
    for (struct kld_call *call = split->calls.first; call; call = call->next) {
        kld_split_call_free((struct split_call *)call);
        kld_call_drop_regions(call);
    }
    free(split->servers);
}

/* Those of a Unix socket close themselves. */
static void split_leave(struct kld_connection *connection) {
    struct split_connection *split = split_of(connection);
    for (uint32_t i = 0; i < split->count; i++)
        kld_close(split->servers[i].member);
}

const struct kld_transport kld_transport_split = {
    .prefix = "split:",
    .name = "split",
    .connection_bytes = sizeof(struct split_connection),
    .call_bytes = sizeof(struct split_call),
    .region_bytes = sizeof(struct kld_region),
    .open = kld_split_open,
    .close = split_close,
    .leave = split_leave,
    .info = kld_split_info,
    .missing = kld_split_missing,
    .ping = kld_split_ping,
    .region_create = kld_plain_region_create,
    .region_import_memfd = kld_plain_region_import_memfd,
    .region_release = kld_plain_region_release,
    .submit = split_submit,
    .cancel = split_cancel,
    .event = split_event,
    .timer = split_timer,
};
