/* test_sandbox.c - what is refused once the gateway has bounded itself, and what it goes on doing.
 * Each test bounds a process of its own, which tells the line where it went wrong. */
#include "server/gateway/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/unit.h"

static bool files;

#define NEED(condition)                                                                            \
    do                                                                                             \
        if (!(condition))                                                                          \
            return __LINE__;                                                                       \
    while (0)
#define REFUSED(call, error) NEED((call) == -1 && errno == (error))

/* How a process ended that ran the test: 0 where all of it held. */
static int bounded_status(int (*test)(void)) {
    int status;
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        struct kld_error err;
        int line = kld_sandbox_enter(&files, &err) ? 9999 : test();
        if (line)
            dprintf(STDERR_FILENO, "test_sandbox.c:%d errno %d\n", line, errno);
        _exit(line != 0);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    return status;
}

/* Not in builds that have no sandbox, where there is nothing to test. */
static void bounded(int (*test)(void)) {
    if (kld_sandbox_built())
        ck_assert_int_eq(bounded_status(test), 0);
}

static int starts(void) {
    char *arguments[] = {(char[]){"true"}, NULL}, *environment[] = {NULL};
    REFUSED(execve("/bin/true", arguments, environment), EPERM);
    REFUSED(syscall(SYS_fork), EPERM);
    REFUSED(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), EPERM);
    REFUSED(ptrace(PTRACE_TRACEME, 0, NULL, NULL), EPERM);
    REFUSED(setuid(0), EPERM);
    return 0;
}

/* Its parent stands for the supervisor. Signal 0 and limits that stay as they are: where one of
 * these gets through nothing happens. */
static int reaches_others(void) {
    struct rlimit limit;
    pid_t other = getppid();
    REFUSED(kill(other, 0), EPERM);
    REFUSED(syscall(SYS_tkill, other, 0), EPERM);
    REFUSED(syscall(SYS_tgkill, other, other, 0), EPERM);
    REFUSED(syscall(SYS_rt_tgsigqueueinfo, other, other, 0, NULL), EPERM);
    REFUSED(syscall(SYS_pidfd_open, other, 0), EPERM);
    REFUSED(prlimit(other, RLIMIT_NOFILE, NULL, &limit), EPERM);
    REFUSED(sched_setaffinity(other, 0, NULL), EPERM);
    REFUSED(setpriority(PRIO_PROCESS, (id_t)other, 0), EPERM);
    return 0;
}

static int has_others_reached(void) {
    int ends[2];
    NEED(pipe2(ends, O_CLOEXEC) == 0);
    REFUSED(fcntl(ends[0], F_SETOWN, getppid()), EPERM);
    struct f_owner_ex owner = {.type = F_OWNER_PID, .pid = getppid()};
    REFUSED(fcntl(ends[0], F_SETOWN_EX, &owner), EPERM);
    REFUSED(fcntl(ends[0], F_SETSIG, SIGUSR1), EPERM);
    REFUSED(fcntl(ends[0], F_SETFL, O_ASYNC), EPERM);
    REFUSED(fcntl(ends[0], F_SETFL, O_NONBLOCK | O_ASYNC), EPERM);
    REFUSED(fcntl(ends[0], F_NOTIFY, DN_MODIFY), EPERM);
    REFUSED(fcntl(ends[0], F_SETLEASE, F_RDLCK), EPERM);
    REFUSED(ioctl(ends[0], FIOASYNC, &(int){1}), EPERM);
    REFUSED(ioctl(ends[0], FIOSETOWN, &(pid_t){getppid()}), EPERM);
    return 0;
}

static volatile sig_atomic_t signals;

static void count_signal(int number) { signals += number == SIGUSR1; }

/* What libraries do to their own process. */
static int keeps_its_own(void) {
    struct rlimit limit;
    int ends[2];
    NEED(signal(SIGUSR1, count_signal) != SIG_ERR);
    NEED(raise(SIGUSR1) == 0 && pthread_kill(pthread_self(), SIGUSR1) == 0);
    NEED(tgkill(getpid(), gettid(), SIGUSR1) == 0 && signals == 3);
    NEED(getrlimit(RLIMIT_NOFILE, &limit) == 0 && prlimit(0, RLIMIT_STACK, NULL, &limit) == 0);
    REFUSED(setrlimit(RLIMIT_STACK, &limit), EPERM);
    REFUSED(prlimit(0, RLIMIT_STACK, &limit, NULL), EPERM);
    NEED(pipe2(ends, O_CLOEXEC) == 0);
    int flags = fcntl(ends[0], F_GETFL);
    NEED(flags >= 0 && fcntl(ends[0], F_SETFL, flags | O_NONBLOCK) == 0);
    NEED(fcntl(ends[0], F_GETFL) & O_NONBLOCK);
    NEED(fcntl(ends[0], F_SETFD, FD_CLOEXEC) == 0 && fcntl(ends[0], F_GETFD) == FD_CLOEXEC);
    NEED(fcntl(ends[0], F_DUPFD, 0) >= 0 && fcntl(ends[0], F_DUPFD_CLOEXEC, 0) >= 0);
    int fd = memfd_create("kld-unit", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    NEED(fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    NEED(fcntl(fd, F_GET_SEALS) == F_SEAL_SHRINK);
    return 0;
}

static int aborts(void) { abort(); }

static struct sockaddr_un with_path, without_path;
static socklen_t without_path_bytes;
static long landlock;

static int listen_at(struct sockaddr_un *address, socklen_t bytes) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)address, bytes), 0);
    ck_assert_int_eq(listen(fd, 1), 0);
    return fd;
}

