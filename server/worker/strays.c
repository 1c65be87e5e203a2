/* strays.c - see strays.h: a list under a mutex, and the threads that take from it. Looks into no
 * descriptor. Any thread. */
#include "server/worker/strays.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define THREAD_STACK_BYTES ((size_t)256 << 10)
#define LINGER_NS 100000 /* then a close that lingers is ended, and the next of those with it */

#ifndef sigev_notify_thread_id /* glibc before 2.38 does not name it */
#define sigev_notify_thread_id _sigev_un._tid
#endif

struct stray {
    TAILQ_ENTRY(stray) entry;
    uid_t uid;
    bool is_connection;
    unsigned count;
    int fds[];
};

/* A thread, or a place for one. */
struct place {
    struct kld_strays *strays;
    bool is_taken, is_busy;
    uid_t uid; /* busy: whose, and which */
    bool is_connection;
    atomic_uint left; /* of them, not closed */
    _Atomic uint64_t since_ns;
};

struct kld_strays {
    atomic_uint count, connections; /* not closed: what was received; connections */
    pthread_mutex_t mutex;
    pthread_cond_t more, gone;
    TAILQ_HEAD(stray_list, stray) list; /* under the mutex, as all below */
    struct place places[KLD_STRAYS_THREADS_MAX];
    unsigned threads, idle;
    bool ending;
    bool left; /* who ended it does not wait any longer: the last thread frees it */
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Whoever set a socket to linger wanted to wait for what it has to send; nobody here does. */
static void close_now(int fd) {
    const struct linger off = {0};
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &off, sizeof off);
    close(fd);
}

/* What is left in a connection, after shutdown() for reading. `control`: room for the credentials
 * of a packet; descriptors that do not fit in behind them are closed by the kernel, here. stops: at
 * the first packet with descriptors, which is left there. False: there is one, or there may be. */
static bool discard(int fd, bool stops, void *control, size_t control_bytes) {
    const int on = 1; /* each packet brings credentials, so one of no bytes is not the end */
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0)
        return false;
    for (int peek = stops ? MSG_PEEK : 0;;) {
        char byte;
        struct iovec part = {.iov_base = &byte, .iov_len = 1};
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = control,
                                 .msg_controllen = control_bytes};
        ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC | peek);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 || (got == 0 && message.msg_controllen == 0))
            return true;
        if (peek && (message.msg_flags & MSG_CTRUNC))
            return false;
        peek = stops && !peek ? MSG_PEEK : 0;
    }
}

union credentials {
    char space[CMSG_SPACE(sizeof(struct ucred))];
    struct cmsghdr align;
};

static void close_connection(int fd) {
    union credentials control;
    (void)discard(fd, false, control.space, sizeof control.space);
    close(fd);
}

static void close_stray(struct kld_strays *strays, struct stray *stray, struct place *place) {
    for (unsigned i = 0; i < stray->count; i++) {
        atomic_store(&place->since_ns, now_ns());
        if (stray->is_connection)
            close_connection(stray->fds[i]);
        else
            close_now(stray->fds[i]);
        atomic_fetch_sub(&place->left, 1);
        atomic_fetch_sub(stray->is_connection ? &strays->connections : &strays->count, 1);
    }
}

/* ---- What ends a close that lingers ---------------------------------------------------------- */

static void nothing(int number) { (void)number; }

/* A signal ends the wait of a socket that lingers; of all that lie in the same queue at once. */
static bool make_ticks(timer_t *ret_ticks) {
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = KLD_STRAYS_SIGNAL};
    sigset_t mask;
    event.sigev_notify_thread_id = gettid();
    sigemptyset(&mask);
    sigaddset(&mask, KLD_STRAYS_SIGNAL);
    return pthread_sigmask(SIG_UNBLOCK, &mask, NULL) == 0 &&
           timer_create(CLOCK_MONOTONIC, &event, ret_ticks) == 0;
}

static void set_ticks(timer_t ticks, long every_ns) {
    const struct itimerspec times = {.it_value.tv_nsec = every_ns, .it_interval.tv_nsec = every_ns};
    timer_settime(ticks, 0, &times, NULL);
}

