/* infer.h - one infer request in the gateway, from its first byte until its memory is free again.
 *
 *   receive JSON -> parse -> lay out in staging -> receive the binary tail into place -> gather
 *   (JSON numbers, shared memory) -> worker -> write out (JSON text, shared memory) -> send
 *
 * A request larger than its share of staging has its large tensors in a buffer on the device
 * instead ("bulk"): they travel there and back through a few pieces of staging (pieces.h).
 *
 * body.c receives, layout.c finds memory, bulk.c moves what does not fit staging, reply.c answers,
 * infer.c does the rest. Parse, gather and write out run on the loop thread where
 * they are small and on the thread pool where they are not; while the pool has the request
 * (in_pool) nobody else touches it.
 *
 * Who holds it. The exchange (until its end, or until it was told that it is too late), the pool,
 * the worker and the response that sends from its staging each keep it alive; the last of them
 * frees it. */
#ifndef KLD_SERVER_GATEWAY_INFER_H
#define KLD_SERVER_GATEWAY_INFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include <zlib.h>

#include "proto/oip.h"
#include "server/gateway/deadline.h"
#include "server/gateway/http.h"
#include "server/gateway/links.h"
#include "server/gateway/pieces.h"
#include "server/gateway/pool.h"
#include "server/gateway/regions.h"
#include "server/gateway/trace.h"
#include "server/gateway/wait.h"

#define KLD_INFER_TENSORS_MAX (KLD_OIP_INPUTS_MAX + KLD_OIP_OUTPUTS_MAX)
#define KLD_INFER_INLINE_BYTES_MAX (4 << 10) /* of JSON that the loop thread reads or writes */
#define KLD_INFER_SMALL_BYTES ((uint64_t)64 << 10) /* tensors up to this are never in a buffer */

enum kld_infer_step {
    KLD_INFER_PARSE,
    KLD_INFER_GATHER,
    KLD_INFER_WRITE_OUT,
    KLD_INFER_YIELD,
    KLD_INFER_READ_REGION, /* a piece of shared memory */
    KLD_INFER_WRITE_REGION,
};

/* What a request waits for, as far as its deadline goes. */
enum kld_late {
    KLD_LATE_MEMORY, /* staging, or a buffer on the device */
    KLD_LATE_PIECE,  /* one that travels */
    KLD_LATE_RESULT,
};

