/* oip_data.c - the numbers of JSON tensors, read straight into the memory of the tensor; and the
 * small bodies of the other routes.
 * The text was scanned before (oip_json.c): its grammar is right, and a bracket ends it. No
 * allocation for a tensor. Runs in the gateway, on its loop or its pool. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/oip.h"
#include "proto/oip_json.h"
#include "proto/oip_number.h"

struct reader {
    const struct kld_oip_tensor *tensor;
    const char *at;
    void *to;
    uint64_t done;                      /* elements */
    uint32_t depth;                     /* open brackets */
    uint32_t depth_max;                 /* 1: flat, else the rank; 0: no number seen yet */
    uint64_t count[KLD_JSON_DEPTH_MAX]; /* children of each open bracket so far */
};

static enum kld_status not_a_number(const struct reader *reader, struct kld_error *err) {
    return kld_error_set(err, KLD_INVALID,
                         "%s: element %" PRIu64 " of data is not a %s that %s "
                         "can hold",
                         kld_slot_name(reader->tensor->slot), reader->done,
                         reader->tensor->dtype == KLD_DTYPE_BOOL ? "truth value" : "number",
                         kld_dtype_name(reader->tensor->dtype));
}

static enum kld_status read_small(struct reader *reader, uint64_t most, struct kld_error *err) {
    uint8_t *to = (uint8_t *)reader->to + reader->done;
    char *end;
    if (most == 1 && (*reader->at == 't' || *reader->at == 'f')) {
        *to = *reader->at == 't';
        reader->at += *to ? 4 : 5;
        return KLD_OK;
    }
    if (*reader->at < '0' || *reader->at > '9')
        return not_a_number(reader, err);
    double value = strtod(reader->at, &end);
    if (value > (double)most || value != floor(value))
        return not_a_number(reader, err);
    *to = (uint8_t)value;
    reader->at = end;
    return KLD_OK;
}

static enum kld_status read_number(struct reader *reader, struct kld_error *err) {
    uint32_t dtype = reader->tensor->dtype;
    if (dtype == KLD_DTYPE_BOOL || dtype == KLD_DTYPE_UINT8)
        return read_small(reader, dtype == KLD_DTYPE_BOOL ? 1 : 255, err);
    if (*reader->at != '-' && (*reader->at < '0' || *reader->at > '9'))
        return not_a_number(reader, err);
    if (dtype == KLD_DTYPE_FP32) {
        float value = kld_number_read_float(&reader->at, reader->tensor->data_end);
        if (isinf(value))
            return not_a_number(reader, err);
        memcpy((char *)reader->to + reader->done * sizeof value, &value, sizeof value);
    } else {
        double value = kld_number_read_double(&reader->at, reader->tensor->data_end);
        if (isinf(value))
            return not_a_number(reader, err);
        memcpy((char *)reader->to + reader->done * sizeof value, &value, sizeof value);
    }
    return KLD_OK;
}

static enum kld_status wrong_nesting(const struct kld_oip_tensor *tensor, struct kld_error *err) {
    return kld_error_set(err, KLD_INVALID,
                         "%s: data must be flat or nested as its shape says, with %" PRIu64
                         " elements in all",
                         kld_slot_name(tensor->slot), tensor->elements);
}

/* Each element has a character at least and a comma or the last bracket behind it, and there is the
 * first bracket. */
enum kld_status kld_oip_check_length(const struct kld_oip_tensor *tensor, struct kld_error *err) {
    uint64_t length = (uint64_t)(tensor->data_end - tensor->data);
    return tensor->elements > (length - 1) / 2 ? wrong_nesting(tensor, err) : KLD_OK;
}

/* A bracket closes: in nested data its children must be as many as the shape says. */
static bool closes_well(const struct reader *reader) {
    const struct kld_oip_tensor *tensor = reader->tensor;
    uint64_t expected = reader->depth_max > 1 ? tensor->shape[reader->depth - 1] : tensor->elements;
    return reader->depth_max && reader->count[reader->depth - 1] == expected;
}

static enum kld_status read_element(struct reader *reader, struct kld_error *err) {
    if (!reader->depth_max)
        reader->depth_max = reader->depth;
    if (reader->depth != reader->depth_max ||
        (reader->depth != 1 && reader->depth != reader->tensor->rank) ||
        reader->done == reader->tensor->elements)
        return wrong_nesting(reader->tensor, err);
    enum kld_status status = read_number(reader, err);
    reader->done++;
    reader->count[reader->depth - 1]++;
    return status;
}

enum kld_status kld_oip_decode(const struct kld_oip_tensor *tensor, void *to,
                               struct kld_error *err) {
    struct reader reader = {.tensor = tensor, .at = tensor->data, .to = to};
    enum kld_status status;
    while (reader.at < tensor->data_end) {
        switch (*reader.at) {
        case ' ':
        case '\n':
        case '\t':
        case '\r':
        case ',': reader.at++; break;
        case '[':
            if (reader.depth == tensor->rank)
                return wrong_nesting(tensor, err);
            if (reader.depth)
                reader.count[reader.depth - 1]++;
            reader.count[reader.depth++] = 0;
            reader.at++;
            break;
        case ']':
            if (!closes_well(&reader))
                return wrong_nesting(tensor, err);
            reader.depth--;
            reader.at++;
            break;
        default:
            if ((status = read_element(&reader, err)))
                return status;
        }
    }
    return reader.done == tensor->elements ? KLD_OK : wrong_nesting(tensor, err);
}

