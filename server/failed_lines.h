/* failed_lines.h - a bound for the lines about what was refused or failed: anybody can cause those,
 * so a loop writes so many a second, and counts the rest in a line of its own ("lines left out"),
 * within a second of the first of them. Writes no other line. At level debug there is no bound. The
 * thread of the loop. */
#ifndef KLD_SERVER_FAILED_LINES_H
#define KLD_SERVER_FAILED_LINES_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#define KLD_FAILED_LINES_MAX 50 /* a second and loop */

struct kld_failed_lines {
    uint64_t second; /* of uv_hrtime() */
    uint32_t written, left_out;
    uv_timer_t tell; /* runs while some were left out and not told of */
};

void kld_failed_lines_open(struct kld_failed_lines *lines, uv_loop_t *loop);
/* May one more be written now? False: it is counted. */
bool kld_failed_lines_take(struct kld_failed_lines *lines);
/* Says now what was left out, if anything was. */
void kld_failed_lines_tell(struct kld_failed_lines *lines);
/* The same; then closes the timer. */
void kld_failed_lines_close(struct kld_failed_lines *lines);

#endif
