/* connection.c - what is the same for every kind of connection: requests, waiting, and the delivery
 * of results. Checks no request (check.c) and sends nothing itself (unix.c, http.c, local.c). The
 * thread that owns the connection. */
#include "client/connection.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

enum kld_status kld_unimplemented(const struct kld_connection *connection, const char *what,
                                  struct kld_error *err) {
    return kld_error_set(err, KLD_UNIMPLEMENTED, "%s: not over a connection of kind '%s'", what,
                         connection->transport->name);
}

uint64_t kld_jitter(uint64_t pause_ns) {
    uint64_t any;
    if (getrandom(&any, sizeof any, GRND_NONBLOCK) != (ssize_t)sizeof any)
        any = kld_now_ns() * UINT64_C(0x9e3779b97f4a7c15) >> 20;
    return pause_ns - any % (pause_ns / 2 + 1);
}

/* ---- Waiting and delivery ------------------------------------------------------------------- */

static int timeout_ms(uint64_t deadline_ns) {
    if (deadline_ns == KLD_NEVER)
        return -1;
    uint64_t now = kld_now_ns();
    uint64_t ms = deadline_ns > now ? (deadline_ns - now + 999999) / 1000000 : 0;
    return ms > 1000000 ? 1000000 : (int)ms;
}

static void send_corked(struct kld_connection *connection) {
    if (connection->transport->send)
        connection->transport->send(connection);
}

void kld_cork(struct kld_connection *connection) { connection->corked = true; }

void kld_uncork(struct kld_connection *connection) {
    connection->corked = false;
    send_corked(connection);
}

enum kld_status kld_connection_step(struct kld_connection *connection, uint64_t deadline_ns,
                                    struct kld_error *err) {
    struct epoll_event events[16];
    if (connection->corked)
        send_corked(connection);
    int count = epoll_wait(connection->epoll_fd, events, 16,
                           deadline_ns == 0 ? 0 : timeout_ms(deadline_ns));
    connection->interrupted = count < 0 && errno == EINTR;
    if (count < 0 && !connection->interrupted)
        return kld_error_set(err, KLD_INTERNAL, "waiting failed: %s", strerror(errno));
    bool timer = false;
    connection->dispatching = true;
    for (int i = 0; i < count; i++) {
        uint64_t tag = events[i].data.u64;
        if (tag == KLD_TAG_WAKE)
            kld_counter_drain(connection->wake_fd);
        else if (tag == KLD_TAG_TIMER)
            timer = true;
        else
            connection->transport->event(connection, tag, events[i].events);
    }
    if (timer) { /* last: what came in time is not late because nobody looked */
        kld_counter_drain(connection->timer_fd);
        connection->armed_ns = KLD_NEVER;
        if (connection->transport->timer)
            connection->transport->timer(connection, kld_now_ns());
    }
    connection->dispatching = false;
    return KLD_OK;
}

static void wake(struct kld_connection *connection) { kld_eventfd_raise(connection->wake_fd); }

void kld_connection_waited(struct kld_connection *connection) {
    if (connection->done)
        wake(connection);
}

static void deliver(struct kld_connection *connection) {
    /* Only what has ended by now: a callback that submits and cancels cannot keep us here. */
    struct kld_call *last = connection->done_last;
    for (bool more = connection->done != NULL; more;) {
        struct kld_call *call = connection->done;
        more = call != last;
        connection->done = call->next_done;
        if (!connection->done)
            connection->done_last = NULL;
        enum kld_status status = call->status;
        struct kld_result result = call->result;
        struct kld_error error = call->error;
        kld_callback callback = call->callback;
        void *user = call->user;
        kld_call_release(connection, call);
        if (callback)
            callback(user, status, &result, &error);
        more = more && connection->done;
    }
    if (connection->done)
        wake(connection);
}

/* Where what computes is no processor of this host: we look at it ourselves for a while. */
static void poll_transport(struct kld_connection *connection, bool more) {
    if (!connection->offloaded || !connection->transport->poll)
        return;
    connection->transport->poll(connection, more);
    connection->watching = more;
}

