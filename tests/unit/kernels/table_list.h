/* table_list.h - how the list of cases is written: what table_cases.c and its like share. One
 * thread. */
#ifndef KLD_TESTS_TABLE_LIST_H
#define KLD_TESTS_TABLE_LIST_H

#include "tests/unit/kernels/table.h"

#define TABLE_CASES_MAX 8192
#define TABLE_DIVERGENCES (KLD_DIVERGENCE_CROSS_ENTROPY + 1)

#define FP32 KLD_DTYPE_FP32
#define FP64 KLD_DTYPE_FP64
#define FP16 KLD_DTYPE_FP16
#define BF16 KLD_DTYPE_BF16
#define PROBS KLD_FORM_PROBS
#define LOGPROBS KLD_FORM_LOGPROBS
#define LOGITS KLD_FORM_LOGITS

struct table_list {
    struct table_case *at;
    size_t count, room;
    uint64_t turn; /* picks the options that rotate */
};

/* A case of FP32 probabilities, forward_kl, loss and one gradient, to be changed by the caller.
 * Without room for it the program ends: a case that is not in the list would pass. */
struct table_case *table_list_add(struct table_list *list, const char *name, uint64_t rows,
                                  uint64_t classes);
/* One form and data type for both; the name says all of it. */
struct table_case *table_list_add_one(struct table_list *list, const char *what, uint64_t rows,
                                      uint64_t classes, uint32_t divergence, uint32_t form,
                                      uint32_t dtype);
void table_list_forms(struct table_case *at, uint32_t predictions, uint32_t targets);
/* The divergence, with a parameter if it takes one: beta stays at its default. */
void table_list_diverge(struct table_case *at, uint32_t divergence);
/* The next of numbers in no order, below `of`. */
uint64_t table_list_turn(struct table_list *list, uint64_t of);

/* table_held.c: rows of logits that a back end may hold in memory nearer than the tensors'. */
void table_list_held(struct table_list *list, bool quick);
void table_list_kept(struct table_list *list, bool quick);

/* table_shares.c: mixtures of which one side has next to nothing. */
void table_list_shares(struct table_list *list);

#endif
