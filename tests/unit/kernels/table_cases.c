/* table_cases.c - the list of kernel cases: combinations of divergence, forms, data types and
 * reduction at a small shape, and the shapes and values at which kernels go wrong. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/kernels/table_list.h"

/* Options that every combination meets in turn. */
static void rotate(struct table_list *list, struct table_case *at) {
    static const uint32_t dtypes[] = {FP32, FP64, FP16, BF16};
    uint64_t gradients = table_list_turn(list, 4);
    at->gradient[0] = gradients != 1;
    at->gradient[1] = gradients == 1 || gradients == 2;
    at->temperature = table_list_turn(list, 2) ? 0.5 + 0.75 * (double)table_list_turn(list, 4) : 0;
    at->scale = table_list_turn(list, 2) ? 2.25 : 0;
    at->weights = table_list_turn(list, 2);
    at->mask = table_list_turn(list, 3) == 0;
    at->mask_uint8 = table_list_turn(list, 2);
    at->strided = table_list_turn(list, 3) == 0;
    at->row_loss = table_list_turn(list, 2);
    at->row_loss_wide = at->scale == 0;
    at->loss = table_list_turn(list, 4) != 0;
    if (table_list_turn(list, 2))
        at->grad_output_dtype = dtypes[table_list_turn(list, 4)];
    else if (at->reduction != KLD_REDUCTION_NONE && at->reduction != KLD_REDUCTION_ROW)
        at->grad_output = table_list_turn(list, 2) ? -1.5 : 0;
    bool divided = at->reduction == KLD_REDUCTION_MEAN ||
                   at->reduction == KLD_REDUCTION_BATCHMEAN ||
                   at->reduction == KLD_REDUCTION_ROWMEAN;
    at->normalizer = divided && table_list_turn(list, 3) == 0 ? 12.5 : 0;
    if (gradients == 3 && table_list_turn(list, 2)) { /* no gradient at all */
        at->gradient[0] = false;
        at->grad_output = 0;
        at->grad_output_dtype = 0;
    }
    static const uint64_t classes[] = {37, 1, 16, 5, 270, 64};
    at->shape[1] = classes[table_list_turn(list, 6)];
    static const double parameters[] = {0.5, 0.1, 0.9, 0.3, 0.77};
    if (table_list_turn(list, 3))
        at->parameter = parameters[table_list_turn(list, 5)];
}

static void name_combination(struct table_case *at) {
    snprintf(at->name, sizeof at->name, "mix %s %s/%s %s/%s %s",
             kld_divergence_name(at->divergence), kld_form_name(at->form[0]),
             kld_form_name(at->form[1]), kld_dtype_name(at->dtype[0]), kld_dtype_name(at->dtype[1]),
             kld_reduction_name(at->reduction));
}

/* Every divergence with every pair of forms, and each of these with every pair of data types and
 * with every reduction; not those two with each other. quick: a fifth of the pairs of types. */
static void add_combinations(struct table_list *list, bool quick) {
    static const uint32_t dtypes[] = {FP32, FP64, FP16, BF16};
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++)
        for (uint32_t form = 0; form < 9; form++)
            for (uint32_t i = 0; i < 32; i++) {
                uint32_t dtype = i % 16, reduction = (i + i / 16 * 3 + form) % 6;
                if (quick && (i + form + divergence) % 5 != 0)
                    continue;
                struct table_case *at = table_list_add(list, "", 6, 37);
                table_list_diverge(at, divergence);
                table_list_forms(at, form / 3, form % 3);
                at->reduction = reduction;
                at->dtype[0] = dtypes[dtype / 4];
                at->dtype[1] = dtypes[dtype % 4];
                rotate(list, at);
                name_combination(at);
            }
}

/* Forms that are alike in both tensors, each divergence. */
static void add_for_forms(struct table_list *list, const char *what, uint64_t rows,
                          uint64_t classes, enum table_data data, uint32_t dtype, bool both) {
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++)
        for (uint32_t form = 0; form < 3; form++) {
            struct table_case *at =
                table_list_add_one(list, what, rows, classes, divergence, form, dtype);
            at->data = data;
            at->gradient[1] = both;
            /* Two constants apart by what rounds off little, so that only noise is left. */
            at->shift = data == TABLE_EQUAL && form == LOGITS && dtype == FP64 ? 40 : 0;
        }
}

