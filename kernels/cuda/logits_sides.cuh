/* logits_sides.cuh - rows of logits: what a row's passes need to know of it where every gradient
 * may be wanted, for either side, and from where its h is counted (logits_general.cuh says what h
 * is). */
#ifndef KLD_KERNELS_CUDA_LOGITS_SIDES_CUH
#define KLD_KERNELS_CUDA_LOGITS_SIDES_CUH

#include "kernels/cuda/logits_difference.cuh"
#include "kernels/cuda/logits_mixture.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

enum side_name { SIDE_P, SIDE_Q };

/* What one side needs for its gradient. */
struct side_plain {
    two_floats shift; /* of d less its mean over this side; cross entropy: of ln q less that */
    float of;         /* KL: of y, in d; mixtures in FP32: of the gradient */
    float cross;      /* of q - p */
    float sum;        /* of mass h; after the second exchange */
};
struct side_mixture : side_plain {
    mixture_side mix;
};
/* What js reads of the latter. */
struct side_even : side_plain {
    mixture_even mix;
};

/* Read again for every vector: registers are scarcer than loads. */
template <class SIDE> static __device__ __forceinline__ SIDE read_again(const side_plain &from) {
    constexpr int COUNT = sizeof(SIDE) / 4;
    union both {
        float word[COUNT];
        SIDE row;
        __device__ __forceinline__ both() {}
    } to;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        to.word[i] = load_shared_float(shared_at((const float *)&from + i));
    return to.row;
}

/* What a few classes' products of a mass and its h have added up to at most, and at least, less
 * its sign; 0 if they never had that sign. */
struct extremes {
    float above = 0, below = 0;

    __device__ __forceinline__ extremes() {}
    __device__ __forceinline__ extremes(const part &row, int side)
        : above(row.top[side]), below(__int_as_float(row.mark[side])) {}
    __device__ __forceinline__ void see(float few) {
        above = fmaxf(above, few);
        below = fmaxf(below, -few);
    }
};

struct both_sides : difference_row {
    float factor; /* of gradients */
    mixture mix;

    __device__ __forceinline__ both_sides() {}
    __device__ __forceinline__ both_sides(const kld_rule &rule, const row_stats &stats,
                                          double gradient)
        : difference_row(stats, 1.0), factor((float)gradient), mix(rule) {}
};

/* What FP32 mixtures need besides; all but y0 for gradients only. */
struct fp32_mixture {
    double y0[2];      /* where the sides' h is counted from */
    double gradient;   /* the factor */
    float away;        /* how far y is from its mean, or 1 if that is less */
    uint8_t little[2]; /* what FP32 leaves of the mean of h shows in the gradients */
};
struct no_fp32_mixture {
    double none;
};

