/* unix_calls.c - the entry points of the Unix-socket connection: its table, opening and closing,
 * submitting, deadlines, and the few questions that wait for their answer. Frames are sent and
 * received in unix.c. The thread that owns the connection. */
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "client/unix.h"

#define GRACE_NS 200000000ull      /* past its deadline, for the server to answer DEADLINE itself */
#define UNWATCHED_NS 1000000000ull /* a next try so late is the caller's doing */

static struct unix_connection *unix_of(struct kld_connection *connection) {
    return (struct unix_connection *)connection;
}

/* ---- Opening and closing ----------------------------------------------------------------------
 */

static enum kld_status unix_open(struct kld_connection *connection, const char *url,
                                 struct kld_error *err) {
    struct unix_connection *u = unix_of(connection);
    u->socket = -1;
    const char *path = url + strlen(connection->transport->prefix);
    if (path[0] == '\0' || strlen(path) >= sizeof u->path)
        return kld_error_set(err, KLD_INVALID,
                             "the path of a Unix socket has 1 to %zu bytes, not %zu",
                             sizeof u->path - 1, strlen(path));
    memcpy(u->path, path, strlen(path) + 1);
    u->down_since_ns = kld_now_ns();
    kld_unix_connect(u);
    if (connection->options.lazy)
        return KLD_OK;
    uint64_t deadline = u->down_since_ns + connection->options.connect_timeout_ns;
    while (u->state != UNIX_UP && !u->fatal.status && kld_now_ns() < deadline) {
        enum kld_status status = kld_connection_step(connection, deadline, err);
        if (status)
            return status;
    }
    if (u->state == UNIX_UP)
        return KLD_OK;
    return kld_unix_not_greeted(u,
                                "; is kld-server running, and is this the path that it was "
                                "given with --unix?",
                                err);
}

const struct kld_error *kld_unix_down_reason(const struct unix_connection *u) {
    if (u->state == UNIX_UP)
        return NULL;
    return u->fatal.status ? &u->fatal : u->lacking.status ? &u->lacking : NULL;
}

enum kld_status kld_unix_not_greeted(const struct unix_connection *u, const char *hint,
                                     struct kld_error *err) {
    const double waited_s = (double)u->base.options.connect_timeout_ns / 1e9;
    const struct kld_error *reason = kld_unix_down_reason(u);
    if (reason)
        return kld_error_set(err, reason->status, "%s", reason->text);
    if (u->put_off.status && u->nobody)
        return kld_error_set(err, KLD_UNAVAILABLE,
                             "no server is at this socket any more; while one was, it took "
                             "nobody: %s",
                             u->put_off.text);
    if (u->put_off.status)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server took nobody within %.1f s: %s",
                             waited_s, u->put_off.text);
    return kld_error_set(err, KLD_UNAVAILABLE, "no server answered at this socket within %.1f s%s",
                         waited_s, hint);
}

static void let_go(struct kld_call_list *list) {
    for (struct kld_call *call = list->first; call; call = call->next) {
        kld_unix_stage_free((struct unix_call *)call);
        kld_call_drop_regions(call);
    }
}

static void unix_close(struct kld_connection *connection) {
    struct unix_connection *u = unix_of(connection);
    u->closing = true;
    kld_unix_watch_end(u); /* first: this end is not that of the server */
    kld_unix_hang_up(u);
    let_go(&u->queued);
    let_go(&u->sent);
    memset(u->stages, 0, sizeof u->stages); /* their regions go with all others */
}

/* ---- Submitting, cancelling, deadlines --------------------------------------------------------
 */

