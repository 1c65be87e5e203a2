/* body.c - receives the body of an infer request: JSON first, then the binary tail, each byte
 * copied once, from MHD's buffer into the staging memory where it is used (infer.h).
 * Does not look into the JSON. Loop thread only. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "proto/copy.h"
#include "server/gateway/infer.h"
#include "server/gateway/staging.h"

#define LENGTH "Inference-Header-Content-Length"
#define STAGED_PAST_CACHES_BYTES ((uint64_t)64 << 20) /* more than most last-level caches hold */
#define INFLATED_BYTES_A_TURN ((uint64_t)64 << 10)    /* then other connections get their turn */

static enum kld_status read_header_length(struct kld_infer *infer, struct kld_error *err) {
    const struct kld_exchange *exchange = infer->exchange;
    const struct kld_config *config = infer->gateway->config;
    const char *text = kld_exchange_header(exchange, LENGTH);
    uint64_t value = 0;
    if (text && !kld_exchange_header_alone(exchange, LENGTH))
        return kld_error_set(err, KLD_INVALID, LENGTH " comes more than once");
    if (!text) {
        infer->json_ends_body = true;
        if (exchange->has_body && (infer->inflate || !exchange->has_length))
            return KLD_OK;
        infer->json_known = true;
        infer->json_bytes = exchange->length_bytes;
    } else {
        bool digits = *text;
        for (const char *c = text; *c; c++) {
            digits = digits && *c >= '0' && *c <= '9' && value < UINT64_MAX / 100;
            value = digits ? value * 10 + (uint64_t)(*c - '0') : value;
        }
        if (!digits)
            return kld_error_set(err, KLD_INVALID, LENGTH " must be a whole number of bytes");
        if (!infer->inflate && (exchange->has_length || !exchange->has_body) &&
            value > exchange->length_bytes)
            return kld_error_set(err, KLD_INVALID,
                                 LENGTH " is %" PRIu64 "; the whole body has %" PRIu64 " bytes",
                                 value, exchange->length_bytes);
        infer->json_known = true;
        infer->json_bytes = value;
    }
    if (infer->json_bytes > config->json_bytes_max)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the JSON has %" PRIu64 " bytes; at most %" PRIu64
                             " (json_bytes_max); send tensors as binary data",
                             infer->json_bytes, config->json_bytes_max);
    return KLD_OK;
}

static enum kld_status read_encoding(struct kld_infer *infer, struct kld_error *err) {
    const char *encoding = kld_exchange_header(infer->exchange, MHD_HTTP_HEADER_CONTENT_ENCODING);
    if (!encoding || !*encoding || strcasecmp(encoding, "identity") == 0)
        return KLD_OK;
    bool gzip = strcasecmp(encoding, "gzip") == 0 || strcasecmp(encoding, "x-gzip") == 0;
    if (!gzip && strcasecmp(encoding, "deflate") != 0)
        return kld_error_set(err, KLD_MEDIA,
                             "Content-Encoding '%.40s' is not supported; gzip and deflate are",
                             encoding);
    infer->inflate = calloc(1, sizeof *infer->inflate);
    if (!infer->inflate || inflateInit2(&infer->inflate->stream, 15 + 32) != Z_OK) {
        free(infer->inflate);
        infer->inflate = NULL;
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    infer->inflate->gzip = gzip;
    return KLD_OK;
}

enum kld_status kld_body_begin(struct kld_infer *infer, struct kld_error *err) {
    enum kld_status status;
    if ((status = read_encoding(infer, err)) || (status = read_header_length(infer, err)))
        return status;
    return KLD_OK;
}

void kld_body_done(struct kld_infer *infer) {
    if (!infer->inflate)
        return;
    inflateEnd(&infer->inflate->stream);
    free(infer->inflate);
    infer->inflate = NULL;
}

/* Small JSON that has come in one piece is mostly read before the next one comes, so one place for
 * each loop will do and takes no staging. Who finds it taken, by one that waits for memory or for
 * the rest of its body, has his in staging, as has who has waited for that. */
static bool take_place(struct kld_infer *infer, uint64_t here) {
    struct kld_infer_spares *spares = infer->gateway->spares;
    if (spares->json_of || !infer->json_known || infer->json_bytes != here ||
        here > sizeof spares->json)
        return false;
    spares->json_of = infer;
    infer->json = spares->json;
    infer->json_capacity = here;
    return true;
}

void kld_body_json_read(struct kld_infer *infer) {
    if (infer->gateway->spares->json_of != infer)
        return;
    infer->gateway->spares->json_of = NULL;
    infer->json = NULL;
    infer->json_capacity = 0;
}

/* All at once where its length is known; else its room doubles. */
static enum kld_status grow_json(struct kld_infer *infer, uint64_t needed, struct kld_error *err) {
    struct kld_staging *staging = infer->gateway->staging;
    uint64_t most = infer->gateway->config->json_bytes_max, offset;
    if (needed > most)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the JSON has more than %" PRIu64
                             " bytes (json_bytes_max); send tensors as binary data",
                             most);
    if (!infer->json && !infer->json_wanted && take_place(infer, needed))
        return KLD_OK;
    uint64_t capacity = infer->json_known ? infer->json_bytes : infer->json_capacity;
    if (!capacity)
        capacity = 16 << 10;
    while (capacity < needed)
        capacity *= 2;
    capacity = capacity < most ? capacity : most;
    if (capacity + infer->json_capacity >
        kld_staging_range_bytes_max(staging)) /* it would wait for itself */
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the JSON needs more than the staging memory (staging_bytes_max)");
    enum kld_status status = kld_infer_alloc(infer, capacity, true, &offset, err);
    if (status)
        return status;
    if (infer->json) {
        memcpy(kld_staging_at(staging, offset), infer->json, infer->json_have);
        kld_infer_give(infer, infer->json_offset, infer->json_capacity);
    }
    infer->json = kld_staging_at(staging, offset);
    infer->json_offset = offset;
    infer->json_capacity = capacity;
    return KLD_OK;
}

