/* waits.h - looks after the jobs that wait on the device for an event of their client: nothing but
 * the end of this process takes them off the device, where they hold up others, so one that waits
 * too long is the end of the device. Too long is
 * - KLD_ORPHAN_MS after its client has gone; KLD_ORPHAN_DEAD_MS after that client's process has
 * died, where nothing but the event is known to hold the job up;
 * - event_hold_ms, with a client that is still there, where that is known and a request, or
 * something else that another client waits for, has stood still beside it for as long. Ends no
 * request itself (core.c). Loop thread. */
#ifndef KLD_SERVER_WORKER_WAITS_H
#define KLD_SERVER_WORKER_WAITS_H

struct kld_worker;

#define KLD_ORPHAN_MS 10000
#define KLD_ORPHAN_DEAD_MS 1000

void kld_waits_init(struct kld_worker *worker);
/* Such a job goes to the device: from now on, and until there are none. */
void kld_waits_watch(struct kld_worker *worker);

#endif
