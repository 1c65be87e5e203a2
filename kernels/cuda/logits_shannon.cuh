/* logits_shannon.cuh - rows of 16-bit logits: js, with the gradient by p's logits or none, of rows
 * that are kept (logits_kept.cuh), in a second look that sums and a third that writes. With
 * m = share p + rest q a class adds
 *     share p log2(p/m) + rest q log2(q/m)
 * to the value in powers of 2, and its gradient is p (log2(p/m) less its mean over p).
 *
 * All goes by q/p, a power of 2 of the difference of the logits, and log2(p/m) = -log2(share + rest
 * q/p): three special functions a pair in the second look and in the third. (m made of p and q
 * themselves would do with as many, but the hardware's logarithm of a number far from 1 is 1e-6 too
 * large.) The constants in the exponents are rounded; by how much is known, so that the sums are
 * put right afterwards. Classes that have much of the mass count one by one in FP64, as in the
 * first look. In the third log2(p/m) is good to 3e-7; of a class that has much of the mass and is
 * near the mean, which is all that there is then, it goes by the distance from the mean. Close
 * rows, and those with logits of -inf, go by the terms of logits_general.cuh. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHANNON_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHANNON_CUH

#include "kernels/cuda/logits_general.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What log2(p/m) less its mean must not be below, to be taken as it is: half a step of the type and
 * what it is off by. */
template <class T> static constexpr float NEAR_MEAN = 1.0f / 4096;
template <> constexpr float NEAR_MEAN<__half> = 1.0f / 512;
/* Of the row's largest mass: what is below it may be off by as much. */
static constexpr float NEAR_POWERS = 4.0f;

/* What is seldom looked at: where log2(p/m) has its mean, the distance x from there in ln(q/p), and
 * -part log2(1 + weight (e^x - 1)) of it. */
struct alignas(16) near_pairs {
    float shift_high, shift_low, inverse_high, inverse_low;
    float weight, part, limit, least;

    __device__ __forceinline__ near_pairs() {}
    template <class NUMBERS>
    __device__ __forceinline__ near_pairs(const NUMBERS &row, const temperature &t) {
        two_floats shift(row.near_shift);
        shift_high = shift.high;
        shift_low = shift.low;
        inverse_high = t.inverse.high;
        inverse_low = t.inverse.low;
        weight = row.near_weight;
        part = row.slope * (float)LOG2_E;
        limit = row.limit;
        least = row.least;
    }
    /* Factor of the mass. False: too far off for this. */
    __device__ __forceinline__ bool slope_of(float z_p, float z_q, float &ret) const {
        float u = z_q - z_p;
        float x = fmaf(u, inverse_high, -shift_high) + fmaf(u, inverse_low, -shift_low);
        float less =
            fabsf(x) < 1.0f ? fmaf(x * x, expm1_rest(x), x) : exp2_fast(x * 1.44269504f) - 1.0f;
        float r = weight * less;
        ret = part * fmaf(r * r, fmaf(r, 1.0f / 3, -0.5f), r);
        return fabsf(r) < 0.01f;
    }
};