/* The same with three of the divergences, one of each kind in turn: shapes matter to how a row is
 * cut, not to what is computed there. */
static void add_some(struct table_list *list, const char *what, uint64_t rows, uint64_t classes,
                     uint32_t dtype, bool both) {
    static const uint32_t kinds[3][5] = {
        {KLD_DIVERGENCE_FORWARD_KL, KLD_DIVERGENCE_REVERSE_KL, KLD_DIVERGENCE_FORWARD_KL,
         KLD_DIVERGENCE_JEFFREYS, KLD_DIVERGENCE_MIXED_KL},
        {KLD_DIVERGENCE_JS, KLD_DIVERGENCE_SKEW_KL, KLD_DIVERGENCE_JS,
         KLD_DIVERGENCE_SKEW_REVERSE_KL, KLD_DIVERGENCE_JS},
        {KLD_DIVERGENCE_TV, KLD_DIVERGENCE_CROSS_ENTROPY, KLD_DIVERGENCE_REVERSE_KL,
         KLD_DIVERGENCE_TV, KLD_DIVERGENCE_CROSS_ENTROPY},
    };
    for (uint32_t form = 0; form < 3; form++)
        for (int kind = 0; kind < 3; kind++) {
            uint32_t divergence = kinds[kind][table_list_turn(list, 5)];
            table_list_add_one(list, what, rows, classes, divergence, form, dtype)->gradient[1] =
                both;
        }
}

static void add_shapes(struct table_list *list, bool quick) {
    static const uint64_t ragged[] = {1,   2,    3,    7,    31,    32,    33,    63,
                                      255, 1000, 4097, 8192, 32001, 50257, 151936};
    for (size_t i = 0; i < sizeof ragged / sizeof ragged[0]; i++) {
        bool large = ragged[i] > 10000;
        if (quick && large && ragged[i] != 32001)
            continue;
        add_some(list, "ragged", large ? 2 : 5, ragged[i], FP32, i % 3 == 0);
        if (!quick || !large)
            add_some(list, "ragged", large ? 1 : 3, ragged[i], i % 2 ? BF16 : FP16, i % 2);
    }
    static const uint64_t rows[] = {1, 8, 132, 1000};
    for (size_t i = 0; i < 4; i++)
        add_some(list, "rows", rows[i], 1000, FP32, i % 2);
    if (!quick) {
        add_some(list, "long", 1, (1u << 20) + 3, FP32, true);
        add_some(list, "long", 1, (1u << 20) + 3, BF16, false);
    } else {
        table_list_add_one(list, "long", 1, (1u << 17) + 3, KLD_DIVERGENCE_FORWARD_KL, LOGITS,
                           FP32);
        table_list_add_one(list, "long", 1, (1u << 17) + 3, KLD_DIVERGENCE_JS, LOGITS, FP32);
    }
    for (uint32_t rank = 1; rank <= KLD_RANK_MAX; rank++) {
        struct table_case *at = table_list_add(list, "", 1, 1);
        snprintf(at->name, sizeof at->name, "rank %u", rank);
        at->rank = rank;
        for (uint32_t i = 0; i < rank; i++)
            at->shape[i] = i + 1 == rank ? 19 : 1 + i % 2 + (i == 0);
        table_list_forms(at, LOGITS, PROBS);
        at->mask = rank > 1;
    }
}

