/* upload.c - receives one tensor to keep on the device (upload.h). Holds a few pieces of staging
 * and a buffer until the list of tensors takes it over. Loop thread. */
#include "server/gateway/upload.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/gateway/deadline.h"
#include "server/gateway/infer.h"
#include "server/gateway/pieces.h"
#include "server/gateway/place.h"
#include "server/gateway/staging.h"
#include "server/gateway/tensors.h"
#include "server/gateway/trace.h"
#include "server/gateway/upload_query.h"
#include "server/gateway/wait.h"

struct upload {
    struct kld_gateway *gateway;
    struct kld_exchange *exchange; /* NULL: the client has gone */
    struct kld_caller *caller;
    struct kld_trace trace;
    struct kld_stored *stored; /* its place in the list; NULL: none any more */
    struct kld_pool_job job;
    struct kld_pool_buffer *buffer;
    struct kld_pieces pieces;
    struct kld_deadline deadline; /* while it waits for the pool */
    struct kld_waiter waiter;     /* for its place, then for staging */
    char name[KLD_OIP_NAME_MAX];
    uint64_t body_end_ns;      /* uv_hrtime(); 0: not all of its body is here */
    uint64_t have, held_bytes; /* received; of staging, as counted for the caller */
    bool counted, placed, staged, opening, starved, finished;
};

/* ---- What is asked for
 * -------------------------------------------------------------------------*/

static const char *const known[] = {"datatype", "shape", "lifetime_ms", "device"};
#define KNOWN (sizeof known / sizeof known[0])

struct arguments {
    const char *value[KNOWN], *unknown, *twice;
};

static enum MHD_Result take_argument(void *user, enum MHD_ValueKind kind, const char *name,
                                     const char *value) {
    struct arguments *arguments = user;
    size_t i = 0;
    while (i < KNOWN && strcmp(known[i], name) != 0)
        i++;
    if (i == KNOWN)
        arguments->unknown = name;
    else if (arguments->value[i])
        arguments->twice = name;
    else
        arguments->value[i] = value ? value : ""; /* behind no '=' */
    return MHD_YES;
}

static enum kld_status read_arguments(const struct kld_exchange *exchange,
                                      struct kld_stored *stored, struct kld_pool **ret_pool,
                                      struct kld_error *err) {
    struct kld_gateway *gateway = exchange->gateway;
    struct arguments arguments = {.unknown = NULL};
    struct kld_upload_tensor tensor;
    MHD_get_connection_values(exchange->connection, MHD_GET_ARGUMENT_KIND, take_argument,
                              &arguments);
    if (arguments.unknown)
        return kld_error_set(
            err, KLD_INVALID,
            "unknown argument '%.40s'; known: datatype, shape, lifetime_ms, device",
            arguments.unknown);
    if (arguments.twice)
        return kld_error_set(err, KLD_INVALID, "the argument '%.40s' is there twice",
                             arguments.twice);
    const struct kld_upload_query query = {.datatype = arguments.value[0],
                                           .shape = arguments.value[1],
                                           .lifetime_ms = arguments.value[2],
                                           .device = arguments.value[3]};
    enum kld_status status = kld_upload_query_read(&query, gateway->config->tensor_lifetime_ms,
                                                   gateway->pools, &tensor, err);
    if (status)
        return status;
    stored->dtype = tensor.dtype;
    stored->rank = tensor.rank;
    memcpy(stored->shape, tensor.shape, sizeof stored->shape);
    stored->bytes = tensor.bytes;
    stored->lifetime_ns = tensor.lifetime_ms * 1000000;
    *ret_pool =
        tensor.device == UINT32_MAX ? kld_pool_choose(gateway) : gateway->pool[tensor.device];
    return KLD_OK;
}

static enum kld_status check_body(const struct kld_exchange *exchange, uint64_t bytes,
                                  struct kld_error *err) {
    const char *coding = kld_exchange_header(exchange, MHD_HTTP_HEADER_CONTENT_ENCODING);
    if (coding && *coding && strcasecmp(coding, "identity") != 0)
        return kld_error_set(err, KLD_MEDIA,
                             "the bytes of a tensor are taken as they are; "
                             "Content-Encoding is not supported here");
    if (exchange->has_length || !exchange->has_body)
        if (exchange->length_bytes != bytes)
            return kld_error_set(err, KLD_INVALID,
                                 "the body has %" PRIu64 " bytes; this shape and datatype need "
                                 "%" PRIu64,
                                 exchange->length_bytes, bytes);
    uint64_t most = exchange->gateway->config->body_bytes_max;
    if (bytes > most) /* in chunks: what announces it has been refused (routes.c) */
        return kld_error_set(err, KLD_TOO_LARGE,
                             "this shape and datatype need %" PRIu64 " bytes; a body has at most "
                             "%" PRIu64 " (body_bytes_max)",
                             bytes, most);
    return KLD_OK;
}

