/* turns.c - see turns.h. What another thread of libkld calls, the one that watches for fences, goes
 * on to libc; it only reads the clock. */
#include "tests/fuzz/turns/turns.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "tests/fuzz/common/fuzz.h"

#define NEVER UINT64_MAX
#define SECOND_NS 1000000000ull
#define LOOK_NS                                                                                    \
    100000u /* what a look that waits for nothing takes: who only looks gets on, too               \
             */
#define TIMERS 16

struct timer {
    int fd; /* an eventfd in its place */
    bool open;
    uint64_t at_ns; /* NEVER: not armed */
};

static fuzz_turn server;
static bool serving, between;
static __thread bool ours; /* the client's and the server's thread */
static unsigned real_us;
static _Atomic uint64_t now_ns = 1000 * SECOND_NS;
static uint64_t any;
static struct timer timers[TIMERS];

int __real_close(int fd);
int __real_epoll_wait(int fd, struct epoll_event *events, int max, int timeout_ms);
int __real_poll(struct pollfd *fds, nfds_t count, int timeout_ms);
ssize_t __real_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
int __wrap_close(int fd);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int max, int timeout_ms);
ssize_t __wrap_getrandom(void *to, size_t bytes, unsigned flags);
int __wrap_nanosleep(const struct timespec *time, struct timespec *ret_left);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout_ms);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
int __wrap_sched_yield(void);
int __wrap_timerfd_create(int clock, int flags);
int __wrap_timerfd_settime(int fd, int flags, const struct itimerspec *when,
                           struct itimerspec *ret_old);

void fuzz_turns_open(fuzz_turn turn, unsigned settle_us) {
    server = turn;
    ours = true;
    real_us = settle_us;
}

void fuzz_turns_settle(unsigned settle_us) { real_us = settle_us; }

void fuzz_turns_between(bool wanted) { between = wanted; }

/* Whether it did anything. */
static bool give(void) {
    bool did = false;
    if (serving || !server || !ours)
        return false;
    serving = true;
    while (server())
        did = true;
    serving = false;
    return did;
}

void fuzz_turns_give(void) { (void)give(); }

/* ---- The clock --------------------------------------------------------------------------------
 */

/* The executable's own: libcurl's calls come here too. */
int clock_gettime(clockid_t clock, struct timespec *ret_now) {
    if (clock != CLOCK_MONOTONIC && clock != CLOCK_MONOTONIC_RAW && clock != CLOCK_MONOTONIC_COARSE)
        return (int)syscall(SYS_clock_gettime, clock, ret_now);
    uint64_t now = now_ns;
    ret_now->tv_sec = (time_t)(now / SECOND_NS);
    ret_now->tv_nsec = (long)(now % SECOND_NS);
    return 0;
}

static uint64_t ns_of(const struct timespec *time) {
    return (uint64_t)time->tv_sec * SECOND_NS + (uint64_t)time->tv_nsec;
}

int __wrap_nanosleep(const struct timespec *time, struct timespec *ret_left) {
    (void)ret_left;
    now_ns += ns_of(time);
    fuzz_turns_give();
    return 0;
}

/* Nobody else is to get on meanwhile. */
int __wrap_sched_yield(void) { return 0; }

/* A pause of libkld has some chance in it: as long each time here. */
ssize_t __wrap_getrandom(void *to, size_t bytes, unsigned flags) {
    (void)flags;
    any += UINT64_C(0x9e3779b97f4a7c15);
    memcpy(to, &any, bytes < sizeof any ? bytes : sizeof any);
    return (ssize_t)bytes;
}

int __wrap_timerfd_create(int clock, int flags) {
    _Static_assert(TFD_CLOEXEC == EFD_CLOEXEC && TFD_NONBLOCK == EFD_NONBLOCK, "as they are");
    struct timer *timer = timers;
    require(clock == CLOCK_MONOTONIC);
    while (timer < timers + TIMERS && timer->open)
        timer++;
    require(timer < timers + TIMERS);
    *timer = (struct timer){.fd = eventfd(0, flags), .open = true, .at_ns = NEVER};
    timer->open = timer->fd >= 0;
    return timer->fd;
}

