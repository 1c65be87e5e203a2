/* table_rows.c - the kinds of rows that cases are made of: a row of each tensor, as its form and
 * data type hold it. Nothing here runs a back end, and nothing knows the truth. */
#include <math.h>

#include "tests/unit/kernels/table.h"

#define LOWEST (-3.5e38) /* stands for the lowest number of the data type */
#define SAME_RANDOM 2    /* deviation of the logits of most kinds */

/* One row of a crowd: what a case says of all its rows, but for each its own. */
struct kind {
    enum table_data data;
    double noise, lift[2]; /* of predictions, of targets */
    uint64_t variant;      /* what is the row's number elsewhere */
};

/* The first FINITE_KINDS have finite values. Beside each other: rows that a back end may take
 * different ways for, the hardest of each. */
static const struct kind crowd[] = {
    {TABLE_RANDOM, 0, {0, 0}, 0},       {TABLE_NEAR, 0.14, {0, 0}, 0},
    {TABLE_RANDOM, 0, {0, 100}, 0},     {TABLE_NEAR, 0.045, {0, 0}, 0},
    {TABLE_SHARP, 0, {0, 0}, 0},        {TABLE_NEAR, 1.4e-3, {0, 0}, 0},
    {TABLE_ZEROS, 0, {0, 0}, 0},        {TABLE_NEAR, 4.5e-5, {0, 0}, 0},
    {TABLE_EQUAL, 0, {0, 0}, 0},        {TABLE_AGREE, 1e-2, {0, 0}, 0},
    {TABLE_LOWEST, 0, {0, 0}, 0},       {TABLE_NEAR, 0.045, {100, 0}, 0},
    {TABLE_RANDOM, 0, {-1000, 0}, 0},   {TABLE_NEAR, 1.4e-3, {0, 1000}, 0},
    {TABLE_NEAR, 0.14, {1e4, 0}, 0},    {TABLE_HEAVY, 0.9, {0, 0}, 0},
    {TABLE_HEAVY, 0.99, {0, 0}, 0},     {TABLE_HEAVY, 0.9999, {0, 0}, 0},
    {TABLE_SPIKE, 30, {0, 0}, 1},       {TABLE_SPIKE, 30, {0, 0}, 2},
    {TABLE_SPIKE, 30, {0, 0}, 3},       {TABLE_SPIKE, 8, {0, 0}, 3},
    {TABLE_CONFIDENT, 1e-4, {0, 0}, 0}, {TABLE_CONFIDENT, 1e-7, {0, 0}, 0},
    {TABLE_TOP, 1, {0, 0}, 0},          {TABLE_TOP, 5, {0, 0}, 1},
    {TABLE_TOP, 50, {0, 0}, 2},         {TABLE_EXTREME, 0, {0, 0}, 0},
    {TABLE_SPIKE, 90, {0, 0}, 3},       {TABLE_RESERVED, 0, {0, 0}, 0},
    {TABLE_RESERVED, 1, {0, 0}, 0},     {TABLE_MASKED, 251, {0, 0}, 0},
    {TABLE_MASKED, 2, {0, 0}, 0},
#define FINITE_KINDS 33
    {TABLE_BAD, 0, {0, 0}, 1},                                        /* NaN in the predictions */
    {TABLE_INFINITE, 0, {0, 0}, 0},     {TABLE_BAD, 0, {0, 0}, 3},    /* +inf */
    {TABLE_BAD, 0, {0, 0}, 4},                                        /* nothing but -inf */
    {TABLE_TOP, 20, {0, 0}, 5},         {TABLE_LOWEST, 0, {0, 0}, 1}, /* of the targets alone */
    {TABLE_BAD, 0, {0, 0}, 6},                                        /* NaN in the targets */
    {TABLE_RANDOM, 0, {0, 0}, 0},
};
_Static_assert(sizeof crowd / sizeof crowd[0] == TABLE_CROWD_ROWS, "each kind once");

/* What is added to all logits of one side, as far as its data type goes; 0: they are its lowest. */
static const struct {
    int side;
    double lift;
} apart[] = {{0, 0},    {1, 0},     {0, 1e6},  {1, -1e6}, {1, 1e9}, {0, -1e9},
             {0, 1e20}, {1, -1e20}, {0, -1e4}, {1, 1e5},  {0, 5e5}, {1, 40}};
