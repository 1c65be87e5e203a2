/* begin.c - an infer request begins: it gets one of http_requests_max places, waits for one with
 * its body not read, or is refused (infer.h). Does not look at the body. Loop thread only.
 *
 * A refusal costs the loop nearly what an answer does. Were all above the limit refused at once,
 * those who ask again at once would leave no time to answer the others, which are what makes room.
 * Who waits costs nothing, and there are at most as many as connections. Who could not be told of a
 * refusal later does not wait: who expects 100 Continue. */
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/infer.h"

#define ROUND_MS 20

/* Also of who was refused and has not sent all of his body yet: that is dropped, and takes no
 * place. */
void kld_infer_give_place(struct kld_infer *infer) {
    if (infer->counted)
        kld_auth_give_request(infer->caller);
    if (infer->placed)
        atomic_fetch_sub(&infer->gateway->common->held, 1);
    infer->counted = infer->placed = false;
}

static bool take_place(struct kld_infer *infer) {
    struct kld_gateway *gateway = infer->gateway;
    if (atomic_load(&gateway->common->held) >= gateway->config->http_requests_max)
        return false;
    if (atomic_fetch_add(&gateway->common->held, 1) >= gateway->config->http_requests_max) {
        atomic_fetch_sub(&gateway->common->held, 1); /* another loop was faster */
        return false;
    }
    return infer->placed = true;
}

/* With its place. */
static enum kld_status admit(struct kld_infer *infer, struct kld_error *err) {
    enum kld_status status = kld_auth_take_request(infer->gateway->auth, infer->caller, err);
    infer->counted = status == KLD_OK;
    return status ? status : kld_body_begin(infer, err);
}

static enum kld_status refuse(struct kld_gateway *gateway, struct kld_error *err) {
    if (atomic_load(&gateway->common->draining)) {
        kld_stats_rejected(gateway->stats, KLD_REJECT_http_draining);
        return kld_error_set(err, KLD_UNAVAILABLE, "the server is shutting down; try again");
    }
    kld_stats_rejected(gateway->stats, KLD_REJECT_http_http_requests_max);
    return kld_error_set(err, KLD_BUSY,
                         "%" PRIu64 " HTTP requests are in flight, the most allowed; try again",
                         gateway->config->http_requests_max);
}

void kld_infer_stop_waiting(struct kld_infer *infer) {
    kld_waiter_remove(infer->gateway, &infer->waiter);
    if (infer->waits_for_place)
        infer->gateway->waiting_for_place--;
    infer->waits_for_place = infer->waiter.in_turn = false;
}

/* Each time that connections go on MHD looks at every suspended one, so many go on at a time: when
 * half of all places are free, or it is time. */
static bool is_time(struct kld_gateway *gateway) {
    uint64_t now_ms = uv_now(&gateway->loop); /* the same for all of a round */
    if (now_ms != gateway->round_ms && now_ms - gateway->round_ms < ROUND_MS &&
        atomic_load(&gateway->common->held) > gateway->config->http_requests_max / 2)
        return false;
    gateway->round_ms = now_ms;
    return true;
}

static struct kld_infer *infer_of(struct kld_waiter *waiter) {
    return (struct kld_infer *)(void *)((char *)waiter - offsetof(struct kld_infer, waiter));
}

static void ask_for_place(struct kld_waiter *waiter) {
    struct kld_infer *infer = infer_of(waiter);
    struct kld_error error;
    bool draining = atomic_load(&infer->gateway->common->draining);
    if (!draining && (!is_time(infer->gateway) || !take_place(infer)))
        return; /* it waits on */
    kld_infer_stop_waiting(infer);
    if (draining ? refuse(infer->gateway, &error) : admit(infer, &error))
        kld_infer_fail(infer, &error);
    else
        kld_exchange_continue(infer->exchange);
}

static void waited_too_long(struct kld_waiter *waiter) {
    struct kld_infer *infer = infer_of(waiter);
    struct kld_error error;
    kld_infer_stop_waiting(infer);
    refuse(infer->gateway, &error);
    kld_infer_fail(infer, &error);
}

/* Behind those who came earlier on this loop: the others take places without a look at it. */
static void wait_for_place(struct kld_infer *infer) {
    struct kld_gateway *gateway = infer->gateway;
    infer->waits_for_place = true;
    gateway->waiting_for_place++;
    infer->waiter.retry = ask_for_place;
    infer->waiter.late = waited_too_long;
    infer->waiter.in_turn = true;
    kld_exchange_pause(infer->exchange);
    kld_waiter_add(gateway, &infer->waiter, uv_hrtime() + gateway->config->http_wait_ms * 1000000);
}

static enum kld_status begin(struct kld_infer *infer, struct kld_error *err) {
    struct kld_gateway *gateway = infer->gateway;
    bool draining = atomic_load(&gateway->common->draining);
    if (!draining && !gateway->waiting_for_place && take_place(infer))
        return admit(infer, err);
    if (draining || !gateway->config->http_wait_ms || kld_exchange_refused_at_once(infer->exchange))
        return refuse(gateway, err);
    wait_for_place(infer);
    return KLD_OK;
}

void kld_infer_begin(struct kld_exchange *exchange) {
    struct kld_gateway *gateway = exchange->gateway;
    struct kld_error error = {.status = KLD_OK};
    /* Before anything may fail: kld_infer_end() takes them back. */
    kld_stats_add(gateway->stats, KLD_STAT_http_requests_in_flight, 1);
    atomic_fetch_add(&gateway->common->infers, 1);
    struct kld_infer *infer = malloc(sizeof *infer);
    if (!infer) {
        kld_error_set(&error, KLD_NO_MEMORY, "out of memory");
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    memset(infer, 0, KLD_INFER_ZEROED_BYTES);
    infer->gateway = gateway;
    infer->exchange = exchange;
    infer->caller = exchange->caller;
    infer->coding = kld_exchange_coding(exchange);
    kld_trace_take(exchange, &infer->trace);
    exchange->state = infer;
    if (begin(infer, &error))
        kld_infer_fail(infer, &error);
}
