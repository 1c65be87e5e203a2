/* parting.c - reads and drops what still comes on connections that were ended (parting.h). The
 * socket outlives MHD's descriptor of it under a second one. Loop thread only. */
#include "server/gateway/parting.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/gateway/http.h"

#define LOOK_MS 250
#define DROP_BYTES 65536 /* at a time: others of the loop have their turn in between */

struct kld_parting {
    uv_poll_t poll;
    struct kld_partings *partings;
    struct kld_parting *older, *newer;
    int fd;
    uint64_t began_ns, left_bytes;    /* left: of what is dropped at most */
    uint64_t since_ns, since_dropped; /* as of when http_slow_ms last began */
    uint64_t dropped_bytes;
};

static void handle_closed(struct kld_partings *partings) {
    if (--partings->open_handles == 0 && partings->closed)
        partings->closed(partings->user);
}

static void timer_closed(uv_handle_t *handle) { handle_closed(handle->data); }

static void poll_closed(uv_handle_t *handle) {
    struct kld_parting *parting = handle->data;
    struct kld_partings *partings = parting->partings;
    free(parting);
    handle_closed(partings);
}

static void end(struct kld_parting *parting) {
    struct kld_partings *partings = parting->partings;
    if (parting->older)
        parting->older->newer = parting->newer;
    else
        partings->oldest = parting->newer;
    if (parting->newer)
        parting->newer->older = parting->older;
    else
        partings->newest = parting->older;
    if (--partings->count == 0)
        uv_timer_stop(&partings->timer);
    kld_stats_add(partings->gateway->stats, KLD_STAT_http_parting, -1);
    uv_close((uv_handle_t *)&parting->poll, poll_closed);
    close(parting->fd);
}

/* Bytes that came and are dropped, which the kernel does not even copy; 0: no more will come; -1:
 * none for now. */
static ssize_t drop(int fd) {
    char unused[DROP_BYTES];
    ssize_t bytes = recv(fd, unused, sizeof unused, MSG_TRUNC | MSG_DONTWAIT);
    if (bytes < 0 && errno != EAGAIN && errno != EINTR)
        return 0;
    return bytes;
}

static void readable(uv_poll_t *poll, int status, int events) {
    struct kld_parting *parting = poll->data;
    ssize_t bytes = status == 0 ? drop(parting->fd) : 0;
    if (bytes > 0)
        parting->dropped_bytes += (uint64_t)bytes;
    if (bytes == 0 || parting->dropped_bytes >= parting->left_bytes)
        end(parting);
}

static bool is_over(const struct kld_config *config, struct kld_parting *parting, uint64_t now_ns) {
    if (now_ns - parting->began_ns >= config->http_parting_ms * 1000000)
        return true;
    if (now_ns - parting->since_ns < config->http_slow_ms * 1000000)
        return false;
    if (parting->dropped_bytes - parting->since_dropped < config->http_slow_bytes)
        return true;
    parting->since_ns = now_ns;
    parting->since_dropped = parting->dropped_bytes;
    return false;
}

static void look(uv_timer_t *timer) {
    struct kld_partings *partings = timer->data;
    uint64_t now_ns = uv_hrtime();
    for (struct kld_parting *parting = partings->oldest, *newer; parting; parting = newer) {
        newer = parting->newer;
        if (is_over(partings->gateway->config, parting, now_ns))
            end(parting);
    }
}

/* Between two requests many a client keeps a connection that it does not look at. */
static bool is_silent(const struct kld_config *config, int fd) {
    struct tcp_info info = {.tcpi_last_data_recv = 0};
    socklen_t size = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
           info.tcpi_last_data_recv >= config->http_slow_ms;
}

static struct kld_parting *add(struct kld_partings *partings, int fd) {
    struct kld_parting *parting = calloc(1, sizeof *parting);
    if (!parting || uv_poll_init(&partings->gateway->loop, &parting->poll, fd) != 0) {
        free(parting);
        return NULL;
    }
    partings->open_handles++;
    parting->poll.data = parting;
    parting->partings = partings;
    parting->fd = fd;
    parting->older = partings->newest;
    if (parting->older)
        parting->older->newer = parting;
    else
        partings->oldest = parting;
    partings->newest = parting;
    if (partings->count++ == 0)
        uv_timer_start(&partings->timer, look, LOOK_MS, LOOK_MS);
    kld_stats_add(partings->gateway->stats, KLD_STAT_http_parting, 1);
    return parting;
}

void kld_partings_take(struct kld_partings *partings, const struct kld_watched *watched) {
    const struct kld_config *config = partings->gateway->config;
    if (partings->closed || !config->http_parting_ms || watched->cut_off ||
        watched->discarded_bytes >= KLD_HTTP_DISCARD_BYTES_MAX)
        return;
    ssize_t bytes = drop(watched->fd);
    if (bytes == 0 || (bytes < 0 && is_silent(config, watched->fd)))
        return;
    int fd = fcntl(watched->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return;
    shutdown(fd, SHUT_WR); /* with TLS nobody has done so */
    struct kld_parting *parting = add(partings, fd);
    if (!parting) {
        close(fd);
        return;
    }
    parting->began_ns = parting->since_ns = uv_hrtime();
    parting->left_bytes = KLD_HTTP_DISCARD_BYTES_MAX - watched->discarded_bytes;
    parting->dropped_bytes = bytes > 0 ? (uint64_t)bytes : 0;
    uv_poll_start(&parting->poll, UV_READABLE, readable);
    if (partings->count > partings->count_max)
        end(partings->oldest);
}

void kld_partings_open(struct kld_partings *partings, struct kld_gateway *gateway) {
    uint64_t share = gateway->config->http_parting_max / gateway->common->loops;
    *partings = (struct kld_partings){.gateway = gateway, .open_handles = 1};
    partings->count_max = share ? (uint32_t)share : 1;
    uv_timer_init(&gateway->loop, &partings->timer);
    partings->timer.data = partings;
}

void kld_partings_close(struct kld_partings *partings, void (*closed)(void *user), void *user) {
    partings->closed = closed;
    partings->user = user;
    while (partings->oldest)
        end(partings->oldest);
    uv_close((uv_handle_t *)&partings->timer, timer_closed);
}
