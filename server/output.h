/* output.h - writing to a standard stream that others share, without ever waiting for who reads it.
 * Any thread, once it is open. */
#ifndef KLD_SERVER_OUTPUT_H
#define KLD_SERVER_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct kld_output {
    int fd;
    bool socket, blocks; /* blocks: it was not ours to open again */
};

/* Of a descriptor of this process, whose mode stays as it is: the others share that. A pipe and a
 * terminal are opened again without blocking; fd is the result's or, where that cannot be, the same
 * one. Nothing else is opened. */
void kld_output_open(struct kld_output *output, int fd);
/* What of it was written; -1 and errno: nothing, EAGAIN where there is no room now. Up to PIPE_BUF
 * bytes go to a pipe as a whole. */
ssize_t kld_output_write(const struct kld_output *output, const char *text, size_t bytes);

#endif
