/* closer.h - closes connections of clients on uv's pool.
 *
 * A connection may hold descriptors in frames that were never read, whose last close takes as long
 * as it likes: then it goes to strays.h. Unread frames are discarded first: closing a socket with
 * some would reset the connection and with it replies not yet read. Loop thread. */
#ifndef KLD_SERVER_WORKER_CLOSER_H
#define KLD_SERVER_WORKER_CLOSER_H

#include "server/worker/session.h"

/* session: whose `tasks` this counts in until it is done; NULL for a connection that has none, then
 * worker->refusals counts. Takes over fd. */
void kld_close_connection(struct kld_worker *worker, struct kld_session *session, int fd);

#endif
