/* http.h - HTTP/1.1: libmicrohttpd inside the libuv loop.
 *
 * One exchange is one HTTP request and its reply. The handler (routes.c) is told when its headers,
 * a piece of its body, its end have come; a reply may be given inside any of these calls or later.
 * While an exchange has no reply after its end, or is paused, its connection is suspended: no
 * thread waits for it. All on the gateway's loop thread. */
#ifndef KLD_SERVER_GATEWAY_HTTP_H
#define KLD_SERVER_GATEWAY_HTTP_H

#include <microhttpd.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/status.h"
#include "server/gateway/auth.h"
#include "server/gateway/compress.h"
#include "server/gateway/gateway.h"

/* Of MHD, for a connection's head or a piece of its body: README.md says why so much. */
#define KLD_HTTP_HEAD_BYTES_MAX (32 << 10)

/* How much of a body that nobody wants is read so that its sender sees the reply; of a caller who
 * is known, all that he might have had taken (body_bytes_max) if that is more. Of a body that no
 * length announces the last part is read behind the reply (last_words.h). */
#define KLD_HTTP_DISCARD_BYTES_MAX ((uint64_t)64 << 20)
#define KLD_HTTP_DISCARD_BEHIND_BYTES_MAX ((uint64_t)32 << 20)

struct kld_route;

struct kld_pool;

struct kld_exchange {
    struct kld_gateway *gateway;
    struct MHD_Connection *connection;
    const struct kld_route *route; /* set by the handler; NULL until then */
    void *state;                   /* the route's own */
    void *waiting; /* for the reply; NULL: nothing. waiting_gone(waiting): no reply is wanted any
                      more */
    void (*waiting_gone)(void *waiting);
    struct kld_caller *caller; /* NULL: not known, for routes that are open to all */
    unsigned rights;           /* caller's, when he asked; enum kld_right, or-ed */
    char method[16];
    char url[512];       /* path, percent-decoded */
    bool url_cut;        /* the path is longer than that */
    uint64_t name_sizes; /* of the headers' names: bit n % 64 where one has n bytes */
    const char *host;    /* as the header says it; NULL: not at all */
    bool has_length, has_body;
    bool encoded, encoded_twice; /* by Content-Encoding: but for identity; by several headers */
    bool metrics_only;           /* of a connection that may ask for no more */
    uint64_t length_bytes;       /* has_length: of the body, as announced */
    uint64_t started_ns;         /* uv_hrtime() */
    /* The handler's: what is held of staging, and of a device's pool, while it is received and
     * sent.
     */
    uint64_t held_bytes, held_pool_bytes;
    const struct kld_pool *held_pool; /* if held_pool_bytes is not 0 */
    enum kld_asked asked;             /* the handler's: what its time is counted under */
    bool soon; /* the handler's: its reply may be expected within microseconds from here on */

    /* http.c's own. */
    struct kld_exchange *before, *after; /* list of all */
    struct MHD_Response *response;       /* given and not queued yet */
    unsigned http_status;
    uint64_t taken_bytes, discarded_bytes; /* of the body, with its chunks undone */
    char *last_words;                      /* last_words.h; NULL: none */
    size_t last_words_bytes;
    uint64_t turn;       /* of drive.h, in which it was heard of */
    uint32_t lingered;   /* so often it was looked at since its end, ... */
    uint64_t lingers_ns; /* ... from then on */
    bool replied, queued, suspended, finished, paused;
    bool gone;      /* the client left while nobody read from it */
    bool misframed; /* its headers do not say where it ends */
    bool too_slow;  /* its connection was cut off for that */
};

/* The five calls into routes.c. */
struct kld_http_handler {
    void (*begin)(struct kld_exchange *exchange);
    /* Returns how many bytes it took: less than size only if it paused the exchange. */
    size_t (*feed)(struct kld_exchange *exchange, const char *data, size_t size);
    void (*finish)(struct kld_exchange *exchange); /* the whole body has come */
    /* Everything ends: an error instead of what it waits for, if it has no reply yet. */
    void (*refuse)(struct kld_exchange *exchange, const struct kld_error *error);
    void (*end)(struct kld_exchange *exchange); /* sent, or the client is gone; frees state */
};

enum kld_status kld_http_open(struct kld_gateway *gateway, const struct kld_http_handler *handler,
                              struct kld_http **ret_http, struct kld_error *err);
/* A connection that was accepted, and counted in gateway->connections; non-blocking. metrics: it
 * came to the address of metrics_http. */
void kld_http_take(struct kld_http *http, int fd, const struct sockaddr *peer, socklen_t peer_bytes,
                   bool metrics);
/* Ends every connection; exchanges that wait for their reply are answered 503 before, and whose
 * body is still coming are not. Then closed() comes on the loop. */
void kld_http_close(struct kld_http *http, void (*closed)(void *user), void *user);

/* No feed() until kld_exchange_continue(). */
void kld_exchange_pause(struct kld_exchange *exchange);
void kld_exchange_continue(struct kld_exchange *exchange);

/* Its refusal has to come inside begin(): none that comes later would reach the client. */
bool kld_exchange_refused_at_once(const struct kld_exchange *exchange);

/* The client has left while the exchange is suspended: it ends. */
void kld_exchange_gone(struct kld_exchange *exchange);

/* Inside a response's reader that has nothing yet; and when it has. False: everything ends, and so
 * must the response. */
bool kld_exchange_hold(struct kld_exchange *exchange);
void kld_exchange_release(struct kld_exchange *exchange);

const char *kld_exchange_find_header(const struct kld_exchange *exchange, const char *name);
/* A request has few headers and is asked for many: most cannot be there, by the size of their name.
 */
static inline const char *kld_exchange_header(const struct kld_exchange *exchange,
                                              const char *name) {
    return exchange->name_sizes >> strlen(name) % 64 & 1 ? kld_exchange_find_header(exchange, name)
                                                         : NULL;
}
/* The same, but NULL where there are several of that name. */
const char *kld_exchange_header_alone(const struct kld_exchange *exchange, const char *name);

/* Once an exchange. Takes over the response; NULL, no memory for it, is 503 and the end of the
 * connection. */
void kld_exchange_reply(struct kld_exchange *exchange, unsigned http_status,
                        struct MHD_Response *response);
/* Without one of its headers a reply would say something else: where there is no memory for it the
 * response is destroyed and *response NULL. Nothing happens where it was before. */
void kld_exchange_add_header(struct MHD_Response **response, const char *name, const char *value);
/* The reply where there is no memory for one. NULL: nor for this. */
struct MHD_Response *kld_exchange_spare(void);
/* What the client accepts for a reply in text; and the headers of a reply that is compressed so. */
enum kld_coding kld_exchange_coding(const struct kld_exchange *exchange);
void kld_exchange_say_packed(struct MHD_Response **response, enum kld_coding coding);
/* What a server says of itself is true of that moment, and a proxy that keeps it says it for
 * longer. Replies to methods but GET and HEAD are kept by nobody. */
void kld_exchange_say_of_now(const struct kld_exchange *exchange, struct MHD_Response **response);
void kld_exchange_reply_text(struct kld_exchange *exchange, unsigned http_status, const char *type,
                             const char *text, size_t bytes);
/* {"error": ...}, with Retry-After where it may help. */
void kld_exchange_reply_error(struct kld_exchange *exchange, const struct kld_error *error);
/* KLD_METHOD; methods: those that the path takes, by comma. */
void kld_exchange_reply_method(struct kld_exchange *exchange, const char *methods);

#endif
