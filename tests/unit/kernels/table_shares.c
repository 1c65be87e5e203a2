/* table_shares.c - the cases of mixtures of which one side has next to nothing: 1 less the other's
 * share says little of it, or nothing, and where the other side has no mass it is all there is. */
#include "tests/unit/kernels/table_list.h"

static void add_one(struct table_list *list, uint32_t turn, uint32_t divergence, double parameter,
                    uint32_t dtype, enum table_data data) {
    static const uint64_t classes[] = {2, 300, 37, 1030, 5000};
    static const double gaps[] = {0, 20, 0, 45, 8, 0, 30};
    struct table_case *at =
        table_list_add_one(list, "", 3, classes[turn % 5], divergence, turn % 3, dtype);
    snprintf(at->name, sizeof at->name, "share %g %llu %s %s %s %s", parameter,
             (unsigned long long)at->shape[1], kld_divergence_name(divergence),
             kld_form_name(at->form[0]), kld_dtype_name(dtype), table_data_name(data));
    at->parameter = parameter;
    at->data = data;
    at->noise = gaps[turn % 7];
    at->gradient[0] = turn / 3 % 4 != 0;
    at->gradient[1] = turn / 3 % 4 != 1;
    if (turn / 3 % 4 == 2)
        at->reduction = KLD_REDUCTION_NONE;
    if (turn % 11 == 0) /* mixed forms and types */
        table_list_forms(at, turn % 3, turn / 11 % 3);
    if (turn % 13 == 0)
        at->dtype[1] = FP32;
}

void table_list_shares(struct table_list *list) {
    static const double small[] = {1e-3, 1e-6, 1e-9, 1e-14, 1e-17, 1e-100};
    static const uint32_t dtypes[] = {FP64, FP64, FP32, BF16, FP16};
    static const uint32_t divergences[] = {KLD_DIVERGENCE_SKEW_KL, KLD_DIVERGENCE_SKEW_REVERSE_KL,
                                           KLD_DIVERGENCE_JS};
    static const enum table_data data[] = {TABLE_DISJOINT, TABLE_RANDOM, TABLE_DISJOINT};
    uint32_t turn = 0;
    for (int dtype = 0; dtype < 5; dtype++)
        for (int i = 0; i < 6; i++)
            for (int k = 0; k < 9; k++)
                for (int form = 0; form < 3; form++)
                    add_one(list, turn++, divergences[k % 3], small[i], dtypes[dtype], data[k / 3]);
    /* A beta near 1: what is left of it is a number of FP64. */
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 6; k++)
            add_one(list, turn++, KLD_DIVERGENCE_JS, 1 - (i == 3 ? 0x1p-53 : small[i]), FP64,
                    data[k / 3]);
}