/* The back end's own thread looks at what is in flight from now on, where we did. */
static void unwatch(struct kld_connection *connection) {
    if (connection->watching)
        poll_transport(connection, false);
}

enum kld_status kld_process(struct kld_connection *connection, int timeout, struct kld_error *err) {
    uint64_t deadline = 0;
    unwatch(connection); /* we may sleep, and so may whoever polls kld_fd() */
    if (!connection->done && timeout < 0 && connection->unended > 0)
        deadline = KLD_NEVER;
    else if (!connection->done && timeout > 0)
        deadline = kld_now_ns() + (uint64_t)timeout * 1000000;
    enum kld_status status = kld_connection_step(connection, deadline, err);
    deliver(connection);
    return status;
}

int kld_fd(const struct kld_connection *connection) { return connection->epoll_fd; }

void kld_call_end(struct kld_connection *connection, struct kld_call *call, enum kld_status status,
                  const struct kld_error *error) {
    call->ended = true;
    connection->unended--;
    call->status = status;
    call->result.total_ns = kld_now_ns() - call->started_ns;
    if (status && error)
        call->error = *error;
    else if (!status && call->error.status) /* of a try before */
        call->error = (struct kld_error){.status = KLD_OK};
    if (call->kept)
        return;
    if (call->wait) {
        call->wait->ended = true;
        call->wait->status = status;
        call->wait->result = call->result;
        call->wait->error = call->error;
        kld_call_release(connection, call);
        return;
    }
    call->next_done = NULL;
    if (connection->done_last)
        connection->done_last->next_done = call;
    else
        connection->done = call;
    connection->done_last = call;
    if (!connection->dispatching)
        wake(connection);
}

/* ---- Requests ------------------------------------------------------------------------------- */

static enum kld_status call_open(struct kld_connection *connection, struct kld_call **ret_call,
                                 struct kld_error *err) {
    if (connection->calls >= connection->calls_max)
        return kld_error_set(err, KLD_BUSY,
                             "%u requests are in flight on this connection, the most it may have",
                             connection->calls);
    if (connection->calls == connection->slots_max) {
        uint32_t count = connection->slots_max ? connection->slots_max * 2 : 64;
        struct kld_call **slots = realloc(connection->slots, count * sizeof *slots);
        if (!slots)
            return kld_error_set(err, KLD_NO_MEMORY, "no memory for a request");
        memset(slots + connection->slots_max, 0, (count - connection->slots_max) * sizeof *slots);
        connection->slots = slots;
        connection->slots_max = count;
    }
    struct kld_call *call = connection->spare;
    if (call)
        connection->spare = call->next;
    else if (!(call = malloc(connection->transport->call_bytes)))
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a request");
    memset(call, 0, connection->transport->call_bytes);
    uint64_t sequence = ++connection->sequence;
    uint32_t slot = (uint32_t)sequence & (connection->slots_max - 1);
    while (connection->slots[slot])
        slot = (slot + 1) & (connection->slots_max - 1);
    connection->slots[slot] = call;
    connection->calls++;
    call->id = (sequence << 16 | slot) & ~(3ull << 62);
    call->references = 2;
    call->started_ns = kld_now_ns();
    *ret_call = call;
    return KLD_OK;
}

void kld_call_release(struct kld_connection *connection, struct kld_call *call) {
    if (--call->references > 0)
        return;
    connection->slots[call->id & 0xffff] = NULL;
    connection->calls--;
    call->next = connection->spare;
    connection->spare = call;
}

struct kld_call *kld_call_find(struct kld_connection *connection, uint64_t id) {
    uint32_t slot = id & 0xffff;
    struct kld_call *call = slot < connection->slots_max ? connection->slots[slot] : NULL;
    return call && call->id == id ? call : NULL;
}

static uint64_t deadline_after(uint64_t start_ns, uint64_t timeout_ns) {
    uint64_t at;
    return timeout_ns == 0 || __builtin_add_overflow(start_ns, timeout_ns, &at) ? KLD_NEVER : at;
}

