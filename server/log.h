/* log.h - one line an event, on standard error; text or JSON.
 *
 * A function either logs or returns its error, never both: the places that log are the loops of the
 * three roles. Lines hold no token, key or tensor. A line is one write(2), so that lines of several
 * processes do not mix; a standard error that is full or closed loses lines (counted), it never
 * blocks or stops the process. Any thread. */
#ifndef KLD_SERVER_LOG_H
#define KLD_SERVER_LOG_H

#include <stdbool.h>

#include "proto/status.h"

struct kld_stats;

enum kld_log_level { KLD_LOG_DEBUG, KLD_LOG_INFO, KLD_LOG_WARN, KLD_LOG_ERROR };

/* Once, before the threads of a role start. role: "supervisor", "worker0", "gateway". */
enum kld_status kld_log_init(const char *role, const char *level, const char *format,
                             struct kld_error *err);
/* event: a fixed lower-case word or two ("worker exited"); format: details as key=value pairs,
 * values with blanks, and what others said, in double quotes of the format's own
 * ("child_pid=%d text=\"%s\""), or "". No key is time, level,
 * role, pid or event: those are what each JSON line begins with, its process's own. */
void kld_log(enum kld_log_level level, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Where lost lines are counted from now on; NULL: nowhere. Once, before the threads start. */
void kld_log_count_lost_in(struct kld_stats *stats);
bool kld_log_wants(enum kld_log_level level);
/* By its name in the configuration, which is known by then; from any thread, for all of them. */
void kld_log_set_level(const char *level);

#endif
