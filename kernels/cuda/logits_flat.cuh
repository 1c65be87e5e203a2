/* logits_flat.cuh - rows of 16-bit logits: the gradients of mixtures whose sides have next to
 * nothing in common. There m is next to share p where p has its mass, and next to rest q where q
 * has, so that ln(p/m) and (q - p)/m, of which h is made, are next to the same numbers wherever
 * there is mass; the gradient is what they differ by, some e^-|d|, and FP32 rounds them by more.
 * (Of the skewed KLs even e^-|d| of the one takes away that of the other.) So here h is counted as
 * rows of FP32 count it, by logits_mixture.cuh: from its mean, by what y differs, without anything
 * that cancels. Such a row's value is next to the most that there can be, which tells it once its
 * sums are known; it takes two looks more. A row that is none would come out right as well. */
#ifndef KLD_KERNELS_CUDA_LOGITS_FLAT_CUH
#define KLD_KERNELS_CUDA_LOGITS_FLAT_CUH

#include "kernels/cuda/logits_sides.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What a flat row's value lacks of the most, in parts of that, is less than this: the gradient is
 * about as much, and h is off by 1e-7 the usual way, which is to be less than half a step of BF16
 * of it. */
static constexpr double FLAT_MOST = 1.0 / 1024;
static __device__ __forceinline__ bool is_flat(const kld_rule &rule, double value) {
    return value > fma(rule.most, -FLAT_MOST, rule.most);
}

/* One side of such a row, for one thread. BODY: general_body; its side's shift is d's, less that of
 * the place from which h is counted. */
