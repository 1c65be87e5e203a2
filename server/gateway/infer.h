/* infer.h - one infer request in the gateway, from its first byte until its memory is free again.
 *
 *   receive JSON -> parse -> lay out in staging -> receive the binary tail into place -> gather
 *   (JSON numbers, shared memory) -> worker -> write out (JSON text, shared memory) -> send
 *
 * body.c receives, infer.c does the rest. Parse, gather and write out run on the loop thread where
 * they are small and on the thread pool where they are not; while the pool has the request
 * (in_pool) nobody else touches it.
 *
 * Who holds it. The exchange (until its end, or until it was told that it is too late), the pool,
 * the worker and the response that sends from its staging each keep it alive; the last of them
 * frees it. */
#ifndef KLD_SERVER_GATEWAY_INFER_H
#define KLD_SERVER_GATEWAY_INFER_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>
#include <zlib.h>

#include "proto/oip.h"
#include "server/gateway/http.h"
#include "server/gateway/links.h"

#define KLD_INFER_TENSORS_MAX (KLD_OIP_INPUTS_MAX + KLD_OIP_OUTPUTS_MAX)
#define KLD_INFER_INLINE_BYTES_MAX (4 << 10) /* of JSON that the loop thread reads or writes */

enum kld_infer_step { KLD_INFER_PARSE, KLD_INFER_GATHER, KLD_INFER_WRITE_OUT, KLD_INFER_YIELD };

/* A compressed body. */
struct kld_inflate {
    z_stream stream;
    bool gzip, ended;
    uint64_t in_bytes;           /* compressed, so far */
    uint32_t out_begin, out_end; /* decompressed and not taken yet: out[out_begin .. out_end-1] */
    char out[64 << 10];
};

struct kld_infer {
    struct kld_gateway *gateway;
    struct kld_exchange *exchange; /* NULL: nobody waits any more */
    struct kld_caller *caller;     /* who asks, also when he has left */
    bool counted;                  /* among the caller's requests */
    struct kld_link_call call;
    bool in_pool, in_worker, in_response;

    /* Receiving; loop thread. */
    struct kld_inflate *inflate; /* NULL: not compressed */
    uint64_t body_bytes;         /* decompressed so far */
    bool json_known;             /* json_bytes is known before the end of the body */
    bool json_ends_body;         /* no Inference-Header-Content-Length: it is all JSON */
    uint64_t json_bytes, json_have, json_capacity;
    uint64_t json_offset; /* in staging, if json_capacity is not 0 */
    bool parsed, body_done;
    uint64_t tail_have;
    uint32_t tail_input; /* the input that takes the next byte of the tail */

    uint64_t held_bytes; /* of staging, as counted for the caller */

    /* From the parser on. */
    struct kld_oip_request request;
    bool has_tensors;                      /* staging from tensors_offset on is ours */
    uint64_t tensors_offset;               /* all tensors and the reply's JSON, in one piece */
    uint64_t place[KLD_INFER_TENSORS_MAX]; /* in staging; inputs, then outputs */
    struct kld_shm_region *region[KLD_INFER_TENSORS_MAX]; /* held; NULL: not shared memory */
    struct kld_oip_text reply;
    enum kld_coding coding; /* that the caller takes for JSON */
    void *packed;           /* the reply, compressed; NULL: not */
    size_t packed_bytes;

    /* The pool. */
    uv_work_t work;
    enum kld_infer_step step;
    struct kld_error error; /* what a step ended with */
    struct kld_result result;
    enum kld_status outcome; /* what is counted in the end */
};

/* The calls of struct kld_http_handler for the infer route. */
void kld_infer_begin(struct kld_exchange *exchange);
size_t kld_infer_feed(struct kld_exchange *exchange, const char *data, size_t size);
void kld_infer_finish(struct kld_exchange *exchange);
void kld_infer_end(struct kld_exchange *exchange);

/* Between body.c and infer.c. */
enum kld_status kld_body_begin(struct kld_infer *infer, struct kld_error *err);
size_t kld_body_feed(struct kld_infer *infer, const char *data, size_t size);
/* After the last byte and the parser: did everything come? */
enum kld_status kld_body_finish(struct kld_infer *infer, struct kld_error *err);
void kld_body_done(struct kld_infer *infer); /* frees the decompressor */

/* A range of staging for this request, counted for its caller until the request's memory is freed.
 */
enum kld_status kld_infer_alloc(struct kld_infer *infer, uint64_t bytes, uint64_t *ret_offset,
                                struct kld_error *err);

/* The JSON is complete. The exchange is paused if this takes long. */
void kld_infer_parse(struct kld_infer *infer);
void kld_infer_fail(struct kld_infer *infer, const struct kld_error *error);
/* Pauses the exchange and goes on in a later turn of the loop. */
void kld_infer_yield(struct kld_infer *infer);

#endif
