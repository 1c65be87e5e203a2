/* infer.c - the steps of an infer request after its bytes have come: parse, lay out, gather, hand
 * to the worker, write out, send (infer.h).
 * Does not begin (begin.c), receive (body.c) or compute. Loop thread, but run_step(), which runs on
 * the thread pool where a step is large. */
#include "server/gateway/infer.h"

#include <inttypes.h>
#include <string.h>

#include "server/gateway/place.h"
#include "server/gateway/shm.h"
#include "server/gateway/staging.h"
#include "server/log.h"

#define TOO_LATE "the deadline passed before the result was there"

static void free_memory(struct kld_infer *infer) {
    struct kld_staging *staging = infer->gateway->staging;
    kld_body_json_read(infer);
    if (infer->json)
        kld_staging_free(staging, infer->json_offset);
    if (infer->has_tensors)
        kld_staging_free(staging, infer->tensors_offset);
    for (int i = 0; i < KLD_INFER_TENSORS_MAX; i++)
        kld_shm_release(infer->region[i], &infer->gateway->loop);
    for (int i = 0; i < KLD_INFER_TENSORS_MAX; i++)
        kld_pool_drop(infer->held[i]);
    memset(infer->held, 0, sizeof infer->held);
    kld_pool_drop(infer->buffer);
    infer->buffer = NULL;
    memset(infer->region, 0, sizeof infer->region);
    if (infer->has_packed)
        kld_staging_free(staging, infer->packed_offset);
    infer->has_packed = false;
    kld_auth_give_bytes(infer->caller, infer->held_bytes);
    kld_auth_give_buffer(infer->caller, infer->held_buffer_bytes);
    infer->held_bytes = infer->held_buffer_bytes = 0;
    if (infer->exchange) /* what is left of a refused body may come as slowly as any */
        infer->exchange->held_bytes = infer->exchange->held_pool_bytes = 0;
    infer->json = NULL;
    infer->json_capacity = 0;
    infer->has_tensors = false;
}

/* After each step: frees what nobody holds any more. */
void kld_infer_let_go(struct kld_infer *infer) {
    if (infer->in_pool || infer->in_worker || infer->in_response || infer->waiter.waits ||
        kld_pieces_busy(&infer->pieces))
        return;
    if (infer->exchange && !infer->exchange->replied)
        return;
    free_memory(infer);
    kld_infer_give_place(infer);
    if (!infer->feeding) /* else kld_infer_feed() does */
        kld_body_done(infer);
    if (infer->exchange)
        return;
    kld_infer_arrived(infer);
    kld_infer_free(infer);
}

void kld_infer_fail(struct kld_infer *infer, const struct kld_error *error) {
    struct kld_exchange *exchange = infer->exchange;
    if (exchange && !exchange->replied) {
        kld_infer_count(infer, error->status);
        kld_exchange_reply_error(exchange, error);
    }
    kld_infer_let_go(infer);
}

size_t kld_infer_feed(struct kld_exchange *exchange, const char *data, size_t size) {
    struct kld_infer *infer = exchange->state;
    infer->feeding = true;
    size_t taken = kld_body_feed(infer, data, size);
    infer->feeding = false;
    if (exchange->replied) /* the rest of a refused body is dropped */
        kld_body_done(infer);
    return taken;
}

void kld_infer_refuse(struct kld_exchange *exchange, const struct kld_error *error) {
    if (exchange->state) /* else it was too late, and is counted */
        kld_infer_fail(exchange->state, error);
}

void kld_infer_end(struct kld_exchange *exchange) {
    struct kld_gateway *gateway = exchange->gateway;
    struct kld_infer *infer = exchange->state;
    bool left = infer && !exchange->replied;
    if (left) /* which also says what the time is counted under */
        kld_infer_count(infer, exchange->misframed ? KLD_INVALID : KLD_CANCELLED);
    kld_infer_count_end(exchange); /* first: who sees none in flight sees all of them counted */
    if (left && !exchange->misframed && !exchange->too_slow)
        kld_stats_add(gateway->stats, KLD_STAT_requests_detached_total, 1);
    kld_stats_add(gateway->stats, KLD_STAT_http_requests_in_flight, -1);
    atomic_fetch_sub(&gateway->common->infers, 1);
    if (!infer) /* it was too late; the worker still has it */
        return;
    infer->exchange = NULL;
    if (infer->in_worker && infer->uses_buffers)
        kld_pool_unwant(&infer->job);
    else if (infer->in_worker && kld_links_withdraw(&infer->call))
        infer->in_worker = false; /* no worker has seen it */
    kld_infer_arrived(infer);
    kld_place_stop_waiting(gateway, &infer->waiter);
    kld_infer_let_go(infer);
}

/* ---- Steps that may be large ------------------------------------------------------------------*/

