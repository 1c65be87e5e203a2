/* table_held.c - cases of rows of logits that are long enough to be held in memory nearer than the
 * tensors' (kernels/cuda/resident.cuh: from 4096 bytes on), and so many that what holds them is
 * used again and again: each row beside others that go other ways. */
#include <math.h>
#include <string.h>

#include "tests/unit/kernels/table_list.h"

static const uint32_t dtypes[] = {FP32, BF16, FP16};

/* Classes by the bytes of a row: just enough, more, the last and the first of a layout. Odd numbers
 * start each row at another place after a multiple of 16 bytes. */
static uint64_t classes_of(uint32_t dtype, uint64_t which) {
    static const uint64_t bytes_16[] = {2049, 2048, 2063, 3001, 2056, 4095, 8192, 8193, 8200, 8211};
    static const uint64_t bytes_32[] = {1025, 1024, 1031, 1502, 1028, 2050, 4096, 4097, 4100, 4105};
    return dtype == FP32 ? bytes_32[which % 10] : bytes_16[which % 10];
}

/* What rows are multiplied by and divided by, and which ones count. */
static void rotate_rows(struct table_list *list, struct table_case *at) {
    at->masking = (enum table_masking)table_list_turn(list, 4);
    if (at->masking == TABLE_MASK_ALL && table_list_turn(list, 4))
        at->masking = TABLE_MASK_RUNS;
    at->mask = table_list_turn(list, 5) < 3;
    at->mask_uint8 = table_list_turn(list, 2);
    at->weights = at->weights_few = table_list_turn(list, 2);
    at->scale = table_list_turn(list, 2) ? 2.25 : 0;
    at->row_loss = table_list_turn(list, 3);
    at->strided = table_list_turn(list, 3) == 0;
    if (table_list_turn(list, 2))
        at->grad_output_dtype = dtypes[table_list_turn(list, 3)];
    bool divided = at->reduction == KLD_REDUCTION_MEAN ||
                   at->reduction == KLD_REDUCTION_BATCHMEAN ||
                   at->reduction == KLD_REDUCTION_ROWMEAN;
    at->normalizer = divided && table_list_turn(list, 3) == 0 ? 12.5 : 0;
}

/* A crowd of all that differs. gradients: 1 to the predictions, 2 to the targets. */
static void add_crowd(struct table_list *list, uint32_t divergence, uint32_t dtype, bool finite,
                      uint64_t rows, uint64_t classes, unsigned gradients) {
    static const double temperatures[] = {0, 0.5, 0, 2, 0.7, 0, 1e3, 0, 1e-2, 0};
    static const double parameters[] = {0.5, 0.1, 0.9, 0.3, 0.77};
    struct table_case *at = table_list_add_one(list, finite ? "held finite" : "held", rows, classes,
                                               divergence, LOGITS, dtype);
    at->data = finite ? TABLE_CROWD_FINITE : TABLE_CROWD;
    at->distinct = TABLE_CROWD_ROWS;
    at->first = (uint32_t)table_list_turn(list, TABLE_CROWD_ROWS);
    at->shuffled = true;
    at->temperature = temperatures[table_list_turn(list, 10)];
    at->gradient[0] = gradients & 1;
    at->gradient[1] = gradients & 2;
    if (table_list_turn(list, 3))
        at->parameter = parameters[table_list_turn(list, 5)];
    /* Of a crowd with a NaN in it only the rows can be told. */
    at->reduction = finite                     ? (uint32_t)table_list_turn(list, 6)
                    : table_list_turn(list, 4) ? KLD_REDUCTION_ROW
                                               : KLD_REDUCTION_BATCHMEAN;
    rotate_rows(list, at);
    at->row_loss = at->row_loss || !finite;
    if (!gradients)
        at->grad_output_dtype = 0;
}

static void add_crowds(struct table_list *list, bool quick) {
    uint32_t turns = quick ? 1 : 12;
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++)
        for (uint32_t i = 0; i < 6 * turns; i++) {
            uint32_t dtype = dtypes[i % 3];
            uint64_t classes = classes_of(dtype, table_list_turn(list, quick ? 5 : 10));
            uint64_t rows = quick ? 450 + table_list_turn(list, 300) : 1200;
            add_crowd(list, divergence, dtype, i % 2, rows, classes,
                      (unsigned)table_list_turn(list, 4));
        }
    /* The first rows that are cut among more warps. */
    for (uint32_t divergence = 0; quick && divergence < TABLE_DIVERGENCES; divergence++)
        add_crowd(list, divergence, dtypes[divergence % 3], divergence % 2,
                  divergence % 3 ? 290 : 700,
                  classes_of(dtypes[divergence % 3], 6 + divergence % 4), (divergence + 1) % 4);
}

