/* test_thread.c - which signals a thread of ours takes, and that whoever starts it takes those that
 * it took, started or not. */
#include "proto/thread.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdbool.h>

#include "tests/unit/unit.h"

/* In place of libc's, for the program and for what it is linked with. */
static bool none_left;
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *),
                   void *argument) {
    typedef int create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    create *real = (create *)dlsym(RTLD_NEXT, "pthread_create");
    return none_left ? EAGAIN : real(thread, attributes, main, argument);
}

static void *tell_mask(void *mask) {
    pthread_sigmask(SIG_SETMASK, NULL, mask);
    return mask;
}

/* Whether exactly these are blocked, as far as a program may block them. */
static bool is_of_ours(const sigset_t *mask) {
    sigset_t all;
    sigfillset(&all);
    for (int number = 1; number <= SIGRTMAX; number++) {
        bool fault = number == SIGBUS || number == SIGSEGV || number == SIGFPE ||
                     number == SIGILL || number == SIGSYS || number == SIGTRAP;
        bool never = number == SIGKILL || number == SIGSTOP || !sigismember(&all, number);
        if (!never && sigismember(mask, number) == fault)
            return false;
    }
    return true;
}

static void be_asked_with(int blocked, sigset_t *ret_mask) {
    sigemptyset(ret_mask);
    sigaddset(ret_mask, blocked);
    pthread_sigmask(SIG_SETMASK, ret_mask, NULL);
    pthread_sigmask(SIG_SETMASK, NULL, ret_mask);
}

static void check_mask(const sigset_t *before) {
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    for (int number = 1; number <= SIGRTMAX; number++)
        ck_assert_int_eq(sigismember(&now, number), sigismember(before, number));
}

START_TEST(it_takes_the_signals_of_its_own_faults_alone) {
    const int blocked[] = {SIGUSR1, SIGSEGV}; /* by whoever starts it */
    for (int i = 0; i < 2; i++) {
        sigset_t before, mask;
        pthread_t thread;
        sigemptyset(&mask);
        be_asked_with(blocked[i], &before);
        ck_assert_int_eq(kld_thread_start(&thread, tell_mask, &mask), 0);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        ck_assert(is_of_ours(&mask));
        check_mask(&before);
    }
}
END_TEST

START_TEST(who_gets_none_has_his_signals_all_the_same) {
    sigset_t before;
    pthread_t thread;
    be_asked_with(SIGUSR1, &before);
    none_left = true;
    ck_assert_int_eq(kld_thread_start(&thread, tell_mask, NULL), EAGAIN);
    none_left = false;
    check_mask(&before);
}
END_TEST

UNIT_MAIN("proto/thread", it_takes_the_signals_of_its_own_faults_alone,
          who_gets_none_has_his_signals_all_the_same)
