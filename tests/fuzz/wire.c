/* wire.c - libFuzzer over everything that looks at bytes of a Unix client before memory is
 * touched: the frame's form, the decoding of SUBMIT, the check of the op and of its bounds, and
 * the description of a published tensor.
 * Whatever passes must keep the promises that the kernels build on; a promise broken is a crash
 * here.
 *
 * Input: 1 byte of flags (descriptors 0-3, truncation), 2 bytes for the size of regions, the frame.
 */
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"
#include "tests/fuzz/common/fuzz.h"

/* Every byte that a launch would touch lies in the region, and no output lies over another tensor
 * but its own. */
static void require_inside(const struct kld_op *op, const struct kld_geometry *geometry,
                           enum kld_slot slot, uint64_t region_bytes) {
    const struct kld_slot_geometry *at = &geometry->slot[slot];
    uint64_t last_row, end;
    require(at->rows > 0 && at->row_bytes > 0 && at->stride_bytes >= at->row_bytes);
    require(!__builtin_mul_overflow(at->rows - 1, at->stride_bytes, &last_row));
    require(!__builtin_add_overflow(last_row, at->row_bytes, &end));
    require(end == at->span_bytes);
    require(!__builtin_add_overflow(op->tensor[slot].offset_bytes, end, &end));
    require(end <= region_bytes);
    require(op->tensor[slot].offset_bytes % kld_dtype_bytes(op->tensor[slot].dtype) == 0);
}

static void submit(const struct kld_frame_submit *frame, uint64_t region_bytes) {
    struct kld_error err = {.status = KLD_OK};
    struct kld_op op;
    struct kld_geometry geometry;
    enum kld_status status = kld_submit_decode(frame, &op, &err);
    if (status) {
        require_error(status, &err);
        return;
    }
    if ((status = kld_op_check(&op, &geometry, &err))) {
        require_error(status, &err);
        return;
    }
    require(geometry.elements == geometry.rows * geometry.classes);
    require(geometry.elements > 0 && geometry.elements <= KLD_ELEMENTS_MAX);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        require((geometry.slot[slot].rows != 0) == (op.tensor[slot].dtype != KLD_DTYPE_ABSENT));
        if (op.tensor[slot].dtype == KLD_DTYPE_ABSENT)
            continue;
        status = kld_op_check_bounds(&op, &geometry, (enum kld_slot)slot, region_bytes, &err);
        if (status)
            require_error(status, &err);
        else
            require_inside(&op, &geometry, (enum kld_slot)slot, region_bytes);
    }
    /* What was decoded can be said again. */
    union kld_frame again;
    struct kld_op twin;
    kld_frame_init(&again, KLD_FRAME_SUBMIT, 1);
    kld_submit_encode(&op, &again.as_SUBMIT);
    require(kld_submit_decode(&again.as_SUBMIT, &twin, &err) == KLD_OK);
    require(memcmp(twin.tensor, op.tensor, sizeof op.tensor) == 0 && twin.rank == op.rank);
}

/* What passes is a name, and a tensor whose last byte lies in the region. */
static void publish(const struct kld_frame_publish *frame, uint64_t region_bytes) {
    struct kld_error err = {.status = KLD_OK};
    const struct kld_wire_description *tensor = &frame->tensor;
    uint64_t tensor_bytes, end, elements = 1;
    enum kld_status status = kld_name_check(frame->name, &err);
    if (status)
        require_error(status, &err);
    else
        require(frame->name[0] > ' ' && frame->name[KLD_WIRE_NAME_MAX - 1] == 0);
    status = kld_description_check(tensor, frame->offset_bytes, region_bytes, &tensor_bytes, &err);
    if (status) {
        require_error(status, &err);
        return;
    }
    require(!__builtin_add_overflow(frame->offset_bytes, tensor_bytes, &end));
    require(end <= region_bytes && tensor->rank >= 1 && tensor->rank <= KLD_RANK_MAX);
    for (uint32_t i = 0; i < tensor->rank; i++)
        require(!__builtin_mul_overflow(elements, tensor->shape[i], &elements));
    require(elements > 0 && elements * kld_dtype_bytes(tensor->dtype) <= tensor_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < 3)
        return 0;
    unsigned fds = data[0] & 3;
    int truncated = data[0] & 4;
    uint64_t region_bytes = (uint64_t)data[1] << (data[2] & 63);
    data += 3, bytes -= 3;

    struct kld_error err = {.status = KLD_OK};
    uint64_t request;
    unsigned frames = 0;
    enum kld_status status = kld_packet_check(data, bytes, fds, truncated, &frames, &request, &err);
    if (status) {
        require_error(status, &err);
        return 0;
    }
    require(!truncated && frames >= 1 && frames <= KLD_WIRE_PACKET_FRAMES_MAX);
    for (size_t at = 0; at < bytes; frames--) {
        union kld_frame frame;
        require(frames > 0 && bytes - at >= sizeof frame.header);
        memcpy(&frame, data + at, sizeof frame.header);
        require(frame.header.length <= bytes - at);
        require(kld_frame_bytes(frame.header.type) == frame.header.length);
        require(at > 0 || frame.header.request == request);
        memcpy(&frame, data + at, frame.header.length);
        at += frame.header.length;
        if (frame.header.type == KLD_FRAME_SUBMIT)
            submit(&frame.as_SUBMIT, region_bytes);
        if (frame.header.type == KLD_FRAME_PUBLISH)
            publish(&frame.as_PUBLISH, region_bytes);
    }
    require(frames == 0);
    return 0;
}
