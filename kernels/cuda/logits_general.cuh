/* logits_general.cuh - rows of logits: every divergence, every gradient. After the statistics one
 * pass sums what the softmax takes off the gradients, and the values of mixtures; the last writes.
 *
 * A gradient by a side's logits is mass (h - sum of mass h) plus a part that sums to 0 by itself, a
 * multiple of q - p; h is a function of y = ln own - ln other alone, but for the cross entropy:
 *     KL             h = of y, and (of_p (q - p), of_q (p - q)) for (q, p)
 *     MIXTURE        h = of ln(own/m) + own's share times k (q - p)/m,
 *                    k = of_p rest - of_q share
 *     TV             h = sign(y) / 2
 *     CROSS_ENTROPY  h_p = -ln q, and q - p for q
 * Where one class holds nearly all of a side's mass, its h is next to the sum and the difference is
 * all there is. So h is counted from where y has its mean over that side. */
#ifndef KLD_KERNELS_CUDA_LOGITS_GENERAL_CUH
#define KLD_KERNELS_CUDA_LOGITS_GENERAL_CUH

#include "kernels/cuda/logits_flat.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What a thread has summed: the value and mass h of both sides. */
struct general_sums {
    float value = 0, side[2] = {0, 0};
    bool heavy = false; /* a class has been left out of `side` */

    __device__ __forceinline__ void flush(double (&total)[4]) {
        total[0] += (double)value;
        total[1] += (double)side[SIDE_P];
        total[2] += (double)side[SIDE_Q];
        value = side[SIDE_P] = side[SIDE_Q] = 0;
    }
};

