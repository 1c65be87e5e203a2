/* queue.h - the pool of requests and their deadlines.
 *
 * All requests are allocated when the worker starts; an empty pool means "busy". Deadlines are a
 * binary heap over the same requests, so one timer serves them all. Decides nothing: core.c does.
 * Loop thread only. */
#ifndef KLD_SERVER_WORKER_QUEUE_H
#define KLD_SERVER_WORKER_QUEUE_H

#include "server/worker/request.h"

struct kld_queue {
    struct kld_request *requests; /* requests_max of them */
    struct kld_request *free;     /* of those that were in use; linked by next */
    struct kld_request **heap;    /* heap[1 .. heap_count], the earliest deadline first */
    uint32_t requests_max, in_use, heap_count;
    uint32_t used; /* of them: the others' pages were never touched */
};

enum kld_status kld_queue_init(struct kld_queue *queue, uint32_t requests_max,
                               struct kld_error *err);
void kld_queue_done(struct kld_queue *queue);

/* NULL: all are in use. What comes back has deadline_ns 0 and is in no list. */
struct kld_request *kld_queue_acquire(struct kld_queue *queue);
void kld_queue_release(struct kld_queue *queue, struct kld_request *request);

/* Enters the request by its deadline_ns; takes it out again (not being there is allowed). */
void kld_queue_watch(struct kld_queue *queue, struct kld_request *request);
void kld_queue_unwatch(struct kld_queue *queue, struct kld_request *request);
/* The request with the earliest deadline, or NULL. */
struct kld_request *kld_queue_earliest(const struct kld_queue *queue);

#endif