/* ---- Its life
 * ----------------------------------------------------------------------------------*/

static void let_go(struct upload *upload) {
    if (upload->opening || upload->waiter.waits || kld_pieces_busy(&upload->pieces) ||
        (upload->exchange && !upload->exchange->replied))
        return;
    if (upload->stored)
        kld_tensors_give_up(upload->gateway->tensors, upload->stored);
    upload->stored = NULL;
    kld_pool_drop(upload->buffer);
    upload->buffer = NULL;
    if (upload->staged)
        kld_staging_free(upload->gateway->staging, upload->pieces.staging_offset);
    upload->staged = false;
    kld_auth_give_bytes(upload->caller, upload->held_bytes);
    upload->held_bytes = 0;
    if (upload->counted)
        kld_auth_give_request(upload->caller);
    if (upload->placed)
        kld_place_give(upload->gateway);
    upload->counted = upload->placed = false; /* what is left of a refused body takes no place */
    if (upload->exchange) {
        upload->exchange->held_bytes = upload->exchange->held_pool_bytes = 0;
        return;
    }
    kld_deadline_clear(upload->gateway, &upload->deadline);
    free(upload);
}

/* Once for each, when its outcome is known. */
static void count_end(const struct upload *upload, enum kld_status status) {
    kld_stats_request(upload->gateway->stats, KLD_FRONT_HTTP, KLD_ASKED_PUT, status);
    kld_tensor_log(upload->exchange, &upload->trace, "put_tensor", status, upload->stored,
                   upload->body_end_ns);
}

static void fail(struct upload *upload, const struct kld_error *error) {
    if (upload->opening)
        kld_pool_unwant(&upload->job);
    if (upload->exchange && !upload->exchange->replied) {
        count_end(upload, error->status);
        kld_exchange_reply_error(upload->exchange, error);
    }
    let_go(upload);
}

static void waited_too_long(struct kld_deadline *deadline) {
    struct kld_error error;
    struct upload *upload =
        (struct upload *)(void *)((char *)deadline - offsetof(struct upload, deadline));
    if (upload->opening && atomic_load(&upload->job.starved))
        kld_error_set(&error, KLD_NO_MEMORY,
                      "the device's memory pool was in use until the deadline; try again");
    else
        kld_error_set(&error, KLD_DEADLINE,
                      "the deadline passed before the device took the tensor");
    if (upload->exchange && !upload->exchange->replied)
        kld_stats_add(upload->gateway->stats, KLD_STAT_requests_detached_total, 1);
    fail(upload, &error);
}

/* For memory from when it began, for what is left to travel from the end of its body, for a piece
 * before from now: as kld_infer_late_ns() has it. */
static uint64_t late_ns(const struct upload *upload) {
    uint64_t ms = upload->gateway->config->http_deadline_ms, ns, at;
    uint64_t from = upload->body_end_ns ? upload->body_end_ns
                    : upload->buffer    ? uv_hrtime()
                                        : upload->exchange->started_ns;
    return !ms || __builtin_mul_overflow(ms, 1000000u, &ns) || __builtin_add_overflow(from, ns, &at)
               ? UINT64_MAX
               : at;
}

static void wait_for_pool(struct upload *upload) {
    kld_deadline_set(upload->gateway, &upload->deadline, late_ns(upload), waited_too_long);
}

static void store(struct upload *upload) {
    char buffer[64];
    struct kld_oip_text text = {.data = buffer, .capacity = sizeof buffer};
    kld_oip_append(&text, "{\"byte_size\":%" PRIu64 "}", upload->stored->bytes);
    count_end(upload, KLD_OK);
    kld_tensors_publish(upload->gateway->tensors, upload->stored, upload->buffer);
    upload->stored = NULL;
    upload->buffer = NULL;
    kld_exchange_reply_text(upload->exchange, 200, "application/json", buffer, text.length);
    let_go(upload);
}

static void moved(struct kld_pieces *pieces) {
    struct upload *upload =
        (struct upload *)(void *)((char *)pieces - offsetof(struct upload, pieces));
    kld_deadline_clear(upload->gateway, &upload->deadline);
    if (!upload->exchange || upload->exchange->replied) {
        let_go(upload);
    } else if (pieces->status) {
        fail(upload, &pieces->error);
    } else if (upload->finished) {
        if (kld_pieces_busy(pieces))
            wait_for_pool(upload);
        else
            store(upload);
    } else if (upload->starved) {
        upload->starved = false;
        kld_exchange_continue(upload->exchange);
    }
}