static struct timer *timer_of(int fd) {
    for (struct timer *timer = timers; timer < timers + TIMERS; timer++)
        if (timer->open && timer->fd == fd)
            return timer;
    return NULL;
}

int __wrap_timerfd_settime(int fd, int flags, const struct itimerspec *when,
                           struct itimerspec *ret_old) {
    struct timer *timer = timer_of(fd);
    uint64_t at = ns_of(&when->it_value), fired;
    require(timer && flags == TFD_TIMER_ABSTIME && !ret_old && ns_of(&when->it_interval) == 0);
    (void)!read(fd, &fired, sizeof fired); /* what it was set to before is no longer told */
    timer->at_ns = at ? at : NEVER;
    return 0;
}

int __wrap_close(int fd) {
    struct timer *timer = ours ? timer_of(fd) : NULL;
    if (timer)
        timer->open = false;
    return __real_close(fd);
}

/* Those that are due are told; when the next one is. */
static uint64_t timers_due(void) {
    uint64_t next = NEVER, one = 1;
    for (struct timer *timer = timers; timer < timers + TIMERS; timer++) {
        if (!timer->open || timer->at_ns == NEVER)
            continue;
        if (timer->at_ns <= now_ns) {
            require(write(timer->fd, &one, sizeof one) == sizeof one);
            timer->at_ns = NEVER;
        } else if (timer->at_ns < next) {
            next = timer->at_ns;
        }
    }
    return next;
}

/* ---- Waits ------------------------------------------------------------------------------------
 */

static uint64_t end_of(int timeout_ms) {
    return timeout_ms < 0 ? NEVER : now_ns + (uint64_t)timeout_ms * 1000000;
}

/* A moment of real time; whether the server then had something to do. */
static bool settled(void) {
    struct timespec moment = {.tv_nsec = (long)real_us * 1000};
    if (real_us)
        syscall(SYS_nanosleep, &moment, NULL);
    return give();
}

int __wrap_epoll_wait(int fd, struct epoll_event *events, int max, int timeout_ms) {
    uint64_t until = end_of(timeout_ms);
    for (bool waited = false;;) {
        (void)give();
        uint64_t next = timers_due();
        int count = __real_epoll_wait(fd, events, max, 0);
        if (count != 0)
            return count;
        if (timeout_ms == 0) {
            now_ns += LOOK_NS;
            return 0;
        }
        if (now_ns >= until)
            return 0;
        if (!waited && real_us) {
            waited = true;
            (void)settled();
            continue;
        }
        require(next != NEVER || until != NEVER); /* somebody would wait for ever */
        now_ns = next < until ? next : until;
        waited = false;
    }
}

/* libkld's thread that watches a server for its end (client/unix_watch.c) waits as it does
 * anywhere: it moves no clock and has no turn. */
static bool is_another_thread(void) { return syscall(SYS_gettid) != getpid(); }

int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout_ms) {
    if (serving || is_another_thread())
        return __real_poll(fds, count, timeout_ms);
    (void)give();
    int ready = __real_poll(fds, count, 0);
    if (ready == 0 && timeout_ms && settled())
        ready = __real_poll(fds, count, 0);
    if (ready != 0)
        return ready;
    require(timeout_ms >= 0);
    now_ns += timeout_ms ? (uint64_t)timeout_ms * 1000000 : LOOK_NS;
    return 0;
}

ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags) {
    ssize_t sent = __real_send(fd, data, bytes, flags);
    int error = errno;
    if (between)
        (void)give();
    errno = error;
    return sent;
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags) {
    ssize_t sent = __real_sendmsg(fd, message, flags);
    int error = errno;
    if (between)
        (void)give();
    errno = error;
    return sent;
}
