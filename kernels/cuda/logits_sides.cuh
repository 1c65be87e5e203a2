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
    float of;         /* KL: of y, in d; TV in FP32: what is added to h */
    float cross;      /* of q - p; MIXTURE in 16 bits: of (q - p)/m where h is counted from; TV in
                         FP32: what was taken off h last */
    float sum;        /* of mass h; after the second exchange */

    /* That is `mean`. TV, anew: where it is next to what h is where the mass is, both are counted
     * from there, so that their difference is not rounded. */
    __device__ __forceinline__ void count_from_mean(bool anew, double mean) {
        sum = (float)mean;
        if (!anew)
            return;
        cross = (float)(rint(2.0 * mean) * 0.5);
        of -= cross;
        sum = (float)(mean - (double)cross);
    }
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

struct both_sides : difference_row {
    float factor; /* of gradients */
    mixture mix;

    __device__ __forceinline__ both_sides() {}
    __device__ __forceinline__ both_sides(const kld_rule &rule, const row_stats &stats,
                                          double gradient)
        : difference_row(stats, 1.0, true), factor((float)gradient), mix(rule) {}
};

template <int KIND, bool FP32> struct general_row : both_sides {
    static constexpr bool MIXED = KIND == KLD_RULE_MIXTURE && FP32;
    typedef typename std::conditional<MIXED, side_mixture, side_plain>::type side_row;
    side_row side[2];
    double y0[MIXED ? 2 : 1];

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
        if (KIND == KLD_RULE_TV)
            p.of = q.of = -0.5f;
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
            mixture_origin from_p(args.rule, false, fmax(stats.forward, 0.0));
            mixture_origin from_q(args.rule, true, fmax(stats.reverse, 0.0));
            mix.pivot[SIDE_P] = (float)from_p.value;
            mix.pivot[SIDE_Q] = (float)from_q.value;
            if constexpr (MIXED) {
                count_from(SIDE_P, from_p, stats.shift);
                count_from(SIDE_Q, from_q, stats.shift);
            } else {
                p.cross = (float)from_p.cross;
                q.cross = (float)from_q.cross;
            }
        }
    }
    /* all: the shift of d itself. */
    __device__ __forceinline__ void count_from(int which, const mixture_origin &at, double all) {
        side[which].mix = mixture_side(at);
        side[which].shift = two_floats(which == SIDE_P ? all + at.y0 : all - at.y0);
        y0[which] = at.y0;
    }
    /* One thread: the mean of mass h is known, and h is counted from where it has that. */
    __device__ void count_from_mean(const kld_rule &rule, int which, double mean) {
        mixture_origin at(rule, which == SIDE_Q, y0[which]);
        mixture_origin better(rule, which == SIDE_Q, at.place(mean));
        double all = (double)shift.high + (double)shift.low;
        count_from(which, better, all);
        side[which].sum = (float)(mean - at.slope(at.y0 - better.y0));
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