template <class T_, int KIND> struct general_body : usual_body {
    typedef T_ T;
    typedef T_ type;
    static constexpr bool FP32 = sizeof(T_) == 4;
    static constexpr bool KNOWN = KIND == KLD_RULE_KL || KIND == KLD_RULE_CROSS_ENTROPY;
    static constexpr int EXTRA =
        KIND == KLD_RULE_CROSS_ENTROPY ? logits_stats::ENTROPY : logits_stats::REVERSE;
    static constexpr int V = packet<T_>::V;
    static constexpr int UNROLL = KIND == KLD_RULE_MIXTURE ? 1 : 2; /* likewise */
    static constexpr float HEAVY = 1.0f / 16;                       /* part of a side's mass */
    static constexpr int BATCH = 4;                                 /* pairs at a time: registers */
    static constexpr bool ANEW = KIND == KLD_RULE_TV && FP32; /* h is counted from near its mean */
    static constexpr bool FLATTENS = KIND == KLD_RULE_MIXTURE && !FP32;
    typedef general_row<KIND, FP32> numbers;
    typedef typename numbers::side_row side_row;
    typedef const row_at_hand<general_body> hand_type;
    /* Whether and as what a side's rows of js are read. */
    template <bool CAREFUL, bool MIXED = numbers::MIXED && !CAREFUL> struct even {
        typedef side_row row;
        static __device__ __forceinline__ bool is(const side_row &) { return false; }
    };
    template <bool CAREFUL> struct even<CAREFUL, true> {
        typedef side_even row;
        static __device__ __forceinline__ bool is(const side_row &side) { return side.mix.even(); }
    };

    static __device__ __forceinline__ double value(const kld_cuda_args &args,
                                                   const row_stats &stats) {
        return KIND == KLD_RULE_KL ? args.rule.of_p * stats.forward + args.rule.of_q * stats.reverse
               : KIND == KLD_RULE_CROSS_ENTROPY ? stats.entropy
                                                : 0.0;
    }

    template <bool CLASSES_OUT>
    static __device__ __forceinline__ two_floats difference(float z_p, float z_q,
                                                            const both_sides &row) {
        if constexpr (FP32)
            return subtract(z_p, z_q);
        two_floats u;
        u.high = (CLASSES_OUT ? z_p - row.apart : z_p) - z_q;
        u.low = 0.0f;
        return u;
    }

    /* u / T - shift. */
    template <bool CLASSES_OUT>
    static __device__ __forceinline__ float log_of(const two_floats &u, const two_floats &shift,
                                                   const temperature &t) {
        if constexpr (FP32)
            return logarithm<CLASSES_OUT>(u, shift, t);
        else
            return logarithm_16<CLASSES_OUT>(u.high, shift, t);
    }

    template <bool CLASSES_OUT, int SIDE>
    static __device__ __forceinline__ float mass_of(float z, const both_sides &row,
                                                    const temperature &t) {
        float c = SIDE == SIDE_P ? row.c_p : row.c_q;
        const two_floats &factor = SIDE == SIDE_P ? row.factor_p : row.factor_q;
        float mass;
        if constexpr (FP32)
            mass = mass_fp32(z, c, factor.high, factor.low, t);
        else
            mass = mass_16(z, c, factor.high, t.scale.high);
        return CLASSES_OUT && z == -CUDART_INF_F ? 0.0f : mass;
    }

    /* q - p. */
    template <bool CLASSES_OUT>
    static __device__ __forceinline__ float more_of(float z_p, float z_q, const both_sides &row,
                                                    const temperature &t) {
        if constexpr (FP32) {
            float more = difference_fp32<CLASSES_OUT>(z_p, z_q, row, t);
            return CLASSES_OUT && isnan(more) && z_p == z_q ? 0.0f : more;
        } else {
            float p = mass_of<CLASSES_OUT, SIDE_P>(z_p, row, t);
            float q = mass_of<CLASSES_OUT, SIDE_Q>(z_q, row, t);
            float d = log_of<CLASSES_OUT>(difference<CLASSES_OUT>(z_p, z_q, row), row.shift, t);
            return CLASSES_OUT && p == 0.0f && q == 0.0f ? 0.0f : difference_16(p, q, d);
        }
    }

    /* h of a class that has mass. */
    template <bool CLASSES_OUT, int SIDE, class ROW>
    static __device__ __forceinline__ float slope_of(float z_p, float z_q, const both_sides &row,
                                                     const ROW &side, const temperature &t) {
        if (KIND == KLD_RULE_CROSS_ENTROPY) {
            two_floats z;
            z.high = z_q;
            z.low = 0.0f;
            return __fmul_rn(side.of, log_of<CLASSES_OUT>(z, side.shift, t));
        }
        two_floats u = difference<CLASSES_OUT>(z_p, z_q, row);
        if (KIND == KLD_RULE_KL)
            return __fmul_rn(side.of, log_of<CLASSES_OUT>(u, side.shift, t));
        if constexpr (KIND == KLD_RULE_MIXTURE && FP32) {
            two_floats x;
            x.low = 0.0f;
            if constexpr (std::is_same<ROW, side_even>::value)
                x.high = logarithm<CLASSES_OUT>(u, side.shift, t);
            else
                x = logarithm_wide<CLASSES_OUT>(u, side.shift, t, side.mix.wide);
            return SIDE == SIDE_P ? mixture_slope_fp32(side.mix, -x.high, -x.low)
                                  : mixture_slope_fp32(side.mix, x.high, x.low);
        }
        float d = log_of<CLASSES_OUT>(u, row.shift, t);
        if (KIND == KLD_RULE_TV) {
            float sign = d < 0.0f ? -0.5f : d > 0.0f ? 0.5f : 0.0f;
            return (SIDE == SIDE_P ? sign : -sign) + (ANEW ? side.of : -0.5f);
        }
        mixture_terms<float> terms = mixture_16<false>(row.mix, d);
        return mixture_slope_16<SIDE>(row.mix, terms);
    }
    /* The same in FP64, of a class with much of the mass. */
    template <int SIDE>
    static __device__ __forceinline__ double wide_slope(const numbers &row, const kld_rule &rule,
                                                        float z_p, float z_q,
                                                        const temperature &t) {
        const side_row &side = row.side[SIDE];
        double inverse = (double)t.inverse.high + (double)t.inverse.low;
        double shift = (double)side.shift.high + (double)side.shift.low;
        if (KIND == KLD_RULE_TV)
            return (double)slope_of<true, SIDE>(z_p, z_q, row, side, t);
        if (KIND == KLD_RULE_CROSS_ENTROPY)
            return (double)side.of * fma((double)z_q, inverse, -shift);
        double d = fma((double)z_p - (double)z_q, inverse, -shift);
        if constexpr (numbers::MIXED)
            return mixture_origin(rule, SIDE == SIDE_Q, row.y0[SIDE])
                .slope(SIDE == SIDE_P ? -d : d);
        return (double)side.of * d;
    }
    template <int SIDE>
    static __device__ __forceinline__ float mixture_slope_16(const mixture &mix,
                                                             const mixture_terms<float> &terms) {
        return SIDE == SIDE_P ? fmaf(mix.of_p, terms.log_p, -mix.pivot[SIDE_P])
                              : fmaf(mix.of_q, terms.log_q, -mix.pivot[SIDE_Q]);
    }
    /* The second part of h, of (q - p)/m: none in js. It is counted from a number of its own, as of
     * the sum of two that are large only their rounding would be left. */
    template <int SIDE>
    static __device__ __forceinline__ float mixture_gain_16(const mixture &mix, float more,
                                                            float cross) {
        return fmaf(mix.k * (SIDE == SIDE_P ? mix.share : mix.rest), more, -cross);
    }

    /* Of MIXTURE in FP32 and of TV, of one class. */
    template <bool CLASSES_OUT, bool MORE>
    static __device__ __forceinline__ float value_of(float z_p, float z_q, const both_sides &row,
                                                     const temperature &t) {
        if (KIND == KLD_RULE_TV)
            return 0.5f * fabsf(more_of<CLASSES_OUT>(z_p, z_q, row, t));
        float p = mass_of<CLASSES_OUT, SIDE_P>(z_p, row, t);
        float q = mass_of<CLASSES_OUT, SIDE_Q>(z_q, row, t);
        float d = log_of<CLASSES_OUT>(difference<CLASSES_OUT>(z_p, z_q, row), row.shift, t);
        if (CLASSES_OUT && p == 0.0f && q == 0.0f)
            return 0.0f;
        mixture_terms<float> terms = mixture_fp32(row.mix, d);
        float value = fmaf(row.mix.of_p * p, terms.log_p, row.mix.of_q * q * terms.log_q);
        if (MORE)
            value = fmaf(row.mix.k, more_of<CLASSES_OUT>(z_p, z_q, row, t), value);
        return value;
    }

    template <bool CLASSES_OUT, bool MORE, class LEFT>
    static __device__ __forceinline__ void
    sum_values(const float (&z_p)[BATCH], const float (&z_q)[BATCH], LEFT left, int first,
               const both_sides &row, const temperature &t, general_sums &sum) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            float value = value_of<CLASSES_OUT, MORE>(z_p[i], z_q[i], row, t);
            sum.value += LEFT::ALL || first + i < left.left ? value : 0.0f;
        }
    }

    static __device__ __forceinline__ double wide_mass(float z, float c, const two_floats &factor,
                                                       const temperature &t) {
        double scale = (double)t.scale.high + (double)t.scale.low;
        return wide_exp2(fma((double)z, scale, -(double)c)) *
               ((double)factor.high + (double)factor.low);
    }

    /* All the sums of MIXTURE in 16 bits over a batch: the sides share most of it. */
    template <bool CLASSES_OUT, bool SIDES, class LEFT>
    static __device__ __forceinline__ void
    sum_mixture_16(const float (&z_p)[BATCH], const float (&z_q)[BATCH], LEFT left, int first,
                   const both_sides &row, const numbers &all, const temperature &t,
                   general_sums &sum) {
        const mixture &mix = row.mix;
        float p[BATCH], q[BATCH], d[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            bool in = LEFT::ALL || first + i < left.left;
            p[i] = mass_of<CLASSES_OUT, SIDE_P>(z_p[i], row, t);
            q[i] = mass_of<CLASSES_OUT, SIDE_Q>(z_q[i], row, t);
            d[i] = log_of<CLASSES_OUT>(difference<CLASSES_OUT>(z_p[i], z_q[i], row), row.shift, t);
            if (!LEFT::ALL) {
                p[i] = in ? p[i] : 0.0f;
                q[i] = in ? q[i] : 0.0f;
            }
            if (!LEFT::ALL || CLASSES_OUT)
                d[i] = p[i] == 0.0f && q[i] == 0.0f ? 0.0f : d[i];
            mixture_terms<float> terms = mixture_16<false>(mix, d[i]);
            float value = __fmul_rn(mix.of_q * q[i], terms.log_q);
            sum.value += fmaf(mix.of_p * p[i], terms.log_p, value);
            if (!SIDES)
                continue;
            float h_p = mixture_slope_16<SIDE_P>(mix, terms);
            float h_q = mixture_slope_16<SIDE_Q>(mix, terms);
            sum.side[SIDE_P] = fmaf(p[i], h_p, sum.side[SIDE_P]);
            sum.side[SIDE_Q] = fmaf(q[i], h_q, sum.side[SIDE_Q]);
        }
        if (mix.k != 0.0f) {
            float cross[2] = {0, 0};
#pragma unroll
            for (int i = 0; SIDES && i < 2; i++)
                cross[i] = load_shared_float(shared_at(&all.side[i].cross));
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                float more = mixture_16<true>(mix, d[i]).more;
                sum.value = fmaf(mix.k, difference_16(p[i], q[i], d[i]), sum.value);
                if (!SIDES)
                    continue;
                float h_p = mixture_gain_16<SIDE_P>(mix, more, cross[SIDE_P]);
                float h_q = mixture_gain_16<SIDE_Q>(mix, more, cross[SIDE_Q]);
                sum.side[SIDE_P] = fmaf(p[i], h_p, sum.side[SIDE_P]);
                sum.side[SIDE_Q] = fmaf(q[i], h_q, sum.side[SIDE_Q]);
            }
        }
    }

    /* Sums of mass h of one side over a batch. In FP32 a heavy class counts in FP64: its term may
     * be much larger than the sum, and its gradient of the sum's size. */
    template <bool CLASSES_OUT, int SIDE, class ROW, class LEFT>
    static __device__ __forceinline__ void
    sum_side(const float (&z_p)[BATCH], const float (&z_q)[BATCH], LEFT left, int first,
             const both_sides &row, hand_type &hand, general_sums &sum) {
        const numbers &all = hand.shared->numbers;
        const ROW side = read_again<ROW>(all.side[SIDE]);
        const temperature &t = hand.t;
        float h[BATCH], mass[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            bool in = LEFT::ALL || first + i < left.left;
            float m = mass_of<CLASSES_OUT, SIDE>(SIDE == SIDE_P ? z_p[i] : z_q[i], row, t);
            mass[i] = in ? m : 0.0f;
            bool much = FP32 && mass[i] > HEAVY;
            h[i] = slope_of<CLASSES_OUT, SIDE>(z_p[i], z_q[i], row, side, t);
            if (!LEFT::ALL || CLASSES_OUT) /* it may be infinite there, or no number */
                h[i] = mass[i] == 0.0f ? 0.0f : h[i];
            sum.heavy = (bool)((int)sum.heavy | (int)much);
            sum.side[SIDE] = fmaf(much ? 0.0f : mass[i], h[i], sum.side[SIDE]);
        }
    }

    template <bool CLASSES_OUT, int SIDE, class... MORE>
    static __device__ __forceinline__ void sum_side_of(bool is_even, MORE &&...more) {
        if (is_even)
            sum_side<CLASSES_OUT, SIDE, typename even<CLASSES_OUT>::row>(more...);
        else
            sum_side<CLASSES_OUT, SIDE, side_row>(more...);
    }

    /* What sum_side() has left out of a chunk, of one thread. A call after the loop: in it, the
     * loop's registers would be spilled. */
    struct heavy_sides {
        double sum[2];
    };
    template <bool CLASSES_OUT>
    static __device__ __noinline__ heavy_sides heavy_chunk(resident::slice slice, uint32_t chunk,
                                                           const numbers &all, const kld_rule &rule,
                                                           temperature t) {
        heavy_sides to = {{0, 0}};
#pragma unroll 1
        for (uint32_t step = 0; step < resident::STEPS; step++) {
            uint4 raw_p = {}, raw_q = {};
            uint32_t left = slice.template vector_of<true>(chunk, step, V, raw_p, raw_q);
            if (!left)
                break;
            float z_p[V], z_q[V];
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
#pragma unroll
            for (int i = 0; i < V; i++) {
                if (i >= left)
                    continue;
                if (mass_of<CLASSES_OUT, SIDE_P>(z_p[i], all, t) > HEAVY)
                    to.sum[SIDE_P] += wide_mass(z_p[i], all.c_p, all.factor_p, t) *
                                      wide_slope<SIDE_P>(all, rule, z_p[i], z_q[i], t);
                if (mass_of<CLASSES_OUT, SIDE_Q>(z_q[i], all, t) > HEAVY)
                    to.sum[SIDE_Q] += wide_mass(z_q[i], all.c_q, all.factor_q, t) *
                                      wide_slope<SIDE_Q>(all, rule, z_p[i], z_q[i], t);
            }
        }
        return to;
    }

    /* Sums of the values and of mass h, to all. Returns the value, to the first warp. */
    template <bool CAREFUL, bool SIDES>
    static __device__ __forceinline__ double sum_pass(hand_type &hand) {
        const numbers &all = hand.shared->numbers;
        const both_sides row = all;
        const temperature &t = hand.t;
        double total[4] = {0, 0, 0, 0};
        general_sums sum;
        bool for_p = SIDES && hand.grad_p && (!KNOWN || all.side[SIDE_P].of != 0.0f);
        bool for_q = SIDES && hand.grad_q && (!KNOWN || all.side[SIDE_Q].of != 0.0f);
        bool even_p = even<CAREFUL>::is(all.side[SIDE_P]);
        bool even_q = even<CAREFUL>::is(all.side[SIDE_Q]);
        auto vector_sums = [&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            float z_p[V], z_q[V];
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
#pragma unroll
            for (int first = 0; first < V; first += BATCH) {
                float b_p[BATCH], b_q[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    b_p[i] = z_p[first + i];
                    b_q[i] = z_q[first + i];
                }
                if constexpr (!KNOWN && !(KIND == KLD_RULE_MIXTURE && !FP32)) {
                    if (KIND == KLD_RULE_MIXTURE && row.mix.k != 0.0f)
                        sum_values<CAREFUL, true>(b_p, b_q, left, first, row, t, sum);
                    else
                        sum_values<CAREFUL, false>(b_p, b_q, left, first, row, t, sum);
                }
                if constexpr (KIND == KLD_RULE_MIXTURE && !FP32) {
                    sum_mixture_16<CAREFUL, SIDES>(b_p, b_q, left, first, row, all, t, sum);
                    continue;
                }
                if (for_p)
                    sum_side_of<CAREFUL, SIDE_P>(even_p, b_p, b_q, left, first, row, hand, sum);
                if (for_q)
                    sum_side_of<CAREFUL, SIDE_Q>(even_q, b_p, b_q, left, first, row, hand, sum);
            }
        };
        hand.slice.template middle_pass<!CAREFUL, UNROLL>(V, vector_sums, [&](uint32_t chunk) {
            sum.flush(total);
            if (FP32 && sum.heavy) {
                heavy_sides more = heavy_chunk<CAREFUL>(hand.slice, chunk, all, *hand.rule, hand.t);
                total[1] += for_p ? more.sum[SIDE_P] : 0.0;
                total[2] += for_q ? more.sum[SIDE_Q] : 0.0;
                sum.heavy = false;
            }
        });
        part row_sums = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
        if (SIDES && resident::group_thread() < 2) {
            numbers &to = hand.shared->numbers;
            int which = (int)resident::group_thread();
            double mean = which == SIDE_P ? row_sums.sum[1] : row_sums.sum[2];
            if constexpr (numbers::MIXED)
                to.count_from_mean(*hand.rule, which, mean);
            else
                to.side[which].count_from_mean(ANEW, mean);
            if (FLATTENS && which == 0)
                hand.shared->value = row_sums.sum[0];
        }
        resident::group_sync();
        return row_sums.sum[0] < 0.0 ? 0.0 : row_sums.sum[0]; /* NaN stays */
    }

    template <bool CAREFUL, int SIDE, class ROW, class LEFT>
    static __device__ __forceinline__ void
    write_side(char *grad, bool whole, const resident::slice &slice, uint32_t vector, LEFT left,
               const uint4 &raw_p, const uint4 &raw_q, const both_sides &row, const side_row &from,
               const temperature &t) {
        const ROW side = read_again<ROW>(from);
        float z_p[V], z_q[V], g[V];
        unpack<T>(raw_p, z_p);
        unpack<T>(raw_q, z_q);
        bool slopes = !KNOWN || side.of != 0.0f, cross = KNOWN && side.cross != 0.0f;
#pragma unroll
        for (int i = 0; i < V; i++)
            g[i] = 0.0f;
        if (slopes)
#pragma unroll
            for (int i = 0; i < V; i++) {
                float mass = mass_of<CAREFUL, SIDE>(SIDE == SIDE_P ? z_p[i] : z_q[i], row, t);
                float h = slope_of<CAREFUL, SIDE>(z_p[i], z_q[i], row, side, t);
                if (CAREFUL)
                    h = mass == 0.0f ? 0.0f : h;
                g[i] = mass * (h - side.sum);
            }
        if (KIND == KLD_RULE_MIXTURE && !FP32 && row.mix.k != 0.0f)
#pragma unroll
            for (int i = 0; i < V; i++) {
                float mass = mass_of<CAREFUL, SIDE>(SIDE == SIDE_P ? z_p[i] : z_q[i], row, t);
                float d = log_of<CAREFUL>(difference<CAREFUL>(z_p[i], z_q[i], row), row.shift, t);
                float more = mixture_16<true>(row.mix, CAREFUL && mass == 0.0f ? 0.0f : d).more;
                g[i] = fmaf(mass, mixture_gain_16<SIDE>(row.mix, more, side.cross), g[i]);
            }
        if (cross)
#pragma unroll
            for (int i = 0; i < V; i++)
                g[i] = fmaf(side.cross, more_of<CAREFUL>(z_p[i], z_q[i], row, t), g[i]);
#pragma unroll
        for (int i = 0; i < V; i++)
            g[i] *= row.factor;
        resident::put<T>(grad, whole, slice.count, slice.head, vector, left, g);
    }

    template <bool CAREFUL, int SIDE, class... MORE>
    static __device__ __forceinline__ void write_side_of(bool is_even, MORE &&...more) {
        if (is_even)
            write_side<CAREFUL, SIDE, typename even<CAREFUL>::row>(more...);
        else
            write_side<CAREFUL, SIDE, side_row>(more...);
    }

    template <bool CAREFUL> static __device__ __forceinline__ void write_pass(hand_type &hand) {
        const numbers &all = hand.shared->numbers;
        const both_sides row = all;
        const resident::slice slice = hand.slice.template evened<T>();
        bool even_p = even<CAREFUL>::is(all.side[SIDE_P]);
        bool even_q = even<CAREFUL>::is(all.side[SIDE_Q]);
        slice.template last_pass<!CAREFUL, UNROLL>(V, [&](uint32_t vector, auto left,
                                                          const uint4 &raw_p, const uint4 &raw_q) {
            if (hand.grad_p)
                write_side_of<CAREFUL, SIDE_P>(even_p, hand.grad_p, hand.whole_p, slice, vector,
                                               left, raw_p, raw_q, row, all.side[SIDE_P], hand.t);
            if (hand.grad_q)
                write_side_of<CAREFUL, SIDE_Q>(even_q, hand.grad_q, hand.whole_q, slice, vector,
                                               left, raw_p, raw_q, row, all.side[SIDE_Q], hand.t);
        });
    }

    /* TV of a row that was summed carefully: is a side's sum next to what h is where the mass is?
     * The exponential of a class with nearly all of it is not known well enough there for what is
     * left: counted from that h, the class adds nothing, and the others are all there is. */
    static __device__ __forceinline__ bool counts_anew(hand_type &hand) {
        bool anew = false;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const side_row &side = hand.shared->numbers.side[which];
            anew |= side.cross != 0.0f && fabsf(side.sum) < HEAVY;
        }
        return anew;
    }

    template <int SIDE> using flat_of = flat_side<general_body, SIDE>;

    template <bool CAREFUL> static __device__ __forceinline__ double passes(hand_type &hand) {
        bool gradient = hand.grad_p || hand.grad_q;
        double value = hand.shared->value;
        if (gradient) {
            double sum;
            do
                sum = sum_pass<CAREFUL, true>(hand);
            while (CAREFUL && ANEW && counts_anew(hand));
            if (!FLATTENS || !is_flat(*hand.rule, hand.shared->value))
                write_pass<CAREFUL>(hand);
            return KNOWN ? value : sum;
        }
        if constexpr (!KNOWN) /* code of its own has registers to spare */
            value = sum_pass<CAREFUL, CAREFUL>(hand);
        hand.slice.release();
        return value;
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
