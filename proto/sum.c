/* sum.c - the order of a loss's sum (sum.h). Pure; any thread. */
#include "proto/sum.h"

static uint64_t divide_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

uint64_t kld_sum_group_rows(uint64_t rows, uint64_t classes) {
    uint64_t wanted = divide_up(KLD_SUM_GROUP_ELEMENTS, classes);
    uint64_t least = divide_up(rows, KLD_SUM_GROUPS_MAX);
    return wanted > least ? wanted : least;
}

double kld_sum_terms(const double *terms, uint64_t rows, uint64_t classes) {
    uint64_t group_rows = kld_sum_group_rows(rows, classes), row = 0;
    double sum = 0;
    while (row < rows) {
        uint64_t end = rows - row > group_rows ? row + group_rows : rows;
        double group = 0;
        for (; row < end; row++)
            group += terms[row];
        sum += group;
    }
    return sum;
}
