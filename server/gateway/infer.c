/* infer.c - the steps of an infer request after its bytes have come: parse, lay out, gather, hand
 * to the worker, write out, send (infer.h).
 * Does not receive (body.c) and does not compute. Loop thread, but run_step(), which runs on the
 * thread pool where a step is large. */
#include "server/gateway/infer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/gateway/shm.h"
#include "server/gateway/staging.h"
#include "server/log.h"

static void free_memory(struct kld_infer *infer) {
    struct kld_staging *staging = infer->gateway->staging;
    if (infer->json_capacity)
        kld_staging_free(staging, infer->json_offset);
    if (infer->has_tensors)
        kld_staging_free(staging, infer->tensors_offset);
    for (int i = 0; i < KLD_INFER_TENSORS_MAX; i++)
        kld_shm_release(infer->region[i]);
    memset(infer->region, 0, sizeof infer->region);
    kld_auth_give_bytes(infer->caller, infer->held_bytes);
    infer->held_bytes = 0;
    infer->json_capacity = 0;
    infer->has_tensors = false;
    kld_stats_set(infer->gateway->stats, KLD_STAT_staging_bytes, kld_staging_used_bytes(staging));
}

enum kld_status kld_infer_alloc(struct kld_infer *infer, uint64_t bytes, uint64_t *ret_offset,
                                struct kld_error *err) {
    struct kld_gateway *gateway = infer->gateway;
    enum kld_status status = kld_auth_take_bytes(gateway->auth, infer->caller, bytes, err);
    if (status)
        return status;
    if ((status = kld_staging_alloc(gateway->staging, bytes, ret_offset, err)))
        kld_auth_give_bytes(infer->caller, bytes);
    else
        infer->held_bytes += bytes;
    return status;
}

/* After each step: frees what nobody holds any more. */
static void let_go(struct kld_infer *infer) {
    if (infer->in_pool || infer->in_worker || infer->in_response)
        return;
    if (infer->exchange && !infer->exchange->replied)
        return;
    free_memory(infer);
    if (infer->exchange) /* a refused body may still be inside kld_body_feed() */
        return;
    free(infer->packed);
    if (infer->counted)
        kld_auth_give_request(infer->caller);
    kld_body_done(infer);
    free(infer);
}

static void count(struct kld_infer *infer, enum kld_status status) {
    struct kld_gateway *gateway = infer->gateway;
    struct kld_gateway_counts *counts = &gateway->counts;
    uint64_t ns = uv_hrtime() - infer->exchange->started_ns;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    counts->last_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    kld_stats_request(gateway->stats, KLD_FRONT_HTTP, status);
    if (status) {
        counts->fail++;
        counts->fail_ns += ns;
    } else {
        counts->success++;
        counts->success_ns += ns;
        counts->queue_ns += infer->result.queue_ns;
        counts->copy_ns += infer->result.copy_ns;
        counts->kernel_ns += infer->result.kernel_ns;
    }
    if (kld_log_wants(KLD_LOG_DEBUG))
        kld_log(KLD_LOG_DEBUG, "request", "front=http status=%s ns=%" PRIu64,
                kld_status_name(status), ns);
}

void kld_infer_fail(struct kld_infer *infer, const struct kld_error *error) {
    struct kld_exchange *exchange = infer->exchange;
    if (exchange && !exchange->replied) {
        count(infer, error->status);
        kld_exchange_reply_error(exchange, error);
    }
    let_go(infer);
}

void kld_infer_begin(struct kld_exchange *exchange) {
    struct kld_gateway *gateway = exchange->gateway;
    struct kld_error error = {.status = KLD_OK};
    struct kld_infer *infer = calloc(1, sizeof *infer);
    if (!infer) {
        kld_error_set(&error, KLD_NO_MEMORY, "out of memory");
        kld_exchange_reply_error(exchange, &error);
        return;
    }
    infer->gateway = gateway;
    infer->exchange = exchange;
    infer->caller = exchange->caller;
    infer->coding = kld_exchange_coding(exchange);
    exchange->state = infer;
    kld_stats_set(gateway->stats, KLD_STAT_http_requests_in_flight, ++gateway->infers);
    if (gateway->draining)
        kld_error_set(&error, KLD_UNAVAILABLE, "the server is shutting down; try again");
    else if (gateway->infers > gateway->config->http_requests_max)
        kld_error_set(&error, KLD_BUSY,
                      "%" PRIu64 " HTTP requests are in flight, the most allowed; try again",
                      gateway->config->http_requests_max);
    else if (kld_auth_take_request(gateway->auth, infer->caller, &error) == KLD_OK) {
        infer->counted = true;
        kld_body_begin(infer, &error);
    }
    if (error.status)
        kld_infer_fail(infer, &error);
}

