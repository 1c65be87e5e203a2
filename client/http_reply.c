/* http_reply.c - what comes back over HTTP: a small strict reader for the JSON of an infer reply or
 * an error, and the binary tail, which goes straight into the caller's tensors. The JSON reader
 * knows the shape that it expects and skips what else is there. The thread that owns the
 * connection. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "client/http.h"
#include "proto/utf8.h"

#define DEPTH_MAX 16
#define NAME_MAX_BYTES 64
#define RETRY_AFTER_S_MAX 3600

/* ---- JSON -------------------------------------------------------------------------------------
 */

struct json {
    const char *at, *end;
};

static char peek(struct json *json) {
    while (json->at < json->end && strchr(" \t\r\n", *json->at) && *json->at)
        json->at++;
    return json->at < json->end ? *json->at : '\0';
}

static bool take(struct json *json, char wanted) {
    if (peek(json) != wanted)
        return false;
    json->at++;
    return true;
}

static int hex4(const char *at) {
    int value = 0;
    for (int i = 0; i < 4; i++) {
        char c = at[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* One character of a string, escapes resolved, into `to` (at most 3 bytes; surrogates become '?').
 * Its length; 0: malformed. */
static size_t take_character(struct json *json, char to[3]) {
    unsigned char c = (unsigned char)*json->at++;
    if (c < 0x20)
        return 0;
    if (c != '\\') {
        to[0] = (char)c;
        return 1;
    }
    static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
    if (json->at == json->end)
        return 0;
    c = (unsigned char)*json->at++;
    const char *found = c ? strchr(from, c) : NULL;
    if (found) {
        to[0] = into[found - from];
        return 1;
    }
    if (c != 'u' || json->end - json->at < 4)
        return 0;
    int code = hex4(json->at);
    json->at += 4;
    if (code <= 0)
        return 0;
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        to[0] = (char)(0xc0 | code >> 6);
        to[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code >= 0xd800 && code < 0xe000) {
        to[0] = '?';
        return 1;
    }
    to[0] = (char)(0xe0 | code >> 12);
    to[1] = (char)(0x80 | (code >> 6 & 0x3f));
    to[2] = (char)(0x80 | (code & 0x3f));
    return 3;
}

/* A string, cut to `capacity` bytes with its NUL. */
static bool take_string(struct json *json, char *to, size_t capacity) {
    size_t length = 0;
    bool cut = false;
    if (!take(json, '"'))
        return false;
    while (json->at < json->end && *json->at != '"') {
        char bytes[3];
        size_t count = take_character(json, bytes);
        if (count == 0) {
            to[length] = '\0';
            return false;
        }
        cut = cut || length + count >= capacity;
        if (!cut) {
            memcpy(to + length, bytes, count);
            length += count;
        }
    }
    to[length] = '\0';
    if (cut)
        kld_utf8_trim(to, length);
    return json->at++ < json->end;
}

static bool take_whole(struct json *json, uint64_t *ret_number) {
    uint64_t number = 0;
    char c = peek(json);
    if (c < '0' || c > '9')
        return false;
    for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++)
        if (__builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(*json->at - '0'), &number))
            return false;
    *ret_number = number;
    c = peek(json);
    return c == ',' || c == '}' || c == ']';
}

/* Any value, unread. Brackets are counted, not matched: what is skipped is not used. */
static bool skip_value(struct json *json) {
    int depth = 0;
    char text[4];
    do {
        char c = peek(json);
        if (c == '"') {
            if (!take_string(json, text, sizeof text))
                return false;
        } else if (c == '{' || c == '[') {
            json->at++;
            if (++depth > DEPTH_MAX)
                return false;
        } else if (c == '}' || c == ']') {
            json->at++;
            if (--depth < 0)
                return false;
        } else if (c == '\0') {
            return false;
        } else if (depth > 0 && (c == ',' || c == ':')) {
            json->at++;
        } else {
            const char *start = json->at;
            while (json->at < json->end && *json->at && !strchr(",:]}[{\" \t\r\n", *json->at))
                json->at++;
            if (json->at == start)
                return false;
        }
    } while (depth > 0);
    return true;
}

/* Calls `member` for each key of an object, which takes its value. */
typedef bool (*member_reader)(struct json *json, const char *key, void *user);

static bool take_object(struct json *json, member_reader member, void *user) {
    if (!take(json, '{'))
        return false;
    if (take(json, '}'))
        return true;
    do {
        char key[NAME_MAX_BYTES];
        if (!take_string(json, key, sizeof key) || !take(json, ':') || !member(json, key, user))
            return false;
    } while (take(json, ','));
    return take(json, '}');
}

struct output_reader {
    char name[NAME_MAX_BYTES];
    uint64_t bytes;
    bool named, sized;
};

static bool read_output_parameter(struct json *json, const char *key, void *user) {
    struct output_reader *output = user;
    if (strcmp(key, "binary_data_size") != 0)
        return skip_value(json);
    output->sized = true;
    return take_whole(json, &output->bytes);
}

static bool read_output_member(struct json *json, const char *key, void *user) {
    struct output_reader *output = user;
    if (strcmp(key, "parameters") == 0)
        return take_object(json, read_output_parameter, output);
    if (strcmp(key, "name") != 0)
        return skip_value(json);
    output->named = true;
    return take_string(json, output->name, sizeof output->name);
}

static bool read_reply_member(struct json *json, const char *key, void *user) {
    struct http_reply *reply = user;
    if (strcmp(key, "outputs") != 0)
        return skip_value(json);
    if (reply->count > 0 || !take(json, '['))
        return false;
    do {
        struct output_reader output = {0};
        enum kld_slot slot;
        if (!take_object(json, read_output_member, &output) || !output.named || !output.sized ||
            !kld_slot_from_name(output.name, &slot) || !kld_slot_is_output(slot) ||
            reply->count == KLD_SLOT_COUNT)
            return false;
        reply->output[reply->count++] = (struct http_output){slot, output.bytes};
    } while (take(json, ','));
    return take(json, ']');
}

enum kld_status kld_http_reply_read(const char *text, size_t bytes, struct http_reply *ret_reply,
                                    struct kld_error *err) {
    struct json json = {text, text + bytes};
    struct http_reply reply = {0};
    if (!take_object(&json, read_reply_member, &reply) || peek(&json) != '\0' ||
        json.at != json.end || reply.count == 0)
        return kld_error_set(err, KLD_INTERNAL,
                             "the server's answer is not an infer reply with binary outputs; is it "
                             "a kld server?");
    *ret_reply = reply;
    return KLD_OK;
}

struct text_reader {
    const char *key;
    char *text;
    size_t capacity;
};

static bool read_text_member(struct json *json, const char *key, void *user) {
    const struct text_reader *reader = user;
    return strcmp(key, reader->key) == 0 ? take_string(json, reader->text, reader->capacity)
                                         : skip_value(json);
}

bool kld_http_text_read(const char *text, size_t bytes, const char *key, char *ret_text,
                        size_t capacity) {
    struct json json = {text, text + bytes};
    struct text_reader reader = {key, ret_text, capacity};
    ret_text[0] = '\0';
    if (!take_object(&json, read_text_member, &reader))
        ret_text[0] = '\0'; /* what was read before it went wrong */
    return ret_text[0];
}

/* ---- While it arrives
 * --------------------------------------------------------------------------*/

/* Where the value of the header `name` begins; `bytes` if the line is another one. */
static size_t header_value(const char *data, size_t bytes, const char *name) {
    size_t length = strlen(name);
    if (bytes <= length || strncasecmp(data, name, length) != 0 || data[length] != ':')
        return bytes;
    size_t i = length + 1;
    while (i < bytes && (data[i] == ' ' || data[i] == '\t'))
        i++;
    return i;
}

static bool header_is(const char *data, size_t bytes, const char *name, const char *value) {
    size_t length = strlen(value), i = header_value(data, bytes, name);
    if (bytes - i < length || strncasecmp(data + i, value, length) != 0)
        return false;
    for (i += length; i < bytes; i++)
        if (!strchr(" \t\r\n", data[i]) || !data[i])
            return false;
    return true;
}

static bool header_number(const char *data, size_t bytes, const char *name, uint64_t *ret_number) {
    uint64_t number = 0;
    size_t i = header_value(data, bytes, name);
    if (i == bytes || data[i] < '0' || data[i] > '9')
        return false;
    for (; i < bytes && data[i] >= '0' && data[i] <= '9'; i++)
        if (__builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(data[i] - '0'), &number))
            return false;
    *ret_number = number;
    return true;
}

