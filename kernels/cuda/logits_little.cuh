/* logits_little.cuh - rows of FP32 mixtures of which all gradients are little beside their heaviest
 * class, as where a dozen classes of 1 % agree and the rest does not (logits_general.cuh; which
 * rows: general_row::judge()). What FP32 rounds off the sums of the masses, which classes that are
 * alike have alike, off the means of h, by the polynomials' errors, and off h itself would show.
 * All of it is taken once more, in FP64. */
#ifndef KLD_KERNELS_CUDA_LOGITS_LITTLE_CUH
#define KLD_KERNELS_CUDA_LOGITS_LITTLE_CUH

#include "kernels/cuda/logits_sides.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* A group: sums, and what judge() wants: a part has room for that, as nothing here has a mark, and
 * integers order as floats that are not negative do. */
static __device__ __forceinline__ part merge_with_extremes(const double (&sums)[4],
                                                           const extremes &p, const extremes &q) {
    return resident::merge_row(
        sums, __float_as_int(logits_stats::warp_max(p.below)),
        __float_as_int(logits_stats::warp_max(q.below)),
        [](const part *parts, uint32_t count) {
            part to = logits_stats::plain_merge(parts, count);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                to.mark[i] = __reduce_max_sync(KLD_FULL_WARP, to.mark[i]);
                to.top[i] = logits_stats::warp_max(to.top[i]);
            }
            return to;
        },
        logits_stats::warp_max(p.above), logits_stats::warp_max(q.above));
}

/* FUNCTION(zp, zq) for each class that a thread has. */
template <class FUNCTION>
static __device__ __forceinline__ void each_class(const resident::slice &slice, FUNCTION function) {
    slice.template pass<float>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
        constexpr int V = packet<float>::V;
        float z_p[V], z_q[V];
        unpack<float>(raw_p, z_p);
        unpack<float>(raw_q, z_q);
#pragma unroll 1
        for (int i = 0; i < V; i++)
            if (i < left.left)
                function(z_p[i], z_q[i]);
    });
}

/* The whole group: a side's mean, and its gradient. */
template <int SIDE, class BODY>
static __device__ __forceinline__ void finish_side(const row_at_hand<BODY> &hand) {
    constexpr int V = packet<float>::V;
    typename BODY::numbers &all = hand.shared->numbers;
    const float c = SIDE == SIDE_P ? all.c_p : all.c_q;
    const two_floats part_of = SIDE == SIDE_P ? all.factor_p : all.factor_q;
    const double inverse = (double)hand.t.inverse.high + (double)hand.t.inverse.low;
    const double all_shift = (double)all.shift.high + (double)all.shift.low;
    const mixture_origin from(hand.args->rule, SIDE == SIDE_Q, all.wide.y0[SIDE]);
    const double shift = SIDE == SIDE_P ? all_shift + from.y0 : all_shift - from.y0;
    auto mass = [&](float z_p, float z_q) {
        return BODY::wide_power(SIDE == SIDE_P ? z_p : z_q, c, hand.t);
    };
    auto slope = [&](float z_p, float z_q) {
        const double x = fma((double)z_p - (double)z_q, inverse, -shift);
        return from.slope(SIDE == SIDE_P ? -x : x);
    };
    double total[4] = {0, 0, 0, 0}; /* of mass h, and mass */
    each_class(hand.slice, [&](float z_p, float z_q) {
        const double m = mass(z_p, z_q);
        total[0] += m == 0.0 ? 0.0 : m * slope(z_p, z_q);
        total[1] += m;
    });
    part sums = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
    if (resident::group_thread() == 0) /* in the place of y0, which nobody wants any more */
        all.wide.y0[SIDE] = sums.sum[0] / sums.sum[1];
    resident::group_sync();
    const double mean = all.wide.y0[SIDE];
    const double factor = all.wide.gradient * ((double)part_of.high + (double)part_of.low);
    const resident::slice slice = hand.slice.template evened<float>();
    slice.template pass<float>(
        [&](uint32_t vector, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            float z_p[V], z_q[V], g[V];
            unpack<float>(raw_p, z_p);
            unpack<float>(raw_q, z_q);
#pragma unroll 1
            for (int i = 0; i < V; i++) {
                const double m = mass(z_p[i], z_q[i]);
                g[i] = m == 0.0 ? 0.0f : (float)(factor * m * (slope(z_p[i], z_q[i]) - mean));
            }
            resident::put<float>(SIDE == SIDE_P ? hand.grad_p : hand.grad_q,
                                 SIDE == SIDE_P ? hand.whole_p : hand.whole_q, slice.count,
                                 slice.head, vector, left, g);
        });
}

/* The whole group: from the sums, whose ratio the careful way knows, to the gradients. */
template <class BODY>
static __device__ __forceinline__ void finish_closely(const row_at_hand<BODY> &hand) {
    typename BODY::numbers &all = hand.shared->numbers;
    if (hand.shared->way == FAST) {
        const float c_p = all.c_p, c_q = all.c_q;
        double mass[4] = {0, 0, 0, 0};
        each_class(hand.slice, [&](float z_p, float z_q) {
            mass[0] += BODY::wide_power(z_p, c_p, hand.t);
            mass[1] += BODY::wide_power(z_q, c_q, hand.t);
        });
        part sums = resident::merge_row(mass, 0, 0, logits_stats::plain_merge);
        if (resident::group_thread() == 0)
            all.count_by(sums.sum[0], sums.sum[1]);
        resident::group_sync();
    }
    if (hand.grad_p)
        finish_side<SIDE_P>(hand);
    if (hand.grad_q)
        finish_side<SIDE_Q>(hand);
    hand.slice.release();
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
