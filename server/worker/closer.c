/* closer.c - see closer.h. Without memory for a task it closes on the spot: late is worse than
 * slow. Worker process: loop thread, except close_work(). */
#include "server/worker/closer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/worker/worker.h"

struct closer {
    uv_work_t work;
    struct kld_worker *worker;
    struct kld_session *session;
    enum kld_closer_kind kind;
    unsigned count;
    int fds[];
};

void kld_connection_discard(int fd) {
    char byte;
    while (recv(fd, &byte, 1, MSG_DONTWAIT) > 0 || errno == EINTR)
        errno = 0;
}

static void close_all(enum kld_closer_kind kind, const int *fds, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        if (kind == KLD_CLOSE_CONNECTION) {
            shutdown(fds[i], SHUT_RD);
            kld_connection_discard(fds[i]);
        }
        close(fds[i]);
    }
}

static void close_work(uv_work_t *work) {
    struct closer *closer = work->data;
    close_all(closer->kind, closer->fds, closer->count);
}

static void close_after(uv_work_t *work, int cancelled) {
    struct closer *closer = work->data;
    struct kld_worker *worker = closer->worker;
    struct kld_session *session = closer->session;
    (void)cancelled; /* never asked for */
    free(closer);
    if (!session) {
        worker->refusals--;
        kld_worker_accept(worker);
        return;
    }
    session->tasks--;
    kld_session_poll(session);
    kld_session_collect(session);
}

void kld_close_later(struct kld_worker *worker, struct kld_session *session,
                     enum kld_closer_kind kind, const int *fds, unsigned count) {
    struct closer *closer = malloc(sizeof *closer + count * sizeof(int));
    if (!closer) {
        close_all(kind, fds, count);
        return;
    }
    closer->work.data = closer;
    closer->worker = worker;
    closer->session = session;
    closer->kind = kind;
    closer->count = count;
    memcpy(closer->fds, fds, count * sizeof(int));
    if (session)
        session->tasks++;
    else
        worker->refusals++;
    uv_queue_work(&worker->loop, &closer->work, close_work, close_after);
}
