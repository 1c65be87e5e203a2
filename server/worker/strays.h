/* strays.h - closes what clients sent, on threads that nothing waits for.
 *
 * The last close of a descriptor takes as long as who sent it likes: a socket lingers over what was
 * not sent, the queue of one holds others, a file system of the sender's own answers when it wants
 * to. So none is closed on the loop or on uv's pool, whose threads everybody needs, but here. What
 * clients of one uid sent is closed in turn, by one thread at a time, so a uid holds up its own
 * only; another thread is started once those that there are have been at one descriptor for
 * KLD_STRAYS_SLOW_MS. At the end the process leaves past those that do not come back.
 *
 * Any thread, but for start, look and end: the loop's. */
#ifndef KLD_SERVER_WORKER_STRAYS_H
#define KLD_SERVER_WORKER_STRAYS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/status.h"

#define KLD_STRAYS_USER_MAX 256 /* of one uid; while more wait, its connections are not read */
#define KLD_STRAYS_MAX 768      /* of all; while more wait, newcomers do too */
#define KLD_STRAYS_THREADS_MAX 16
#define KLD_STRAYS_SLOW_MS 100
#define KLD_STRAYS_END_MS 200  /* given to the threads at the end */
#define KLD_STRAYS_FDS_MAX 253 /* SCM_MAX_FD: all that one packet can carry */

struct kld_strays;

enum kld_status kld_strays_start(struct kld_strays **ret_strays, struct kld_error *err);
/* Frees *strays, at the latest when the last thread is back. NULL is allowed. */
void kld_strays_end(struct kld_strays *strays);

/* Takes over fds[0 .. count-1]. */
void kld_strays_close(struct kld_strays *strays, uid_t uid, const int *fds, unsigned count);
/* Takes over a client's connection: its unread frames are discarded, then it is closed. */
void kld_strays_close_connection(struct kld_strays *strays, uid_t uid, int fd);
/* Reads away what is left in a client's connection, after shutdown() for reading; descriptors in it
 * are closed as above. False: there are too many of this uid, and something is left. */
bool kld_strays_discard(struct kld_strays *strays, uid_t uid, int fd);

bool kld_strays_full(struct kld_strays *strays, uid_t uid); /* KLD_STRAYS_USER_MAX are there */
uint32_t kld_strays_count(struct kld_strays *strays);       /* of all, not closed */
/* Starts another thread if that is needed. Call it now and then. */
void kld_strays_look(struct kld_strays *strays);

#endif
