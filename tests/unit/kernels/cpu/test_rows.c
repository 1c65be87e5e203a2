/* test_rows.c - rows of logits at which the CPU's FP32 arithmetic could go wrong, of every rule:
 * the case table's checks on more kinds of rows than its list has. */
#include "tests/unit/unit.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/kernel.h"
#include "tests/unit/kernels/table.h"

static struct kld_device *device_open(void) {
    struct kld_device_options options = {.threads = 2, .spin_us = 5};
    struct kld_device *device = NULL;
    struct kld_error err;
    ck_assert_int_eq(kld_backend_cpu.device_open(&options, &device, &err), KLD_OK);
    return device;
}

/* As the table's cases are; number: of this one among those of its name. */
static void check(struct kld_device *device, const struct table_case *at, uint64_t seed,
                  unsigned number) {
    const struct table_place place = {TABLE_POOL, 0, false, 1};
    struct table_truth truth;
    struct table_outputs outputs = {0};
    char failure[256] = "";
    table_truth_init(&truth, at, seed);
    bool fine = table_run(device, &truth, at, &place, &outputs, failure) &&
                table_check(&truth, at, &outputs, failure);
    ck_assert_msg(fine, "%s, %s, case %u: %s", at->name, kld_divergence_name(at->divergence),
                  number, failure);
    table_outputs_done(&outputs);
    table_truth_done(&truth);
}

