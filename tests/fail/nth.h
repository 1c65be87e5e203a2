/* nth.h - the page by which a test tells a process that has nth.c in it which of its calls are to
 * fail, and by which that says what it counted. tests/e2e/faillib.py knows the same layout. */
#ifndef KLD_TESTS_FAIL_NTH_H
#define KLD_TESTS_FAIL_NTH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Which calls are counted, and may fail; one kind at a time. */
enum nth_kind {
    NTH_NONE,
    NTH_MEMORY,     /* malloc() and its like: ENOMEM */
    NTH_MAP,        /* mmap(), mremap(): ENOMEM */
    NTH_DESCRIPTOR, /* whatever opens one: EMFILE */
    NTH_SEND,       /* to a socket: ECONNRESET */
    NTH_RECEIVE,    /* from a socket: ECONNRESET */
    NTH_FILE,       /* reads, writes and sizes of files: EIO, ENOSPC */
    NTH_EPOLL,      /* epoll_ctl() that adds: ENOSPC */
    NTH_THREAD,     /* pthread_create(): EAGAIN */
    NTH_INTERRUPT,  /* whatever a signal may interrupt: EINTR */
    NTH_OPTION,     /* of a socket or a descriptor: ENOMEM */
    NTH_CONNECT,    /* connect(): EAGAIN, as by a full backlog */
    NTH_CUDA,       /* of the runtime: out of memory (nth_cuda.c) */
    NTH_CUDA_LOOK,  /* the same of those that ask whether something has ended */
    NTH_KINDS,
};

enum nth_role { NTH_SUPERVISOR, NTH_WORKER, NTH_GATEWAY, NTH_OTHER, NTH_ROLES };

#define NTH_FRAMES 40

struct nth_slot { /* of a role; 512 bytes */
    _Atomic uint32_t kind;
    _Atomic int32_t error;        /* in place of the usual one; 0: that */
    _Atomic uint64_t first, last; /* the calls that fail, counted from 1 */
    _Atomic uint64_t count, failed;
    _Atomic int64_t blocks, bytes; /* of malloc() and its like that are in use; always counted */
    _Atomic uint32_t pid;
    _Atomic uint32_t frames; /* of the last call that failed, */
    _Atomic uint64_t frame[NTH_FRAMES];
    char call[32];   /* and its name; */
    char caller[32]; /* the file, a library or the program, that called it */
    char room[512 - 64 - 8 * NTH_FRAMES - 64];
};

struct nth_page {
    struct nth_slot slot[NTH_ROLES];
};

/* Counts the call. True: it is to fail, and errno says why. */
bool nth_fails(enum nth_kind kind, const char *call, int error);

_Static_assert(sizeof(struct nth_slot) == 512, "as faillib.py has it");

#endif
