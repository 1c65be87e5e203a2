/* logits_mixture.cuh - the arithmetic of m = share p + (1 - share) q for one class, of
 * d = ln p - ln q alone: the logarithms ln(p/m) and ln(q/m), and what a gradient takes of them.
 *
 * A gradient is mass (h - its mean), and where all the mass is near one d what FP32 leaves of that
 * difference is not enough. So h is counted from its value at y0, the mean of y = ln own - ln other
 * over the side (never negative; beyond 60 all is as at 60): with a and b the shares of own and
 * other, x = y0 - y, ln(own/m) - the same at y0 = -ln(1 + w (e^x - 1)),  w = b e^-y0 / (a + b
 * e^-y0) (own - other)/m - the same at y0 = -g (e^x - 1) / (1 + w (e^x - 1)), g = e^-y0 / (a + b
 * e^-y0)^2 where nothing cancels. 16 bits do without. */
#ifndef KLD_KERNELS_CUDA_LOGITS_MIXTURE_CUH
#define KLD_KERNELS_CUDA_LOGITS_MIXTURE_CUH

#include "kernels/cuda/logits_math.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* The numbers of MIXTURE. */
struct mixture {
    float of_p, of_q, share, rest, k;
    float series[5]; /* 16 bits: of d^2 to d^6 in -ln(share + rest e^-d) */
    float pivot[2];  /* 16 bits: h of p and of q where they are counted from */

    __device__ __forceinline__ mixture() {}
    __device__ __forceinline__ explicit mixture(const kld_rule &rule)
        : of_p((float)rule.of_p), of_q((float)rule.of_q), share((float)rule.share),
          rest((float)(1.0 - rule.share)),
          k((float)(rule.of_p * (1.0 - rule.share) - rule.of_q * rule.share)) {
        /* The cumulants of a number that is 1 with probability rest, else 0. */
        double r = 1.0 - rule.share, v = rule.share * r, odd = rule.share - r;
        series[0] = (float)(-v / 2);
        series[1] = (float)(v * odd / 6);
        series[2] = (float)(-v * (1 - 6 * v) / 24);
        series[3] = (float)(v * odd * (1 - 12 * v) / 120);
        series[4] = (float)(-v * (1 - 30 * v + 120 * v * v) / 720);
    }
};

/* Of one side, to give h. */
struct mixture_side {
    float of;     /* of ln(own/m) */
    float weight; /* w */
    float lack;   /* 1 - w */
    float gain;   /* of (e^x - 1) / (1 + w (e^x - 1)), 0 in js */

    __device__ __forceinline__ mixture_side() {}
    static __device__ __forceinline__ double origin(double mean) {
        return fmin(fmax(mean, 0.0), 60.0);
    }
    /* own's number and share, y0 */
    __device__ __forceinline__ mixture_side(double of_own, double of_other, double share, double y0,
                                            float &ret_pivot) {
        double x = wide_exp2(-y0 * LOG2_E);
        double m = fma(1.0 - share, x, share), inverse = wide_reciprocal(m);
        double k = share * (of_other * share - of_own * (1.0 - share));
        of = (float)of_own;
        weight = (float)((1.0 - share) * x * inverse);
        lack = (float)(share * inverse);
        gain = (float)(k * x * inverse * inverse);
        ret_pivot = (float)(k * (1.0 - x) * inverse - of_own * wide_log(m, m - 1.0));
    }
};

/* h less its pivot, of x; FP32. */
static __device__ __forceinline__ float mixture_slope_fp32(const mixture_side &side, float x) {
    const float most = 80.0f;
    log_mean m(side.weight, side.lack, fminf(x, most));
    float h = __fmul_rn(-side.of, __fadd_rn(m.log, fmaxf(x - most, 0.0f)));
    if (side.gain != 0.0f)
        h = fmaf(__fmul_rn(-side.gain, m.less), reciprocal(m.mean), h);
    return h;
}

/* ln(p/m), ln(q/m) of d in FP32, to a few units in the last place. */
static __device__ __forceinline__ mixture_terms<float> mixture_fp32(const mixture &at, float d) {
    /* Of the larger side; m is its mass times own + other e^-|d|. */
    float far = fminf(fabsf(d), 1e30f);
    bool less = d < 0.0f;
    log_mean m(less ? at.share : at.rest, less ? at.rest : at.share, -far);
    float log_large = -m.log, log_small = log_large - far;
    mixture_terms<float> r;
    r.log_p = d < 0.0f ? log_small : log_large;
    r.log_q = d < 0.0f ? log_large : log_small;
    r.more = 0.0f;
    return r;
}

/* ln(p/m), ln(q/m) and, with MORE, (q - p)/m of d, to what 16 bits need. */
template <bool MORE>
static __device__ __forceinline__ mixture_terms<float> mixture_16(const mixture &at, float d) {
    float far = fminf(fabsf(d), 1e30f), e = exp2_fast(far * -1.44269504f);
    bool less = d < 0.0f;
    float m = fmaf(less ? at.share : at.rest, e, less ? at.rest : at.share); /* over the larger */
    float log_large = -0.693147181f * log2_fast(m), log_small = log_large - far;
    /* -ln(share + rest e^-d) and the same less d, as series */
    bool near = far < 0.25f;
    float both = fmaf(d, at.series[4], at.series[3]);
    both = fmaf(d, both, at.series[2]);
    both = fmaf(d, both, at.series[1]);
    both = fmaf(d, both, at.series[0]);
    both = __fmul_rn(__fmul_rn(both, d), d);
    mixture_terms<float> r;
    r.log_p = near ? fmaf(at.rest, d, both) : less ? log_small : log_large;
    r.log_q = near ? fmaf(-at.share, d, both) : less ? log_large : log_small;
    r.more = 0.0f;
    if (MORE) {
        float lost = fmaf(far, fmaf(far, -1.0f / 24, 1.0f / 6), -0.5f);
        lost = near ? far * fmaf(far, lost, 1.0f) : 1.0f - e;
        lost = __fmul_rn(lost, reciprocal(m));
        r.more = less ? lost : -lost;
    }
    return r;
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