static void grow_again(struct kld_infer *infer) {
    struct kld_error error;
    enum kld_status status = grow_json(infer, infer->json_wanted, &error);
    if (status == KLD_BUSY)
        return; /* it waits on */
    kld_waiter_remove(infer->gateway, &infer->waiter);
    if (status)
        kld_infer_fail(infer, &error);
    else
        kld_exchange_continue(infer->exchange); /* it is fed again */
}

static enum kld_status take_json(struct kld_infer *infer, const char *data, size_t size,
                                 size_t *ret_taken, struct kld_error *err) {
    enum kld_status status;
    uint64_t most = infer->json_known ? infer->json_bytes - infer->json_have : size;
    size_t taken = size < most ? size : (size_t)most;
    if (infer->json_have + taken > infer->json_capacity &&
        (status = grow_json(infer, infer->json_have + taken, err))) {
        if (status != KLD_BUSY)
            return status;
        infer->json_wanted = infer->json_have + taken;
        kld_infer_wait(infer, grow_again);
        *ret_taken = 0;
        return KLD_OK;
    }
    if (taken)
        memcpy(infer->json + infer->json_have, data, taken);
    infer->json_have += taken;
    *ret_taken = taken;
    if (!infer->json_ends_body && infer->json_have == infer->json_bytes)
        kld_infer_parse(infer);
    return KLD_OK;
}

/* came: so many bytes, as far as is known. */
static enum kld_status check_tail(const struct kld_infer *infer, uint64_t came,
                                  struct kld_error *err) {
    uint64_t tail_bytes = infer->request.tail_bytes;
    if (came > tail_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "the body goes on behind the %" PRIu64
                             " bytes that binary_data_size of its inputs add up to",
                             tail_bytes);
    if (came < tail_bytes)
        return kld_error_set(
            err, KLD_INVALID,
            "the inputs have %" PRIu64 " bytes of binary data; %" PRIu64 " came behind the JSON%s",
            tail_bytes, came, infer->json_ends_body ? " (" LENGTH " says where it ends)" : "");
    return KLD_OK;
}

enum kld_status kld_body_check(const struct kld_infer *infer, struct kld_error *err) {
    const struct kld_exchange *exchange = infer->exchange;
    uint64_t bytes = infer->json_have + infer->request.tail_bytes;
    uint64_t most = infer->gateway->config->body_bytes_max;
    if (bytes > most)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the JSON and the binary data of its inputs have %" PRIu64
                             " bytes; a body has at most %" PRIu64 " (body_bytes_max)",
                             bytes, most);
    if (infer->body_done)
        return check_tail(infer, infer->tail_have, err);
    if (infer->inflate || (exchange->has_body && !exchange->has_length))
        return KLD_OK; /* nobody knows yet */
    return check_tail(infer, exchange->length_bytes - infer->json_have, err);
}

