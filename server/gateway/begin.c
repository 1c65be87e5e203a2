/* begin.c - an infer request begins: it gets one of http_requests_max places, waits for one with
 * its body not read, or is refused (place.h, infer.h). Does not look at the body. Loop thread only.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/infer.h"
#include "server/gateway/place.h"

/* Also of who was refused and has not sent all of his body yet: that is dropped, and takes no
 * place. */
void kld_infer_give_place(struct kld_infer *infer) {
    if (infer->counted)
        kld_auth_give_request(infer->caller);
    if (infer->placed)
        kld_place_give(infer->gateway);
    infer->counted = infer->placed = false;
}

/* With its place. */
static enum kld_status admit(struct kld_infer *infer, struct kld_error *err) {
    enum kld_status status = kld_auth_take_request(infer->gateway->auth, infer->caller, err);
    infer->counted = status == KLD_OK;
    return status ? status : kld_body_begin(infer, err);
}

static struct kld_infer *infer_of(struct kld_waiter *waiter) {
    return (struct kld_infer *)(void *)((char *)waiter - offsetof(struct kld_infer, waiter));
}

static void ask_for_place(struct kld_waiter *waiter) {
    struct kld_infer *infer = infer_of(waiter);
    struct kld_error error;
    enum kld_status status = kld_place_ask(infer->gateway, waiter, &infer->placed, &error);
    if (!status && !infer->placed)
        return; /* it waits on */
    if (status || admit(infer, &error))
        kld_infer_fail(infer, &error);
    else
        kld_exchange_continue(infer->exchange);
}

static void waited_too_long(struct kld_waiter *waiter) {
    struct kld_infer *infer = infer_of(waiter);
    struct kld_error error;
    kld_place_late(infer->gateway, waiter, &error);
    kld_infer_fail(infer, &error);
}

static enum kld_status begin(struct kld_infer *infer, struct kld_error *err) {
    infer->waiter.retry = ask_for_place;
    infer->waiter.late = waited_too_long;
    enum kld_status status = kld_place_begin(infer->exchange, &infer->waiter, &infer->placed, err);
    return status || !infer->placed ? status : admit(infer, err);
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
