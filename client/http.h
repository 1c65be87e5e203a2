/* http.h - the inside of a connection over HTTP: shared by http.c (transfers, events, retries),
 * http_request.c (what is sent), http_reply.c (what comes back) and http_connect.c (opening,
 * questions, regions). Everything belongs to the thread that owns the connection. */
#ifndef KLD_CLIENT_HTTP_H
#define KLD_CLIENT_HTTP_H

#include <curl/curl.h>

#include "client/connection.h"

#define KLD_HTTP_HEAD_MAX 4096   /* the JSON of a request: five inputs, four outputs, parameters */
#define KLD_HTTP_REPLY_MAX 16384 /* the JSON of a reply; of an error, what fits */

struct http_output {
    enum kld_slot slot;
    uint64_t bytes;
};

/* What a reply's JSON says. */
struct http_reply {
    uint32_t count;
    struct http_output output[KLD_SLOT_COUNT]; /* in the order of the binary tail */
};

/* One use of libcurl: a call, or a GET that is waited for. Embedded first in both. */
struct http_transfer {
    CURL *easy; /* NULL: none under way */
    struct curl_slist *headers;
    struct http_call *call; /* NULL: a GET */
    bool ended;             /* a GET's: code and status are set */
    int socket_error;       /* errno of its last socket, or what else it lacked; 0: nothing */
    CURLcode code;
    long http_status;
};

struct http_call {
    struct kld_call base;
    struct http_transfer transfer;
    const struct kld_connect_options *options; /* of the connection, for `progress` */
    bool wants_loss;        /* the scalar, whether or not the op has a tensor for it */
    bool wrote;             /* a byte of a reply has reached the caller's memory */
    bool device_lost;       /* this reply says that the device failed */
    uint32_t losses;        /* connections and devices lost while the request was with the server */
    uint32_t device_losses; /* of them: devices, each of two tries of the server's own */
    uint64_t first_failure_ns; /* since when no server has begun on it; 0: none has failed to */
    uint64_t retry_at_ns, retry_after_ns;

    /* The request body: head, then the tensors of `inputs`. */
    char head[KLD_HTTP_HEAD_MAX];
    uint64_t head_bytes, body_bytes;
    uint64_t sent_bytes; /* the read callback's cursor */

    /* The reply. */
    uint64_t reply_head_bytes; /* Inference-Header-Content-Length; UINT64_MAX: none */
    uint64_t text_bytes;       /* used of `text` */
    bool parsed;               /* `reply` is valid, the tail follows */
    uint32_t output;           /* that the next byte of the tail belongs to */
    uint64_t output_bytes;     /* of it that have arrived */
    unsigned char loss[8];     /* the scalar loss's bytes */
    struct http_reply reply;
    struct kld_error failure; /* why a callback gave up */
    char text[KLD_HTTP_REPLY_MAX];
};

#define KLD_HTTP_URL_MAX 512

struct http_connection {
    struct kld_connection base;
    CURLM *multi;                /* NULL: there was no memory for another one */
    bool broken;                 /* a socket of its cannot be watched */
    struct http_transfer *asked; /* a GET that is waited for; NULL: none */
    uint64_t curl_at_ns;         /* when libcurl wants to be called */
    char root[KLD_HTTP_URL_MAX]; /* "http://host:port", without a slash at its end */
    struct kld_call_list calls;  /* all in flight, waiting to be tried again or not */
    struct curl_slist *get_headers, *post_headers; /* `Authorization`, ... */
};

/* http.c. easy_open: a libcurl handle for `path` of the server; NULL when out of memory. */
CURL *kld_http_easy_open(struct http_connection *h, const char *path,
                         struct http_transfer *transfer);
void kld_http_transfer_close(struct http_connection *h, struct http_transfer *transfer);
enum kld_status kld_http_status(long code);
/* What it says of a transfer whose code is not CURLE_OK. */
enum kld_status kld_http_curl_error(const struct http_connection *h,
                                    const struct http_transfer *transfer, struct kld_error *err);
int kld_http_socket_changed(CURL *easy, curl_socket_t fd, int what, void *user, void *socket_user);
int kld_http_timer_changed(CURLM *multi, long timeout_ms, void *user);
enum kld_status kld_http_submit(struct kld_connection *connection, struct kld_call *call,
                                struct kld_error *err);
void kld_http_cancel(struct kld_connection *connection, struct kld_call *call);
void kld_http_event(struct kld_connection *connection, uint64_t tag, uint32_t events);
void kld_http_timer(struct kld_connection *connection, uint64_t now_ns);

/* http_request.c */
enum kld_status kld_http_head_write(struct http_call *call, struct kld_error *err);
size_t kld_http_body_read(char *to, size_t size, size_t count, void *call);
int kld_http_body_seek(void *call, curl_off_t offset, int origin);
/* Copies `bytes` bytes at `at` of the packed tensor from its strided rows, or to them. */
void kld_http_tensor_read(char *to, const char *tensor, const struct kld_slot_geometry *geometry,
                          uint64_t at, uint64_t bytes);
void kld_http_tensor_write(char *tensor, const struct kld_slot_geometry *geometry, uint64_t at,
                           const char *from, uint64_t bytes);

/* False: no memory. */
bool kld_http_header_append(struct curl_slist **list, const char *header);
bool kld_http_multi_open(struct http_connection *h); /* http_connect.c */

/* http_reply.c. Reads the JSON of an infer reply; every output must be binary. */
enum kld_status kld_http_reply_read(const char *text, size_t bytes, struct http_reply *ret_reply,
                                    struct kld_error *err);
/* The text under `key` of a JSON object, cut to capacity; false: there is none. */
bool kld_http_text_read(const char *text, size_t bytes, const char *key, char *ret_text,
                        size_t capacity);
size_t kld_http_header(char *data, size_t size, size_t count, void *call);
size_t kld_http_body_write(char *data, size_t size, size_t count, void *call);
/* The transfer is over and was a 200: is everything there? */
enum kld_status kld_http_reply_finish(struct http_call *call, struct kld_error *err);

#endif
