/* turns.h - for targets of libkld whose server is a function of the target: it and the client have
 * their turns on one thread, and no time is spent waiting.
 *
 * The clock of the process (all of libkld's and libcurl's, not libFuzzer's, which is
 * CLOCK_REALTIME) stands still but for what is said here. Where the client waits, the server has
 * its turn until it has nothing more to do; where nothing has come then, the clock is at the next
 * timer, or at the end of that wait, at once. So an input gives the same each time. A wait that
 * nothing would ever end is a broken promise. Linked before libc, and with --wrap (Makefile). */
#ifndef KLD_TESTS_FUZZ_TURNS_H
#define KLD_TESTS_FUZZ_TURNS_H

#include <stdbool.h>

/* What the server does now, without waiting; false: nothing. It is never called within itself. */
typedef bool (*fuzz_turn)(void);

/* To be called before the first connection. settle_us: so long in real time nothing must have come
 * before the clock goes on, for bytes that a kernel still carries; 0 where it hands them over at
 * once. */
void fuzz_turns_open(fuzz_turn turn, unsigned settle_us);
void fuzz_turns_settle(unsigned settle_us);
/* The server also has turns between what the client sends, not only when that waits. */
void fuzz_turns_between(bool wanted);
/* Until it has nothing more to do. */
void fuzz_turns_give(void);

#endif
