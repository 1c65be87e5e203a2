/* strays.h - closes what clients sent, on threads that nothing waits for.
 *
 * The last close of a descriptor takes as long as who sent it likes: a socket lingers over what was
 * not sent, the queue of one holds others, a file system of the sender's own answers when it wants
 * to. So none is closed on the loop or on uv's pool, whose threads everybody needs, but here. What
 * clients of one uid sent is closed in turn, by one thread at a time, so a uid holds up its own
 * only; another thread is started once those that there are have been at one descriptor for
 * KLD_STRAYS_SLOW_MS. At the end the process leaves past those that do not come back.
 *
 * Connections with descriptors that were not read have a thread of their own for each uid: these
 * are only let go, never asked to be flushed as close() asks of what was received, so a file system
 * that does not answer keeps none of them; and a wait to linger is ended by a signal, at once. So
 * how many a uid leaves behind is no matter of what is in them.
 *
 * Any thread, but for start, look and end: the loop's. KLD_STRAYS_SIGNAL gets a handler that does
 * nothing, and goes to the threads here alone. */
#ifndef KLD_SERVER_WORKER_STRAYS_H
#define KLD_SERVER_WORKER_STRAYS_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/status.h"

#define KLD_STRAYS_USER_MAX 256 /* of one uid; while there are, its connections are not read */
#define KLD_STRAYS_MAX 512      /* of all; while there are, a uid that has any is not read */
#define KLD_STRAYS_CONNECTIONS_MAX 256 /* while as many are closed here, newcomers wait */
#define KLD_STRAYS_THREADS_MAX 16
#define KLD_STRAYS_SLOW_MS 100
#define KLD_STRAYS_END_MS 200  /* given to the threads at the end */
#define KLD_STRAYS_FDS_MAX 253 /* SCM_MAX_FD: all that one packet can carry */
#define KLD_STRAYS_SIGNAL SIGURG

struct kld_strays;

enum kld_status kld_strays_start(struct kld_strays **ret_strays, struct kld_error *err);
/* Frees *strays, at the latest when the last thread is back. NULL is allowed. */
void kld_strays_end(struct kld_strays *strays);

/* Takes over fds[0 .. count-1]. */
void kld_strays_close(struct kld_strays *strays, uid_t uid, const int *fds, unsigned count);
/* Takes over a client's connection: its unread frames are discarded, then it is closed. */
void kld_strays_close_connection(struct kld_strays *strays, uid_t uid, int fd);
/* Reads away what is left in a client's connection, after shutdown() for reading, up to the first
 * packet with descriptors. True: there was none, so to close it takes no time. */
bool kld_strays_discard(int fd);
/* All of it, in a process that ends next: descriptors are left open. */
void kld_strays_discard_at_end(int fd);

/* This uid has as many as it may, received and not closed: nothing more of it is read. */
bool kld_strays_full(struct kld_strays *strays, uid_t uid);
bool kld_strays_crowded(struct kld_strays *strays);   /* KLD_STRAYS_CONNECTIONS_MAX */
uint32_t kld_strays_count(struct kld_strays *strays); /* of all and both kinds, not closed */
/* Starts another thread if that is needed. Call it now and then. */
void kld_strays_look(struct kld_strays *strays);

#endif