template <class T_> struct shannon_row {
    typedef general_body<T_, KLD_RULE_MIXTURE> general;
    /* Of near_weight: what the mean is off by, 1e-6, is to be little beside it. Of the value: that
     * is off by 5e-8 where most classes have one and the same q/p. */
    static constexpr float WEIGHT_LEAST = 1.0f / 64, VALUE_LEAST = 1.0f / 32;

    /* p is 2^(zp s + c_p) and q/p 2^((zq - zp) s + between) but for lost_p and lost, in powers of
     * 2, by which c_p and between are rounded; other is the share of q in m, and has that in it. */
    float c_p, between, share, other;
    float heavy_p,
        heavy_q; /* logits above have so much of the mass that they count by themselves */
    double exact_p, exact_q, lost_p, lost; /* exact: before rounding */
    /* Of the gradient, which is 2^(zp s - c) (slope log2(m/p) + shift). */
    float c, slope, shift;
    float limit, least; /* of what is near the mean: above */
    double near_shift;
    float near_weight; /* of the other side in m, where log2(p/m) has its mean */
    row_stats stats;   /* as the first look has left them */
    double gradient;
    typename general::numbers careful;
    bool is_careful;
    bool is_flat; /* its gradient is logits_flat.cuh's; after the second look */

    /* Of close rows the value is share rest KL: will it be too small? */
    static __device__ __forceinline__ bool is_small(const kld_cuda_args &args,
                                                    const row_stats &stats) {
        return !(args.rule.share * args.rule.rest * stats.forward >= (double)VALUE_LEAST);
    }
    __device__ __forceinline__ shannon_row() {}
    __device__ __forceinline__ shannon_row(const kld_cuda_args &args, const row_stats &stats,
                                           double gradient)
        : stats(stats), gradient(gradient), is_careful(stats.is_careful || is_small(args, stats)),
          is_flat(false) {
        if (is_careful) {
            careful = typename general::numbers(args, stats, gradient);
            return;
        }
        exact_p = -(double)stats.c_p - stats.log_p * LOG2_E;
        exact_q = -(double)stats.c_q - stats.log_q * LOG2_E;
        typedef logits_stats::reference reference;
        const float scale = (float)(args.inverse_temperature * LOG2_E);
        heavy_p = reference::limit_at<T_>(stats.powers[0], scale);
        heavy_q = reference::limit_at<T_>(stats.powers[1], scale);
        c_p = (float)exact_p;
        between = (float)(exact_q - exact_p);
        lost_p = (double)c_p - exact_p;
        lost = (double)between - (exact_q - exact_p);
        share = (float)args.rule.share;
        other = (float)(args.rule.rest * wide_exp2(-lost));
    }
    /* One thread, with what the second look has summed; returns the value. top: the largest logit
     * of p. Where nearly all of p's mass is where q has next to none, log2(p/m) is nearly the same
     * number there, and what it differs by is all there is; and where the value is small it is made
     * of what cancels: such a row is to be summed once more, carefully. */
    __device__ double center(const kld_cuda_args &args, const double (&sum)[4], float top,
                             const temperature &t) {
        const kld_rule &rule = args.rule;
        if (is_careful) {
            careful.side[SIDE_P].sum = (float)sum[1];
            is_flat = logits_resident::is_flat(rule, sum[0]);
            return sum[0] < 0.0 ? 0.0 : sum[0]; /* NaN stays */
        }
        double mean_p = sum[0] * wide_exp2(-lost_p);
        double mean_q = sum[1] * wide_exp2(-lost_p - lost) - lost;
        double value = LN_2 * (rule.of_p * mean_p + rule.of_q * mean_q);
        split_factor all(stats.inverse_p * gradient * rule.of_p * LN_2);
        c = (float)(stats.c_p - all.power);
        slope = (float)-all.part;
        shift = (float)(-mean_p * all.part);
        limit = fabsf(slope) * NEAR_MEAN<T_>;
        least = exp2_fast(fmaf(top, t.scale.high, -c) - NEAR_POWERS);
        double m = exp2(-mean_p), of_other = m - rule.share;
        near_weight = (float)(of_other / m);
        near_shift = log(of_other / rule.rest) - stats.shift;
        is_careful = !(near_weight >= WEIGHT_LEAST && value >= VALUE_LEAST);
        if (is_careful)
            careful = typename general::numbers(args, stats, gradient);
        return value < 0.0 ? 0.0 : value;
    }
};

/* The sums of the second look, of one thread: p log2(p/m) and q log2(q/m). */
template <class T> struct shannon_look {
    static constexpr uint32_t V = packet<T>::V;
    /* Beyond it p may be 0 where q has mass. */
    static constexpr float POWER_MOST = 64.0f;
    const float scale, c_p, between, share, other;
    float p = 0, q = 0;

    __device__ __forceinline__ shannon_look(const shannon_row<T> &row, const temperature &t)
        : scale(t.scale.high), c_p(row.c_p), between(row.between), share(row.share),
          other(row.other) {}

    /* most: the largest power of q/p so far. */
    __device__ __forceinline__ void add_pair(float z_p, float z_q, float &most) {
        float power = fmaf(z_q - z_p, scale, between), over = exp2_fast(power);
        float x_m = log2_fast(fmaf(over, other, share)); /* m/p */
        float mass = exp2_fast(fmaf(z_p, scale, c_p));
        most = fmaxf(most, power);
        p = fmaf(mass, -x_m, p);
        q = fmaf(mass, over * (power - x_m), q);
    }
    /* A vector; false, and nothing is added, if there is a class for shannon_one_by_one(). */
    __device__ __forceinline__ bool add(const uint4 &raw_p, const uint4 &raw_q) {
        logits_stats::pair_of<T> z(raw_p, raw_q);
        const float before_p = p, before_q = q;
        float most = -CUDART_INF_F;
#pragma unroll
        for (uint32_t i = 0; i < V; i++)
            add_pair(z.p[i], z.q[i], most);
        if (!__any_sync(KLD_FULL_WARP, most > POWER_MOST))
            return true;
        p = before_p;
        q = before_q;
        return false;
    }
    __device__ __forceinline__ void flush(double (&total)[4]) {
        total[0] += (double)p;
        total[1] += (double)q;
        p = q = 0;
    }
};

