/* uv_pool.c - see uv_pool.h. What was tried may be missing a moment later: a thread that has been
 * joined counts for the kernel's limits until it has gone altogether. */
#include "server/uv_pool.h"

#include <pthread.h>
#include <stdlib.h>

#include "server/signals.h"

#define THREADS 4 /* as many as libuv starts, unless UV_THREADPOOL_SIZE says otherwise */

static void wait_for(void *mutex) {
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
}

enum kld_status kld_uv_pool_try(struct kld_error *err) {
    pthread_mutex_t all_made = PTHREAD_MUTEX_INITIALIZER;
    uv_thread_t thread[THREADS];
    int made = 0;
    sigset_t before;
    kld_signals_block(&before);
    pthread_mutex_lock(&all_made); /* all of them at once, not one after the other */
    while (made < THREADS && uv_thread_create(&thread[made], wait_for, &all_made) == 0)
        made++;
    pthread_mutex_unlock(&all_made);
    for (int i = 0; i < made; i++)
        uv_thread_join(&thread[i]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return made == THREADS ? KLD_OK
                           : kld_error_set(err, KLD_NO_MEMORY,
                                           "only %d of %d threads are to be had", made, THREADS);
}

static void nothing(uv_work_t *work) {}

static void ended(uv_work_t *work, int status) { free(work); }

/* Its threads have the mask of whoever starts them. */
void kld_uv_pool_start(uv_loop_t *loop) {
    sigset_t before;
    uv_work_t *work = malloc(sizeof *work);
    kld_signals_block(&before);
    if (work && uv_queue_work(loop, work, nothing, ended) != 0)
        free(work);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
