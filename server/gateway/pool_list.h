/* pool_list.h - a list of jobs of a pool, in the order they came (pool.c). Owns none of them. The
 * pool's thread. */
#ifndef KLD_SERVER_GATEWAY_POOL_LIST_H
#define KLD_SERVER_GATEWAY_POOL_LIST_H

#include "server/gateway/pool.h"

struct kld_pool_list {
    struct kld_pool_job *first, *last;
};

static inline void kld_pool_list_add(struct kld_pool_list *list, struct kld_pool_job *job) {
    job->after = NULL;
    job->before = list->last;
    if (list->last)
        list->last->after = job;
    else
        list->first = job;
    list->last = job;
}

static inline void kld_pool_list_remove(struct kld_pool_list *list, struct kld_pool_job *job) {
    if (job->before)
        job->before->after = job->after;
    else
        list->first = job->after;
    if (job->after)
        job->after->before = job->before;
    else
        list->last = job->before;
}

#endif
