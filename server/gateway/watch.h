/* watch.h - the TCP connections of one HTTP loop, looked at now and then: has the peer gone, is it
 * too slow?
 *
 * Too slow is a peer that for http_slow_ms neither finished what it was sending (a request) or
 * taking (a reply) nor moved http_slow_bytes of it, or more if it holds much of staging, or of a
 * device's pool that others wanted all that time. While we make it wait no time counts. Loop thread
 * only. */
#ifndef KLD_SERVER_GATEWAY_WATCH_H
#define KLD_SERVER_GATEWAY_WATCH_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/config.h"
#include "server/stats.h"

struct kld_exchange;
struct kld_tls_keys;

enum kld_phase { KLD_PHASE_IDLE, KLD_PHASE_RECEIVING, KLD_PHASE_COMPUTING, KLD_PHASE_SENDING };

/* One TCP connection. */
struct kld_watched {
    struct kld_watched *before, *after;
    struct kld_exchange *exchange; /* NULL: between two requests */
    int fd;                        /* MHD's */
    uint32_t exchanges;            /* that began on it */
    uint64_t discarded_bytes;      /* http.c's: of the last one's body */
    uint64_t written_before;       /* http.c's: kld_watched_written() when a body of chunks began */
    size_t uri_bytes;              /* headers.c's: of the path and its query, as they came */
    bool cut_off;                  /* it was shut down: the peer has gone, or is too slow */
    bool metrics;                  /* http.c's: it may ask for those alone */
    struct kld_tls_keys *keys;     /* http.c's: that its handshake was made with; NULL: plain */

    /* watch.c's own: what was seen when the phase or the time limit last began. */
    enum kld_phase phase;
    uint32_t seen_exchanges;
    uint64_t since_ns, since_bytes;
    uint64_t wanted_ns; /* since when others want the pool of which it holds some; 0: they do not */
};

struct kld_watch {
    const struct kld_config *config;
    struct kld_stats *stats;
    uv_timer_t timer;
    struct kld_watched *first;
    struct kld_watched *look_at; /* where to look on; NULL: at all of them again */
};

void kld_watch_init(struct kld_watch *watch, uv_loop_t *loop, const struct kld_config *config,
                    struct kld_stats *stats);
/* NULL when out of memory: http.c refuses what is asked on the connection. */
struct kld_watched *kld_watch_add(struct kld_watch *watch, int fd);
/* Bytes that ever came and went on the connections there are now; asks the kernel for each. */
uint64_t kld_watch_moved(const struct kld_watch *watch);
/* Bytes that were ever given to the socket to send; asks the kernel. 0: it does not say. */
uint64_t kld_watched_written(const struct kld_watched *watched);
/* Counts one who is cut off, and says so of its request; NULL: it has none. */
void kld_watch_too_slow(struct kld_watch *watch, struct kld_exchange *exchange);
void kld_watch_remove(struct kld_watch *watch, struct kld_watched *watched); /* frees it */

#endif
