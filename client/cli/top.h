/* top.h - `kld top`: what it shows, apart from where. Pure; any thread. */
#ifndef KLD_CLIENT_CLI_TOP_H
#define KLD_CLIENT_CLI_TOP_H

#include <stdbool.h>
#include <stdio.h>

#include "client/cli/metrics.h"

/* What the server said, and when. */
struct kld_top_sample {
    double at_s; /* CLOCK_MONOTONIC */
    double unix_s;
    struct kld_report report;
};

/* Did the server begin anew in between, so that the two cannot be compared? away: it did not answer
 * for a while. */
bool kld_top_restarted(const struct kld_top_sample *before, const struct kld_top_sample *now,
                       bool away);
/* Lines, each ending in a newline. before: NULL where there is nothing to compare with: rates are
 * then "-". processes: an earlier look to compare those with, because the server itself looks at
 * them only once a second; NULL: none. message: a line of its own below the first, or "". */
void kld_top_render(FILE *out, const char *server, const char *message,
                    const struct kld_top_sample *before, const struct kld_top_sample *processes,
                    const struct kld_top_sample *now);
/* The q-quantile of what was added to a histogram in between, in seconds, as if values were spread
 * evenly in a bucket; the largest finite limit where it lies beyond; negative: nothing was added.
 */
double kld_top_quantile(const struct kld_report_histogram *before,
                        const struct kld_report_histogram *now, double q);

#endif
