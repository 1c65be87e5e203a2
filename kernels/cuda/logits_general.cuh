/* logits_general.cuh - rows of logits: every divergence, every gradient. After the statistics one
 * pass sums what the softmax takes off the gradients, and the values of mixtures; the last writes.
 *
 * A gradient by a side's logits is mass (h - sum of mass h) plus a part that sums to 0 by itself, a
 * multiple of q - p; h is a function of d alone, but for the cross entropy:
 *     KL             h_p = of_p d, h_q = -of_q d, and (of_p (q - p), of_q (p - q)) for (q, p)
 *     MIXTURE        h_p = of_p ln(p/m) + share k (q - p)/m, h_q = of_q ln(q/m) + rest k (q - p)/m
 *                    with rest = 1 - share, k = of_p rest - of_q share
 *     TV             h_q = -h_p = sign(q - p) / 2
 *     CROSS_ENTROPY  h_p = -ln q, and q - p for q
 * Where one class holds nearly all of a side's mass, its h is next to the sum and the difference is
 * all there is. So h is counted from a pivot, its value where d is the mean of d over that side. */
#ifndef KLD_KERNELS_CUDA_LOGITS_GENERAL_CUH
#define KLD_KERNELS_CUDA_LOGITS_GENERAL_CUH

#include "kernels/cuda/logits_difference.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* The numbers of MIXTURE. */
struct mixture {
    double wide_share, wide_k;
    float of_p, of_q, share, rest, k;

    __device__ __forceinline__ mixture() {}
    __device__ __forceinline__ explicit mixture(const kld_rule &rule)
        : wide_share(rule.share), wide_k(rule.of_p * (1.0 - rule.share) - rule.of_q * rule.share),
          of_p((float)rule.of_p), of_q((float)rule.of_q), share((float)rule.share),
          rest((float)(1.0 - rule.share)),
          k((float)(rule.of_p * (1.0 - rule.share) - rule.of_q * rule.share)) {}
};

/* Of one class: masses, q - p, ln p - ln q. */
struct element {
    float p, q, more, d;
};

/* h of both sides. */
struct slopes {
    float p, q;
};

/* For 16 bits, of masses and d. */
static __device__ __forceinline__ mixture_terms<float> mixture_16(const mixture &at,
                                                                  const element &e) {
    mixture_terms<float> r;
    float m = fmaf(at.share, e.p, at.rest * e.q);
    /* A mass that small adds nothing, whatever its logarithm. */
    float p = e.p < 0x1p-120f ? m : e.p, q = e.q < 0x1p-120f ? m : e.q;
    bool some = m >= 0x1p-120f, near = fabsf(e.d) < 0.0625f;
    r.more = some ? e.more * reciprocal(m) : 0.0f;
    /* -ln(share + rest e^-d) and the same less d, as series or by logarithms */
    float both = at.share * at.rest * e.d * e.d;
    both *= fmaf(e.d, (at.share - at.rest) * (1.0f / 6), -0.5f);
    float log_m = log2_fast(m);
    float far_p = (log2_fast(p) - log_m) * 0.693147181f;
    float far_q = (log2_fast(q) - log_m) * 0.693147181f;
    r.log_p = near ? fmaf(at.rest, e.d, both) : some ? far_p : 0.0f;
    r.log_q = near ? fmaf(-at.share, e.d, both) : some ? far_q : 0.0f;
    return r;
}

