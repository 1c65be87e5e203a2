/* test_hardening.c - what the compiler was told to put into every object is in this one: a write
 * past an allocation whose size only the run knows (_FORTIFY_SOURCE=3; 2 does not see it), and one
 * past an array on the stack, end the process. What the linker was told is
 * tests/e2e/test_hardening.py's. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/unit.h"

/* How `faulty` ends in a process of its own: a signal's number, or minus its exit status. */
static int end_of(void (*faulty)(void)) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        dup2(null, STDERR_FILENO); /* libc says what it saw */
        faulty();
        _exit(0);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static volatile size_t small = 24, large = 25;

static void __attribute__((unused)) past_an_allocation(void) {
    char *memory = malloc(small);
    memset(memory, 1, large);
    __asm__ volatile("" : : "r"(memory) : "memory"); /* somebody looks at it */
    free(memory);
}

static void nothing_wrong(void) {
    char *memory = malloc(small);
    memset(memory, 1, small);
    __asm__ volatile("" : : "r"(memory) : "memory"); /* somebody looks at it */
    free(memory);
}

static void __attribute__((noinline, unused)) past_an_array(void) {
    char array[16];
    volatile char *at = array;
    for (size_t i = 0; i < 2 * large; i++)
        at[i] = 1;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* A sanitizer has checks of its own in their place. */
START_TEST(writes_past_the_end_are_noticed_by_a_sanitizer) {
    ck_assert_int_eq(end_of(nothing_wrong), 0);
#ifdef __SANITIZE_ADDRESS__
    ck_assert_int_ne(end_of(past_an_allocation), 0);
    ck_assert_int_ne(end_of(past_an_array), 0);
#endif
}
END_TEST

UNIT_MAIN("hardening", writes_past_the_end_are_noticed_by_a_sanitizer)
#else
START_TEST(writes_past_the_end_are_noticed) {
    ck_assert_int_eq(end_of(nothing_wrong), 0);
    ck_assert_int_eq(end_of(past_an_allocation), SIGABRT);
    ck_assert_int_eq(end_of(past_an_array), SIGABRT);
}
END_TEST

UNIT_MAIN("hardening", writes_past_the_end_are_noticed)
#endif
