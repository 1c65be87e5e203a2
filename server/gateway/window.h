/* window.h - how much of a large body TCP takes before it is read. Loop thread. */
#ifndef KLD_SERVER_GATEWAY_WINDOW_H
#define KLD_SERVER_GATEWAY_WINDOW_H

#include "server/gateway/http.h"

#define KLD_WINDOW_BYTES (1 << 20) /* for bodies that announce more */
/* For one of which so much has been taken, so that what the kernel may hold, some twice the window,
 * is a part of what the request does. The connection keeps it for those that follow. */
#define KLD_WINDOW_WIDE_BYTES (8 << 20)
#define KLD_WINDOW_WIDE_FROM_BYTES (UINT64_C(64) << 20)

/* Its headers have come, and it was not refused. */
void kld_window_begin(const struct kld_exchange *exchange);
/* So many bytes more are in taken_bytes. */
void kld_window_taken(const struct kld_exchange *exchange, size_t more);

#endif