/* So many rows that every place that holds some has held others before, several times. */
static void add_deep(struct table_list *list, bool quick) {
    for (uint32_t i = 0; i < TABLE_DIVERGENCES; i++)
        for (uint32_t k = 0; k < (quick ? 1 : 9); k++) {
            uint32_t dtype = dtypes[(i + k) % 3], gradients = (i + k + k / 3) % 4;
            add_crowd(list, i, dtype, k % 2, quick ? 1700 : 6000, classes_of(dtype, k % 3),
                      gradients);
            if (!quick)
                add_crowd(list, i, dtype, k % 2, 2000, classes_of(dtype, 7 + k % 3), gradients);
        }
    add_crowd(list, KLD_DIVERGENCE_FORWARD_KL, BF16, false, 5300, 2049, 0);
    add_crowd(list, KLD_DIVERGENCE_FORWARD_KL, FP32, true, 5300, 1025, 1);
    for (uint32_t i = 0; i < 3; i++) {
        add_crowd(list, i * 3 % TABLE_DIVERGENCES, dtypes[i], true, 600, classes_of(dtypes[i], i),
                  3);
        struct table_case *at = &list->at[list->count - 1];
        at->reduction = KLD_REDUCTION_ROWMEAN;
        at->weights = at->weights_few = at->weights_cancel = at->row_loss = true;
        at->mask = false;
        at->normalizer = 0;
    }
}

/* Rows that several processors hold together: 2, 4 and 8 of them, with room for three rows, for two
 * and for one. */
static void add_wide(struct table_list *list, bool quick) {
    static const struct {
        uint64_t rows, classes; /* of 16 bits; FP32: half the classes */
    } sizes[] = {{150, 20001}, {80, 50257}, {40, 100003}, {36, 151936}, {36, 200003}, {150, 32770}};
    for (uint32_t i = 0; i < TABLE_DIVERGENCES; i++)
        for (uint32_t k = 0; k < 6; k++) {
            uint32_t dtype = dtypes[(i + k) % 3];
            if (quick && k != (i + i / 6) % 6)
                continue;
            uint64_t classes = dtype == FP32 ? (sizes[k].classes + 1) / 2 : sizes[k].classes;
            for (unsigned gradients = 0; gradients < 4; gradients++)
                if (!quick || gradients == (i + 1) % 4)
                    add_crowd(list, i, dtype, gradients % 2, sizes[k].rows, classes, gradients);
        }
}

static void add_once(struct table_list *list, uint32_t divergence, uint32_t dtype, bool finite,
                     uint64_t rows, uint64_t classes) {
    add_crowd(list, divergence, dtype, finite, rows, classes, 0);
    struct table_case *at = &list->at[list->count - 1];
    char name[sizeof at->name];
    snprintf(name, sizeof name, "read once %.50s", at->name);
    memcpy(at->name, name, sizeof name);
}

/* Only the value: rows that are read once (kernels/cuda/logits_values.cuh), by a warp, by a block,
 * by two, four and eight of them; and the first that are too long for that. */
static void add_read_once(struct table_list *list, bool quick) {
    static const uint32_t divergences[] = {KLD_DIVERGENCE_FORWARD_KL, KLD_DIVERGENCE_REVERSE_KL,
                                           KLD_DIVERGENCE_JEFFREYS, KLD_DIVERGENCE_MIXED_KL,
                                           KLD_DIVERGENCE_CROSS_ENTROPY};
    static const struct {
        uint64_t rows, classes; /* of 16 bits; FP32: half the classes */
    } sizes[] = {{700, 1537}, {300, 2999},  {150, 8192},  {150, 8193},  {80, 20001},
                 {40, 65601}, {38, 140001}, {38, 300007}, {38, 524288}, {38, 524293}};
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t k = 0; k < 10; k++) {
            uint32_t dtype = dtypes[(i + k) % 3];
            if (quick && k > 2 && k != 3 + i % 4)
                continue;
            uint64_t classes = dtype == FP32 ? (sizes[k].classes + 1) / 2 : sizes[k].classes;
            add_once(list, divergences[i], dtype, (i + k / 3) % 2, sizes[k].rows, classes);
        }
    /* More of them than there are places at a time, so that some have one after the other. */
    add_once(list, KLD_DIVERGENCE_FORWARD_KL, BF16, true, 34000, 1537);
    add_once(list, KLD_DIVERGENCE_JEFFREYS, FP16, false, 4400, 8193);
    if (!quick) {
        add_once(list, KLD_DIVERGENCE_CROSS_ENTROPY, FP32, true, 4400, 8192);
        add_once(list, KLD_DIVERGENCE_REVERSE_KL, BF16, false, 1700, 65601);
    }
}

