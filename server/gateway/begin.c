/* begin.c - an infer request begins: it gets one of http_requests_max places, waits for one with
 * its body not read, or is refused (place.h, infer.h); and where its struct comes from. Does not
 * look at the body. Loop thread only. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/infer.h"
#include "server/gateway/place.h"

/* With a sanitizer every struct is allocated: it is to see who uses one that is done (clang builds
 * the fuzzers). */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__clang__)
#define SPARES 0
#else
#define SPARES KLD_INFER_SPARES
#endif

enum kld_status kld_infer_spares_open(struct kld_gateway *gateway, struct kld_error *err) {
    struct kld_infer_spares *spares = malloc(sizeof *spares);
    if (!spares)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    spares->first = spares->json_of = NULL;
    memset(spares->json, 0, sizeof spares->json);
    for (unsigned left = SPARES; left; left--) {
        struct kld_infer *infer = &spares->infer[left - 1];
        memset(infer, 0, sizeof *infer); /* its pages are there from now on */
        infer->next_spare = spares->first;
        spares->first = infer;
    }
    gateway->spares = spares;
    return KLD_OK;
}

static struct kld_infer *take(struct kld_infer_spares *spares) {
    struct kld_infer *infer = spares->first;
    if (!infer)
        return malloc(sizeof *infer);
    spares->first = infer->next_spare;
    return infer;
}

void kld_infer_free(struct kld_infer *infer) {
    struct kld_infer_spares *spares = infer->gateway->spares;
    uintptr_t offset = (uintptr_t)infer - (uintptr_t)spares->infer;
    if (offset >= sizeof spares->infer) {
        free(infer);
        return;
    }
    infer->next_spare = spares->first;
    spares->first = infer;
}

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
    struct kld_infer *infer = take(gateway->spares);
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