struct shannon_sums {
    double sum[4];
};
/* The same of the first `left` classes of a vector, those above a limit one by one. */
template <class T>
static __device__ __noinline__ shannon_sums shannon_one_by_one(uint4 raw_p, uint4 raw_q,
                                                               uint32_t left,
                                                               const shannon_row<T> *row,
                                                               const kld_rule *rule,
                                                               const temperature *t) {
    shannon_sums r = {{0, 0, 0, 0}};
    shannon_look<T> look(*row, *t);
    logits_stats::pair_of<T> z(raw_p, raw_q);
    const double scale = (double)t->scale.high;
#pragma unroll 1
    for (uint32_t i = 0; i < packet<T>::V; i++) {
        if (i >= left)
            continue;
        float most = fmaf(z.q[i] - z.p[i], look.scale, look.between);
        bool heavy = !(z.p[i] <= row->heavy_p && z.q[i] <= row->heavy_q);
        double x_p = fma((double)z.p[i], scale, row->exact_p);
        double x_q = fma((double)z.q[i], scale, row->exact_q);
        if (!heavy && most <= shannon_look<T>::POWER_MOST) {
            look.add_pair(z.p[i], z.q[i], most);
            continue;
        }
        if (!heavy) { /* p is nothing beside q, as where a teacher leaves classes out */
            float mass = exp2_fast((float)(x_q + row->lost_p + row->lost));
            look.q = fmaf(mass, -log2_fast(look.other), look.q);
            continue;
        }
        mixture_terms<double> terms = mixture_of(*rule, (x_p - x_q) * LN_2);
        /* as the others count, before their sums are put right */
        r.sum[0] += wide_exp2(x_p + row->lost_p) * terms.log_p * LOG2_E;
        r.sum[1] += wide_exp2(x_q + row->lost_p + row->lost) * fma(terms.log_q, LOG2_E, row->lost);
    }
    look.flush(r.sum);
    return r;
}

/* And of a row that was summed the careful way: its value, and mass h of p. */
template <class T>
static __device__ __noinline__ shannon_sums shannon_carefully(uint4 raw_p, uint4 raw_q,
                                                              uint32_t left,
                                                              const shannon_row<T> *row,
                                                              const temperature *t) {
    typedef general_body<T, KLD_RULE_MIXTURE> general;
    shannon_sums r = {{0, 0, 0, 0}};
    general_sums sum;
    logits_stats::pair_of<T> z(raw_p, raw_q);
#pragma unroll 1
    for (int first = 0; first < packet<T>::V; first += general::BATCH) {
        float b_p[general::BATCH], b_q[general::BATCH];
#pragma unroll
        for (int i = 0; i < general::BATCH; i++) {
            b_p[i] = first ? z.p[general::BATCH + i] : z.p[i];
            b_q[i] = first ? z.q[general::BATCH + i] : z.q[i];
        }
        general::template sum_mixture_16<true, true>(b_p, b_q, resident::some_of{left}, first,
                                                     row->careful, row->careful, *t, sum);
    }
    sum.flush(r.sum);
    return r;
}

