/* bench_data.c - see bench_data.h. */
#include "client/cli/bench_data.h"

#include <math.h>
#include <string.h>

static double uniform(uint64_t *state) { /* splitmix64, in [0, 1) */
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static void store(void *to, enum kld_dtype dtype, uint64_t at, double value) {
    float single = (float)value;
    if (dtype == KLD_DTYPE_FP64) {
        ((double *)to)[at] = value;
    } else if (dtype == KLD_DTYPE_FP32) {
        ((float *)to)[at] = single;
    } else if (dtype == KLD_DTYPE_FP16) {
        ((_Float16 *)to)[at] = (_Float16)single;
    } else {
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        bits += 0x7fff + (bits >> 16 & 1); /* to nearest, ties to even; never a NaN here */
        ((uint16_t *)to)[at] = (uint16_t)(bits >> 16);
    }
}

void kld_bench_fill(void *to, enum kld_dtype dtype, enum kld_form form, uint64_t rows,
                    uint64_t classes, uint64_t seed) {
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t start = seed * 0x2545f4914f6cdd1dull + row * 0x632be59bd9b4e019ull, state = start;
        double sum = 0;
        for (uint64_t i = 0; i < classes && form != KLD_FORM_LOGITS; i++)
            sum += uniform(&state) + 0.01;
        state = start;
        for (uint64_t i = 0; i < classes; i++) {
            double x = uniform(&state), value = (x + 0.01) / sum;
            if (form == KLD_FORM_LOGITS)
                value = 8 * x - 4;
            else if (form == KLD_FORM_LOGPROBS)
                value = log(value);
            store(to, dtype, row * classes + i, value);
        }
    }
}
