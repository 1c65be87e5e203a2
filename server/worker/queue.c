/* queue.c - the pool of requests and the heap of their deadlines.
 * Changes no request's state (core.c does) and starts no timer (worker.c does).
 * Worker process, loop thread. */
#include "server/worker/queue.h"

#include <stdlib.h>

enum kld_status kld_queue_init(struct kld_queue *queue, uint32_t requests_max,
                               struct kld_error *err) {
    *queue = (struct kld_queue){.requests_max = requests_max};
    queue->requests = calloc(requests_max, sizeof *queue->requests);
    queue->heap = calloc((size_t)requests_max + 1, sizeof(struct kld_request *));
    if (!queue->requests || !queue->heap) {
        kld_queue_done(queue);
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for %u requests", requests_max);
    }
    return KLD_OK;
}

void kld_queue_done(struct kld_queue *queue) {
    free(queue->requests);
    free(queue->heap);
    *queue = (struct kld_queue){0};
}

struct kld_request *kld_queue_acquire(struct kld_queue *queue) {
    struct kld_request *request = queue->free;
    if (request)
        queue->free = request->next;
    else if (queue->used < queue->requests_max)
        request = &queue->requests[queue->used++];
    else
        return NULL;
    queue->in_use++;
    request->next = NULL;
    request->answered = request->early = request->told = false;
    request->ready = request->finished = NULL;
    request->session = NULL;
    request->lane = NULL;
    request->number = request->arrival_ns = request->deadline_ns = 0;
    request->heap_place = request->regions_count = 0;
    request->trace.is_there = false;
    return request;
}

void kld_queue_release(struct kld_queue *queue, struct kld_request *request) {
    request->next = queue->free;
    queue->free = request;
    queue->in_use--;
}

static void place(struct kld_queue *queue, uint32_t at, struct kld_request *request) {
    queue->heap[at] = request;
    request->heap_place = at;
}

/* Moves the request at `at` up or down to where its deadline belongs. */
static void settle(struct kld_queue *queue, uint32_t at) {
    struct kld_request *request = queue->heap[at];
    while (at > 1 && queue->heap[at / 2]->deadline_ns > request->deadline_ns) {
        place(queue, at, queue->heap[at / 2]);
        at /= 2;
    }
    for (;;) {
        uint32_t child = 2 * at;
        if (child > queue->heap_count)
            break;
        if (child < queue->heap_count &&
            queue->heap[child + 1]->deadline_ns < queue->heap[child]->deadline_ns)
            child++;
        if (queue->heap[child]->deadline_ns >= request->deadline_ns)
            break;
        place(queue, at, queue->heap[child]);
        at = child;
    }
    place(queue, at, request);
}

void kld_queue_watch(struct kld_queue *queue, struct kld_request *request) {
    place(queue, ++queue->heap_count, request);
    settle(queue, queue->heap_count);
}

void kld_queue_unwatch(struct kld_queue *queue, struct kld_request *request) {
    uint32_t at = request->heap_place;
    if (at == 0)
        return;
    request->heap_place = 0;
    struct kld_request *last = queue->heap[queue->heap_count--];
    if (last == request)
        return;
    place(queue, at, last);
    settle(queue, at);
}

struct kld_request *kld_queue_earliest(const struct kld_queue *queue) {
    return queue->heap_count ? queue->heap[1] : NULL;
}