/* Many short rows: several of them share what works on one long row. */
static void add_short(struct table_list *list, bool quick) {
    static const uint64_t classes[] = {2, 3, 4, 8, 10, 16, 33, 64, 100, 128, 256};
    static const uint32_t dtypes[] = {FP32, BF16, FP16};
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        for (uint32_t form = 0; form < 3; form++) {
            uint64_t rows = quick ? 60000 / classes[i] + 77 : 20000;
            struct table_case *at = table_list_add_one(
                list, "short", rows, classes[i], (uint32_t)table_list_turn(list, TABLE_DIVERGENCES),
                form, dtypes[table_list_turn(list, 3)]);
            at->weights = table_list_turn(list, 3) == 0;
            at->mask = table_list_turn(list, 3) == 0;
            at->row_loss = table_list_turn(list, 2);
            at->gradient[1] = table_list_turn(list, 3) == 0;
            at->reduction = table_list_turn(list, 2) ? KLD_REDUCTION_ROW : KLD_REDUCTION_BATCHMEAN;
        }
}

/* Short rows of logits with every divergence: no class is one of many there, so that nothing
 * averages out. */
static void add_short_logits(struct table_list *list, bool quick) {
    static const uint64_t classes[] = {2, 3, 5, 10, 16, 37, 64, 100, 255, 256};
    static const uint32_t dtypes[] = {FP32, BF16, FP16};
    static const enum table_data data[] = {TABLE_RANDOM, TABLE_SHARP, TABLE_EQUAL,
                                           TABLE_ZEROS,  TABLE_NEAR,  TABLE_INFINITE};
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++)
            for (int k = 0; k < 3; k++) {
                if (quick && (i + divergence) % 3 != (uint32_t)k)
                    continue;
                struct table_case *at =
                    table_list_add_one(list, "short", 50 + table_list_turn(list, 100), classes[i],
                                       divergence, LOGITS, dtypes[k]);
                at->data = data[table_list_turn(list, 6)];
                at->noise = 1.4e-3;
                at->gradient[0] = table_list_turn(list, 3) != 0;
                at->gradient[1] = table_list_turn(list, 2);
                at->mask = table_list_turn(list, 4) == 0;
                at->strided = table_list_turn(list, 5) == 0;
            }
}

static void add_values(struct table_list *list, bool quick) {
    static const uint32_t dtypes[] = {FP32, FP64, FP16, BF16};
    static const struct {
        const char *what;
        uint64_t rows, classes;
        enum table_data data;
        bool both;
    } kinds[] = {
        {"zeros", 6, 100, TABLE_ZEROS, true},
        {"infinite", 6, 100, TABLE_INFINITE, true},
        {"bad", 10, 70, TABLE_BAD, true},
        {"equal", 4, 301, TABLE_EQUAL, true},
        {"extreme", 6, 301, TABLE_EXTREME, true},
        {"sharp", 6, 301, TABLE_SHARP, true},
        {"infinite", 6, 300, TABLE_INFINITE, false},
        {"bad", 10, 300, TABLE_BAD, false},
        {"extreme", 6, 301, TABLE_EXTREME, false},
        {"sharp", 6, 301, TABLE_SHARP, false},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        for (size_t k = 0; k < 4; k++) /* quick: FP32 and one other; the one-sided ones only that */
            if (!quick || k == 1 + i % 3 || (k == 0 && kinds[i].both))
                add_for_forms(list, kinds[i].what, kinds[i].rows, kinds[i].classes, kinds[i].data,
                              dtypes[k], kinds[i].both);
    for (uint32_t mix = 0; mix < 9; mix++) {
        static const enum table_data data[] = {TABLE_ZEROS, TABLE_INFINITE, TABLE_BAD, TABLE_SHARP,
                                               TABLE_EXTREME};
        for (uint32_t i = 0; i < 15; i++) {
            struct table_case *at = table_list_add(list, "", 10, 90);
            table_list_diverge(at, (i + mix) % TABLE_DIVERGENCES);
            snprintf(at->name, sizeof at->name, "values %u %s %s/%s", i,
                     kld_divergence_name(at->divergence), kld_form_name(mix / 3),
                     kld_form_name(mix % 3));
            table_list_forms(at, mix / 3, mix % 3);
            at->data = data[i / 3];
            at->gradient[1] = true;
        }
    }
}

/* Classes that are masked by a very low logit, not by -inf. */
static void add_masked(struct table_list *list) {
    static const uint32_t dtypes[] = {FP32, BF16};
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++)
        for (int i = 0; i < 2; i++) {
            struct table_case *at = table_list_add(list, "", 4, i == 0 ? 3001 : 6000);
            table_list_diverge(at, divergence);
            snprintf(at->name, sizeof at->name, "masked classes %s logits %s",
                     kld_divergence_name(divergence), kld_dtype_name(dtypes[i]));
            table_list_forms(at, LOGITS, LOGITS);
            at->dtype[0] = at->dtype[1] = dtypes[i];
            at->data = TABLE_LOWEST;
            at->gradient[1] = true;
        }
}

