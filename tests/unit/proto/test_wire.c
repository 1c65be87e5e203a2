/* test_wire.c - every frame's length, version and descriptors checked; SUBMIT there and back; and
 * the byte offsets that clients in other languages rely on. */
#include "proto/wire.h"

#include <string.h>

#include "tests/unit/unit.h"

static union kld_frame frame;
static struct kld_error err;
static uint64_t request;

START_TEST(every_type_passes_at_its_own_length_only) {
    const uint16_t types[] = {
#define X(NAME, number, suffix) number,
        KLD_FRAME_MAP(X)
#undef X
    };
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        size_t bytes = kld_frame_bytes(types[i]);
        unsigned fds = types[i] == KLD_FRAME_REGION_GROW;
        kld_frame_init(&frame, (enum kld_frame_type)types[i], 42);
        ck_assert_int_eq(kld_frame_check(&frame, bytes, fds, 0, &request, &err), KLD_OK);
        ck_assert_uint_eq(request, 42);
        ck_assert_int_eq(kld_frame_check(&frame, bytes - 1, fds, 0, &request, &err), KLD_INVALID);
        ck_assert_int_eq(kld_frame_check(&frame, bytes, fds, 1, &request, &err), KLD_INVALID);
        ck_assert_int_eq(kld_frame_check(&frame, bytes, !fds, 0, &request, &err), KLD_INVALID);
        frame.header.length++;
        ck_assert_int_eq(kld_frame_check(&frame, bytes, fds, 0, &request, &err), KLD_INVALID);
    }
    ck_assert_uint_eq(kld_frame_bytes(0), 0);
    ck_assert_str_eq(kld_frame_name(KLD_FRAME_SUBMIT), "SUBMIT");
    ck_assert_str_eq(kld_frame_name(1000), "unknown");
}
END_TEST

START_TEST(short_unknown_and_foreign_frames) {
    kld_frame_init(&frame, KLD_FRAME_PING, 7);
    ck_assert_int_eq(kld_frame_check(&frame, 15, 0, 0, &request, &err), KLD_INVALID);
    ck_assert_uint_eq(request, 0);
    ck_assert_int_eq(kld_frame_check(&frame, 0, 0, 0, &request, &err), KLD_INVALID);
    frame.header.version = 2;
    ck_assert_int_eq(kld_frame_check(&frame, 16, 0, 0, &request, &err), KLD_VERSION);
    ck_assert_uint_eq(request, 7);
    frame.header.version = KLD_WIRE_VERSION;
    frame.header.type = 40;
    ck_assert_int_eq(kld_frame_check(&frame, 16, 0, 0, &request, &err), KLD_INVALID);
    kld_frame_init(&frame, KLD_FRAME_PING, 0);
    ck_assert_int_eq(kld_frame_check(&frame, 16, 0, 0, &request, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "request number 0"));
    kld_frame_init(&frame, KLD_FRAME_ERROR, 0); /* the answer to a frame without a number */
    ck_assert_int_eq(
        kld_frame_check(&frame, kld_frame_bytes(KLD_FRAME_ERROR), 0, 0, &request, &err), KLD_OK);
}
END_TEST

/* ATTACH and ATTACHED of a release that knew no users' names. */
START_TEST(frames_of_another_release_are_told_as_such) {
    static const struct {
        enum kld_frame_type type;
        uint32_t bytes;
    } older[] = {{KLD_FRAME_ATTACH, 80}, {KLD_FRAME_ATTACHED, 120}, {KLD_FRAME_WELCOME, 1360}};
    for (size_t i = 0; i < sizeof older / sizeof older[0]; i++) {
        kld_frame_init(&frame, older[i].type, 7);
        frame.header.length = older[i].bytes;
        ck_assert_int_eq(kld_frame_check(&frame, older[i].bytes, 0, 0, &request, &err),
                         KLD_VERSION);
        ck_assert_uint_eq(request, 7);
        ck_assert_ptr_nonnull(strstr(err.text, "different releases"));
        ck_assert_int_eq(kld_frame_check(&frame, older[i].bytes - 8, 0, 0, &request, &err),
                         KLD_INVALID); /* cut */
        ck_assert_int_eq(kld_frame_check(&frame, older[i].bytes, 0, 1, &request, &err),
                         KLD_INVALID);
        frame.header.length = (uint32_t)kld_frame_bytes((uint16_t)older[i].type) + 8;
        ck_assert_int_eq(kld_frame_check(&frame, older[i].bytes, 0, 1, &request, &err),
                         KLD_VERSION); /* a longer one, of a newer release */
    }
}
END_TEST