/* What the pieces of a bulk request are doing. */
enum kld_infer_move {
    KLD_MOVE_RECEIVE, /* the binary tail, as it comes */
    KLD_MOVE_FLUSH,   /* the last of it is on its way */
    KLD_MOVE_GATHER,  /* shared memory to the buffer */
    KLD_MOVE_SCATTER, /* the buffer to shared memory */
    KLD_MOVE_SEND,    /* the buffer to the client */
};

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
    struct kld_infer *next_spare;  /* while it is one */
    struct kld_exchange *exchange; /* NULL: nobody waits any more */
    struct kld_caller *caller;     /* who asks, also when he has left */
    struct kld_trace trace;        /* for the log */
    bool counted, placed;          /* among the caller's requests; among all (gateway.h: held) */
    struct kld_link_call call;
    bool in_pool, in_worker, in_response;
    bool feeding;                 /* kld_body_feed() is at work */
    struct kld_deadline deadline; /* while a pool (pool.h) has a job of it that it waits for */

    /* Waiting for a place (begin.c), then for memory (layout.c). */
    struct kld_waiter waiter;
    void (*retry)(struct kld_infer *infer);

    /* Since when its time runs (kld_infer_late_ns()); uv_hrtime(), 0: not yet. */
    uint64_t memory_ns;   /* it first waited for memory */
    uint64_t body_end_ns; /* all of its body was here */
    uint64_t late_ns;     /* until when it was to have its result; UINT64_MAX: no matter */
    uint64_t gather_ns, submitted_ns; /* its inputs were gathered from then until then */
    uint64_t computed_ns;             /* its worker, or the last of them, had answered */

    /* Receiving; loop thread. */
    struct kld_inflate *inflate; /* NULL: not compressed */
    uint64_t body_bytes;         /* decompressed so far */
    bool json_known;             /* json_bytes is known before the end of the body */
    bool json_ends_body;         /* no Inference-Header-Content-Length: it is all JSON */
    uint64_t json_bytes, json_have, json_capacity;
    char *json;           /* json_capacity bytes, in staging or the loop's; NULL: none yet */
    uint64_t json_offset; /* in staging, if it is there */
    uint64_t json_wanted; /* while it waits for staging */
    bool parsed, body_done;
    bool succeeded; /* and was counted so */
    uint64_t tail_have;
    uint32_t tail_input; /* the input that takes the next byte of the tail */

    uint64_t held_bytes, held_buffer_bytes; /* of staging and device, as counted for the caller */

    /* From the parser on. */
    struct kld_oip_request request;
    bool has_tensors;                      /* staging from tensors_offset on is ours */
    uint64_t tensors_offset;               /* all tensors and the reply's JSON, in one piece */
    uint64_t tensors_bytes, buffer_bytes;  /* as laid out */
    uint64_t place[KLD_INFER_TENSORS_MAX]; /* in staging or the buffer; inputs, then outputs */
    struct kld_pool_buffer *buffer_of[KLD_INFER_TENSORS_MAX]; /* NULL: staging */
    struct kld_shm_object *region[KLD_INFER_TENSORS_MAX];     /* held; NULL: not shared memory */
    struct kld_pool_buffer *held[KLD_INFER_TENSORS_MAX];      /* stored tensors, CUDA memory */
    bool bulk, uses_buffers;
    bool in_buffer[KLD_INFER_TENSORS_MAX]; /* of a bulk request: in `buffer` */
    struct kld_pool_buffer *buffer;
    enum kld_infer_move move;
    bool move_begun;     /* with move_index */
    bool starved;        /* the exchange is paused until a piece has travelled */
    uint32_t move_index; /* the tensor that moves, ... */
    uint64_t move_done;  /* ... so much of it, ... */
    uint64_t move_bytes; /* ... and so much of it on the thread pool */
    void *move_memory;   /* where */
    uint32_t send_part;  /* of the reply: 0 the JSON, then the outputs */
    struct kld_oip_text reply;
    enum kld_coding coding; /* that the caller takes for JSON */
    bool has_packed;        /* room in staging for the reply, compressed: from packed_offset on, */
    uint64_t packed_offset; /* ... packed_bytes long; 0: it is sent as it is */
    size_t packed_bytes;

    /* The pool. */
    uv_work_t work;
    enum kld_infer_step step;
    struct kld_error error; /* what a step ended with */
    struct kld_result result;
    enum kld_status outcome; /* what is counted in the end */

    /* Last, because most requests never use them, and to make zeros of them would cost as much as
     * of all before: KLD_INFER_ZEROED_BYTES are zeroed. */
    struct kld_pieces pieces; /* of a bulk request */
    struct kld_pool_job job;  /* in place of the call where a tensor is in a buffer */
};
#define KLD_INFER_ZEROED_BYTES offsetof(struct kld_infer, pieces.piece)

/* What each loop has for small requests from its start: malloc() keeps no struct as large for a
 * thread alone, and those that are kept among what else was allocated keep the heap from shrinking.
 * Who finds none left allocates. The loop's thread, but for `json`: whoever has the request that
 * json_of names. */
#define KLD_INFER_SPARES 64
struct kld_infer_spares {
    struct kld_infer *first;   /* those that are free, last used first */
    struct kld_infer *json_of; /* whose JSON lies below; NULL: nobody's */
    char json[KLD_INFER_INLINE_BYTES_MAX];
    struct kld_infer infer[KLD_INFER_SPARES];
};
enum kld_status kld_infer_spares_open(struct kld_gateway *gateway, struct kld_error *err);
void kld_infer_free(struct kld_infer *infer);

/* The calls of struct kld_http_handler for the infer route. */
void kld_infer_begin(struct kld_exchange *exchange);
size_t kld_infer_feed(struct kld_exchange *exchange, const char *data, size_t size);
void kld_infer_finish(struct kld_exchange *exchange);
void kld_infer_refuse(struct kld_exchange *exchange, const struct kld_error *error);
void kld_infer_end(struct kld_exchange *exchange);

/* Between body.c and infer.c. */
enum kld_status kld_body_begin(struct kld_infer *infer, struct kld_error *err);
size_t kld_body_feed(struct kld_infer *infer, const char *data, size_t size);
/* Behind the parser, before there is memory for anything: may the body be as long as its JSON says,
 * and is it, as far as that is known? */
enum kld_status kld_body_check(const struct kld_infer *infer, struct kld_error *err);
/* After the last byte: did everything come? */
enum kld_status kld_body_finish(struct kld_infer *infer, struct kld_error *err);
void kld_body_done(struct kld_infer *infer); /* frees the decompressor */
/* Nobody looks at the text again: where it lies in the loop's own memory that is the next one's. */
void kld_body_json_read(struct kld_infer *infer);

