/* signals.h - who takes SIGTERM and SIGINT: the thread of a role's loop, as long as that watches
 * them, and no other. Any thread. */
#ifndef KLD_SERVER_SIGNALS_H
#define KLD_SERVER_SIGNALS_H

#include <signal.h>

/* The calling thread, and what it starts from now on, takes them no more. *ret_before, unless NULL:
 * what it took, for pthread_sigmask(). Before libuv closes a watched one: what is no longer watched
 * it gives back, and to be told once more would then end the process in the middle of its end. */
void kld_signals_block(sigset_t *ret_before);
/* The calling thread takes them. What came meanwhile comes now. */
void kld_signals_unblock(void);

#endif