static enum kld_status submit(struct kld_connection *connection, const struct kld_request *request,
                              const struct kld_copy_request *copy, uint64_t timeout_ns,
                              struct kld_call **ret_call, struct kld_wait *wait,
                              kld_callback callback, void *user, struct kld_error *err) {
    struct kld_call *call = NULL;
    enum kld_status status = call_open(connection, &call, err);
    if (status)
        return status;
    call->deadline_ns = deadline_after(call->started_ns, timeout_ns);
    call->callback = callback;
    call->user = user;
    call->wait = wait;
    if (copy) {
        call->copy = *copy;
    } else {
        call->request = *request;
        status = kld_call_check(connection, call, err);
    }
    connection->unended++;
    if (!status)
        status = connection->transport->submit(connection, call, err);
    if (status) {
        connection->unended--;
        call->references = 1;
        kld_call_release(connection, call);
        return status;
    }
    *ret_call = call;
    return KLD_OK;
}

/* Runs the loop until *ended, or until until_ns, or a signal where that is set. What else ended
 * meanwhile keeps its callback for the next kld_process(). */
static enum kld_status run_loop(struct kld_connection *connection, const bool *ended, bool early,
                                uint64_t until_ns, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    bool sliced = until_ns != KLD_NEVER, out = false;
    uint64_t poll_until_ns = connection->offloaded ? kld_now_ns() + KLD_POLL_NS : 0;
    while (!*ended && !status && !out) {
        bool poll = poll_until_ns && kld_now_ns() < poll_until_ns;
        if (poll_until_ns)
            poll_transport(connection, poll);
        poll_until_ns = poll ? poll_until_ns : 0;
        if (*ended) /* we heard it ourselves just now: nothing wakes us any more */
            break;
        status = kld_connection_step(connection, poll ? 0 : until_ns, err);
        if (poll)
            sched_yield();
        out = sliced && (connection->interrupted || kld_now_ns() >= until_ns);
    }
    /* After an early answer nobody waits for the rest: the next call looks at it. */
    if (poll_until_ns && !(early && *ended && connection->unended == 0))
        poll_transport(connection, false);
    kld_connection_waited(connection);
    return status;
}

static enum kld_status take_outcome(const struct kld_wait *wait, struct kld_result *ret_result,
                                    struct kld_error *err) {
    if (wait->status && err)
        *err = wait->error;
    if (ret_result)
        *ret_result = wait->result;
    return wait->status;
}

static enum kld_status wait_for(struct kld_connection *connection, struct kld_wait *wait,
                                struct kld_call *call, bool early, struct kld_result *ret_result,
                                struct kld_error *err) {
    enum kld_status status = run_loop(connection, &wait->ended, early, KLD_NEVER, err);
    if (wait->ended)
        return take_outcome(wait, ret_result, err);
    call->wait = NULL; /* the loop itself failed: nobody may write to our stack later */
    return status;
}

enum kld_status kld_run(struct kld_connection *connection, const struct kld_request *request,
                        struct kld_result *ret_result, struct kld_error *err) {
    struct kld_wait wait = {0};
    struct kld_call *call = NULL;
    poll_transport(connection, true);
    enum kld_status status =
        submit(connection, request, NULL, request->timeout_ns, &call, &wait, NULL, NULL, err);
    if (!status)
        return wait_for(connection, &wait, call, request->early, ret_result, err);
    poll_transport(connection, false);
    return status;
}

static uint64_t slice_end(uint32_t slice_ms) { return kld_now_ns() + (uint64_t)slice_ms * 1000000; }

enum kld_status kld_run_slice(struct kld_connection *connection, const struct kld_request *request,
                              uint32_t slice_ms, uint64_t *ret_id, struct kld_result *ret_result,
                              struct kld_error *err) {
    struct kld_wait wait = {0};
    struct kld_call *call = NULL;
    *ret_id = 0;
    poll_transport(connection, true);
    enum kld_status status =
        submit(connection, request, NULL, request->timeout_ns, &call, &wait, NULL, NULL, err);
    if (status) {
        poll_transport(connection, false);
        return status;
    }
    status = run_loop(connection, &wait.ended, request->early, slice_end(slice_ms), err);
    if (wait.ended)
        return take_outcome(&wait, ret_result, err);
    call->wait = NULL;
    if (status)
        return status;
    call->kept = true;
    *ret_id = call->id;
    return KLD_OK;
}

