/* link.c - connects to a worker, sends calls, watches their deadlines (link.h).
 * Does not know HTTP, nor the other workers. Everything on the gateway's loop thread, but
 * connect_work(), which runs on the thread pool and is the only user of the connection until it has
 * ended. */
#include "server/gateway/link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/log.h"

#define CONNECT_TIMEOUT_NS 1000000000u
#define CONNECT_PAUSE_NS 100000000u
#define TICK_MS 10 /* how exactly deadlines are kept */

struct list {
    struct kld_link_call *first, *last;
};

struct kld_link {
    const struct kld_link_options *options;
    uint32_t index;    /* of the worker */
    uint32_t load;     /* calls waiting and running */
    uv_work_t connect; /* on the pool while `connecting` */
    uv_timer_t tick;   /* runs while there are calls, or until the next try to connect */
    uv_poll_t poll;    /* kld_fd(), once connected */
    bool connecting, connected, closing, complained;
    int open_handles;                  /* tick, poll: to be closed */
    struct kld_connection *connection; /* the pool's while connecting, then the loop's */
    struct kld_region *region;         /* of staging */
    struct kld_error connect_error;    /* the pool's while connecting */
    uint32_t streams, next_stream;
    uint64_t connect_again_ns; /* uv_hrtime(); not before */
    struct list waiting, running;
    void (*closed)(void *user);
    void *closed_user;
};

static void list_add(struct list *list, struct kld_link_call *call) {
    call->after = NULL;
    call->before = list->last;
    if (list->last)
        list->last->after = call;
    else
        list->first = call;
    list->last = call;
}

static void list_remove(struct list *list, struct kld_link_call *call) {
    if (call->before)
        call->before->after = call->after;
    else
        list->first = call->after;
    if (call->after)
        call->after->before = call->before;
    else
        list->last = call->before;
}

static void end(struct kld_link_call *call, enum kld_status status, const struct kld_result *result,
                const struct kld_error *error) {
    call->link->load--;
    call->link->options->ended(call, status, result, error);
}

static void call_done(void *user, enum kld_status status, const struct kld_result *result,
                      const struct kld_error *error) {
    struct kld_link_call *call = user;
    struct kld_link *link = call->link;
    list_remove(&link->running, call);
    if (result && result->attempts > 1)
        kld_stats_add(link->options->stats, KLD_STAT_requests_repeated_total, result->attempts - 1);
    end(call, status, result, error);
}

/* KLD_BUSY: the worker has as many of ours as it takes; the call stays where it is. */
static enum kld_status send_call(struct kld_link *link, struct kld_link_call *call,
                                 struct kld_error *err) {
    struct kld_request *request = &call->request;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (request->op.tensor[slot].dtype)
            request->bytes[slot].region = link->region;
    request->stream = link->next_stream++ % link->streams;
    request->timeout_ns = 0; /* the link watches the deadline itself: see link.h */
    return kld_submit(link->connection, request, call_done, call, &call->id, err);
}

static void send_waiting(struct kld_link *link) {
    while (link->connected && !link->closing && link->waiting.first) {
        struct kld_link_call *call = link->waiting.first;
        struct kld_error error = {.status = KLD_OK};
        enum kld_status status = send_call(link, call, &error);
        if (status == KLD_BUSY && link->running.first)
            return;
        list_remove(&link->waiting, call);
        if (status) {
            end(call, status, NULL, &error);
            continue;
        }
        call->submitted = true;
        list_add(&link->running, call);
    }
}

static void process(struct kld_link *link) {
    struct kld_error error = {.status = KLD_OK};
    if (!link->connected || link->closing)
        return;
    enum kld_status status = kld_process(link->connection, 0, &error);
    if (status && !link->complained)
        kld_log(KLD_LOG_WARN, "worker not reachable", "worker=%u reason=\"%s\"", link->index,
                error.text);
    link->complained = status != KLD_OK;
    send_waiting(link);
}

static void readable(uv_poll_t *poll, int status, int events) { process(poll->data); }

static void watch_deadlines(struct kld_link *link) {
    uint64_t now = uv_hrtime();
    for (struct kld_link_call *call = link->waiting.first, *after; call; call = after) {
        struct kld_error error;
        after = call->after;
        if (call->deadline_ns > now)
            continue;
        list_remove(&link->waiting, call);
        kld_error_set(&error, KLD_DEADLINE, "the deadline passed before the request was started");
        end(call, KLD_DEADLINE, NULL, &error);
    }
    for (struct kld_link_call *call = link->running.first; call; call = call->after) {
        if (call->is_late || call->deadline_ns > now)
            continue;
        call->is_late = true;
        call->late(call); /* no kld_cancel(): see link.h */
    }
}

