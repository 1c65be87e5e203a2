/* standard_fds.h - what a program of ours does first: of descriptors 0 to 2 none is left to chance.
 * Before there are other threads. */
#ifndef KLD_PROTO_STANDARD_FDS_H
#define KLD_PROTO_STANDARD_FDS_H

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* One that is closed would be that of the next file, memory or connection, and what is printed or
 * logged would go there. It is taken by one that fails. */
static inline void kld_standard_fds_keep(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
            (void)!open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

#endif
