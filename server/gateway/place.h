/* place.h - the http_requests_max places that infer requests and uploads have among those in flight
 * (gateway.h: held), and who waits for one with his body not read.
 *
 * A refusal costs the loop nearly what an answer does. Were all above the limit refused at once,
 * those who ask again at once would leave no time to answer the others, which are what makes room.
 * Who waits costs nothing, and there are at most as many as connections. Who could not be told of a
 * refusal later does not wait: who expects 100 Continue. Loop thread only. */
#ifndef KLD_SERVER_GATEWAY_PLACE_H
#define KLD_SERVER_GATEWAY_PLACE_H

#include <stdbool.h>

#include "server/gateway/http.h"
#include "server/gateway/wait.h"

/* A place at once (*ret_placed), or the exchange is paused and the waiter waits for one, whose
 * retry and late are set; or neither may be, and it is refused. */
enum kld_status kld_place_begin(struct kld_exchange *exchange, struct kld_waiter *waiter,
                                bool *ret_placed, struct kld_error *err);
/* By retry: the same, but an exchange that has its place now is the caller's to continue. */
enum kld_status kld_place_ask(struct kld_gateway *gateway, struct kld_waiter *waiter,
                              bool *ret_placed, struct kld_error *err);
/* By late: it waits no more. Why it gets none. */
enum kld_status kld_place_late(struct kld_gateway *gateway, struct kld_waiter *waiter,
                               struct kld_error *err);
/* It does not wait any more, for a place or for staging. Nothing if it did not. */
void kld_place_stop_waiting(struct kld_gateway *gateway, struct kld_waiter *waiter);
void kld_place_give(struct kld_gateway *gateway); /* one that was taken */

#endif
