/* waits.h - looks after the jobs that wait on the device for an event of their client: nothing but
 * the end of this process takes them off the device, where they hold up others, so one that waits
 * too long is the end of the device. Too long is
 * - KLD_ORPHAN_MS after its client has gone; KLD_ORPHAN_DEAD_MS after that client's process has
 * died;
 * - event_hold_ms, with a client that is still there, where a request, or something else that
 * another client waits for, has stood still beside it for as long, and nothing was at work on the
 * device all that time.
 * Only the back end knows what a job waits for: one whose event has come is no such job, however
 * long it takes. Hands out the places of those who wait, but launches and ends no request itself
 * (core.c). Loop thread. */
#ifndef KLD_SERVER_WORKER_WAITS_H
#define KLD_SERVER_WORKER_WAITS_H

#include <stdbool.h>

struct kld_lane;
struct kld_session;
struct kld_worker;

#define KLD_ORPHAN_MS 10000
#define KLD_ORPHAN_DEAD_MS 1000

void kld_waits_init(struct kld_worker *worker);

/* Places of those who wait: KLD_WAITS_MAX in all, KLD_CLIENT_WAITS_MAX of one client. A lane that
 * finds none of the first queues up for one, one request a turn; one whose client has as many as it
 * may is launched again when one of its own has ended. */
/* For the next request of the lane, which names an event or comes behind one that does and has not
 * ended, and goes to the device if this is true. */
bool kld_waits_take(struct kld_lane *lane);
/* Such a request of the session has ended. True: it had as many as it may, so its other lanes may
 * go on. */
bool kld_waits_give(struct kld_session *session);
/* The lane whose turn it is, no longer in the queue; NULL: none waits, or there is no place. */
struct kld_lane *kld_waits_next(struct kld_worker *worker);
/* The lane has nothing queued any more. */
void kld_waits_forget(struct kld_lane *lane);

#endif
