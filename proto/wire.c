/* wire.c - sizes and checks of frames; SUBMIT to and from struct kld_op.
 * Pure: no allocation, no I/O. Regions are not looked up here (server/worker/session.c). Any
 * thread. */
#include "proto/wire.h"

#include <stdbool.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the frames are used as they are");
_Static_assert(sizeof(struct kld_frame_header) == 16, "frame header");
_Static_assert(sizeof(struct kld_frame_hello) == 88, "HELLO");
_Static_assert(sizeof(struct kld_wire_device) == 80, "device entry");
_Static_assert(sizeof(struct kld_frame_welcome) == 88 + 80 * KLD_WIRE_DEVICES_MAX, "WELCOME");
_Static_assert(sizeof(struct kld_frame_region_add) == 128, "REGION_ADD");
_Static_assert(sizeof(struct kld_frame_region_grow) == 40, "REGION_GROW");
_Static_assert(sizeof(struct kld_frame_region_drop) == 24, "REGION_DROP");
_Static_assert(sizeof(struct kld_frame_copy) == 64, "COPY");
_Static_assert(sizeof(struct kld_wire_tensor) == 32, "tensor");
_Static_assert(sizeof(struct kld_frame_submit) == 480, "SUBMIT");
_Static_assert(sizeof(struct kld_frame_cancel) == 24, "CANCEL");
_Static_assert(sizeof(struct kld_frame_region) == 32, "REGION");
_Static_assert(sizeof(struct kld_frame_done) == 64, "DONE");
_Static_assert(sizeof(struct kld_frame_error) == 24 + KLD_ERROR_TEXT_MAX, "ERROR");
_Static_assert(sizeof(struct kld_frame_stats_reply) == 104, "STATS_REPLY");
_Static_assert(sizeof(struct kld_frame_event_add) == 104, "EVENT_ADD");
_Static_assert(sizeof(struct kld_frame_fence_add) == 32, "FENCE_ADD");
_Static_assert(sizeof(struct kld_frame_event) == 88, "EVENT");
_Static_assert(sizeof(struct kld_frame_event_drop) == 24, "EVENT_DROP");
_Static_assert(sizeof(struct kld_wire_description) == 88, "description");
_Static_assert(sizeof(struct kld_frame_publish) == 224, "PUBLISH");
_Static_assert(sizeof(struct kld_frame_attach) == 88, "ATTACH");
_Static_assert(sizeof(struct kld_frame_name) == 80, "DETACH");
_Static_assert(sizeof(struct kld_frame_attached) == 128, "ATTACHED");
_Static_assert(sizeof(struct kld_frame_stream) == 24, "STREAM");
_Static_assert(sizeof(struct kld_frame_trace) == 56, "TRACE");
_Static_assert(KLD_NUMBER_COUNT == 7 && KLD_SLOT_COUNT == 9, "SUBMIT lists them all");