/* ---- Under the mutex ------------------------------------------------------------------------- */

static bool is_served(const struct kld_strays *strays, const struct stray *stray) {
    for (unsigned i = 0; i < KLD_STRAYS_THREADS_MAX; i++) {
        const struct place *place = &strays->places[i];
        if (place->is_busy && place->uid == stray->uid &&
            place->is_connection == stray->is_connection)
            return true;
    }
    return false;
}

/* The next that no other thread keeps waiting, or NULL. */
static struct stray *next(const struct kld_strays *strays) {
    struct stray *stray;
    TAILQ_FOREACH(stray, &strays->list, entry)
    if (!is_served(strays, stray))
        return stray;
    return NULL;
}

static bool all_are_slow(const struct kld_strays *strays) {
    uint64_t now = now_ns();
    for (unsigned i = 0; i < KLD_STRAYS_THREADS_MAX; i++) {
        uint64_t since = atomic_load(&strays->places[i].since_ns);
        if (strays->places[i].is_busy &&
            (now < since || now - since < KLD_STRAYS_SLOW_MS * UINT64_C(1000000)))
            return false;
    }
    return true;
}

static void *serve(void *argument);

static bool start_thread(struct kld_strays *strays) {
    struct place *place = strays->places;
    pthread_attr_t attributes;
    pthread_t thread;
    while (place->is_taken)
        place++;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, THREAD_STACK_BYTES);
    place->strays = strays;
    bool started = pthread_create(&thread, &attributes, serve, place) == 0;
    pthread_attr_destroy(&attributes);
    place->is_taken = started;
    strays->threads += started;
    return started;
}

static void look(struct kld_strays *strays) {
    if (!strays->idle && strays->threads < KLD_STRAYS_THREADS_MAX && next(strays) &&
        all_are_slow(strays))
        start_thread(strays);
}

/* ---- The threads ----------------------------------------------------------------------------- */

static void free_strays(struct kld_strays *strays) {
    pthread_cond_destroy(&strays->more);
    pthread_cond_destroy(&strays->gone);
    pthread_mutex_destroy(&strays->mutex);
    free(strays);
}

static void *serve(void *argument) {
    struct place *place = argument;
    struct kld_strays *strays = place->strays;
    timer_t ticks;
    bool ticking = make_ticks(&ticks);
    pthread_mutex_lock(&strays->mutex);
    for (;;) {
        struct stray *stray = next(strays);
        if (stray) {
            TAILQ_REMOVE(&strays->list, stray, entry);
            place->uid = stray->uid;
            place->is_connection = stray->is_connection;
            atomic_store(&place->left, stray->count);
            atomic_store(&place->since_ns, now_ns());
            place->is_busy = true;
            pthread_mutex_unlock(&strays->mutex);
            if (ticking)
                set_ticks(ticks, LINGER_NS);
            close_stray(strays, stray, place);
            if (ticking)
                set_ticks(ticks, 0);
            free(stray);
            pthread_mutex_lock(&strays->mutex);
            place->is_busy = false;
            continue;
        }
        if (strays->ending || strays->idle) /* one is enough to wait for more */
            break;
        strays->idle++;
        pthread_cond_wait(&strays->more, &strays->mutex);
        strays->idle--;
    }
    if (ticking)
        timer_delete(ticks);
    place->is_taken = false;
    bool last = --strays->threads == 0;
    bool left = strays->left;
    pthread_cond_signal(&strays->gone);
    pthread_mutex_unlock(&strays->mutex);
    if (last && left)
        free_strays(strays);
    return NULL;
}

/* ---- What others call ------------------------------------------------------------------------ */

/* Who waits for it is not held up by a clock that is set back. */
static void init_monotonic(pthread_cond_t *cond) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