template <int KIND> struct general_row : difference_row {
    two_floats shift_p, shift_q; /* KL: shift and the mean of d; cross entropy: of ln q */
    float factor;                /* of gradients */
    float pivot_p, pivot_q;
    float sum_p, sum_q; /* of mass times (h - pivot); after the second exchange */
    mixture mix;

    __device__ __forceinline__ general_row() {}
    __device__ __forceinline__ general_row(const kld_cuda_args &args, const row_stats &stats,
                                           double gradient)
        : difference_row(stats, 1.0), shift_p(stats.shift + stats.forward),
          shift_q(stats.shift - stats.reverse), factor((float)gradient), pivot_p(0), pivot_q(0),
          sum_p(0), sum_q(0), mix(args.rule) {
        if (KIND == KLD_RULE_TV)
            pivot_p = pivot_q = 0.5f; /* both means of d are on their own side */
        if (KIND == KLD_RULE_CROSS_ENTROPY) {
            /* ln q = zq / T - lse; h_p = -ln q is counted from the entropy */
            double lse = (double)stats.c_q * LN_2 - log(stats.inverse_q);
            shift_p = two_floats(lse - stats.entropy);
        }
        if (KIND == KLD_RULE_MIXTURE) {
            double share = args.rule.share, k = mix.wide_k;
            mixture_terms<double> p = mixture_of(share, stats.forward);
            mixture_terms<double> q = mixture_of(share, -stats.reverse);
            pivot_p = (float)(args.rule.of_p * p.log_p + share * k * p.more);
            pivot_q = (float)(args.rule.of_q * q.log_q + (1.0 - share) * k * q.more);
        }
    }
};

