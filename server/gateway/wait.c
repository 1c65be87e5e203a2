/* wait.c - a list of those who wait for staging, and a timer that runs while there are any
 * (wait.h). Loop thread. */
#include "server/gateway/wait.h"

#include <stdlib.h>

struct list {
    struct kld_waiter *first, *last;
    struct kld_waiter *next; /* of the round that is on: the one to look at then */
    uint64_t left;           /* so many have left it */
};

struct kld_waiters {
    struct kld_staging *staging;
    struct kld_stats *stats;
    struct list for_staging, in_turn;
    uint64_t seen; /* kld_staging_changes() of the last round */
    uv_timer_t timer;
};

static struct list *list_of(struct kld_waiters *waiters, const struct kld_waiter *waiter) {
    return waiter->in_turn ? &waiters->in_turn : &waiters->for_staging;
}

static void take_out(struct kld_waiters *waiters, struct kld_waiter *waiter) {
    struct list *list = list_of(waiters, waiter);
    list->left++;
    if (list->next == waiter)
        list->next = waiter->after;
    if (waiter->before)
        waiter->before->after = waiter->after;
    else
        list->first = waiter->after;
    if (waiter->after)
        waiter->after->before = waiter->before;
    else
        list->last = waiter->before;
    waiter->before = waiter->after = NULL;
    waiter->waits = false;
    kld_stats_add(waiters->stats, KLD_STAT_http_requests_waiting, -1);
    kld_staging_leave(waiters->staging, &waiter->turn);
}

/* Either may free it, and end others. */
static void look_at(struct kld_waiters *waiters, struct kld_waiter *waiter, uint64_t now,
                    bool changed) {
    if (waiter->until_ns <= now) {
        take_out(waiters, waiter);
        waiter->late(waiter);
    } else if (changed) {
        waiter->retry(waiter);
    }
}

/* All have the same time to wait: those behind one who stays have come later, and are not late. */
static void look_in_turn(struct kld_waiters *waiters, uint64_t now) {
    struct list *list = &waiters->in_turn;
    for (uint64_t left = list->left - 1; list->first && list->left != left;) {
        left = list->left;
        look_at(waiters, list->first, now, true);
    }
}

static void look(uv_timer_t *timer) {
    struct kld_waiters *waiters = timer->data;
    struct list *list = &waiters->for_staging;
    uint64_t now = uv_hrtime(), changes = kld_staging_changes(waiters->staging);
    bool changed = changes != waiters->seen;
    waiters->seen = changes;
    look_in_turn(waiters, now);
    for (list->next = list->first; list->next;) {
        struct kld_waiter *waiter = list->next;
        list->next = waiter->after;
        look_at(waiters, waiter, now, changed);
    }
    if (!list->first && !waiters->in_turn.first)
        uv_timer_stop(timer);
}

void kld_waiter_add(struct kld_gateway *gateway, struct kld_waiter *waiter, uint64_t until_ns) {
    struct kld_waiters *waiters = gateway->waiters;
    if (waiter->waits)
        return;
    waiter->waits = true;
    kld_stats_add(waiters->stats, KLD_STAT_http_requests_waiting, 1);
    waiter->until_ns = until_ns;
    struct list *list = list_of(waiters, waiter);
    waiter->before = list->last;
    waiter->after = NULL;
    if (list->last)
        list->last->after = waiter;
    else
        list->first = waiter;
    list->last = waiter;
    if (!uv_is_active((uv_handle_t *)&waiters->timer))
        uv_timer_start(&waiters->timer, look, KLD_WAIT_TICK_MS, KLD_WAIT_TICK_MS);
}

void kld_waiter_remove(struct kld_gateway *gateway, struct kld_waiter *waiter) {
    if (waiter->waits)
        take_out(gateway->waiters, waiter);
}

enum kld_status kld_waiters_open(struct kld_gateway *gateway, struct kld_error *err) {
    struct kld_waiters *waiters = gateway->waiters = calloc(1, sizeof *waiters);
    if (!waiters)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    waiters->staging = gateway->staging;
    waiters->stats = gateway->stats;
    uv_timer_init(&gateway->loop, &waiters->timer);
    waiters->timer.data = waiters;
    return KLD_OK;
}

static void timer_closed(uv_handle_t *handle) { free(handle->data); }

void kld_waiters_close(struct kld_gateway *gateway) {
    uv_close((uv_handle_t *)&gateway->waiters->timer, timer_closed);
}
