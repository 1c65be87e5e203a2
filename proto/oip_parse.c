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

enum kld_status kld_oip_parse(const char *text, size_t bytes, struct kld_oip_memo *memo,
                              struct kld_oip_request *ret_request, struct kld_error *err) {
    struct kld_json_span spans[KLD_JSON_ARRAYS_MAX];
    char *skeleton;
    size_t length;
    enum kld_status status = kld_json_skeleton(text, bytes, &skeleton, &length, spans, err);
    if (status)
        return status;
    if (memo && length && memo->bytes == length && memcmp(memo->text, skeleton, length) == 0) {
        recall(memo, spans, ret_request);
    } else {
        status = parse_skeleton(skeleton, length, spans, ret_request, err);
        if (status == KLD_OK && memo && length <= sizeof memo->text) {
            memcpy(memo->text, skeleton, length);
            memo->bytes = length;
            memo->request = *ret_request;
        }
    }
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
                                       "byte %zu of the name of a %s, 0x%02x, begins no UTF-8 "
                                       "sequence; expected UTF-8",
                                       at, what, (unsigned char)name[at]);
}
