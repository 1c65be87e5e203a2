/* reply.c - the reply to an infer request that was computed: its JSON and binary outputs, sent from
 * where they were computed if they are not small (infer.h). Loop thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/infer.h"
#include "server/gateway/staging.h"

#define COPIED_BYTES_MAX (16 << 10) /* half of what MHD has for the connection anyway */

static void response_sent(void *user) {
    struct kld_infer *infer = user;
    infer->in_response = false;
    kld_infer_let_go(infer);
}

static struct MHD_Response *packed_response(struct kld_infer *infer) {
    struct MHD_IoVec part = {kld_staging_at(infer->gateway->staging, infer->packed_offset),
                             infer->packed_bytes};
    struct MHD_Response *response = MHD_create_response_from_iovec(&part, 1, response_sent, infer);
    infer->in_response = response != NULL;
    if (!response)
        return NULL;
    kld_stats_add(infer->gateway->stats, KLD_STAT_http_sent_bytes_total,
                  (int64_t)infer->packed_bytes);
    kld_exchange_say_packed(&response, infer->coding);
    return response;
}

static struct MHD_Response *copied(const struct MHD_IoVec *part, unsigned parts, uint64_t bytes) {
    char *copy = malloc(bytes), *to = copy;
    if (!copy)
        return NULL;
    for (unsigned i = 0; i < parts; to += part[i++].iov_len)
        if (part[i].iov_len > 0 && part[i].iov_base)
            memcpy(to, part[i].iov_base, part[i].iov_len);
    struct MHD_Response *response =
        MHD_create_response_from_buffer(bytes, copy, MHD_RESPMEM_MUST_FREE);
    if (!response)
        free(copy);
    return response;
}

/* MHD (0.9.75) sends the head of a reply in several parts on its own, and that call costs more than
 * to copy what is small. A request whose reply is a copy holds nothing any more. */
static struct MHD_Response *response_of(struct kld_infer *infer, const struct MHD_IoVec *part,
                                        unsigned parts, uint64_t bytes) {
    if (bytes <= COPIED_BYTES_MAX)
        return copied(part, parts, bytes);
    struct MHD_Response *response =
        MHD_create_response_from_iovec(part, parts, response_sent, infer);
    infer->in_response = response != NULL;
    return response;
}

static struct MHD_Response *make_response(struct kld_infer *infer, bool *ret_binary) {
    struct MHD_IoVec part[1 + KLD_OIP_OUTPUTS_MAX] = {{infer->reply.data, infer->reply.length}};
    unsigned parts = 1;
    uint64_t bytes = infer->reply.length;
    bool in_buffer = false;
    *ret_binary = false;
    if (infer->packed_bytes)
        return packed_response(infer);
    for (uint32_t i = 0; i < infer->request.output_count; i++) {
        uint32_t index = infer->request.input_count + i;
        if (infer->request.output[i].where != KLD_OIP_BINARY)
            continue;
        in_buffer = in_buffer || infer->in_buffer[index];
        if (!infer->in_buffer[index])
            part[parts].iov_base = kld_infer_bytes(infer, index);
        part[parts++].iov_len = infer->request.output[i].bytes;
        bytes += infer->request.output[i].bytes;
    }
    *ret_binary = parts > 1;
    kld_stats_add(infer->gateway->stats, KLD_STAT_http_sent_bytes_total, (int64_t)bytes);
    if (!in_buffer)
        return response_of(infer, part, parts, bytes);
    struct MHD_Response *response = kld_bulk_response(infer, bytes, response_sent);
    infer->in_response = response != NULL;
    return response;
}

void kld_infer_reply(struct kld_infer *infer) {
    bool binary;
    char length[24];
    struct MHD_Response *response = make_response(infer, &binary);
    kld_exchange_add_header(&response, MHD_HTTP_HEADER_CONTENT_TYPE,
                            binary ? "application/octet-stream" : "application/json");
    if (binary) {
        snprintf(length, sizeof length, "%zu", infer->reply.length);
        kld_exchange_add_header(&response, "Inference-Header-Content-Length", length);
    }
    kld_infer_count(infer, response ? KLD_OK : KLD_NO_MEMORY);
    kld_exchange_reply(infer->exchange, 200, response);
    kld_infer_let_go(infer);
}
