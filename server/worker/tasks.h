/* tasks.h - work on uv's pool for a client. uv takes what it is given in order and knows no client,
 * so it is given at most KLD_USER_TASKS_MAX of one user at a time; the rest waits here, and whoever
 * else comes waits for a few of them and not for a thousand. That one has ended is a sign of life
 * of the pool (health.h). Loop thread, but for `run`. */
#ifndef KLD_SERVER_WORKER_TASKS_H
#define KLD_SERVER_WORKER_TASKS_H

#include <sys/queue.h>
#include <uv.h>

/* Of one user with uv's pool: two for each of its threads, so that none waits for the loop. */
#define KLD_USER_TASKS_MAX 8

struct kld_user;
struct kld_worker;

struct kld_task {
    uv_work_t work; /* data: the owner's */
    STAILQ_ENTRY(kld_task) entry;
    struct kld_worker *worker;
    struct kld_user *user; /* held; NULL: nobody's, and it waits for none */
    uv_work_cb run;
    uv_after_work_cb ended;
};
STAILQ_HEAD(kld_task_list, kld_task);

/* The task is the pool's until `ended`, which may free it. */
void kld_task_queue(struct kld_task *task, struct kld_worker *worker, struct kld_user *user,
                    uv_work_cb run, uv_after_work_cb ended);

#endif