template <class BODY, int SIDE> struct flat_side {
    typedef typename BODY::T T;
    typedef typename BODY::numbers numbers;
    const both_sides row;
    const temperature &t;
    mixture_side mix;
    two_floats shift;
    float sum;

    static __device__ __forceinline__ double number(const two_floats &x) {
        return (double)x.high + (double)x.low;
    }
    static __device__ __forceinline__ mixture_origin origin(const numbers &all,
                                                            const kld_rule &rule) {
        double more = number(all.side[SIDE].shift) - number(all.shift);
        return mixture_origin(rule, SIDE == SIDE_Q, SIDE == SIDE_P ? more : -more);
    }
    static __device__ __forceinline__ two_floats shift_of(const numbers &all, double y0) {
        return two_floats(number(all.shift) + (SIDE == SIDE_P ? y0 : -y0));
    }
    __device__ __forceinline__ flat_side(const numbers &all, const kld_rule &rule,
                                         const temperature &at)
        : row(all), t(at) {
        mixture_origin from = origin(all, rule);
        mix = mixture_side(from);
        shift = shift_of(all, from.y0);
        sum = all.side[SIDE].sum;
    }
    /* One thread: the mean of mass h is known. */
    static __device__ void count_from_mean(numbers &all, const kld_rule &rule, double mean) {
        mixture_origin from = origin(all, rule);
        mixture_origin better(rule, SIDE == SIDE_Q, from.place(mean));
        all.side[SIDE].shift = shift_of(all, better.y0);
        all.side[SIDE].sum = (float)(mean - from.slope(from.y0 - better.y0));
    }

    __device__ __forceinline__ float mass(float z_p, float z_q) const {
        return BODY::template mass_of<true, SIDE>(SIDE == SIDE_P ? z_p : z_q, row, t);
    }
    /* h less what it is counted from, of a class with mass. */
    __device__ __forceinline__ float slope(float z_p, float z_q) const {
        float x = logarithm_16<true>((z_p - row.apart) - z_q, shift, t);
        return mixture_slope_fp32(mix, SIDE == SIDE_P ? -x : x, 0.0f);
    }

    /* FUNCTION(zp, zq, i) of the classes of a vector, two at a time; of what it returns as T the
     * vector is made. */
    template <class FUNCTION>
    static __device__ __forceinline__ uint4 each(uint4 p, uint4 q, FUNCTION function) {
        uint4 y = {};
#pragma unroll 1
        for (uint32_t i = 0; i < packet<T>::V; i += 2) {
            float z_p[2], z_q[2];
            unpack2<T>(p.x, z_p[0], z_p[1]);
            unpack2<T>(q.x, z_q[0], z_q[1]);
            p = {p.y, p.z, p.w, 0};
            q = {q.y, q.z, q.w, 0};
            alignas(4) T to[2] = {::to<T>(function(z_p[0], z_q[0], i)),
                                  ::to<T>(function(z_p[1], z_q[1], i + 1))};
            y = {y.y, y.z, y.w, *(const unsigned *)to};
        }
        return y;
    }
    /* Mass h of the first `left` classes. */
    __device__ __forceinline__ double of(uint32_t left, const uint4 &p, const uint4 &q) const {
        double total = 0;
        each(p, q, [&](float z_p, float z_q, uint32_t i) {
            float m = mass(z_p, z_q), h = slope(z_p, z_q);
            total += i < left && m != 0.0f ? (double)m * (double)h : 0.0;
            return 0.0f;
        });
        return total;
    }
    /* The gradient of a vector. */
    __device__ __forceinline__ uint4 of(const uint4 &p, const uint4 &q) const {
        return each(p, q, [&](float z_p, float z_q, uint32_t) {
            float m = mass(z_p, z_q), h = slope(z_p, z_q);
            return m == 0.0f ? 0.0f : m * (h - sum) * row.factor;
        });
    }

    /* The group. LOOK(FUNCTION): FUNCTION(vector, left, raw p, raw q) for every vector of this
     * thread, of the row as it lies. */
    template <class LOOK>
    static __device__ __forceinline__ void write(numbers &all, const kld_rule &rule,
                                                 const temperature &t, char *grad, uint32_t count,
                                                 LOOK look) {
        double total[4] = {0, 0, 0, 0};
        {
            const flat_side side(all, rule, t);
            look([&](uint32_t, auto left, const uint4 &p, const uint4 &q) {
                total[0] += side.of(left.left, p, q);
            });
        }
        part sums = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
        if (resident::group_thread() == 0)
            count_from_mean(all, rule, sums.sum[0]);
        resident::group_sync();
        const flat_side side(all, rule, t);
        const bool whole = aligned16<T>(grad);
        look([&](uint32_t vector, auto left, const uint4 &p, const uint4 &q) {
            resident::put_raw<T>(grad, whole, count, 0, vector, left, side.of(p, q));
        });
    }
};

/* Rows that are held in shared memory, of which passes() has but made the sums. */
template <class BODY> struct flat_rows {
    typedef rows<BODY> base;

    static __device__ __forceinline__ bool is_one(const kld_cuda_args &args, uint32_t slot,
                                                  uint32_t turn) {
        const resident::row_info &info = base::info_of(slot, turn);
        return base::shared().divides && (info.grad_p || info.grad_q) &&
               is_flat(args.rule, base::row_of(slot, turn).value);
    }
    /* A call where nothing is left to do but this: those loops' registers would be spilled. */
    static __device__ __noinline__ void write(const kld_cuda_args &args, uint32_t slot,
                                              uint32_t turn) {
        typename BODY::numbers &numbers = base::row_of(slot, turn).numbers;
        const resident::row_info &info = base::info_of(slot, turn);
        const resident::slice slice = base::slice_of(slot, turn);
        const temperature t = base::shared().t;
        auto look = [&](auto function) { slice.template pass<typename BODY::T>(function); };
        if (info.grad_p)
            BODY::template flat_of<SIDE_P>::write(numbers, args.rule, t, info.grad_p, slice.count,
                                                  look);
        if (info.grad_q)
            BODY::template flat_of<SIDE_Q>::write(numbers, args.rule, t, info.grad_q, slice.count,
                                                  look);
        slice.release();
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