static enum kld_status unix_submit(struct kld_connection *connection, struct kld_call *base,
                                   struct kld_error *err) {
    struct unix_connection *u = unix_of(connection);
    struct unix_call *call = (struct unix_call *)base;
    if (!base->copy.destination) {
        enum kld_status status = kld_unix_stage_put(u, call, err);
        if (status)
            return status;
    }
    kld_call_hold_regions(base);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        kld_unix_region_wanted(u, base->request.bytes[slot].region);
    kld_unix_region_wanted(u, base->copy.destination);
    kld_unix_region_wanted(u, base->copy.source);
    kld_call_append(&u->queued, base);
    /* A try is long due: nobody let us look for a server meanwhile, so the wait begins now. */
    if (u->state == UNIX_DOWN && base->started_ns > u->retry_at_ns + UNWATCHED_NS)
        u->down_since_ns = base->started_ns;
    if (u->state != UNIX_UP)
        kld_connection_arm(connection, kld_patience(connection, base, u->down_since_ns));
    else if (base->deadline_ns != KLD_NEVER)
        kld_connection_arm(connection, base->deadline_ns);
    if (!connection->corked || u->queued.count >= KLD_CORKED_MAX)
        kld_unix_flush(u);
    return KLD_OK;
}

static void unix_send(struct kld_connection *connection) { kld_unix_flush(unix_of(connection)); }

static void unix_cancel(struct kld_connection *connection, struct kld_call *base) {
    struct unix_connection *u = unix_of(connection);
    struct unix_call *call = (struct unix_call *)base;
    if (base->list == &u->queued || call->refused) {
        kld_unix_call_fail(u, call, KLD_CANCELLED, "cancelled before it was sent");
        return;
    }
    if (call->cancelled)
        return;
    call->cancelled = call->cancel_wanted = true;
    u->cancels++;
    kld_unix_flush(u);
}

/* The caller gets its answer now; the call keeps its memory until the server has let go of it. */
static void abandon(struct unix_connection *u, struct unix_call *call) {
    struct kld_error error;
    kld_error_set(&error, KLD_DEADLINE, "deadline passed; the server did not answer in time");
    call->abandoned = true;
    kld_call_end(&u->base, &call->base, KLD_DEADLINE, &error);
    if (!call->cancelled) {
        call->cancelled = call->cancel_wanted = true;
        u->cancels++;
    }
}

static void expire_queued(struct unix_connection *u, uint64_t now) {
    for (struct kld_call *call = u->queued.first, *next; call; call = next) {
        next = call->next;
        if (((const struct unix_call *)call)->fence)
            continue; /* nobody waits for it, and its memory is not free */
        uint64_t at = u->state == UNIX_UP ? call->deadline_ns
                                          : kld_patience(&u->base, call, u->down_since_ns);
        if (now < at) {
            kld_connection_arm(&u->base, at);
            continue;
        }
        struct unix_call *mine = (struct unix_call *)call;
        char late[KLD_ERROR_TEXT_MAX] = "deadline passed before the request could be sent";
        const struct kld_error *reason = kld_unix_down_reason(u);
        if (reason)
            snprintf(late, sizeof late, "deadline passed; %.200s", reason->text);
        if (at == call->deadline_ns)
            kld_unix_call_fail(u, mine, KLD_DEADLINE, late);
        else if (reason)
            kld_unix_call_fail(u, mine, reason->status, reason->text);
        else
            kld_unix_call_fail(u, mine, KLD_UNAVAILABLE,
                               u->base.member
                                   ? "the server was lost"
                                   : "the server was lost and did not come back within 30 s");
    }
}

static void expire_sent(struct unix_connection *u, uint64_t now) {
    for (struct kld_call *call = u->sent.first, *next; call; call = next) {
        next = call->next;
        struct unix_call *mine = (struct unix_call *)call;
        if (call->deadline_ns == KLD_NEVER || mine->abandoned)
            continue;
        uint64_t at = now < call->deadline_ns ? call->deadline_ns : call->deadline_ns + GRACE_NS;
        if (now < at)
            kld_connection_arm(&u->base, at);
        else
            abandon(u, mine);
    }
}

static void unix_timer(struct kld_connection *connection, uint64_t now) {
    struct unix_connection *u = unix_of(connection);
    if (u->state == UNIX_DOWN && now >= u->retry_at_ns)
        kld_unix_connect(u);
    else if (u->state == UNIX_DOWN)
        kld_connection_arm(connection, u->retry_at_ns);
    kld_unix_attach_again(u, now);
    u->locked =
        true; /* an expired call's region must not send the next call while it is looked at */
    expire_queued(u, now);
    expire_sent(u, now);
    u->locked = false;
    kld_unix_flush(u);
}

