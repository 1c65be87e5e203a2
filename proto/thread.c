/* thread.c - see thread.h. */
#include "proto/thread.h"

#include <signal.h>
#include <stddef.h>

int kld_thread_start(pthread_t *ret_thread, void *(*main)(void *argument), void *argument) {
    static const int own[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGSYS, SIGTRAP};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        sigdelset(&blocked, own[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int failed = pthread_create(ret_thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}