static void connect_work(uv_work_t *work) {
    struct kld_link *link = work->data;
    struct kld_connect_options options = {.client_name = "gateway",
                                          .connect_timeout_ns = CONNECT_TIMEOUT_NS};
    const char *path = link->options->config->unix;
    char url[KLD_CONFIG_TEXT_MAX + 24];
    snprintf(url, sizeof url, link->index ? "unix:%s.%u" : "unix:%s", path, link->index);
    if (kld_connect(url, &options, &link->connection, &link->connect_error) != KLD_OK) {
        link->connection = NULL;
        return;
    }
    if (kld_region_import_memfd(link->connection, kld_staging_fd(link->options->staging),
                                kld_staging_bytes(link->options->staging), &link->region,
                                &link->connect_error) == KLD_OK)
        return;
    kld_close(link->connection);
    link->connection = NULL;
}

static void finish_close(struct kld_link *link);

static void connect_ended(uv_work_t *work, int status) {
    struct kld_link *link = work->data;
    struct kld_server_info info;
    link->connecting = false;
    if (link->closing) {
        finish_close(link);
        return;
    }
    if (!link->connection) {
        if (!link->complained)
            kld_log(KLD_LOG_WARN, "worker not reachable", "worker=%u reason=\"%s\"", link->index,
                    link->connect_error.text);
        link->complained = true;
        link->connect_again_ns = uv_hrtime() + CONNECT_PAUSE_NS; /* by the tick */
        return;
    }
    link->complained = false;
    link->streams = 1;
    if (kld_info(link->connection, &info, NULL) == KLD_OK && info.streams_max)
        link->streams = info.streams_max;
    if (uv_poll_init(link->options->loop, &link->poll, kld_fd(link->connection)) != 0) {
        kld_close(link->connection);
        link->connection = NULL;
        link->connect_again_ns = uv_hrtime() + CONNECT_PAUSE_NS;
        return;
    }
    link->poll.data = link;
    link->open_handles++;
    uv_poll_start(&link->poll, UV_READABLE, readable);
    link->connected = true;
    kld_log(KLD_LOG_INFO, "worker connected", "worker=%u streams=%u", link->index, link->streams);
    send_waiting(link);
}

static void start_connecting(struct kld_link *link) {
    link->connecting =
        uv_queue_work(link->options->loop, &link->connect, connect_work, connect_ended) == 0;
}

/* Also drives libkld while calls are on, should it wait for time to pass and not for a frame. */
static void ticked(uv_timer_t *timer) {
    struct kld_link *link = timer->data;
    if (!link->connected && !link->connecting && uv_hrtime() >= link->connect_again_ns)
        start_connecting(link);
    process(link);
    watch_deadlines(link);
    if (!link->running.first && !link->waiting.first && link->connected)
        uv_timer_stop(timer);
}

enum kld_status kld_link_open(const struct kld_link_options *options, uint32_t index,
                              struct kld_link **ret_link, struct kld_error *err) {
    struct kld_link *link = calloc(1, sizeof *link);
    if (!link)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    link->options = options;
    link->index = index;
    link->connect.data = link;
    uv_timer_init(options->loop, &link->tick);
    link->tick.data = link;
    link->open_handles = 1;
    uv_timer_start(&link->tick, ticked, TICK_MS, TICK_MS);
    start_connecting(link);
    *ret_link = link;
    return KLD_OK;
}

void kld_link_submit(struct kld_link *link, struct kld_link_call *call) {
    call->link = link;
    link->load++;
    call->submitted = call->is_late = false;
    list_add(&link->waiting, call);
    if (link->connected && !link->waiting.first->after) {
        struct kld_error error = {.status = KLD_OK};
        if (send_call(link, call, &error) == KLD_OK) {
            list_remove(&link->waiting, call);
            call->submitted = true;
            list_add(&link->running, call);
        } /* else: the tick tries again and tells why */
    }
    if (!uv_is_active((uv_handle_t *)&link->tick))
        uv_timer_start(&link->tick, ticked, TICK_MS, TICK_MS);
}

bool kld_link_withdraw(struct kld_link_call *call) {
    if (call->submitted)
        return false;
    list_remove(&call->link->waiting, call);
    call->link->load--;
    return true;
}

uint32_t kld_link_load(const struct kld_link *link) { return link->load; }

static void handle_closed(uv_handle_t *handle) {
    struct kld_link *link = handle->data;
    if (--link->open_handles)
        return;
    link->closed(link->closed_user);
    free(link);
}

static void give_up(struct list *list) {
    struct kld_error error;
    kld_error_set(&error, KLD_UNAVAILABLE, "the server is shutting down; try again");
    while (list->first) {
        struct kld_link_call *call = list->first;
        list_remove(list, call);
        end(call, KLD_UNAVAILABLE, NULL, &error);
    }
}

static void finish_close(struct kld_link *link) {
    kld_close(link->connection); /* drops the region too */
    link->connection = NULL;
    give_up(&link->running);
    give_up(&link->waiting);
    uv_close((uv_handle_t *)&link->tick, handle_closed);
    if (link->connected)
        uv_close((uv_handle_t *)&link->poll, handle_closed);
}

void kld_link_close(struct kld_link *link, void (*closed)(void *user), void *user) {
    link->closing = true;
    link->closed = closed;
    link->closed_user = user;
    if (link->connected)
        uv_poll_stop(&link->poll);
    if (!link->connecting)
        finish_close(link);
}