/* ---- Questions --------------------------------------------------------------------------------
 */

static enum kld_status unix_info(struct kld_connection *connection,
                                 struct kld_server_info *ret_info, struct kld_error *err) {
    const struct unix_connection *u = unix_of(connection);
    const struct kld_frame_welcome *welcome = &u->welcome;
    const struct kld_error *reason = kld_unix_down_reason(u);
    if (!u->welcomed && !reason)
        return kld_error_set(err, KLD_UNAVAILABLE, "no server has answered at this socket yet");
    /* Of a member of a split: whether it is there now, not what it was. */
    if (reason && (connection->member || !u->welcomed))
        return kld_error_set(err, reason->status, "%s", reason->text);
    if (connection->member && u->state != UNIX_UP)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server at this socket is away");
    memset(ret_info, 0, sizeof *ret_info);
    memcpy(ret_info->backend, welcome->backend, sizeof ret_info->backend);
    if (welcome->device < KLD_WIRE_DEVICES_MAX)
        memcpy(ret_info->device, welcome->device_list[welcome->device].name,
               sizeof ret_info->device - 1);
    ret_info->epoch = welcome->epoch;
    ret_info->region_bytes_max = welcome->region_bytes_max;
    ret_info->requests_max = welcome->requests_max;
    ret_info->streams_max = welcome->streams_max;
    ret_info->events_max = welcome->events_max;
    ret_info->device_index = welcome->device;
    ret_info->devices = welcome->devices;
    if (welcome->device < KLD_WIRE_DEVICES_MAX)
        memcpy(ret_info->device_uuid, welcome->device_list[welcome->device].uuid,
               sizeof ret_info->device_uuid);
    return KLD_OK;
}

/* What is taken back from a server that is lost: its successor never hears of it. */
static bool has_gone_with_it(const struct unix_connection *u, const union kld_frame *frame) {
    return frame->header.type == KLD_FRAME_DETACH && u->state != UNIX_UP;
}

enum kld_status kld_unix_ask(struct unix_connection *u, const union kld_frame *frame,
                             enum kld_frame_type expected, struct kld_error *err) {
    struct unix_control *control = &u->control;
    memset(control, 0, sizeof *control);
    control->frame = *frame;
    control->frame.header.request = KLD_NUMBER_CONTROL | ++u->control_sequence;
    control->wanted = true;
    kld_unix_flush(u);
    uint64_t deadline = kld_now_ns() + u->base.options.connect_timeout_ns;
    enum kld_status status = KLD_OK;
    while (!control->ended && !status && kld_now_ns() < deadline && !has_gone_with_it(u, frame))
        status = kld_connection_step(&u->base, deadline, err);
    kld_connection_waited(&u->base);
    control->wanted = false;
    if (status)
        return status;
    if (!control->ended && has_gone_with_it(u, frame))
        return KLD_OK;
    const struct kld_error *reason = kld_unix_down_reason(u);
    if (!control->ended && reason)
        return kld_error_set(err, reason->status, "%s", reason->text);
    if (!control->ended)
        return kld_error_set(err, KLD_UNAVAILABLE, "the server did not answer in %.1f s",
                             (double)u->base.options.connect_timeout_ns / 1e9);
    if (control->error.status) {
        if (err)
            *err = control->error;
        return control->error.status;
    }
    return control->reply.header.type == expected
               ? KLD_OK
               : kld_error_set(err, KLD_INTERNAL, "the server answered %s with %s",
                               kld_frame_name(frame->header.type),
                               kld_frame_name(control->reply.header.type));
}

static enum kld_status ask(struct unix_connection *u, enum kld_frame_type type,
                           enum kld_frame_type expected, struct kld_error *err) {
    union kld_frame frame;
    kld_frame_init(&frame, type, 0);
    return kld_unix_ask(u, &frame, expected, err);
}

