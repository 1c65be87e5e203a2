/* uv_pool.c - see uv_pool.h. */
#include "server/uv_pool.h"

#include <pthread.h>
#include <stdlib.h>

#include "server/signals.h"

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
