/* ready_line.c - writes the line, and what is left of it a little later (ready_line.h).
 * Supervisor's thread. */
#include "server/supervisor/ready_line.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/log.h"

#define AGAIN_MS 100

static void write_rest(uv_timer_t *timer) {
    struct kld_ready_line *line = timer->data;
    ssize_t written =
        kld_output_write(&line->output, line->text + line->written, line->bytes - line->written);
    if (written < 0 && errno != EAGAIN) {
        kld_log(KLD_LOG_WARN, "ready line not written", "reason=\"%s\"", strerror(errno));
        return;
    }
    line->written += written < 0 ? 0 : (size_t)written;
    if (line->written < line->bytes)
        uv_timer_start(timer, write_rest, AGAIN_MS, 0);
}

void kld_ready_line_open(struct kld_ready_line *line, uv_loop_t *loop) {
    kld_output_open(&line->output, STDOUT_FILENO);
    uv_timer_init(loop, &line->again);
    line->again.data = line;
}

void kld_ready_line_say(struct kld_ready_line *line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int bytes = vsnprintf(line->text, sizeof line->text, format, arguments);
    va_end(arguments);
    line->bytes = bytes < 0 ? 0 : strnlen(line->text, sizeof line->text);
    line->written = 0;
    write_rest(&line->again);
}

void kld_ready_line_close(struct kld_ready_line *line) {
    if (line->output.fd > STDERR_FILENO) /* which were there before us, or it was never opened */
        close(line->output.fd);
}