/* The worker's socket has a path; what has none is other programs'. */
static int connects(void) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (landlock >= 6)
        REFUSED(connect(fd, (struct sockaddr *)&without_path, without_path_bytes), EPERM);
    NEED(connect(fd, (struct sockaddr *)&with_path, sizeof with_path) == 0);
    return 0;
}

static int calls_out(void) {
    struct sockaddr_un none = {.sun_family = AF_UNIX, .sun_path = "/tmp/there-is-none"};
    REFUSED(socket(AF_INET, SOCK_STREAM, 0), EPERM);
    REFUSED(socket(AF_INET6, SOCK_DGRAM, 0), EPERM);
    REFUSED(socket(AF_NETLINK, SOCK_RAW, 0), EPERM);
    REFUSED(syscall(SYS_bind, 0, NULL, 0), EPERM);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0); /* the way to the worker */
    NEED(fd >= 0);
    REFUSED(connect(fd, (struct sockaddr *)&none, sizeof none), ENOENT);
    return 0;
}

static int makes_code(void) {
    NEED(mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(page != MAP_FAILED);
    REFUSED(mprotect(page, 4096, PROT_READ | PROT_EXEC), EPERM);
    NEED(mprotect(page, 4096, PROT_READ) == 0);
    return 0;
}

static char name[64];

static int opens(void) {
    if (!files)
        return 0; /* a kernel without Landlock */
    REFUSED(open("/etc/passwd", O_RDONLY), EACCES);
    REFUSED(open("/proc/self/environ", O_RDONLY), EACCES);
    REFUSED(open("/dev/null", O_RDWR), EACCES);
    REFUSED(open("/tmp/kld-unit-new", O_RDWR | O_CREAT, 0600), EACCES);
    REFUSED(unlink("/tmp/kld-unit-new"), EPERM);
    int again = shm_open(name, O_RDWR, 0);
    NEED(again >= 0);
    NEED(write(again, "x", 1) == 1);
    REFUSED(shm_open("/kld-unit-sandbox-new", O_RDWR | O_CREAT, 0600), EACCES);
    return 0;
}

static void *add_one(void *number) {
    ++*(int *)number;
    *(int *)number += socket(AF_INET, SOCK_STREAM, 0) >= 0;
    return NULL;
}

static int threads(void) {
    pthread_t thread;
    int number = 1;
    NEED(pthread_create(&thread, NULL, add_one, &number) == 0);
    NEED(pthread_join(thread, NULL) == 0);
    NEED(number == 2);
    return 0;
}

START_TEST(no_program_and_no_process) { bounded(starts); }
END_TEST
START_TEST(no_signal_to_others) {
    bounded(reaches_others);
    bounded(has_others_reached);
}
END_TEST
START_TEST(its_own_signals_and_limits) {
    bounded(keeps_its_own);
    if (!kld_sandbox_built())
        return;
    int status = bounded_status(aborts);
    ck_assert(WIFSIGNALED(status));
    ck_assert_int_eq(WTERMSIG(status), SIGABRT);
}
END_TEST
START_TEST(no_network) { bounded(calls_out); }
END_TEST
START_TEST(no_socket_without_a_path) {
    landlock = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    with_path.sun_family = without_path.sun_family = AF_UNIX;
    snprintf(with_path.sun_path, sizeof with_path.sun_path, "/tmp/kld-unit-%d", (int)getpid());
    snprintf(without_path.sun_path + 1, sizeof without_path.sun_path - 1, "kld-unit-%d",
             (int)getpid());
    without_path_bytes =
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(without_path.sun_path + 1));
    int first = listen_at(&with_path, sizeof with_path);
    int second = listen_at(&without_path, without_path_bytes);
    bounded(connects);
    close(first);
    close(second);
    unlink(with_path.sun_path);
}
END_TEST
START_TEST(no_new_code) { bounded(makes_code); }
END_TEST

START_TEST(no_files_but_shared_memory) {
    snprintf(name, sizeof name, "/kld-unit-sandbox-%d", (int)getpid());
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    ck_assert_int_ge(fd, 0);
    bounded(opens);
    close(fd);
    shm_unlink(name);
}
END_TEST

START_TEST(threads_work_and_inherit) { bounded(threads); }
END_TEST

UNIT_MAIN("server/gateway/sandbox", no_program_and_no_process, no_signal_to_others,
          its_own_signals_and_limits, no_network, no_socket_without_a_path, no_new_code,
          no_files_but_shared_memory, threads_work_and_inherit)