_Static_assert(sizeof apart / sizeof apart[0] == TABLE_APART_ROWS, "each once");

static struct kind kind_of(const struct table_case *at, uint64_t row) {
    if (at->data == TABLE_CROWD)
        return crowd[(row + at->first) % TABLE_CROWD_ROWS];
    if (at->data == TABLE_CROWD_FINITE)
        return crowd[(row + at->first) % FINITE_KINDS];
    bool near = at->data == TABLE_NEAR || at->data == TABLE_EQUAL;
    double shift = near ? at->shift / 2 : 5;
    struct kind own = {at->data, at->noise, {at->lift[0] - shift, at->lift[1] + shift}, row};
    if (at->data == TABLE_APART)
        own.lift[apart[row % TABLE_APART_ROWS].side] = apart[row % TABLE_APART_ROWS].lift;
    return own;
}

static bool is_crowd(const struct table_case *at) {
    return at->data == TABLE_CROWD || at->data == TABLE_CROWD_FINITE;
}

/* Of rows that agree, by the value: that of tv is of the size of the root of a KL. */
double table_row_relative(const struct table_case *at, uint64_t row, long double value) {
    struct kind kind = kind_of(at, row);
    double noise = at->temperature > 0 ? kind.noise / at->temperature : kind.noise;
    if (!is_crowd(at))
        return at->relative;
    if (kind.data != TABLE_NEAR || kind.lift[0] != 0 || kind.lift[1] != 0 || noise > 0.5)
        return 0;
    if (at->divergence == KLD_DIVERGENCE_TV)
        value *= value;
    return value >= 1e-6L ? 1e-4 : value >= 1e-9L ? 1e-2 : 0;
}

const char *table_data_name(enum table_data data) {
    static const char *const names[] = {
        [TABLE_RANDOM] = "random",     [TABLE_SHARP] = "sharp",
        [TABLE_NEAR] = "near",         [TABLE_EQUAL] = "equal",
        [TABLE_ZEROS] = "zeros",       [TABLE_INFINITE] = "infinite",
        [TABLE_BAD] = "bad",           [TABLE_EXTREME] = "extreme",
        [TABLE_AGREE] = "agree",       [TABLE_LOWEST] = "lowest",
        [TABLE_HEAVY] = "heavy",       [TABLE_SPIKE] = "spike",
        [TABLE_TOP] = "top",           [TABLE_CONFIDENT] = "confident",
        [TABLE_RESERVED] = "reserved", [TABLE_FEW] = "few",
        [TABLE_FINE] = "fine",         [TABLE_MASKED] = "masked",
        [TABLE_DISJOINT] = "disjoint", [TABLE_FAINT] = "faint",
        [TABLE_APART] = "apart",       [TABLE_MINUS] = "minus",
        [TABLE_STEPS] = "steps",       [TABLE_ENDLESS] = "endless",
    };
    return names[data];
}

void table_row_text(const struct table_case *at, uint64_t row, char *text, size_t size) {
    struct kind kind = kind_of(at, row);
    text[0] = 0;
    if (is_crowd(at))
        snprintf(text, size, ", a row of %s %g %llu +%g/%g", table_data_name(kind.data), kind.noise,
                 (unsigned long long)kind.variant, kind.lift[0], kind.lift[1]);
}

static uint64_t some_class(struct table_random *random, uint64_t classes) {
    uint64_t at = (uint64_t)(table_uniform(random) * (double)classes);
    return at < classes ? at : classes - 1;
}

/* The logit that gives class `at` the share `mass` of the row. */
static double logit_of(const double *logits, uint64_t classes, uint64_t at, double mass,
                       double rest) {
    double sum = 0;
    for (uint64_t i = 0; i < classes; i++)
        sum += i == at ? 0 : exp(logits[i]);
    return log(mass / rest * sum);
}

