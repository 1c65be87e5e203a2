/* The first thread's stack: depth that was reserved is there when the address space is used up. */
#include "server/stack.h"

#include <stdint.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/unit/unit.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LIMITED 0 /* a sanitizer's own memory is address space, too: there is more of it */
#else
#define LIMITED 1
#endif

static uint64_t address_space(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(fscanf(file, "%lu", &pages), 1);
    fclose(file);
    return (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void use_up(void) {
    struct rlimit limit = {.rlim_cur = address_space(), .rlim_max = RLIM_INFINITY};
    if (LIMITED)
        ck_assert_int_eq(setrlimit(RLIMIT_AS, &limit), 0);
}

/* Each turn of it has a page of its own. */
static __attribute__((noinline)) uint64_t deep(uint64_t bytes) {
    volatile char page[4096];
    page[0] = (char)bytes;
    return bytes < sizeof page ? 1 : deep(bytes - sizeof page) + (uint64_t)page[0];
}

/* Each START_TEST is a process of its own: the limit goes with it. */
START_TEST(what_was_reserved_needs_no_more_address_space) {
    kld_stack_reserve();
    use_up();
    ck_assert_uint_ge(deep(KLD_STACK_BYTES - (64 << 10)), 1);
}
END_TEST

/* As a person may have said in his shell: nothing is reserved, and nothing faults. */
START_TEST(a_small_stack_is_left_alone) {
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_STACK, &limit), 0);
    limit.rlim_cur = KLD_STACK_BYTES;
    ck_assert_int_eq(setrlimit(RLIMIT_STACK, &limit), 0);
    uint64_t before = address_space();
    kld_stack_reserve();
    ck_assert_uint_lt(address_space(), before + KLD_STACK_BYTES / 2);
}
END_TEST

START_TEST(no_address_space_is_no_fault) {
    use_up();
    kld_stack_reserve();
}
END_TEST

UNIT_MAIN("server/stack", what_was_reserved_needs_no_more_address_space,
          a_small_stack_is_left_alone, no_address_space_is_no_fault)
