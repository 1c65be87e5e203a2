/* allocations.h - counts what one thread allocates, and has one of these fail, by standing in for
 * malloc, which a sanitizer does itself: there nothing is counted. For one test program each. */
#ifndef KLD_TESTS_ALLOCATIONS_H
#define KLD_TESTS_ALLOCATIONS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

static pthread_t counted; /* set before `counting` is */
static atomic_bool counting;
static atomic_int allocations;
__attribute__((unused)) static atomic_int failing; /* the number of the one that fails */

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS 1
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);

static bool fails(void) {
    return atomic_load(&counting) && pthread_equal(pthread_self(), counted) &&
           atomic_fetch_add(&allocations, 1) + 1 == atomic_load(&failing);
}
void *malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void *calloc(size_t items, size_t bytes) { return fails() ? NULL : __libc_calloc(items, bytes); }
void *realloc(void *old, size_t bytes) { return fails() ? NULL : __libc_realloc(old, bytes); }
#else
#define COUNTS 0
#endif

#endif