/* infer.c, for the others. */
static inline uint32_t kld_infer_tensors(const struct kld_infer *infer) {
    return infer->request.input_count + infer->request.output_count;
}
static inline struct kld_oip_tensor *kld_infer_tensor(struct kld_infer *infer, uint32_t index) {
    return index < infer->request.input_count
               ? &infer->request.input[index]
               : &infer->request.output[index - infer->request.input_count];
}
/* Of a tensor in staging. */
void *kld_infer_bytes(const struct kld_infer *infer, uint32_t index);
/* The JSON is complete. The exchange is paused if this takes long. */
void kld_infer_parse(struct kld_infer *infer);
void kld_infer_fail(struct kld_infer *infer, const struct kld_error *error);
/* Pauses the exchange and goes on in a later turn of the loop. */
void kld_infer_yield(struct kld_infer *infer);
/* Runs a step, on the thread pool if it is large. */
void kld_infer_step(struct kld_infer *infer, enum kld_infer_step step, bool large);
void kld_infer_give_place(struct kld_infer *infer); /* among those in flight (begin.c) */
void kld_infer_let_go(struct kld_infer *infer);     /* frees what nobody holds any more */
void kld_infer_count(struct kld_infer *infer, enum kld_status status);
/* At the exchange's end: the last byte was sent, or its client is gone. */
void kld_infer_count_end(const struct kld_exchange *exchange);
/* uv_hrtime() at which it is too late for what it waits for: its timeout after the end of its body,
 * whatever it waited for before or waits for again. Until then memory has as long, from when it
 * first waited for some. A piece of its body or reply has its own, since one that travels is
 * progress, and how many there are is the client's to say. UINT64_MAX: never. */
uint64_t kld_infer_late_ns(struct kld_infer *infer, enum kld_late what);
/* It waits for a pool from now on: until kld_infer_arrived(), or its deadline. */
void kld_infer_await(struct kld_infer *infer, enum kld_late what);
void kld_infer_arrived(struct kld_infer *infer);
void kld_infer_laid_out(struct kld_infer *infer);  /* by layout.c: go on */
void kld_infer_gathered(struct kld_infer *infer);  /* by bulk.c: every input is in place */
void kld_infer_scattered(struct kld_infer *infer); /* by bulk.c: so is every output */

/* layout.c. A range of staging for this request, counted for its caller until the request's memory
 * is freed; json: of its JSON. KLD_BUSY: none free now, and kld_infer_wait() or the end of the
 * request must follow, for its turn is in the queue. Loop thread. */
enum kld_status kld_infer_alloc(struct kld_infer *infer, uint64_t bytes, bool json,
                                uint64_t *ret_offset, struct kld_error *err);
/* The same for what is done without if there is none: it does not queue. A pool's thread too. */
enum kld_status kld_infer_alloc_now(struct kld_infer *infer, uint64_t bytes, uint64_t *ret_offset,
                                    struct kld_error *err);
/* Gives such a range back, before the rest of the request's memory is. Loop thread. */
void kld_infer_give(struct kld_infer *infer, uint64_t offset, uint64_t bytes);
/* Pauses the exchange; retry() is called now and then until kld_waiter_remove(), or the request
 * fails with KLD_BUSY at its deadline. */
void kld_infer_wait(struct kld_infer *infer, void (*retry)(struct kld_infer *infer));
uint64_t kld_infer_piece_bytes(const struct kld_gateway *gateway);
/* Finds memory for every tensor, then kld_infer_laid_out(), at once or later; or fails. */
void kld_infer_lay_out(struct kld_infer *infer);

/* bulk.c. */
void kld_bulk_begin(struct kld_infer *infer); /* the buffer is there */
/* Returns how many bytes of the tail it took for the input; the exchange is paused if fewer. */
size_t kld_bulk_receive(struct kld_infer *infer, uint32_t index, uint64_t inside, const char *data,
                        size_t size);
void kld_bulk_gather(struct kld_infer *infer);
void kld_bulk_scatter(struct kld_infer *infer);
void kld_bulk_region_moved(struct kld_infer *infer); /* a step with shared memory has ended */
void kld_bulk_give_up(struct kld_infer *infer); /* the rest of the reply does not come in time */
struct MHD_Response *kld_bulk_response(struct kld_infer *infer, uint64_t bytes,
                                       void (*sent)(void *user));

/* reply.c. */
void kld_infer_reply(struct kld_infer *infer);

#endif
