/* watch.c - finds connections whose peer has gone or is too slow, and shuts them down (watch.h).
 *
 * MHD 0.9.75 with epoll overlooks the end of a connection that arrives together with the last
 * bytes; it would hold them until http_idle_ms. And its time limit is for silence: a byte now and
 * then would hold a connection for ever. Shutting a socket down gives it an event that it does not
 * overlook. Loop thread only. */
#include "server/gateway/watch.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "server/gateway/http.h"
#include "server/gateway/pool.h"

#define LOOK_MS 500
#define LOOK_CONNECTIONS_MAX 32 /* in one turn of the loop, ... */
#define LOOK_ON_MS 2            /* ... then the next ones */

/* struct tcp_info as the kernel fills it, up to the last counter asked for here. */
struct counters {
    struct tcp_info info;
    uint64_t pacing_rate, max_pacing_rate, bytes_acked, bytes_received;
    /* Linux 4.19 */
    uint32_t segments_out, segments_in, unsent_bytes, others[3];
    uint64_t rate, times[3];
    uint32_t delivered[2];
    uint64_t bytes_sent, bytes_resent;
};

static enum kld_phase phase_of(const struct kld_watched *watched) {
    const struct kld_exchange *exchange = watched->exchange;
    if (!exchange)
        return KLD_PHASE_IDLE;
    if (exchange->queued)
        return exchange->suspended ? KLD_PHASE_COMPUTING : KLD_PHASE_SENDING;
    return exchange->suspended || exchange->finished ? KLD_PHASE_COMPUTING : KLD_PHASE_RECEIVING;
}

static void begin(struct kld_watched *watched, enum kld_phase phase, uint64_t bytes) {
    watched->phase = phase;
    watched->seen_exchanges = watched->exchanges;
    watched->since_ns = uv_hrtime();
    watched->since_bytes = bytes;
}

static void look_at_pool(struct kld_watched *watched) {
    const struct kld_exchange *exchange = watched->exchange;
    if (!exchange || !exchange->held_pool_bytes || !kld_pool_is_wanted(exchange->held_pool))
        watched->wanted_ns = 0;
    else if (!watched->wanted_ns)
        watched->wanted_ns = uv_hrtime();
}

/* Who holds much has to be quick: else a few could hold all staging, or a device's pool, at next to
 * no cost. Of the pool there is mostly plenty, and a large body on a slow link takes its time. */
static uint64_t bytes_least(const struct kld_watch *watch, const struct kld_watched *watched) {
    uint64_t least = watch->config->http_slow_bytes;
    uint64_t held = watched->exchange ? watched->exchange->held_bytes : 0;
    if (watched->exchange && watched->wanted_ns && watched->wanted_ns <= watched->since_ns)
        held += watched->exchange->held_pool_bytes;
    uint64_t part = held / watch->config->http_slow_parts;
    return part > least ? part : least;
}

/* Between two requests the peer may be silent, until it begins to send one. */
static bool is_slow(const struct kld_watch *watch, struct kld_watched *watched) {
    struct counters counters = {.bytes_acked = 0};
    socklen_t size = sizeof counters;
    enum kld_phase phase = phase_of(watched);
    look_at_pool(watched);
    if (phase == KLD_PHASE_COMPUTING) {
        watched->phase = phase;
        return false;
    }
    if (getsockopt(watched->fd, IPPROTO_TCP, TCP_INFO, &counters, &size) != 0 ||
        size < offsetof(struct counters, segments_out))
        return false;
    uint64_t bytes = phase == KLD_PHASE_SENDING ? counters.bytes_acked : counters.bytes_received;
    bool same = watched->seen_exchanges == watched->exchanges;
    if (phase == KLD_PHASE_IDLE && same && watched->phase == KLD_PHASE_IDLE) {
        if (bytes != watched->since_bytes)
            begin(watched, KLD_PHASE_RECEIVING, watched->since_bytes); /* the head of a request */
        return false;
    }
    if (phase == KLD_PHASE_IDLE && same && watched->phase == KLD_PHASE_RECEIVING &&
        bytes != watched->since_bytes)
        phase = KLD_PHASE_RECEIVING;
    if (phase != watched->phase || !same) {
        begin(watched, phase, bytes);
        return false;
    }
    if (phase == KLD_PHASE_IDLE ||
        uv_hrtime() - watched->since_ns < watch->config->http_slow_ms * 1000000)
        return false;
    if (bytes - watched->since_bytes < bytes_least(watch, watched))
        return true;
    begin(watched, phase, bytes);
    return false;
}