void *kld_infer_bytes(const struct kld_infer *infer, uint32_t index) {
    return kld_staging_at(infer->gateway->staging, infer->place[index]);
}

static enum kld_status gather(struct kld_infer *infer) {
    for (uint32_t i = 0; i < infer->request.input_count; i++) {
        const struct kld_oip_tensor *input = &infer->request.input[i];
        enum kld_status status = KLD_OK;
        if (infer->in_buffer[i])
            continue; /* bulk.c */
        if (input->where == KLD_OIP_JSON)
            status = kld_oip_decode(input, kld_infer_bytes(infer, i), &infer->error);
        else if (infer->region[i])
            status = kld_shm_read(infer->region[i], input->region_offset_bytes,
                                  kld_infer_bytes(infer, i), input->bytes, &infer->error);
        if (status)
            return status;
    }
    return KLD_OK;
}

/* In staging, where it counts; where there is no room the reply goes out as it is. */
static void pack(struct kld_infer *infer) {
    struct kld_error ignored;
    if (infer->coding == KLD_CODING_NONE ||
        kld_infer_alloc_now(infer, infer->reply.length, &infer->packed_offset, &ignored))
        return;
    infer->has_packed = true;
    infer->packed_bytes =
        kld_compress(infer->coding, infer->reply.data, infer->reply.length,
                     kld_staging_at(infer->gateway->staging, infer->packed_offset));
}

static enum kld_status write_out(struct kld_infer *infer) {
    const void *values[KLD_OIP_OUTPUTS_MAX];
    for (uint32_t i = 0; i < infer->request.output_count; i++) {
        const struct kld_oip_tensor *output = &infer->request.output[i];
        uint32_t index = infer->request.input_count + i;
        enum kld_status status = KLD_OK;
        values[i] = infer->buffer_of[index] ? NULL : kld_infer_bytes(infer, index);
        if (infer->region[index] && values[i])
            status = kld_shm_write(infer->region[index], output->region_offset_bytes, values[i],
                                   output->bytes, &infer->error);
        if (status)
            return status;
    }
    kld_oip_reply(&infer->reply, &infer->request, values);
    if (infer->reply.overflow)
        return kld_error_set(&infer->error, KLD_TOO_LARGE,
                             "the JSON of the reply has more than %zu bytes (json_bytes_max); ask "
                             "for outputs with binary_data",
                             infer->reply.capacity);
    bool binary = false;
    for (uint32_t i = 0; i < infer->request.output_count; i++)
        binary = binary || infer->request.output[i].where == KLD_OIP_BINARY;
    if (!binary && infer->reply.length >= KLD_COMPRESS_BYTES_MIN)
        pack(infer);
    return KLD_OK;
}

static void run_step(struct kld_infer *infer) {
    infer->error.status = KLD_OK;
    switch (infer->step) {
    case KLD_INFER_PARSE:
        kld_oip_parse(infer->json ? infer->json : "", infer->json_have,
                      infer->in_pool ? NULL : infer->gateway->memo, &infer->request, &infer->error);
        break;
    case KLD_INFER_GATHER: gather(infer); break;
    case KLD_INFER_WRITE_OUT: write_out(infer); break;
    case KLD_INFER_YIELD: break;
    case KLD_INFER_READ_REGION:
        kld_shm_read(infer->region[infer->move_index],
                     kld_infer_tensor(infer, infer->move_index)->region_offset_bytes +
                         infer->move_done,
                     infer->move_memory, infer->move_bytes, &infer->error);
        break;
    case KLD_INFER_WRITE_REGION:
        kld_shm_write(infer->region[infer->move_index],
                      kld_infer_tensor(infer, infer->move_index)->region_offset_bytes +
                          infer->move_done,
                      infer->move_memory, infer->move_bytes, &infer->error);
        break;
    }
}

static void step_ended(struct kld_infer *infer);

static void pool_work(uv_work_t *work) { run_step(work->data); }

static void pool_ended(uv_work_t *work, int status) {
    struct kld_infer *infer = work->data;
    infer->in_pool = false;
    step_ended(infer);
}

void kld_infer_step(struct kld_infer *infer, enum kld_infer_step step, bool large) {
    infer->step = step;
    infer->work.data = infer;
    infer->in_pool = large; /* before the pool begins */
    if (large && uv_queue_work(&infer->gateway->loop, &infer->work, pool_work, pool_ended) == 0)
        return;
    infer->in_pool = false;
    run_step(infer);
    step_ended(infer);
}

static bool json_is_large(const struct kld_infer *infer) {
    return infer->json_have > KLD_INFER_INLINE_BYTES_MAX;
}

static bool gather_is_large(const struct kld_infer *infer) {
    for (uint32_t i = 0; i < infer->request.input_count; i++)
        if (infer->region[i])
            return true;
    return json_is_large(infer);
}

