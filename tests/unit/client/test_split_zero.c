/* test_split_zero.c - requests over several servers whose row weights sum to 0 or to less: the bits
 * of one, of each row's loss and of a loss of 0, too. The members are local: ones. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <math.h>
#include <string.h>

#include "client/split.h"

#define ROWS 3
#define CLASSES 20
#define COUNT (ROWS * CLASSES)
#define THREE "split:local:cpu,local:cpu,local:cpu"

static struct kld_error error;
static const float scalar = -1.25f;

struct results {
    float p[COUNT], q[COUNT], grad_p[COUNT], grad_q[COUNT];
    double row_loss[ROWS];
    float loss;
    struct kld_result result;
};

struct shape {
    uint32_t divergence;
    float last_weight; /* of the third row; those before have 1 */
    bool equal, in_place, grad_output, mask;
};

static void fill(struct results *to, const struct shape *shape) {
    memset(to, 0, sizeof *to);
    for (int i = 0; i < COUNT; i++) {
        to->q[i] = (float)(1 + i * 7 % 13) / 140;
        to->p[i] = shape->equal ? to->q[i] : (float)(1 + i * 5 % 11) / 120;
    }
    memset(to->grad_q, 1, sizeof to->grad_q);
    memset(to->grad_p, 1, sizeof to->grad_p);
}

static void place(struct kld_request *request, enum kld_slot slot, uint32_t dtype,
                  const void *data) {
    request->op.tensor[slot].dtype = dtype;
    request->bytes[slot].data = (void *)data;
}

static void run(struct kld_connection *connection, const struct shape *shape, struct results *to) {
    const float weights[ROWS] = {1, 1, shape->last_weight};
    static const unsigned char mask[ROWS] = {1, 1, 1};
    fill(to, shape);
    struct kld_request request =
        small_request(ROWS, CLASSES, to->q, to->p, shape->in_place ? to->q : to->grad_q);
    request.op.divergence = shape->divergence;
    request.op.reduction = KLD_REDUCTION_ROWMEAN;
    if (shape->divergence == KLD_DIVERGENCE_MIXED_KL)
        kld_op_set_number(&request.op, "weight", 0.3, NULL);
    if (shape->divergence == KLD_DIVERGENCE_SKEW_KL ||
        shape->divergence == KLD_DIVERGENCE_SKEW_REVERSE_KL)
        kld_op_set_number(&request.op, "skew", 0.2, NULL);
    place(&request, KLD_SLOT_GRAD_TARGETS, KLD_DTYPE_FP32, shape->in_place ? to->p : to->grad_p);
    place(&request, KLD_SLOT_ROW_WEIGHTS, KLD_DTYPE_FP32, weights);
    place(&request, KLD_SLOT_ROW_LOSS, KLD_DTYPE_FP64, to->row_loss);
    place(&request, KLD_SLOT_LOSS, KLD_DTYPE_FP32, &to->loss);
    if (shape->mask)
        place(&request, KLD_SLOT_ROW_MASK, KLD_DTYPE_BOOL, mask);
    if (shape->grad_output)
        place(&request, KLD_SLOT_GRAD_OUTPUT, KLD_DTYPE_FP32, &scalar);
    enum kld_status status = kld_run(connection, &request, &to->result, &error);
    ck_assert_msg(status == KLD_OK, "%d: %s", status, error.text);
}

static void same(const struct shape *shape) {
    static struct results expected, got;
    struct kld_connect_options options = {.part_bytes_max = 1}; /* parts of one row */
    struct kld_connection *one = NULL, *many = NULL;
    ck_assert_int_eq(kld_connect("local:cpu", NULL, &one, &error), KLD_OK);
    ck_assert_int_eq(kld_connect(THREE, &options, &many, &error), KLD_OK);
    run(one, shape, &expected);
    run(many, shape, &got);
    for (int row = 0; row < ROWS; row++)
        ck_assert_msg(memcmp(&expected.row_loss[row], &got.row_loss[row], sizeof(double)) == 0,
                      "divergence %u, row %d: %.17g, over several servers %.17g", shape->divergence,
                      row, expected.row_loss[row], got.row_loss[row]);
    ck_assert_msg(memcmp(&expected.loss, &got.loss, sizeof(float)) == 0,
                  "divergence %u: loss %g, over several servers %g", shape->divergence,
                  (double)expected.loss, (double)got.loss);
    ck_assert_mem_eq(&expected.result.loss, &got.result.loss, sizeof(double));
    ck_assert_mem_eq(expected.q, got.q, sizeof got.q);
    ck_assert_mem_eq(expected.p, got.p, sizeof got.p);
    ck_assert_mem_eq(expected.grad_q, got.grad_q, sizeof got.grad_q);
    ck_assert_mem_eq(expected.grad_p, got.grad_p, sizeof got.grad_p);
    kld_close(one);
    kld_close(many);
}

/* Gradients are 0 then, but the losses of the rows have the bits that they have beside gradients.
 */
START_TEST(rows_of_weights_that_sum_to_zero) {
    for (uint32_t i = 0; i < 9 * 8; i++)
        same(&(struct shape){.divergence = i % 9,
                             .last_weight = -2,
                             .in_place = i / 9 & 1,
                             .grad_output = i / 9 & 2,
                             .mask = i / 9 & 4});
}
END_TEST

/* A sum of 0 over less than 0 is -0. */
START_TEST(a_loss_of_zero_has_its_sign) {
    for (uint32_t i = 0; i < 9 * 4; i++)
        same(&(struct shape){.divergence = i % 9,
                             .last_weight = i / 9 & 1 ? -5 : -2,
                             .equal = true,
                             .grad_output = i / 9 & 2});
}
END_TEST

UNIT_MAIN("client/split_zero", rows_of_weights_that_sum_to_zero, a_loss_of_zero_has_its_sign)