/* Logits that agree up to a constant, and nearly: the constant must not cost accuracy. */
START_TEST(test_near_and_shifted) {
    struct kld_device *device = device_open();
    for (uint32_t divergence = 0; divergence <= KLD_DIVERGENCE_CROSS_ENTROPY; divergence++) {
        struct table_case at = {.name = "shifted",
                                .divergence = divergence,
                                .parameter = 0.3,
                                .form = {KLD_FORM_LOGITS, KLD_FORM_LOGITS},
                                .dtype = {KLD_DTYPE_FP32, KLD_DTYPE_FP32},
                                .data = TABLE_NEAR,
                                .noise = 1e-3,
                                .shift = 40,
                                .rank = 2,
                                .shape = {6, 5000},
                                .gradient = {true, true},
                                .loss = true,
                                .row_loss = true};
        check(device, &at, 3, divergence);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Short rows are done several at a time, and those that are not plain numbers another way than
 * those beside them: a row's bits are the same alone, next to such rows and in any place. */
#define SHORT 37
static void check_side_by_side(struct kld_rule rule) {
    static const float odd[][2] = {{-INFINITY, 0}, {NAN, 0}, {0, INFINITY}, {-3e38f, 1}, {1, 9e4f}};
    static const float masked[][2] = {{-INFINITY, -INFINITY}, {-3e38f, -1e9f}, {-1e4f, -INFINITY}};
    const struct kld_cpu_kernels *kernels = kld_cpu_kernels_choose();
    struct kld_cpu_work work = {.rule = rule,
                                .form = {KLD_FORM_LOGITS, KLD_FORM_LOGITS},
                                .dtype = {KLD_DTYPE_FP32, KLD_DTYPE_FP32},
                                .gradient = {true, true},
                                .inverse_temperature = 0.7};
    float in[2][KLD_CPU_LANES_MAX][SHORT], out[3][2][KLD_CPU_LANES_MAX][SHORT];
    uint64_t lanes = kernels->lanes;
    for (uint64_t r = 0; r < lanes; r++)
        for (int side = 0; side < 2; side++)
            for (uint64_t i = 0; i < SHORT; i++)
                in[side][r][i] = (float)((r * 31 + i * 17 + (uint64_t)side * 7) % 23) * 0.37f;
    memset(out, 0, sizeof out);
    for (size_t k = 0; k < sizeof odd / sizeof *odd; k++)
        for (int side = 0; side < 2; side++)
            in[side][(2 * k + 1) % lanes][5 + k] = odd[k][side];
    for (size_t k = 0; k < sizeof masked / sizeof *masked; k++)
        for (int side = 0; side < 2; side++)
            in[side][(2 * k + 2) % lanes][3 + k] = masked[k][side];
    for (int way = 0; way < 3; way++) { /* together, backwards, each alone */
        struct kld_cpu_span span[KLD_CPU_LANES_MAX];
        static double value[3][KLD_CPU_LANES_MAX];
        double found[KLD_CPU_LANES_MAX];
        for (uint64_t r = 0; r < lanes; r++) {
            uint64_t row = way == 1 ? lanes - 1 - r : r;
            span[r] = (struct kld_cpu_span){.count = SHORT, .gradient_factor = 1};
            for (int side = 0; side < 2; side++) {
                span[r].in[side] = (const unsigned char *)in[side][row];
                span[r].gradient[side] = (unsigned char *)out[way][side][row];
            }
        }
        for (uint64_t r = 0; way == 2 && r < lanes; r++)
            kernels->rows(&work, &span[r], 1, true, &found[r]);
        if (way != 2)
            kernels->rows(&work, span, lanes, true, found);
        for (uint64_t r = 0; r < lanes; r++)
            value[way][way == 1 ? lanes - 1 - r : r] = found[r];
        ck_assert_int_eq(memcmp(value[way], value[0], lanes * sizeof *found), 0);
        ck_assert_int_eq(memcmp(out[way], out[0], sizeof out[0]), 0);
    }
}

START_TEST(test_short_rows_side_by_side) {
    static const struct kld_rule rules[] = {
        {KLD_RULE_KL, 0.25, 0.75, 0, 0},
        {KLD_RULE_KL, 1, 0, 0, 0},
        {KLD_RULE_KL, 0, 1, 0, 0},
        {KLD_RULE_MIXTURE, 0.5, 0.5, 0.5, 0.5},
        {KLD_RULE_MIXTURE, 0.3, 0.7, 0.3, 0.7},
        {KLD_RULE_MIXTURE, 1, 0, 0.1, 0.9},
        {KLD_RULE_MIXTURE, 0, 1, 0.9, 0.1},
        {KLD_RULE_MIXTURE, 1, 0, 0.99, 0.01},
        {KLD_RULE_TV, 0, 0, 0, 0},
        {KLD_RULE_CROSS_ENTROPY, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        check_side_by_side(rules[i]);
}
END_TEST

/* Few classes, which are done in double but with less of a logarithm and a power than double has:
 * rows that differ, nearly agree, are sure of their class, of the same or of another, and have
 * masked classes; mixtures on both sides of where that is still enough. */
START_TEST(test_short_logits) {
    static const struct {
        enum table_data data;
        double noise, shift;
    } kinds[] = {
        {TABLE_RANDOM, 0, 0},       {TABLE_NEAR, 1e-3, 0},  {TABLE_NEAR, 1e-5, 20},
        {TABLE_SHARP, 0, 0},        {TABLE_AGREE, 1e-4, 0}, {TABLE_CONFIDENT, 1e-6, 0},
        {TABLE_CONFIDENT, 0.01, 0}, {TABLE_FINE, 1e-3, 0},  {TABLE_EQUAL, 0, 0},
        {TABLE_ZEROS, 0, 0},        {TABLE_LOWEST, 0, 0},
    };
    static const double parameters[] = {0.5, 0.3, 0.7, 0.04, 0.968, 0.97, 0.0011, 0.0009, 0.9995};
    static const uint64_t shape[][2] = {{600, 2}, {600, 3}, {200, 10},
                                        {40, 64}, {9, 300}, {9, 512}};
    struct kld_device *device = device_open();
    const unsigned count = sizeof kinds / sizeof *kinds, all = 6 * count;
    for (unsigned i = 0; i < all * (KLD_DIVERGENCE_CROSS_ENTROPY + 1); i++) {
        const uint64_t *at_shape = shape[i % 6];
        struct table_case at = {.name = "short",
                                .divergence = i / all,
                                .parameter = parameters[i % 9],
                                .form = {KLD_FORM_LOGITS, KLD_FORM_LOGITS},
                                .dtype = {KLD_DTYPE_FP32, i % 7 ? KLD_DTYPE_FP32 : KLD_DTYPE_FP16},
                                .data = kinds[i / 6 % count].data,
                                .noise = kinds[i / 6 % count].noise,
                                .shift = kinds[i / 6 % count].shift,
                                .temperature = i % 4 == 3 ? 0.6 : 0,
                                .rank = 2,
                                .shape = {at_shape[0], at_shape[1]},
                                .distinct = (uint32_t)at_shape[0],
                                .gradient = {i % 5 != 0, i % 5 < 3},
                                .loss = true,
                                .row_loss = true};
        check(device, &at, 2000 + i, i);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Rows on which FP32 arithmetic has failed before. */
static const struct hard_row {
    uint32_t divergence;
    double parameter;
    uint32_t dtype;
    enum table_data data;
    double noise;
    uint64_t rows, classes;
    bool gradient;
} hard_rows[] = {
    {KLD_DIVERGENCE_FORWARD_KL, NAN, KLD_DTYPE_FP32, TABLE_AGREE, 1e-4, 2, 50000, true},
    {KLD_DIVERGENCE_FORWARD_KL, NAN, KLD_DTYPE_FP32, TABLE_AGREE, 1e-2, 2, 50000, true},
    {KLD_DIVERGENCE_JS, 0.001, KLD_DTYPE_FP32, TABLE_RANDOM, 0, 4, 1000, true},
    {KLD_DIVERGENCE_JS, 0.999, KLD_DTYPE_BF16, TABLE_RANDOM, 0, 4, 1000, true},
    {KLD_DIVERGENCE_SKEW_KL, 0.999, KLD_DTYPE_BF16, TABLE_RANDOM, 0, 4, 1000, false},
    {KLD_DIVERGENCE_SKEW_KL, 0.9999, KLD_DTYPE_FP32, TABLE_RANDOM, 0, 4, 1000, false},
    {KLD_DIVERGENCE_FORWARD_KL, NAN, KLD_DTYPE_BF16, TABLE_SHARP, 0, 2000, 3, false},
    {KLD_DIVERGENCE_SKEW_KL, 0.3, KLD_DTYPE_BF16, TABLE_SHARP, 0, 2000, 3, false},
    {KLD_DIVERGENCE_JS, 0.3, KLD_DTYPE_BF16, TABLE_SHARP, 0, 2000, 5, false},
};

static void check_hard_row(struct kld_device *device, const struct hard_row *row) {
    struct table_case at = {.name = "hard",
                            .divergence = row->divergence,
                            .parameter = row->parameter,
                            .form = {KLD_FORM_LOGITS, KLD_FORM_LOGITS},
                            .dtype = {row->dtype, row->dtype},
                            .data = row->data,
                            .noise = row->noise,
                            .rank = 2,
                            .shape = {row->rows, row->classes},
                            .gradient = {row->gradient, false},
                            .loss = true,
                            .row_loss = true};
    check(device, &at, 17, (unsigned)(row - hard_rows));
}

START_TEST(test_hard_rows) {
    struct kld_device *device = device_open();
    for (size_t i = 0; i < sizeof hard_rows / sizeof hard_rows[0]; i++)
        check_hard_row(device, &hard_rows[i]);
    kld_backend_cpu.device_close(device);
}
END_TEST

/* A dozen classes hold much of the mass, each nearly nothing of what js centres: all of it rounds
 * off the centre. In each row's largest gradient FP32 alone was up to 4e-7 off. */
START_TEST(test_js_whose_heavy_classes_agree) {
    struct kld_device *device = device_open();
    for (unsigned k = 0; k < 8; k++) {
        struct table_case at = {.name = "agree",
                                .divergence = KLD_DIVERGENCE_JS,
                                .parameter = k & 2 ? 0.1 : 0.3,
                                .temperature = k & 1 ? 2 : 1.5,
                                .form = {KLD_FORM_LOGITS, KLD_FORM_LOGITS},
                                .dtype = {KLD_DTYPE_FP32, KLD_DTYPE_FP32},
                                .data = TABLE_AGREE,
                                .noise = 1e-2,
                                .rank = 2,
                                .shape = {24, 8192},
                                .gradient = {!(k & 4), k & 4},
                                .loss = true,
                                .row_loss = true};
        check(device, &at, 1, k);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Rows of logits that are long enough for FP32: each rule and gradient where rows differ much, a
 * little and hardly, where few classes hold the mass, and where only those agree. */
START_TEST(test_logits) {
    static const struct {
        enum table_data data;
        double noise, shift;
    } kinds[] = {
        {TABLE_RANDOM, 0, 0},   {TABLE_NEAR, 0.3, 0},   {TABLE_NEAR, 0.03, 0},
        {TABLE_NEAR, 1e-3, 40}, {TABLE_AGREE, 0.01, 0}, {TABLE_AGREE, 1e-4, 0},
        {TABLE_SHARP, 0, 0},    {TABLE_ZEROS, 0, 0},    {TABLE_EQUAL, 0, 0},
        {TABLE_INFINITE, 0, 0},
    };
    static const uint32_t dtypes[] = {KLD_DTYPE_FP32, KLD_DTYPE_BF16, KLD_DTYPE_FP16};
    static const uint64_t classes[] = {513, 700, 1501, 5000};
    struct kld_device *device = device_open();
    const unsigned count = sizeof kinds / sizeof kinds[0];
    for (unsigned i = 0; i < 3 * count * (KLD_DIVERGENCE_CROSS_ENTROPY + 1); i++) {
        uint32_t divergence = i / (3 * count);
        struct table_case at = {.name = "logits",
                                .divergence = divergence,
                                .parameter = i % 2 ? 0.3 : 0.5,
                                .form = {KLD_FORM_LOGITS, KLD_FORM_LOGITS},
                                .dtype = {dtypes[i % 3], dtypes[(i + i / 7 % 2) % 3]},
                                .data = kinds[i / 3 % count].data,
                                .noise = kinds[i / 3 % count].noise,
                                .shift = kinds[i / 3 % count].shift,
                                .temperature = i % 4 == 3 ? 1.7 : 0,
                                .rank = 2,
                                .shape = {2, classes[i % 4]},
                                .gradient = {i % 5 != 0, i % 2},
                                .loss = true,
                                .row_loss = true};
        check(device, &at, 1000 + i, i);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* A factor of the gradients beyond FP32, whose product with a small p/q is not. */
START_TEST(test_factor_beyond_float) {
    struct kld_device *device = device_open();
    for (uint32_t i = 0; i < 36; i++) {
        uint32_t form = i >= 24 ? KLD_FORM_LOGITS : i % 2 ? KLD_FORM_LOGPROBS : KLD_FORM_PROBS;
        struct table_case at = {.name = "factor",
                                .divergence =
                                    i < 12 ? KLD_DIVERGENCE_FORWARD_KL : KLD_DIVERGENCE_JS,
                                .parameter = NAN,
                                .form = {form, form},
                                .dtype = {i % 6 < 4 ? KLD_DTYPE_FP32 : KLD_DTYPE_BF16,
                                          i % 6 < 2 ? KLD_DTYPE_FP32 : KLD_DTYPE_BF16},
                                .data = i >= 24 ? TABLE_NEAR : TABLE_RANDOM,
                                .noise = 1e-3,
                                .reduction = KLD_REDUCTION_SUM,
                                .scale = i % 12 < 6 ? 1e39 : -1e40,
                                .rank = 2,
                                .shape = {3, i % 4 < 2 ? 50 : 20000},
                                .gradient = {true, i % 3 == 0},
                                .loss = true};
        check(device, &at, 50 + i, i);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Each factor of the gradients is a number of FP32, and its product with a weight is not: what is
 * less is 0 there, or has few bits, where p/q makes much of it. */
START_TEST(test_coefficient_below_float) {
    static const struct {
        uint32_t divergence;
        double parameter, scale, noise;
        uint32_t reduction;
    } kinds[] = {
        {KLD_DIVERGENCE_MIXED_KL, 1e-12, 2e-35, 78, KLD_REDUCTION_SUM},
        {KLD_DIVERGENCE_MIXED_KL, 1e-25, 1e-20, 78, KLD_REDUCTION_SUM},
        {KLD_DIVERGENCE_MIXED_KL, 1e-30, 1e-9, 78, KLD_REDUCTION_MEAN},
        {KLD_DIVERGENCE_JS, 1e-40, 1e30, 0, KLD_REDUCTION_SUM},
    };
    struct kld_device *device = device_open();
    for (uint32_t i = 0; i < 4 * sizeof kinds / sizeof kinds[0]; i++) {
        struct table_case at = {.name = "coefficient",
                                .divergence = kinds[i / 4].divergence,
                                .parameter = kinds[i / 4].parameter,
                                .form = {KLD_FORM_PROBS, KLD_FORM_PROBS},
                                .dtype = {i % 2 ? KLD_DTYPE_BF16 : KLD_DTYPE_FP32, KLD_DTYPE_FP32},
                                .data = kinds[i / 4].noise > 0 ? TABLE_DISJOINT : TABLE_RANDOM,
                                .noise = kinds[i / 4].noise,
                                .reduction = kinds[i / 4].reduction,
                                .scale = kinds[i / 4].scale,
                                .rank = 2,
                                .shape = {3, i % 4 < 2 ? 64 : 20000},
                                .gradient = {true, i % 4 == 0},
                                .loss = true};
        check(device, &at, 70 + i, i);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Logarithms whose masses FP32 does not hold, in rows that have no others. */
START_TEST(test_faint_logprobs) {
    struct kld_device *device = device_open();
    for (uint32_t i = 0; i < 4 * (KLD_DIVERGENCE_CROSS_ENTROPY + 1); i++) {
        struct table_case at = {.name = "faint",
                                .divergence = i / 4,
                                .parameter = 0.3,
                                .form = {KLD_FORM_LOGPROBS, KLD_FORM_LOGPROBS},
                                .dtype = {KLD_DTYPE_FP32, KLD_DTYPE_FP32},
                                .data = TABLE_FAINT,
                                .noise = i % 2 ? 1e4 : 90,
                                .shift = 88,
                                .reduction = KLD_REDUCTION_SUM,
                                .scale = 1e30,
                                .rank = 2,
                                .shape = {2, 300},
                                .gradient = {i % 4 < 2, i % 4 < 2},
                                .loss = true,
                                .row_loss = true};
        check(device, &at, 90 + i, i);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Temperatures whose reciprocal FP32 holds badly, and rows whose value is that of classes far below
 * the largest: by that many times as much their masses are off. */
START_TEST(test_temperatures) {
    static const double temperatures[] = {5.67, 5.41, 0.7, 3};
    struct kld_device *device = device_open();
    for (uint32_t i = 0; i < 8 * (KLD_DIVERGENCE_CROSS_ENTROPY + 1); i++) {
        uint32_t dtype = i % 2 ? KLD_DTYPE_BF16 : KLD_DTYPE_FP16;
        double temperature = temperatures[i / 2 % 4];
        struct table_case at = {.name = "temperature",
                                .divergence = i / 8,
                                .parameter = 0.3,
                                .form = {KLD_FORM_LOGITS, KLD_FORM_LOGITS},
                                .dtype = {dtype, dtype},
                                .data = TABLE_FAINT,
                                .noise = 60000,
                                .shift = 28 * temperature,
                                .temperature = temperature,
                                .rank = 2,
                                .shape = {2, 300},
                                .loss = true,
                                .row_loss = true};
        check(device, &at, 5, i);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Masses of which a half is no number of FP32, and some of which a block's sum is none. */
START_TEST(test_tv_at_the_ends_of_float) {
    static const double steps[] = {0x1p-149, 0x1p-144, 0x1p120};
    static const double scales[] = {1e40, 1e38, 1e-20};
    struct kld_device *device = device_open();
    for (uint32_t i = 0; i < 12; i++) {
        struct table_case at = {.name = "tv",
                                .divergence = KLD_DIVERGENCE_TV,
                                .parameter = NAN,
                                .form = {KLD_FORM_PROBS, KLD_FORM_PROBS},
                                .dtype = {KLD_DTYPE_FP32, KLD_DTYPE_FP32},
                                .data = TABLE_STEPS,
                                .noise = steps[i % 3],
                                .reduction = KLD_REDUCTION_SUM,
                                .scale = scales[i % 3],
                                .rank = 2,
                                .shape = {3, i < 6 ? 300 : 4096},
                                .gradient = {i / 3 % 2, i / 3 % 2},
                                .loss = true,
                                .row_loss = true};
        check(device, &at, 90 + i, i);
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

UNIT_MAIN("kernels/cpu/rows", test_near_and_shifted, test_short_rows_side_by_side,
          test_short_logits, test_hard_rows, test_js_whose_heavy_classes_agree, test_logits,
          test_factor_beyond_float, test_coefficient_below_float, test_faint_logprobs,
          test_temperatures, test_tv_at_the_ends_of_float)