static enum kld_status unix_ping(struct kld_connection *connection, struct kld_error *err) {
    return ask(unix_of(connection), KLD_FRAME_PING, KLD_FRAME_PONG, err);
}

static enum kld_status unix_stats(struct kld_connection *connection,
                                  struct kld_server_stats *ret_stats, struct kld_error *err) {
    struct unix_connection *u = unix_of(connection);
    enum kld_status status = ask(u, KLD_FRAME_STATS, KLD_FRAME_STATS_REPLY, err);
    if (status)
        return status;
    const struct kld_frame_stats_reply *reply = &u->control.reply.as_STATS_REPLY;
    *ret_stats = (struct kld_server_stats){
        .epoch = reply->epoch,
        .uptime_ns = reply->uptime_ns,
        .requests_total = reply->requests_total,
        .errors_total = reply->errors_total,
        .in_flight = reply->in_flight,
        .clients = reply->clients,
        .regions = reply->regions,
        .region_bytes = reply->region_bytes,
        .pool_bytes = reply->pool_bytes,
        .pool_bytes_max = reply->pool_bytes_max,
        .kernel_ns_total = reply->kernel_ns_total,
        .bytes_total = reply->bytes_total,
    };
    return KLD_OK;
}

enum kld_status kld_unix_wait_state(struct unix_connection *u, const enum unix_region_state *state,
                                    const struct kld_error *error, uint64_t deadline_ns,
                                    struct kld_error *err) {
    enum kld_status status = KLD_OK;
    while ((*state == UNIX_REGION_NEW || *state == UNIX_REGION_ADDING ||
            *state == UNIX_REGION_BEHIND || *state == UNIX_REGION_WAITING) &&
           !status && kld_now_ns() < deadline_ns) {
        status = kld_connection_step(&u->base, deadline_ns, err);
        if (!status && u->fatal.status == KLD_VERSION) {
            status = KLD_VERSION;
            if (err)
                *err = u->fatal;
        }
    }
    kld_connection_waited(&u->base);
    if (status || *state == UNIX_REGION_READY)
        return status;
    if (*state == UNIX_REGION_FAILED) {
        if (err)
            *err = *error;
        return error->status;
    }
    const struct kld_error *reason = kld_unix_down_reason(u);
    if (reason)
        return kld_error_set(err, reason->status, "%s", reason->text);
    return kld_error_set(err, KLD_UNAVAILABLE, "the server did not answer in time");
}

const struct kld_transport kld_transport_unix = {
    .prefix = "unix:",
    .name = "unix",
    .closes_in_a_child = true,
    .connection_bytes = sizeof(struct unix_connection),
    .call_bytes = sizeof(struct unix_call),
    .region_bytes = sizeof(struct unix_region),
    .event_bytes = sizeof(struct unix_event),
    .open = unix_open,
    .close = unix_close,
    .info = unix_info,
    .ping = unix_ping,
    .region_create = kld_unix_region_create,
    .region_import_memfd = kld_unix_region_import_memfd,
    .region_import_cuda_ipc = kld_unix_region_import_cuda_ipc,
    .region_import_cuda_fd = kld_unix_region_import_cuda_fd,
    .region_reserve_cuda = kld_unix_region_reserve_cuda,
    .region_grow_cuda_fd = kld_unix_region_grow_cuda_fd,
    .region_create_pool = kld_unix_region_create_pool,
    .region_attach = kld_unix_region_attach,
    .publish = kld_unix_publish,
    .published = kld_unix_published,
    .detach = kld_unix_detach,
    .event_open = kld_unix_event_open,
    .event_release = kld_unix_event_release,
    .fence_open = kld_unix_fence_open,
    .fence_passed = kld_unix_fence_passed,
    .stream_priority = kld_unix_stream_priority,
    .region_data = kld_unix_region_data,
    .region_dropped = kld_unix_region_dropped,
    .region_release = kld_unix_region_release,
    .submit = unix_submit,
    .send = unix_send,
    .cancel = unix_cancel,
    .event = kld_unix_event,
    .timer = unix_timer,
    .stats = unix_stats,
};