/* CURLOPT_HEADERFUNCTION: one header line. */
size_t kld_http_header(char *data, size_t size, size_t count, void *user) {
    struct http_call *call = user;
    uint64_t seconds;
    (void)header_number(data, size * count, "Inference-Header-Content-Length",
                        &call->reply_head_bytes);
    if (header_number(data, size * count, "Retry-After", &seconds))
        call->retry_after_ns =
            (seconds < RETRY_AFTER_S_MAX ? seconds : RETRY_AFTER_S_MAX) * 1000000000;
    if (header_is(data, size * count, "KLD-Status", "device_lost"))
        call->device_lost = true;
    return size * count;
}

static uint64_t expected_bytes(const struct http_call *call, enum kld_slot slot) {
    const struct kld_geometry *geometry = &call->base.geometry;
    if (slot == KLD_SLOT_LOSS && geometry->scalar)
        return kld_dtype_bytes(geometry->loss_dtype);
    return geometry->slot[slot].rows * geometry->slot[slot].row_bytes; /* 0: it was not asked for */
}

/* The reply's JSON is complete: does it announce what was asked for, all of it and once? */
static enum kld_status check_reply(struct http_call *call) {
    struct kld_error *err = &call->failure;
    enum kld_status status =
        kld_http_reply_read(call->text, call->reply_head_bytes, &call->reply, err);
    if (status)
        return status;
    uint32_t seen = 0;
    for (uint32_t i = 0; i < call->reply.count; i++) {
        const struct http_output *output = &call->reply.output[i];
        uint64_t expected = expected_bytes(call, output->slot);
        if (seen & (1u << output->slot) || (expected && output->bytes != expected))
            return kld_error_set(err, KLD_INTERNAL,
                                 "the server sent %llu bytes of %s; expected %llu, once",
                                 (unsigned long long)output->bytes, kld_slot_name(output->slot),
                                 (unsigned long long)expected);
        seen |= 1u << output->slot;
    }
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (kld_slot_is_output(slot) && expected_bytes(call, (enum kld_slot)slot) &&
            !(seen & (1u << slot)))
            return kld_error_set(err, KLD_INTERNAL, "the server's answer lacks %s",
                                 kld_slot_name(slot));
    call->parsed = true;
    return KLD_OK;
}

