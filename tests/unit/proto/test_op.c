/* test_op.c - kld_op_check() and the tables of proto/op.h: every rule refused once, every default.
 * Nothing is computed here (tests/unit/kernels). */
#include "proto/op.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/unit/unit.h"

static struct kld_op op;
static struct kld_geometry geometry;
static struct kld_error err;

static void place(enum kld_slot slot, enum kld_dtype dtype, uint64_t offset_bytes) {
    op.tensor[slot] =
        (struct kld_tensor){.dtype = dtype, .region = 1, .offset_bytes = offset_bytes};
}

/* 4 x 6 FP32 at 0 and 1000, nothing else. */
static void setup(void) {
    kld_op_init(&op);
    memset(&err, 0, sizeof err);
    op.rank = 2;
    op.shape[0] = 4;
    op.shape[1] = 6;
    place(KLD_SLOT_PREDICTIONS, KLD_DTYPE_FP32, 0);
    place(KLD_SLOT_TARGETS, KLD_DTYPE_FP32, 1000);
}

static void expect(enum kld_status status, const char *text) {
    ck_assert_int_eq(kld_op_check(&op, &geometry, &err), status);
    if (status) {
        ck_assert_int_eq(err.status, status);
        ck_assert_msg(strstr(err.text, text) != NULL, "'%s' lacks '%s'", err.text, text);
    }
}

START_TEST(defaults_are_the_documented_ones) {
    setup();
    expect(KLD_OK, "");
    ck_assert_uint_eq(op.divergence, KLD_DIVERGENCE_FORWARD_KL);
    ck_assert_uint_eq(op.reduction, KLD_REDUCTION_BATCHMEAN);
    ck_assert_uint_eq(op.predictions_form, KLD_FORM_PROBS);
    ck_assert(op.number[KLD_NUMBER_TEMPERATURE] == 1.0);
    ck_assert(op.number[KLD_NUMBER_BETA] == 0.5);
    ck_assert_uint_eq(geometry.rows, 4);
    ck_assert_uint_eq(geometry.classes, 6);
    ck_assert(geometry.divisor == 4);
    ck_assert(geometry.scalar);
    ck_assert_uint_eq(geometry.slot[KLD_SLOT_PREDICTIONS].stride_bytes, 24);
    ck_assert_uint_eq(geometry.slot[KLD_SLOT_PREDICTIONS].span_bytes, 96);
    ck_assert_uint_eq(geometry.slot[KLD_SLOT_LOSS].rows, 0);
}
END_TEST