/* Rows that agree: values of about 1e-6 and 1e-9 for a KL. Of two rows of logits the value itself
 * is bounded; probabilities that were rounded do not sum to 1. */
static void add_near(struct table_list *list) {
    static const double noise[] = {1.4e-3, 4.5e-5}, shift[] = {0, 0, 40};
    for (int i = 0; i < 2; i++)
        for (uint32_t form = 0; form < 3; form++)
            for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++)
                for (int k = 0; k < 2; k++) {
                    struct table_case *at =
                        table_list_add_one(list, i ? "near 1e-9" : "near 1e-6", k ? 3 : 8,
                                           k ? 5000 : 1000, divergence, form, FP32);
                    at->data = TABLE_NEAR;
                    at->noise = noise[i];
                    at->gradient[1] = k;
                    at->shift = form == LOGITS ? shift[table_list_turn(list, 3)] : 0;
                    at->relative = form == LOGITS ? (i ? 1e-2 : 1e-4) : 0;
                }
}

/* The same at the end of what FP64 holds: without balanced terms there is nothing but noise. */
static void add_near_fp64(struct table_list *list) {
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++) {
        struct table_case *at =
            table_list_add_one(list, "near 1e-14", 6, 1000, divergence, LOGITS, FP64);
        at->data = TABLE_NEAR;
        at->noise = 1e-7;
        at->gradient[1] = true;
        at->relative = 1e-3;
    }
}

/* A parameter at its end makes one divergence another: the same code, so the same bits. */
static void add_ends(struct table_list *list) {
    static const struct {
        uint32_t divergence, alias;
        double parameter;
    } ends[] = {
        {KLD_DIVERGENCE_JS, KLD_DIVERGENCE_FORWARD_KL, 0},
        {KLD_DIVERGENCE_JS, KLD_DIVERGENCE_REVERSE_KL, 1},
        {KLD_DIVERGENCE_SKEW_KL, KLD_DIVERGENCE_FORWARD_KL, 0},
        {KLD_DIVERGENCE_SKEW_REVERSE_KL, KLD_DIVERGENCE_REVERSE_KL, 0},
        {KLD_DIVERGENCE_MIXED_KL, KLD_DIVERGENCE_FORWARD_KL, 1},
        {KLD_DIVERGENCE_MIXED_KL, KLD_DIVERGENCE_REVERSE_KL, 0},
    };
    static const uint32_t dtypes[] = {FP32, BF16, FP64, FP16};
    static const enum table_data data[] = {TABLE_RANDOM, TABLE_ZEROS, TABLE_INFINITE};
    for (size_t i = 0; i < 6; i++)
        for (uint32_t form = 0; form < 9; form++) {
            struct table_case *at = table_list_add(list, "", 7, form % 2 ? 300 : 4099);
            table_list_forms(at, form / 3, form % 3);
            table_list_diverge(at, ends[i].divergence);
            at->parameter = ends[i].parameter;
            at->aliased = true;
            at->alias = ends[i].alias;
            at->dtype[0] = dtypes[table_list_turn(list, 4)];
            at->dtype[1] = form % 4 ? dtypes[table_list_turn(list, 4)] : at->dtype[0];
            at->gradient[0] = table_list_turn(list, 3) != 0;
            at->gradient[1] = table_list_turn(list, 2);
            at->reduction = form % 3 ? KLD_REDUCTION_BATCHMEAN : (uint32_t)table_list_turn(list, 6);
            /* An end takes zeros as the KL does that it is. */
            at->data = data[table_list_turn(list, 3)];
            snprintf(at->name, sizeof at->name, "end %s %g %s/%s %s/%s",
                     kld_divergence_name(at->divergence), at->parameter, kld_form_name(form / 3),
                     kld_form_name(form % 3), kld_dtype_name(at->dtype[0]),
                     kld_dtype_name(at->dtype[1]));
        }
}

