/* cuda_file.c - see cuda_file.h. Imports nothing. Worker process, loop thread. */
#include "server/worker/cuda_file.h"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/log.h"
#include "server/worker/closer.h"
#include "server/worker/worker.h"

static bool same_file(int a, int b) {
    pid_t self = getpid();
    return syscall(SYS_kcmp, self, self, KCMP_FILE, (unsigned long)a, (unsigned long)b) == 0;
}

static bool has_room(struct kld_worker *worker) {
    uint64_t most = worker->options.config->cuda_files_max;
    if (worker->cuda_files < most)
        return true;
    if (!worker->told_cuda_files)
        kld_log(
            KLD_LOG_WARN, "cuda files full",
            "cuda_files_max=%llu text=\"CUDA allocations that come as descriptors from now on are "
            "not told apart: an output of a client over its own input may go unnoticed\"",
            (unsigned long long)most);
    worker->told_cuda_files = true;
    return false;
}

uint64_t kld_cuda_file_acquire(struct kld_session *session, int fd) {
    struct kld_cuda_file *empty = NULL;
    for (int i = 0; i < KLD_SESSION_CUDA_FILES; i++) {
        struct kld_cuda_file *file = &session->cuda_files[i];
        if (!file->users) {
            empty = empty ? empty : file;
        } else if (same_file(file->fd, fd)) {
            file->users++;
            return file->number;
        }
    }
    int copy = empty && has_room(session->worker) ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (copy < 0)
        return 0;
    session->worker->cuda_files++;
    *empty = (struct kld_cuda_file){.fd = copy, .users = 1, .number = ++session->cuda_file_serial};
    return empty->number;
}

void kld_cuda_file_release(struct kld_session *session, uint64_t number) {
    for (int i = 0; i < KLD_SESSION_CUDA_FILES && number; i++) {
        struct kld_cuda_file *file = &session->cuda_files[i];
        if (file->users && file->number == number && --file->users == 0) {
            session->worker->cuda_files--;
            kld_close_later(session->worker, session, KLD_CLOSE_PASSED, &file->fd, 1);
        }
    }
}