/* A vector of the gradient. */
template <class T_, bool CAREFUL> struct shannon_pairs {
    typedef T_ T;
    static constexpr uint32_t V = packet<T>::V;
    const float scale, c, between, other, share, slope, shift, limit, least;
    const near_pairs *near;

    __device__ __forceinline__ shannon_pairs(const shannon_row<T> &row, const temperature &t,
                                             const near_pairs *aside)
        : scale(t.scale.high), c(row.c), between(row.between), other(row.other), share(row.share),
          slope(row.slope), shift(row.shift), limit(row.limit), least(row.least), near(aside) {}

    __device__ __forceinline__ uint4 of(const uint4 &raw_p, const uint4 &raw_q) const {
        alignas(16) T y[V];
        float z_p[V], z_q[V];
        unpack<T>(raw_p, z_p);
        unpack<T>(raw_q, z_q);
        constexpr uint32_t HALF = V / 2;
#pragma unroll
        for (uint32_t half = 0; half < V; half += HALF) {
            float mass[HALF], by[HALF];
            bool is_near = false;
#pragma unroll
            for (uint32_t i = 0; i < HALF; i++) {
                float p = z_p[half + i], q = z_q[half + i];
                float power = fminf(fmaf(q - p, scale, between), 120.0f);
                float x_m = log2_fast(fmaf(exp2_fast(power), other, share));
                mass[i] = exp2_fast(fmaf(p, scale, -c));
                by[i] = fmaf(x_m, slope, shift);
                is_near |= fabsf(by[i]) < limit && mass[i] > least;
            }
            if (is_near) {
#pragma unroll
                for (uint32_t i = 0; i < HALF; i++) {
                    float better;
                    bool is = near->slope_of(z_p[half + i], z_q[half + i], better);
                    by[i] = is && fabsf(by[i]) < limit ? better : by[i];
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < HALF; i++)
                y[half + i] = ::to<T>(__fmul_rn(mass[i], by[i]));
        }
        return *(uint4 *)y;
    }
};

template <class T_> struct shannon_pairs<T_, true> {
    typedef T_ T;
    typedef general_body<T, KLD_RULE_MIXTURE> general;
    static constexpr uint32_t V = packet<T>::V;
    const typename general::numbers &row;
    const temperature &t;

    __device__ __forceinline__ shannon_pairs(const shannon_row<T> &row, const temperature &t,
                                             const near_pairs *)
        : row(row.careful), t(t) {}

    __device__ __forceinline__ uint4 of(const uint4 &raw_p, const uint4 &raw_q) const {
        alignas(16) T y[V];
        float z_p[V], z_q[V];
        unpack<T>(raw_p, z_p);
        unpack<T>(raw_q, z_q);
        const auto &side = row.side[SIDE_P];
#pragma unroll
        for (uint32_t i = 0; i < V; i++) {
            float mass = general::template mass_of<true, SIDE_P>(z_p[i], row, t);
            float h = general::template slope_of<true, SIDE_P>(z_p[i], z_q[i], row, side, t);
            h = mass == 0.0f ? 0.0f : h;
            y[i] = ::to<T>(mass * (h - side.sum) * row.factor);
        }
        return *(uint4 *)y;
    }
};

template <class T_> struct shannon_body : usual_body {
    typedef T_ T;
    typedef T_ type;
    static constexpr bool KNOWN = false;
    static constexpr int EXTRA = logits_stats::NOTHING;
    static constexpr bool CENTRES = true, OF_P = true, LOOKS_AGAIN = true;
    static constexpr bool WRITES_CAREFULLY = true, FLATTENS = true;
    typedef near_pairs aside;
    typedef flat_side<general_body<T_, KLD_RULE_MIXTURE>, SIDE_P> flat;
    typedef shannon_row<T> numbers;
    typedef shannon_look<T> look;
    template <bool CAREFUL> using pairs = shannon_pairs<T, CAREFUL>;

    static __device__ __forceinline__ double value(const kld_cuda_args &, const row_stats &) {
        return 0.0;
    }
    /* What the first `left` classes of a vector add to the sums of the second look. */
    static __device__ __forceinline__ shannon_sums by_itself(const kld_cuda_args &args,
                                                             const uint4 &p, const uint4 &q,
                                                             uint32_t left, const numbers &row,
                                                             const temperature &t) {
        if (row.is_careful)
            return shannon_carefully<T>(p, q, left, &row, &t);
        return shannon_one_by_one<T>(p, q, left, &row, &args.rule, &t);
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
