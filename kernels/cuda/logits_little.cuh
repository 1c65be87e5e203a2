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

/* One warp: sums, and the largest of what judge() wants. */
static __device__ __forceinline__ part merge_with_most(const part *parts, uint32_t count) {
    const uint32_t lane = threadIdx.x % 32;
    part to = logits_stats::plain_merge(parts, count);
#pragma unroll
    for (int i = 0; i < 2; i++)
        to.top[i] = logits_stats::warp_max(lane < count ? parts[lane].top[i] : 0.0f);
    return to;
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
                function((double)z_p[i], (double)z_q[i]);
    });
}

/* The whole group: from the sums, whose ratio the careful way knows, to the gradients. */
template <class BODY>
static __device__ __forceinline__ void finish_closely(const row_at_hand<BODY> &hand) {
    constexpr int V = packet<float>::V;
    typename BODY::numbers &all = hand.shared->numbers;
    const double scale = (double)hand.t.scale.high + (double)hand.t.scale.low;
    const double inverse = (double)hand.t.inverse.high + (double)hand.t.inverse.low;
    const double c_p = (double)all.c_p, c_q = (double)all.c_q;
    auto mass_p = [&](double z_p) { return wide_exp2(fma(z_p, scale, -c_p)); };
    auto mass_q = [&](double z_q) { return wide_exp2(fma(z_q, scale, -c_q)); };
    if (hand.shared->way == FAST) {
        double mass[4] = {0, 0, 0, 0};
        each_class(hand.slice, [&](double z_p, double z_q) {
            mass[0] += mass_p(z_p);
            mass[1] += mass_q(z_q);
        });
        part sums = resident::merge_row(mass, 0, 0, logits_stats::plain_merge);
        if (resident::group_thread() == 0)
            all.count_by(sums.sum[0], sums.sum[1]);
        resident::group_sync();
    }
    const mixture_origin from_p(*hand.rule, false, all.y0[SIDE_P]);
    const mixture_origin from_q(*hand.rule, true, all.y0[SIDE_Q]);
    const double shift = (double)all.shift.high + (double)all.shift.low;
    auto slope_p = [&](double u) { return from_p.slope(-fma(u, inverse, -shift - from_p.y0)); };
    auto slope_q = [&](double u) { return from_q.slope(fma(u, inverse, -shift + from_q.y0)); };
    double total[4] = {0, 0, 0, 0}; /* p h, q h, p, q */
    each_class(hand.slice, [&](double z_p, double z_q) {
        const double p = mass_p(z_p), q = mass_q(z_q), u = z_p - z_q;
        total[0] += p == 0.0 ? 0.0 : p * slope_p(u);
        total[1] += q == 0.0 ? 0.0 : q * slope_q(u);
        total[2] += p;
        total[3] += q;
    });
    part sums = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
    if (resident::group_thread() < 2) { /* in the place of y0, which nobody wants any more */
        const int which = (int)resident::group_thread();
        all.y0[which] = sums.sum[which] / sums.sum[2 + which];
    }
    resident::group_sync();
    const double mean_p = all.y0[SIDE_P], mean_q = all.y0[SIDE_Q];
    const double factor_p = all.gradient * ((double)all.factor_p.high + (double)all.factor_p.low);
    const double factor_q = all.gradient * ((double)all.factor_q.high + (double)all.factor_q.low);
    const resident::slice slice = hand.slice.template evened<float>();
    slice.template last_pass<false, 1>(
        V, [&](uint32_t vector, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            float z_p[V], z_q[V], g_p[V], g_q[V];
            unpack<float>(raw_p, z_p);
            unpack<float>(raw_q, z_q);
#pragma unroll 1
            for (int i = 0; i < V; i++) {
                const double p = mass_p((double)z_p[i]), q = mass_q((double)z_q[i]);
                const double u = (double)z_p[i] - (double)z_q[i];
                g_p[i] = p == 0.0 ? 0.0f : (float)(factor_p * p * (slope_p(u) - mean_p));
                g_q[i] = q == 0.0 ? 0.0f : (float)(factor_q * q * (slope_q(u) - mean_q));
            }
            if (hand.grad_p)
                resident::put<float>(hand.grad_p, hand.whole_p, slice.count, slice.head, vector,
                                     left, g_p);
            if (hand.grad_q)
                resident::put<float>(hand.grad_q, hand.whole_q, slice.count, slice.head, vector,
                                     left, g_q);
        });
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
