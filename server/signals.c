/* signals.c - see signals.h. */
#include "server/signals.h"

#include <pthread.h>

static sigset_t stop_signals(void) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    return signals;
}

void kld_signals_block(sigset_t *ret_before) {
    sigset_t signals = stop_signals();
    pthread_sigmask(SIG_BLOCK, &signals, ret_before);
}

void kld_signals_unblock(void) {
    sigset_t signals = stop_signals();
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
}
