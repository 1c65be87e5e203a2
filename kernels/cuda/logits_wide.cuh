/* logits_wide.cuh - a pair of FP32 logits of a row whose sums are known, in FP64: js and the skewed
 * KL, their value and the gradient by p's logits, which is p (h - mean of h over p). (Of which q's
 * is wanted, the sides have changed places.) What kept_wide.cuh makes of a row, and the numbers
 * that a row has for it.
 *
 * h is a logarithm and what matters of it is how it differs from its mean, which FP32 does not
 * hold. All of a pair goes by d = ln p - ln q: with e^-|d|, to 3e-16, m is a part of the larger
 * mass, and one logarithm gives both. That is exact enough for close rows as well. */
#ifndef KLD_KERNELS_CUDA_LOGITS_WIDE_CUH
#define KLD_KERNELS_CUDA_LOGITS_WIDE_CUH

#include "kernels/cuda/logits_centred.cuh"
#include "kernels/cuda/wide_math.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What h has of q/m, of a rule; and where it adds (q - p) to a class's value, so that that has its
 * own size. 0 of js. */
static __device__ __forceinline__ double cross_of(const kld_rule &rule) {
    return __dmul_rn(rule.of_p, rule.rest) - __dmul_rn(rule.of_q, rule.share);
}

/* A row of js of which only the value is wanted, and that is not small, by the hardware's
 * exponentials and logarithms as in logits_shannon.cuh: q/p is 2^((zq - zp) s + between), and p
 * 2^(zp s + c_p), but for what these two are rounded by, in powers of 2, which the sums are put
 * right by. Classes that have much of the mass are not for this. */
struct quick_row {
    /* Below it a value is off by too much of itself, where most classes have one q/p. */
    static constexpr double VALUE_LEAST = 1.0 / 32;
    float c_p, between, share, other; /* other: the share of q, with what between lacks */
    float heavy_p, heavy_q;           /* logits above have much of the mass */
    double lost_p, lost;

    __device__ __forceinline__ quick_row() {}
    __device__ __forceinline__ quick_row(const kld_cuda_args &args, const row_stats &stats) {
        typedef logits_stats::reference reference;
        const double exact_p = -(double)stats.c_p - stats.log_p * LOG2_E;
        const double exact = -(double)stats.c_q - stats.log_q * LOG2_E - exact_p;
        const float scale = (float)(args.inverse_temperature * LOG2_E);
        heavy_p = reference::limit_at<float>(stats.powers[0], scale);
        heavy_q = reference::limit_at<float>(stats.powers[1], scale);
        c_p = (float)exact_p;
        between = (float)exact;
        lost_p = (double)c_p - exact_p;
        lost = (double)between - exact;
        share = (float)args.rule.share;
        other = (float)(args.rule.rest * wide_exp2(-lost));
    }
    __device__ __forceinline__ double value(const kld_rule &rule, double p, double q,
                                            double mass_q) const {
        const double by_p = wide_exp2(-lost_p), by_q = wide_exp2(-lost_p - lost);
        return LN_2 * (rule.of_p * by_p * p + rule.of_q * by_q * fma(-lost, mass_q, q));
    }
};

/* What it sums: p log2(p/m), q log2(q/m), q. */
struct quick_sums {
    float p = 0, q = 0, mass_q = 0;

    /* most: the largest power of q/p so far: above POWER_MOST q is not to be made of p. */
    static constexpr float POWER_MOST = 24.0f;
    __device__ __forceinline__ void add(float z_p, float z_q, const quick_row &row,
                                        const temperature &t, float &most) {
        z_p = fmaxf(z_p, -3.4e38f); /* no mass, but a number */
        const float u = z_q - z_p;
        const float power =
            fmaxf(fmaf(u, t.scale.low, fmaf(u, t.scale.high, row.between)), -126.0f);
        const float over = exp2_fast(power);
        const float x_m = log2_fast(fmaf(over, row.other, row.share)); /* m/p */
        const float mass = exp2_fast(fmaf(z_p, t.scale.low, fmaf(z_p, t.scale.high, row.c_p)));
        const float its_q = __fmul_rn(mass, over);
        most = fmaxf(most, power);
        p = fmaf(mass, -x_m, p);
        q = fmaf(its_q, power - x_m, q);
        mass_q += its_q;
    }
};

