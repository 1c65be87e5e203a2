/* accept.c - accept() and whose turn it is (accept.h). Does not read from a connection. First loop;
 * read_taken() on the loop that gets the connection. */
#include "server/gateway/accept.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/gateway/http.h"

#define ACCEPTED_A_TURN 64
#define LOOK_MS 10      /* at the limit: is there room again? */
#define SHORTAGE_MS 100 /* out of descriptors or memory */

struct kld_acceptor {
    uv_poll_t poll;   /* stopped while `timer` runs */
    uv_timer_t timer; /* until it is tried again */
    int listen_fd, open_handles;
    bool metrics;         /* what comes here may ask for no more */
    uint32_t count, next; /* next: where the search begins, so that equals get their turn */
    struct kld_gateway *loop[];
};

/* A connection on its way to its loop. */
struct taken {
    struct kld_letter letter;
    struct kld_gateway *gateway;
    int fd;
    bool metrics;
    struct sockaddr_storage peer;
    socklen_t peer_bytes;
};

static void read_taken(struct kld_letter *letter) {
    struct taken *taken = (struct taken *)(void *)((char *)letter - offsetof(struct taken, letter));
    kld_http_take(taken->gateway->http, taken->fd, (const struct sockaddr *)&taken->peer,
                  taken->peer_bytes, taken->metrics);
    free(taken);
}

static struct kld_gateway *choose(struct kld_acceptor *acceptor) {
    uint32_t best = 0, fewest = UINT32_MAX;
    for (uint32_t k = 0; k < acceptor->count; k++) {
        uint32_t i = (acceptor->next + k) % acceptor->count;
        uint32_t has = atomic_load(&acceptor->loop[i]->connections);
        if (has < fewest) {
            fewest = has;
            best = i;
        }
    }
    acceptor->next = best + 1;
    return acceptor->loop[best];
}

static uint64_t connections_of(const struct kld_acceptor *acceptor) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < acceptor->count; i++)
        sum += atomic_load(&acceptor->loop[i]->connections);
    return sum;
}

static void readable(uv_poll_t *poll, int status, int events);

static void try_again(uv_timer_t *timer) {
    struct kld_acceptor *acceptor = timer->data;
    uv_poll_start(&acceptor->poll, UV_READABLE, readable);
}

static void rest(struct kld_acceptor *acceptor, uint64_t ms) {
    uv_poll_stop(&acceptor->poll);
    uv_timer_start(&acceptor->timer, try_again, ms, 0);
}

static void hand_over(struct kld_acceptor *acceptor, struct taken *taken) {
    struct kld_gateway *gateway = taken->gateway = choose(acceptor);
    atomic_fetch_add(&gateway->connections, 1);
    taken->letter.read = read_taken;
    if (gateway == acceptor->loop[0])
        read_taken(&taken->letter);
    else
        kld_mail_post(&gateway->mail, &taken->letter);
}

static void readable(uv_poll_t *poll, int status, int events) {
    struct kld_acceptor *acceptor = poll->data;
    uint64_t most = acceptor->loop[0]->config->http_connections_max +
                    (acceptor->metrics ? KLD_METRICS_RESERVE : 0);
    for (int i = 0; i < ACCEPTED_A_TURN; i++) {
        if (connections_of(acceptor) >= most) {
            rest(acceptor, LOOK_MS);
            return;
        }
        struct taken *taken = malloc(sizeof *taken);
        if (!taken) {
            rest(acceptor, SHORTAGE_MS);
            return;
        }
        taken->peer_bytes = sizeof taken->peer;
        taken->metrics = acceptor->metrics;
        taken->fd = accept4(acceptor->listen_fd, (struct sockaddr *)&taken->peer,
                            &taken->peer_bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (taken->fd >= 0) {
            hand_over(acceptor, taken);
            continue;
        }
        free(taken);
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            rest(acceptor, SHORTAGE_MS);
        if (errno != EINTR && errno != ECONNABORTED)
            return;
    }
}

enum kld_status kld_acceptor_open(struct kld_gateway *const *loops, uint32_t count, int listen_fd,
                                  bool metrics, struct kld_acceptor **ret_acceptor,
                                  struct kld_error *err) {
    struct kld_acceptor *acceptor = calloc(1, sizeof *acceptor + count * sizeof loops[0]);
    if (!acceptor || uv_poll_init(&loops[0]->loop, &acceptor->poll, listen_fd) != 0) {
        free(acceptor);
        return kld_error_set(err, KLD_UNAVAILABLE, "the listening socket cannot be watched");
    }
    uv_timer_init(&loops[0]->loop, &acceptor->timer);
    acceptor->poll.data = acceptor->timer.data = acceptor;
    acceptor->open_handles = 2;
    acceptor->listen_fd = listen_fd;
    acceptor->metrics = metrics;
    acceptor->count = count;
    for (uint32_t i = 0; i < count; i++)
        acceptor->loop[i] = loops[i];
    uv_poll_start(&acceptor->poll, UV_READABLE, readable);
    *ret_acceptor = acceptor;
    return KLD_OK;
}

static void handle_closed(uv_handle_t *handle) {
    struct kld_acceptor *acceptor = handle->data;
    if (--acceptor->open_handles == 0)
        free(acceptor);
}

void kld_acceptor_close(struct kld_acceptor *acceptor) {
    uv_close((uv_handle_t *)&acceptor->poll, handle_closed);
    uv_close((uv_handle_t *)&acceptor->timer, handle_closed);
}