static bool write_out_is_large(const struct kld_infer *infer) {
    for (uint32_t i = 0; i < infer->request.output_count; i++)
        if (infer->region[infer->request.input_count + i])
            return true;
    return infer->reply.capacity > KLD_INFER_INLINE_BYTES_MAX;
}

void kld_infer_yield(struct kld_infer *infer) {
    kld_exchange_pause(infer->exchange);
    kld_infer_step(infer, KLD_INFER_YIELD, true);
}

void kld_infer_parse(struct kld_infer *infer) {
    bool large = json_is_large(infer);
    if (large)
        kld_exchange_pause(infer->exchange);
    kld_infer_step(infer, KLD_INFER_PARSE, large);
}

static void start_gathering(struct kld_infer *infer, uint64_t now) {
    infer->gather_ns = now;
    kld_infer_step(infer, KLD_INFER_GATHER, gather_is_large(infer));
}

void kld_infer_finish(struct kld_exchange *exchange) {
    struct kld_infer *infer = exchange->state;
    struct kld_error error;
    infer->body_done = true;
    infer->body_end_ns = uv_hrtime();
    if (kld_body_finish(infer, &error))
        kld_infer_fail(infer, &error);
    else if (!infer->parsed)
        kld_infer_parse(infer);
    else
        start_gathering(infer, infer->body_end_ns);
}

void kld_infer_laid_out(struct kld_infer *infer) {
    infer->parsed = true;
    if (infer->body_done)
        start_gathering(infer, uv_hrtime());
    else
        kld_exchange_continue(infer->exchange);
}

/* ---- The worker -------------------------------------------------------------------------------*/

static struct kld_infer *infer_of(struct kld_link_call *call) {
    return (struct kld_infer *)((char *)call - offsetof(struct kld_infer, call));
}

static struct kld_infer *infer_of_job(struct kld_pool_job *job) {
    return (struct kld_infer *)((char *)job - offsetof(struct kld_infer, job));
}

static void computed(struct kld_infer *infer, enum kld_status status,
                     const struct kld_error *error);

static void call_done(struct kld_link_call *call, enum kld_status status,
                      const struct kld_result *result, const struct kld_error *error) {
    struct kld_infer *infer = infer_of(call);
    if (result)
        infer->result = *result;
    computed(infer, status, error);
}

static void job_done(struct kld_pool_job *job) {
    struct kld_infer *infer = infer_of_job(job);
    kld_infer_arrived(infer);
    infer->result = job->result;
    computed(infer, job->status, &job->error);
}

static void computed(struct kld_infer *infer, enum kld_status status,
                     const struct kld_error *error) {
    struct kld_error failure = {.status = status};
    infer->in_worker = false;
    infer->computed_ns = uv_hrtime();
    if (!infer->exchange) {
        kld_infer_let_go(infer);
    } else if (status) {
        if (error && error->status)
            failure = *error;
        kld_infer_fail(infer, &failure);
    } else if (infer->computed_ns > infer->late_ns) { /* link and pool look now and then */
        kld_error_set(&failure, KLD_DEADLINE, TOO_LATE);
        kld_infer_fail(infer, &failure);
    } else {
        kld_infer_step(infer, KLD_INFER_WRITE_OUT, write_out_is_large(infer));
    }
}

/* The caller is answered; the memory stays until the worker has let go of it. */
static void too_late(struct kld_infer *infer) {
    struct kld_error error;
    if (!infer->exchange || infer->exchange->replied)
        return;
    kld_stats_add(infer->gateway->stats, KLD_STAT_requests_detached_total, 1);
    if (infer->in_worker && infer->uses_buffers && atomic_load(&infer->job.starved))
        kld_error_set(&error, KLD_NO_MEMORY,
                      "the device's memory pool was in use until the deadline; try again");
    else
        kld_error_set(&error, KLD_DEADLINE, TOO_LATE);
    kld_infer_count(infer, error.status);
    struct kld_exchange *exchange = infer->exchange;
    infer->exchange = NULL;
    exchange->state = NULL;
    exchange->held_bytes = exchange->held_pool_bytes = 0;
    if (infer->in_worker && infer->uses_buffers)
        kld_pool_unwant(&infer->job);
    kld_exchange_reply_error(exchange, &error);
}

static void call_late(struct kld_link_call *call) { too_late(infer_of(call)); }

/* http_deadline_ms is what a request gets that names no timeout, and the most that one may name; 0,
 * like what no clock can count, is never. */
static uint64_t timeout_of(const struct kld_infer *infer) {
    uint64_t most, named = infer->request.timeout_ns;
    if (__builtin_mul_overflow(infer->gateway->config->http_deadline_ms, 1000000u, &most))
        most = 0;
    return most && (!named || named > most) ? most : named;
}