template <class T_, int KIND> struct general_body {
    typedef T_ T;
    typedef T_ type;
    static constexpr bool FP32 = sizeof(T_) == 4;
    static constexpr bool KNOWN = KIND == KLD_RULE_KL || KIND == KLD_RULE_CROSS_ENTROPY;
    static constexpr int EXTRA =
        KIND == KLD_RULE_CROSS_ENTROPY ? logits_stats::ENTROPY : logits_stats::REVERSE;
    typedef general_row<KIND> numbers;
    typedef const row_at_hand<general_body> hand_type;

    static __device__ __forceinline__ double value(const kld_cuda_args &args,
                                                   const row_stats &stats) {
        return KIND == KLD_RULE_KL ? args.rule.of_p * stats.forward + args.rule.of_q * stats.reverse
               : KIND == KLD_RULE_CROSS_ENTROPY ? stats.entropy
                                                : 0.0;
    }

    template <bool CLASSES_OUT>
    static __device__ __forceinline__ element element_of(float z_p, float z_q, const two_floats &u,
                                                         const numbers &row, const temperature &t) {
        element e;
        if constexpr (FP32) {
            e.d = logarithm<CLASSES_OUT>(u, row.shift, t);
            e.p = mass_fp32(z_p, row.c_p, row.factor_p.high, row.factor_p.low, t);
            e.q = mass_fp32(z_q, row.c_q, row.factor_q.high, row.factor_q.low, t);
            if (CLASSES_OUT) {
                e.p = z_p == -CUDART_INF_F ? 0.0f : e.p;
                e.q = z_q == -CUDART_INF_F ? 0.0f : e.q;
            }
            float change = one_minus_exp(fabsf(e.d));
            e.more = e.d < 0.0f ? e.q * change : -e.p * change;
        } else {
            e.p = mass_16(z_p, row.c_p, row.factor_p.high, t);
            e.q = mass_16(z_q, row.c_q, row.factor_q.high, t);
            e.d = logarithm_16<CLASSES_OUT>(u.high, row.shift, t);
            e.more = difference_16(e.p, e.q, e.d);
        }
        if (CLASSES_OUT && e.p == 0.0f && e.q == 0.0f)
            e.d = e.more = 0.0f;
        return e;
    }

    /* h less its pivot, and the value where KIND needs it summed. */
    template <bool CLASSES_OUT>
    static __device__ __forceinline__ slopes slopes_of(const element &e, float z_q,
                                                       const two_floats &u, const numbers &row,
                                                       const temperature &t, float &ret_value) {
        slopes h;
        ret_value = 0.0f;
        if (KIND == KLD_RULE_KL) {
            if constexpr (FP32) {
                h.p = row.mix.of_p * logarithm<CLASSES_OUT>(u, row.shift_p, t);
                h.q = -row.mix.of_q * logarithm<CLASSES_OUT>(u, row.shift_q, t);
            } else {
                h.p = row.mix.of_p * logarithm_16<CLASSES_OUT>(u.high, row.shift_p, t);
                h.q = -row.mix.of_q * logarithm_16<CLASSES_OUT>(u.high, row.shift_q, t);
            }
        } else if (KIND == KLD_RULE_CROSS_ENTROPY) {
            two_floats z;
            z.high = z_q;
            z.low = 0.0f;
            h.p = -logarithm<CLASSES_OUT>(z, row.shift_p, t);
            h.q = 0.0f;
        } else if (KIND == KLD_RULE_TV) {
            float sign = e.d < 0.0f ? 0.5f : e.d > 0.0f ? -0.5f : 0.0f;
            h.p = -sign - row.pivot_p;
            h.q = sign - row.pivot_q;
            ret_value = 0.5f * fabsf(e.more);
        } else {
            const mixture &mix = row.mix;
            if constexpr (FP32) {
                double inverse = (double)t.inverse.high + (double)t.inverse.low;
                double shift = (double)row.shift.high + (double)row.shift.low;
                double d = fma((double)u.high, inverse, fma((double)u.low, inverse, -shift));
                if (CLASSES_OUT) /* one of the masses is 0, but not the terms of the other */
                    d = fabsf(e.d) < 1e30f ? d : (double)fminf(fmaxf(e.d, -1e30f), 1e30f);
                mixture_terms<double> m = mixture_of(mix.wide_share, d);
                double of_p = (double)mix.of_p, of_q = (double)mix.of_q;
                double cross = mix.wide_k * m.more;
                h.p = (float)(of_p * m.log_p + mix.wide_share * cross - (double)row.pivot_p);
                h.q =
                    (float)(of_q * m.log_q + (1.0 - mix.wide_share) * cross - (double)row.pivot_q);
                ret_value = fmaf((float)(of_p * m.log_p), e.p, (float)(of_q * m.log_q) * e.q);
            } else {
                mixture_terms<float> m = mixture_16(mix, e);
                float cross = mix.k * m.more;
                h.p = fmaf(mix.of_p, m.log_p, mix.share * cross) - row.pivot_p;
                h.q = fmaf(mix.of_q, m.log_q, mix.rest * cross) - row.pivot_q;
                ret_value = fmaf(mix.of_p * e.p, m.log_p, mix.of_q * e.q * m.log_q);
            }
            ret_value = fmaf(mix.k, e.more, ret_value);
        }
        if (CLASSES_OUT) { /* no mass, no part in it: h may be infinite there */
            h.p = e.p == 0.0f ? 0.0f : h.p;
            h.q = e.q == 0.0f ? 0.0f : h.q;
        }
        return h;
    }

    static __device__ __forceinline__ two_floats difference(float z_p, float z_q) {
        if constexpr (FP32)
            return subtract(z_p, z_q);
        two_floats u;
        u.high = z_p - z_q;
        u.low = 0.0f;
        return u;
    }

    static __device__ __forceinline__ double wide_mass(float z, float c, const two_floats &factor,
                                                       const temperature &t) {
        double scale = (double)t.scale.high + (double)t.scale.low;
        return wide_exp2(fma((double)z, scale, -(double)c)) *
               ((double)factor.high + (double)factor.low);
    }

    /* Sums of the values and of mass times h, to all. Returns the value, to the first warp. */
    template <bool CAREFUL> static __device__ __forceinline__ double sum_pass(hand_type &hand) {
        constexpr int V = packet<T>::V;
        numbers row = hand.shared->numbers;
        double total[4] = {0, 0, 0, 0};
        float sum[3] = {0, 0, 0};
        hand.slice.template pass<T>(
            [&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
                float z_p[V], z_q[V];
                unpack<T>(raw_p, z_p);
                unpack<T>(raw_q, z_q);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    if (!decltype(left)::ALL && i >= left.left)
                        break;
                    two_floats u = difference(z_p[i], z_q[i]);
                    element e = element_of<CAREFUL>(z_p[i], z_q[i], u, row, hand.t);
                    float value;
                    slopes h = slopes_of<CAREFUL>(e, z_q[i], u, row, hand.t, value);
                    sum[0] += value;
                    if (!FP32) {
                        sum[1] = fmaf(e.p, h.p, sum[1]);
                        sum[2] = fmaf(e.q, h.q, sum[2]);
                        continue;
                    }
                    /* Terms may be much larger than their sum, and gradients of its size. */
                    if (hand.grad_p && h.p != 0.0f)
                        total[1] += (double)h.p * wide_mass(z_p[i], row.c_p, row.factor_p, hand.t);
                    if (hand.grad_q && h.q != 0.0f)
                        total[2] += (double)h.q * wide_mass(z_q[i], row.c_q, row.factor_q, hand.t);
                }
#pragma unroll
                for (int i = 0; i < 3; i++) {
                    total[i] += (double)sum[i];
                    sum[i] = 0;
                }
            });
        auto merge = [](const part *parts, uint32_t count) {
            part from = logits_stats::lane_part(parts, count), to = from;
            logits_stats::sums_of(to, from.sum);
            return to;
        };
        part row_sums = resident::merge_row(total, 0, 0, merge);
        if (threadIdx.x == 0) {
            hand.shared->numbers.sum_p = (float)row_sums.sum[1];
            hand.shared->numbers.sum_q = (float)row_sums.sum[2];
        }
        block_sync(1, resident::COMPUTING);
        return row_sums.sum[0] < 0.0 ? 0.0 : row_sums.sum[0]; /* NaN stays */
    }

    template <bool CAREFUL> static __device__ __forceinline__ void write_pass(hand_type &hand) {
        constexpr int V = packet<T>::V;
        numbers row = hand.shared->numbers;
        bool cross = KIND == KLD_RULE_KL || KIND == KLD_RULE_CROSS_ENTROPY;
        float cross_q = KIND == KLD_RULE_CROSS_ENTROPY ? 1.0f : row.mix.of_p;
        float cross_p = KIND == KLD_RULE_CROSS_ENTROPY ? 0.0f : -row.mix.of_q;
        hand.slice.template last_pass<false>(V, [&](uint32_t vector, auto left, const uint4 &raw_p,
                                                    const uint4 &raw_q) {
            float z_p[V], z_q[V];
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
#pragma unroll
            for (int i = 0; i < V; i++) {
                two_floats u = difference(z_p[i], z_q[i]);
                element e = element_of<CAREFUL>(z_p[i], z_q[i], u, row, hand.t);
                float value;
                slopes h = slopes_of<CAREFUL>(e, z_q[i], u, row, hand.t, value);
                float g_p = e.p * (h.p - row.sum_p), g_q = e.q * (h.q - row.sum_q);
                if (cross) {
                    g_p = fmaf(cross_p, e.more, g_p);
                    g_q = fmaf(cross_q, e.more, g_q);
                }
                z_p[i] = row.factor * g_p;
                z_q[i] = row.factor * g_q;
            }
            if (hand.grad_p)
                resident::put<T>(hand.grad_p, hand.whole_p, hand.slice.count, vector, left, z_p);
            if (hand.grad_q)
                resident::put<T>(hand.grad_q, hand.whole_q, hand.slice.count, vector, left, z_q);
        });
    }

    template <bool CAREFUL> static __device__ __forceinline__ double passes(hand_type &hand) {
        bool gradient = hand.grad_p || hand.grad_q;
        double value = hand.shared->value;
        if (!KNOWN || gradient) {
            double sum = sum_pass<CAREFUL>(hand);
            value = KNOWN ? value : sum;
        }
        if (gradient)
            write_pass<CAREFUL>(hand);
        else
            hand.slice.release();
        return value;
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
