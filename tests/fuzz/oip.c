/* oip.c - libFuzzer over the JSON that HTTP clients send: the strict scanner, what cJSON makes of
 * the rest, the numbers of tensors, and the reply to what was accepted. Whatever is accepted must
 * fit what was promised about it; a promise broken is a crash here.
 *
 * Input: 1 byte that chooses the kind of body, the body. */
#include <stdlib.h>
#include <string.h>

#include "proto/oip.h"
#include "proto/oip_json.h"
#include "tests/fuzz/common/fuzz.h"

#define TENSOR_BYTES_MAX ((uint64_t)1 << 20)

/* Into memory of exactly the announced size, so that a byte too many is found. */
static void *decode(const struct kld_oip_tensor *input) {
    struct kld_error err;
    void *to = malloc(input->bytes ? input->bytes : 1);
    if (!to)
        abort();
    enum kld_status status = kld_oip_decode(input, to, &err);
    if (!status) {
        require(kld_oip_check_length(input, &err) == KLD_OK);
        return to;
    }
    require_error(status, &err);
    free(to);
    return NULL;
}

/* The reply is JSON again, inside its announced size. */
static void reply(const struct kld_oip_request *request, void *values, uint64_t values_bytes) {
    const void *value[KLD_OIP_OUTPUTS_MAX];
    struct kld_error err;
    cJSON *root;
    for (uint32_t i = 0; i < request->output_count; i++) {
        if (request->output[i].bytes > values_bytes)
            return;
        value[i] = values;
    }
    uint64_t most = kld_oip_reply_bytes_max(request);
    struct kld_oip_text text = {.data = malloc(most), .capacity = most};
    if (!text.data)
        return;
    kld_oip_reply(&text, request, value);
    require(!text.overflow && text.length <= most);
    enum kld_status status = kld_json_parse(text.data, text.length, &root, NULL, &err);
    require(status == KLD_OK || status == KLD_TOO_LARGE); /* too large to be read whole: numbers */
    if (!status)
        cJSON_Delete(root);
    free(text.data);
}

/* As `request`, whose texts begin at `text`, but for where this one's are. */
static void require_same(const struct kld_oip_request *request, const char *text,
                         struct kld_oip_request *other, const char *other_text) {
    for (uint32_t i = 0; i < other->input_count; i++) {
        struct kld_oip_tensor *input = &other->input[i];
        if (!input->data)
            continue;
        require(input->data >= other_text && input->data_end >= input->data);
        input->data = text + (input->data - other_text);
        input->data_end = text + (input->data_end - other_text);
    }
    require(memcmp(other, request, sizeof *other) == 0);
}

/* A memo, of this text or of the last one, changes nothing. Each time the text lies in memory of
 * its own, which is gone before the next: whatever the memo kept of it is found by the sanitizer.
 */
static void remembered(const char *text, size_t bytes, enum kld_status status,
                       const struct kld_oip_request *request) {
    static struct kld_oip_memo memo;
    struct kld_oip_request other;
    struct kld_error err;
    for (int i = 0; i < 2; i++) {
        char *copy = malloc(bytes ? bytes : 1);
        if (!copy)
            abort();
        memcpy(copy, text, bytes);
        require(kld_oip_parse(copy, bytes, &memo, &other, &err) == status);
        if (!status)
            require_same(request, text, &other, copy);
        free(copy);
    }
}

static void infer(const char *text, size_t bytes) {
    struct kld_oip_request request;
    struct kld_error err;
    uint64_t tail = 0;
    enum kld_status status = kld_oip_parse(text, bytes, NULL, &request, &err);
    remembered(text, bytes, status, &request);
    if (status) {
        require_error(status, &err);
        return;
    }
    require(request.input_count >= 2 && request.input_count <= KLD_OIP_INPUTS_MAX);
    require(request.output_count >= 1 && request.output_count <= KLD_OIP_OUTPUTS_MAX);
    for (uint32_t i = 0; i < request.input_count; i++) {
        const struct kld_oip_tensor *input = &request.input[i];
        require(input->bytes == request.geometry.slot[input->slot].span_bytes);
        require((input->where == KLD_OIP_JSON) == (input->data != NULL));
        if (input->where == KLD_OIP_BINARY) {
            require(input->tail_offset_bytes == tail);
            tail += input->bytes;
        }
        if (input->where != KLD_OIP_JSON || input->bytes > TENSOR_BYTES_MAX)
            continue;
        require(input->data >= text && input->data_end <= text + bytes);
        void *values = decode(input);
        if (values)
            reply(&request, values, input->bytes);
        free(values);
    }
    require(tail == request.tail_bytes);
    for (uint32_t i = 0; i < request.output_count; i++) {
        const struct kld_oip_tensor *output = &request.output[i];
        require(output->bytes == request.geometry.slot[output->slot].span_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct kld_oip_register wanted;
    struct kld_error err;
    if (!bytes)
        return 0;
    const char *text = (const char *)data + 1;
    enum kld_status status = KLD_OK;
    struct kld_oip_register_cuda cuda;
    bool only_ready;
    switch (data[0] % 5) {
    case 0: status = kld_oip_parse_register(text, bytes - 1, &wanted, &err); break;
    case 1: status = kld_oip_parse_index(text, bytes - 1, &only_ready, &err); break;
    case 2: status = kld_oip_parse_register_cuda(text, bytes - 1, &cuda, &err); break;
    default: infer(text, bytes - 1);
    }
    if (status)
        require_error(status, &err);
    return 0;
}