/* One class that stands out: any, or the last, which a back end may take in another way. */
static void make_outstanding(const struct kind *kind, struct table_random *random, uint64_t classes,
                             double *q, double *p) {
    bool last = table_uniform(random) < 0.4;
    uint64_t where = last ? classes - 1 : some_class(random, classes);
    for (uint64_t i = 0; i < classes; i++) {
        q[i] = SAME_RANDOM * table_normal(random);
        p[i] = SAME_RANDOM * table_normal(random);
    }
    if (classes == 1)
        return;
    double *row[2] = {q, p};
    for (unsigned side = 0; kind->data == TABLE_SPIKE && side < 2; side++) {
        double most = 0;
        for (uint64_t i = 0; i < classes; i++)
            most = fmax(most, row[side][i]);
        if (kind->variant >> side & 1)
            row[side][where] = most + kind->noise + 0.01 * side;
    }
    for (unsigned side = 0; kind->data == TABLE_HEAVY && side < 2; side++)
        row[side][where] =
            logit_of(row[side], classes, where, kind->noise, 1 - kind->noise) + 1e-3 * side;
    for (unsigned side = 0; kind->data == TABLE_CONFIDENT && side < 2; side++) {
        double rest = side ? kind->noise / 30 : kind->noise;
        row[side][where] = logit_of(row[side], classes, where, 1 - rest, rest);
    }
}

/* Is a class one of the `count` that a teacher has kept: at the start, at the end, or spread? */
static bool is_kept(uint64_t i, uint64_t classes, double count, uint64_t variant) {
    uint64_t kept = (uint64_t)count < classes ? (uint64_t)count : classes;
    if (variant % 3 == 0)
        return i < kept;
    if (variant % 3 == 1)
        return i >= classes - kept;
    return i % (classes / kept) == 0;
}

static void make_zeros(const struct table_case *at, const struct kind *kind,
                       struct table_random *random, uint64_t classes, double *q, double *p) {
    /* Which side's zeros are harmless depends on the divergence: either's, both's, none's. */
    bool reverse = at->divergence == KLD_DIVERGENCE_REVERSE_KL ||
                   at->divergence == KLD_DIVERGENCE_SKEW_REVERSE_KL;
    bool both =
        at->divergence == KLD_DIVERGENCE_JEFFREYS || at->divergence == KLD_DIVERGENCE_MIXED_KL;
    double *own = reverse ? q : p, *other = reverse ? p : q;
    bool infinite = kind->data == TABLE_INFINITE || kind->data == TABLE_MINUS;
    bool zeros = kind->data == TABLE_ZEROS || infinite;
    for (uint64_t i = 1; zeros && i < classes; i++) {
        double dice = table_uniform(random);
        if (dice < (both && (kind->data == TABLE_ZEROS || kind->variant % 3) ? 0.2 : 0.4))
            own[i] = -INFINITY;
        if (dice < 0.2)
            other[i] = -INFINITY;
    }
    if (infinite && kind->variant % 3 == 0 && classes > 1) {
        other[0] = -INFINITY;
        for (uint64_t i = 1; i < classes; i++) /* a mass that no arithmetic takes for 0 */
            own[0] = fmax(own[0], own[i]);
    }
    bool targets = kind->variant > 2; /* whatever comes of it */
    for (uint64_t i = 0; kind->data == TABLE_TOP && i < classes; i++) {
        if (is_kept(i, classes, kind->noise, kind->variant))
            continue;
        (targets ? p : own)[i] = -INFINITY;
        if (both && !targets)
            other[i] = -INFINITY;
    }
}

/* Rows whose js may be lost: in what the sides' equal classes add; of masses that one side has
 * where the other's are 2^-127 of its largest; in the rounding of logits that are 10^6; and as said
 * below. */