/* What is longer than the caches has left them before the worker looks at it. */
static void put_in_staging(void *to, const void *from, size_t bytes, uint64_t tail_bytes) {
    if (tail_bytes >= STAGED_PAST_CACHES_BYTES)
        kld_copy_past_caches(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static enum kld_status take_tail(struct kld_infer *infer, const char *data, size_t size,
                                 size_t *ret_taken, struct kld_error *err) {
    const struct kld_oip_request *request = &infer->request;
    if (infer->tail_have == request->tail_bytes)
        return check_tail(infer, infer->tail_have + size, err);
    const struct kld_oip_tensor *input = &request->input[infer->tail_input];
    while (input->where != KLD_OIP_BINARY ||
           input->tail_offset_bytes + input->bytes <= infer->tail_have)
        input = &request->input[++infer->tail_input];
    uint64_t inside = infer->tail_have - input->tail_offset_bytes, left = input->bytes - inside;
    size_t taken = size < left ? size : (size_t)left;
    if (infer->in_buffer[infer->tail_input])
        taken = kld_bulk_receive(infer, infer->tail_input, inside, data, taken);
    else
        put_in_staging((char *)kld_infer_bytes(infer, infer->tail_input) + inside, data, taken,
                       request->tail_bytes);
    infer->tail_have += taken;
    *ret_taken = taken;
    return KLD_OK;
}

/* Bytes as they are when nothing compresses them. */
static size_t feed_plain(struct kld_infer *infer, const char *data, size_t size) {
    struct kld_exchange *exchange = infer->exchange;
    uint64_t most = infer->gateway->config->body_bytes_max;
    struct kld_error error;
    size_t done = 0;
    while (done < size && !exchange->paused && !exchange->replied) {
        size_t taken = 0;
        enum kld_status status =
            infer->body_bytes >= most
                ? kld_error_set(&error, KLD_TOO_LARGE,
                                "the body has more than %" PRIu64 " bytes (body_bytes_max)", most)
            : infer->parsed ? take_tail(infer, data + done, size - done, &taken, &error)
                            : take_json(infer, data + done, size - done, &taken, &error);
        if (status)
            kld_infer_fail(infer, &error);
        done += taken;
        infer->body_bytes += taken;
    }
    return done;
}

static size_t feed_compressed(struct kld_infer *infer, const char *data, size_t size) {
    struct kld_exchange *exchange = infer->exchange;
    struct kld_inflate *inflater = infer->inflate;
    z_stream *stream = &inflater->stream;
    struct kld_error error;
    uint64_t begun = infer->body_bytes, most = infer->gateway->config->body_bytes_max;
    stream->next_in = (Bytef *)(uintptr_t)data;
    stream->avail_in = (uInt)size;
    while (!exchange->paused && !exchange->replied) {
        if (inflater->out_begin < inflater->out_end) {
            inflater->out_begin += (uint32_t)feed_plain(infer, inflater->out + inflater->out_begin,
                                                        inflater->out_end - inflater->out_begin);
            continue;
        }
        if (inflater->ended && stream->avail_in && inflater->gzip && *stream->next_in == 0x1f) {
            inflater->ended = false; /* gzip: another member may follow */
            inflateReset(stream);
        }
        if (inflater->ended && stream->avail_in) {
            kld_error_set(&error, KLD_INVALID, "there are bytes behind the compressed body");
            kld_infer_fail(infer, &error);
            break;
        }
        if (inflater->ended || (stream->avail_in == 0 && stream->avail_out))
            break;
        if (infer->body_bytes - begun >= INFLATED_BYTES_A_TURN) {
            kld_infer_yield(infer);
            break;
        }
        stream->next_out = (Bytef *)inflater->out;
        stream->avail_out = sizeof inflater->out;
        int result = inflate(stream, Z_NO_FLUSH);
        inflater->out_begin = 0;
        inflater->out_end = (uint32_t)(sizeof inflater->out - stream->avail_out);
        inflater->ended = result == Z_STREAM_END;
        if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) {
            kld_error_set(&error, KLD_INVALID, "the body is not what its Content-Encoding says");
            kld_infer_fail(infer, &error);
        }
    }
    inflater->in_bytes += size - stream->avail_in;
    if (inflater->in_bytes > most && !exchange->replied) { /* members of nothing, without end */
        kld_error_set(&error, KLD_TOO_LARGE,
                      "the body has more than %" PRIu64 " bytes (body_bytes_max)", most);
        kld_infer_fail(infer, &error);
    }
    return size - stream->avail_in;
}

size_t kld_body_feed(struct kld_infer *infer, const char *data, size_t size) {
    return infer->inflate ? feed_compressed(infer, data, size) : feed_plain(infer, data, size);
}

enum kld_status kld_body_finish(struct kld_infer *infer, struct kld_error *err) {
    if (infer->inflate && !infer->inflate->ended)
        return kld_error_set(err, KLD_INVALID, "the compressed body ends too early");
    if (infer->json_known && infer->json_have < infer->json_bytes)
        return kld_error_set(err, KLD_INVALID,
                             LENGTH " is %" PRIu64 "; the whole body has %" PRIu64 " bytes",
                             infer->json_bytes, infer->json_have);
    return infer->parsed ? check_tail(infer, infer->tail_have, err) : KLD_OK;
}
