/* test_sandbox.c - what is refused once the gateway has bounded itself, and what it goes on doing.
 * Each test bounds a process of its own, which tells the line where it went wrong. */
#include "server/gateway/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
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

/* Not in builds that have no sandbox, where there is nothing to test. */
static void bounded(int (*test)(void)) {
    int status;
    if (!kld_sandbox_built())
        return;
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
    ck_assert(WIFEXITED(status));
    ck_assert_int_eq(WEXITSTATUS(status), 0);
}

static int starts(void) {
    char *arguments[] = {(char[]){"true"}, NULL}, *environment[] = {NULL};
    REFUSED(execve("/bin/true", arguments, environment), EPERM);
    REFUSED(syscall(SYS_fork), EPERM);
    REFUSED(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), EPERM);
    REFUSED(ptrace(PTRACE_TRACEME, 0, NULL, NULL), EPERM);
    REFUSED(kill(getppid(), 0), EPERM);
    REFUSED(setuid(0), EPERM);
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
START_TEST(no_network) { bounded(calls_out); }
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

UNIT_MAIN("server/gateway/sandbox", no_program_and_no_process, no_network, no_new_code,
          no_files_but_shared_memory, threads_work_and_inherit)
