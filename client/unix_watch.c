/* unix_watch.c - the words of done fences, and the thread that sets whoever waits for them free
 * when the worker is lost. All threads of the caller's may then be waiting for a stream that waits
 * for a word, so nobody calls us. The thread looks at a duplicate of the socket for its end; it
 * reads nothing, calls nobody and knows no fence, only words. It starts with the first fence of a
 * connection and ends with kld_close().
 *
 * What both threads touch is under the mutex; the words themselves are atomic, since the device
 * writes them when it likes. The functions: the thread that owns the connection. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/unix.h"
#include "proto/thread.h"

/* Ahead of any number that may be waited for, and not so far that it counts as behind them. */
#define FREED_AHEAD 0x40000000u
/* A device that is being taken apart may yet write a number over that: the word is looked at so
 * often, at first and from then on, for as long as the fence is there. */
#define MEND_SOON_MS 2
#define MEND_SOON_NS 1000000000ull
#define MEND_MS 100
/* A worker that shuts down ends what it has: that is waited for, so long. */
#define PARTING_NS 2000000000ull

enum word_state {
    WORD_IDLE,    /* no worker has it yet */
    WORD_ARMED,   /* the worker behind the socket writes it */
    WORD_PARTING, /* its worker is shutting down; freed at since_ns + PARTING_NS */
    WORD_FREED,   /* its worker is gone, at since_ns */
};

struct unix_word {
    struct unix_word *next;
    _Atomic uint32_t *at; /* alone in a page */
    enum word_state state;
    uint64_t since_ns;
    uint32_t reached; /* FREED: the last number of the device */
    uint32_t ahead;   /* FREED: what is written there instead */
};

struct unix_watch {
    pthread_t thread;
    pid_t owner; /* whose thread that is: not that of a child made by fork() */
    int wake_fd;
    pthread_mutex_t mutex;
    bool ending;
    int watched, fresh; /* sockets, -1: none. The thread closes the former for the latter */
    struct unix_word *words;
};

/* ---- Words, under the mutex ------------------------------------------------------------------ */

static bool is_there(uint32_t value, uint32_t number) { return (int32_t)(value - number) >= 0; }

static void free_word(struct unix_word *word, uint64_t now_ns) {
    word->state = WORD_FREED;
    word->since_ns = now_ns;
    word->ahead = atomic_load(word->at) + FREED_AHEAD;
    word->reached = atomic_exchange(word->at, word->ahead);
}

static void mend_word(struct unix_word *word) {
    if (atomic_load(word->at) == word->ahead)
        return;
    uint32_t late = atomic_exchange(word->at, word->ahead);
    if (late != word->ahead && is_there(late, word->reached))
        word->reached = late;
}

/* Until when, in ms, the thread need not look again; -1: for ever. */
static int tend(struct unix_watch *watch) {
    uint64_t now_ns = kld_now_ns();
    int pause_ms = -1;
    for (struct unix_word *word = watch->words; word; word = word->next) {
        if (word->state == WORD_PARTING && now_ns - word->since_ns >= PARTING_NS)
            free_word(word, now_ns);
        else if (word->state == WORD_FREED)
            mend_word(word);
        bool soon = word->state == WORD_FREED && now_ns - word->since_ns < MEND_SOON_NS;
        if (soon)
            pause_ms = MEND_SOON_MS;
        else if (word->state >= WORD_PARTING && pause_ms < 0)
            pause_ms = MEND_MS;
    }
    return pause_ms;
}

static void free_armed(struct unix_watch *watch) {
    uint64_t now_ns = kld_now_ns();
    for (struct unix_word *word = watch->words; word; word = word->next)
        if (word->state == WORD_ARMED)
            free_word(word, now_ns);
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* ---- The thread ------------------------------------------------------------------------------ */

/* The end of a socket whose successor is known is an old tale. */
static void hung_up(struct unix_watch *watch) {
    pthread_mutex_lock(&watch->mutex);
    if (watch->fresh < 0)
        free_armed(watch);
    close_fd(&watch->watched);
    pthread_mutex_unlock(&watch->mutex);
}

static void *watch_main(void *argument) {
    struct unix_watch *watch = argument;
    for (;;) {
        pthread_mutex_lock(&watch->mutex);
        if (watch->fresh >= 0) {
            close_fd(&watch->watched);
            watch->watched = watch->fresh;
            watch->fresh = -1;
        }
        bool ending = watch->ending;
        int pause_ms = tend(watch);
        struct pollfd polled[] = {{.fd = watch->wake_fd, .events = POLLIN},
                                  {.fd = watch->watched, .events = POLLRDHUP}};
        pthread_mutex_unlock(&watch->mutex);
        if (ending)
            return NULL;
        if (poll(polled, 2, pause_ms) <= 0)
            continue;
        if (polled[0].revents)
            kld_counter_drain(watch->wake_fd);
        if (polled[1].revents)
            hung_up(watch);
    }
}

/* ---- For the thread that owns the connection --------------------------------------------------
 */

/* In a child made by fork() there is no such thread, and the mutex may be taken for good. */
static bool is_ours(const struct unix_watch *watch) { return watch && watch->owner == getpid(); }

static enum kld_status watch_begin(struct unix_connection *u, struct kld_error *err) {
    struct unix_watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a fence");
    watch->owner = getpid();
    watch->watched = watch->fresh = -1;
    watch->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&watch->mutex, NULL);
    if (watch->wake_fd >= 0 && kld_thread_start(&watch->thread, watch_main, watch) == 0) {
        u->watch = watch;
        return KLD_OK;
    }
    close_fd(&watch->wake_fd);
    pthread_mutex_destroy(&watch->mutex);
    free(watch);
    return kld_error_set(err, KLD_NO_MEMORY,
                         "no thread or descriptor left to watch the server for a fence");
}