static void add_reductions(struct table_list *list) {
    struct table_case *at;
    for (uint32_t reduction = 0; reduction < 6; reduction++) {
        at = table_list_add(list, "", 5, 50);
        snprintf(at->name, sizeof at->name, "all masked %s", kld_reduction_name(reduction));
        table_list_diverge(at, (reduction + 3) % TABLE_DIVERGENCES);
        at->reduction = reduction;
        at->mask = at->gradient[1] = true;
        at->masking = TABLE_MASK_ALL;
        table_list_forms(at, reduction % 3, LOGITS);
    }
    for (int i = 0; i < 12; i++) {
        at = table_list_add(list, "", 40, 129);
        snprintf(at->name, sizeof at->name, "mask and weights %d", i);
        table_list_diverge(at, (uint32_t)i % TABLE_DIVERGENCES);
        table_list_forms(at, i % 3, (i / 3) % 3);
        at->reduction = (uint32_t)(i % 6);
        at->mask = at->weights = at->gradient[1] = true;
        at->data = i % 2 ? TABLE_ZEROS : TABLE_RANDOM;
        at->strided = i % 4 == 0;
    }
    for (int i = 0; i < 3; i++) {
        at = table_list_add(list, "", 6, 50);
        snprintf(at->name, sizeof at->name, "weights that cancel %d", i);
        table_list_forms(at, i, i);
        at->reduction = KLD_REDUCTION_ROWMEAN;
        at->weights = at->weights_cancel = at->row_loss = at->gradient[i % 2] = true;
        at->mask = false;
        at->normalizer = 0;
    }
    /* FP16 gradients beyond 65504. */
    at = table_list_add(list, "overflow FP16", 4, 64);
    at->dtype[0] = at->dtype[1] = FP16;
    at->reduction = KLD_REDUCTION_SUM;
    at->scale = 1e5;
    at->gradient[1] = true;
}

/* Mixtures that are nearly one of their sides, of 16 bits: FP32 holds little of what the other
 * adds. */
static void add_uneven(struct table_list *list) {
    static const double ends[] = {1e-3, 1e-4, 1e-5, 0.99, 0.999};
    static const uint32_t dtypes[] = {BF16, FP16},
                          kinds[] = {KLD_DIVERGENCE_SKEW_KL, KLD_DIVERGENCE_SKEW_REVERSE_KL,
                                     KLD_DIVERGENCE_JS};
    for (int i = 0; i < 2 * 3 * 5; i++) {
        uint32_t divergence = kinds[i / 5 % 3];
        struct table_case *at = table_list_add_one(list, "uneven", 96, i % 3 ? 99 : 7, divergence,
                                                   LOGITS, dtypes[i / 15]);
        bool large = divergence == KLD_DIVERGENCE_JS && i % 5 > 2;
        at->parameter = large ? 1 - ends[i % 5 - 2] : ends[i % 5];
        at->distinct = 96;
        at->gradient[1] = true;
    }
}

/* Rows of the cross entropy that are too long for FP64 in tiles, with a class that has the mass. */
static void add_entropy(struct table_list *list) {
    static const uint64_t classes[] = {258, 300, 320};
    for (int i = 0; i < 3; i++) {
        struct table_case *at = table_list_add_one(list, "heavy entropy", 96, classes[i],
                                                   KLD_DIVERGENCE_CROSS_ENTROPY, LOGITS, FP32);
        at->data = TABLE_HEAVY;
        at->noise = 0.95;
        at->distinct = 96;
    }
}

/* 1 / T is a number of FP64 and none of FP32. */
static void add_coldest(struct table_list *list) {
    static const uint64_t classes[] = {9, 512, 1000, 6000};
    for (int i = 0; i < 8; i++) {
        struct table_case *at =
            table_list_add_one(list, "coldest", 5, classes[i % 4], KLD_DIVERGENCE_FORWARD_KL,
                               LOGITS, i < 4 ? BF16 : FP32);
        at->data = TABLE_EQUAL;
        at->temperature = 1e-39;
        at->gradient[1] = i % 2;
    }
}

