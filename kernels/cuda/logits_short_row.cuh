/* logits_short_row.cuh - a short row of logits in the registers of a few lanes of one warp: from
 * the logits, which lie in shared memory, to the value and the gradients, which take their place
 * there. Sums are made by shuffles; no other memory.
 *
 * Lane l of n holds the elements [(k n + l) W, (k n + l + 1) W), k = 0, 1, ...: a row's bits follow
 * from C and the dtype. Exponentials are taken against the row's largest logit.
 *
 * A softmax takes sum(mass h) off a gradient mass h. Where one class holds nearly all the mass, the
 * gradient is nothing but h less that sum; so h is counted from its value at the heaviest class,
 * and what is left is of the size of the result. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_ROW_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_ROW_CUH

#include "kernels/cuda/logits_short_lanes.cuh"

namespace logits_short {

/* Of type T and a rule; W elements that lie side by side, E elements of a lane. */
template <class T_, int RULE_, int MODE_, int W_, int E_> struct short_row {
    typedef T_ T;
    /* So many blocks on a multiprocessor that no element is spilled: 0.44 ms where five take 0.61.
     */
    static constexpr uint32_t WARPS = 4, BLOCKS = 4, TILE_BYTES = KLD_CUDA_SHORT_TILE_BYTES;
    static constexpr int RULE = RULE_, MODE = MODE_, W = W_, E = E_, STEPS = E / W;
    static constexpr bool FP32 = sizeof(T) == 4, ALL = MODE == GENERAL;
    /* Gradients in FP32, and tv always, hang on d to its last bits; those of 16 bits only where
     * rows are close. */
    static constexpr bool PRECISE = RULE == KLD_RULE_TV || (FP32 && MODE != LOSS);
    static constexpr bool KL = RULE == KLD_RULE_KL, MIXTURE = RULE == KLD_RULE_MIXTURE;
    static constexpr bool TV = RULE == KLD_RULE_TV, ENTROPY = RULE == KLD_RULE_CROSS_ENTROPY;

    /* PRECISE, in units of T: of a shift beyond it two floats hold too little, and the row is not
     * good. */
    static constexpr float APART_MOST = 65536.0f;

    const launch_numbers &n;
    lanes team;
    uint32_t classes;
    bool want_p, want_q; /* gradients */

    /* First the logits. Then the exponentials, zp - zq less that of the largest ones, or PRECISE
     * zp - zq and what its rounding left; ENTROPY: zq. At last the masses, in units of 1 / unit,
     * and what the gradients are made of. */
    float p[E], q[E], v[E], low[PRECISE ? E : 1], extra[ALL ? E : 1];
    two_floats shift; /* d is v / T less that */
    float factor_p, factor_q, unit;
    float top_q, log_rest; /* ENTROPY: q's largest logit, and -ln of its mass */

    __device__ __forceinline__ short_row(const launch_numbers &numbers, const lanes &at,
                                         uint32_t of_classes, bool gradient_p, bool gradient_q)
        : n(numbers), team(at), classes(of_classes), want_p(gradient_p), want_q(gradient_q),
          log_rest(0) {}

    /* FUNCTION(element) for those of this lane. */
    template <class FUNCTION> __device__ __forceinline__ void each(FUNCTION function) {
#pragma unroll
        for (int i = 0; i < E; i++)
            function(i);
    }

    __device__ __forceinline__ uint32_t at(int step) const {
        return (step * team.count + team.lane) * W;
    }

    template <class FUNCTION> __device__ __forceinline__ void each_const(FUNCTION function) const {
#pragma unroll
        for (int i = 0; i < E; i++)
            function(i);
    }

    /* ALIGNED: W elements in one piece. FULL: the lanes hold no more than the row. */
    template <bool ALIGNED, bool FULL>
    __device__ __forceinline__ void load_as(const T *from_p, const T *from_q) {
#pragma unroll
        for (int m = 0; m < STEPS; m++)
            load_pair<T, W, ALIGNED, FULL>(from_p, from_q, at(m), classes, &p[m * W], &q[m * W]);
    }
    __device__ __forceinline__ void load(const T *from_p, const T *from_q, bool aligned) {
        bool full = classes == team.count * E;
        if (W > 1 && !aligned)
            load_as<false, false>(from_p, from_q);
        else if (full)
            load_as<true, true>(from_p, from_q);
        else
            load_as<true, false>(from_p, from_q);
    }

    /* From the logits to the exponentials, their sums and the shift. */
    __device__ __forceinline__ void statistics() {
        float top[2] = {-CUDART_INF_F, -CUDART_INF_F};
        each([&](int i) {
            top[0] = max_nan(top[0], p[i]);
            top[1] = max_nan(top[1], q[i]);
        });
        team.max(top);
        side<PRECISE> of_p(top[0], n), of_q(top[1], n);
        float forward[1] = {0}, rest[2] = {0, 0};
        top_q = top[1];
        each([&](int i) {
            float z_p = p[i], z_q = q[i];
            if constexpr (PRECISE) {
                two_floats u = subtract(z_p, z_q);
                v[i] = u.high;
                low[i] = u.low;
            } else {
                v[i] = (z_p - of_p.top) - (z_q - of_q.top);
            }
            p[i] = of_p.add(z_p, n);
            q[i] = of_q.add(z_q, n);
            if (!PRECISE)
                forward[0] = fmaf(p[i], v[i], forward[0]);
            if constexpr (ENTROPY) { /* q but for the largest, how many of those */
                bool largest = z_q == top_q;
                rest[0] += largest ? 0.0f : q[i];
                rest[1] += largest ? 1.0f : 0.0f;
                extra[i] = z_q;
            }
        });
        if (ENTROPY)
            team.sum(rest);
        if constexpr (PRECISE) {
            settle(of_p, of_q);
        } else {
            float sum[3] = {of_p.sum, of_q.sum, forward[0]};
            team.sum(sum);
            factor_p = unit = reciprocal(sum[0]);
            factor_q = reciprocal(sum[1]);
            float log = (log2_fast(sum[0]) - log2_fast(sum[1])) * 0.693147181f;
            shift.high = log;
            shift.low = 0.0f;
            /* A small KL, or none: an infinite logit. The loss hangs on the shift's error squared.
             */
            const float least = MODE == LOSS ? 1e-3f : 0.0625f;
            approach(!(fmaf(sum[2] * unit, n.t.inverse.high, -log) >= least), 0.0, 1.0f);
            factor_q *= sum[0]; /* masses are in units of p's sum */
        }
        if (ENTROPY) {
            float largest = 1.0f;
            if (PRECISE)
                largest += exp_split(top_q, n.t).w;
            float more = fmaf(rest[0], reciprocal_precise(largest), rest[1] - 1.0f);
            log_rest = log_of<true>(more, 1.0f + more);
        }
    }

    /* PRECISE: sums as FP64 numbers. */
    __device__ __forceinline__ void settle(const side<PRECISE> &of_p, const side<PRECISE> &of_q) {
        float sum[4] = {of_p.sum, of_q.sum, of_p.sum_low, of_q.sum_low};
        team.sum(sum);
        double sum_p = (double)sum[0] + (double)sum[2], sum_q = (double)sum[1] + (double)sum[3];
        double inverse_q = wide_reciprocal(sum_q), by = sum_p * inverse_q;
        factor_p = (float)wide_reciprocal(sum_p);
        factor_q = (float)inverse_q;
        unit = 1.0f;
        double log = wide_log(by, by - 1.0);
        shift = two_floats(fma((double)(of_p.c - of_q.c), LN_2, log));
        /* Is the largest gradient to be expected small beside the heaviest class? */
        float size[2] = {0, 0};
        each([&](int i) {
            float a = p[i] * factor_p, b = q[i] * factor_q;
            size[0] = fmaxf(size[0], fabsf(a - b));
            size[1] = fmaxf(size[1], fmaxf(a, b));
        });
        team.max(size);
        const two_floats u = subtract(of_p.top, of_q.top);
        double inverse = (double)n.t.inverse.high + (double)n.t.inverse.low;
        float scale = (1.0f + exp_split(of_q.top, n.t).w) *
                      reciprocal_precise(1.0f + exp_split(of_p.top, n.t).w);
        approach(!(size[0] >= 0.25f * size[1]), ((double)u.high + (double)u.low) * inverse, scale);
        factor_p = fabsf(shift.high) <= APART_MOST ? factor_p : CUDART_NAN_F;
    }

    /* Where `close`: a better shift. Starts from `start`, which makes the largest exponentials
     * equal if p's are multiplied by `scale`, and adds up what the others differ by then; d is next
     * to 0, or exactly that, where rows agree. */
    __device__ __forceinline__ void approach(bool close, double start, float scale) {
        if (!__any_sync(KLD_FULL_WARP, close))
            return;
        const two_floats first = shift;
        shift = two_floats(start);
        float change[1] = {0};
        each([&](int i) {
            float d = logarithm(i), near = q[i] * fmaf(d * d, excess<PRECISE>(-d), d);
            change[0] += pick(fabsf(d) < 1.0f, near, fmaf(p[i], scale, -q[i]));
        });
        team.sum(change);
        double by = (double)change[0] * (double)factor_q;
        const two_floats better(start + wide_log(1.0 + by, by));
        close = close && fabs(by) < 0.5;
        shift.high = close ? better.high : first.high;
        shift.low = close ? better.low : first.low;
    }

    __device__ __forceinline__ float logarithm(int i) const {
        if constexpr (PRECISE)
            return log_ratio_of(v[i], low[i], shift, n.t);
        else
            return fmaf(v[i], n.t.inverse.high, -shift.high) - shift.low;
    }
    __device__ __forceinline__ float mass_p(int i) const {
        return PRECISE ? p[i] * factor_p : p[i];
    }

    /* Sums what each class adds, and leaves what the gradients need. */
    __device__ __forceinline__ float terms(float gradient) {
        float sum[1] = {0}, factor = gradient * unit;
        if (KL && MODE != DIFFERENCE && n.of_q != 0.0f) {
            each([&](int i) { sum[0] += kl<true>(i, factor); });
        } else if (KL) {
            each([&](int i) { sum[0] += kl<false>(i, factor); });
        } else if constexpr (MIXTURE) {
            bool limit[2] = {false, false};
            if (ALL)
                find_limits(limit);
            each([&](int i) { sum[0] += mixture(i, limit[0], limit[1]); });
        } else {
            each([&](int i) { sum[0] += other(i); });
        }
        team.sum(sum);
        return sum[0] * unit;
    }

    template <bool BACKWARD> __device__ __forceinline__ float kl(int i, float factor) {
        float a = mass_p(i), b = q[i] * factor_q;
        pair_terms r = pair_of<PRECISE, BACKWARD, MODE != LOSS>(a, b, logarithm(i));
        if (MODE == DIFFERENCE)
            p[i] = r.more * factor;
        if constexpr (ALL) {
            p[i] = a;
            q[i] = b;
            extra[i] = r.more;
        }
        return BACKWARD ? fmaf(r.backward, n.of_q, r.forward * n.of_p) : r.forward * n.of_p;
    }

    /* Of tv the sign of q - p; of the cross entropy q - p. */
    __device__ __forceinline__ float other(int i) {
        p[i] = mass_p(i);
        q[i] *= factor_q;
        pair_terms r = pair_of<PRECISE, false, true>(p[i], q[i], logarithm(i));
        v[i] = !TV ? r.more : r.more > 0.0f ? 0.5f : r.more < 0.0f ? -0.5f : 0.0f;
        if (TV)
            return 0.5f * fabsf(r.more);
        float z_q = extra[ALL ? i : 0];
        return p[i] > 0.0f ? p[i] * fmaf(top_q - z_q, n.t.inverse.high, log_rest) : 0.0f;
    }

    /* Of each side: has its heaviest class much more mass there than on the other side? */
    __device__ __forceinline__ void find_limits(bool (&limit)[2]) const {
        float heaviest[2] = {0, 0}, most[2] = {-CUDART_INF_F, -CUDART_INF_F};
        each_const([&](int i) {
            heaviest[0] = fmaxf(heaviest[0], p[i]);
            heaviest[1] = fmaxf(heaviest[1], q[i]);
        });
        team.max(heaviest);
        each_const([&](int i) {
            float d = logarithm(i);
            most[0] = p[i] == heaviest[0] ? fmaxf(most[0], d) : most[0];
            most[1] = q[i] == heaviest[1] ? fmaxf(most[1], -d) : most[1];
        });
        team.max(most);
        limit[0] = most[0] > 0.5f;
        limit[1] = most[1] > 0.5f;
    }

    /* h of both sides to v and extra, where `limit` less what it is for a class that the other side
     * has not. */
    __device__ __forceinline__ float mixture(int i, bool limit_p, bool limit_q) {
        float a = mass_p(i), b = q[i] * factor_q, d = logarithm(i);
        bool p_larger = d > 0.0f;
        float large = p_larger ? a : b, lost = p_larger ? n.rest : n.share;
        float kept = p_larger ? n.share : n.rest, sign = p_larger ? -1.0f : 1.0f;
        bool limit = p_larger ? limit_p : limit_q;
        float of_large = p_larger ? n.of_p : n.of_q, of_small = p_larger ? n.of_q : n.of_p;
        mixture_terms_short r = mixture_short<PRECISE, ALL>(fabsf(d), lost, kept, limit);
        if constexpr (ALL) {
            float cross = n.k * sign;
            float h_large = fmaf(of_large, r.log_large, kept * cross * r.more);
            float h_small = fmaf(of_small, r.log_small, lost * cross * r.whole);
            float lost_log = p_larger ? n.minus_log_rest : n.minus_log_share;
            float at_limit = fmaf(of_small, lost_log, -cross);
            h_small -= (p_larger ? limit_q : limit_p) ? at_limit : 0.0f;
            p[i] = a;
            q[i] = b;
            v[i] = p_larger ? h_large : h_small;
            extra[i] = p_larger ? h_small : h_large;
        }
        return large > 0.0f ? large * fmaf(of_large, r.large, of_small * r.small) : 0.0f;
    }
    /* What a gradient's h follows from at element i: h itself, or the logits that it is made of. */
    __device__ __forceinline__ float source_p(int i) const {
        return TV ? -v[i] : ENTROPY ? -extra[ALL ? i : 0] : v[i];
    }
    __device__ __forceinline__ float source_q(int i) const {
        return MIXTURE ? extra[ALL ? i : 0] : v[i];
    }
    /* The value at the heaviest class, and what its rounding left. */
    struct pivot {
        float high[2], low[2];
    };
    __device__ __forceinline__ pivot find_pivot() const {
        float heaviest[2] = {0, 0};
        each_const([&](int i) {
            heaviest[0] = fmaxf(heaviest[0], p[i]);
            heaviest[1] = fmaxf(heaviest[1], q[i]);
        });
        team.max(heaviest);
        pivot at = {{-CUDART_INF_F, -CUDART_INF_F}, {0, 0}};
        each_const([&](int i) {
            if (p[i] == heaviest[0])
                at.high[0] = fmaxf(at.high[0], source_p(i));
            if (q[i] == heaviest[1])
                at.high[1] = fmaxf(at.high[1], source_q(i));
        });
        team.max(at.high);
        if constexpr (KL && PRECISE) {
            at.low[0] = at.low[1] = -CUDART_INF_F;
            each_const([&](int i) {
                if (p[i] == heaviest[0] && v[i] == at.high[0])
                    at.low[0] = fmaxf(at.low[0], low[i]);
                if (q[i] == heaviest[1] && v[i] == at.high[1])
                    at.low[1] = fmaxf(at.low[1], low[i]);
            });
            team.max(at.low);
        }
        return at;
    }
    /* h less that of the heaviest class; 0 where there is no mass. */
    __device__ __forceinline__ float slope_p(int i, const pivot &at) const {
        float h = source_p(i) - at.high[0];
        if constexpr (KL && PRECISE)
            h += low[i] - at.low[0];
        h *= KL ? n.of_p * n.t.inverse.high : ENTROPY ? n.t.inverse.high : 1.0f;
        return p[i] > 0.0f ? h : 0.0f;
    }
    __device__ __forceinline__ float slope_q(int i, const pivot &at) const {
        float h = source_q(i) - at.high[1];
        if constexpr (KL && PRECISE)
            h += low[i] - at.low[1];
        h *= KL ? -n.of_q * n.t.inverse.high : 1.0f;
        return !ENTROPY && q[i] > 0.0f && (!KL || n.of_q != 0.0f) ? h : 0.0f;
    }

    /* GENERAL: gradients to p and q. */
    __device__ __forceinline__ void gradients(float gradient) {
        const pivot at = find_pivot();
        float sum[2] = {0, 0}, factor = gradient * unit;
        each([&](int i) {
            sum[0] = fmaf(p[i], slope_p(i, at), sum[0]);
            sum[1] = fmaf(q[i], slope_q(i, at), sum[1]);
        });
        team.sum(sum);
        sum[0] *= unit;
        sum[1] *= unit;
        each([&](int i) {
            float g_p = p[i] * (slope_p(i, at) - sum[0]), g_q = q[i] * (slope_q(i, at) - sum[1]);
            if constexpr (KL && ALL) {
                g_p = fmaf(-n.of_q, extra[i], g_p);
                g_q = fmaf(n.of_p, extra[i], g_q);
            }
            if (ENTROPY)
                g_q = v[i];
            p[i] = g_p * factor;
            q[i] = g_q * factor;
        });
    }

    /* `from`: p or q. */
    __device__ __forceinline__ void store(T *to_row, bool aligned, const float (&from)[E]) const {
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            uint32_t i = at(m);
            if (i < classes)
                store_some<T, W>(to_row + i, aligned, &from[m * W]);
        }
    }

    /* The gradients; where another team has the same row, both write the same. */
    __device__ __forceinline__ void put(T *at_p, T *at_q, bool aligned, bool zero, bool) {
        if (zero)
#pragma unroll
            for (int i = 0; i < E; i++)
                p[i] = q[i] = 0.0f;
        if constexpr (MODE == DIFFERENCE) {
            store(at_q, aligned, p);
        } else {
            if (want_p)
                store(at_p, aligned, p);
            if (want_q)
                store(at_q, aligned, q);
        }
    }

    __device__ __forceinline__ bool good(float value) const {
        return value < 1e30f && factor_p > 0.0f && factor_q > 0.0f;
    }
};

} /* namespace logits_short */
#endif