void kld_unix_watch_link(struct unix_connection *u) {
    struct unix_watch *watch = u->watch;
    if (!is_ours(watch) || u->state != UNIX_UP)
        return;
    int fd = fcntl(u->socket, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_lock(&watch->mutex);
    close_fd(&watch->fresh);
    watch->fresh = fd;
    pthread_mutex_unlock(&watch->mutex);
    u->watched = fd >= 0;
    kld_eventfd_raise(watch->wake_fd);
}

void kld_unix_watch_lost(struct unix_connection *u) {
    struct unix_watch *watch = u->watch;
    u->watched = false;
    if (!is_ours(watch))
        return;
    uint64_t now_ns = kld_now_ns();
    pthread_mutex_lock(&watch->mutex);
    for (struct unix_word *word = watch->words; word && u->leaving && !u->doomed; word = word->next)
        if (word->state == WORD_ARMED) {
            word->state = WORD_PARTING;
            word->since_ns = now_ns;
        }
    free_armed(watch);
    pthread_mutex_unlock(&watch->mutex);
    kld_eventfd_raise(watch->wake_fd);
}

void kld_unix_watch_end(struct unix_connection *u) {
    struct unix_watch *watch = u->watch;
    if (!watch)
        return;
    if (is_ours(watch)) {
        pthread_mutex_lock(&watch->mutex);
        watch->ending = true;
        pthread_mutex_unlock(&watch->mutex);
        kld_eventfd_raise(watch->wake_fd);
        pthread_join(watch->thread, NULL);
        pthread_mutex_destroy(&watch->mutex);
    }
    for (struct unix_word *word = watch->words, *next; word; word = next) {
        next = word->next;
        munmap((void *)word->at, KLD_FENCE_BYTES);
        free(word);
    }
    close_fd(&watch->watched);
    close_fd(&watch->fresh);
    close_fd(&watch->wake_fd);
    free(watch);
    u->watch = NULL;
}

enum kld_status kld_unix_word_open(struct unix_connection *u, int memfd,
                                   struct unix_word **ret_word, struct kld_error *err) {
    enum kld_status status = u->watch ? KLD_OK : watch_begin(u, err);
    if (status)
        return status;
    if (!is_ours(u->watch))
        return kld_error_set(err, KLD_UNAVAILABLE, "this connection was made before fork()");
    if (!u->watched) /* there was no descriptor left for that */
        kld_unix_watch_link(u);
    struct unix_word *word = calloc(1, sizeof *word);
    void *at = word ? mmap(NULL, KLD_FENCE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0)
                    : MAP_FAILED;
    if (at == MAP_FAILED) {
        free(word);
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a fence");
    }
    word->at = at;
    struct unix_watch *watch = u->watch;
    pthread_mutex_lock(&watch->mutex);
    word->next = watch->words;
    watch->words = word;
    pthread_mutex_unlock(&watch->mutex);
    *ret_word = word;
    return KLD_OK;
}

void kld_unix_word_close(struct unix_connection *u, struct unix_word *word) {
    struct unix_watch *watch = u->watch;
    if (!word || !is_ours(watch))
        return;
    pthread_mutex_lock(&watch->mutex);
    struct unix_word **link = &watch->words;
    while (*link != word)
        link = &(*link)->next;
    *link = word->next;
    pthread_mutex_unlock(&watch->mutex);
    munmap((void *)word->at, KLD_FENCE_BYTES);
    free(word);
}

/* The link is watched before any word of it is armed, so its end is not missed. */
void kld_unix_word_arm(struct unix_connection *u, struct unix_word *word) {
    if (!is_ours(u->watch))
        return;
    pthread_mutex_lock(&u->watch->mutex);
    word->state = WORD_ARMED;
    pthread_mutex_unlock(&u->watch->mutex);
}

uint32_t *kld_unix_word_at(const struct unix_word *word) { return (uint32_t *)(void *)word->at; }

bool kld_unix_word_passed(const struct unix_connection *u, struct unix_word *word,
                          uint32_t number) {
    if (!is_ours(u->watch))
        return false;
    pthread_mutex_lock(&u->watch->mutex);
    if (word->state == WORD_FREED)
        mend_word(word);
    uint32_t value = word->state == WORD_FREED ? word->reached : atomic_load(word->at);
    pthread_mutex_unlock(&u->watch->mutex);
    return is_there(value, number);
}
