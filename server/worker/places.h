/* places.h - how many connections the Unix socket has room for, and for whom. So that nobody who
 * may connect shuts out another:
 * - The gateway has places of its own beside those of clients.
 * - A user has at most user_clients_max of clients_max. Where that is not set he may have them all,
 *   but a 64th as many is kept beyond them, for users who have next to none.
 * - Who has not said HELLO within hello_ms is sent away.
 * Loop thread. */
#ifndef KLD_SERVER_WORKER_PLACES_H
#define KLD_SERVER_WORKER_PLACES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/config.h"

/* A link of each HTTP loop (http_threads is at most 64) and the pool's; twice, because the ends of
 * the connections of a gateway that was killed may come behind its successor's first. Above them it
 * is a client like others. */
#define KLD_GATEWAY_PLACES (2 * (64 + 1))
#define KLD_PLACES_KEPT_PART                                                                       \
    64 /* one for so many of clients_max is kept beyond, at least one, ... */
#define KLD_USER_PLACES_PART 32 /* ... for users who have less than one in so many, or none */

struct kld_worker;

/* One more connection, of this user? Sessions whose client left but whose work goes on count, too:
 * there may be as many of them as of others. */
enum kld_status kld_places_check(const struct kld_worker *worker, int fd, uid_t uid,
                                 struct kld_error *err);
/* The peer is the gateway, and has a place of its own. */
bool kld_places_is_gateway(const struct kld_worker *worker, int fd);
/* Most sessions that there can be, but for those of work that goes on. */
uint64_t kld_places_max(const struct kld_config *config);

void kld_places_init(struct kld_worker *worker); /* with the loop */
/* There is a session more that has not said HELLO. */
void kld_places_watch(struct kld_worker *worker);

#endif