enum kld_status kld_wait_slice(struct kld_connection *connection, uint64_t *id, uint32_t slice_ms,
                               struct kld_result *ret_result, struct kld_error *err) {
    struct kld_call *call = kld_call_find(connection, *id);
    if (!call || !call->kept)
        return kld_error_set(err, KLD_NOT_FOUND, "no request of kld_run_slice() has that number");
    enum kld_status status =
        run_loop(connection, &call->ended, call->request.early, slice_end(slice_ms), err);
    if (!call->ended)
        return status;
    struct kld_wait wait = {.status = call->status, .result = call->result, .error = call->error};
    *id = 0;
    kld_call_release(connection, call);
    return take_outcome(&wait, ret_result, err);
}

enum kld_status kld_submit(struct kld_connection *connection, const struct kld_request *request,
                           kld_callback callback, void *user, uint64_t *ret_id,
                           struct kld_error *err) {
    struct kld_call *call = NULL;
    unwatch(connection);
    enum kld_status status =
        submit(connection, request, NULL, request->timeout_ns, &call, NULL, callback, user, err);
    if (!status && ret_id)
        *ret_id = call->id;
    return status;
}

static enum kld_status check_copy(const struct kld_connection *connection,
                                  const struct kld_copy_request *copy, struct kld_error *err) {
    const struct kld_region *to = copy->destination, *from = copy->source;
    if (!to || !from || to->connection != connection || from->connection != connection ||
        to->dropped || from->dropped)
        return kld_error_set(err, KLD_INVALID, "copy needs two regions of this connection");
    uint64_t to_at = copy->destination_offset_bytes, from_at = copy->source_offset_bytes;
    uint64_t bytes = copy->bytes;
    if (bytes == 0 || to_at > to->bytes || bytes > to->bytes - to_at || from_at > from->bytes ||
        bytes > from->bytes - from_at)
        return kld_error_set(err, KLD_INVALID, "copy of %llu bytes does not lie inside its regions",
                             (unsigned long long)bytes);
    if (kld_region_is_same(to, from) && to_at < from_at + bytes && from_at < to_at + bytes)
        return kld_error_set(err, KLD_INVALID, "copy overlaps itself");
    return KLD_OK;
}

enum kld_status kld_submit_copy(struct kld_connection *connection, struct kld_region *destination,
                                uint64_t destination_offset_bytes, struct kld_region *source,
                                uint64_t source_offset_bytes, uint64_t bytes, uint32_t stream,
                                uint64_t timeout_ns, kld_callback callback, void *user,
                                uint64_t *ret_id, struct kld_error *err) {
    struct kld_copy_request copy = {destination,         source, destination_offset_bytes,
                                    source_offset_bytes, bytes,  stream};
    struct kld_call *call = NULL;
    enum kld_status status = check_copy(connection, &copy, err);
    unwatch(connection);
    if (!status)
        status = submit(connection, NULL, &copy, timeout_ns, &call, NULL, callback, user, err);
    if (!status && ret_id)
        *ret_id = call->id;
    return status;
}

enum kld_status kld_copy(struct kld_connection *connection, struct kld_region *destination,
                         uint64_t destination_offset_bytes, struct kld_region *source,
                         uint64_t source_offset_bytes, uint64_t bytes, struct kld_error *err) {
    struct kld_copy_request copy = {destination,         source, destination_offset_bytes,
                                    source_offset_bytes, bytes,  0};
    struct kld_wait wait = {0};
    struct kld_call *call = NULL;
    enum kld_status status = check_copy(connection, &copy, err);
    unwatch(connection);
    if (!status)
        status = submit(connection, NULL, &copy, 0, &call, &wait, NULL, NULL, err);
    return status ? status : wait_for(connection, &wait, call, false, NULL, err);
}

void kld_cancel(struct kld_connection *connection, uint64_t id) {
    struct kld_call *call = kld_call_find(connection, id);
    if (call && !call->ended)
        connection->transport->cancel(connection, call);
}