/* Rows of logits whose sides lie far apart: of every class count and data type those that a back
 * end takes different ways for, by the gradients. */
static void add_apart(struct table_list *list) {
    static const uint64_t classes[] = {5, 300, 1000, 2048, 4096, 20000, 50257};
    static const uint32_t dtypes[] = {FP32, BF16, FP16, FP64};
    static const struct {
        uint32_t divergence;
        unsigned gradients; /* 1 to the predictions, 2 to the targets */
    } ways[] = {
        {KLD_DIVERGENCE_FORWARD_KL, 1}, {KLD_DIVERGENCE_REVERSE_KL, 1},
        {KLD_DIVERGENCE_JS, 1},         {KLD_DIVERGENCE_JEFFREYS, 0},
        {KLD_DIVERGENCE_FORWARD_KL, 3}, {KLD_DIVERGENCE_TV, 3},
        {KLD_DIVERGENCE_SKEW_KL, 2},    {KLD_DIVERGENCE_MIXED_KL, 3},
        {KLD_DIVERGENCE_JS, 0},         {KLD_DIVERGENCE_FORWARD_KL, 0},
        {KLD_DIVERGENCE_JS, 3},         {KLD_DIVERGENCE_REVERSE_KL, 0},
    };
    for (uint32_t i = 0; i < 7; i++)
        for (uint32_t k = 0; k < 4; k++)
            for (uint32_t way = 0; way < (k < 3 ? 3 : 1); way++) {
                uint32_t which = k < 3 ? 3 * (i + k) + way : 5 * i + 2;
                struct table_case *at =
                    table_list_add_one(list, "apart", TABLE_APART_ROWS, classes[i],
                                       ways[which % 12].divergence, LOGITS, dtypes[k]);
                at->data = TABLE_APART;
                at->noise = k == 3 && i % 2 ? 0.01 : 0;
                at->gradient[0] = ways[which % 12].gradients & 1;
                at->gradient[1] = ways[which % 12].gradients & 2;
                at->distinct = TABLE_APART_ROWS;
                at->temperature = i == 2 ? 0.7 : i == 4 ? 3 : 0;
                at->reduction = KLD_REDUCTION_ROW;
                at->row_loss = at->row_loss_wide = true;
            }
}

/* A probability of -0 is one of 0: what is infinite over it has the same sign. Short rows and long
 * ones, each gradient by itself and both, and the other forms opposite. */
static void add_minus(struct table_list *list) {
    static const uint32_t dtypes[] = {FP32, FP64, FP16, BF16};
    static const uint32_t forms[][2] = {
        {PROBS, LOGPROBS}, {LOGPROBS, PROBS}, {PROBS, LOGITS}, {LOGITS, PROBS}};
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++) {
        for (uint32_t i = 0; i < 16; i++) {
            struct table_case *at = table_list_add_one(list, "minus", 6, i / 4 == 0 ? 7 : 300,
                                                       divergence, PROBS, dtypes[i % 4]);
            at->data = TABLE_MINUS;
            at->gradient[0] = i / 4 != 3;
            at->gradient[1] = i / 4 != 2;
        }
        for (uint32_t i = 0; i < 4; i++) {
            struct table_case *at = table_list_add(list, "", 6, 90);
            table_list_diverge(at, divergence);
            table_list_forms(at, forms[i][0], forms[i][1]);
            snprintf(at->name, sizeof at->name, "minus %s %s/%s", kld_divergence_name(divergence),
                     kld_form_name(at->form[0]), kld_form_name(at->form[1]));
            at->data = TABLE_MINUS;
            at->gradient[1] = true;
            at->reduction = i % 2 ? KLD_REDUCTION_NONE : KLD_REDUCTION_BATCHMEAN;
        }
    }
}