template <int KIND, bool FP32> struct general_row : both_sides {
    static constexpr float LITTLE = 0.25f;     /* see judge() */
    static constexpr double NORMAL = 1.0 / 64; /* see near_mean() */
    static constexpr bool MIXED = KIND == KLD_RULE_MIXTURE && FP32;
    typedef typename std::conditional<MIXED, side_mixture, side_plain>::type side_row;
    side_row side[2];
    typename std::conditional<MIXED, fp32_mixture, no_fp32_mixture>::type wide;

    __device__ __forceinline__ general_row() {}
    __device__ __forceinline__ general_row(const kld_cuda_args &args, const row_stats &stats,
                                           double gradient)
        : both_sides(args.rule, stats, gradient) {
        side_row &p = side[SIDE_P], &q = side[SIDE_Q];
        p.shift = two_floats(stats.shift + stats.forward);
        q.shift = two_floats(stats.shift - stats.reverse);
        p.of = (float)args.rule.of_p;
        q.of = (float)-args.rule.of_q;
        p.cross = q.cross = p.sum = q.sum = 0;
        if (KIND == KLD_RULE_KL) {
            p.cross = q.of;
            q.cross = p.of;
        }
        if (KIND == KLD_RULE_CROSS_ENTROPY) {
            /* ln q = zq / T - lse; h_p = -ln q is counted from the entropy */
            double lse = (double)stats.c_q * LN_2 - log(stats.inverse_q);
            p.shift = two_floats(lse - stats.entropy);
            p.of = -1.0f;
            q.of = 0.0f;
            q.cross = 1.0f;
        }
        if (KIND == KLD_RULE_MIXTURE) {
            double at_p = fmax(stats.forward, 0.0), at_q = fmax(stats.reverse, 0.0);
            if constexpr (MIXED)
                if (args.grad_p.at || args.grad_q.at) {
                    const double apart = stats.forward + stats.reverse;
                    wide.gradient = gradient;
                    wide.away = sqrtf(fminf(fmaxf((float)apart, 0.0f), 1.0f));
                    if (apart > NORMAL) {
                        at_p = near_mean(args.rule, false, stats.forward, stats.reverse);
                        at_q = near_mean(args.rule, true, stats.reverse, stats.forward);
                    }
                }
            mixture_origin from_p(args.rule, false, at_p), from_q(args.rule, true, at_q);
            mix.pivot[SIDE_P] = (float)from_p.value;
            mix.pivot[SIDE_Q] = (float)from_q.value;
            if constexpr (MIXED) {
                count_from(SIDE_P, from_p, stats.shift);
                count_from(SIDE_Q, from_q, stats.shift);
            }
        }
    }
    /* Where h may have its mean, of a side with this mean of y, as if y were distributed normally:
     * by three of its values, and a straight line through two. The variance of such a y is what
     * the means of both sides add up to. Where that says that it is far, it is not known. */
    static __device__ __noinline__ double near_mean(const kld_rule &rule, bool of_q, double mean,
                                                    double other) {
        const float y = fmaxf((float)mean, 0.0f);
        const float away = sqrtf(3.0f * (y + fmaxf((float)other, 0.0f)));
        const float near = mixture_height(rule, of_q, y);
        const float above = mixture_height(rule, of_q, y + away) - near;
        const float below = mixture_height(rule, of_q, y - away) - near;
        const float by = away * (1.0f / 3) * (above + below) / (above - below);
        return (double)(fabsf(by) <= 1.0f ? y + by : y);
    }
    /* all: the shift of d itself. */
    __device__ __forceinline__ void count_from(int which, const mixture_origin &at, double all) {
        side[which].mix = mixture_side(at);
        side[which].shift = two_floats(which == SIDE_P ? all + at.y0 : all - at.y0);
        wide.y0[which] = at.y0;
    }
    /* One thread: what FP32 rounds off the means, and off the ratio of the sums, is some 1e-8 of
     * what h varies by, and shows where no gradient is large beside that of the heaviest class,
     * whose mass is `top`; of a class that is all there is both go by the little that it is not.
     * What has been seen is not counted from the mean yet: where the mean is positive, what was
     * below 0 is farther below the mean, and what was above is above it but for a mass of it. */
    __device__ void judge(int which, bool wanted, float mean, const extremes &seen, float top) {
        const mixture_side &mix = side[which].mix;
        const float slope = mix.kind == MIXTURE_OTHER  ? mix.gain
                            : mix.kind == MIXTURE_BOTH ? mix.of * mix.weight
                                                       : mix.of * mix.weight * mix.weight;
        const float rest = fmaxf(1.0f - top, 0.0f);
        const float other = mean > 0.0f ? seen.below : seen.above;
        const float same = (mean > 0.0f ? seen.above : seen.below) - top * fabsf(mean);
        const bool large = fmaxf(other, same) >= LITTLE * top * rest * fabsf(slope) * wide.away;
        wide.little[which] = wanted && !large;
    }
    /* The whole group. */
    __device__ __forceinline__ bool is_little() const { return wide.little[0] || wide.little[1]; }
    /* One thread: the sums of the exponentials are better known. */
    __device__ void count_by(double sum_p, double sum_q) {
        factor_p = two_floats(1.0 / sum_p);
        factor_q = two_floats(1.0 / sum_q);
        shift = two_floats(((double)c_p - (double)c_q) * LN_2 + log(sum_p / sum_q));
    }
    /* One thread: the mean of mass h is known, and h is counted from where it has that, and in
     * units of the number before it, unless that is next to nothing: a product less to round. */
    __device__ void count_from_mean(const kld_rule &rule, int which, double mean) {
        mixture_origin at(rule, which == SIDE_Q, wide.y0[which]);
        mixture_origin better(rule, which == SIDE_Q, at.place(mean));
        double all = (double)shift.high + (double)shift.low;
        count_from(which, better, all);
        const bool by_gain = better.kind == MIXTURE_OTHER;
        double unit = by_gain ? better.gain : better.of;
        if (fabs(unit) > 1e-6)
            (by_gain ? side[which].mix.gain : side[which].mix.of) = 1.0f;
        else
            unit = 1.0;
        side[which].sum = (float)((mean - at.slope(at.y0 - better.y0)) / unit);
        side[which].of = (float)(unit * wide.gradient);
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
