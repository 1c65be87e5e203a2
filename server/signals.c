/* signals.c - see signals.h. */
#include "server/signals.h"

#include <pthread.h>

void kld_signals_block(sigset_t *ret_before) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, ret_before);
}
