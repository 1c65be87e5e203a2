/* closer.c - see closer.h. Without memory for a task it closes on the spot: late is worse than
 * slow. Worker process: loop thread, except close_work(). */
#include "server/worker/closer.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/worker/worker.h"

struct closer {
    struct kld_task task;
    struct kld_worker *worker;
    struct kld_session *session;
    int fd;
};

static void close_connection(struct kld_worker *worker, int fd) {
    struct ucred peer = {.uid = (uid_t)-1};
    socklen_t size = sizeof peer;
    shutdown(fd, SHUT_RD);
    if (kld_strays_discard(fd)) {
        close(fd);
        return;
    }
    (void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    shutdown(fd, SHUT_WR); /* its client is told now */
    kld_strays_close_connection(worker->strays, peer.uid, fd);
}

static void close_work(uv_work_t *work) {
    struct closer *closer = work->data;
    close_connection(closer->worker, closer->fd);
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
    kld_session_collect(session);
}

void kld_close_connection(struct kld_worker *worker, struct kld_session *session, int fd) {
    struct closer *closer = malloc(sizeof *closer);
    if (!closer) {
        close_connection(worker, fd);
        return;
    }
    closer->task.work.data = closer;
    closer->worker = worker;
    closer->session = session;
    closer->fd = fd;
    if (session)
        session->tasks++;
    else
        worker->refusals++;
    kld_task_queue(&closer->task, worker, session ? session->user : NULL, close_work, close_after);
}
