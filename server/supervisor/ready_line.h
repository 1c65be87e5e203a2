/* ready_line.h - the line on standard output that says that the server is ready. Whoever has
 * stopped reading that stream is not waited for: what it has no room for is written again until it
 * has. Supervisor's thread. */
#ifndef KLD_SERVER_SUPERVISOR_READY_LINE_H
#define KLD_SERVER_SUPERVISOR_READY_LINE_H

#include <stddef.h>
#include <uv.h>

#include "server/config.h"
#include "server/output.h"

struct kld_ready_line {
    struct kld_output output;
    uv_timer_t again;                         /* runs while some of it is not written */
    char text[2 * KLD_CONFIG_TEXT_MAX + 256]; /* the path, the back end, an address and words */
    size_t bytes, written;
};

void kld_ready_line_open(struct kld_ready_line *line, uv_loop_t *loop);
void kld_ready_line_say(struct kld_ready_line *line, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The loop has ended; what was not written by now is lost. */
void kld_ready_line_close(struct kld_ready_line *line);

#endif
