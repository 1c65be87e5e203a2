/* logits_mixture.cuh - the arithmetic of m = share p + rest q for one class, of
 * d = ln p - ln q alone: the logarithms ln(p/m) and ln(q/m), and what a gradient takes of them.
 *
 * A gradient is mass (h - its mean), and where all the mass is near one d what FP32 leaves of that
 * difference is not enough. So h is counted from its value at some y0 of y = ln own - ln other:
 * first from the mean of y over the side, and once the mean of h is known from where h has it. With
 * a and b the shares of own and other, t = e^-y0, x = y0 - y and
 *     m = a + b t,  w = b t / m,  s = w (e^x - 1),  of and of' the numbers of own and other,
 * h less that at y0 is, without anything that cancels,
 *     js             -of ln(1 + s)
 *     of' = 0        -of (ln(1 + s) - (1 - w) s / (1 + s))
 *     of = 0         -gain (e^x - 1) / (1 + s),  gain = of' a^2 t / m^2.
 * 16 bits do without. */
#ifndef KLD_KERNELS_CUDA_LOGITS_MIXTURE_CUH
#define KLD_KERNELS_CUDA_LOGITS_MIXTURE_CUH

#include "kernels/cuda/logits_math.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* The numbers of MIXTURE. */
struct mixture {
    float of_p, of_q, share, rest, k;
    float series[5]; /* 16 bits: of d^2 to d^6 in -ln(share + rest e^-d) */
    float pivot[2];  /* 16 bits: h of p and of q where they are counted from, of ln(own/m) */

    __device__ __forceinline__ mixture() {}
    __device__ __forceinline__ explicit mixture(const kld_rule &rule)
        : of_p((float)rule.of_p), of_q((float)rule.of_q), share((float)rule.share),
          rest((float)rule.rest), k((float)(rule.of_p * rule.rest - rule.of_q * rule.share)) {
        /* The cumulants of a number that is 1 with probability rest, else 0. */
        double r = rule.rest, v = rule.share * r, odd = rule.share - r;
        series[0] = (float)(-v / 2);
        series[1] = (float)(v * odd / 6);
        series[2] = (float)(-v * (1 - 6 * v) / 24);
        series[3] = (float)(v * odd * (1 - 12 * v) / 120);
        series[4] = (float)(-v * (1 - 30 * v + 120 * v * v) / 720);
    }
};

/* Whose logarithm the rule has: both (js), own or other's. */
enum mixture_kind { MIXTURE_BOTH, MIXTURE_OWN, MIXTURE_OTHER };

/* What a row's side is counted from. */
struct mixture_origin {
    enum mixture_kind kind;
    double of, y0, weight, lack, gain; /* lack: 1 - w */
    double value, cross;               /* of h, counted from nothing: ln(own/m), (q - p)/m */

    __device__ __forceinline__ mixture_origin() {}
    __device__ __forceinline__ mixture_origin(const kld_rule &rule, bool of_q, double at) {
        double own = of_q ? rule.of_q : rule.of_p, other = of_q ? rule.of_p : rule.of_q;
        double share = of_q ? rule.rest : rule.share, rest = of_q ? rule.share : rule.rest;
        kind = own == 0.0 ? MIXTURE_OTHER : other == 0.0 ? MIXTURE_OWN : MIXTURE_BOTH;
        of = own;
        y0 = fmin(fmax(at, -60.0), 60.0);
        double t = wide_exp2(-y0 * LOG2_E), m = fma(rest, t, share);
        double inverse = wide_reciprocal(m);
        weight = rest * t * inverse;
        lack = share * inverse;
        gain = other * t * lack * lack;
        double k = share * (own * rest - other * share);
        value = -own * wide_log(m, m - 1.0);
        cross = k * (t - 1.0) * inverse;
    }
    /* h of x. */
    __device__ __forceinline__ double slope(double x) const {
        double beyond = fmax(x - 80.0, 0.0), at = fmin(x, 80.0);
        double less = wide_one_minus_exp(fabs(at)), power = wide_exp2(at * LOG2_E);
        double e = at < 0.0 ? -less : power * less, s = weight * e;
        double mean = s < -0.5 ? fma(weight, power, lack) : 1.0 + s;
        double inverse = wide_reciprocal(mean);
        if (kind == MIXTURE_OTHER)
            return -gain * e * inverse;
        double h = wide_log(mean, s) + beyond;
        return -of * (kind == MIXTURE_BOTH ? h : h - lack * s * inverse);
    }
    /* Where h is `mean`: its y. */
    __device__ double place(double mean) const {
        double e;
        if (kind == MIXTURE_OTHER) {
            e = -mean / (gain + mean * weight);
        } else if (kind == MIXTURE_BOTH) {
            e = expm1(-mean / of) / weight;
        } else { /* rising from s = -w, where it is flat; Newton's steps */
            double want = -mean / of, w = weight;
            double s = fabs(want) < 0.5 ? sqrt(fmax(w * w + 2.0 * want, 0.0)) - w : exp(want);
            for (int i = 0; i < 8; i++) {
                double off = log1p(s) - (1.0 - w) * s / (1.0 + s) - want;
                double step = off * (1.0 + s) * (1.0 + s) / (s + w);
                if (!(fabs(step) > 1e-13 * fabs(s)))
                    break;
                s = s - step > -w ? s - step : (s - w) / 2.0;
            }
            e = s / w;
        }
        double y = y0 - log1p(fmax(e, -1.0));
        return y == y ? y : y0;
    }
};