/* A packet of these frames, numbered from 1; its bytes. */
static size_t packet_of(uint8_t *packet, const uint16_t *types, unsigned count) {
    size_t bytes = 0;
    for (unsigned i = 0; i < count; i++) {
        kld_frame_init(&frame, (enum kld_frame_type)types[i], i + 1);
        memcpy(packet + bytes, &frame, frame.header.length);
        bytes += frame.header.length;
    }
    return bytes;
}

START_TEST(packets_of_several_frames) {
    static uint8_t packet[2 * KLD_WIRE_PACKET_BYTES_MAX];
    const uint16_t some[] = {KLD_FRAME_TRACE, KLD_FRAME_SUBMIT, KLD_FRAME_COPY, KLD_FRAME_DONE,
                             KLD_FRAME_ERROR};
    unsigned frames;
    size_t bytes = packet_of(packet, some, 5), first = kld_frame_bytes(KLD_FRAME_TRACE);
    ck_assert_int_eq(kld_packet_check(packet, bytes, 0, 0, &frames, &request, &err), KLD_OK);
    ck_assert_uint_eq(frames, 5);
    /* Cut anywhere but between two frames, lengthened, with a descriptor, truncated: none of it. */
    for (size_t cut = 1; cut < bytes; cut++) {
        size_t at = 0;
        for (int i = 0; i < 5 && at < cut; i++)
            at += kld_frame_bytes(some[i]);
        ck_assert_int_eq(kld_packet_check(packet, cut, 0, 0, &frames, &request, &err),
                         at == cut ? KLD_OK : KLD_INVALID);
        ck_assert_uint_eq(request, cut < 16 ? 0 : 1);
    }
    ck_assert_int_eq(kld_packet_check(packet, bytes + 1, 0, 0, &frames, &request, &err),
                     KLD_INVALID);
    ck_assert_str_eq(err.text, "frame 6 of its packet: frame of 1 bytes; a header alone has 16");
    ck_assert_int_eq(kld_packet_check(packet, bytes, 1, 0, &frames, &request, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "5 frames with 1 file descriptors"));
    ck_assert_int_eq(kld_packet_check(packet, bytes, 0, 1, &frames, &request, &err), KLD_INVALID);
    /* Lengths and numbers that lie. */
    for (int lie = 0; lie < 4; lie++) {
        struct kld_frame_header *second = (void *)(packet + first);
        struct kld_frame_header kept = *second;
        second->length = lie == 0 ? 0 : lie == 1 ? UINT32_MAX : kept.length;
        second->version += lie == 2;
        second->request = lie == 3 ? 0 : kept.request;
        ck_assert_int_eq(kld_packet_check(packet, bytes, 0, 0, &frames, &request, &err),
                         lie == 2 ? KLD_VERSION : KLD_INVALID);
        ck_assert_ptr_nonnull(strstr(err.text, "frame 2 of its packet"));
        *second = kept;
    }
    /* What must be alone is, first or not. */
    const uint16_t alone[][2] = {{KLD_FRAME_SUBMIT, KLD_FRAME_PING},
                                 {KLD_FRAME_PING, KLD_FRAME_SUBMIT},
                                 {KLD_FRAME_SUBMIT, KLD_FRAME_REGION_ADD}};
    for (int i = 0; i < 3; i++) {
        bytes = packet_of(packet, alone[i], 2);
        ck_assert_int_eq(kld_packet_check(packet, bytes, 0, 0, &frames, &request, &err),
                         KLD_INVALID);
    }
    uint16_t many[KLD_WIRE_PACKET_FRAMES_MAX + 1];
    for (int i = 0; i <= KLD_WIRE_PACKET_FRAMES_MAX; i++)
        many[i] = KLD_FRAME_COPY;
    bytes = packet_of(packet, many, KLD_WIRE_PACKET_FRAMES_MAX);
    ck_assert_int_eq(kld_packet_check(packet, bytes, 0, 0, &frames, &request, &err), KLD_OK);
    bytes = packet_of(packet, many, KLD_WIRE_PACKET_FRAMES_MAX + 1);
    ck_assert_int_eq(kld_packet_check(packet, bytes, 0, 0, &frames, &request, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "more than 32 frames"));
}
END_TEST