enum kld_status kld_strays_start(struct kld_strays **ret_strays, struct kld_error *err) {
    struct kld_strays *strays = calloc(1, sizeof *strays);
    const struct sigaction ends = {.sa_handler = nothing}; /* not SA_RESTART */
    if (!strays)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    sigaction(KLD_STRAYS_SIGNAL, &ends, NULL);
    TAILQ_INIT(&strays->list);
    pthread_mutex_init(&strays->mutex, NULL);
    pthread_cond_init(&strays->more, NULL);
    init_monotonic(&strays->gone);
    pthread_mutex_lock(&strays->mutex);
    bool started = start_thread(strays);
    pthread_mutex_unlock(&strays->mutex);
    if (!started) {
        free_strays(strays);
        return kld_error_set(err, KLD_NO_MEMORY, "no thread to close descriptors");
    }
    *ret_strays = strays;
    return KLD_OK;
}

void kld_strays_end(struct kld_strays *strays) {
    if (!strays)
        return;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += KLD_STRAYS_END_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&strays->mutex);
    strays->ending = true;
    pthread_cond_broadcast(&strays->more);
    while (strays->threads &&
           pthread_cond_timedwait(&strays->gone, &strays->mutex, &until) != ETIMEDOUT)
        ;
    bool last = strays->threads == 0;
    strays->left = true;
    pthread_mutex_unlock(&strays->mutex);
    if (last)
        free_strays(strays);
}

static void add(struct kld_strays *strays, uid_t uid, bool is_connection, const int *fds,
                unsigned count) {
    struct stray *stray = malloc(sizeof *stray + count * sizeof(int));
    if (!stray) { /* they would be lost; most take no time */
        for (unsigned i = 0; i < count; i++)
            close_now(fds[i]);
        return;
    }
    stray->uid = uid;
    stray->is_connection = is_connection;
    stray->count = count;
    memcpy(stray->fds, fds, count * sizeof(int));
    atomic_fetch_add(is_connection ? &strays->connections : &strays->count, count);
    pthread_mutex_lock(&strays->mutex);
    TAILQ_INSERT_TAIL(&strays->list, stray, entry);
    look(strays);
    pthread_cond_signal(&strays->more);
    pthread_mutex_unlock(&strays->mutex);
}

void kld_strays_close(struct kld_strays *strays, uid_t uid, const int *fds, unsigned count) {
    add(strays, uid, false, fds, count);
}

void kld_strays_close_connection(struct kld_strays *strays, uid_t uid, int fd) {
    add(strays, uid, true, &fd, 1);
}

bool kld_strays_discard(int fd) {
    union credentials control;
    return discard(fd, true, control.space, sizeof control.space);
}

void kld_strays_discard_at_end(int fd) {
    union {
        char space[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(sizeof(int) * KLD_STRAYS_FDS_MAX)];
        struct cmsghdr align;
    } control;
    (void)discard(fd, false, control.space, sizeof control.space);
}

static unsigned count_of(struct kld_strays *strays, uid_t uid) {
    unsigned count = 0;
    const struct stray *stray;
    pthread_mutex_lock(&strays->mutex);
    TAILQ_FOREACH(stray, &strays->list, entry)
    count += stray->uid == uid && !stray->is_connection ? stray->count : 0;
    for (unsigned i = 0; i < KLD_STRAYS_THREADS_MAX; i++) {
        const struct place *place = &strays->places[i];
        if (place->is_busy && place->uid == uid && !place->is_connection)
            count += atomic_load(&place->left);
    }
    pthread_mutex_unlock(&strays->mutex);
    return count;
}

bool kld_strays_full(struct kld_strays *strays, uid_t uid) {
    unsigned all = atomic_load(&strays->count);
    if (all < KLD_STRAYS_USER_MAX)
        return false;
    return count_of(strays, uid) >= (all < KLD_STRAYS_MAX ? KLD_STRAYS_USER_MAX : 1);
}

bool kld_strays_crowded(struct kld_strays *strays) {
    return atomic_load(&strays->connections) >= KLD_STRAYS_CONNECTIONS_MAX;
}

uint32_t kld_strays_count(struct kld_strays *strays) {
    return atomic_load(&strays->count) + atomic_load(&strays->connections);
}

void kld_strays_look(struct kld_strays *strays) {
    pthread_mutex_lock(&strays->mutex);
    look(strays);
    pthread_mutex_unlock(&strays->mutex);
}