/* The same in FP32, and what is read of it for every class; first what js reads whose x is not
 * wide. */
struct mixture_even {
    float of, weight, lack;
};
struct mixture_side : mixture_even {
    float gain;  /* MIXTURE_OTHER; MIXTURE_OWN: w / (1 - w) */
    float limit; /* MIXTURE_OWN: h / of of x = -inf */
    uint32_t kind;
    uint32_t wide; /* x is wanted in two floats: e^x is large, and decides beside 1 - w */

    __device__ __forceinline__ mixture_side() {}
    __device__ __forceinline__ explicit mixture_side(const mixture_origin &at) {
        of = (float)at.of;
        weight = (float)at.weight;
        lack = (float)at.lack;
        gain = (float)(at.kind == MIXTURE_OWN ? at.weight / at.lack : at.gain);
        limit = (float)-(log(at.lack) + at.weight);
        kind = at.kind;
        wide = fabs(at.y0) > 2.0;
    }
    __device__ __forceinline__ bool even() const { return kind == MIXTURE_BOTH && !wide; }
};

/* h of x in FP32. Nothing branches: classes are computed side by side. */
static __device__ __forceinline__ float mixture_slope_fp32(const mixture_even &side, float x,
                                                           float) {
    const float most = 80.0f;
    power_less e(fminf(fmaxf(x, -most), most), 0.0f);
    mean_of_power m(side.weight, side.lack, e);
    return __fmul_rn(-side.of, __fadd_rn(m.log(), fmaxf(x - most, 0.0f)));
}

/* Of any kind; low is what x was rounded by. */
static __device__ __forceinline__ float mixture_slope_fp32(const mixture_side &side, float x_,
                                                           float low) {
    const float most = 80.0f;
    float x = fminf(fmaxf(x_, -most), most), beyond = fmaxf(x_ - most, 0.0f);
    power_less e(x, low);
    mean_of_power m(side.weight, side.lack, e);
    if (side.kind == MIXTURE_OTHER)
        return __fmul_rn(__fmul_rn(-side.gain, e.less), reciprocal(m.mean));
    if (side.kind == MIXTURE_BOTH)
        return __fmul_rn(-side.of, __fadd_rn(m.log(), beyond));
    /* With r = w e^x / (1 - w) the same is limit - (ln(1 + r) - r / (1 + r)): there x is low. */
    bool under = m.s < -0.25f && side.lack > 0.25f, rounded = m.s < -0.25f && !under;
    float s = under ? __fmul_rn(side.gain, e.power) : m.s;
    log_parts parts(s, rounded ? m.mean : __fadd_rn(s, 1.0f), rounded);
    float inverse = reciprocal(__fadd_rn(parts.f, 1.0f));
    float share = __fmul_rn(__fmul_rn(s, parts.scale), inverse); /* s / (1 + s) */
    float less = __fadd_rn(parts.log_less(inverse), beyond);
    float h = under     ? __fadd_rn(less, -side.limit)
              : rounded ? fmaf(-share, side.lack, parts.log())
                        : fmaf(share, side.weight, less);
    return __fmul_rn(-side.of, h);
}

/* ln(p/m), ln(q/m) of d in FP32, to a few units in the last place. */
static __device__ __forceinline__ mixture_terms<float> mixture_fp32(const mixture &at, float d) {
    /* Of the larger side; m is its mass times own + other e^-|d|. */
    float far = fminf(fabsf(d), 1e30f);
    bool less = d < 0.0f;
    mean_of_power m(less ? at.share : at.rest, less ? at.rest : at.share,
                    power_less(fmaxf(-far, -80.0f), 0.0f));
    float log_large = -m.log(), log_small = log_large - far;
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