/* Rows so short, and one behind the other, that what is loaded at a time is of several of them, and
 * numbers that are no common ones in some: those beside them are to have the bits that they have
 * alone. */
static void add_beside(struct table_list *list) {
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++)
        for (uint32_t i = 0; i < 8; i++) {
            struct table_case *at =
                table_list_add_one(list, "beside", 120, 13, divergence,
                                   i / 2 % 2 ? LOGPROBS : PROBS, i % 2 ? FP16 : BF16);
            at->data = i / 4 ? TABLE_BAD : TABLE_INFINITE;
            at->distinct = 120;
            at->gradient[1] = true;
            at->row_loss = false;
        }
}

/* A probability of +inf, or its logarithm, is none: NaN as a negative one is. By rows, flat, by
 * elements; short rows and long ones, either gradient and both, and the other forms opposite. */
static void add_endless(struct table_list *list) {
    static const uint32_t dtypes[] = {FP32, FP64, FP16, BF16};
    static const uint32_t forms[][2] = {{PROBS, LOGPROBS}, {LOGPROBS, PROBS},  {PROBS, LOGITS},
                                        {LOGITS, PROBS},   {LOGPROBS, LOGITS}, {LOGITS, LOGPROBS}};
    for (uint32_t divergence = 0; divergence < TABLE_DIVERGENCES; divergence++) {
        for (uint32_t i = 0; i < 40; i++) {
            uint32_t way = i / 8;
            struct table_case *at =
                table_list_add_one(list, "endless", 8, (i + way) % 2 ? 300 : 7, divergence,
                                   i / 4 % 2 ? LOGPROBS : PROBS, dtypes[i % 4]);
            at->data = TABLE_ENDLESS;
            at->distinct = 8;
            at->gradient[0] = way != 2 && way != 4;
            at->gradient[1] = way != 1 && way != 4;
            at->reduction = way == 3 ? KLD_REDUCTION_NONE
                            : way    ? KLD_REDUCTION_ROW
                                     : KLD_REDUCTION_BATCHMEAN;
            at->row_loss = way > 2;
        }
        for (uint32_t i = 0; i < 12; i++) {
            struct table_case *at = table_list_add(list, "", 8, i % 5 ? 90 : 1030);
            table_list_diverge(at, divergence);
            table_list_forms(at, forms[i % 6][0], forms[i % 6][1]);
            at->dtype[i / 6] = dtypes[(i + divergence) % 4];
            snprintf(at->name, sizeof at->name, "endless %s %s/%s %s/%s",
                     kld_divergence_name(divergence), kld_form_name(at->form[0]),
                     kld_form_name(at->form[1]), kld_dtype_name(at->dtype[0]),
                     kld_dtype_name(at->dtype[1]));
            at->data = TABLE_ENDLESS;
            at->distinct = 8;
            at->gradient[1] = true;
            at->reduction = i % 2 ? KLD_REDUCTION_NONE : KLD_REDUCTION_ROW;
        }
    }
}

/* Rows that are sure of their class, on one side or both: its gradient is what the others leave;
 * where it is another class on each side, so that a mixture is all but share p or rest q wherever
 * there is mass, what those leave of its logarithm. (js: at first both gradients, then the one of
 * rows that are kept.) And a constant between the sides, beside which FP32 holds less of the logits
 * than 16 bits do. */
