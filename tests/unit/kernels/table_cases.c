/* table_cases.c - the list of kernel cases: combinations of divergence, forms, data types and
 * reduction at a small shape, and the shapes and values at which kernels go wrong. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/kernels/table.h"

#define CASES_MAX 8192
#define DIVERGENCES (KLD_DIVERGENCE_CROSS_ENTROPY + 1)

struct list {
    struct table_case *at;
    size_t count;
    uint64_t turn; /* picks the options that rotate */
};

#define FP32 KLD_DTYPE_FP32
#define FP64 KLD_DTYPE_FP64
#define FP16 KLD_DTYPE_FP16
#define BF16 KLD_DTYPE_BF16
#define PROBS KLD_FORM_PROBS
#define LOGPROBS KLD_FORM_LOGPROBS
#define LOGITS KLD_FORM_LOGITS

static struct table_case *add(struct list *list, const char *name, uint64_t rows,
                              uint64_t classes) {
    struct table_case *at = &list->at[list->count];
    if (list->count < CASES_MAX - 1)
        list->count++;
    memset(at, 0, sizeof *at);
    snprintf(at->name, sizeof at->name, "%.40s", name);
    at->dtype[0] = at->dtype[1] = FP32;
    at->rank = 2;
    at->shape[0] = rows;
    at->shape[1] = classes;
    at->loss = at->row_loss = true;
    at->gradient[0] = true;
    return at;
}

static void forms(struct table_case *at, uint32_t predictions, uint32_t targets) {
    at->form[0] = predictions;
    at->form[1] = targets;
}

/* The divergence, with a parameter if it takes one: beta stays at its default. */
static void diverge(struct table_case *at, uint32_t divergence) {
    at->divergence = divergence;
    at->parameter = divergence == KLD_DIVERGENCE_JS         ? (double)NAN
                    : divergence == KLD_DIVERGENCE_MIXED_KL ? 0.3
                                                            : 0.1;
}

static uint64_t turn(struct list *list, uint64_t of) {
    list->turn = list->turn * 6364136223846793005u + 1442695040888963407u;
    return (list->turn >> 33) % of;
}

/* Options that every combination meets in turn. */
static void rotate(struct list *list, struct table_case *at) {
    static const uint32_t dtypes[] = {FP32, FP64, FP16, BF16};
    uint64_t gradients = turn(list, 4);
    at->gradient[0] = gradients != 1;
    at->gradient[1] = gradients == 1 || gradients == 2;
    at->temperature = turn(list, 2) ? 0.5 + 0.75 * (double)turn(list, 4) : 0;
    at->scale = turn(list, 2) ? 2.25 : 0;
    at->weights = turn(list, 2);
    at->mask = turn(list, 3) == 0;
    at->mask_uint8 = turn(list, 2);
    at->strided = turn(list, 3) == 0;
    at->row_loss = turn(list, 2);
    at->loss = turn(list, 4) != 0;
    if (turn(list, 2))
        at->grad_output_dtype = dtypes[turn(list, 4)];
    else if (at->reduction != KLD_REDUCTION_NONE && at->reduction != KLD_REDUCTION_ROW)
        at->grad_output = turn(list, 2) ? -1.5 : 0;
    bool divided = at->reduction == KLD_REDUCTION_MEAN ||
                   at->reduction == KLD_REDUCTION_BATCHMEAN ||
                   at->reduction == KLD_REDUCTION_ROWMEAN;
    at->normalizer = divided && turn(list, 3) == 0 ? 12.5 : 0;
    if (gradients == 3 && turn(list, 2)) { /* no gradient at all */
        at->gradient[0] = false;
        at->grad_output = 0;
        at->grad_output_dtype = 0;
    }
    static const uint64_t classes[] = {37, 1, 16, 5, 270, 64};
    at->shape[1] = classes[turn(list, 6)];
    static const double parameters[] = {0.5, 0.1, 0.9, 0.3, 0.77};
    if (turn(list, 3))
        at->parameter = parameters[turn(list, 5)];
}

static void name_combination(struct table_case *at) {
    snprintf(at->name, sizeof at->name, "mix %s %s/%s %s/%s %s",
             kld_divergence_name(at->divergence), kld_form_name(at->form[0]),
             kld_form_name(at->form[1]), kld_dtype_name(at->dtype[0]), kld_dtype_name(at->dtype[1]),
             kld_reduction_name(at->reduction));
}

