/* device.h - the one device of a worker: finding and opening it, and the way back from its thread.
 *
 * Completions: the back end calls done() on its own thread; that pushes the request on a lock-free
 * list and wakes the loop. Wake-ups coalesce, so the loop takes the whole list each time. Launches
 * that a client wants to hear of (EARLY) take the same way on a list of their own. */
#ifndef KLD_SERVER_WORKER_DEVICE_H
#define KLD_SERVER_WORKER_DEVICE_H

#include <stdatomic.h>
#include <uv.h>

#include "server/config.h"
#include "server/stats.h"
#include "server/worker/request.h"

/* Half of the host's memory is what clients may share (quota.h). A pool in the other half has that
 * without staging and one byte in ... for the processes, but at least one in ... */
#define KLD_HOST_POOL_KEPT_PART 16
#define KLD_HOST_POOL_LEAST_PART 8

/* Opens the device that the configuration names. `auto` takes the best back end that has a device;
 * a reason for passing over another one is written to ret_passed_over (text "" if there was none).
 * A worker that replaces one which had another back end (known->backend) or another card
 * (known->uuid) does not change over: a card that is gone for a moment must not turn a GPU service
 * into a CPU one, nor give its number to its neighbour. host_bytes: memory of the host that there
 * is for the server, as its control groups have it; 0: not known. */
enum kld_status kld_worker_device_open(const struct kld_config *config, uint32_t index,
                                       const struct kld_stats_device *known, uint64_t host_bytes,
                                       const struct kld_backend **ret_backend,
                                       struct kld_device **ret_device,
                                       struct kld_error *ret_passed_over, struct kld_error *err);

struct kld_completions {
    _Atomic(struct kld_request *) newest; /* any thread pushes, the loop takes all */
    _Atomic(struct kld_request *) newest_launched;
    _Atomic bool polled; /* the loop looks by itself and needs no wake-up; set by the loop */
    uv_async_t wake;     /* uv_async_send(): any thread; else the loop's */
};

/* kld_job.done of every job; owner is the request, completions the ones of its worker. */
void kld_completions_push(struct kld_completions *completions, struct kld_request *request);
/* kld_job.launched of those whose client wants to know. */
void kld_completions_push_launched(struct kld_completions *completions,
                                   struct kld_request *request);
/* Everything pushed so far, oldest first, linked by next. Loop thread. */
struct kld_request *kld_completions_take(struct kld_completions *completions);
/* Is there anything to take? Loop thread. */
bool kld_completions_waiting(struct kld_completions *completions);
/* The same of launches, linked by next_launched in no order. What was taken by the call above was
 * launched before: take and handle these second and first. */
struct kld_request *kld_completions_take_launched(struct kld_completions *completions);

#endif
