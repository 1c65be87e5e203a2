/* thread.h - threads of ours in processes that are somebody else's: those of a back end, and of
 * libkld. How they end, and are waited for, is their owner's. Any thread. */
#ifndef KLD_PROTO_THREAD_H
#define KLD_PROTO_THREAD_H

#include <pthread.h>

/* pthread_create() of a thread that takes no signals: they belong to the threads of the program.
 * But those that tell of its own work, as SIGBUS does where a mapped file was cut, it takes:
 * blocked, they would end the process whatever handler there is. What it starts inherits that. The
 * caller's mask is what it was, started or not. Returns what pthread_create() does. */
int kld_thread_start(pthread_t *ret_thread, void *(*main)(void *argument), void *argument);

#endif
