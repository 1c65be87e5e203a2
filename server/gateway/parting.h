/* parting.h - connections of one HTTP loop that the server has ended while their clients may still
 * be sending (a lingering close).
 *
 * Who closes a socket that has bytes unread, or gets some afterwards, resets the connection, and
 * the client loses what it has not read yet: a refusal, and the replies before it. MHD (0.9.75)
 * does close so. Therefore what is left of such a connection is kept under a descriptor of its own:
 * nothing is sent any more, what comes is read and dropped, until the client ends it too, or a
 * limit is met: KLD_HTTP_DISCARD_BYTES_MAX with what was dropped before; http_slow_bytes in each
 * http_slow_ms at least; http_parting_ms in all. Of more than a loop's share of
 * http_parting_max the oldest is closed. Loop thread only. */
#ifndef KLD_SERVER_GATEWAY_PARTING_H
#define KLD_SERVER_GATEWAY_PARTING_H

#include <stdint.h>
#include <uv.h>

#include "server/gateway/gateway.h"
#include "server/gateway/watch.h"

struct kld_parting;

struct kld_partings {
    struct kld_gateway *gateway;
    uv_timer_t timer; /* while there are any */
    struct kld_parting *oldest, *newest;
    uint32_t count, count_max;
    int open_handles;
    void (*closed)(void *user); /* NULL: it goes on */
    void *user;
};

void kld_partings_open(struct kld_partings *partings, struct kld_gateway *gateway);
/* MHD is about to close the connection. Nothing happens where the client has ended it, was cut off
 * or has long been silent. */
void kld_partings_take(struct kld_partings *partings, const struct kld_watched *watched);
/* Closes those there are and takes no more; then closed() comes on the loop. */
void kld_partings_close(struct kld_partings *partings, void (*closed)(void *user), void *user);

#endif