size_t kld_frame_bytes(uint16_t type) {
    switch (type) {
#define X(NAME, number, suffix)                                                                    \
    case number: return sizeof(struct kld_frame_##suffix);
        KLD_FRAME_MAP(X)
#undef X
    default: return 0;
    }
}

const char *kld_frame_name(uint16_t type) {
    switch (type) {
#define X(NAME, number, suffix)                                                                    \
    case number: return #NAME;
        KLD_FRAME_MAP(X)
#undef X
    default: return "unknown";
    }
}

/* Descriptors that this very frame must bring. */
static unsigned expected_fds(const union kld_frame *frame) {
    return frame->header.type == KLD_FRAME_REGION_GROW ||
           (frame->header.type == KLD_FRAME_REGION_ADD &&
            (frame->as_REGION_ADD.kind == KLD_REGION_MEMFD ||
             frame->as_REGION_ADD.kind == KLD_REGION_CUDA_FD));
}

void kld_frame_init(union kld_frame *frame, enum kld_frame_type type, uint64_t request) {
    memset(frame, 0, sizeof *frame);
    frame->header.length = (uint32_t)kld_frame_bytes((uint16_t)type);
    frame->header.version = KLD_WIRE_VERSION;
    frame->header.type = (uint16_t)type;
    frame->header.request = request;
}

enum kld_status kld_frame_check(const void *data, size_t bytes, unsigned fds, int truncated,
                                uint64_t *ret_request, struct kld_error *err) {
    struct kld_frame_header header;
    *ret_request = 0;
    if (bytes < sizeof header)
        return kld_error_set(err, KLD_INVALID, "frame of %zu bytes; a header alone has %zu", bytes,
                             sizeof header);
    memcpy(&header, data, sizeof header);
    *ret_request = header.request;
    if (header.version != KLD_WIRE_VERSION)
        return kld_error_set(err, KLD_VERSION, "frame of protocol version %u; expected %d",
                             header.version, KLD_WIRE_VERSION);
    size_t expected = kld_frame_bytes(header.type);
    if (expected == 0)
        return kld_error_set(err, KLD_INVALID, "unknown frame type %u", header.type);
    bool whole = truncated ? header.length > bytes : header.length == bytes;
    if (whole && header.length != expected)
        return kld_error_set(err, KLD_VERSION,
                             "%s frame of %u bytes; expected %zu: client and server are of "
                             "different releases, take both from one",
                             kld_frame_name(header.type), header.length, expected);
    if (truncated || bytes != expected || header.length != expected)
        return kld_error_set(err, KLD_INVALID,
                             "%s frame of %zu bytes whose length field says %u; expected %zu%s",
                             kld_frame_name(header.type), bytes, header.length, expected,
                             truncated ? " (cut, or with too many descriptors)" : "");
    if (header.request == 0 && header.type != KLD_FRAME_ERROR)
        return kld_error_set(err, KLD_INVALID, "%s frame with request number 0",
                             kld_frame_name(header.type));
    union kld_frame frame;
    memcpy(&frame, data, bytes);
    if (fds != expected_fds(&frame))
        return kld_error_set(err, KLD_INVALID, "%s frame with %u file descriptors; expected %u",
                             kld_frame_name(header.type), fds, expected_fds(&frame));
    return KLD_OK;
}

bool kld_frame_may_follow(uint16_t type) {
    return type == KLD_FRAME_SUBMIT || type == KLD_FRAME_COPY || type == KLD_FRAME_TRACE ||
           type == KLD_FRAME_DONE || type == KLD_FRAME_ERROR;
}

/* Does a packet begin with a frame that others may follow, and do some? */
static bool is_several(const void *data, size_t bytes) {
    struct kld_frame_header header;
    if (bytes < sizeof header)
        return false;
    memcpy(&header, data, sizeof header);
    return header.length < bytes && header.length == kld_frame_bytes(header.type) &&
           kld_frame_may_follow(header.type);
}

enum kld_status kld_packet_check(const void *data, size_t bytes, unsigned fds, int truncated,
                                 unsigned *ret_frames, uint64_t *ret_request,
                                 struct kld_error *err) {
    *ret_frames = 1;
    if (truncated || !is_several(data, bytes))
        return kld_frame_check(data, bytes, fds, truncated, ret_request, err);
    struct kld_frame_header header;
    unsigned frames = 0;
    memcpy(&header, data, sizeof header);
    *ret_request = header.request;
    for (size_t at = 0; at < bytes; at += header.length, frames++) {
        const uint8_t *frame = (const uint8_t *)data + at;
        uint64_t request;
        struct kld_error error;
        if (frames == KLD_WIRE_PACKET_FRAMES_MAX)
            return kld_error_set(err, KLD_INVALID, "packet with more than %d frames",
                                 KLD_WIRE_PACKET_FRAMES_MAX);
        if (bytes - at >= sizeof header)
            memcpy(&header, frame, sizeof header);
        /* What follows it is not the frame's, and what it wants more is not there. */
        size_t own = bytes - at < header.length ? bytes - at : header.length;
        if (kld_frame_check(frame, own, 0, 0, &request, &error))
            return kld_error_set(err, error.status, "frame %u of its packet: %.200s", frames + 1,
                                 error.text);
        if (!kld_frame_may_follow(header.type))
            return kld_error_set(err, KLD_INVALID, "frame %u of its packet: %s must be alone",
                                 frames + 1, kld_frame_name(header.type));
    }
    if (fds)
        return kld_error_set(err, KLD_INVALID,
                             "packet of %u frames with %u file descriptors; expected 0", frames,
                             fds);
    *ret_frames = frames;
    return KLD_OK;
}

void kld_submit_encode(const struct kld_op *op, struct kld_frame_submit *submit) {
    submit->divergence = op->divergence;
    submit->reduction = op->reduction;
    submit->predictions_form = op->predictions_form;
    submit->targets_form = op->targets_form;
    submit->rank = op->rank;
    submit->given = op->given;
    for (uint32_t i = 0; i < KLD_RANK_MAX; i++)
        submit->shape[i] = i < op->rank ? op->shape[i] : 0;
    memcpy(submit->number, op->number, sizeof submit->number);
    for (int i = 0; i < KLD_SLOT_COUNT; i++) {
        const struct kld_tensor *from = &op->tensor[i];
        submit->tensor[i] = (struct kld_wire_tensor){0};
        if (from->dtype != KLD_DTYPE_ABSENT)
            submit->tensor[i] =
                (struct kld_wire_tensor){.dtype = from->dtype,
                                         .region = from->region,
                                         .offset_bytes = from->offset_bytes,
                                         .row_stride_bytes = from->row_stride_bytes};
    }
}

enum kld_status kld_submit_decode(const struct kld_frame_submit *submit, struct kld_op *ret_op,
                                  struct kld_error *err) {
    if (submit->flags & ~KLD_SUBMIT_EARLY)
        return kld_error_set(err, KLD_INVALID, "SUBMIT with unknown flags 0x%x; known: 0x%x, EARLY",
                             submit->flags & ~KLD_SUBMIT_EARLY, KLD_SUBMIT_EARLY);
    struct kld_op op;
    kld_op_init(&op);
    op.divergence = submit->divergence;
    op.reduction = submit->reduction;
    op.predictions_form = submit->predictions_form;
    op.targets_form = submit->targets_form;
    op.rank = submit->rank;
    op.given = submit->given;
    memcpy(op.shape, submit->shape, sizeof op.shape);
    for (uint32_t i = submit->rank; i < KLD_RANK_MAX; i++)
        if (submit->rank > 0 && submit->shape[i] != 0)
            return kld_error_set(err, KLD_INVALID,
                                 "the shape has a dimension beyond its rank of %u; expected 0",
                                 submit->rank);
    for (int i = 0; i < KLD_NUMBER_COUNT; i++)
        if (submit->given & (1u << i))
            op.number[i] = submit->number[i];
    for (int i = 0; i < KLD_SLOT_COUNT; i++) {
        const struct kld_wire_tensor *from = &submit->tensor[i];
        if (from->dtype == KLD_DTYPE_ABSENT &&
            (from->region || from->offset_bytes || from->row_stride_bytes || from->reserved))
            return kld_error_set(err, KLD_INVALID,
                                 "%s: a tensor of dtype 0; expected a dtype, or 0 in every field",
                                 kld_slot_name((uint32_t)i));
        if (from->dtype == KLD_DTYPE_ABSENT)
            continue;
        if (from->region == 0 || from->reserved != 0)
            return kld_error_set(err, KLD_INVALID, "%s: %s", kld_slot_name((uint32_t)i),
                                 from->region == 0 ? "region 0; expected the id of a region"
                                                   : "reserved field is not 0");
        op.tensor[i] = (struct kld_tensor){.dtype = from->dtype,
                                           .region = from->region,
                                           .offset_bytes = from->offset_bytes,
                                           .row_stride_bytes = from->row_stride_bytes};
    }
    *ret_op = op;
    return KLD_OK;
}

enum kld_status kld_name_check(const char name[KLD_WIRE_NAME_MAX], struct kld_error *err) {
    size_t length = strnlen(name, KLD_WIRE_NAME_MAX);
    bool good = length > 0 && length < KLD_WIRE_NAME_MAX;
    for (size_t i = 0; i < KLD_WIRE_NAME_MAX && good; i++)
        good = i < length ? name[i] > ' ' && name[i] <= '~' : name[i] == 0;
    return good ? KLD_OK
                : kld_error_set(err, KLD_INVALID,
                                "the name of a published tensor is 1 to %d printable letters "
                                "without blanks, padded with NUL",
                                KLD_WIRE_NAME_MAX - 1);
}

/* Rows times stride up to the end of the last row. */
static enum kld_status description_span(const struct kld_wire_description *tensor, uint64_t element,
                                        uint64_t *ret_bytes, struct kld_error *err) {
    uint64_t rows = 1, row_bytes = element, last;
    bool over = false;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        uint64_t *into = i + 1 < tensor->rank ? &rows : &row_bytes;
        if (tensor->shape[i] == 0)
            return kld_error_set(err, KLD_INVALID, "published tensor: dimension %u is 0", i);
        over = over || __builtin_mul_overflow(*into, tensor->shape[i], into);
    }
    uint64_t stride = tensor->row_stride_bytes ? tensor->row_stride_bytes : row_bytes;
    if (!over && (stride < row_bytes || stride % element != 0))
        return kld_error_set(err, KLD_INVALID,
                             "published tensor: a row stride of %llu bytes; expected a multiple of "
                             "%llu, at least %llu",
                             (unsigned long long)stride, (unsigned long long)element,
                             (unsigned long long)row_bytes);
    over = over || __builtin_mul_overflow(rows - 1, stride, &last) ||
           __builtin_add_overflow(last, row_bytes, ret_bytes);
    return over ? kld_error_set(err, KLD_INVALID, "published tensor: its size overflows 64 bits")
                : KLD_OK;
}

