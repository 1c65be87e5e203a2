/* closer.h - closes descriptors on uv's pool.
 *
 * The last close of a large memfd frees its pages, which can take as long as it likes, and a
 * connection may hold memfds in frames that were never read. So no descriptor of a client is closed
 * on the loop. Loop thread. */
#ifndef KLD_SERVER_WORKER_CLOSER_H
#define KLD_SERVER_WORKER_CLOSER_H

#include "server/worker/session.h"

enum kld_closer_kind {
    KLD_CLOSE_PASSED,     /* descriptors that came with a frame */
    KLD_CLOSE_CONNECTION, /* unread frames are discarded first: closing a socket with some would
                           * reset the connection and with it replies not yet read */
};

/* session: whose `tasks` this counts in until it is done; NULL for a connection that has none, then
 * worker->refusals counts. Takes over fds[0 .. count-1]. */
void kld_close_later(struct kld_worker *worker, struct kld_session *session,
                     enum kld_closer_kind kind, const int *fds, unsigned count);

/* Reads away what is left in a connection. Call shutdown() first: then nothing more can arrive, and
 * this ends. Any thread. */
void kld_connection_discard(int fd);

#endif
