/* http_request.c - the body of an infer request: its JSON, and the tensors read straight from where
 * they are, row by row, while libcurl sends. Nothing is copied into a second body. The thread that
 * owns the connection. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/http.h"

#define TIMEOUT_US_MAX ((1ull << 53) - 1) /* JSON has no larger one; 285 years are none */

/* ---- The JSON ---------------------------------------------------------------------------------
 */

__attribute__((format(printf, 2, 3))) static void append(struct http_call *call, const char *format,
                                                         ...) {
    va_list arguments;
    uint64_t left = sizeof call->head - call->head_bytes;
    va_start(arguments, format);
    int length = vsnprintf(call->head + call->head_bytes, left, format, arguments);
    va_end(arguments);
    /* Full: one past the end of what fits, seen at the end. */
    call->head_bytes += length > 0 && (uint64_t)length < left ? (uint64_t)length : left;
}

static void append_shape(struct http_call *call, enum kld_slot slot) {
    const struct kld_op *op = &call->base.request.op;
    const struct kld_slot_geometry *at = &call->base.geometry.slot[slot];
    uint64_t columns = at->row_bytes / kld_dtype_bytes(op->tensor[slot].dtype);
    if (columns == call->base.geometry.classes && at->rows == call->base.geometry.rows &&
        slot != KLD_SLOT_ROW_WEIGHTS && slot != KLD_SLOT_ROW_MASK &&
        !(slot == KLD_SLOT_GRAD_OUTPUT && op->reduction != KLD_REDUCTION_NONE)) {
        for (uint32_t i = 0; i < op->rank; i++)
            append(call, "%c%" PRIu64, i ? ',' : '[', op->shape[i]);
        append(call, "]");
        return;
    }
    append(call, "[%" PRIu64 "]", at->rows);
}

/* The caller's process may have a locale with another decimal point than JSON's. */
static void append_number(struct http_call *call, const char *name, double number) {
    char text[64];
    snprintf(text, sizeof text, "%.17g", number);
    size_t whole = strspn(text, "-0123456789");
    const char *rest = text + whole + strcspn(text + whole, "0123456789e");
    append(call, ",\"%s\":%.*s%s%s", name, (int)whole, text, rest > text + whole ? "." : "", rest);
}

static void append_parameters(struct http_call *call) {
    static const char *const names[KLD_NUMBER_COUNT] = {
#define X(NAME, name, value) name,
        KLD_NUMBER_MAP(X)
#undef X
    };
    const struct kld_op *op = &call->base.request.op;
    append(call,
           "{\"parameters\":{\"divergence\":\"%s\",\"reduction\":\"%s\",\"predictions_form\":\"%s\""
           ",\"targets_form\":\"%s\"",
           kld_divergence_name(op->divergence), kld_reduction_name(op->reduction),
           kld_form_name(op->predictions_form), kld_form_name(op->targets_form));
    for (int i = 0; i < KLD_NUMBER_COUNT; i++)
        if (op->given & (1u << i))
            append_number(call, names[i], op->number[i]);
    if (call->base.deadline_ns != KLD_NEVER) {
        uint64_t now = kld_now_ns();
        uint64_t left = call->base.deadline_ns > now ? call->base.deadline_ns - now : 0;
        if (left / 1000 < TIMEOUT_US_MAX)
            append(call, ",\"timeout\":%" PRIu64, left / 1000 + 1);
    }
    append(call, "}");
}