enum kld_status kld_description_check(const struct kld_wire_description *tensor,
                                      uint64_t offset_bytes, uint64_t region_bytes,
                                      uint64_t *ret_bytes, struct kld_error *err) {
    uint64_t element = kld_dtype_bytes(tensor->dtype), bytes = 0;
#define X(NAME, name, number, bytes) ", " #number " " name
    if (element == 0)
        return kld_error_set(err, KLD_INVALID,
                             "published tensor: unknown dtype number %u; known: %s", tensor->dtype,
                             KLD_DTYPE_MAP(X) + 2);
#undef X
#define X(NAME, name, number) ", " #number " " name
    if (tensor->form > KLD_FORM_LOGITS)
        return kld_error_set(err, KLD_INVALID,
                             "published tensor: unknown form number %u; known: %s", tensor->form,
                             KLD_FORM_MAP(X) + 2);
#undef X
    if (tensor->reserved != 0)
        return kld_error_set(err, KLD_INVALID, "published tensor: reserved field is not 0");
    if (tensor->rank == 0 || tensor->rank > KLD_RANK_MAX)
        return kld_error_set(err, KLD_INVALID, "published tensor: rank %u; expected 1 to %d",
                             tensor->rank, KLD_RANK_MAX);
    for (uint32_t i = tensor->rank; i < KLD_RANK_MAX; i++)
        if (tensor->shape[i] != 0)
            return kld_error_set(err, KLD_INVALID,
                                 "published tensor: a dimension beyond its rank of %u",
                                 tensor->rank);
    enum kld_status status = description_span(tensor, element, &bytes, err);
    if (status)
        return status;
    if (offset_bytes % element != 0)
        return kld_error_set(err, KLD_INVALID,
                             "published tensor: offset %llu is no multiple of its element",
                             (unsigned long long)offset_bytes);
    if (offset_bytes > region_bytes || bytes > region_bytes - offset_bytes)
        return kld_error_set(err, KLD_INVALID,
                             "published tensor: %llu bytes at offset %llu do not fit a region of "
                             "%llu bytes",
                             (unsigned long long)bytes, (unsigned long long)offset_bytes,
                             (unsigned long long)region_bytes);
    *ret_bytes = bytes;
    return KLD_OK;
}