static void make_few(const struct kind *kind, uint64_t i, uint64_t classes, double *q, double *p) {
    *q = *p = 0;
    if (kind->noise == 1 && i == classes / 2) {
        *p = -3;
        *q = LOWEST;
    } else if (kind->noise == 2) {
        *p = i < 2 ? 0 : -88;
        *q = i == 0 ? 0.84765625 : i == 1 ? 0 : -21;
    } else if (kind->noise == 3 && i < 6) {
        *p = i < 3 ? 9.875 : 0;
        *q = i == 2 ? 0 : 9.875;
    } else if (kind->noise == 4) { /* of two blocks one's reference is far below the other's */
        bool other = i >= classes / 2, one = i % (classes / 2) < 4;
        bool many = i % 64 == 17 && i < classes / 2 + 12 * 64;
        *p = other ? (one || many ? 300 : 0) : one ? -1000 : i < 12 ? 300 : 0;
        *q = (double)(i % 7) / 4;
    } else if (kind->noise == 5) { /* a constant between the sides */
        *p = (double)(i * 7919 % 1009) / 250 - 2;
        *q = (double)(i * 6271 % 1013) / 250 + 1e5;
    } else if (kind->noise == 6) { /* q's mass where p has next to none */
        *p = i % 2 ? -17.4339199 : 23.1780663;
        *q = i % 2 ? 21.8904152 : -13.8585033;
    } else if (kind->noise > 6) { /* what is next to the mean is far from where h is counted */
        *p = i ? (double)(i * 7919 % 1009) / 1024 : log((double)classes * 0.57);
        *q = i ? *p + (double)(i % 5) / 1024 : *p - 80 - 2 * kind->noise;
    }
}

/* Two rows of logits, from which every form is made. */
static void make_logits(const struct table_case *at, const struct kind *kind,
                        struct table_random *random, uint64_t classes, double *q, double *p) {
    double spread = kind->data == TABLE_SHARP ? 15 : kind->data == TABLE_EXTREME ? 60 : SAME_RANDOM;
    if (kind->data == TABLE_HEAVY || kind->data == TABLE_SPIKE || kind->data == TABLE_CONFIDENT) {
        make_outstanding(kind, random, classes, q, p);
        return;
    }
    for (uint64_t i = 0; i < classes; i++) {
        q[i] = spread * table_normal(random);
        bool near = kind->data == TABLE_NEAR || (kind->data == TABLE_APART && kind->noise > 0);
        p[i] = near                        ? q[i] + kind->noise * table_normal(random)
               : kind->data == TABLE_EQUAL ? q[i]
                                           : spread * table_normal(random);
        if (kind->data == TABLE_AGREE) {
            bool heavy = i % 700 == 0;
            q[i] = heavy ? 8 : q[i] * 0.35 - 1;
            p[i] = heavy ? 8 + kind->noise * table_normal(random) : p[i] * 0.35 - 1;
        }
        if (kind->data == TABLE_FINE) {
            q[i] *= i == classes / 2 ? 0 : kind->noise / SAME_RANDOM;
            q[i] += i == classes / 2 ? 8 * kind->noise : 0;
            p[i] = 0;
        }
        /* The first 2560 bytes: all that one of some warps sees at first, or more. */
        bool reserved = i < 2560 / kld_dtype_bytes(at->dtype[0]) && i + 1 < classes;
        if (kind->data == TABLE_RESERVED && reserved)
            q[i] = p[i] = kind->noise > 0 ? -30 + q[i] : -1e4;
        if (kind->data == TABLE_MASKED && i % (uint64_t)kind->noise == 1)
            p[i] = -1e4;
        if (kind->data == TABLE_DISJOINT && i % 7 != 6)
            *(i % 2 ? &q[i] : &p[i]) -= kind->noise > 0 ? kind->noise : INFINITY;
        if (kind->data == TABLE_FAINT) {
            q[i] = i ? -kind->noise : 0;
            p[i] = i ? -at->shift : 0;
        }
        if (kind->data == TABLE_FEW)
            make_few(kind, i, classes, &q[i], &p[i]);
        unsigned way = (unsigned)kind->variant % TABLE_APART_ROWS;
        if (kind->data == TABLE_APART && apart[way].lift == 0)
            *(apart[way].side ? &p[i] : &q[i]) = LOWEST;
        bool masked = i < classes / 8 || i % 3 == 1;
        if (kind->data == TABLE_LOWEST && masked && i + 1 < classes) {
            p[i] = LOWEST;
            q[i] = at->data == TABLE_CROWD && kind->variant ? q[i] : LOWEST;
        }
    }
    make_zeros(at, kind, random, classes, q, p);
}

