/* uv_loop.c - see uv_loop.h. */
#include "server/uv_loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
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

void kld_uv_loop_stay_awake(const uv_loop_t *loop, uint64_t ns) {
    struct epoll_event event;
    const int timer_ms = uv_backend_timeout(loop); /* 0: something is to be done at once */
    const uint64_t timer_ns = (uint64_t)timer_ms * 1000000;
    const uint64_t until = uv_hrtime() + (timer_ms < 0 || timer_ns > ns ? ns : timer_ns);
    while (epoll_wait(uv_backend_fd(loop), &event, 1, 0) == 0 && uv_hrtime() < until)
        ;
}
