/* wire.c - sizes and checks of frames; SUBMIT to and from struct kld_op.
 * Pure: no allocation, no I/O. Regions are not looked up here (server/worker/session.c). Any
 * thread. */
#include "proto/wire.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the frames are used as they are");
_Static_assert(sizeof(struct kld_frame_header) == 16, "frame header");
_Static_assert(sizeof(struct kld_frame_hello) == 88, "HELLO");
_Static_assert(sizeof(struct kld_wire_device) == 80, "device entry");
_Static_assert(sizeof(struct kld_frame_welcome) == 80 + 80 * KLD_WIRE_DEVICES_MAX, "WELCOME");
_Static_assert(sizeof(struct kld_frame_region_add) == 128, "REGION_ADD");
_Static_assert(sizeof(struct kld_frame_region_drop) == 24, "REGION_DROP");
_Static_assert(sizeof(struct kld_frame_copy) == 64, "COPY");
_Static_assert(sizeof(struct kld_wire_tensor) == 32, "tensor");
_Static_assert(sizeof(struct kld_frame_submit) == 464, "SUBMIT");
_Static_assert(sizeof(struct kld_frame_cancel) == 24, "CANCEL");
_Static_assert(sizeof(struct kld_frame_region) == 32, "REGION");
_Static_assert(sizeof(struct kld_frame_done) == 64, "DONE");
_Static_assert(sizeof(struct kld_frame_error) == 24 + KLD_ERROR_TEXT_MAX, "ERROR");
_Static_assert(sizeof(struct kld_frame_stats_reply) == 104, "STATS_REPLY");
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
    return frame->header.type == KLD_FRAME_REGION_ADD &&
           frame->as_REGION_ADD.kind == KLD_REGION_MEMFD;
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
    if (submit->flags != 0)
        return kld_error_set(err, KLD_INVALID, "SUBMIT with unknown flags 0x%x", submit->flags);
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
