/* nth.c - makes the N-th of a process's system calls, allocations or threads fail, as nth.h says.
 * Loaded before libc (LD_PRELOAD), or linked into a program; NTH_PAGE in the environment names the
 * file with the page. Counts what code outside of libc calls, from main() on; what libc calls
 * inside itself, beside malloc(), it does not see. Any thread. */
#include "tests/fail/nth.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>
#include <unwind.h>

#define EXPORT __attribute__((visibility("default")))

static struct nth_slot unused, *slot = &unused;
static atomic_bool begun; /* main() */
static __thread bool inside __attribute__((tls_model("initial-exec")));

/* ---- which call, and whether it is to fail --------------------------------------------------- */

static _Unwind_Reason_Code note_frame(struct _Unwind_Context *context, void *unused_argument) {
    uint32_t at = slot->frames;
    if (at >= NTH_FRAMES)
        return _URC_END_OF_STACK;
    slot->frame[at] = _Unwind_GetIP(context);
    slot->frames = at + 1;
    return _URC_NO_REASON;
}

/* The innermost that is neither this library nor libc. */
static void note_caller(void) {
    Dl_info own = {0}, info;
    dladdr((void *)(uintptr_t)note_frame, &own);
    for (uint32_t i = 0; i < slot->frames; i++) {
        if (!dladdr((void *)(uintptr_t)slot->frame[i], &info) || info.dli_fbase == own.dli_fbase)
            continue;
        const char *name = strrchr(info.dli_fname, '/');
        snprintf(slot->caller, sizeof slot->caller, "%s", name ? name + 1 : info.dli_fname);
        if (strncmp(slot->caller, "libc.so", 7) != 0)
            return;
    }
}

static void note(const char *call) {
    inside = true;
    memset(slot->call, 0, sizeof slot->call);
    memcpy(slot->call, call, strnlen(call, sizeof slot->call - 1));
    slot->frames = 0;
    _Unwind_Backtrace(note_frame, NULL);
    note_caller();
    inside = false;
}

bool nth_fails(enum nth_kind kind, const char *call, int error) {
    if (atomic_load(&slot->kind) != kind || inside || !atomic_load(&begun))
        return false;
    uint64_t number = atomic_fetch_add(&slot->count, 1) + 1;
    if (number < slot->first || number > slot->last)
        return false;
    note(call);
    atomic_fetch_add(&slot->failed, 1);
    errno = slot->error ? slot->error : error;
    return true;
}

static bool interrupted(const char *call) { return nth_fails(NTH_INTERRUPT, call, EINTR); }

enum opened { OPEN_SOCKET, OPEN_FILE, OPEN_OTHER };

static enum opened what_is(int fd) {
    struct stat about;
    int before = errno;
    bool known = fstat(fd, &about) == 0;
    errno = before;
    if (known && S_ISSOCK(about.st_mode))
        return OPEN_SOCKET;
    return fd == STDERR_FILENO || (known && S_ISREG(about.st_mode)) ? OPEN_FILE : OPEN_OTHER;
}

static bool read_fails(int fd, const char *call) {
    if (interrupted(call))
        return true;
    uint32_t kind = atomic_load(&slot->kind);
    if (kind != NTH_RECEIVE && kind != NTH_FILE)
        return false;
    enum opened what = what_is(fd);
    return (what == OPEN_SOCKET && nth_fails(NTH_RECEIVE, call, ECONNRESET)) ||
           (what == OPEN_FILE && nth_fails(NTH_FILE, call, EIO));
}

static bool write_fails(int fd, const char *call) {
    if (interrupted(call))
        return true;
    uint32_t kind = atomic_load(&slot->kind);
    if (kind != NTH_SEND && kind != NTH_FILE)
        return false;
    enum opened what = what_is(fd);
    return (what == OPEN_SOCKET && nth_fails(NTH_SEND, call, ECONNRESET)) ||
           (what == OPEN_FILE && nth_fails(NTH_FILE, call, ENOSPC));
}

/* ---- start ----------------------------------------------------------------------------------- */