/* Masses are 2^(z s - c) inverse, d is (zp - zq) / T - shift. */
struct wide_row {
    float c_p, c_q;
    two_floats inverse_p, inverse_q; /* to the last bit: p may come from either */
    float factor;                    /* of the gradient */
    double shift;
    /* h is counted from there: near its mean. */
    double origin, mean;
    /* What kept_wide.cuh keeps of h, less origin, is rounded by 6e-8 of itself. center: the mean,
     * likewise. A class as near to it, of more than the least mass, is to be put right: where none
     * may be, `mends` is false. */
    float center, near, least;
    bool mends, is_quick;
    quick_row quick;

    __device__ __forceinline__ wide_row() {}
    __device__ __forceinline__ wide_row(const kld_cuda_args &args, const row_stats &stats,
                                        double factor)
        : c_p((float)stats.c_p), c_q((float)stats.c_q), inverse_p(stats.inverse_p),
          inverse_q(stats.inverse_q), factor((float)factor), shift(stats.shift) {
        is_quick = false;
        if (args.grad_p.dtype)
            count_near_mean(args.rule, stats);
        else
            find_quick(args, stats);
    }
    /* Where only the value is wanted. */
    __device__ __forceinline__ void find_quick(const kld_cuda_args &args, const row_stats &stats) {
        const bool is_close =
            !(args.rule.share * args.rule.rest * stats.forward >= quick_row::VALUE_LEAST);
        /* A constant between the sides has their difference rounded. */
        const bool is_apart = !(fabsf(c_p - c_q) < 128.0f);
        is_quick = cross_of(args.rule) == 0.0 && !stats.is_careful && !is_close && !is_apart;
        if (is_quick)
            quick = quick_row(args, stats);
    }
    /* Where the gradient is. */
    __device__ __forceinline__ void count_near_mean(const kld_rule &rule, const row_stats &stats) {
        /* As if d were distributed normally, by three of its values. */
        const float d = (float)stats.forward, away = sqrtf(3.0f * fmaxf((float)stats.variance, 0));
        const float near = height_near(rule, d);
        const float far = height_near(rule, d + away) + height_near(rule, d - away);
        const float at = fmaf(2.0f / 3, near, 1.0f / 6 * far);
        origin = fabsf(at) < 1e30f ? (double)at : 0.0;
    }
    /* h, nearly. */
    static __device__ __forceinline__ float height_near(const kld_rule &rule, float d) {
        const float ratio = exp2_fast(fminf(fmaxf(d, -80.0f), 80.0f) * (float)-LOG2_E);
        const float m = fmaf((float)rule.rest, ratio, (float)rule.share);
        const float log_m = log2_fast(m) * (float)LN_2;
        return fmaf((float)cross_of(rule), ratio * reciprocal(m), -(float)rule.of_p * log_m);
    }
    /* One thread, with sums over all classes: mass (h - origin), mass; and the largest size of the
     * first. top: the largest logit of p. What h is rounded by shows where it is more than some
     * 2e-8 of the row's largest gradient, which is not below `low`. */
    __device__ void centre(double sum, double mass, float largest, float top,
                           const temperature &t) {
        const double less = sum / mass;
        factor = (float)((double)factor / mass); /* the masses' sum is better known than before */
        mean = origin + less;
        center = (float)less;
        near = fabsf(center);
        const float off = mass_fp32(top, c_p, inverse_p.high, 0.0f, t) * near, low = largest - off;
        mends = !(off <= 0.25f * largest);
        least = low > 0.0f ? 0.33f * low / near : 0.0f;
        near *= 2.0f;
    }
};

