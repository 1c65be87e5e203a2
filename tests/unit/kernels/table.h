/* table.h - the kernel case table: one list of cases that every back end must compute as the oracle
 * says. Cases are plain descriptions; data, oracle values, memories and checks are made from them.
 * Used by kernel_table.c (a program without the Check library) and by unit tests. One thread. */
#ifndef KLD_TESTS_TABLE_H
#define KLD_TESTS_TABLE_H

#include <stdio.h>

#include "kernels/backend.h"

enum table_data {
    TABLE_RANDOM,   /* logits of a normal distribution, deviation 2 */
    TABLE_SHARP,    /* deviation 15: most classes have next to no mass */
    TABLE_NEAR,     /* targets differ from predictions by `noise` of a logit */
    TABLE_EQUAL,    /* targets are the predictions (up to a constant for logits) */
    TABLE_ZEROS,    /* classes of mass 0: in both, in the numerator only */
    TABLE_INFINITE, /* mass over a zero in every third row */
    TABLE_MINUS,    /* the same, and probabilities of 0 are -0 in every second class */
    TABLE_ENDLESS,  /* a class of most rows is +inf, a probability or the logarithm of one */
    TABLE_BAD,      /* rows with NaN, negative probabilities, +inf or nothing but -inf */
    TABLE_EXTREME,  /* the ends of the range of the data type */
    TABLE_AGREE,    /* the few classes that hold the mass agree up to `noise`, the others do not */
    TABLE_LOWEST, /* logits of the type's lowest, in both: the first eighth and every third class */
    TABLE_HEAVY,  /* one class holds the share `noise` of both, and agrees closely */
    TABLE_SPIKE,  /* one class is `noise` above all others, of one side or both */
    TABLE_FINE,   /* logits of the targets alike, of the predictions `noise` apart */
    TABLE_RESERVED,  /* the first classes have next to no mass, or none, on both sides */
    TABLE_CONFIDENT, /* all but `noise` of the predictions' mass is one class's, and of targets' */
    TABLE_TOP,       /* all but `noise` classes of the targets have no mass */
    TABLE_MASKED, /* a teacher's mask of -1e4 on every `noise`th class; the student knows of none */
    TABLE_FEW, /* logits are the same but for those of a few classes, `noise` says how: table_rows.c
                */
    TABLE_DISJOINT, /* most classes have mass on one side: on the other `noise` less, or 0: none */
    TABLE_APART, /* one side lies far from the other, each row in another way; `noise`: they agree
                    up to that, 0: they have nothing in common */
    TABLE_FAINT, /* classes lie `noise` (predictions), `shift` (targets) below the first */
    TABLE_STEPS, /* probabilities are whole numbers of `noise` */
    TABLE_CROWD, /* every row another kind of these */
    TABLE_CROWD_FINITE, /* and none whose value is infinite or NaN */
};
#define TABLE_CROWD_ROWS 41
#define TABLE_APART_ROWS 12
const char *table_data_name(enum table_data data); /* of one row's kind */

/* Which rows are left out. */
enum table_masking {
    TABLE_MASK_THIRDS, /* every third from the second on */
    TABLE_MASK_RUNS,   /* runs of up to some hundred, the first and the last row among them */
    TABLE_MASK_MOST,   /* all but every 101st */
    TABLE_MASK_ALL,
};

struct table_case {
    char name[96];
    uint32_t divergence, reduction, form[2], dtype[2];
    double parameter; /* beta, skew or weight, whichever the divergence takes; NAN: not given */
    bool aliased;     /* with this parameter it is the divergence alias, bit for bit */
    uint32_t alias;
    uint32_t rank;
    uint64_t shape[KLD_RANK_MAX];
    enum table_data data;
    double noise;
    double relative; /* 0, or how much of itself a value may be off, whatever its terms are */
    double shift;    /* FAINT; NEAR and EQUAL: how far the two logits' constants lie apart */
    double temperature, scale, normalizer, grad_output; /* 0: not given */
    uint32_t grad_output_dtype;                         /* a tensor; 0: none */
    bool weights, mask, gradient[2], loss, row_loss;
    bool row_loss_wide;  /* it is FP64, whatever the inputs are */
    bool weights_cancel; /* every second one takes away what the one before it added */
    bool mask_uint8;     /* its data type; else BOOL */
    enum table_masking masking;
    bool weights_few;  /* 0, and powers of 2: sums are exact */
    uint32_t distinct; /* rows that differ; 0: 16 */
    uint32_t first;    /* of a crowd: the kind of the first row */
    bool shuffled;     /* they come in no order: each has all kinds of neighbours */
    double lift[2];    /* added to all logits of predictions, of targets */
    bool strided;      /* rows with gaps */
    bool speed;        /* timed; only a few variants are compared */
    bool once;         /* run once and compared with the truth, no more */
};

