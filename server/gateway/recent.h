/* recent.h - what the status page tells of the last minute: how many requests a second, and the
 * last errors.
 *
 * An error's text may repeat what a client sent. Kept is only what is ours of it: from the first
 * quotation mark to the last all is left out, and so is every number. Any thread. */
#ifndef KLD_SERVER_GATEWAY_RECENT_H
#define KLD_SERVER_GATEWAY_RECENT_H

#include <stdint.h>

#include "proto/status.h"

#define KLD_RECENT_ERRORS 8
#define KLD_RECENT_TEXT_MAX 160 /* bytes, NUL included */
#define KLD_RECENT_SECONDS_MAX 60

struct kld_recent;

struct kld_recent_error {
    uint64_t at_ns; /* uv_hrtime() */
    enum kld_status status;
    char text[KLD_RECENT_TEXT_MAX];
};

struct kld_recent *kld_recent_open(void); /* NULL: no memory */
void kld_recent_close(struct kld_recent *recent);

/* One more request was answered. now_ns: uv_hrtime(). */
void kld_recent_request(struct kld_recent *recent, uint64_t now_ns);
void kld_recent_error(struct kld_recent *recent, uint64_t now_ns, const struct kld_error *error);

/* Requests a second, over so many whole seconds (at most KLD_RECENT_SECONDS_MAX) before this one.
 */
double kld_recent_rate(struct kld_recent *recent, uint64_t now_ns, unsigned seconds);
/* The last first; returns how many. */
unsigned kld_recent_errors(struct kld_recent *recent,
                           struct kld_recent_error ret_errors[KLD_RECENT_ERRORS]);

#endif
