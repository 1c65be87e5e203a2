/* last_words.h - an error reply to a request whose body never ends.
 *
 * MHD (0.9.75) takes no reply in the middle of a body. One that no length announces (chunks) may go
 * on for ever, so when enough of it was dropped its connection ends, and MHD would end it without a
 * word. So the reply is kept as text, too, and written to the connection there and then: MHD sends
 * nothing between the replies before this request and its own. What still comes is parting.h's.
 * Loop thread only. */
#ifndef KLD_SERVER_GATEWAY_LAST_WORDS_H
#define KLD_SERVER_GATEWAY_LAST_WORDS_H

#include "server/gateway/http.h"

/* What is the first reply of the exchange, if some of such a body may still come. Where there is no
 * memory for it, or was none for the response, nothing is kept. */
void kld_last_words_keep(struct kld_exchange *exchange, unsigned http_status,
                         struct MHD_Response *response, const char *body, size_t body_bytes);
/* Then the connection has to end. Nothing happens where nothing was kept; as much is said as the
 * connection takes at once. */
void kld_last_words_say(struct kld_exchange *exchange);

#endif