/* Rows that are shorter than those: gradients of FP32 in FP64 (kernels/cuda/logits_short_wide.cuh),
 * and the shortest that are read once or twice. */
static void add_shorter(struct table_list *list, bool quick) {
    static const uint64_t few[] = {257, 512, 600, 767, 1000, 1023}, half[] = {1025, 1280, 1501};
    for (uint32_t i = 0; i < TABLE_DIVERGENCES; i++)
        for (uint32_t k = 0; k < (quick ? 2 : 6); k++)
            add_crowd(list, i, FP32, k % 2, quick ? 200 : 900, few[(k + 2 * i) % 6],
                      1 + (i + k) % 3);
    for (uint32_t k = 0; k < 6; k++) {
        uint32_t dtype = k % 2 ? FP16 : BF16;
        add_once(list, k % 4 ? KLD_DIVERGENCE_FORWARD_KL : KLD_DIVERGENCE_JEFFREYS, dtype, k % 2,
                 900, half[k / 2]);
        add_crowd(list, k % 4 ? KLD_DIVERGENCE_FORWARD_KL : KLD_DIVERGENCE_CROSS_ENTROPY, dtype,
                  k / 2 % 2, 900, half[k / 2], 1);
    }
    add_once(list, KLD_DIVERGENCE_FORWARD_KL, FP32, true, 900, 600);
    add_once(list, KLD_DIVERGENCE_CROSS_ENTROPY, FP32, false, 900, 767);
}

/* Masses of one side that are all the same number, whose sum rounds the same way each time. */
static void add_constant(struct table_list *list) {
    static const uint64_t classes[] = {413, 1024, 8192, 32768};
    for (unsigned i = 0; i < 8; i++) {
        uint32_t half = i / 2 % 2 ? FP16 : BF16;
        struct table_case *at =
            table_list_add_one(list, "constant", 12, classes[i / 2],
                               i % 3 ? KLD_DIVERGENCE_FORWARD_KL : KLD_DIVERGENCE_CROSS_ENTROPY,
                               LOGITS, i % 2 ? half : FP32);
        at->data = TABLE_FINE;
        at->noise = 0.3;
        at->lift[1] = 1.37;
    }
}

/* Temperatures so low that one step of the larger side's logits is all that the other's differ by,
 * and one class of those counts by itself. */
static void add_fine(struct table_list *list) {
    for (unsigned i = 0; i < 6; i++) {
        bool half = i % 2;
        add_crowd(list, i % 3 ? KLD_DIVERGENCE_FORWARD_KL : KLD_DIVERGENCE_CROSS_ENTROPY,
                  half ? FP16 : BF16, true, 40, i < 4 ? 2048 : 20001, i / 2 % 2);
        struct table_case *at = &list->at[list->count - 1];
        at->data = TABLE_FINE;
        at->temperature = at->noise = half ? 1e-5 : 1e-4;
        at->lift[0] = 5;
        at->lift[1] = 4;
        snprintf(at->name, sizeof at->name, "fine %u", i);
    }
}

void table_list_held(struct table_list *list, bool quick) {
    add_crowds(list, quick);
    add_deep(list, quick);
    add_wide(list, quick);
    add_read_once(list, quick);
    add_shorter(list, quick);
    add_fine(list);
    add_constant(list);
}

/* Rows whose gradient is written once and follows from their sums: those that are read again
 * (kernels/cuda/logits_reread.cuh) by a warp and a block; those that are kept until then
 * (kernels/cuda/logits_kept.cuh), by a block, by two, four, eight, twelve and sixteen; and the
 * first that are too long for that. */
static const struct {
    uint64_t rows, classes; /* of 16 bits; FP32: half the classes */
} read_again[] = {{700, 2048}, {700, 2051}, {700, 4096}, {300, 4101}, {300, 8190}, {300, 8000}},
  kept[] = {{500, 8192},  {150, 16390}, {150, 16384}, {500, 8201},  {80, 32768},  {80, 32777},
            {38, 131072}, {80, 65543},  {36, 180000}, {36, 262144}, {36, 250007}, {36, 262152}};

