/* quick_heavy.h - the classes of a block that weigh so much that FP32 will not do: taken out of it,
 * to be done in double by themselves, and the block without them. Included by the quick_*.c of each
 * vector width; static and pure. */
#ifndef KLD_KERNELS_CPU_QUICK_HEAVY_H
#define KLD_KERNELS_CPU_QUICK_HEAVY_H

#include "kernels/cpu/quick_math.h"

#define HEAVY 0.015625 /* a share of the mass, of one class */

struct heavies {
    uint64_t count;  /* of classes */
    uint64_t padded; /* the same in whole vectors of doubles: the rest has no mass */
    uint16_t at[BLOCK];
    float z[2][BLOCK + DOUBLES];
};

INLINE uint32_t vf_above(vf a, vf b) {
#if KLD_VECTOR_BYTES == 64
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif KLD_VECTOR_BYTES == 32
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#endif
}

/* Those with a logit above the limit of its side. */
static void heavies_of(const struct pair *pair, const double limit[2],
                       struct heavies *ret_heavies) {
    vf limits[2] = {vf_of((float)limit[0]), vf_of((float)limit[1])};
    uint64_t count = 0;
    for (uint64_t i = 0; i < pair->count; i += FLOATS) {
        uint32_t found = vf_above(*(const vf_any *)(pair->at[0] + i), limits[0]) |
                         vf_above(*(const vf_any *)(pair->at[1] + i), limits[1]);
        for (; found; found &= found - 1) {
            uint64_t at = i + (uint64_t)__builtin_ctz(found);
            ret_heavies->at[count] = (uint16_t)at;
            for (int side = 0; side < 2; side++)
                ret_heavies->z[side][count] = pair->at[side][at];
            count++;
        }
    }
    ret_heavies->count = count;
    ret_heavies->padded = (count + DOUBLES - 1) / DOUBLES * DOUBLES;
    for (int side = 0; side < 2; side++)
        for (uint64_t i = count; i < ret_heavies->padded; i++)
            ret_heavies->z[side][i] = -INFINITY;
}

/* The rest: in the place of what was taken out is what a block is filled up with. */
static void pair_without(const struct kld_cpu_quick *quick, const struct pair *pair,
                         const struct heavies *heavies, struct pair *ret_pair) {
    ret_pair->count = pair->count;
    for (int side = 0; side < 2; side++) {
        memcpy(ret_pair->space[side], pair->at[side], pair->count * sizeof(float));
        for (uint64_t k = 0; k < heavies->count; k++)
            ret_pair->space[side][heavies->at[k]] = -quick->limit;
        ret_pair->at[side] = ret_pair->space[side];
        ret_pair->top[side] = pair->top[side];
    }
    ret_pair->wild = false;
}

#endif
