/* core.h - the life of a request, and the only writer of its state.
 *
 * Admission, launch, completion, and the ways out before it: cancel, deadline, the client's end,
 * the device's end. Each request is counted and logged once, when it returns to the pool.
 * Loop thread only. */
#ifndef KLD_SERVER_WORKER_CORE_H
#define KLD_SERVER_WORKER_CORE_H

#include "server/worker/worker.h"

/* admit.c: admits an operator or a copy; its DONE or ERROR follows. On an error nothing was
 * admitted and the caller answers. */
enum kld_status kld_core_submit(struct kld_session *session, const struct kld_frame_submit *frame,
                                struct kld_error *err);
enum kld_status kld_core_copy(struct kld_session *session, const struct kld_frame_copy *frame,
                              struct kld_error *err);
/* A request from the pool, within the limits of its client; it becomes QUEUED with enter(), from
 * where on it cannot fail to be admitted. */
enum kld_status kld_core_admit(struct kld_session *session, uint64_t number, uint32_t stream,
                               struct kld_request **ret_request, struct kld_error *err);
void kld_core_enter(struct kld_request *request, uint64_t timeout_ns);
/* Counts and logs a SUBMIT or COPY that was not admitted; the caller answers it. */
void kld_core_refused(struct kld_session *session, const struct kld_frame_header *header,
                      const struct kld_error *error);
/* Answers the request of that number with KLD_CANCELLED now; KLD_NOT_FOUND if none is in flight. */
enum kld_status kld_core_cancel(struct kld_session *session, uint64_t target,
                                struct kld_error *err);
/* The client is gone: what is queued ends, what runs goes on without it. */
void kld_core_detach(struct kld_session *session);
/* A lane's stream was opened, or could not be. */
void kld_core_lane_opened(struct kld_lane *lane);
/* Jobs that the back end completed. */
void kld_core_completed(struct kld_worker *worker);
/* Deadlines that have passed. */
void kld_core_expire(struct kld_worker *worker);
/* The device is gone: answers everything in flight and stops the loop. */
void kld_core_device_lost(struct kld_worker *worker, const struct kld_error *error);

#endif
