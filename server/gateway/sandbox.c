/* sandbox.c - drops capabilities, bounds files by Landlock where the kernel has it, and system
 * calls by a seccomp filter (sandbox.h). A call that is not on the list fails with EPERM, or ENOSYS
 * where libc knows what to do without it. Main thread, once. */
#include "server/gateway/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <seccomp.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

bool kld_sandbox_built(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    return true;
#endif
}

static enum kld_status drop_privileges(struct kld_error *err) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2];
    memset(none, 0, sizeof none);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || syscall(SYS_capset, &header, none) != 0)
        return kld_error_set(err, KLD_INTERNAL, "privileges cannot be dropped: %s",
                             strerror(errno));
    return KLD_OK;
}

/* struct landlock_ruleset_attr of Linux 6.12; older kernels take what they know, and zeros. */
struct bounds {
    uint64_t files, network, scope;
};

#define SCOPE_VERSION 6                       /* of Landlock, which has: */
#define SCOPE_ALL ((1ull << 0) | (1ull << 1)) /* abstract Unix sockets, signals */

/* False: this kernel has no Landlock. Of what the first version of it can forbid, all is forbidden
 * but reading and writing files that exist in /dev/shm; where it can, also to connect to abstract
 * Unix sockets and to signal processes other than this one. Connecting to the worker's socket is no
 * access to a file. */
static bool bound_files(void) {
    long version = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    struct bounds all = {.files = (1ull << 13) - 1,
                         .scope = version >= SCOPE_VERSION ? SCOPE_ALL : 0};
    struct landlock_path_beneath_attr shm = {.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE |
                                                               LANDLOCK_ACCESS_FS_WRITE_FILE};
    int rules = (int)syscall(SYS_landlock_create_ruleset, &all, sizeof all, 0);
    if (rules < 0)
        return false;
    shm.parent_fd = open("/dev/shm", O_PATH | O_CLOEXEC);
    bool done = (shm.parent_fd < 0 ||
                 syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &shm, 0) == 0) &&
                syscall(SYS_landlock_restrict_self, rules, 0) == 0;
    if (shm.parent_fd >= 0)
        close(shm.parent_fd);
    close(rules);
    return done;
}

static const int allowed[] = {
    /* sockets and descriptors; read and write of files that are open */
    SCMP_SYS(read),
    SCMP_SYS(write),
    SCMP_SYS(readv),
    SCMP_SYS(writev),
    SCMP_SYS(pread64),
    SCMP_SYS(pwrite64),
    SCMP_SYS(pwritev2),
    SCMP_SYS(recvfrom),
    SCMP_SYS(recvmsg),
    SCMP_SYS(sendto),
    SCMP_SYS(sendmsg),
    SCMP_SYS(close),
    SCMP_SYS(shutdown),
    SCMP_SYS(connect),
    SCMP_SYS(accept),
    SCMP_SYS(accept4),
    SCMP_SYS(getsockopt),
    SCMP_SYS(setsockopt),
    SCMP_SYS(getsockname),
    SCMP_SYS(getpeername),
    SCMP_SYS(fstat),
    SCMP_SYS(newfstatat),
    SCMP_SYS(lseek),
    SCMP_SYS(ftruncate),
    SCMP_SYS(memfd_create),
    SCMP_SYS(pipe2),
    SCMP_SYS(dup),
    SCMP_SYS(openat),
    /* waiting */
    SCMP_SYS(epoll_create1),
    SCMP_SYS(epoll_ctl),
    SCMP_SYS(epoll_wait),
    SCMP_SYS(epoll_pwait),
    SCMP_SYS(poll),
    SCMP_SYS(ppoll),
    SCMP_SYS(eventfd2),
    SCMP_SYS(timerfd_create),
    SCMP_SYS(timerfd_settime),
    SCMP_SYS(futex),
    SCMP_SYS(nanosleep),
    SCMP_SYS(clock_nanosleep),
    SCMP_SYS(clock_gettime),
    SCMP_SYS(clock_getres),
    SCMP_SYS(gettimeofday),
    SCMP_SYS(time),
    SCMP_SYS(restart_syscall),
    SCMP_SYS(sched_yield),
    /* memory */
    SCMP_SYS(munmap),
    SCMP_SYS(mremap),
    SCMP_SYS(madvise),
    SCMP_SYS(brk),
    SCMP_SYS(membarrier),
    /* threads, signals, the end */
    SCMP_SYS(set_robust_list),
    SCMP_SYS(rseq),
    SCMP_SYS(exit),
    SCMP_SYS(exit_group),
    SCMP_SYS(rt_sigaction),
    SCMP_SYS(rt_sigprocmask),
    SCMP_SYS(rt_sigreturn),
    SCMP_SYS(sigaltstack),
    SCMP_SYS(gettid),
    SCMP_SYS(getpid),
    SCMP_SYS(sched_getaffinity),
    SCMP_SYS(getrandom),
    SCMP_SYS(uname),
    SCMP_SYS(sysinfo),
    SCMP_SYS(getuid),
    SCMP_SYS(geteuid),
    SCMP_SYS(getgid),
    SCMP_SYS(getegid),
    SCMP_SYS(getrlimit),
};

