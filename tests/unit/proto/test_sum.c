/* test_sum.c - the order of a loss's sum, by itself and against the CPU back end, which must add so
 * and no other way: FP64 losses show the last bit. */
#include "proto/sum.h"

#include <string.h>

#include "client/kld.h"
#include "tests/unit/unit.h"

START_TEST(groups_follow_from_the_shape) {
    const uint64_t cases[][3] = {
        /* rows, classes, rows of a group */
        {1, 1, 32768},      {100000, 1, 32768}, {10, 32768, 1},
        {10, 32769, 1},     {10, 32767, 2},     {7, 1000, 33},
        {65536, 40000, 1},  {65537, 40000, 2},  {1ull << 40, 1, 1ull << 24},
        {1, 1ull << 40, 1}, {131073, 100000, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        ck_assert_uint_eq(kld_sum_group_rows(cases[i][0], cases[i][1]), cases[i][2]);
}
END_TEST

START_TEST(terms_are_added_in_groups) {
    /* Four groups of two: 1 is lost beside 1e16, 2 is not. */
    const double terms[7] = {1, 1e16, 1, 1, -1e16, 1, 1};
    double sum = ((0 + (1 + 1e16)) + (1.0 + 1.0)) + (-1e16 + 1) + 1;
    ck_assert_double_eq(kld_sum_terms(terms, 7, 16384), sum);
    double other = 0;
    for (int i = 0; i < 7; i++)
        other += terms[i];
    ck_assert_double_ne(sum, other);
    ck_assert_double_eq(kld_sum_terms(terms, 7, 4), other); /* one group */
}
END_TEST

static uint64_t state;

static double random_unit(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(state >> 11) / 9007199254740992.0 + 1e-3;
}

/* Loss and terms of one job, both of FP64. */
static void compare(struct kld_connection *connection, uint64_t rows, uint64_t classes,
                    bool weighted) {
    double *q = calloc(rows * classes, 8), *p = calloc(rows * classes, 8), *terms = calloc(rows, 8);
    float *weights = calloc(rows, 4);
    unsigned char *mask = calloc(rows, 1);
    struct kld_request request = {0};
    struct kld_result result;
    struct kld_error error;
    for (uint64_t i = 0; i < rows * classes; i++) {
        q[i] = random_unit();
        p[i] = random_unit();
    }
    for (uint64_t i = 0; i < rows; i++) {
        weights[i] = (float)random_unit();
        mask[i] = random_unit() > 0.3;
    }
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = rows, request.op.shape[1] = classes;
    request.op.reduction = KLD_REDUCTION_ROWMEAN;
    kld_op_set_number(&request.op, "scale", 0.3, NULL);
    kld_op_set_number(&request.op, "normalizer", 7.1, NULL);
    const struct {
        enum kld_slot slot;
        uint32_t dtype;
        void *data;
    } tensors[] = {{KLD_SLOT_PREDICTIONS, KLD_DTYPE_FP64, q},
                   {KLD_SLOT_TARGETS, KLD_DTYPE_FP64, p},
                   {KLD_SLOT_ROW_LOSS, KLD_DTYPE_FP64, terms},
                   {KLD_SLOT_ROW_WEIGHTS, KLD_DTYPE_FP32, weights},
                   {KLD_SLOT_ROW_MASK, KLD_DTYPE_BOOL, mask}};
    for (size_t i = 0; i < (weighted ? 5 : 3); i++) {
        request.op.tensor[tensors[i].slot].dtype = tensors[i].dtype;
        request.bytes[tensors[i].slot].data = tensors[i].data;
    }
    ck_assert_msg(kld_run(connection, &request, &result, &error) == KLD_OK, "%s", error.text);
    ck_assert_double_eq(result.loss, kld_sum_terms(terms, rows, classes) / 7.1);
    free(q), free(p), free(terms), free(weights), free(mask);
}

START_TEST(the_cpu_adds_so) {
    const uint64_t shapes[][2] = {{1, 1},     {40000, 1}, {40000, 3}, {3000, 70},
                                  {333, 400}, {50, 5000}, {7, 40000}, {2, 100000}};
    struct kld_connection *connection;
    struct kld_connect_options options = {.threads = 2};
    ck_assert_int_eq(kld_connect("local:cpu", &options, &connection, NULL), KLD_OK);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        compare(connection, shapes[i][0], shapes[i][1], false);
        compare(connection, shapes[i][0], shapes[i][1], true);
    }
    kld_close(connection);
}
END_TEST

UNIT_MAIN("proto/sum", groups_follow_from_the_shape, terms_are_added_in_groups, the_cpu_adds_so)