enum kld_status kld_oip_parse_register(const char *text, size_t bytes,
                                       struct kld_oip_register *ret_register,
                                       struct kld_error *err) {
    static const char *const keys[] = {"key", "offset", "byte_size", NULL};
    struct kld_oip_register result = {.offset_bytes = 0};
    cJSON *root;
    enum kld_status status = kld_json_parse(text, bytes, &root, NULL, err);
    if (status)
        return status;
    const cJSON *key = cJSON_GetObjectItemCaseSensitive(root, "key");
    const cJSON *offset = cJSON_GetObjectItemCaseSensitive(root, "offset");
    const cJSON *size = cJSON_GetObjectItemCaseSensitive(root, "byte_size");
    uint64_t end;
    if (!cJSON_IsObject(root))
        status = kld_error_set(err, KLD_INVALID, "the request must be a JSON object");
    else if ((status = kld_json_keys(root, "register", keys, err)))
        ;
    else if (!cJSON_IsString(key) || strlen(key->valuestring) >= sizeof result.key)
        status = kld_error_set(err, KLD_INVALID, "'key' must be a text of at most %d bytes",
                               KLD_OIP_KEY_MAX - 1);
    else if (offset && (status = kld_json_whole(offset, "offset", &result.offset_bytes, err)))
        ;
    else if ((status = kld_json_whole(size, "byte_size", &result.byte_size, err)))
        ;
    else if (result.byte_size == 0 ||
             __builtin_add_overflow(result.offset_bytes, result.byte_size, &end))
        status = kld_error_set(err, KLD_INVALID, "byte_size must be greater than 0");
    else
        strcpy(result.key, key->valuestring);
    cJSON_Delete(root);
    if (!status)
        *ret_register = result;
    return status;
}

static int base64_digit(char c) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* 64 bytes are 21 groups of four characters, two more and "==". */
static bool read_handle(const char *text, uint8_t handle[KLD_OIP_CUDA_HANDLE_BYTES]) {
    if (strlen(text) != 88 || strcmp(text + 86, "==") != 0)
        return false;
    uint32_t bits = 0;
    for (int i = 0, done = 0, have = 0; i < 86; i++) {
        int digit = base64_digit(text[i]);
        if (digit < 0)
            return false;
        bits = bits << 6 | (uint32_t)digit;
        if ((have += 6) >= 8)
            handle[done++] = (uint8_t)(bits >> (have -= 8));
    }
    return (bits & 15) == 0; /* what is over of the last digit */
}

static enum kld_status read_register_cuda(const cJSON *root, struct kld_oip_register_cuda *result,
                                          struct kld_error *err) {
    static const char *const keys[] = {"raw_handle", "device_id", "byte_size", NULL};
    static const char *const handle_keys[] = {"b64", NULL};
    enum kld_status status;
    if (!cJSON_IsObject(root))
        return kld_error_set(err, KLD_INVALID, "the request must be a JSON object");
    const cJSON *handle = cJSON_GetObjectItemCaseSensitive(root, "raw_handle");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(handle, "b64");
    if ((status = kld_json_keys(root, "register", keys, err)))
        return status;
    if (!cJSON_IsObject(handle) || !cJSON_IsString(text) ||
        !read_handle(text->valuestring, result->handle))
        return kld_error_set(err, KLD_INVALID,
                             "raw_handle must be {\"b64\": the %d bytes of a cudaIpcMemHandle_t in "
                             "base64}",
                             KLD_OIP_CUDA_HANDLE_BYTES);
    if ((status = kld_json_keys(handle, "raw_handle", handle_keys, err)) ||
        (status = kld_json_whole(cJSON_GetObjectItemCaseSensitive(root, "device_id"), "device_id",
                                 &result->device_id, err)) ||
        (status = kld_json_whole(cJSON_GetObjectItemCaseSensitive(root, "byte_size"), "byte_size",
                                 &result->byte_size, err)))
        return status;
    return result->byte_size ? KLD_OK
                             : kld_error_set(err, KLD_INVALID, "byte_size must be greater than 0");
}

enum kld_status kld_oip_parse_register_cuda(const char *text, size_t bytes,
                                            struct kld_oip_register_cuda *ret_register,
                                            struct kld_error *err) {
    struct kld_oip_register_cuda result;
    cJSON *root;
    enum kld_status status = kld_json_parse(text, bytes, &root, NULL, err);
    if (status)
        return status;
    status = read_register_cuda(root, &result, err);
    cJSON_Delete(root);
    if (!status)
        *ret_register = result;
    return status;
}

enum kld_status kld_oip_parse_index(const char *text, size_t bytes, bool *ret_ready,
                                    struct kld_error *err) {
    static const char *const keys[] = {"ready", NULL};
    cJSON *root;
    if (bytes == 0) {
        *ret_ready = false;
        return KLD_OK;
    }
    enum kld_status status = kld_json_parse(text, bytes, &root, NULL, err);
    if (status)
        return status;
    const cJSON *ready = cJSON_GetObjectItemCaseSensitive(root, "ready");
    if (!cJSON_IsObject(root) || (ready && !cJSON_IsBool(ready)))
        status = kld_error_set(err, KLD_INVALID, "expected {\"ready\": true or false}");
    else
        status = kld_json_keys(root, "index", keys, err);
    if (!status)
        *ret_ready = cJSON_IsTrue(ready);
    cJSON_Delete(root);
    return status;
}