/* Bytes of the tail to their tensors; false: there are more than announced. */
static bool take_tail(struct http_call *call, const char *data, uint64_t bytes) {
    while (bytes > 0) {
        while (call->output < call->reply.count &&
               call->output_bytes == call->reply.output[call->output].bytes) {
            call->output++;
            call->output_bytes = 0;
        }
        if (call->output == call->reply.count) {
            kld_error_set(&call->failure, KLD_INTERNAL, "the server's answer is too long");
            return false;
        }
        const struct http_output *output = &call->reply.output[call->output];
        uint64_t part = output->bytes - call->output_bytes;
        part = part < bytes ? part : bytes;
        const struct kld_bytes *place = &call->base.request.bytes[output->slot];
        if (output->slot == KLD_SLOT_LOSS && call->base.geometry.scalar) {
            memcpy(call->loss + call->output_bytes, data, part);
        } else if (place->data || place->region) {
            char *tensor =
                place->region ? (char *)place->region->data + place->offset_bytes : place->data;
            call->wrote = true;
            kld_http_tensor_write(tensor, &call->base.geometry.slot[output->slot],
                                  call->output_bytes, data, part);
        }
        call->output_bytes += part;
        data += part;
        bytes -= part;
    }
    return true;
}

/* CURLOPT_WRITEFUNCTION: bytes of the reply's body. */
size_t kld_http_body_write(char *data, size_t size, size_t count, void *user) {
    struct http_call *call = user;
    uint64_t bytes = size * count, used = 0;
    if (call->text_bytes == 0)
        curl_easy_getinfo(call->transfer.easy, CURLINFO_RESPONSE_CODE, &call->transfer.http_status);
    bool good = call->transfer.http_status == 200;
    if (good && !call->parsed && call->reply_head_bytes > sizeof call->text) {
        kld_error_set(&call->failure, KLD_INTERNAL,
                      "the server's answer has no binary outputs, or a JSON part over %d bytes",
                      KLD_HTTP_REPLY_MAX);
        return 0;
    }
    if (!call->parsed) {
        uint64_t limit = good ? call->reply_head_bytes : sizeof call->text;
        used = limit - call->text_bytes < bytes ? limit - call->text_bytes : bytes;
        memcpy(call->text + call->text_bytes, data, used);
        call->text_bytes += used;
        if (!good)
            return bytes; /* what does not fit of an error is not needed */
        if (call->text_bytes < limit)
            return bytes;
        if (check_reply(call))
            return 0;
    }
    return take_tail(call, data + used, bytes - used) ? bytes : 0;
}

enum kld_status kld_http_reply_finish(struct http_call *call, struct kld_error *err) {
    bool last = call->parsed && call->output + 1 >= call->reply.count &&
                (call->output == call->reply.count ||
                 call->output_bytes == call->reply.output[call->output].bytes);
    if (!last)
        return kld_error_set(err, KLD_INTERNAL, "the server's answer is too short");
    if (!call->wants_loss)
        return KLD_OK;
    struct kld_result *result = &call->base.result;
    float single;
    result->scalar = true;
    if (call->base.geometry.loss_dtype == KLD_DTYPE_FP64) {
        memcpy(&result->loss, call->loss, sizeof result->loss);
    } else {
        memcpy(&single, call->loss, sizeof single);
        result->loss = single;
    }
    const struct kld_bytes *place = &call->base.request.bytes[KLD_SLOT_LOSS];
    char *tensor = place->region ? (char *)place->region->data + place->offset_bytes : place->data;
    if (tensor)
        memcpy(tensor, call->loss, kld_dtype_bytes(call->base.geometry.loss_dtype));
    return KLD_OK;
}
