/* oip_parse.c - the text of an infer request to struct kld_oip_request, anew or from what the last
 * one was; and what may be a name there. What the keys mean is in oip.c. No I/O; any thread. */
#include <stdlib.h>
#include <string.h>

#include "proto/oip.h"
#include "proto/oip_json.h"
#include "proto/utf8.h"

static enum kld_status parse_skeleton(const char *skeleton, size_t bytes,
                                      const struct kld_json_span *spans,
                                      struct kld_oip_request *request, struct kld_error *err) {
    cJSON *root;
    memset(request, 0, sizeof *request);
    kld_op_init(&request->op);
    enum kld_status status = kld_json_tree(skeleton, bytes, &root, err);
    if (status)
        return status;
    status = kld_oip_read(root, spans, request, err);
    cJSON_Delete(root);
    return status;
}

/* All that a request asks for is in the skeleton: with the same one only the arrays are others. */
static void recall(const struct kld_oip_memo *memo, const struct kld_json_span *spans,
                   struct kld_oip_request *request) {
    *request = memo->request;
    for (uint32_t i = 0; i < request->input_count; i++)
        if (request->input[i].where == KLD_OIP_JSON) {
            request->input[i].data = spans[i].begin;
            request->input[i].data_end = spans[i].end;
        }
}

_Static_assert(KLD_OIP_INPUTS_MAX <= KLD_JSON_ARRAYS_MAX, "whoever has more is refused");

static void remember(struct kld_oip_memo *memo, const char *text, const char *skeleton,
                     size_t length, const struct kld_json_span *spans,
                     const struct kld_oip_request *request) {
    size_t missing = 0; /* of what is before */
    for (size_t i = 0; i < KLD_OIP_INPUTS_MAX; i++) {
        memo->array[i] = 0;
        if (!spans[i].begin)
            continue;
        memo->array[i] = (uint32_t)((size_t)(spans[i].begin - text) - missing);
        missing += (size_t)(spans[i].end - spans[i].begin) - strlen("[]");
    }
    memcpy(memo->text, skeleton, length);
    memo->bytes = length;
    memo->request = *request;
}

enum kld_status kld_oip_parse(const char *text, size_t bytes, struct kld_oip_memo *memo,
                              struct kld_oip_request *ret_request, struct kld_error *err) {
    struct kld_json_span spans[KLD_JSON_ARRAYS_MAX];
    char *skeleton;
    size_t length;
    if (memo && memo->bytes &&
        kld_json_is_again(text, bytes, memo->text, memo->bytes, memo->array, KLD_OIP_INPUTS_MAX,
                          spans)) {
        recall(memo, spans, ret_request);
        return KLD_OK;
    }
    enum kld_status status = kld_json_skeleton(text, bytes, &skeleton, &length, spans, err);
    if (status)
        return status;
    status = parse_skeleton(skeleton, length, spans, ret_request, err);
    if (status == KLD_OK && memo && length <= sizeof memo->text)
        remember(memo, text, skeleton, length, spans, ret_request);
    free(skeleton);
    return status;
}

enum kld_status kld_oip_check_name(const char *name, const char *what, struct kld_error *err) {
    size_t bytes = strnlen(name, KLD_OIP_NAME_MAX), at = 0, length = 0;
    if (bytes == 0 || bytes == KLD_OIP_NAME_MAX)
        return kld_error_set(err, KLD_INVALID, "the name of a %s has 1 to %d bytes", what,
                             KLD_OIP_NAME_MAX - 1);
    while (at < bytes && (length = kld_utf8_sequence(name + at, bytes - at)) > 0)
        at += length;
    return at == bytes ? KLD_OK
                       : kld_error_set(err, KLD_INVALID,
                                       "byte %zu of the name of a %s is a NUL or begins no UTF-8 "
                                       "sequence; expected UTF-8",
                                       at, what);
}