/* Every divergence with every pair of forms, and each of these with every pair of data types and
 * with every reduction; not those two with each other. quick: a fifth of the pairs of types. */
static void add_combinations(struct list *list, bool quick) {
    static const uint32_t dtypes[] = {FP32, FP64, FP16, BF16};
    for (uint32_t divergence = 0; divergence < DIVERGENCES; divergence++)
        for (uint32_t form = 0; form < 9; form++)
            for (uint32_t i = 0; i < 32; i++) {
                uint32_t dtype = i % 16, reduction = (i + i / 16 * 3 + form) % 6;
                if (quick && (i + form + divergence) % 5 != 0)
                    continue;
                struct table_case *at = add(list, "", 6, 37);
                diverge(at, divergence);
                forms(at, form / 3, form % 3);
                at->reduction = reduction;
                at->dtype[0] = dtypes[dtype / 4];
                at->dtype[1] = dtypes[dtype % 4];
                rotate(list, at);
                name_combination(at);
            }
}

static struct table_case *add_one(struct list *list, const char *what, uint64_t rows,
                                  uint64_t classes, uint32_t divergence, uint32_t form,
                                  uint32_t dtype) {
    struct table_case *at = add(list, "", rows, classes);
    snprintf(at->name, sizeof at->name, "%s %llux%llu %s %s %s", what, (unsigned long long)rows,
             (unsigned long long)classes, kld_divergence_name(divergence), kld_form_name(form),
             kld_dtype_name(dtype));
    diverge(at, divergence);
    forms(at, form, form);
    at->dtype[0] = at->dtype[1] = dtype;
    return at;
}

/* Forms that are alike in both tensors, each divergence. */
static void add_for_forms(struct list *list, const char *what, uint64_t rows, uint64_t classes,
                          enum table_data data, uint32_t dtype, bool both) {
    for (uint32_t divergence = 0; divergence < DIVERGENCES; divergence++)
        for (uint32_t form = 0; form < 3; form++) {
            struct table_case *at = add_one(list, what, rows, classes, divergence, form, dtype);
            at->data = data;
            at->gradient[1] = both;
            /* Two constants apart by what rounds off little, so that only noise is left. */
            at->shift = data == TABLE_EQUAL && form == LOGITS && dtype == FP64 ? 40 : 0;
        }
}

/* The same with three of the divergences, one of each kind in turn: shapes matter to how a row is
 * cut, not to what is computed there. */
static void add_some(struct list *list, const char *what, uint64_t rows, uint64_t classes,
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
            uint32_t divergence = kinds[kind][turn(list, 5)];
            add_one(list, what, rows, classes, divergence, form, dtype)->gradient[1] = both;
        }
}

static void add_shapes(struct list *list, bool quick) {
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
        add_one(list, "long", 1, (1u << 17) + 3, KLD_DIVERGENCE_FORWARD_KL, LOGITS, FP32);
        add_one(list, "long", 1, (1u << 17) + 3, KLD_DIVERGENCE_JS, LOGITS, FP32);
    }
    for (uint32_t rank = 1; rank <= KLD_RANK_MAX; rank++) {
        struct table_case *at = add(list, "", 1, 1);
        snprintf(at->name, sizeof at->name, "rank %u", rank);
        at->rank = rank;
        for (uint32_t i = 0; i < rank; i++)
            at->shape[i] = i + 1 == rank ? 19 : 1 + i % 2 + (i == 0);
        forms(at, LOGITS, PROBS);
        at->mask = rank > 1;
    }
}

/* Many short rows: several of them share what works on one long row. */
static void add_short(struct list *list, bool quick) {
    static const uint64_t classes[] = {2, 3, 4, 8, 10, 16, 33, 64, 100, 128, 256};
    static const uint32_t dtypes[] = {FP32, BF16, FP16};
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        for (uint32_t form = 0; form < 3; form++) {
            uint64_t rows = quick ? 60000 / classes[i] + 77 : 20000;
            struct table_case *at =
                add_one(list, "short", rows, classes[i], (uint32_t)turn(list, DIVERGENCES), form,
                        dtypes[turn(list, 3)]);
            at->weights = turn(list, 3) == 0;
            at->mask = turn(list, 3) == 0;
            at->row_loss = turn(list, 2);
            at->gradient[1] = turn(list, 3) == 0;
            at->reduction = turn(list, 2) ? KLD_REDUCTION_ROW : KLD_REDUCTION_BATCHMEAN;
        }
}