START_TEST(a_memfd_comes_with_one_descriptor) {
    size_t bytes = kld_frame_bytes(KLD_FRAME_REGION_ADD);
    kld_frame_init(&frame, KLD_FRAME_REGION_ADD, 1);
    frame.as_REGION_ADD.kind = KLD_REGION_MEMFD;
    ck_assert_int_eq(kld_frame_check(&frame, bytes, 1, 0, &request, &err), KLD_OK);
    ck_assert_int_eq(kld_frame_check(&frame, bytes, 0, 0, &request, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "with 0 file descriptors; expected 1"));
    frame.as_REGION_ADD.kind = KLD_REGION_POOL;
    ck_assert_int_eq(kld_frame_check(&frame, bytes, 1, 0, &request, &err), KLD_INVALID);
    frame.as_REGION_ADD.kind = KLD_REGION_CUDA_SPACE;
    ck_assert_int_eq(kld_frame_check(&frame, bytes, 0, 0, &request, &err), KLD_OK);
    ck_assert_int_eq(kld_frame_check(&frame, bytes, 1, 0, &request, &err), KLD_INVALID);
    frame.as_REGION_ADD.kind = KLD_REGION_CUDA_FD;
    ck_assert_int_eq(kld_frame_check(&frame, bytes, 1, 0, &request, &err), KLD_OK);
    ck_assert_int_eq(kld_frame_check(&frame, bytes, 0, 0, &request, &err), KLD_INVALID);
}
END_TEST

START_TEST(names_of_published_tensors) {
    char name[KLD_WIRE_NAME_MAX] = "teacher/logits";
    ck_assert_int_eq(kld_name_check(name, &err), KLD_OK);
    name[20] = 'x'; /* behind its end */
    ck_assert_int_eq(kld_name_check(name, &err), KLD_INVALID);
    memset(name, 'x', sizeof name); /* without one */
    ck_assert_int_eq(kld_name_check(name, &err), KLD_INVALID);
    name[KLD_WIRE_NAME_MAX - 1] = 0;
    ck_assert_int_eq(kld_name_check(name, &err), KLD_OK);
    const char wrong[] = {' ', '\n', '\x7f', '\x80', 0};
    for (size_t i = 0; i < sizeof wrong; i++) {
        memset(name, 0, sizeof name);
        name[0] = wrong[i];
        ck_assert_int_eq(kld_name_check(name, &err), KLD_INVALID);
    }
}
END_TEST

static struct kld_wire_description tensor_of(uint32_t dtype, uint64_t rows, uint64_t classes,
                                             uint64_t stride) {
    return (struct kld_wire_description){.dtype = dtype,
                                         .form = KLD_FORM_LOGITS,
                                         .rank = 2,
                                         .shape = {rows, classes},
                                         .row_stride_bytes = stride};
}

START_TEST(published_tensors_lie_in_their_region) {
    uint64_t bytes = 0;
    struct kld_wire_description tensor = tensor_of(KLD_DTYPE_BF16, 3, 10, 0);
    ck_assert_int_eq(kld_description_check(&tensor, 4, 64, &bytes, &err), KLD_OK);
    ck_assert_uint_eq(bytes, 60);
    ck_assert_int_eq(kld_description_check(&tensor, 6, 64, &bytes, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "60 bytes at offset 6 do not fit a region of 64"));
    ck_assert_int_eq(kld_description_check(&tensor, 3, 640, &bytes, &err), KLD_INVALID);
    ck_assert_int_eq(kld_description_check(&tensor, UINT64_MAX - 1, 64, &bytes, &err), KLD_INVALID);
    tensor.row_stride_bytes = 32; /* the last row ends without its gap */
    ck_assert_int_eq(kld_description_check(&tensor, 0, 84, &bytes, &err), KLD_OK);
    ck_assert_uint_eq(bytes, 84);
    tensor.row_stride_bytes = 18;
    ck_assert_int_eq(kld_description_check(&tensor, 0, 84, &bytes, &err), KLD_INVALID);
    tensor.row_stride_bytes = 21;
    ck_assert_int_eq(kld_description_check(&tensor, 0, 84, &bytes, &err), KLD_INVALID);
    tensor = tensor_of(KLD_DTYPE_FP32, UINT64_C(1) << 62, UINT64_C(1) << 40, 0);
    ck_assert_int_eq(kld_description_check(&tensor, 0, UINT64_MAX, &bytes, &err), KLD_INVALID);
    tensor = tensor_of(KLD_DTYPE_FP32, 3, 0, 0);
    ck_assert_int_eq(kld_description_check(&tensor, 0, 64, &bytes, &err), KLD_INVALID);
    tensor = tensor_of(99, 3, 1, 0);
    ck_assert_int_eq(kld_description_check(&tensor, 0, 64, &bytes, &err), KLD_INVALID);
    tensor = tensor_of(KLD_DTYPE_FP32, 3, 1, 0);
    tensor.form = 3;
    ck_assert_int_eq(kld_description_check(&tensor, 0, 64, &bytes, &err), KLD_INVALID);
    tensor.form = 0;
    tensor.shape[2] = 1;
    ck_assert_int_eq(kld_description_check(&tensor, 0, 64, &bytes, &err), KLD_INVALID);
    tensor.rank = 9;
    ck_assert_int_eq(kld_description_check(&tensor, 0, 64, &bytes, &err), KLD_INVALID);
    tensor = tensor_of(KLD_DTYPE_FP64, 5, 0, 0);
    tensor.rank = 1; /* one row */
    ck_assert_int_eq(kld_description_check(&tensor, 8, 48, &bytes, &err), KLD_OK);
    ck_assert_uint_eq(bytes, 40);
}
END_TEST

