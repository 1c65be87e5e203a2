/* table_list.c - see table_list.h. */
#include "tests/unit/kernels/table_list.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct table_case *table_list_add(struct table_list *list, const char *name, uint64_t rows,
                                  uint64_t classes) {
    if (list->count == list->room) {
        fprintf(stderr, "kernel table: no room for more than %zu cases\n", list->room);
        abort();
    }
    struct table_case *at = &list->at[list->count++];
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

void table_list_forms(struct table_case *at, uint32_t predictions, uint32_t targets) {
    at->form[0] = predictions;
    at->form[1] = targets;
}

/* The divergence, with a parameter if it takes one: beta stays at its default. */
void table_list_diverge(struct table_case *at, uint32_t divergence) {
    at->divergence = divergence;
    at->parameter = divergence == KLD_DIVERGENCE_JS         ? (double)NAN
                    : divergence == KLD_DIVERGENCE_MIXED_KL ? 0.3
                                                            : 0.1;
}

uint64_t table_list_turn(struct table_list *list, uint64_t of) {
    list->turn = list->turn * 6364136223846793005u + 1442695040888963407u;
    return (list->turn >> 33) % of;
}

struct table_case *table_list_add_one(struct table_list *list, const char *what, uint64_t rows,
                                      uint64_t classes, uint32_t divergence, uint32_t form,
                                      uint32_t dtype) {
    struct table_case *at = table_list_add(list, "", rows, classes);
    snprintf(at->name, sizeof at->name, "%s %llux%llu %s %s %s", what, (unsigned long long)rows,
             (unsigned long long)classes, kld_divergence_name(divergence), kld_form_name(form),
             kld_dtype_name(dtype));
    table_list_diverge(at, divergence);
    table_list_forms(at, form, form);
    at->dtype[0] = at->dtype[1] = dtype;
    return at;
}
