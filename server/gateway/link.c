/* link.c - connects to a worker, sends calls, watches their deadlines (link.h).
 * Does not know HTTP, nor the other workers. Loop thread. */
#include "server/gateway/link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/gateway.h"
#include "server/log.h"

#define TICK_MS 10  /* how exactly deadlines are kept */
#define HELD_MAX 31 /* calls, before they are sent all the same: as many as a packet holds */

struct list {
    struct kld_link_call *first, *last;
};

struct kld_link {
    const struct kld_link_options *options;
    uint32_t index;        /* of the worker */
    uint32_t load;         /* calls waiting and running */
    uv_timer_t tick;       /* runs while there are calls */
    uv_poll_t poll;        /* kld_fd() */
    bool connected;        /* a worker has greeted us once; libkld finds its successors */
    uint64_t epoch;        /* of the one that did last */
    _Atomic uint64_t life; /* of that one, see life_of() */
    bool closing, complained;
    int open_handles; /* tick, poll: to be closed */
    struct kld_connection *connection;
    struct kld_region *region; /* of staging */
    uint32_t streams, next_stream;
    struct list waiting, running;
    uint32_t held; /* of waiting, since the last time that those were sent */
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
    struct kld_error lost;
    list_remove(&link->running, call);
    if (status == KLD_UNAVAILABLE) {
        kld_error_set(&lost, status, KLD_WORKER_LOST_TEXT);
        error = &lost;
    }
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
    link->held = 0;
    if (!link->connected || link->closing || !link->waiting.first)
        return;
    kld_cork(link->connection);
    while (!link->closing && link->waiting.first) {
        struct kld_link_call *call = link->waiting.first;
        struct kld_error error = {.status = KLD_OK};
        enum kld_status status = send_call(link, call, &error);
        if (status == KLD_BUSY && link->running.first)
            break;
        list_remove(&link->waiting, call);
        if (status) {
            end(call, status, NULL, &error);
            continue;
        }
        call->submitted = true;
        list_add(&link->running, call);
    }
    if (!link->closing)
        kld_uncork(link->connection);
}

/* Another number for each process of a worker; 0 for none. */
static uint64_t life_of(const struct kld_link *link) {
    const struct kld_stats *worker = &link->options->page->worker[link->index];
    return 1 + atomic_load(&worker->value[KLD_STAT_worker_restarts_total]);
}

bool kld_link_is_up(const struct kld_link *link) {
    return atomic_load(&link->life) == life_of(link);
}

static void look_for_greeting(struct kld_link *link) {
    struct kld_server_info info;
    if (kld_info(link->connection, &info, NULL) != KLD_OK ||
        (link->connected && info.epoch == link->epoch))
        return;
    link->epoch = info.epoch;
    atomic_store(&link->life, life_of(link));
    if (link->connected)
        return;
    link->connected = true;
    link->streams = info.streams_max ? info.streams_max : 1;
    kld_log(KLD_LOG_INFO, "worker connected", "worker=%u streams=%u", link->index, link->streams);
}

static void process(struct kld_link *link) {
    struct kld_error error = {.status = KLD_OK};
    if (link->closing)
        return;
    enum kld_status status = kld_process(link->connection, 0, &error);
    if (status && !link->complained)
        kld_log(KLD_LOG_WARN, "worker not reachable", "worker=%u reason=\"%s\"", link->index,
                error.text);
    link->complained = status != KLD_OK;
    if (!kld_link_is_up(link))
        look_for_greeting(link);
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

/* Also drives libkld while calls are on, should it wait for time to pass and not for a frame. */
static void ticked(uv_timer_t *timer) {
    struct kld_link *link = timer->data;
    process(link);
    watch_deadlines(link);
    if (!link->running.first && !link->waiting.first)
        uv_timer_stop(timer);
}

/* Waits for nobody: the worker is looked for inside kld_process(). */
static enum kld_status connect_later(struct kld_link *link, struct kld_error *err) {
    struct kld_connect_options options = {.client_name = "gateway", .lazy = true};
    struct kld_staging *staging = link->options->staging;
    const char *path = link->options->config->unix;
    char url[KLD_CONFIG_TEXT_MAX + 24];
    snprintf(url, sizeof url, link->index ? "unix:%s.%u" : "unix:%s", path, link->index);
    enum kld_status status = kld_connect(url, &options, &link->connection, err);
    if (status == KLD_OK)
        status = kld_region_import_memfd(link->connection, kld_staging_fd(staging),
                                         kld_staging_bytes(staging), &link->region, err);
    if (status == KLD_OK &&
        uv_poll_init(link->options->loop, &link->poll, kld_fd(link->connection)) != 0)
        status = kld_error_set(err, KLD_NO_MEMORY, "the worker's answers cannot be watched");
    return status;
}

enum kld_status kld_link_open(const struct kld_link_options *options, uint32_t index,
                              struct kld_link **ret_link, struct kld_error *err) {
    struct kld_link *link = calloc(1, sizeof *link);
    if (!link)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    link->options = options;
    link->index = index;
    link->streams = 1;
    enum kld_status status = connect_later(link, err);
    if (status) {
        kld_close(link->connection);
        free(link);
        return status;
    }
    uv_timer_init(options->loop, &link->tick);
    link->tick.data = link->poll.data = link;
    link->open_handles = 2;
    uv_poll_start(&link->poll, UV_READABLE, readable);
    *ret_link = link;
    return KLD_OK;
}

void kld_link_send(struct kld_link *link) {
    if (link->held)
        send_waiting(link);
}

/* Without a word of what it does not take: the tick tries again and tells why. */
static void send_first(struct kld_link *link) {
    struct kld_link_call *call;
    struct kld_error error = {.status = KLD_OK};
    link->held = 0;
    kld_cork(link->connection);
    while ((call = link->waiting.first) && send_call(link, call, &error) == KLD_OK) {
        list_remove(&link->waiting, call);
        call->submitted = true;
        list_add(&link->running, call);
    }
    kld_uncork(link->connection);
}

void kld_link_submit(struct kld_link *link, struct kld_link_call *call) {
    call->link = link;
    link->load++;
    call->submitted = call->is_late = false;
    list_add(&link->waiting, call);
    if (link->connected && (!link->options->holds || ++link->held == HELD_MAX))
        send_first(link);
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

void kld_link_close(struct kld_link *link, void (*closed)(void *user), void *user) {
    link->closing = true;
    link->closed = closed;
    link->closed_user = user;
    uv_poll_stop(&link->poll);
    kld_close(link->connection); /* drops the region too */
    give_up(&link->running);
    give_up(&link->waiting);
    uv_close((uv_handle_t *)&link->tick, handle_closed);
    uv_close((uv_handle_t *)&link->poll, handle_closed);
}