static void add_sure(struct table_list *list) {
    static const struct {
        uint32_t divergence, dtype;
        enum table_data data;
        double noise, lift, temperature;
    } kinds[] = {
        {KLD_DIVERGENCE_TV, FP32, TABLE_HEAVY, 0.99, 0, 0},
        {KLD_DIVERGENCE_TV, FP32, TABLE_CONFIDENT, 1e-4, 0, 0},
        {KLD_DIVERGENCE_SKEW_REVERSE_KL, BF16, TABLE_SPIKE, 30, 0, 0.7},
        {KLD_DIVERGENCE_SKEW_REVERSE_KL, FP16, TABLE_SPIKE, 30, 0, 0},
        {KLD_DIVERGENCE_SKEW_KL, BF16, TABLE_SPIKE, 25, 0, 0},
        {KLD_DIVERGENCE_SKEW_KL, FP16, TABLE_SHARP, 0, 0, 0},
        {KLD_DIVERGENCE_SKEW_REVERSE_KL, BF16, TABLE_SHARP, 0, 0, 0},
        {KLD_DIVERGENCE_SKEW_KL, BF16, TABLE_SHARP, 0, 0, 0},
        {KLD_DIVERGENCE_JS, BF16, TABLE_SHARP, 0, 0, 0},
        {KLD_DIVERGENCE_SKEW_KL, BF16, TABLE_SPIKE, 20, 0, 0},
        {KLD_DIVERGENCE_REVERSE_KL, BF16, TABLE_NEAR, 1.4e-3, 1000, 2},
        {KLD_DIVERGENCE_REVERSE_KL, FP16, TABLE_NEAR, 1.4e-3, 1000, 1000},
    };
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof kinds[0]; i++) {
        struct table_case *at =
            table_list_add_one(list, "sure", 24, i % 2 ? 8193 : 2052, kinds[i / 2].divergence,
                               LOGITS, kinds[i / 2].dtype);
        at->data = kinds[i / 2].data;
        at->noise = kinds[i / 2].noise;
        at->lift[1] = kinds[i / 2].lift;
        at->temperature = kinds[i / 2].temperature;
        at->distinct = 24;
        bool is_kept = kinds[i / 2].divergence == KLD_DIVERGENCE_JS && i % 2;
        at->gradient[1] = kinds[i / 2].lift == 0 && !is_kept;
    }
}

/* Classes whose masses are the least numbers of double, of which a part may round to 0. */
static void add_least(struct table_list *list) {
    for (int i = 0; i < 4; i++) {
        struct table_case *at = table_list_add_one(
            list, "least", 24, i % 2 ? 400 : 300,
            i < 2 ? KLD_DIVERGENCE_SKEW_REVERSE_KL : KLD_DIVERGENCE_SKEW_KL, LOGITS, BF16);
        at->temperature = 0.01;
        at->distinct = 24;
        at->gradient[1] = true;
    }
}

static void add_speed(struct table_list *list) {
    for (int i = 0; i < 12; i++) {
        bool logits = i >= 4, gradient = i % 2, half = i / 2 % 2;
        uint32_t divergence = i < 8 ? KLD_DIVERGENCE_FORWARD_KL : KLD_DIVERGENCE_JS;
        struct table_case *at =
            table_list_add(list, "", logits ? 512 : 2048, logits ? 32768 : 8192);
        snprintf(at->name, sizeof at->name, "speed %s%s %s %s", i < 8 ? "" : "js ",
                 logits ? "logits" : "probs", half ? "BF16" : "FP32",
                 gradient ? "loss+gradient" : "loss");
        table_list_diverge(at, divergence);
        table_list_forms(at, logits ? LOGITS : PROBS, logits ? LOGITS : PROBS);
        at->dtype[0] = at->dtype[1] = half ? BF16 : FP32;
        at->gradient[0] = gradient;
        at->speed = true;
    }
}

struct table_case *table_cases(bool quick, size_t *ret_count) {
    struct table_list list = {.at = calloc(TABLE_CASES_MAX, sizeof(struct table_case)),
                              .room = TABLE_CASES_MAX,
                              .turn = 1};
    if (!list.at)
        abort();
    add_combinations(&list, quick);
    add_shapes(&list, quick);
    add_short(&list, quick);
    add_short_logits(&list, quick);
    add_values(&list, quick);
    add_masked(&list);
    add_near(&list);
    add_near_fp64(&list);
    add_ends(&list);
    add_reductions(&list);
    table_list_held(&list, quick);
    add_uneven(&list);
    add_entropy(&list);
    add_coldest(&list);
    table_list_shares(&list);
    table_list_kept(&list, quick);
    add_apart(&list);
    add_minus(&list);
    add_beside(&list);
    add_endless(&list);
    add_sure(&list);
    add_least(&list);
    if (!quick)
        add_speed(&list);
    *ret_count = list.count;
    return list.at;
}