static long double lowest(uint32_t dtype) {
    return dtype == KLD_DTYPE_FP16   ? -65504.0L
           : dtype == KLD_DTYPE_BF16 ? -0x1.fep127L
           : dtype == KLD_DTYPE_FP32 ? -0x1.fffffep127L
                                     : -0x1.fffffffffffffp1023L;
}

/* As far as the type goes, with room for the logits. */
static long double lifted(uint32_t dtype, long double logit, double lift) {
    double most = dtype == KLD_DTYPE_FP16 ? 6e4 : 1e30;
    return logit + fmax(-most, fmin(lift, most));
}

/* A form of a row, rounded to the data type. logits get a constant of their own. */
static void write_form(uint32_t form, uint32_t dtype, const struct kind *kind, double lift,
                       const double *logits, uint64_t classes, unsigned char *to) {
    long double max = -INFINITY, sum = 0;
    for (uint64_t i = 0; i < classes; i++)
        max = logits[i] > max ? logits[i] : max;
    for (uint64_t i = 0; i < classes; i++)
        sum += exp((double)(logits[i] - max));
    long double log_sum = logl(sum);
    for (uint64_t i = 0; i < classes; i++) {
        long double value = logits[i] - max - log_sum;
        if (form == KLD_FORM_PROBS && kind->data == TABLE_STEPS)
            value = floor(20 * fabs(logits[i])) * kind->noise;
        else if (form == KLD_FORM_PROBS)
            value = exp((double)value) == 0 && kind->data == TABLE_MINUS && i % 2 == 0
                        ? -0.0L
                        : (long double)exp((double)value);
        else if (form == KLD_FORM_LOGITS && logits[i] == LOWEST)
            value = lowest(dtype);
        else if (form == KLD_FORM_LOGITS)
            value = kind->data == TABLE_EXTREME ? (i % 2 ? 1e4L : -1e4L) + logits[i]
                                                : lifted(dtype, logits[i], lift);
        else if (dtype == KLD_DTYPE_FP16 && value < -60000 && isfinite(value))
            value = -60000;
        table_write(dtype, to + i * kld_dtype_bytes(dtype), value);
    }
}

/* Rows that are no distributions. */
static void spoil(const struct table_case *at, int side, uint64_t variant, uint64_t classes,
                  unsigned char *to) {
    uint32_t dtype = at->dtype[side], bytes = kld_dtype_bytes(dtype);
    uint64_t where = classes / 2;
    if (variant % 5 == 1 && side == (int)(variant / 5 % 2))
        table_write(dtype, to + where * bytes, NAN);
    if (variant % 5 == 2 && at->form[side] == KLD_FORM_PROBS)
        table_write(dtype, to + where * bytes, -0.25L);
    if (variant % 5 == 3 && at->form[side] == KLD_FORM_LOGITS)
        table_write(dtype, to + where * bytes, INFINITY);
    for (uint64_t i = 0; variant % 5 == 4 && at->form[side] == KLD_FORM_LOGITS && i < classes; i++)
        table_write(dtype, to + i * bytes, -INFINITY);
}

/* A mass of +inf on either side or both; the other may have none there. */
static void make_endless(const struct table_case *at, int side, uint64_t variant, uint64_t classes,
                         unsigned char *to) {
    uint32_t dtype = at->dtype[side], form = at->form[side];
    unsigned char *where = to + classes / 2 * kld_dtype_bytes(dtype);
    if (variant >> side & 1 && form != KLD_FORM_LOGITS)
        table_write(dtype, where, INFINITY);
    else if (variant & 4)
        table_write(dtype, where, form == KLD_FORM_PROBS ? 0 : -INFINITY);
}

void table_row_make(const struct table_case *at, uint64_t row, uint64_t classes,
                    struct table_random *random, double *q, double *p, unsigned char *const to[2]) {
    struct kind kind = kind_of(at, row);
    make_logits(at, &kind, random, classes, q, p);
    for (int side = 0; side < 2; side++) {
        write_form(at->form[side], at->dtype[side], &kind, kind.lift[side], side ? p : q, classes,
                   to[side]);
        if (kind.data == TABLE_BAD)
            spoil(at, side, kind.variant, classes, to[side]);
        if (kind.data == TABLE_ENDLESS)
            make_endless(at, side, kind.variant, classes, to[side]);
    }
}