size_t kld_infer_feed(struct kld_exchange *exchange, const char *data, size_t size) {
    return kld_body_feed(exchange->state, data, size);
}

void kld_infer_end(struct kld_exchange *exchange) {
    struct kld_gateway *gateway = exchange->gateway;
    struct kld_infer *infer = exchange->state;
    kld_stats_set(gateway->stats, KLD_STAT_http_requests_in_flight, --gateway->infers);
    kld_stats_observe(gateway->stats, KLD_HISTOGRAM_http_request,
                      uv_hrtime() - exchange->started_ns);
    if (!infer) /* it was too late; the worker still has it */
        return;
    if (!exchange->replied) {
        kld_stats_add(gateway->stats, KLD_STAT_requests_detached_total, 1);
        count(infer, KLD_CANCELLED);
    }
    infer->exchange = NULL;
    let_go(infer);
}

/* ---- Layout -----------------------------------------------------------------------------------*/

static struct kld_oip_tensor *tensor_of(struct kld_infer *infer, uint32_t index) {
    return index < infer->request.input_count
               ? &infer->request.input[index]
               : &infer->request.output[index - infer->request.input_count];
}

static uint32_t tensor_count(const struct kld_infer *infer) {
    return infer->request.input_count + infer->request.output_count;
}

/* One piece of staging for every tensor, each at its own alignment, and the reply's JSON. */
static enum kld_status lay_out(struct kld_infer *infer, struct kld_error *err) {
    struct kld_gateway *gateway = infer->gateway;
    uint64_t json_max = gateway->config->json_bytes_max + 4096, total = 0;
    uint64_t reply = kld_oip_reply_bytes_max(&infer->request);
    enum kld_status status;
    if (infer->request.has_device && infer->request.device >= kld_links_count(gateway->links))
        return kld_error_set(err, KLD_INVALID,
                             "parameter 'device' is %u; this server has %u, numbered from 0",
                             infer->request.device, kld_links_count(gateway->links));
    for (uint32_t i = 0; i < tensor_count(infer); i++) {
        const struct kld_oip_tensor *tensor = tensor_of(infer, i);
        bool output = i >= infer->request.input_count;
        if (output && tensor->where == KLD_OIP_JSON && tensor->elements > json_max / 2)
            return kld_error_set(err, KLD_TOO_LARGE,
                                 "%s as JSON would have more than %" PRIu64
                                 " bytes (json_bytes_max); ask for it with binary_data",
                                 kld_slot_name(tensor->slot), gateway->config->json_bytes_max);
        if (tensor->where == KLD_OIP_REGION &&
            (status = kld_shm_acquire(gateway->shm, infer->caller, tensor->region,
                                      tensor->region_offset_bytes, tensor->bytes, &infer->region[i],
                                      err)))
            return status;
        infer->place[i] = total;
        total += (tensor->bytes + KLD_STAGING_ALIGN - 1) & ~(uint64_t)(KLD_STAGING_ALIGN - 1);
    }
    if (reply > json_max)
        reply = json_max;
    if ((status = kld_infer_alloc(infer, total + reply, &infer->tensors_offset, err)))
        return status;
    infer->has_tensors = true;
    for (uint32_t i = 0; i < tensor_count(infer); i++)
        infer->place[i] += infer->tensors_offset;
    infer->reply.data = kld_staging_at(gateway->staging, infer->tensors_offset + total);
    infer->reply.capacity = reply;
    kld_stats_set(gateway->stats, KLD_STAT_staging_bytes, kld_staging_used_bytes(gateway->staging));
    return KLD_OK;
}

/* ---- Steps that may be large ------------------------------------------------------------------*/

static void *bytes_of(const struct kld_infer *infer, uint32_t index) {
    return kld_staging_at(infer->gateway->staging, infer->place[index]);
}

static enum kld_status gather(struct kld_infer *infer) {
    for (uint32_t i = 0; i < infer->request.input_count; i++) {
        const struct kld_oip_tensor *input = &infer->request.input[i];
        enum kld_status status = KLD_OK;
        if (input->where == KLD_OIP_JSON)
            status = kld_oip_decode(input, bytes_of(infer, i), &infer->error);
        else if (input->where == KLD_OIP_REGION)
            status = kld_shm_read(infer->region[i], input->region_offset_bytes, bytes_of(infer, i),
                                  input->bytes, &infer->error);
        if (status)
            return status;
    }
    return KLD_OK;
}