static enum nth_role role_of_this(void) {
    char line[4096];
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, line, sizeof line - 2);
    if (fd >= 0)
        close(fd);
    if (got <= 0)
        return NTH_OTHER;
    line[got] = line[got + 1] = '\0';
    const char *name = strrchr(line, '/') ? strrchr(line, '/') + 1 : line;
    const char *role = line + strlen(line) + 1;
    if (strcmp(name, "kld-server") != 0)
        return NTH_OTHER;
    return strcmp(role, "--role=worker") == 0    ? NTH_WORKER
           : strcmp(role, "--role=gateway") == 0 ? NTH_GATEWAY
                                                 : NTH_SUPERVISOR;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("NTH_PAGE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    struct nth_page *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED)
        return;
    struct nth_slot *mine = &page->slot[role_of_this()];
    mine->blocks = mine->bytes = 0;
    mine->pid = (uint32_t)getpid();
    inside = true;
    _Unwind_Backtrace(note_frame, NULL); /* what it does the first time only, it does now */
    inside = false;
    slot = mine;
}

static void *next(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

/* The function behind ours, of the same type. */
#define REAL(name)                                                                                 \
    static __typeof__(&name) real;                                                                 \
    if (!real)                                                                                     \
    real = (__typeof__(&name))next(#name)

static int (*real_main)(int, char **, char **);

static int main_begins(int argc, char **argv, char **environment) {
    atomic_store(&begun, true);
    return real_main(argc, argv, environment);
}

int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void),
                      void (*fini)(void), void (*loader_fini)(void), void *stack);
EXPORT int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv,
                             void (*init)(void), void (*fini)(void), void (*loader_fini)(void),
                             void *stack) {
    REAL(__libc_start_main);
    real_main = main;
    return real(main_begins, argc, argv, init, fini, loader_fini, stack);
}

/* ---- memory: libc's own names, because dlsym() allocates ------------------------------------- */

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static void *count_in(void *block) {
    if (block) {
        atomic_fetch_add_explicit(&slot->blocks, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&slot->bytes, (int64_t)malloc_usable_size(block),
                                  memory_order_relaxed);
    }
    return block;
}

static void count_out(void *block) {
    atomic_fetch_sub_explicit(&slot->blocks, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&slot->bytes, (int64_t)malloc_usable_size(block),
                              memory_order_relaxed);
}

EXPORT void *malloc(size_t size) {
    return nth_fails(NTH_MEMORY, "malloc", ENOMEM) ? NULL : count_in(__libc_malloc(size));
}

EXPORT void *calloc(size_t count, size_t size) {
    return nth_fails(NTH_MEMORY, "calloc", ENOMEM) ? NULL : count_in(__libc_calloc(count, size));
}

EXPORT void *realloc(void *block, size_t size) {
    if (nth_fails(NTH_MEMORY, "realloc", ENOMEM))
        return NULL;
    int64_t before = block ? (int64_t)malloc_usable_size(block) : 0;
    void *moved = __libc_realloc(block, size);
    if (!moved && size)
        return NULL;
    if (block) {
        atomic_fetch_sub_explicit(&slot->blocks, 1, memory_order_relaxed);
        atomic_fetch_sub_explicit(&slot->bytes, before, memory_order_relaxed);
    }
    return count_in(moved);
}

EXPORT void *reallocarray(void *block, size_t count, size_t size) {
    size_t all;
    if (__builtin_mul_overflow(count, size, &all)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, all);
}

EXPORT void *memalign(size_t alignment, size_t size) {
    return nth_fails(NTH_MEMORY, "memalign", ENOMEM) ? NULL
                                                     : count_in(__libc_memalign(alignment, size));
}

EXPORT void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

EXPORT int posix_memalign(void **ret_block, size_t alignment, size_t size) {
    int before = errno;
    void *block = memalign(alignment, size);
    errno = before;
    if (block)
        *ret_block = block;
    return block ? 0 : ENOMEM;
}

EXPORT void free(void *block) {
    if (block)
        count_out(block);
    __libc_free(block);
}

EXPORT void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    REAL(mmap);
    return nth_fails(NTH_MAP, "mmap", ENOMEM) ? MAP_FAILED
                                              : real(at, bytes, protection, flags, fd, offset);
}

EXPORT void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return mmap(at, bytes, protection, flags, fd, offset);
}