/* The list, from malloc(); the caller frees it. */
struct table_case *table_cases(bool quick, size_t *ret_count);

/* The same, at random. NULL: no memory. */
struct table_case *table_cases_random(uint64_t seed, size_t count);

/* Random numbers: xorshift, the same on every machine. */
struct table_random {
    uint64_t state;
};
double table_uniform(struct table_random *random); /* (0, 1) */
double table_normal(struct table_random *random);

/* Elements of a tensor as numbers; own conversions, not the back ends'. */
void table_write(uint32_t dtype, unsigned char *to, long double value); /* rounds to nearest */
long double table_read(uint32_t dtype, const unsigned char *from);
long double table_ulp(uint32_t dtype, long double value); /* one step of dtype at value */

/* A row pair as the case describes row `row` of those that differ, to both tensors. q, p: space. */
void table_row_make(const struct table_case *at, uint64_t row, uint64_t classes,
                    struct table_random *random, double *q, double *p, unsigned char *const to[2]);
/* How much of itself its value may be off; 0: no such bound. */
double table_row_relative(const struct table_case *at, uint64_t row, long double value);
/* What it is, for messages: "" unless it is one of a crowd. */
void table_row_text(const struct table_case *at, uint64_t row, char *text, size_t size);

/* The inputs of a case and what must come out. Only `distinct` rows differ; row i holds and yields
 * what number table_row_of(i) of those does, apart from weight, mask and factor. Owned:
 * table_truth_done(). */
struct table_truth {
    struct kld_op op; /* without places */
    struct kld_geometry geometry;
    uint64_t distinct;
    bool shuffled;
    unsigned char *input[KLD_SLOT_COUNT]; /* packed, `distinct` rows of a wide tensor */
    long double *term, *gradient[2];      /* [distinct][classes], without weight and factor */
    long double *slack[2];                /* [distinct][classes], of oracle_row; NULL: none */
    /* [distinct][classes]: of a term's |parts| and what double arithmetic leaves; NULL: not `none`
     */
    long double *term_magnitude;
    long double *value;      /* [distinct] */
    long double *magnitude;  /* [distinct]: sum of |parts|, and what double arithmetic leaves */
    long double (*parts)[2]; /* [distinct], of oracle_row */
    double *relative;        /* [distinct], of table_row_relative() */
    long double divisor;     /* 0: everything is 0 */
    long double loss, loss_magnitude; /* scalar reductions */
    char failure[256];                /* "" or why the oracle contradicts itself */
};
void table_truth_init(struct table_truth *truth, const struct table_case *at, uint64_t seed);
void table_truth_done(struct table_truth *truth);
uint64_t table_row_of(const struct table_truth *truth, uint64_t row);
bool table_row_masked(const struct table_truth *truth, uint64_t row);
long double table_row_weight(const struct table_truth *truth, uint64_t row);
/* What multiplies the gradient of a row, grad_output by element apart. */
long double table_row_factor(const struct table_truth *truth, uint64_t row);

/* Where and how a case runs. */
enum table_memory { TABLE_POOL, TABLE_WRAPPED, TABLE_MAPPED };
struct table_place {
    enum table_memory memory;
    uint32_t shift_elements; /* every tensor starts this many elements off its alignment */
    bool in_place;           /* gradients over their tensors */
    uint32_t repeats;        /* runs; the outputs of all are compared */
};
struct table_outputs {
    unsigned char *at[KLD_SLOT_COUNT]; /* packed, every row; NULL: not an output of the case */
    double loss;
    uint64_t best_ns, bytes;
};
/* Runs it. false: *failure (256 bytes) says what went wrong: a status, bits that differ between
 * runs, a byte written that is no output's. */
bool table_run(struct kld_device *device, const struct table_truth *truth,
               const struct table_case *at, const struct table_place *place,
               struct table_outputs *ret_outputs, char *failure);
void table_outputs_done(struct table_outputs *outputs);
/* The same inputs asked for as at->alias. */
void table_truth_alias(const struct table_truth *truth, const struct table_case *at,
                       struct table_truth *ret_alias);
bool table_outputs_equal(const struct table_truth *truth, const struct table_outputs *a,
                         const struct table_outputs *b, char *failure);

/* Runs up to `rows` rows of those that differ each alone: its bits must be what they were among the
 * others. */
bool table_run_alone(struct kld_device *device, const struct table_truth *truth,
                     const struct table_case *at, const struct table_outputs *outputs,
                     uint32_t rows, char *failure);

/* Compares with the truth, and rows that hold the same with each other, bit for bit. */
bool table_check(const struct table_truth *truth, const struct table_case *at,
                 const struct table_outputs *outputs, char *failure);

#endif
