/* logits_list.cuh - classes of a row of logits that count one by one, in FP64 (logits_stats.cuh):
 * what a warp has come across in its part of a row, put aside so that its lanes take one each. */
#ifndef KLD_KERNELS_CUDA_LOGITS_LIST_CUH
#define KLD_KERNELS_CUDA_LOGITS_LIST_CUH

#include "kernels/cuda/logits_stats.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

/* Classes of a warp's part of a row that count one by one, until their turn comes: then each of the
 * warp's lanes takes one. In shared memory. */
template <class T> struct heavy_list {
    static constexpr uint32_t MOST = 64;
    float p[MOST], q[MOST];

    /* Those of the lanes for which `mine`; behind `count`, which says too much if they are too
     * many. The whole warp. */
    __device__ __forceinline__ void take_one(bool mine, float z_p, float z_q, uint32_t &count) {
        uint32_t all = __ballot_sync(KLD_FULL_WARP, mine);
        uint32_t at = count + (uint32_t)__popc(all & lanes_before());
        if (mine && at < MOST) {
            p[at] = z_p;
            q[at] = z_q;
        }
        count += (uint32_t)__popc(all);
    }
    /* Twice in 4 bytes. Rounded down: to nearest it may be what it is to lie below. */
    static __device__ __forceinline__ uint32_t pad_of(float pad) {
        uint32_t bits;
        if constexpr (std::is_same<T, __half>::value)
            bits = __half_as_ushort(__float2half_rd(pad));
        else
            bits = __bfloat16_as_ushort(__float2bfloat16_rd(pad));
        return bits << 16 | bits;
    }
    /* Those of 4 bytes of each side, where pads are left in their place. */
    __device__ __forceinline__ void take_word(uint32_t &word_p, uint32_t &word_q,
                                              const reference &at, uint32_t &count) {
        if constexpr (sizeof(T) == 4) {
            float z_p = __uint_as_float(word_p), z_q = __uint_as_float(word_q);
            bool mine = !(z_p <= at.limit_p && z_q <= at.limit_q);
            if (!__any_sync(KLD_FULL_WARP, mine))
                return;
            take_one(mine, z_p, z_q, count);
            word_p = mine ? __float_as_uint(at.pad_p) : word_p;
            word_q = mine ? __float_as_uint(at.pad_q) : word_q;
        } else {
            typedef typename top_of<T>::two two;
            two limit_p = top_of<T>::two_of(at.limit_p);
            two limit_q = top_of<T>::two_of(at.limit_q);
            uint32_t mine = __hgtu2_mask(*(const two *)&word_p, limit_p) |
                            __hgtu2_mask(*(const two *)&word_q, limit_q);
            if (!__any_sync(KLD_FULL_WARP, mine != 0))
                return;
            two z_p = *(const two *)&word_p, z_q = *(const two *)&word_q;
            take_one(mine & 0xffffu, (float)z_p.x, (float)z_q.x, count);
            take_one(mine >> 16, (float)z_p.y, (float)z_q.y, count);
            uint32_t pad_p = pad_of(at.pad_p), pad_q = pad_of(at.pad_q);
            word_p = (word_p & ~mine) | (pad_p & mine);
            word_q = (word_q & ~mine) | (pad_q & mine);
        }
    }
    __device__ __forceinline__ void take(uint4 &raw_p, uint4 &raw_q, const reference &at,
                                         uint32_t &count) {
        take_word(raw_p.x, raw_q.x, at, count);
        take_word(raw_p.y, raw_q.y, at, count);
        take_word(raw_p.z, raw_q.z, at, count);
        take_word(raw_p.w, raw_q.w, at, count);
    }
    /* Pads behind the first `left` classes of a vector. */
    static __device__ __forceinline__ void pad(uint4 &raw, int32_t left, float pad) {
        uint32_t *word = (uint32_t *)&raw, many;
        if constexpr (sizeof(T) == 4)
            many = __float_as_uint(pad);
        else
            many = pad_of(pad);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if constexpr (sizeof(T) == 4)
                word[i] = i < left ? word[i] : many;
            else
                word[i] = 2 * i + 1 < left ? word[i]
                          : 2 * i < left   ? __byte_perm(word[i], many, 0x7610)
                                           : many;
    }
    /* Are the pads numbers of the type, so that one may stand for a class? */
    static __device__ __forceinline__ bool can_take(const reference &at) {
        return !std::is_same<T, __half>::value || fminf(at.pad_p, at.pad_q) > -65504.0f;
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