/* libc has another way without these; so they are "not there" and not "not allowed". */
static const int missing[] = {SCMP_SYS(clone3), SCMP_SYS(statx), SCMP_SYS(openat2),
                              SCMP_SYS(io_uring_setup), SCMP_SYS(close_range)};

/* What is a file's, and no signal: F_SETOWN and F_SETSIG make the kernel send any signal to any
 * process of this user. */
static const int file_commands[] = {F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD,    F_SETFD,
                                    F_GETFL, F_ADD_SEALS,     F_GET_SEALS};

/* Of calls that reach other processes, what reaches this one alone. libc raises signals by tgkill
 * and asks prlimit64 for the size of a stack. */
static int add_narrow_rules(scmp_filter_ctx filter) {
    const uint32_t allow = SCMP_ACT_ALLOW;
    int result = seccomp_rule_add(filter, allow, SCMP_SYS(tgkill), 1,
                                  SCMP_A0(SCMP_CMP_EQ, (scmp_datum_t)getpid()));
    if (result == 0)
        result = seccomp_rule_add(filter, allow, SCMP_SYS(prlimit64), 2, SCMP_A0(SCMP_CMP_EQ, 0),
                                  SCMP_A2(SCMP_CMP_EQ, 0));
    if (result == 0)
        result = seccomp_rule_add(filter, allow, SCMP_SYS(fcntl), 2, SCMP_A1(SCMP_CMP_EQ, F_SETFL),
                                  SCMP_A2(SCMP_CMP_MASKED_EQ, O_ASYNC, 0));
    for (size_t i = 0; i < sizeof file_commands / sizeof file_commands[0] && result == 0; i++)
        result = seccomp_rule_add(filter, allow, SCMP_SYS(fcntl), 1,
                                  SCMP_A1(SCMP_CMP_EQ, (scmp_datum_t)file_commands[i]));
    return result;
}

static int add_rules(scmp_filter_ctx filter) {
    const uint32_t allow = SCMP_ACT_ALLOW;
    int result = 0;
    for (size_t i = 0; i < sizeof allowed / sizeof allowed[0] && result == 0; i++)
        result = seccomp_rule_add(filter, allow, allowed[i], 0);
    for (size_t i = 0; i < sizeof missing / sizeof missing[0] && result == 0; i++)
        result = seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS), missing[i], 0);
    const struct {
        int call;
        struct scmp_arg_cmp when;
    } only[] = {
        {SCMP_SYS(socket), SCMP_A0(SCMP_CMP_EQ, AF_UNIX)},
        {SCMP_SYS(mmap), SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0)},
        {SCMP_SYS(mprotect), SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0)},
        {SCMP_SYS(clone), SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_THREAD, CLONE_THREAD)},
        {SCMP_SYS(ioctl), SCMP_A1(SCMP_CMP_EQ, FIONBIO)},
        {SCMP_SYS(ioctl), SCMP_A1(SCMP_CMP_EQ, FIOCLEX)},
        {SCMP_SYS(ioctl), SCMP_A1(SCMP_CMP_EQ, FIONREAD)},
        {SCMP_SYS(prctl), SCMP_A0(SCMP_CMP_EQ, PR_SET_NAME)},
    };
    for (size_t i = 0; i < sizeof only / sizeof only[0] && result == 0; i++)
        result = seccomp_rule_add(filter, allow, only[i].call, 1, only[i].when);
    return result ? result : add_narrow_rules(filter);
}

enum kld_status kld_sandbox_enter(bool *ret_files, struct kld_error *err) {
    enum kld_status status = drop_privileges(err);
    if (status)
        return status;
    *ret_files = bound_files();
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ERRNO(EPERM));
    int result = filter ? add_rules(filter) : -ENOMEM;
    if (result == 0)
        result = seccomp_load(filter);
    if (filter)
        seccomp_release(filter);
    if (result != 0)
        return kld_error_set(
            err, KLD_UNIMPLEMENTED,
            "system calls cannot be bounded here: %s; --sandbox=false runs without",
            strerror(-result));
    return KLD_OK;
}