uint64_t kld_infer_late_ns(struct kld_infer *infer, enum kld_late what) {
    uint64_t timeout_ns = timeout_of(infer), at;
    if (what == KLD_LATE_MEMORY && !infer->memory_ns)
        infer->memory_ns = uv_hrtime();
    uint64_t from = infer->body_end_ns && !infer->in_response ? infer->body_end_ns
                    : what == KLD_LATE_MEMORY                 ? infer->memory_ns
                                                              : uv_hrtime();
    return !timeout_ns || __builtin_add_overflow(from, timeout_ns, &at) ? UINT64_MAX : at;
}

static void waited_too_long(struct kld_deadline *deadline) {
    struct kld_infer *infer =
        (struct kld_infer *)(void *)((char *)deadline - offsetof(struct kld_infer, deadline));
    if (infer->in_response)
        kld_bulk_give_up(infer);
    else
        too_late(infer);
}

void kld_infer_await(struct kld_infer *infer, enum kld_late what) {
    kld_deadline_set(infer->gateway, &infer->deadline, kld_infer_late_ns(infer, what),
                     waited_too_long);
}

void kld_infer_arrived(struct kld_infer *infer) {
    kld_deadline_clear(infer->gateway, &infer->deadline);
}

/* A frame beside each request, for a line that the worker writes: only where all have one. */
static void pass_trace(const struct kld_infer *infer, struct kld_trace_context *ret_context) {
    if (kld_log_wants(KLD_LOG_DEBUG))
        kld_trace_pass(&infer->trace, ret_context);
}

static void submit_to_pool(struct kld_infer *infer) {
    struct kld_pool_job *job = &infer->job;
    memset(job, 0, sizeof *job);
    job->kind = KLD_POOL_RUN;
    job->request.op = infer->request.op;
    pass_trace(infer, &job->request.trace);
    for (uint32_t i = 0; i < kld_infer_tensors(infer); i++) {
        enum kld_slot slot = kld_infer_tensor(infer, i)->slot;
        job->request.bytes[slot].offset_bytes = infer->place[i];
        job->slot[slot] = infer->buffer_of[i];
    }
    infer->late_ns = job->deadline_ns = kld_infer_late_ns(infer, KLD_LATE_RESULT);
    job->done = job_done;
    infer->in_worker = true;
    kld_infer_await(infer, KLD_LATE_RESULT);
    kld_pool_submit(infer->pieces.pool, &infer->gateway->mail, job);
}

static void submit(struct kld_infer *infer) {
    infer->submitted_ns = uv_hrtime();
    if (infer->uses_buffers) {
        submit_to_pool(infer);
        return;
    }
    struct kld_link_call *call = &infer->call;
    call->request.op = infer->request.op;
    pass_trace(infer, &call->request.trace);
    for (uint32_t i = 0; i < kld_infer_tensors(infer); i++)
        call->request.bytes[kld_infer_tensor(infer, i)->slot].offset_bytes = infer->place[i];
    infer->late_ns = call->deadline_ns = kld_infer_late_ns(infer, KLD_LATE_RESULT);
    call->pinned = infer->request.has_device;
    call->device = (uint32_t)infer->request.device; /* layout.c has looked */
    call->done = call_done;
    call->late = call_late;
    infer->in_worker = true;
    infer->exchange->soon = true;
    kld_links_submit(infer->gateway->links, call);
}

void kld_infer_gathered(struct kld_infer *infer) { submit(infer); }
void kld_infer_scattered(struct kld_infer *infer) { kld_infer_reply(infer); }

/* In its JSON, still to be read. */
static bool has_numbers(const struct kld_infer *infer) {
    for (uint32_t i = 0; i < infer->request.input_count; i++)
        if (infer->request.input[i].where == KLD_OIP_JSON)
            return true;
    return false;
}

static void step_ended(struct kld_infer *infer) {
    if (!infer->exchange) {
        kld_infer_let_go(infer);
        return;
    }
    if (infer->error.status) {
        kld_infer_fail(infer, &infer->error);
        return;
    }
    switch (infer->step) {
    case KLD_INFER_PARSE:
        if (!has_numbers(infer))
            kld_body_json_read(infer);
        kld_infer_lay_out(infer);
        break;
    case KLD_INFER_GATHER:
        kld_body_json_read(infer);
        if (infer->bulk)
            kld_bulk_gather(infer);
        else
            submit(infer);
        break;
    case KLD_INFER_WRITE_OUT:
        if (infer->bulk)
            kld_bulk_scatter(infer);
        else
            kld_infer_reply(infer);
        break;
    case KLD_INFER_READ_REGION:
    case KLD_INFER_WRITE_REGION: kld_bulk_region_moved(infer); break;
    case KLD_INFER_YIELD: kld_exchange_continue(infer->exchange); break;
    }
}