/* What there is to a pair. EVEN: m is half of each, and they count alike. */
template <bool EVEN> struct wide_pair {
    float mass;   /* of the side that has more */
    bool more_p;  /* which is p */
    double ratio; /* of the other to it */
    double value; /* for each unit of that mass */
    double h;     /* of p */

    __device__ __forceinline__ wide_pair(float z_p, float z_q, const wide_row &row,
                                         const kld_cuda_args &args, const temperature &t) {
        const kld_rule &rule = args.rule;
        z_p = fmaxf(z_p, -3.4e38f); /* the difference is to be a number */
        z_q = fmaxf(z_q, -3.4e38f);
        const double d = fma((double)z_p - (double)z_q, args.inverse_temperature, -row.shift);
        const double size = fmin(fabs(d), 690.0);
        more_p = d >= 0.0;
        mass = mass_fp32(more_p ? z_p : z_q, more_p ? row.c_p : row.c_q,
                         more_p ? row.inverse_p.high : row.inverse_q.high,
                         more_p ? row.inverse_p.low : row.inverse_q.low, t);
        ratio = wide_power_finely(size, -LOG2_E);
        if constexpr (EVEN) {
            const double m = fma(0.5, ratio, 0.5), log_large = -wide_ln(m, m - 1.0);
            const double log_small = log_large - size;
            value = __dmul_rn(rule.of_p, fma(log_small, ratio, log_large));
            h = __dmul_rn(rule.of_p, more_p ? log_large : log_small);
        } else {
            const double own = more_p ? rule.share : rule.rest;
            const double other = more_p ? rule.rest : rule.share;
            const double m = fma(other, ratio, own);
            const double log_large = -wide_ln(m, m - 1.0), log_small = log_large - size;
            const double cross = cross_of(rule);
            const double of_large = more_p ? rule.of_p : rule.of_q;
            const double of_small = more_p ? rule.of_q : rule.of_p;
            value = fma(__dmul_rn(of_small, ratio), log_small, __dmul_rn(of_large, log_large));
            h = __dmul_rn(rule.of_p, more_p ? log_large : log_small);
            if (cross != 0.0) {
                value = fma(more_p ? cross : -cross, ratio - 1.0, value);
                h = fma(cross, __dmul_rn(more_p ? ratio : 1.0, wide_inverse(m)), h);
            }
        }
    }
    __device__ __forceinline__ float mass_p() const {
        float small = __fmul_rn(mass, (float)ratio);
        return more_p ? mass : small;
    }
};

/* A vector of the gradient, of what has been kept of it in place of the logits: p and h. */
struct wide_pairs {
    typedef float T;
    static constexpr uint32_t V = packet<T>::V;
    const float center, factor;

    __device__ __forceinline__ wide_pairs(const wide_row &row, const temperature &, const void *)
        : center(row.center), factor(row.factor) {}
    __device__ __forceinline__ uint4 of(const uint4 &masses, const uint4 &heights) const {
        alignas(16) float y[V];
        float mass[V], h[V];
        unpack<T>(masses, mass);
        unpack<T>(heights, h);
#pragma unroll
        for (uint32_t i = 0; i < V; i++)
            y[i] = __fmul_rn(__fmul_rn(mass[i], h[i] - center), factor);
        return *(uint4 *)y;
    }
};

/* WRITES: with the gradient. Without, sums need not be as good. */
template <bool EVEN, bool WRITES> struct wide_body : usual_body {
    typedef float T;
    typedef float type;
    static constexpr bool KNOWN = false;
    static constexpr int EXTRA = WRITES ? logits_stats::SQUARES : logits_stats::ROUGH;
    static constexpr bool CENTRES = true, OF_P = true, LOOKS_AGAIN = true;
    typedef nothing_aside aside;
    typedef wide_row numbers;
    typedef wide_pair<EVEN> pair;
    template <bool> using pairs = wide_pairs;

    static __device__ __forceinline__ double value(const kld_cuda_args &, const row_stats &) {
        return 0.0;
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