static enum kld_status write_out(struct kld_infer *infer) {
    const void *values[KLD_OIP_OUTPUTS_MAX];
    for (uint32_t i = 0; i < infer->request.output_count; i++) {
        const struct kld_oip_tensor *output = &infer->request.output[i];
        uint32_t index = infer->request.input_count + i;
        enum kld_status status = KLD_OK;
        values[i] = bytes_of(infer, index);
        if (output->where == KLD_OIP_REGION)
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
        infer->packed = kld_compress(infer->coding, infer->reply.data, infer->reply.length,
                                     &infer->packed_bytes);
    return KLD_OK;
}

static void run_step(struct kld_infer *infer) {
    infer->error.status = KLD_OK;
    switch (infer->step) {
    case KLD_INFER_PARSE:
        kld_oip_parse(
            infer->json_capacity ? kld_staging_at(infer->gateway->staging, infer->json_offset) : "",
            infer->json_have, &infer->request, &infer->error);
        break;
    case KLD_INFER_GATHER: gather(infer); break;
    case KLD_INFER_WRITE_OUT: write_out(infer); break;
    case KLD_INFER_YIELD: break;
    }
}

static void step_ended(struct kld_infer *infer);

static void pool_work(uv_work_t *work) { run_step(work->data); }

static void pool_ended(uv_work_t *work, int status) {
    struct kld_infer *infer = work->data;
    infer->in_pool = false;
    step_ended(infer);
}

static void start_step(struct kld_infer *infer, enum kld_infer_step step, bool large) {
    infer->step = step;
    infer->work.data = infer;
    if (large && uv_queue_work(&infer->gateway->loop, &infer->work, pool_work, pool_ended) == 0) {
        infer->in_pool = true;
        return;
    }
    run_step(infer);
    step_ended(infer);
}

static bool json_is_large(const struct kld_infer *infer) {
    return infer->json_have > KLD_INFER_INLINE_BYTES_MAX;
}

static bool gather_is_large(const struct kld_infer *infer) {
    for (uint32_t i = 0; i < infer->request.input_count; i++)
        if (infer->request.input[i].where == KLD_OIP_REGION)
            return true;
    return json_is_large(infer);
}

static bool write_out_is_large(const struct kld_infer *infer) {
    for (uint32_t i = 0; i < infer->request.output_count; i++)
        if (infer->request.output[i].where == KLD_OIP_REGION)
            return true;
    return infer->reply.capacity > KLD_INFER_INLINE_BYTES_MAX;
}

void kld_infer_yield(struct kld_infer *infer) {
    kld_exchange_pause(infer->exchange);
    start_step(infer, KLD_INFER_YIELD, true);
}

void kld_infer_parse(struct kld_infer *infer) {
    bool large = json_is_large(infer);
    if (large)
        kld_exchange_pause(infer->exchange);
    start_step(infer, KLD_INFER_PARSE, large);
}

void kld_infer_finish(struct kld_exchange *exchange) {
    struct kld_infer *infer = exchange->state;
    struct kld_error error;
    infer->body_done = true;
    if (kld_body_finish(infer, &error))
        kld_infer_fail(infer, &error);
    else if (!infer->parsed)
        kld_infer_parse(infer);
    else
        start_step(infer, KLD_INFER_GATHER, gather_is_large(infer));
}

/* ---- The worker -------------------------------------------------------------------------------*/

static struct kld_infer *infer_of(struct kld_link_call *call) {
    return (struct kld_infer *)((char *)call - offsetof(struct kld_infer, call));
}

static void call_done(struct kld_link_call *call, enum kld_status status,
                      const struct kld_result *result, const struct kld_error *error) {
    struct kld_infer *infer = infer_of(call);
    infer->in_worker = false;
    if (result)
        infer->result = *result;
    if (!infer->exchange) {
        let_go(infer);
    } else if (status) {
        struct kld_error failure = {.status = status};
        if (error && error->status)
            failure = *error;
        kld_infer_fail(infer, &failure);
    } else {
        start_step(infer, KLD_INFER_WRITE_OUT, write_out_is_large(infer));
    }
}

/* The caller is answered; the memory stays until the worker has let go of it. */
static void call_late(struct kld_link_call *call) {
    struct kld_infer *infer = infer_of(call);
    struct kld_error error;
    if (!infer->exchange)
        return;
    kld_stats_add(infer->gateway->stats, KLD_STAT_requests_detached_total, 1);
    kld_error_set(&error, KLD_DEADLINE, "the deadline passed before the result was there");
    count(infer, KLD_DEADLINE);
    struct kld_exchange *exchange = infer->exchange;
    infer->exchange = NULL;
    exchange->state = NULL;
    kld_exchange_reply_error(exchange, &error);
}

/* uv_hrtime() at which the request is too late; http_deadline_ms = 0 is never. */
static uint64_t deadline_of(const struct kld_infer *infer) {
    uint64_t timeout_ns = infer->request.timeout_ns, at;
    if (!timeout_ns &&
        __builtin_mul_overflow(infer->gateway->config->http_deadline_ms, 1000000u, &timeout_ns))
        timeout_ns = 0;
    return !timeout_ns || __builtin_add_overflow(uv_hrtime(), timeout_ns, &at) ? UINT64_MAX : at;
}

static void submit(struct kld_infer *infer) {
    struct kld_link_call *call = &infer->call;
    call->request.op = infer->request.op;
    for (uint32_t i = 0; i < tensor_count(infer); i++)
        call->request.bytes[tensor_of(infer, i)->slot].offset_bytes = infer->place[i];
    call->deadline_ns = deadline_of(infer);
    call->pinned = infer->request.has_device;
    call->device = infer->request.device;
    call->done = call_done;
    call->late = call_late;
    infer->in_worker = true;
    kld_links_submit(infer->gateway->links, call);
}

/* ---- The reply --------------------------------------------------------------------------------*/

static void response_sent(void *user) {
    struct kld_infer *infer = user;
    infer->in_response = false;
    let_go(infer);
}

/* Sent from where it was computed. */
static struct MHD_Response *make_response(struct kld_infer *infer, bool *ret_binary) {
    struct MHD_IoVec part[1 + KLD_OIP_OUTPUTS_MAX] = {{infer->reply.data, infer->reply.length}};
    unsigned parts = 1;
    uint64_t bytes = infer->reply.length;
    if (infer->packed) {
        void *packed = infer->packed;
        infer->packed = NULL;
        *ret_binary = false;
        kld_stats_add(infer->gateway->stats, KLD_STAT_http_sent_bytes_total,
                      (int64_t)infer->packed_bytes);
        return kld_exchange_packed(infer->coding, packed, infer->packed_bytes);
    }
    for (uint32_t i = 0; i < infer->request.output_count; i++) {
        if (infer->request.output[i].where != KLD_OIP_BINARY)
            continue;
        part[parts].iov_base = bytes_of(infer, infer->request.input_count + i);
        part[parts++].iov_len = infer->request.output[i].bytes;
        bytes += infer->request.output[i].bytes;
    }
    *ret_binary = parts > 1;
    kld_stats_add(infer->gateway->stats, KLD_STAT_http_sent_bytes_total, (int64_t)bytes);
    if (parts == 1 && bytes <= KLD_INFER_INLINE_BYTES_MAX)
        return MHD_create_response_from_buffer(bytes, infer->reply.data, MHD_RESPMEM_MUST_COPY);
    struct MHD_Response *response =
        MHD_create_response_from_iovec(part, parts, response_sent, infer);
    infer->in_response = response != NULL;
    return response;
}

static void reply(struct kld_infer *infer) {
    bool binary;
    char length[24];
    struct MHD_Response *response = make_response(infer, &binary);
    if (response) {
        snprintf(length, sizeof length, "%zu", infer->reply.length);
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                                binary ? "application/octet-stream" : "application/json");
        if (binary)
            MHD_add_response_header(response, "Inference-Header-Content-Length", length);
    }
    count(infer, response ? KLD_OK : KLD_NO_MEMORY);
    kld_exchange_reply(infer->exchange, 200, response);
    let_go(infer);
}

static void parse_ended(struct kld_infer *infer) {
    struct kld_error error;
    if (lay_out(infer, &error)) {
        kld_infer_fail(infer, &error);
        return;
    }
    infer->parsed = true;
    if (!infer->body_done)
        kld_exchange_continue(infer->exchange);
    else if (kld_body_finish(infer, &error))
        kld_infer_fail(infer, &error);
    else
        start_step(infer, KLD_INFER_GATHER, gather_is_large(infer));
}

static void step_ended(struct kld_infer *infer) {
    if (!infer->exchange) {
        let_go(infer);
        return;
    }
    if (infer->error.status) {
        kld_infer_fail(infer, &infer->error);
        return;
    }
    switch (infer->step) {
    case KLD_INFER_PARSE: parse_ended(infer); break;
    case KLD_INFER_GATHER: submit(infer); break;
    case KLD_INFER_WRITE_OUT: reply(infer); break;
    case KLD_INFER_YIELD: kld_exchange_continue(infer->exchange); break;
    }
}