/* q - p. */
static void add_difference(struct table_list *list, bool quick) {
    static const uint32_t divergences[] = {KLD_DIVERGENCE_FORWARD_KL, KLD_DIVERGENCE_CROSS_ENTROPY,
                                           KLD_DIVERGENCE_REVERSE_KL};
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t k = 0; k < 12; k++) {
            uint32_t dtype = dtypes[(i + k) % 3];
            if (quick && k % 3 != i)
                continue;
            uint64_t classes = dtype == FP32 ? (kept[k].classes + 1) / 2 : kept[k].classes;
            add_crowd(list, divergences[i], dtype, k / 3 % 2, kept[k].rows, classes,
                      i == 2 ? 2 : 1);
        }
    /* More of them than there are places at a time. */
    add_crowd(list, KLD_DIVERGENCE_FORWARD_KL, BF16, true, 2300, 8193, 1);
    if (!quick)
        add_crowd(list, KLD_DIVERGENCE_CROSS_ENTROPY, FP32, false, 2300, 8192, 1);
}

/* p (ln p - ln q less its mean), and the same of q. */
static void add_centred(struct table_list *list, bool quick) {
    for (uint32_t k = 0; k < 18; k++)
        for (uint32_t i = 0; i < 3; i++) {
            bool again = k >= 12;
            uint64_t rows = again ? read_again[k - 12].rows : kept[k].rows;
            uint64_t classes = again ? read_again[k - 12].classes : kept[k].classes;
            if (quick && i != k % 3)
                continue;
            classes = dtypes[i] == FP32 ? (classes + 1) / 2 : classes;
            bool reverse = (i + k) % 4;
            add_crowd(list, reverse ? KLD_DIVERGENCE_REVERSE_KL : KLD_DIVERGENCE_FORWARD_KL,
                      dtypes[i], (i + k / 3) % 2, rows, classes, reverse ? 1 : 2);
        }
    add_crowd(list, KLD_DIVERGENCE_REVERSE_KL, BF16, true, 2300, 8193, 1);
    if (!quick)
        add_crowd(list, KLD_DIVERGENCE_FORWARD_KL, FP32, false, 2300, 8192, 2);
}

/* js of 16 bits, which is looked at twice: its value alone and either gradient. */
static void add_shannon(struct table_list *list, bool quick) {
    for (uint32_t k = 0; k < 12; k++)
        for (uint32_t gradients = 0; gradients < 3; gradients++) {
            if (quick && gradients != (k + k / 3) % 3)
                continue;
            add_crowd(list, KLD_DIVERGENCE_JS, dtypes[1 + (k + gradients) % 2], (k + gradients) % 2,
                      kept[k].rows, kept[k].classes, gradients);
        }
    add_crowd(list, KLD_DIVERGENCE_JS, BF16, true, 2300, 8193, 1);
    if (!quick)
        add_crowd(list, KLD_DIVERGENCE_JS, FP16, false, 2300, 8192, 0);
}

/* And where it may be lost. */
static void add_few(struct table_list *list) {
    for (uint32_t k = 0; k < 9; k++) {
        struct table_case *at =
            table_list_add_one(list, "few", 6, k % 3 == 1 ? 262144 : 32001, KLD_DIVERGENCE_JS,
                               LOGITS, k % 3 == 1 || k / 3 % 2 ? BF16 : FP16);
        at->data = TABLE_FEW;
        at->noise = k % 3 + 1;
        at->temperature = k % 3 == 2 ? 1e-5 : 0;
        at->gradient[0] = k / 3 == 1;
        at->gradient[1] = k / 3 == 2;
        at->reduction = KLD_REDUCTION_ROW;
        at->row_loss = true;
    }
}

/* Short rows of FP32 again, one gradient each: every number of elements that a lane has of them
 * (kernels/cuda/logits_short_wide.cuh), rows that agree and such as have one class. */
static void add_shortest(struct table_list *list, bool quick) {
    static const uint64_t classes[] = {2,  3,  5,  6,   8,   12,  13,  14,
                                       20, 40, 90, 127, 128, 192, 252, 1024};
    static const enum table_data data[] = {TABLE_NEAR, TABLE_SHARP, TABLE_ZEROS, TABLE_EQUAL,
                                           TABLE_RANDOM};
    for (uint32_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++) {
            if (quick && (i + divergence) % 3)
                continue;
            struct table_case *at =
                table_list_add_one(list, "shortest", 203, classes[i], divergence, LOGITS, FP32);
            at->data = data[(i + divergence / 3) % 5];
            at->noise = i % 2 ? 1e-3 : 0.05;
            at->gradient[0] = (i + divergence / 2) % 2;
            at->gradient[1] = !at->gradient[0];
            at->temperature = divergence % 2 ? 0.7 : 0;
        }
}

/* Where FP32 rounds from where on a class has no mass; and where what one class has not is all that
 * there is of a gradient. */
