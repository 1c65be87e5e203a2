/* uv_pool.c - see uv_pool.h. */
#include "server/uv_pool.h"

#include <stdlib.h>

static void nothing(uv_work_t *work) {}

static void ended(uv_work_t *work, int status) { free(work); }

void kld_uv_pool_start(uv_loop_t *loop) {
    uv_work_t *work = malloc(sizeof *work);
    if (work && uv_queue_work(loop, work, nothing, ended) != 0)
        free(work);
}
