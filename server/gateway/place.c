/* place.c - takes places, gives them back, and has those wait who find none (place.h). It knows
 * nothing of what is done in one. Loop thread only. */
#include "server/gateway/place.h"

#include <inttypes.h>

#define ROUND_MS 20

static bool take_place(struct kld_gateway *gateway) {
    if (atomic_load(&gateway->common->held) >= gateway->config->http_requests_max)
        return false;
    if (atomic_fetch_add(&gateway->common->held, 1) >= gateway->config->http_requests_max) {
        kld_place_give(gateway); /* another loop was faster */
        return false;
    }
    return true;
}

void kld_place_give(struct kld_gateway *gateway) { atomic_fetch_sub(&gateway->common->held, 1); }

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

void kld_place_stop_waiting(struct kld_gateway *gateway, struct kld_waiter *waiter) {
    kld_waiter_remove(gateway, waiter);
    gateway->waiting_for_place -= waiter->in_turn;
    waiter->in_turn = false;
}

enum kld_status kld_place_ask(struct kld_gateway *gateway, struct kld_waiter *waiter,
                              bool *ret_placed, struct kld_error *err) {
    bool draining = atomic_load(&gateway->common->draining);
    *ret_placed = !draining && is_time(gateway) && take_place(gateway);
    if (!draining && !*ret_placed)
        return KLD_OK; /* it waits on */
    kld_place_stop_waiting(gateway, waiter);
    return draining ? refuse(gateway, err) : KLD_OK;
}

enum kld_status kld_place_late(struct kld_gateway *gateway, struct kld_waiter *waiter,
                               struct kld_error *err) {
    kld_place_stop_waiting(gateway, waiter);
    return refuse(gateway, err);
}

/* Behind those who came earlier on this loop: the others take places without a look at it. */
enum kld_status kld_place_begin(struct kld_exchange *exchange, struct kld_waiter *waiter,
                                bool *ret_placed, struct kld_error *err) {
    struct kld_gateway *gateway = exchange->gateway;
    uint64_t wait_ms = gateway->config->http_wait_ms;
    bool draining = atomic_load(&gateway->common->draining);
    *ret_placed = !draining && !gateway->waiting_for_place && take_place(gateway);
    if (*ret_placed)
        return KLD_OK;
    if (draining || !wait_ms || kld_exchange_refused_at_once(exchange))
        return refuse(gateway, err);
    gateway->waiting_for_place++;
    waiter->in_turn = true;
    kld_exchange_pause(exchange);
    kld_waiter_add(gateway, waiter, uv_hrtime() + wait_ms * 1000000);
    return KLD_OK;
}
