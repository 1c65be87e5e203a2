/* deadline.c - a list and a timer that runs while there is something on it (deadline.h). Loop
 * thread. */
#include "server/gateway/deadline.h"

#include <stdlib.h>

struct kld_deadlines {
    struct kld_deadline *first;
    uv_timer_t timer;
};

static void take_out(struct kld_deadlines *deadlines, struct kld_deadline *deadline) {
    deadline->set = false;
    if (deadline->before)
        deadline->before->after = deadline->after;
    else
        deadlines->first = deadline->after;
    if (deadline->after)
        deadline->after->before = deadline->before;
    deadline->before = deadline->after = NULL;
}

/* What passed() does may take others out: so one at a time, from the start. */
static bool pass_one(struct kld_deadlines *deadlines, uint64_t now) {
    for (struct kld_deadline *deadline = deadlines->first; deadline; deadline = deadline->after)
        if (deadline->at_ns <= now) {
            take_out(deadlines, deadline);
            deadline->passed(deadline);
            return true;
        }
    return false;
}

static void look(uv_timer_t *timer) {
    struct kld_deadlines *deadlines = timer->data;
    uint64_t now = uv_hrtime();
    while (pass_one(deadlines, now))
        ;
    if (!deadlines->first)
        uv_timer_stop(timer);
}

enum kld_status kld_deadlines_open(struct kld_gateway *gateway, struct kld_error *err) {
    struct kld_deadlines *deadlines = calloc(1, sizeof *deadlines);
    if (!deadlines)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    uv_timer_init(&gateway->loop, &deadlines->timer);
    deadlines->timer.data = deadlines;
    gateway->deadlines = deadlines;
    return KLD_OK;
}

static void timer_closed(uv_handle_t *handle) { free(handle->data); }

void kld_deadlines_close(struct kld_gateway *gateway) {
    while (gateway->deadlines->first)
        take_out(gateway->deadlines, gateway->deadlines->first);
    uv_close((uv_handle_t *)&gateway->deadlines->timer, timer_closed);
    gateway->deadlines = NULL;
}

void kld_deadline_set(struct kld_gateway *gateway, struct kld_deadline *deadline, uint64_t at_ns,
                      void (*passed)(struct kld_deadline *deadline)) {
    struct kld_deadlines *deadlines = gateway->deadlines;
    kld_deadline_clear(gateway, deadline);
    if (!deadlines || at_ns == UINT64_MAX)
        return;
    deadline->at_ns = at_ns;
    deadline->passed = passed;
    deadline->set = true;
    deadline->after = deadlines->first;
    if (deadline->after)
        deadline->after->before = deadline;
    deadlines->first = deadline;
    if (!uv_is_active((uv_handle_t *)&deadlines->timer))
        uv_timer_start(&deadlines->timer, look, KLD_DEADLINE_TICK_MS, KLD_DEADLINE_TICK_MS);
}

void kld_deadline_clear(struct kld_gateway *gateway, struct kld_deadline *deadline) {
    if (deadline->set)
        take_out(gateway->deadlines, deadline);
}