/* Short rows of logits with every divergence: no class is one of many there, so that nothing
 * averages out. */
static void add_short_logits(struct list *list, bool quick) {
    static const uint64_t classes[] = {2, 3, 5, 10, 16, 37, 64, 100, 255, 256};
    static const uint32_t dtypes[] = {FP32, BF16, FP16};
    static const enum table_data data[] = {TABLE_RANDOM, TABLE_SHARP, TABLE_EQUAL,
                                           TABLE_ZEROS,  TABLE_NEAR,  TABLE_INFINITE};
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        for (uint32_t divergence = 0; divergence < DIVERGENCES; divergence++)
            for (int k = 0; k < 3; k++) {
                if (quick && (i + divergence) % 3 != (uint32_t)k)
                    continue;
                struct table_case *at = add_one(list, "short", 50 + turn(list, 100), classes[i],
                                                divergence, LOGITS, dtypes[k]);
                at->data = data[turn(list, 6)];
                at->noise = 1.4e-3;
                at->gradient[0] = turn(list, 3) != 0;
                at->gradient[1] = turn(list, 2);
                at->mask = turn(list, 4) == 0;
                at->strided = turn(list, 5) == 0;
            }
}

static void add_values(struct list *list, bool quick) {
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
            struct table_case *at = add(list, "", 10, 90);
            diverge(at, (i + mix) % DIVERGENCES);
            snprintf(at->name, sizeof at->name, "values %u %s %s/%s", i,
                     kld_divergence_name(at->divergence), kld_form_name(mix / 3),
                     kld_form_name(mix % 3));
            forms(at, mix / 3, mix % 3);
            at->data = data[i / 3];
            at->gradient[1] = true;
        }
    }
}

/* Classes that are masked by a very low logit, not by -inf. */
static void add_masked(struct list *list) {
    static const uint32_t dtypes[] = {FP32, BF16};
    for (uint32_t divergence = 0; divergence < DIVERGENCES; divergence++)
        for (int i = 0; i < 2; i++) {
            struct table_case *at = add(list, "", 4, i == 0 ? 3001 : 6000);
            diverge(at, divergence);
            snprintf(at->name, sizeof at->name, "masked classes %s logits %s",
                     kld_divergence_name(divergence), kld_dtype_name(dtypes[i]));
            forms(at, LOGITS, LOGITS);
            at->dtype[0] = at->dtype[1] = dtypes[i];
            at->data = TABLE_MASKED;
            at->gradient[1] = true;
        }
}

/* Rows that agree: values of about 1e-6 and 1e-9 for a KL. Of two rows of logits the value itself
 * is bounded; probabilities that were rounded do not sum to 1. */
static void add_near(struct list *list) {
    static const double noise[] = {1.4e-3, 4.5e-5}, shift[] = {0, 0, 40};
    for (int i = 0; i < 2; i++)
        for (uint32_t form = 0; form < 3; form++)
            for (uint32_t divergence = 0; divergence < DIVERGENCES; divergence++)
                for (int k = 0; k < 2; k++) {
                    struct table_case *at = add_one(list, i ? "near 1e-9" : "near 1e-6", k ? 3 : 8,
                                                    k ? 5000 : 1000, divergence, form, FP32);
                    at->data = TABLE_NEAR;
                    at->noise = noise[i];
                    at->gradient[1] = k;
                    at->shift = form == LOGITS ? shift[turn(list, 3)] : 0;
                    at->relative = form == LOGITS ? (i ? 1e-2 : 1e-4) : 0;
                }
}

/* The same at the end of what FP64 holds: without balanced terms there is nothing but noise. */
static void add_near_fp64(struct list *list) {
    for (uint32_t divergence = 0; divergence < DIVERGENCES; divergence++) {
        struct table_case *at = add_one(list, "near 1e-14", 6, 1000, divergence, LOGITS, FP64);
        at->data = TABLE_NEAR;
        at->noise = 1e-7;
        at->gradient[1] = true;
        at->relative = 1e-3;
    }
}

