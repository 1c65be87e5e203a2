/* uv_loop.c - see uv_loop.h. */
#include "server/uv_loop.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "server/descriptors.h"

static void nothing(uv_poll_t *poll, int status, int events) {}

/* The table is made when a descriptor is said to be watched, before the kernel is asked to. There
 * is nothing else in this loop yet, so its turn closes the handle and does nothing else. */
static void watch_once(uv_loop_t *loop, int fd) {
    uv_poll_t poll;
    if (uv_poll_init(loop, &poll, fd) != 0)
        return;
    uv_poll_start(&poll, UV_READABLE, nothing);
    uv_close((uv_handle_t *)&poll, NULL);
    uv_run(loop, UV_RUN_DEFAULT);
}

int kld_uv_loop_open(uv_loop_t *loop) {
    int result = uv_loop_init(loop);
    if (result != 0)
        return result;
    int low = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int high = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, (int)kld_descriptors_max() - 1);
    if (high >= 0)
        watch_once(loop, high);
    if (high >= 0)
        close(high);
    if (low >= 0)
        close(low);
    return 0;
}