/* What is said says what was wrong and what was expected. */
START_TEST(published_tensors_are_refused_for_what_is_wrong) {
    static const struct {
        uint32_t dtype, form, rank, reserved;
        const char *text;
    } wrong[] = {
        {99, 0, 2, 0,
         "unknown dtype number 99; known: 1 FP32, 2 FP64, 3 FP16, 4 BF16, 5 UINT8, 6 BOOL"},
        {1, 3, 2, 0, "unknown form number 3; known: 0 probs, 1 logprobs, 2 logits"},
        {1, 0, 2, 1, "reserved field is not 0"},
        {1, 0, 0, 0, "rank 0; expected 1 to 8"},
        {1, 0, 9, 0, "rank 9; expected 1 to 8"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct kld_wire_description tensor = tensor_of(wrong[i].dtype, 3, 1, 0);
        uint64_t bytes;
        tensor.form = wrong[i].form;
        tensor.rank = wrong[i].rank;
        tensor.reserved = wrong[i].reserved;
        ck_assert_int_eq(kld_description_check(&tensor, 0, 64, &bytes, &err), KLD_INVALID);
        ck_assert_msg(strstr(err.text, wrong[i].text), "'%s' has no '%s'", err.text, wrong[i].text);
    }
}
END_TEST

START_TEST(submit_there_and_back) {
    struct kld_op op, back;
    kld_op_init(&op);
    op.divergence = KLD_DIVERGENCE_REVERSE_KL;
    op.reduction = KLD_REDUCTION_ROWMEAN;
    op.predictions_form = KLD_FORM_LOGITS;
    op.targets_form = KLD_FORM_LOGPROBS;
    op.rank = 2, op.shape[0] = 3, op.shape[1] = UINT64_C(1) << 33;
    kld_op_set_number(&op, "temperature", 2.5, NULL);
    kld_op_set_number(&op, "normalizer", 9, NULL);
    for (int i = 0; i < KLD_SLOT_COUNT; i += 2)
        op.tensor[i] = (struct kld_tensor){.dtype = KLD_DTYPE_BF16,
                                           .region = 10u + (unsigned)i,
                                           .offset_bytes = UINT64_C(1) << 40,
                                           .row_stride_bytes = 64};
    kld_frame_init(&frame, KLD_FRAME_SUBMIT, 5);
    kld_submit_encode(&op, &frame.as_SUBMIT);
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_OK);
    ck_assert_mem_eq(&op, &back, sizeof op);

    frame.as_SUBMIT.number[KLD_NUMBER_BETA] = 77; /* not given: not read */
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_OK);
    ck_assert(back.number[KLD_NUMBER_BETA] == 0.5);
    frame.as_SUBMIT.flags = KLD_SUBMIT_EARLY;
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_OK);
    frame.as_SUBMIT.flags = 3;
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "unknown flags 0x2; known: 0x1, EARLY"));
    frame.as_SUBMIT.flags = 0;
    frame.as_SUBMIT.tensor[0].region = 0;
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "predictions: region 0"));
    frame.as_SUBMIT.tensor[0].region = 1;
    frame.as_SUBMIT.tensor[0].reserved = 1;
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_INVALID);
}
END_TEST

