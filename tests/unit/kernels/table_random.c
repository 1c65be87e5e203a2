/* table_random.c - cases at random, for a search by `kernel-table --random`: what the list's cases
 * do not happen to meet. Each is compared with the oracle once; the list has the rest. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/kernels/table_list.h"

static double power_of_ten(struct table_random *random, double low, double high) {
    return pow(10, low + (high - low) * table_uniform(random));
}

static uint32_t one_of(struct table_random *random, uint32_t count) {
    uint32_t chosen = (uint32_t)(table_uniform(random) * count);
    return chosen < count ? chosen : count - 1;
}

static void choose_data(struct table_random *random, struct table_case *at) {
    static const struct {
        enum table_data data;
        double low, high; /* of noise, powers of ten */
    } kinds[] = {
        {TABLE_RANDOM, 0, 0}, {TABLE_RANDOM, 0, 0}, {TABLE_SHARP, 0, 0},       {TABLE_NEAR, -5, 0},
        {TABLE_NEAR, -2, 0},  {TABLE_AGREE, -4, 0}, {TABLE_HEAVY, -2, -0.001}, {TABLE_SPIKE, 0, 2},
        {TABLE_FINE, -4, 0},  {TABLE_EQUAL, 0, 0},  {TABLE_CONFIDENT, -7, -1},
    };
    uint32_t kind = one_of(random, sizeof kinds / sizeof kinds[0]);
    at->data = kinds[kind].data;
    at->noise = power_of_ten(random, kinds[kind].low, kinds[kind].high);
}

struct table_case *table_cases_random(uint64_t seed, size_t count) {
    static const uint32_t dtypes[] = {FP32, FP32, FP16, BF16};
    struct table_random random = {seed * 0x9e3779b97f4a7c15u + 1};
    struct table_list list = {.at = calloc(count + 1, sizeof(struct table_case)), .room = count};
    for (size_t i = 0; list.at && i < count; i++) {
        uint64_t classes = (uint64_t)power_of_ten(&random, 0, 4.3);
        uint32_t dtype = dtypes[one_of(&random, 4)], form = one_of(&random, 3);
        struct table_case *at = table_list_add_one(&list, "random", 8, classes,
                                                   one_of(&random, TABLE_DIVERGENCES), form, dtype);
        uint32_t gradients = one_of(&random, 4);
        at->gradient[0] = gradients & 1;
        at->gradient[1] = gradients & 2;
        at->temperature = one_of(&random, 2) ? power_of_ten(&random, -0.7, 0.7) : 0;
        if (isnan(at->parameter) ? one_of(&random, 2) : at->parameter != 0)
            at->parameter = table_uniform(&random);
        at->distinct = 8;
        at->once = true;
        choose_data(&random, at);
        size_t end = strlen(at->name);
        snprintf(at->name + end, sizeof at->name - end, " %s %.3g", table_data_name(at->data),
                 at->noise);
    }
    return list.at;
}