enum kld_status kld_http_head_write(struct http_call *call, struct kld_error *err) {
    const struct kld_op *op = &call->base.request.op;
    const struct kld_geometry *geometry = &call->base.geometry;
    uint64_t tail = 0;
    call->head_bytes = call->sent_bytes = 0;
    append_parameters(call);
    append(call, ",\"inputs\":");
    char before = '[';
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!op->tensor[slot].dtype || kld_slot_is_output(slot))
            continue;
        uint64_t bytes = geometry->slot[slot].rows * geometry->slot[slot].row_bytes;
        tail += bytes;
        append(call, "%c{\"name\":\"%s\",\"datatype\":\"%s\",\"shape\":", before,
               kld_slot_name(slot), kld_dtype_name(op->tensor[slot].dtype));
        append_shape(call, (enum kld_slot)slot);
        append(call, ",\"parameters\":{\"binary_data_size\":%" PRIu64 "}}", bytes);
        before = ',';
    }
    append(call, "],\"outputs\":");
    before = '[';
    bool any = false;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++)
        any = any || (kld_slot_is_output(slot) && op->tensor[slot].dtype);
    /* A scalar loss comes with every answer. With no output at all, the loss is asked for too: the
     * protocol knows no request without one. */
    call->wants_loss = geometry->scalar;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        bool wanted =
            op->tensor[slot].dtype || (slot == KLD_SLOT_LOSS && (call->wants_loss || !any));
        if (!kld_slot_is_output(slot) || !wanted)
            continue;
        bool wide = slot == KLD_SLOT_ROW_LOSS && op->tensor[slot].dtype != geometry->loss_dtype;
        append(call, "%c{\"name\":\"%s\",\"parameters\":{\"binary_data\":true%s}}", before,
               kld_slot_name(slot), wide ? ",\"datatype\":\"FP64\"" : "");
        before = ',';
    }
    append(call, "]}");
    if (call->head_bytes >= sizeof call->head)
        return kld_error_set(err, KLD_INTERNAL, "the request's JSON is longer than %d bytes",
                             KLD_HTTP_HEAD_MAX);
    call->body_bytes = call->head_bytes + tail;
    return KLD_OK;
}

/* ---- The tensors ------------------------------------------------------------------------------
 */

void kld_http_tensor_read(char *to, const char *tensor, const struct kld_slot_geometry *geometry,
                          uint64_t at, uint64_t bytes) {
    if (geometry->stride_bytes == geometry->row_bytes) {
        memcpy(to, tensor + at, bytes);
        return;
    }
    while (bytes > 0) {
        uint64_t row = at / geometry->row_bytes, inside = at % geometry->row_bytes;
        uint64_t part = geometry->row_bytes - inside;
        part = part < bytes ? part : bytes;
        memcpy(to, tensor + row * geometry->stride_bytes + inside, part);
        to += part;
        at += part;
        bytes -= part;
    }
}

void kld_http_tensor_write(char *tensor, const struct kld_slot_geometry *geometry, uint64_t at,
                           const char *from, uint64_t bytes) {
    if (geometry->stride_bytes == geometry->row_bytes) {
        memcpy(tensor + at, from, bytes);
        return;
    }
    while (bytes > 0) {
        uint64_t row = at / geometry->row_bytes, inside = at % geometry->row_bytes;
        uint64_t part = geometry->row_bytes - inside;
        part = part < bytes ? part : bytes;
        memcpy(tensor + row * geometry->stride_bytes + inside, from, part);
        from += part;
        at += part;
        bytes -= part;
    }
}

static const char *tensor_data(const struct http_call *call, uint32_t slot) {
    const struct kld_bytes *bytes = &call->base.request.bytes[slot];
    return bytes->region ? (const char *)bytes->region->data + bytes->offset_bytes : bytes->data;
}

/* CURLOPT_READFUNCTION: the next bytes of head and tensors. */
size_t kld_http_body_read(char *to, size_t size, size_t count, void *user) {
    struct http_call *call = user;
    uint64_t room = size * count, done = 0;
    uint64_t start = 0, end = call->head_bytes; /* of the piece looked at, in the body */
    uint32_t slot = 0;
    while (done < room && call->sent_bytes < call->body_bytes) {
        if (call->sent_bytes < end) {
            uint64_t part =
                end - call->sent_bytes < room - done ? end - call->sent_bytes : room - done;
            if (start == 0)
                memcpy(to + done, call->head + call->sent_bytes, part);
            else
                kld_http_tensor_read(to + done, tensor_data(call, slot - 1),
                                     &call->base.geometry.slot[slot - 1], call->sent_bytes - start,
                                     part);
            call->sent_bytes += part;
            done += part;
            continue;
        }
        while (slot < KLD_SLOT_COUNT &&
               (kld_slot_is_output(slot) || !call->base.geometry.slot[slot].rows))
            slot++;
        if (slot >= KLD_SLOT_COUNT)
            return CURL_READFUNC_ABORT;
        start = end;
        end += call->base.geometry.slot[slot].rows * call->base.geometry.slot[slot].row_bytes;
        slot++;
    }
    return done;
}

/* CURLOPT_SEEKFUNCTION: libcurl starts again on a fresh connection. */
int kld_http_body_seek(void *user, curl_off_t offset, int origin) {
    struct http_call *call = user;
    if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > call->body_bytes)
        return CURL_SEEKFUNC_FAIL;
    call->sent_bytes = (uint64_t)offset;
    return CURL_SEEKFUNC_OK;
}
