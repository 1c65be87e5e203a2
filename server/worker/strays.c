/* strays.c - see strays.h: a list under a mutex, and the threads that take from it. Looks into no
 * descriptor. Any thread. */
#include "server/worker/strays.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define THREAD_STACK_BYTES ((size_t)256 << 10)

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
    uid_t uid; /* busy: whose */
    _Atomic uint64_t since_ns;
};

struct kld_strays {
    atomic_uint count; /* descriptors that are not closed */
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

static void discard_all(int fd) {
    char byte;
    while (recv(fd, &byte, 1, MSG_DONTWAIT) > 0 || errno == EINTR)
        errno = 0;
}

static void close_stray(struct kld_strays *strays, struct stray *stray, struct place *place) {
    for (unsigned i = 0; i < stray->count; i++) {
        if (place)
            atomic_store(&place->since_ns, now_ns());
        if (stray->is_connection)
            discard_all(stray->fds[i]);
        close_now(stray->fds[i]);
        atomic_fetch_sub(&strays->count, 1);
    }
}

/* ---- Under the mutex ------------------------------------------------------------------------- */

static bool is_served(const struct kld_strays *strays, uid_t uid) {
    for (unsigned i = 0; i < KLD_STRAYS_THREADS_MAX; i++)
        if (strays->places[i].is_busy && strays->places[i].uid == uid)
            return true;
    return false;
}

/* The next that no other thread keeps waiting, or NULL. */
static struct stray *next(const struct kld_strays *strays) {
    struct stray *stray;
    TAILQ_FOREACH(stray, &strays->list, entry)
    if (!is_served(strays, stray->uid))
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
    pthread_mutex_lock(&strays->mutex);
    for (;;) {
        struct stray *stray = next(strays);
        if (stray) {
            TAILQ_REMOVE(&strays->list, stray, entry);
            place->uid = stray->uid;
            atomic_store(&place->since_ns, now_ns());
            place->is_busy = true;
            pthread_mutex_unlock(&strays->mutex);
            close_stray(strays, stray, place);
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

enum kld_status kld_strays_start(struct kld_strays **ret_strays, struct kld_error *err) {
    struct kld_strays *strays = calloc(1, sizeof *strays);
    if (!strays)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    TAILQ_INIT(&strays->list);
    pthread_mutex_init(&strays->mutex, NULL);
    pthread_cond_init(&strays->more, NULL);
    pthread_cond_init(&strays->gone, NULL);
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
    clock_gettime(CLOCK_REALTIME, &until);
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
    atomic_fetch_add(&strays->count, count);
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

bool kld_strays_discard(struct kld_strays *strays, uid_t uid, int fd) {
    const int on = 1; /* each packet brings credentials, so one of no bytes is not the end */
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0)
        return false;
    for (;;) {
        union {
            char space[CMSG_SPACE(sizeof(int) * KLD_STRAYS_FDS_MAX) +
                       CMSG_SPACE(sizeof(struct ucred))];
            struct cmsghdr align;
        } control;
        char byte;
        struct iovec part = {.iov_base = &byte, .iov_len = 1};
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = control.space,
                                 .msg_controllen = sizeof control.space};
        if (kld_strays_full(strays, uid))
            return false;
        ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 || (got == 0 && message.msg_controllen == 0))
            return true;
        for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at)) {
            int fds[KLD_STRAYS_FDS_MAX];
            size_t bytes = at->cmsg_len - CMSG_LEN(0);
            if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS || bytes > sizeof fds)
                continue;
            memcpy(fds, CMSG_DATA(at), bytes);
            kld_strays_close(strays, uid, fds, (unsigned)(bytes / sizeof(int)));
        }
    }
}

bool kld_strays_full(struct kld_strays *strays, uid_t uid) {
    if (kld_strays_count(strays) < KLD_STRAYS_USER_MAX)
        return false;
    unsigned count = 0;
    const struct stray *stray;
    pthread_mutex_lock(&strays->mutex);
    TAILQ_FOREACH(stray, &strays->list, entry)
    count += stray->uid == uid ? stray->count : 0;
    pthread_mutex_unlock(&strays->mutex);
    return count >= KLD_STRAYS_USER_MAX;
}

uint32_t kld_strays_count(struct kld_strays *strays) { return atomic_load(&strays->count); }

void kld_strays_look(struct kld_strays *strays) {
    pthread_mutex_lock(&strays->mutex);
    look(strays);
    pthread_mutex_unlock(&strays->mutex);
}
