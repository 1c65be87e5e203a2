/* test_mapping.c - shared memory that is registered twice is mapped once, with and without kcmp. */
#include "server/worker/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"
#include "tests/unit/unit.h"

#define BYTES ((uint64_t)2 << 20)

static int sealed(void) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, BYTES), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    return fd;
}

static struct kld_users users;
static struct kld_mappings mappings;
static struct kld_device *device;
static struct kld_error err;
static bool limited; /* of the last acquire() */

static void setup(void) {
    struct kld_device_options options = {.threads = 1};
    ck_assert_int_eq(kld_backend_cpu.device_open(&options, &device, &err), KLD_OK);
    ck_assert_int_eq(kld_users_init(&users, &err), KLD_OK);
    ck_assert_int_eq(kld_mappings_init(&mappings, &kld_backend_cpu, device, &users, &err), KLD_OK);
}

static void teardown(void) {
    ck_assert_ptr_null(TAILQ_FIRST(&users.list));
    kld_mappings_done(&mappings);
    kld_users_done(&users);
    kld_backend_cpu.device_close(device);
}

static enum kld_status acquire(int fd, const struct kld_mapping_limit *limit,
                               struct kld_mapping **ret_mapping, struct kld_memory **ret_memory) {
    return kld_mapping_acquire(&mappings, fd, BYTES, limit, ret_mapping, ret_memory, &limited,
                               &err);
}

static void check_shared(void) {
    struct kld_mapping *first, *second, *third;
    struct kld_memory *a, *b, *c;
    int fd = sealed(), again = dup(fd);
    setup();
    ck_assert_int_eq(acquire(fd, NULL, &first, &a), KLD_OK);
    ck_assert_int_eq(acquire(again, NULL, &second, &b), KLD_OK);
    ck_assert_int_eq(acquire(sealed(), NULL, &third, &c), KLD_OK);
    ck_assert_ptr_eq(a, b);
    ck_assert_ptr_ne(a, c);
    kld_mapping_release(&mappings, first);
    kld_mapping_release(&mappings, second);
    kld_mapping_release(&mappings, third);
    teardown();
}

START_TEST(mapped_once) { check_shared(); }
END_TEST

/* What several share counts once, and what has no limit not at all. */
START_TEST(what_is_shared_has_a_limit) {
    struct kld_mapping *unlimited, *first, *again, *second;
    struct kld_memory *memory;
    int fd = sealed(), same = dup(fd);
    setup();
    struct kld_mapping_limit limit = {BYTES, 100, kld_user_acquire(&users, 5)};
    struct kld_mapping_limit more = {2 * BYTES - 1, 100, limit.user};
    ck_assert_int_eq(acquire(sealed(), NULL, &unlimited, &memory), KLD_OK);
    ck_assert_int_eq(acquire(fd, &limit, &first, &memory), KLD_OK);
    ck_assert_int_eq(acquire(same, &limit, &again, &memory), KLD_OK);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(acquire(sealed(), &more, &second, &memory), KLD_NO_MEMORY);
    ck_assert(limited);
    ck_assert_ptr_nonnull(strstr(err.text, "no room for 2097152 bytes: clients share 2097152 of"));
    kld_mapping_release(&mappings, first);
    kld_mapping_release(&mappings, again);
    ck_assert_int_eq(acquire(sealed(), &limit, &second, &memory), KLD_OK);
    ck_assert(!limited);
    kld_mapping_release(&mappings, second);
    kld_mapping_release(&mappings, unlimited);
    ck_assert_uint_eq(mappings.shared_bytes, 0);
    kld_user_release(&users, limit.user);
    teardown();
}
END_TEST

/* It counts for who came first, who may be gone by then. */
START_TEST(what_is_shared_counts_for_one_user) {
    struct kld_mapping *first, *again, *second;
    struct kld_memory *memory;
    int fd = sealed(), same = dup(fd);
    setup();
    struct kld_mapping_limit one = {3 * BYTES, 50, kld_user_acquire(&users, 5)};
    struct kld_mapping_limit other = {3 * BYTES, 50, kld_user_acquire(&users, 6)};
    ck_assert_int_eq(acquire(fd, &one, &first, &memory), KLD_OK);
    ck_assert_int_eq(acquire(sealed(), &one, &second, &memory), KLD_NO_MEMORY);
    ck_assert(limited);
    ck_assert_ptr_nonnull(strstr(err.text, "who shares 2097152 of the 3145728"));
    ck_assert_int_eq(acquire(same, &other, &again, &memory), KLD_OK);
    kld_mapping_release(&mappings, first);
    kld_user_release(&users, one.user);
    ck_assert_int_eq(acquire(sealed(), &other, &second, &memory), KLD_OK);
    kld_mapping_release(&mappings, again);
    kld_mapping_release(&mappings, second);
    kld_user_release(&users, other.user);
    teardown();
}
END_TEST

/* The gateway's staging, which it registers on each of its connections, is known again whatever
 * clients have registered; so is what a second user shares. */
START_TEST(no_user_has_every_place_of_what_is_known_again) {
    struct kld_mapping *many[KLD_MAPPINGS_MAX], *first[2], *again[2];
    struct kld_memory *memory, *same;
    setup();
    struct kld_mapping_limit one = {UINT64_MAX, 75, kld_user_acquire(&users, 5)};
    struct kld_mapping_limit other = {UINT64_MAX, 75, kld_user_acquire(&users, 6)};
    const struct kld_mapping_limit *limits[2] = {&other, NULL};
    for (int i = 0; i < KLD_MAPPINGS_MAX; i++)
        ck_assert_int_eq(acquire(sealed(), &one, &many[i], &memory), KLD_OK);
    ck_assert_uint_eq(mappings.count, (KLD_MAPPINGS_MAX - KLD_MAPPINGS_GATEWAY) * 3 / 4);
    for (int i = 0; i < 2; i++) {
        int fd = sealed(), dup_fd = dup(fd);
        ck_assert_int_eq(acquire(fd, limits[i], &first[i], &memory), KLD_OK);
        ck_assert_int_eq(acquire(dup_fd, limits[i], &again[i], &same), KLD_OK);
        ck_assert_ptr_eq(memory, same);
    }
    for (int i = 0; i < KLD_MAPPINGS_MAX; i++)
        kld_mapping_release(&mappings, many[i]);
    for (int i = 0; i < 2; i++) {
        kld_mapping_release(&mappings, first[i]);
        kld_mapping_release(&mappings, again[i]);
    }
    ck_assert_uint_eq(mappings.count + mappings.clients, 0);
    kld_user_release(&users, one.user);
    kld_user_release(&users, other.user);
    teardown();
}
END_TEST

/* As the seccomp profiles of containers refuse it. Each test is a process of its own. */
START_TEST(mapped_once_without_kcmp) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_kcmp, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {.len = 4, .filter = code};
    ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    ck_assert_int_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
    ck_assert_int_eq(syscall(SYS_kcmp, getpid(), getpid(), 0, 0ul, 0ul), -1);
    check_shared();
}
END_TEST

UNIT_MAIN("server/worker/mapping", mapped_once, mapped_once_without_kcmp,
          what_is_shared_has_a_limit, what_is_shared_counts_for_one_user,
          no_user_has_every_place_of_what_is_known_again)