START_TEST(reductions_set_divisor_and_extent) {
    const struct {
        enum kld_reduction reduction;
        double divisor;
        uint64_t loss_span;
    } cases[] = {
        {KLD_REDUCTION_BATCHMEAN, 2, 4}, {KLD_REDUCTION_NONE, 1, 2 * 3 * 5 * 4},
        {KLD_REDUCTION_ROW, 1, 6 * 4},   {KLD_REDUCTION_SUM, 1, 4},
        {KLD_REDUCTION_MEAN, 30, 4},     {KLD_REDUCTION_ROWMEAN, 0, 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup();
        op.rank = 3;
        op.shape[0] = 2, op.shape[1] = 3, op.shape[2] = 5;
        op.reduction = cases[i].reduction;
        place(KLD_SLOT_LOSS, KLD_DTYPE_FP32, 4000);
        place(KLD_SLOT_ROW_LOSS, KLD_DTYPE_FP32, 8000);
        expect(KLD_OK, "");
        ck_assert(geometry.divisor == cases[i].divisor);
        ck_assert_uint_eq(geometry.slot[KLD_SLOT_LOSS].span_bytes, cases[i].loss_span);
        ck_assert_uint_eq(geometry.slot[KLD_SLOT_ROW_LOSS].span_bytes, 6 * 4);
    }
    setup(); /* rank 1: one row, and batchmean divides by its length */
    op.rank = 1;
    op.shape[0] = 7, op.shape[1] = 0;
    expect(KLD_OK, "");
    ck_assert_uint_eq(geometry.rows, 1);
    ck_assert(geometry.divisor == 7);
}
END_TEST

START_TEST(row_loss_may_be_wider_than_the_loss) {
    setup(), place(KLD_SLOT_ROW_LOSS, KLD_DTYPE_FP64, 8000), expect(KLD_OK, "");
    ck_assert_uint_eq(geometry.slot[KLD_SLOT_ROW_LOSS].row_bytes, 8);
    ck_assert_int_eq(geometry.loss_dtype, KLD_DTYPE_FP32);
    setup(), place(KLD_SLOT_ROW_LOSS, KLD_DTYPE_FP16, 8000);
    expect(KLD_INVALID, "row_loss has dtype FP16; expected FP32 or FP64");
    setup(), op.tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_FP64;
    op.tensor[KLD_SLOT_TARGETS].region = 2;
    place(KLD_SLOT_ROW_LOSS, KLD_DTYPE_FP32, 8000);
    expect(KLD_INVALID, "row_loss has dtype FP32; expected FP64");
}
END_TEST

START_TEST(shapes) {
    setup(), op.rank = 0, expect(KLD_INVALID, "rank must be 1 to 8, not 0");
    setup(), op.rank = 9, expect(KLD_INVALID, "rank must be 1 to 8, not 9");
    setup(), op.shape[0] = 0, expect(KLD_INVALID, "dimension 0 of the shape is 0");
    setup(), op.shape[0] = UINT64_MAX, expect(KLD_TOO_LARGE, "2^40");
    setup(), op.shape[0] = UINT64_MAX / 2, op.shape[1] = 4, expect(KLD_TOO_LARGE, "2^40");
    setup(), op.rank = 8;
    for (int i = 0; i < 8; i++)
        op.shape[i] = UINT64_C(1) << 8;
    expect(KLD_TOO_LARGE, "2^40");
    setup(), op.shape[0] = UINT64_C(1) << 20, op.shape[1] = UINT64_C(1) << 20;
    op.tensor[KLD_SLOT_TARGETS].region = 2;
    expect(KLD_OK, "");
}
END_TEST

START_TEST(numbers_must_fit_what_they_are_given_for) {
    setup(), kld_op_set_number(&op, "temperature", 2, &err);
    expect(KLD_INVALID, "no tensor has the form 'logits'");
    op.targets_form = KLD_FORM_LOGITS, expect(KLD_OK, "");
    kld_op_set_number(&op, "temperature", 0, &err), expect(KLD_INVALID, "greater than 0");
    kld_op_set_number(&op, "temperature", NAN, &err), expect(KLD_INVALID, "finite");
    setup(), kld_op_set_number(&op, "beta", 0.5, &err);
    expect(KLD_INVALID, "beta does not fit divergence 'forward_kl'");
    setup(), kld_op_set_number(&op, "skew", 0.5, &err), expect(KLD_INVALID, "skew does not fit");
    setup(), kld_op_set_number(&op, "weight", 0.5, &err), expect(KLD_INVALID, "weight does not");
    setup(), kld_op_set_number(&op, "normalizer", 0, &err), expect(KLD_INVALID, "normalizer must");
    kld_op_set_number(&op, "normalizer", 3, &err), expect(KLD_OK, "");
    ck_assert(geometry.divisor == 3);
    op.reduction = KLD_REDUCTION_SUM, expect(KLD_INVALID, "normalizer does not fit reduction");
    setup(), kld_op_set_number(&op, "scale", INFINITY, &err), expect(KLD_INVALID, "scale must");
    setup(), kld_op_set_number(&op, "grad_output", 2, &err);
    expect(KLD_INVALID, "no gradient is asked for");
    place(KLD_SLOT_GRAD_PREDICTIONS, KLD_DTYPE_FP32, 2000), expect(KLD_OK, "");
    op.reduction = KLD_REDUCTION_ROW, expect(KLD_INVALID, "takes grad_output as a tensor");
    op.reduction = KLD_REDUCTION_SUM;
    place(KLD_SLOT_GRAD_OUTPUT, KLD_DTYPE_FP32, 4000);
    expect(KLD_INVALID, "as a number and as a tensor");
    op.reduction = KLD_REDUCTION_SUM; /* 1 over it is no number */
    setup(), op.targets_form = KLD_FORM_LOGITS, kld_op_set_number(&op, "temperature", 1e-309, &err);
    expect(KLD_INVALID, "a normal number, at least 2.2250738585072014e-308");
    for (int i = 0; i < KLD_NUMBER_COUNT; i++) {
        setup(), op.number[i] = i % 2 ? 2 : NAN; /* which a server would never hear of */
        expect(KLD_INVALID, "not marked as given");
        ck_assert_ptr_nonnull(strstr(err.text, kld_number_name((uint32_t)i)));
    }
    setup(), op.given = 1u << 20, expect(KLD_INVALID, "unknown parameter bits");
}
END_TEST

/* Each of beta, skew and weight: which divergences take it, whether it must be given, its ends. */
START_TEST(parameters_of_divergences) {
    static const struct {
        const char *name;
        uint32_t first, second; /* that take it */
        bool required, closed;
    } parameters[] = {
        {"beta", KLD_DIVERGENCE_JS, KLD_DIVERGENCE_JS, false, true},
        {"weight", KLD_DIVERGENCE_MIXED_KL, KLD_DIVERGENCE_MIXED_KL, true, true},
        {"skew", KLD_DIVERGENCE_SKEW_KL, KLD_DIVERGENCE_SKEW_REVERSE_KL, true, false},
    };
    for (size_t i = 0; i < 3; i++)
        for (uint32_t divergence = 0; divergence <= KLD_DIVERGENCE_CROSS_ENTROPY; divergence++) {
            const char *name = parameters[i].name;
            char text[64], range[64];
            bool takes = divergence == parameters[i].first || divergence == parameters[i].second;
            snprintf(text, sizeof text, "%s does not fit divergence '%s'", name,
                     kld_divergence_name(divergence));
            snprintf(range, sizeof range, "%s must be in [0, 1%s, not", name,
                     parameters[i].closed ? "]" : ")");
            setup(), op.divergence = divergence;
            if (takes && parameters[i].required)
                expect(KLD_INVALID, "needs the parameter");
            if (!takes && divergence == KLD_DIVERGENCE_MIXED_KL)
                kld_op_set_number(&op, "weight", 0.5, &err);
            if (!takes && (divergence == KLD_DIVERGENCE_SKEW_KL ||
                           divergence == KLD_DIVERGENCE_SKEW_REVERSE_KL))
                kld_op_set_number(&op, "skew", 0.5, &err);
            kld_op_set_number(&op, name, 0.25, &err), expect(takes ? KLD_OK : KLD_INVALID, text);
            if (!takes)
                continue;
            kld_op_set_number(&op, name, 0, &err), expect(KLD_OK, "");
            kld_op_set_number(&op, name, -1e-9, &err), expect(KLD_INVALID, range);
            kld_op_set_number(&op, name, 1.0000001, &err);
            expect(KLD_INVALID, range), expect(KLD_INVALID, ", not 1.0000001");
            kld_op_set_number(&op, name, NAN, &err), expect(KLD_INVALID, "finite");
            kld_op_set_number(&op, name, 1, &err);
            expect(parameters[i].closed ? KLD_OK : KLD_INVALID, range);
        }
}
END_TEST

START_TEST(unknown_names_list_the_known_ones) {
    setup();
    ck_assert_int_eq(kld_op_set_text(&op, "divergence", "kl", &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "forward_kl, reverse_kl"));
    ck_assert_int_eq(kld_op_set_text(&op, "reduction", "avg", &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "batchmean, none, row, sum, mean, rowmean"));
    ck_assert_int_eq(kld_op_set_text(&op, "targets_form", "p", &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "probs, logprobs, logits"));
    ck_assert_int_eq(kld_op_set_text(&op, "tau", "1", &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "temperature"));
    ck_assert_int_eq(kld_op_set_number(&op, "tau", 1, &err), KLD_INVALID);
    ck_assert_int_eq(kld_op_set_number(&op, "divergence", 1, &err), KLD_INVALID);
    ck_assert_int_eq(kld_op_set_text(&op, "beta", "1", &err), KLD_INVALID);
    ck_assert_int_eq(kld_op_parameter_kind("divergence"), 1);
    ck_assert_int_eq(kld_op_parameter_kind("normalizer"), 2);
    ck_assert_int_eq(kld_op_parameter_kind("x"), 0);
    setup(), op.divergence = 77, expect(KLD_INVALID, "unknown divergence number 77");
    setup(), op.reduction = 77, expect(KLD_INVALID, "unknown reduction number 77");
    setup(), op.targets_form = 77, expect(KLD_INVALID, "targets: unknown form number 77");
    setup(), op.predictions_form = 3, expect(KLD_INVALID, "predictions: unknown form number 3");
    for (uint32_t i = 0; i <= KLD_DIVERGENCE_CROSS_ENTROPY; i++) {
        setup(), op.divergence = i;
        if (i == KLD_DIVERGENCE_MIXED_KL)
            kld_op_set_number(&op, "weight", 0.5, &err);
        if (i == KLD_DIVERGENCE_SKEW_KL || i == KLD_DIVERGENCE_SKEW_REVERSE_KL)
            kld_op_set_number(&op, "skew", 0.5, &err);
        expect(KLD_OK, "");
        ck_assert_ptr_nonnull(strstr(kld_divergence_list(), kld_divergence_name(i)));
    }
}
END_TEST

START_TEST(tensors) {
    setup(), op.tensor[KLD_SLOT_TARGETS].dtype = 0, expect(KLD_INVALID, "'targets' is missing");
    setup(), op.tensor[KLD_SLOT_PREDICTIONS].dtype = 0;
    expect(KLD_INVALID, "'predictions' is missing");
    setup(), op.tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_UINT8;
    expect(KLD_INVALID, "targets has dtype UINT8; expected FP32, FP64, FP16, BF16");
    setup(), op.tensor[KLD_SLOT_TARGETS].dtype = 99, expect(KLD_INVALID, "unknown");
    setup(), place(KLD_SLOT_ROW_WEIGHTS, KLD_DTYPE_FP64, 4000);
    expect(KLD_INVALID, "row_weights has dtype FP64; expected FP32");
    setup(), place(KLD_SLOT_ROW_MASK, KLD_DTYPE_FP32, 4000);
    expect(KLD_INVALID, "expected BOOL or UINT8");
    setup(), place(KLD_SLOT_LOSS, KLD_DTYPE_FP64, 4000), expect(KLD_INVALID, "expected FP32");
    op.tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_FP64, expect(KLD_OK, "");
    ck_assert_int_eq(geometry.loss_dtype, KLD_DTYPE_FP64);
    setup(), place(KLD_SLOT_GRAD_TARGETS, KLD_DTYPE_FP16, 4000);
    expect(KLD_INVALID, "grad_targets has dtype FP16; expected FP32");
    setup(), op.tensor[KLD_SLOT_TARGETS].reserved = 1, expect(KLD_INVALID, "reserved");
    setup(), op.tensor[KLD_SLOT_TARGETS].row_stride_bytes = 20, expect(KLD_INVALID, "at least 24");
    setup(), op.tensor[KLD_SLOT_TARGETS].row_stride_bytes = 26,
             expect(KLD_INVALID, "multiple of 4");
    setup(), op.tensor[KLD_SLOT_TARGETS].row_stride_bytes = UINT64_MAX - 3;
    expect(KLD_INVALID, "overflow");
    setup(), op.tensor[KLD_SLOT_TARGETS].offset_bytes = UINT64_MAX - 3;
    expect(KLD_INVALID, "overflow");
    setup(), op.tensor[KLD_SLOT_TARGETS].row_stride_bytes = 32, expect(KLD_OK, "");
    ck_assert_uint_eq(geometry.slot[KLD_SLOT_TARGETS].span_bytes, 3 * 32 + 24);
}
END_TEST

START_TEST(outputs_may_not_overlap_but_for_their_own_tensor) {
    setup(), place(KLD_SLOT_GRAD_PREDICTIONS, KLD_DTYPE_FP32, 0), expect(KLD_OK, "");
    ck_assert(kld_op_in_place(&op));
    op.tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = 4;
    expect(KLD_INVALID, "grad_predictions overlaps predictions");
    op.tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = 1092; /* the last 4 bytes of targets */
    expect(KLD_INVALID, "grad_predictions overlaps targets");
    op.tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = 1096, expect(KLD_OK, "");
    ck_assert(!kld_op_in_place(&op));
    op.tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = 1000;
    op.tensor[KLD_SLOT_GRAD_PREDICTIONS].region = 2, expect(KLD_OK, "");
    setup(), place(KLD_SLOT_GRAD_PREDICTIONS, KLD_DTYPE_FP32, 0);
    op.tensor[KLD_SLOT_GRAD_PREDICTIONS].row_stride_bytes = 32; /* same place, other stride */
    expect(KLD_INVALID, "grad_predictions overlaps predictions");
    op.shape[0] = 1, expect(KLD_OK, ""); /* which one row makes no use of */
    setup(), place(KLD_SLOT_LOSS, KLD_DTYPE_FP32, 92), expect(KLD_INVALID, "loss overlaps");
    setup(), place(KLD_SLOT_LOSS, KLD_DTYPE_FP32, 4000);
    place(KLD_SLOT_ROW_LOSS, KLD_DTYPE_FP32, 3988), expect(KLD_INVALID, "loss overlaps row_loss");
    setup(), op.tensor[KLD_SLOT_TARGETS].offset_bytes = 0, expect(KLD_OK, ""); /* inputs may */
    place(KLD_SLOT_GRAD_PREDICTIONS, KLD_DTYPE_FP32, 0);
    expect(KLD_INVALID, "grad_predictions overlaps targets");
}
END_TEST

static void columns(uint64_t predictions, uint64_t targets, uint64_t gradient, uint64_t stride) {
    setup();
    place(KLD_SLOT_PREDICTIONS, KLD_DTYPE_FP32, predictions);
    place(KLD_SLOT_TARGETS, KLD_DTYPE_FP32, targets);
    place(KLD_SLOT_GRAD_PREDICTIONS, KLD_DTYPE_FP32, gradient);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        op.tensor[slot].row_stride_bytes = stride;
}

START_TEST(columns_of_one_buffer_do_not_overlap) {
    columns(0, 24, 48, 96), expect(KLD_OK, "");
    columns(48, 24, 0, 72), expect(KLD_OK, "");
    columns(24, 48, 288, 72), expect(KLD_OK, ""); /* behind them, but for the last rows */
    columns(0, 24, 44, 96), expect(KLD_INVALID, "grad_predictions overlaps targets");
    columns(0, 24, 76, 96), expect(KLD_INVALID, "grad_predictions overlaps predictions");
    columns(100, 124, 80, 96), expect(KLD_INVALID, "grad_predictions overlaps predictions");
    columns(0, 24, 48, 96), op.tensor[KLD_SLOT_GRAD_PREDICTIONS].row_stride_bytes = 100;
    expect(KLD_INVALID, "grad_predictions overlaps predictions");
    /* Is what the check lets pass free of shared bytes, and is what fits into the gaps let pass? */
    int passed = 0;
    for (uint64_t at = 0; at < 260; at += 4) {
        unsigned char used[512] = {0};
        bool shared = false;
        columns(60, 1000, at, 52);
        for (uint64_t i = 0; i < 4 * 24; i++)
            used[60 + i / 24 * 52 + i % 24] = 1;
        for (uint64_t i = 0; i < 4 * 24; i++)
            shared = shared || used[at + i / 24 * 52 + i % 24];
        bool allowed = kld_op_check(&op, &geometry, &err) == KLD_OK;
        ck_assert(!allowed || !shared || at == 60);
        passed += allowed && at != 60;
    }
    ck_assert_int_eq(passed, 13); /* twice in each of five rows, and three times behind the last */
}
END_TEST

START_TEST(bounds) {
    setup(), expect(KLD_OK, "");
    ck_assert_int_eq(kld_op_check_bounds(&op, &geometry, KLD_SLOT_TARGETS, 1096, &err), KLD_OK);
    ck_assert_int_eq(kld_op_check_bounds(&op, &geometry, KLD_SLOT_TARGETS, 1095, &err),
                     KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "targets needs 96 bytes at offset 1000"));
    ck_assert_int_eq(kld_op_check_bounds(&op, &geometry, KLD_SLOT_TARGETS, 999, &err), KLD_INVALID);
    op.tensor[KLD_SLOT_TARGETS].offset_bytes = 1002;
    expect(KLD_OK, "");
    ck_assert_int_eq(kld_op_check_bounds(&op, &geometry, KLD_SLOT_TARGETS, 4096, &err),
                     KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "not a multiple"));
}
END_TEST

UNIT_MAIN("proto/op", defaults_are_the_documented_ones, reductions_set_divisor_and_extent,
          row_loss_may_be_wider_than_the_loss, shapes, numbers_must_fit_what_they_are_given_for,
          parameters_of_divergences, unknown_names_list_the_known_ones, tensors,
          outputs_may_not_overlap_but_for_their_own_tensor, columns_of_one_buffer_do_not_overlap,
          bounds)
