/* failed_lines.c - see failed_lines.h. */
#include "server/failed_lines.h"

#include "server/log.h"

#define LEFT_OUT_MS 1000

void kld_failed_lines_tell(struct kld_failed_lines *lines) {
    if (lines->left_out)
        kld_log(KLD_LOG_INFO, "lines left out", "requests=%u", lines->left_out);
    lines->left_out = 0;
}

static void due(uv_timer_t *timer) { kld_failed_lines_tell(timer->data); }

void kld_failed_lines_open(struct kld_failed_lines *lines, uv_loop_t *loop) {
    uv_timer_init(loop, &lines->tell);
    lines->tell.data = lines;
}

void kld_failed_lines_close(struct kld_failed_lines *lines) {
    kld_failed_lines_tell(lines);
    uv_close((uv_handle_t *)&lines->tell, NULL);
}

bool kld_failed_lines_take(struct kld_failed_lines *lines) {
    if (kld_log_wants(KLD_LOG_DEBUG))
        return true;
    uint64_t second = uv_hrtime() / 1000000000;
    if (second != lines->second) {
        lines->second = second;
        lines->written = 0;
    }
    if (lines->written < KLD_FAILED_LINES_MAX) {
        lines->written++;
        return true;
    }
    if (lines->left_out++ == 0)
        uv_timer_start(&lines->tell, due, LEFT_OUT_MS, 0);
    return false;
}