static void opened(struct kld_pool_job *job) {
    struct upload *upload = (struct upload *)(void *)((char *)job - offsetof(struct upload, job));
    kld_deadline_clear(upload->gateway, &upload->deadline);
    upload->opening = false;
    upload->buffer = job->buffer;
    upload->pieces.buffer = job->buffer;
    if (!upload->exchange || upload->exchange->replied)
        let_go(upload);
    else if (job->status)
        fail(upload, &job->error);
    else if (upload->starved) {
        upload->starved = false;
        kld_exchange_continue(upload->exchange);
    }
}

static void open_buffer(struct upload *upload) {
    memset(&upload->job, 0, sizeof upload->job);
    upload->job.kind = KLD_POOL_OPEN;
    upload->job.bytes = upload->stored->bytes;
    upload->job.owner = kld_auth_has_several(upload->gateway->auth) ? upload->caller : NULL;
    upload->job.done = opened;
    upload->opening = true;
    wait_for_pool(upload);
    kld_pool_submit(upload->pieces.pool, &upload->gateway->mail, &upload->job);
}

/* Its body is not read before it has some. */
static enum kld_status take_staging(struct upload *upload, struct kld_error *err) {
    struct kld_gateway *gateway = upload->gateway;
    enum kld_status status =
        kld_staging_take(gateway->staging, &upload->waiter.turn, upload->held_bytes, false,
                         &upload->pieces.staging_offset, err);
    if (status == KLD_BUSY) {
        kld_exchange_pause(upload->exchange);
        kld_waiter_add(gateway, &upload->waiter, late_ns(upload));
        return KLD_OK;
    }
    bool waited = upload->waiter.waits;
    kld_waiter_remove(gateway, &upload->waiter);
    if (status)
        return status;
    upload->staged = true;
    upload->exchange->held_bytes = upload->held_bytes;
    upload->exchange->held_pool_bytes = upload->stored->bytes;
    upload->exchange->held_pool = upload->pieces.pool;
    open_buffer(upload);
    if (waited)
        kld_exchange_continue(upload->exchange);
    return KLD_OK;
}

static struct upload *upload_of(struct kld_waiter *waiter) {
    return (struct upload *)(void *)((char *)waiter - offsetof(struct upload, waiter));
}

static void ask_again(struct kld_waiter *waiter) {
    struct kld_error error;
    if (take_staging(upload_of(waiter), &error))
        fail(upload_of(waiter), &error);
}

static void no_staging(struct kld_waiter *waiter) {
    struct kld_error error;
    kld_stats_rejected(upload_of(waiter)->gateway->stats, KLD_REJECT_http_staging_full);
    kld_error_set(&error, KLD_BUSY, "the staging memory was in use until the deadline; try again");
    fail(upload_of(waiter), &error);
}

/* Its pieces hold no more than it has: else a few small ones would have all staging. */
static uint64_t piece_bytes(const struct kld_gateway *gateway, uint64_t bytes) {
    uint64_t most = kld_infer_piece_bytes(gateway), part = bytes / KLD_PIECES + 1;
    part = (part + KLD_STAGING_ALIGN - 1) & ~(uint64_t)(KLD_STAGING_ALIGN - 1);
    return part < most ? part : most;
}

/* With its place. */
static enum kld_status start(struct upload *upload, struct kld_error *err) {
    struct kld_exchange *exchange = upload->exchange;
    struct kld_gateway *gateway = upload->gateway;
    struct kld_stored wanted = {.owner = upload->caller};
    struct kld_pieces *pieces = &upload->pieces;
    enum kld_status status;
    strcpy(wanted.name, upload->name);
    if ((status = kld_auth_take_request(gateway->auth, upload->caller, err)))
        return status;
    upload->counted = true;
    if ((status = read_arguments(exchange, &wanted, &pieces->pool, err)) ||
        (status = check_body(exchange, wanted.bytes, err)) ||
        (status = kld_tensors_reserve(gateway->tensors, &wanted, &upload->stored, err)))
        return status;
    pieces->mail = &gateway->mail;
    pieces->staging = gateway->staging;
    pieces->piece_bytes = piece_bytes(gateway, wanted.bytes);
    pieces->moved = moved;
    kld_pieces_begin(pieces);
    uint64_t bytes = KLD_PIECES * pieces->piece_bytes;
    if ((status = kld_auth_take_bytes(gateway->auth, upload->caller, bytes, err)))
        return status;
    upload->held_bytes = bytes;
    upload->waiter.retry = ask_again;
    upload->waiter.late = no_staging;
    return take_staging(upload, err);
}