/* What the sender meant to say and the worker would not look at. */
START_TEST(submit_says_nothing_in_vain) {
    struct kld_op op, back;
    kld_op_init(&op);
    op.rank = 2, op.shape[0] = 3, op.shape[1] = 4, op.shape[2] = 5;
    op.tensor[KLD_SLOT_GRAD_PREDICTIONS].row_stride_bytes = 64;
    kld_frame_init(&frame, KLD_FRAME_SUBMIT, 5);
    kld_submit_encode(&op, &frame.as_SUBMIT); /* libkld's callers may leave such things */
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_OK);
    frame.as_SUBMIT.shape[2] = 5;
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "beyond its rank of 2"));
    frame.as_SUBMIT.shape[2] = 0;
    frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS].region = 7;
    ck_assert_int_eq(kld_submit_decode(&frame.as_SUBMIT, &back, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "grad_predictions: a tensor of dtype 0"));
}
END_TEST

START_TEST(offsets_are_part_of_the_protocol) {
    ck_assert_uint_eq(offsetof(struct kld_frame_header, request), 8);
    ck_assert_uint_eq(offsetof(struct kld_frame_hello, client_name), 24);
    ck_assert_uint_eq(offsetof(struct kld_frame_welcome, backend), 32);
    ck_assert_uint_eq(offsetof(struct kld_frame_welcome, device_list), 80);
    ck_assert_uint_eq(offsetof(struct kld_frame_region_add, ipc_handle), 64);
    ck_assert_uint_eq(offsetof(struct kld_frame_region_grow, bytes), 32);
    ck_assert_uint_eq(offsetof(struct kld_frame_submit, timeout_ns), 24);
    ck_assert_uint_eq(offsetof(struct kld_frame_submit, shape), 56);
    ck_assert_uint_eq(offsetof(struct kld_frame_submit, number), 120);
    ck_assert_uint_eq(offsetof(struct kld_frame_submit, tensor), 176);
    ck_assert_uint_eq(offsetof(struct kld_frame_submit, ready_event), 464);
    ck_assert_uint_eq(offsetof(struct kld_frame_submit, done_event), 472);
    ck_assert_uint_eq(offsetof(struct kld_frame_done, scalar), 56);
    ck_assert_uint_eq(offsetof(struct kld_frame_welcome, events_max), 60);
    ck_assert_uint_eq(offsetof(struct kld_frame_welcome, publications_max), 1360);
    ck_assert_uint_eq(offsetof(struct kld_frame_event_add, ipc_handle), 40);
    ck_assert_uint_eq(offsetof(struct kld_frame_event, ipc_handle), 24);
    ck_assert_uint_eq(offsetof(struct kld_frame_publish, region), 80);
    ck_assert_uint_eq(offsetof(struct kld_frame_publish, tensor), 96);
    ck_assert_uint_eq(offsetof(struct kld_frame_publish, uids), 192);
    ck_assert_uint_eq(offsetof(struct kld_frame_attached, tensor), 32);
    ck_assert_uint_eq(offsetof(struct kld_frame_attached, uid), 120);
    ck_assert_uint_eq(offsetof(struct kld_frame_attach, uid), 80);
    ck_assert_uint_eq(offsetof(struct kld_frame_stream, priority), 20);
    ck_assert_uint_eq(offsetof(struct kld_frame_trace, id), 24);
    ck_assert_uint_eq(offsetof(struct kld_frame_trace, span), 40);
    ck_assert_uint_eq(offsetof(struct kld_frame_trace, flags), 48);
    ck_assert_uint_eq(offsetof(struct kld_frame_error, text), 24);
}
END_TEST

UNIT_MAIN("proto/wire", every_type_passes_at_its_own_length_only, short_unknown_and_foreign_frames,
          packets_of_several_frames, frames_of_another_release_are_told_as_such,
          a_memfd_comes_with_one_descriptor, names_of_published_tensors,
          published_tensors_lie_in_their_region, published_tensors_are_refused_for_what_is_wrong,
          submit_there_and_back, submit_says_nothing_in_vain, offsets_are_part_of_the_protocol)
