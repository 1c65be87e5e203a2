/* stack.h - the first thread's stack, as large from the start as it may come to be. Knows no role.
 * At the start of a process, its first thread.
 *
 * The kernel makes that stack larger as it is used, from 128 KiB on, and counts it with the address
 * space that the process may have (RLIMIT_AS). Where that is used up the next deeper call is a
 * SIGSEGV, while every allocation that fails is an error of one request. Other threads have theirs
 * whole when they are started. */
#ifndef KLD_SERVER_STACK_H
#define KLD_SERVER_STACK_H

/* Ours take 330 KiB at most (small jobs of a CPU, which a worker's loop runs); a driver's calls and
 * a TLS handshake are not ours. One page of it is memory, the rest is address space. */
#define KLD_STACK_BYTES (1 << 20)

/* Nothing where there is not so much to be had: the stack then grows as ever. */
void kld_stack_reserve(void);

#endif