static void ask_for_place(struct kld_waiter *waiter) {
    struct upload *upload = upload_of(waiter);
    struct kld_error error;
    enum kld_status status = kld_place_ask(upload->gateway, waiter, &upload->placed, &error);
    if (!status && !upload->placed)
        return; /* it waits on */
    if (status || start(upload, &error))
        fail(upload, &error);
    else if (!waiter->waits)
        kld_exchange_continue(upload->exchange);
}

static void no_place(struct kld_waiter *waiter) {
    struct kld_error error;
    kld_place_late(upload_of(waiter)->gateway, waiter, &error);
    fail(upload_of(waiter), &error);
}

static enum kld_status begin(struct upload *upload, const char *name, struct kld_error *err) {
    enum kld_status status = kld_oip_check_name(name, "tensor", err);
    if (status)
        return status;
    strcpy(upload->name, name);
    upload->waiter.retry = ask_for_place;
    upload->waiter.late = no_place;
    status = kld_place_begin(upload->exchange, &upload->waiter, &upload->placed, err);
    return status || !upload->placed ? status : start(upload, err);
}

void kld_upload_begin(struct kld_exchange *exchange, const char *name) {
    struct upload *upload = calloc(1, sizeof *upload);
    struct kld_error error;
    if (!upload) {
        kld_error_set(&error, KLD_NO_MEMORY, "out of memory");
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    upload->gateway = exchange->gateway;
    upload->exchange = exchange;
    upload->caller = exchange->caller;
    kld_trace_take(exchange, &upload->trace);
    atomic_fetch_add(&upload->gateway->common->infers, 1);
    kld_stats_add(upload->gateway->stats, KLD_STAT_http_requests_in_flight, 1);
    exchange->state = upload;
    if (begin(upload, name, &error))
        fail(upload, &error);
}

size_t kld_upload_feed(struct kld_exchange *exchange, const char *data, size_t size) {
    struct upload *upload = exchange->state;
    uint64_t room = 0;
    size_t done = 0;
    while (done < size && !exchange->paused && !exchange->replied) {
        if (size - done > upload->stored->bytes - upload->have) {
            struct kld_error error;
            kld_error_set(&error, KLD_INVALID,
                          "the body goes on behind the %" PRIu64
                          " bytes that this shape and datatype need",
                          upload->stored->bytes);
            fail(upload, &error);
            return size;
        }
        void *to = upload->buffer ? kld_pieces_room(&upload->pieces, &room) : NULL;
        if (!to || room == 0) {
            upload->starved = true;
            kld_exchange_pause(exchange);
            if (!upload->opening)
                wait_for_pool(upload);
            break;
        }
        size_t taken = size - done < room ? size - done : (size_t)room;
        memcpy(to, data + done, taken);
        kld_pieces_put(&upload->pieces, taken);
        done += taken;
        upload->have += taken;
    }
    return done;
}

void kld_upload_finish(struct kld_exchange *exchange) {
    struct upload *upload = exchange->state;
    struct kld_error error;
    if (upload->have < upload->stored->bytes) {
        kld_error_set(&error, KLD_INVALID,
                      "the body has %" PRIu64 " bytes; this shape and datatype need %" PRIu64,
                      upload->have, upload->stored->bytes);
        fail(upload, &error);
        return;
    }
    upload->finished = true;
    upload->body_end_ns = uv_hrtime();
    kld_pieces_flush(&upload->pieces);
    if (kld_pieces_busy(&upload->pieces))
        wait_for_pool(upload);
    else
        store(upload);
}

void kld_upload_refuse(struct kld_exchange *exchange, const struct kld_error *error) {
    if (exchange->state)
        fail(exchange->state, error);
}

void kld_upload_end(struct kld_exchange *exchange) {
    struct upload *upload = exchange->state;
    if (!upload)
        return;
    if (!exchange->replied) { /* first: who sees none in flight sees all of them counted */
        count_end(upload, exchange->misframed ? KLD_INVALID : KLD_CANCELLED);
        kld_stats_add(upload->gateway->stats, KLD_STAT_requests_detached_total,
                      !exchange->misframed && !exchange->too_slow);
    }
    atomic_fetch_sub(&upload->gateway->common->infers, 1);
    kld_stats_add(upload->gateway->stats, KLD_STAT_http_requests_in_flight, -1);
    upload->exchange = NULL;
    if (upload->opening)
        kld_pool_unwant(&upload->job);
    kld_place_stop_waiting(upload->gateway, &upload->waiter);
    let_go(upload);
}