/* A parameter at its end makes one divergence another: the same code, so the same bits. */
static void add_ends(struct list *list) {
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
            struct table_case *at = add(list, "", 7, form % 2 ? 300 : 4099);
            forms(at, form / 3, form % 3);
            diverge(at, ends[i].divergence);
            at->parameter = ends[i].parameter;
            at->aliased = true;
            at->alias = ends[i].alias;
            at->dtype[0] = dtypes[turn(list, 4)];
            at->dtype[1] = form % 4 ? dtypes[turn(list, 4)] : at->dtype[0];
            at->gradient[0] = turn(list, 3) != 0;
            at->gradient[1] = turn(list, 2);
            at->reduction = form % 3 ? KLD_REDUCTION_BATCHMEAN : (uint32_t)turn(list, 6);
            /* An end takes zeros as the KL does that it is. */
            at->data = data[turn(list, 3)];
            snprintf(at->name, sizeof at->name, "end %s %g %s/%s %s/%s",
                     kld_divergence_name(at->divergence), at->parameter, kld_form_name(form / 3),
                     kld_form_name(form % 3), kld_dtype_name(at->dtype[0]),
                     kld_dtype_name(at->dtype[1]));
        }
}

static void add_reductions(struct list *list) {
    struct table_case *at;
    for (uint32_t reduction = 0; reduction < 6; reduction++) {
        at = add(list, "", 5, 50);
        snprintf(at->name, sizeof at->name, "all masked %s", kld_reduction_name(reduction));
        diverge(at, (reduction + 3) % DIVERGENCES);
        at->reduction = reduction;
        at->mask = at->mask_all = at->gradient[1] = true;
        forms(at, reduction % 3, LOGITS);
    }
    for (int i = 0; i < 12; i++) {
        at = add(list, "", 40, 129);
        snprintf(at->name, sizeof at->name, "mask and weights %d", i);
        diverge(at, (uint32_t)i % DIVERGENCES);
        forms(at, i % 3, (i / 3) % 3);
        at->reduction = (uint32_t)(i % 6);
        at->mask = at->weights = at->gradient[1] = true;
        at->data = i % 2 ? TABLE_ZEROS : TABLE_RANDOM;
        at->strided = i % 4 == 0;
    }
    for (int i = 0; i < 3; i++) {
        at = add(list, "", 6, 50);
        snprintf(at->name, sizeof at->name, "weights that cancel %d", i);
        forms(at, i, i);
        at->reduction = KLD_REDUCTION_ROWMEAN;
        at->weights = at->weights_cancel = at->row_loss = at->gradient[i % 2] = true;
        at->mask = false;
        at->normalizer = 0;
    }
    /* FP16 gradients beyond 65504. */
    at = add(list, "overflow FP16", 4, 64);
    at->dtype[0] = at->dtype[1] = FP16;
    at->reduction = KLD_REDUCTION_SUM;
    at->scale = 1e5;
    at->gradient[1] = true;
}

static void add_speed(struct list *list) {
    for (int i = 0; i < 12; i++) {
        bool logits = i >= 4, gradient = i % 2, half = i / 2 % 2;
        uint32_t divergence = i < 8 ? KLD_DIVERGENCE_FORWARD_KL : KLD_DIVERGENCE_JS;
        struct table_case *at = add(list, "", logits ? 512 : 2048, logits ? 32768 : 8192);
        snprintf(at->name, sizeof at->name, "speed %s%s %s %s", i < 8 ? "" : "js ",
                 logits ? "logits" : "probs", half ? "BF16" : "FP32",
                 gradient ? "loss+gradient" : "loss");
        diverge(at, divergence);
        forms(at, logits ? LOGITS : PROBS, logits ? LOGITS : PROBS);
        at->dtype[0] = at->dtype[1] = half ? BF16 : FP32;
        at->gradient[0] = gradient;
        at->speed = true;
    }
}

struct table_case *table_cases(bool quick, size_t *ret_count) {
    struct list list = {calloc(CASES_MAX, sizeof(struct table_case)), 0, 1};
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
    if (!quick)
        add_speed(&list);
    *ret_count = list.count;
    return list.at;
}
