/* stack.c - see stack.h. */
#include "server/stack.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* The kernel makes room down to what is touched. */
static __attribute__((noinline)) void touch(void) {
    volatile char room[KLD_STACK_BYTES];
    room[0] = 0;
    (void)room[0];
}

/* Else the touch would be the fault that it is to spare us. */
static bool is_to_be_had(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur / 2 < KLD_STACK_BYTES)
        return false;
    void *room =
        mmap(NULL, KLD_STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return room != MAP_FAILED && munmap(room, KLD_STACK_BYTES) == 0;
}

void kld_stack_reserve(void) {
    if (is_to_be_had())
        touch();
}