/* Where bytes lie in the socket that nobody reads for now, the end lies behind them. */
static bool has_ended_behind_bytes(int fd) {
    struct tcp_info info = {.tcpi_state = TCP_ESTABLISHED};
    socklen_t size = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
           info.tcpi_state != TCP_ESTABLISHED;
}

/* While we send, MHD finds out by itself. Who closed only his side of the connection and waits for
 * a long answer is taken for gone, too: there is no telling. */
static bool has_gone(const struct kld_watched *watched) {
    enum kld_phase phase = phase_of(watched);
    char unused;
    if (phase == KLD_PHASE_SENDING)
        return false;
    ssize_t got = recv(watched->fd, &unused, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got > 0)
        return phase == KLD_PHASE_COMPUTING && has_ended_behind_bytes(watched->fd);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

/* What a slow reader has not taken, MiBs, the kernel would keep long behind the close, and none of
 * our limits counts it. Where nothing is owed the connection ends as any other. */
static void drop_unsent(const struct kld_watched *watched) {
    struct linger none = {.l_onoff = 1, .l_linger = 0};
    struct counters counters = {.bytes_acked = 0};
    socklen_t size = sizeof counters;
    if (getsockopt(watched->fd, IPPROTO_TCP, TCP_INFO, &counters, &size) == 0 &&
        (counters.info.tcpi_unacked || counters.unsent_bytes))
        setsockopt(watched->fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
}

void kld_watch_too_slow(struct kld_watch *watch, struct kld_exchange *exchange) {
    kld_stats_add(watch->stats, KLD_STAT_http_slow_total, 1);
    if (exchange)
        exchange->too_slow = true;
}

/* Nobody reads from a suspended connection, so it would not see that it ended. */
static void end(struct kld_watched *watched) {
    watched->cut_off = true;
    shutdown(watched->fd, SHUT_RDWR);
    if (watched->exchange && watched->exchange->suspended)
        kld_exchange_gone(watched->exchange);
}

static void look(uv_timer_t *timer) {
    struct kld_watch *watch = timer->data;
    struct kld_watched *watched = watch->look_at ? watch->look_at : watch->first;
    for (int i = 0; watched && i < LOOK_CONNECTIONS_MAX; i++, watched = watched->after) {
        bool slow = is_slow(watch, watched);
        if (slow) {
            kld_watch_too_slow(watch, watched->exchange);
            drop_unsent(watched);
        }
        if (slow || has_gone(watched))
            end(watched);
    }
    watch->look_at = watched;
    if (watch->first)
        uv_timer_start(timer, look, watched ? LOOK_ON_MS : LOOK_MS, 0);
}

uint64_t kld_watch_moved(const struct kld_watch *watch) {
    uint64_t moved = 0;
    for (const struct kld_watched *watched = watch->first; watched; watched = watched->after) {
        struct counters counters = {.bytes_acked = 0};
        socklen_t size = sizeof counters;
        if (getsockopt(watched->fd, IPPROTO_TCP, TCP_INFO, &counters, &size) == 0)
            moved += counters.bytes_acked + counters.bytes_received;
    }
    return moved;
}

uint64_t kld_watched_written(const struct kld_watched *watched) {
    struct counters counters = {.bytes_acked = 0};
    socklen_t size = sizeof counters;
    if (getsockopt(watched->fd, IPPROTO_TCP, TCP_INFO, &counters, &size) != 0)
        return 0;
    return counters.bytes_sent - counters.bytes_resent + counters.unsent_bytes;
}

void kld_watch_init(struct kld_watch *watch, uv_loop_t *loop, const struct kld_config *config,
                    struct kld_stats *stats) {
    *watch = (struct kld_watch){.config = config, .stats = stats};
    uv_timer_init(loop, &watch->timer);
    watch->timer.data = watch;
}

struct kld_watched *kld_watch_add(struct kld_watch *watch, int fd) {
    struct kld_watched *watched = calloc(1, sizeof *watched);
    if (!watched)
        return NULL;
    watched->fd = fd;
    watched->after = watch->first;
    if (watched->after)
        watched->after->before = watched;
    else
        uv_timer_start(&watch->timer, look, LOOK_MS, 0);
    watch->first = watched;
    return watched;
}

void kld_watch_remove(struct kld_watch *watch, struct kld_watched *watched) {
    if (watched->before)
        watched->before->after = watched->after;
    else
        watch->first = watched->after;
    if (watched->after)
        watched->after->before = watched->before;
    if (watch->look_at == watched)
        watch->look_at = watched->after;
    free(watched);
}