static void add_shortest_few(struct table_list *list) {
    static const uint32_t divergences[] = {KLD_DIVERGENCE_FORWARD_KL, KLD_DIVERGENCE_JS,
                                           KLD_DIVERGENCE_TV, KLD_DIVERGENCE_JEFFREYS};
    for (uint32_t i = 0; i < 16; i++) {
        struct table_case *at = table_list_add_one(list, "shortest few", 203, i < 8 ? 12 : 10,
                                                   divergences[i % 4], LOGITS, FP32);
        at->gradient[i / 4 % 2] = true;
        at->data = i < 8 ? TABLE_FINE : TABLE_CONFIDENT;
        at->noise = i < 8 ? 0.00095 : i < 12 ? 1e-10 : 1e-12;
        at->temperature = i >= 8 ? 0 : i < 4 ? 1.1e-5 : 1.03e-5;
        at->lift[0] = at->lift[1] = i >= 8 ? 0 : i < 4 ? 1e4 : 5e3;
    }
}

/* Mixtures of FP32 that are kept, and looked at in FP64 (kernels/cuda/kept_wide.cuh): their value
 * alone and either gradient, by a block, by two to sixteen, and the first that are too long. */
static void add_kept_wide(struct table_list *list, bool quick) {
    static const uint32_t divergences[] = {KLD_DIVERGENCE_JS, KLD_DIVERGENCE_SKEW_KL,
                                           KLD_DIVERGENCE_SKEW_REVERSE_KL};
    static const struct {
        uint64_t rows, classes;
    } at[] = {{700, 1025},  {700, 1029}, {700, 2048}, {500, 4101}, {500, 8192},  {150, 8195},
              {150, 16384}, {80, 16390}, {80, 32768}, {38, 90001}, {36, 131072}, {36, 131076}};
    for (uint32_t k = 0; k < 12; k++)
        for (uint32_t i = 0; i < 3; i++)
            for (uint32_t gradients = 0; gradients < 3; gradients++)
                if (!quick ||
                    (gradients == (k + k / 3 + i) % 3 && (i == 0 || (k + 2 * i) % 4 == 0)))
                    add_crowd(list, divergences[i], FP32, (k + i + gradients) % 2, at[k].rows,
                              at[k].classes, gradients);
    add_crowd(list, KLD_DIVERGENCE_JS, FP32, true, 2300, 2049, 2);
    /* Rows that agree, and those of few numbers, in which nothing averages out. */
    for (uint32_t k = 0; k < 12; k++) {
        struct table_case *one =
            table_list_add_one(list, "kept wide", k < 6 ? 12 : 6, k % 3 == 1 ? 65536 : 2000 + k,
                               divergences[k / 2 % 3], LOGITS, FP32);
        one->data = k < 6 ? TABLE_NEAR : TABLE_FEW;
        one->noise = k >= 6 ? k % 3 + 1 : k % 2 ? 3e-5 : 1e-3;
        one->temperature = k >= 6 && k % 3 == 2 ? 1e-5 : 0;
        one->gradient[0] = k % 3 == 0;
        one->gradient[1] = k % 3 == 1;
        one->reduction = KLD_REDUCTION_ROW;
        one->row_loss = true;
    }
}

/* And where these may be lost. */
static void add_kept_wide_few(struct table_list *list) {
    for (uint32_t k = 0; k < 16; k++) {
        struct table_case *at = table_list_add_one(list, "kept wide few", 4, k == 1 ? 16386 : 16384,
                                                   KLD_DIVERGENCE_JS, LOGITS, FP32);
        at->data = TABLE_FEW;
        at->noise = k < 4 ? 4 : k < 6 ? 5 : k < 8 ? 6 : k;
        at->gradient[0] = k == 2;
        at->gradient[1] = k == 3 || k >= 8;
        at->parameter = k % 2 && k < 8 ? at->parameter : k < 8 ? 0.5 : 0.9;
        at->reduction = KLD_REDUCTION_ROW;
        at->row_loss = true;
    }
}

/* Its value in rows that others read again. */
static void add_shannon_short(struct table_list *list) {
    for (uint32_t k = 2; k < 6; k++)
        add_crowd(list, KLD_DIVERGENCE_JS, dtypes[1 + k % 2], k / 4, read_again[k].rows,
                  read_again[k].classes, 0);
}

void table_list_kept(struct table_list *list, bool quick) {
    add_difference(list, quick);
    add_centred(list, quick);
    add_shannon(list, quick);
    add_few(list);
    add_shortest(list, quick);
    add_shortest_few(list);
    add_kept_wide(list, quick);
    add_kept_wide_few(list);
    add_shannon_short(list);
}
