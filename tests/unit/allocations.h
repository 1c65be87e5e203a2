/* allocations.h - counts what one thread allocates, by standing in for malloc, which a sanitizer
 * does itself: there nothing is counted. For one test program each. */
#ifndef KLD_TESTS_ALLOCATIONS_H
#define KLD_TESTS_ALLOCATIONS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

static pthread_t counted; /* set before `counting` is */
static atomic_bool counting;
static atomic_int allocations;

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS 1
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);

static void count(void) {
    if (atomic_load(&counting) && pthread_equal(pthread_self(), counted))
        atomic_fetch_add(&allocations, 1);
}
void *malloc(size_t bytes) {
    count();
    return __libc_malloc(bytes);
}
void *calloc(size_t items, size_t bytes) {
    count();
    return __libc_calloc(items, bytes);
}
void *realloc(void *old, size_t bytes) {
    count();
    return __libc_realloc(old, bytes);
}
#else
#define COUNTS 0
#endif

#endif
