/* wire.c - fuzzes what a Unix client can send: a frame, the op in it, and the bounds of its
 * tensors. Beyond "no crash" it holds the parsers to their promises: an op that passed stays the
 * same through the wire, and a tensor that passed lies inside its region. */
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int condition) {
    if (!condition)
        abort();
}

static void check_bounds(const struct kld_op *op, const struct kld_geometry *geometry,
                         uint64_t region_bytes) {
    for (unsigned i = 0; i < KLD_SLOT_COUNT; i++) {
        struct kld_error err;
        if (geometry->slot[i].rows == 0 ||
            kld_op_check_bounds(op, geometry, (enum kld_slot)i, region_bytes, &err) != KLD_OK)
            continue;
        require(op->tensor[i].offset_bytes <= region_bytes);
        require(geometry->slot[i].span_bytes <= region_bytes - op->tensor[i].offset_bytes);
        require(geometry->slot[i].row_bytes <= geometry->slot[i].stride_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct kld_error err;
    uint64_t request = 0;
    union kld_frame frame;
    if (kld_frame_check(data, size, 0, 0, &request, &err) == KLD_OK)
        require(size == kld_frame_bytes(((const struct kld_frame_header *)data)->type));
    else
        require(memchr(err.text, '\0', sizeof err.text) != NULL);

    /* Straight into SUBMIT, so that the header is not in the way. */
    kld_frame_init(&frame, KLD_FRAME_SUBMIT, 1);
    size_t head = sizeof frame.header, room = sizeof frame.as_SUBMIT - head;
    memcpy((char *)&frame + head, data, size < room ? size : room);
    struct kld_op op;
    struct kld_geometry geometry;
    if (kld_submit_decode(&frame.as_SUBMIT, &op, &err) != KLD_OK ||
        kld_op_check(&op, &geometry, &err) != KLD_OK)
        return 0;
    require(geometry.elements == geometry.rows * geometry.classes);
    require(geometry.elements >= 1 && geometry.elements <= KLD_ELEMENTS_MAX);
    check_bounds(&op, &geometry, 0);
    check_bounds(&op, &geometry, (uint64_t)1 << 20);
    check_bounds(&op, &geometry, UINT64_MAX);

    struct kld_frame_submit again;
    struct kld_op decoded;
    memset(&again, 0, sizeof again);
    kld_submit_encode(&op, &again);
    require(kld_submit_decode(&again, &decoded, &err) == KLD_OK);
    require(kld_op_check(&decoded, &geometry, &err) == KLD_OK);
    return 0;
}
