/* cuda_file.c - see cuda_file.h. Imports nothing. Worker process, loop thread. */
#include "server/worker/cuda_file.h"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/log.h"
#include "server/worker/worker.h"

/* What is not a device must not reach the driver, which asks it in ways that may block. */
enum kld_status kld_cuda_file_check(int fd, struct kld_error *err) {
    struct statx stat; /* of what the kernel knows: no file system is asked, as fstat() may */
    if (fcntl(fd, F_GET_SEALS) < 0 &&
        statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &stat) == 0 &&
        !S_ISREG(stat.stx_mode) && !S_ISDIR(stat.stx_mode) && !S_ISFIFO(stat.stx_mode) &&
        !S_ISSOCK(stat.stx_mode) && !S_ISBLK(stat.stx_mode))
        return KLD_OK;
    return kld_error_set(err, KLD_INVALID,
                         "the descriptor is not a CUDA allocation exported as a file descriptor");
}

/* What kcmp() says of two open files: the same, or which comes first in an order of its own. */
enum { SAME, LESS, GREATER };

static long compare(int a, int b) {
    pid_t self = getpid();
    return syscall(SYS_kcmp, self, self, KCMP_FILE, (unsigned long)a, (unsigned long)b);
}

/* Says once in the life of the worker that there are such. */
static uint64_t unknown(struct kld_worker *worker, const char *why) {
    if (!worker->told_cuda_files)
        kld_log(
            KLD_LOG_WARN, "cuda files unknown",
            "cuda_files_max=%llu reason=\"%s\" text=\"CUDA allocations that come as descriptors "
            "are not all told apart: an output of a client over its own input may go unnoticed\"",
            (unsigned long long)worker->options.config->cuda_files_max, why);
    worker->told_cuda_files = true;
    return 0;
}

/* There is place for one more. At most as many as regions and their pieces, and cuda_files_max. */
static bool grow(struct kld_session *session) {
    if (session->cuda_files_count < session->cuda_files_size)
        return true;
    uint32_t size = session->cuda_files_size ? 2 * session->cuda_files_size : 8;
    struct kld_cuda_file *files = realloc(session->cuda_files, size * sizeof *files);
    if (!files)
        return false;
    session->cuda_files = files;
    session->cuda_files_size = size;
    return true;
}

uint64_t kld_cuda_file_acquire(struct kld_session *session, int fd) {
    struct kld_worker *worker = session->worker;
    uint32_t low = 0, high = session->cuda_files_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        struct kld_cuda_file *file = &session->cuda_files[middle];
        switch (compare(file->fd, fd)) {
        case SAME: file->users++; return file->number;
        case LESS: low = middle + 1; break;
        case GREATER: high = middle; break;
        default: return unknown(worker, "the kernel does not compare descriptors");
        }
    }
    uint64_t most = worker->options.config->cuda_files_max;
    if (worker->cuda_files >= most || session->cuda_files_count >= most - most / 2)
        return unknown(worker, "as many are open as allowed");
    int copy = grow(session) ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (copy < 0)
        return unknown(worker, "no memory or descriptor for another one");
    worker->cuda_files++;
    struct kld_cuda_file *at = &session->cuda_files[low];
    memmove(at + 1, at, (session->cuda_files_count++ - low) * sizeof *at);
    *at = (struct kld_cuda_file){.fd = copy, .users = 1, .number = ++session->cuda_file_serial};
    return at->number;
}

bool kld_cuda_file_is_shared(const struct kld_session *session, uint64_t number) {
    for (uint32_t i = 0; number && i < session->cuda_files_count; i++)
        if (session->cuda_files[i].number == number)
            return session->cuda_files[i].users > 1;
    return false;
}

void kld_cuda_file_release(struct kld_session *session, uint64_t number) {
    uint32_t i = 0;
    while (number && i < session->cuda_files_count && session->cuda_files[i].number != number)
        i++;
    if (!number || i == session->cuda_files_count || --session->cuda_files[i].users > 0)
        return;
    struct kld_cuda_file *at = &session->cuda_files[i];
    session->worker->cuda_files--;
    kld_strays_close(session->worker->strays, session->uid, &at->fd, 1);
    memmove(at, at + 1, (--session->cuda_files_count - i) * sizeof *at);
}