EXPORT void *mremap(void *at, size_t before, size_t after, int flags, ...) {
    va_list more;
    va_start(more, flags);
    void *to = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
    va_end(more);
    REAL(mremap);
    return nth_fails(NTH_MAP, "mremap", ENOMEM) ? MAP_FAILED : real(at, before, after, flags, to);
}

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*function)(void *), void *argument) {
    REAL(pthread_create);
    int before = errno;
    bool failed = nth_fails(NTH_THREAD, "pthread_create", EAGAIN);
    int error = errno;
    errno = before;
    return failed ? error : real(thread, attributes, function, argument);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

#define NO_DESCRIPTOR(name) nth_fails(NTH_DESCRIPTOR, #name, EMFILE)
/* A function that gives a descriptor. */
#define OPENS(name, parameters, arguments)                                                         \
    EXPORT int name parameters {                                                                   \
        REAL(name);                                                                                \
        return NO_DESCRIPTOR(name) ? -1 : real arguments;                                          \
    }

OPENS(memfd_create, (const char *name, unsigned flags), (name, flags))
OPENS(socket, (int domain, int type, int protocol), (domain, type, protocol))
OPENS(socketpair, (int domain, int type, int protocol, int pair[2]), (domain, type, protocol, pair))
OPENS(dup, (int fd), (fd))
OPENS(dup3, (int fd, int to, int flags), (fd, to, flags))
OPENS(eventfd, (unsigned count, int flags), (count, flags))
OPENS(epoll_create1, (int flags), (flags))
OPENS(timerfd_create, (clockid_t clock, int flags), (clock, flags))
OPENS(pipe, (int pair[2]), (pair))
OPENS(pipe2, (int pair[2], int flags), (pair, flags))

EXPORT int accept(int fd, struct sockaddr *address, socklen_t *size) {
    REAL(accept);
    return NO_DESCRIPTOR(accept) || interrupted("accept") ? -1 : real(fd, address, size);
}

EXPORT int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
    REAL(accept4);
    return NO_DESCRIPTOR(accept4) || interrupted("accept4") ? -1 : real(fd, address, size, flags);
}

static int open_or_fail(int folder, const char *path, int flags, mode_t mode) {
    static int (*real)(int, const char *, int, ...);
    if (!real)
        real = (int (*)(int, const char *, int, ...))next("openat");
    return NO_DESCRIPTOR(open) ? -1 : real(folder, path, flags, mode);
}

#define MODE(ret_mode)                                                                             \
    va_list more;                                                                                  \
    va_start(more, flags);                                                                         \
    mode_t ret_mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                    \
    va_end(more)

EXPORT int open(const char *path, int flags, ...) {
    MODE(mode);
    return open_or_fail(AT_FDCWD, path, flags, mode);
}

EXPORT int open64(const char *path, int flags, ...) {
    MODE(mode);
    return open_or_fail(AT_FDCWD, path, flags, mode);
}

EXPORT int openat(int folder, const char *path, int flags, ...) {
    MODE(mode);
    return open_or_fail(folder, path, flags, mode);
}

EXPORT int openat64(int folder, const char *path, int flags, ...) {
    MODE(mode);
    return open_or_fail(folder, path, flags, mode);
}

EXPORT FILE *fopen(const char *path, const char *mode) {
    REAL(fopen);
    return NO_DESCRIPTOR(fopen) ? NULL : real(path, mode);
}

EXPORT FILE *fopen64(const char *path, const char *mode) { return fopen(path, mode); }

EXPORT DIR *opendir(const char *path) {
    REAL(opendir);
    return NO_DESCRIPTOR(opendir) ? NULL : real(path);
}

EXPORT int fcntl(int fd, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    REAL(fcntl);
    if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) {
        if (NO_DESCRIPTOR(fcntl))
            return -1;
    } else if (nth_fails(NTH_OPTION, "fcntl", ENOMEM)) {
        return -1;
    }
    return real(fd, command, argument);
}

EXPORT int fcntl64(int fd, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    return fcntl(fd, command, argument);
}

/* ---- reading and writing --------------------------------------------------------------------- */

#define MOVES(name, which, parameters, arguments)                                                  \
    EXPORT ssize_t name parameters {                                                               \
        REAL(name);                                                                                \
        return which##_fails(fd, #name) ? -1 : real arguments;                                     \
    }

