/* tasks.c - see tasks.h. Knows no work. Worker process, loop thread. */
#include "server/worker/tasks.h"

#include "server/worker/health.h"

static void ended(uv_work_t *work, int cancelled);

static void give(struct kld_task *task) {
    uv_queue_work(&task->worker->loop, &task->work, task->run, ended);
}

static void ended(uv_work_t *work, int cancelled) {
    struct kld_task *task = (struct kld_task *)work;
    struct kld_worker *worker = task->worker;
    struct kld_user *user = task->user;
    kld_health_pool_took(worker);
    task->ended(work, cancelled);
    if (!user)
        return;
    struct kld_task *next = STAILQ_FIRST(&user->tasks_waiting);
    if (next) {
        STAILQ_REMOVE_HEAD(&user->tasks_waiting, entry);
        give(next);
    } else {
        user->tasks--;
    }
    kld_user_release(&worker->users, user);
}

void kld_task_queue(struct kld_task *task, struct kld_worker *worker, struct kld_user *user,
                    uv_work_cb run, uv_after_work_cb after) {
    task->worker = worker;
    task->user = user;
    task->run = run;
    task->ended = after;
    if (user)
        kld_user_hold(&worker->users, user);
    if (user && user->tasks == KLD_USER_TASKS_MAX) {
        STAILQ_INSERT_TAIL(&user->tasks_waiting, task, entry);
        return;
    }
    if (user)
        user->tasks++;
    give(task);
}
