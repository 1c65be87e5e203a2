/* output.c - writes that do not wait (output.h). Retries nothing but what a signal has interrupted.
 * Any thread. */
#include "server/output.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

void kld_output_open(struct kld_output *output, int fd) {
    struct stat info;
    *output = (struct kld_output){.fd = fd};
    if (fstat(fd, &info) < 0)
        return;
    output->socket = S_ISSOCK(info.st_mode);
    if (S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode)) {
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        int again = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
        output->blocks = again < 0;
        output->fd = again < 0 ? fd : again;
    }
}

/* Where writing blocks: not without room. Pipes without a name are asked for that with the write
 * itself since Linux 6.5; the rest is asked first, and there a line of another process that takes
 * the last room in between makes this one wait. */
static ssize_t write_if_room(int fd, const char *text, size_t bytes) {
    struct iovec part = {.iov_base = (void *)(uintptr_t)text, .iov_len = bytes};
    struct pollfd room = {.fd = fd, .events = POLLOUT};
    ssize_t written = pwritev2(fd, &part, 1, -1, RWF_NOWAIT);
    if (written >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EPERM))
        return written;
    if (poll(&room, 1, 0) > 0)
        return write(fd, text, bytes);
    errno = EAGAIN;
    return -1;
}

static ssize_t write_once(const struct kld_output *output, const char *text, size_t bytes) {
    if (output->socket)
        return send(output->fd, text, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    return output->blocks ? write_if_room(output->fd, text, bytes) : write(output->fd, text, bytes);
}

ssize_t kld_output_write(const struct kld_output *output, const char *text, size_t bytes) {
    ssize_t written;
    do
        written = write_once(output, text, bytes);
    while (written < 0 && errno == EINTR);
    return written;
}
