/* kept_copies.cuh - a row that is kept in shared memory (logits_kept.cuh), and how each lane brings
 * its own vectors of it there. No mathematics here. */
#ifndef KLD_KERNELS_CUDA_KEPT_COPIES_CUH
#define KLD_KERNELS_CUDA_KEPT_COPIES_CUH

#include "kernels/cuda/logits_reread.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* A row of this block's, from when it is found to when its gradient is written. */
struct kept_row {
    onepass_row row;
    double weight, factor;
    logits_stats::reference at; /* what to count from */
    const char *p, *q;          /* this block's slice, less the shift */
    char *to;                   /* of the gradient */
    uint32_t shift_p, shift_q;  /* bytes after a multiple of 16 */
    uint32_t bytes;             /* of the slice */
    bool is;                    /* false: there are no more; bytes is 0 */
};

/* What a lane brings of a row: 16 bytes a step and tensor. */
template <bool UNEVEN> struct kept_copies {
    static constexpr uint32_t STEP = 16 * resident::GROUP_THREADS;
    typedef typename onepass_units<2>::template from_kept<UNEVEN> source;
    const char *p, *q;
    int32_t left_p, left_q; /* bytes of the row from there on */
    bool last;              /* of its warp */
    bool has;               /* there is such a row, and this block has classes of it */

    static __device__ __forceinline__ kept_copies of(const kept_row &row) {
        const int32_t first = 16 * (int32_t)thread_again();
        kept_copies c;
        c.p = row.p + first;
        c.q = row.q + first;
        c.last = first % 512 == 31 * 16;
        c.has = row.bytes != 0;
        c.left_p = row.bytes ? (int32_t)(row.bytes + row.shift_p) - first : 0;
        c.left_q = row.bytes ? (int32_t)(row.bytes + row.shift_q) - first : 0;
        return c;
    }
    __device__ __forceinline__ void bring(uint32_t to, const char *from, int32_t left,
                                          uint32_t step) const {
        if (left > (int32_t)(step * STEP))
            copy_16(to, from + step * STEP);
        if (UNEVEN && last && left > (int32_t)(step * STEP + 16))
            copy_16(to + 16, from + step * STEP + 16);
    }
    /* To the places of that step; `at`: this lane's of the first. */
    __device__ __forceinline__ void bring(uint32_t at, uint32_t step) const {
        bring(at + step * source::PLACE, p, left_p, step);
        bring(at + step * source::PLACE + source::TENSOR, q, UNEVEN ? left_q : left_p, step);
    }
    __device__ __forceinline__ uint32_t steps() const {
        int32_t most = max(left_p, left_q); /* then the warp's */
        most += has ? 16 * (int32_t)(thread_again() % 32) : 0;
        return most > 0 ? ((uint32_t)most + STEP - 1) / STEP : 0;
    }
    __device__ __forceinline__ void bring_from(uint32_t at, uint32_t step) const {
        /* what is behind the last step is the last lane's, too */
        for (uint32_t end = min(steps(), resident::here().place.steps); step < end; step++)
            bring(at, step);
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