MOVES(read, read, (int fd, void *to, size_t size), (fd, to, size))
MOVES(readv, read, (int fd, const struct iovec *part, int count), (fd, part, count))
MOVES(pread, read, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
MOVES(pread64, read, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
MOVES(recv, read, (int fd, void *to, size_t size, int flags), (fd, to, size, flags))
MOVES(recvfrom, read,
      (int fd, void *to, size_t size, int flags, struct sockaddr *from, socklen_t *from_size),
      (fd, to, size, flags, from, from_size))
MOVES(write, write, (int fd, const void *from, size_t size), (fd, from, size))
MOVES(writev, write, (int fd, const struct iovec *part, int count), (fd, part, count))
MOVES(pwrite, write, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
MOVES(pwrite64, write, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
MOVES(send, write, (int fd, const void *from, size_t size, int flags), (fd, from, size, flags))
MOVES(sendto, write,
      (int fd, const void *from, size_t size, int flags, const struct sockaddr *to,
       socklen_t to_size),
      (fd, from, size, flags, to, to_size))
MOVES(sendmsg, write, (int fd, const struct msghdr *message, int flags), (fd, message, flags))

/* Without room for their descriptors, they are lost and the message says so. */
static void drop_descriptors(struct msghdr *message) {
    struct cmsghdr *part = CMSG_FIRSTHDR(message);
    if (!part || part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS ||
        !NO_DESCRIPTOR(recvmsg))
        return;
    for (size_t at = 0; at + CMSG_LEN(sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
        int fd;
        memcpy(&fd, CMSG_DATA(part) + at, sizeof fd);
        close(fd);
    }
    message->msg_controllen = 0;
    message->msg_flags |= MSG_CTRUNC;
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg);
    if (read_fails(fd, "recvmsg"))
        return -1;
    ssize_t got = real(fd, message, flags);
    if (got >= 0)
        drop_descriptors(message);
    return got;
}

EXPORT int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    return nth_fails(NTH_FILE, "ftruncate", ENOSPC) ? -1 : real(fd, size);
}

EXPORT int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

/* What _FORTIFY_SOURCE makes of them; sizes were checked there. */
#define CHECKED(result, name, parameters, arguments)                                               \
    result __##name##_chk parameters;                                                              \
    EXPORT result __##name##_chk parameters { return name arguments; }

CHECKED(ssize_t, read, (int fd, void *to, size_t size, size_t room), (fd, to, size))
CHECKED(ssize_t, pread, (int fd, void *to, size_t size, off_t at, size_t room), (fd, to, size, at))
CHECKED(ssize_t, pread64, (int fd, void *to, size_t size, off_t at, size_t room),
        (fd, to, size, at))
CHECKED(ssize_t, recv, (int fd, void *to, size_t size, size_t room, int flags),
        (fd, to, size, flags))
CHECKED(ssize_t, recvfrom,
        (int fd, void *to, size_t size, size_t room, int flags, struct sockaddr *from,
         socklen_t *from_size),
        (fd, to, size, flags, from, from_size))
CHECKED(int, poll, (struct pollfd * fds, nfds_t count, int ms, size_t room), (fds, count, ms))

/* ---- waiting, options ------------------------------------------------------------------------ */

#define ANSWERS(name, failed, parameters, arguments)                                               \
    EXPORT int name parameters {                                                                   \
        REAL(name);                                                                                \
        return (failed) ? -1 : real arguments;                                                     \
    }

ANSWERS(epoll_ctl, operation == EPOLL_CTL_ADD && nth_fails(NTH_EPOLL, "epoll_ctl", ENOSPC),
        (int epoll, int operation, int fd, struct epoll_event *event),
        (epoll, operation, fd, event))
ANSWERS(epoll_wait, interrupted("epoll_wait"),
        (int epoll, struct epoll_event *event, int count, int ms), (epoll, event, count, ms))
ANSWERS(epoll_pwait, interrupted("epoll_pwait"),
        (int epoll, struct epoll_event *event, int count, int ms, const sigset_t *mask),
        (epoll, event, count, ms, mask))
ANSWERS(poll, interrupted("poll"), (struct pollfd * fds, nfds_t count, int ms), (fds, count, ms))
ANSWERS(connect, nth_fails(NTH_CONNECT, "connect", EAGAIN),
        (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size))
ANSWERS(setsockopt, nth_fails(NTH_OPTION, "setsockopt", ENOMEM),
        (int fd, int level, int name, const void *value, socklen_t size),
        (fd, level, name, value, size))
ANSWERS(getsockopt, nth_fails(NTH_OPTION, "getsockopt", ENOMEM),
        (int fd, int level, int name, void *value, socklen_t *size), (fd, level, name, value, size))
ANSWERS(getsockname, nth_fails(NTH_OPTION, "getsockname", ENOBUFS),
        (int fd, struct sockaddr *address, socklen_t *size), (fd, address, size))
ANSWERS(getpeername, nth_fails(NTH_OPTION, "getpeername", ENOBUFS),
        (int fd, struct sockaddr *address, socklen_t *size), (fd, address, size))
