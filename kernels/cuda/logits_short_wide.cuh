/* logits_short_wide.cuh - a short row of logits, in FP64, by a few lanes of one warp: gradients,
 * where few classes leave nothing to average out.
 *
 *     KL, by p's logits  of_p p (u - mean of u over p) - of_q (q - p)
 *     others             mass (h - mean of h), h what a rule adds for each unit of mass
 *
 * with u = ln p - ln q but for what is the same for all classes: the difference of the logits.
 * Means come with the sums, and u and h are counted from the heaviest class, of which nothing else
 * may be left. Nothing branches for one class: what several of them wait for overlaps.
 *
 * Rows that are close, of which masses in FP64 would lose too much, are done once more: their
 * shift, the logarithm of the ratio of the sums, comes from the sum of what they differ by, and all
 * that hangs on d = u - shift from that. The row alone decides.
 *
 * p is the side whose gradient is wanted: where that is q's, the two have changed places. Of the
 * cross entropy they have not. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_CUH

#include "kernels/cuda/logits_short_lanes.cuh"
#include "kernels/cuda/logits_short_wide_math.cuh"

namespace logits_short {

/* Lane l of n has the elements [(k n + l) W, (k n + l + 1) W), k = 0, 1, ..., E at a time. HELD:
 * they are the whole row, and stay in registers, and one gradient is wanted; else it takes one or
 * several times so many, and exponentials are made again. What row() of logits_short.cuh calls, in
 * its order. */
template <int RULE_, int W_, int E_, bool HELD> struct wide_row {
    typedef float T;
    /* 16 warps make better use of rows of which a lane has three classes; others spill less, and
     * have larger tiles, with 12. */
    static constexpr bool FEW = HELD && E_ <= 3;
    static constexpr uint32_t WARPS = 2, BLOCKS = FEW ? 8 : 6;
    static constexpr uint32_t TILE_BYTES =
        FEW ? KLD_CUDA_SHORT_TILE_BYTES : KLD_CUDA_WIDE_TILE_BYTES;
    static constexpr int RULE = RULE_, MODE = GENERAL, W = W_, E = E_, STEPS = E / W;
    static constexpr bool ALL = true, KL = RULE == KLD_RULE_KL;
    static constexpr bool MIXTURE = RULE == KLD_RULE_MIXTURE, TV = RULE == KLD_RULE_TV;
    static constexpr bool ENTROPY = RULE == KLD_RULE_CROSS_ENTROPY;

    /* The exponents of 2 that a mass may have, beside the largest's 0. */
    static constexpr float SPAN = 1000.0f;
    /* A value; a difference of masses, and what a softmax leaves of a gradient, beside the heaviest
     * class: below that rows are close. Masses and logarithms are good to 1e-12. */
    static constexpr double LEAST_VALUE = TV ? 0x1p-14 : 0x1p-17;
    static constexpr double LEAST_DIFFERENCE = 0x1p-13, LEAST_SLOPE = 0x1p-14;

    const launch_numbers &n;
    lanes team;
    uint32_t classes;
    bool want_p, want_q; /* gradients, as the launch calls the sides */
    bool swapped, both;
    const T *from_p, *from_q;
    float p[E], q[E];                       /* logits: -inf behind the row's end */
    double a[E], b[E];                      /* their exponentials */
    double x[E], y[HELD ? 1 : E];           /* KL: u; else what is left of the gradients */
    double weight_p, weight_q, share, rest; /* of the rule */
    double scale, shift;                    /* log2(e) / T; log_p - log_q */
    float factor;
    bool is_close;

    struct one_side {
        double top;     /* the largest logit */
        double inverse; /* of the sum of the exponentials */
        double log;     /* of that sum */
        double origin;  /* u or h of the heaviest class */
        double dot;     /* the mean of what is left */
        float least;    /* a logit, rounded up: below that is no mass */
        float mate;     /* the other side's logit of the heaviest class */
    } of_p, of_q;

    __device__ __forceinline__ wide_row(const launch_numbers &numbers, const lanes &at,
                                        uint32_t of_classes, bool gradient_p, bool gradient_q)
        : n(numbers), team(at), classes(of_classes), want_p(gradient_p), want_q(gradient_q),
          swapped(!ENTROPY && !gradient_p), both(!HELD && gradient_p && gradient_q),
          weight_p(swapped ? n.rule.of_q : n.rule.of_p),
          weight_q(swapped ? n.rule.of_p : n.rule.of_q),
          share(swapped ? n.rule.rest : n.rule.share), rest(swapped ? n.rule.share : n.rule.rest),
          scale(numbers.inverse * LOG2_E), factor(0), is_close(false) {}

    /* FUNCTION(element) for each that a lane has at a time. */
    template <class FUNCTION> __device__ __forceinline__ void each(FUNCTION function) const {
#pragma unroll
        for (int i = 0; i < E; i++)
            function(i);
    }
    /* FUNCTION(class of the first lane's first element), with their logits in p and q. */
    template <class FUNCTION> __device__ __forceinline__ void each_part(FUNCTION function) {
        if constexpr (HELD) {
            function(0u);
        } else {
#pragma unroll 1
            for (uint32_t first = 0; first < classes; first += team.count * E) {
                load_part<false, false>(first);
                function(first);
            }
        }
    }
    /* The same with their exponentials. MADE: those of rows that are held are there already. */
    template <bool MADE, class FUNCTION>
    __device__ __forceinline__ void each_powers(FUNCTION function) {
        each_part([&](uint32_t first) {
            if (!HELD || !MADE)
                each([&](int i) {
                    a[i] = power(p[i], of_p);
                    b[i] = power(q[i], of_q);
                });
            function(first);
        });
    }
    __device__ __forceinline__ uint32_t at(uint32_t first, int step) const {
        return first + (step * team.count + team.lane) * W;
    }
    /* ALIGNED: W elements in one piece. FULL: there are no others. */
    template <bool ALIGNED, bool FULL> __device__ __forceinline__ void load_part(uint32_t first) {
#pragma unroll
        for (int m = 0; m < STEPS; m++)
            load_pair<T, W, ALIGNED, FULL>(from_p, from_q, at(first, m), classes, &p[m * W],
                                           &q[m * W]);
    }
    __device__ __forceinline__ void load(const T *at_p, const T *at_q, bool aligned) {
        from_p = swapped ? at_q : at_p;
        from_q = swapped ? at_p : at_q;
        if (!HELD)
            return;
        bool full = classes == team.count * E;
        if (W > 1 && !aligned)
            load_part<false, false>(0);
        else if (full)
            load_part<true, true>(0);
        else
            load_part<true, false>(0);
    }

    /* ---- what all rules begin with -------------------------------------------------------- */

    __device__ __forceinline__ bool has_p(int i) const { return p[i] >= of_p.least; }
    __device__ __forceinline__ bool has_q(int i) const { return q[i] >= of_q.least; }

    /* u, rounded here: it is the same number wherever it is compared. */
    __device__ __forceinline__ double difference(float z_p, float z_q) const {
        return __dmul_rn(((double)z_p - of_p.top) - ((double)z_q - of_q.top), n.inverse);
    }
    __device__ __forceinline__ double power(float z, const one_side &of) const {
        double y = wide_power((double)z - of.top, scale);
        return z >= of.least ? y : 0.0;
    }

    /* The largest logits, and of the classes that have them one, whichever lane has it. */
    __device__ __forceinline__ void find_tops() {
        float top[2] = {-CUDART_INF_F, -CUDART_INF_F}, mate[2] = {-CUDART_INF_F, -CUDART_INF_F};
        each_part([&](uint32_t) {
            each([&](int i) {
                top[0] = max_nan(top[0], p[i]);
                top[1] = max_nan(top[1], q[i]);
            });
        });
        team.max(top);
        const bool of_both = KL ? weight_q != 0 : !ENTROPY && both;
        each_part([&](uint32_t) {
            each([&](int i) { mate[0] = p[i] == top[0] ? fmaxf(mate[0], -q[i]) : mate[0]; });
            if (of_both)
                each([&](int i) { mate[1] = q[i] == top[1] ? fmaxf(mate[1], p[i]) : mate[1]; });
        });
        team.max(mate);
        const float span = SPAN / n.t.scale.high, lowest = -3.402823466e38f;
        of_p.top = (double)top[0];
        of_q.top = (double)top[1];
        of_p.least = fmaxf(__fsub_ru(top[0], span), lowest);
        of_q.least = fmaxf(__fsub_ru(top[1], span), lowest);
        of_p.mate = -mate[0];
        of_q.mate = mate[1];
    }

    __device__ __forceinline__ void statistics() {
        find_tops();
        double sum[2] = {0, 0}, dot_p[1] = {0}, dot_q[1] = {0};
        if constexpr (KL) {
            of_p.origin = difference((float)of_p.top, of_p.mate);
            of_q.origin = difference(of_q.mate, (float)of_q.top);
        }
        each_powers<false>([&](uint32_t) {
            each([&](int i) {
                sum[0] += a[i];
                sum[1] += b[i];
            });
            if constexpr (KL) {
                each([&](int i) { x[i] = difference(p[i], q[i]); });
                if (weight_p != 0)
                    each([&](int i) { dot_p[0] = fma(a[i], slope_p(i), dot_p[0]); });
                if (weight_q != 0)
                    each([&](int i) { dot_q[0] = fma(b[i], slope_q(i), dot_q[0]); });
            }
        });
        team.sum(sum);
        of_p.inverse = wide_inverse(sum[0]);
        of_q.inverse = wide_inverse(sum[1]);
        double ratio = sum[0] * of_q.inverse;
        shift = wide_ln(ratio, ratio - 1.0);
        if constexpr (KL) {
            if (weight_p != 0)
                team.sum(dot_p);
            if (weight_q != 0)
                team.sum(dot_q);
            of_p.dot = __dmul_rn(dot_p[0], of_p.inverse); /* the same number in every way on */
            of_q.dot = __dmul_rn(dot_q[0], of_q.inverse);
        } else {
            of_p.log = wide_ln(sum[0], sum[0] - 1.0);
            of_q.log = wide_ln(sum[1], sum[1] - 1.0);
            if constexpr (ENTROPY)
                find_rest();
        }
    }

    /* The cross entropy hangs on what little is missing to a class of nearly all the mass. */
    __device__ __forceinline__ void find_rest() {
        double more[1] = {0};
        float ties[1] = {0};
        const float largest = (float)of_q.top;
        each_powers<true>([&](uint32_t) {
            each([&](int i) {
                more[0] += q[i] == largest ? 0.0 : b[i];
                ties[0] += q[i] == largest ? 1.0f : 0.0f;
            });
        });
        team.sum(more);
        team.sum(ties);
        more[0] += (double)ties[0] - 1.0;
        of_q.log = wide_ln(1.0 + more[0], more[0]);
    }

    /* The shift of rows that are close, from the sum of q's exponentials times e^u - 1. */
    __device__ __forceinline__ void approach() {
        double more[1] = {0};
        each_powers<true>([&](uint32_t) {
            each([&](int i) {
                double u = difference(p[i], q[i]), near = b[i] * fma(u * u, wide_excess(-u), u);
                more[0] += fabs(u) < WIDE_NEAR ? near : a[i] - b[i];
            });
        });
        team.sum(more);
        more[0] *= of_q.inverse;
        double better = wide_ln(1.0 + more[0], more[0]);
        shift = is_close && fabs(more[0]) < 0.25 ? better : shift;
    }

    /* The value, and all that the gradients need. */
    __device__ __forceinline__ float terms(float) {
        double value;
        if constexpr (KL) {
            is_close = !(value_of_kl() >= LEAST_VALUE);
            if (both || weight_q != 0)
                is_close |= differs_little();
            if (__any_sync(KLD_FULL_WARP, is_close))
                approach();
            value = value_of_kl();
        } else {
            value = plain();
            if (__any_sync(KLD_FULL_WARP, is_close)) {
                approach();
                value = careful(value);
            }
        }
        bool finite = fabs(of_p.top) < CUDART_INF && fabs(of_q.top) < CUDART_INF;
        return finite ? (float)value : CUDART_NAN_F;
    }
    __device__ __forceinline__ bool good(float value) const { return value < 1e30f; }

    /* ---- KL ------------------------------------------------------------------------------- */

    /* u counted from its heaviest class; 0 where there is no mass. */
    __device__ __forceinline__ double slope_p(int i) const {
        double u = x[i] - of_p.origin;
        return has_p(i) ? u : 0.0;
    }
    __device__ __forceinline__ double slope_q(int i) const {
        double u = x[i] - of_q.origin;
        return has_q(i) ? u : 0.0;
    }
    __device__ __forceinline__ double value_of_kl() const {
        double mean_p = of_p.dot + (of_p.origin - shift), mean_q = of_q.dot + (of_q.origin - shift);
        return (weight_p != 0 ? weight_p * mean_p : 0.0) -
               (weight_q != 0 ? weight_q * mean_q : 0.0);
    }
    /* q - p. */
    __device__ __forceinline__ double more_q(int i) const {
        double mass = a[i] * of_p.inverse;
        return fma(b[i], of_q.inverse, -mass);
    }
    __device__ __forceinline__ double more_q_carefully(int i) const {
        double d = x[i] - shift, near = wide_less(a[i] * of_p.inverse, d);
        return is_close && fabs(d) < WIDE_NEAR ? near : more_q(i);
    }
    /* Is the largest difference of masses small? */
    __device__ __forceinline__ bool differs_little() {
        int size = 0;
        each_powers<true>(
            [&](uint32_t) { each([&](int i) { size = max(size, wide_size(more_q(i))); }); });
        return team.largest(size) < wide_size(LEAST_DIFFERENCE * fmax(of_p.inverse, of_q.inverse));
    }
    /* From u and the exponentials, whose place they take. */
    template <bool CLOSE> __device__ __forceinline__ void gradients_of_kl() {
        const double by_p = weight_p * of_p.inverse, by_q = -weight_q * of_q.inverse;
        if (weight_q == 0 && !both) {
            each([&](int i) { a[i] *= by_p * (slope_p(i) - of_p.dot); });
        } else if (weight_p == 0 && !both) {
            each([&](int i) { a[i] = -weight_q * (CLOSE ? more_q_carefully(i) : more_q(i)); });
        } else {
            each([&](int i) {
                double more = CLOSE ? more_q_carefully(i) : more_q(i);
                double mine = weight_p == 0 ? 0.0 : a[i] * (by_p * (slope_p(i) - of_p.dot));
                double other = weight_q == 0 ? 0.0 : b[i] * (by_q * (slope_q(i) - of_q.dot));
                a[i] = fma(-weight_q, more, mine);
                b[i] = fma(weight_p, more, other);
            });
        }
    }

    /* ---- the others ----------------------------------------------------------------------- */

    __device__ __forceinline__ double cross() const {
        return wide_cross(weight_p, weight_q, share, rest);
    }

    /* Of a class with these logits and exponentials. */
    __device__ __forceinline__ wide_terms terms_of(float z_p, float z_q, double its_a,
                                                   double its_b) const {
        const bool mass_p = z_p >= of_p.least, mass_q = z_q >= of_q.least;
        const double of_a = __dmul_rn(its_a, of_p.inverse), of_b = __dmul_rn(its_b, of_q.inverse);
        wide_terms r;
        if constexpr (MIXTURE) {
            double m = fma(share, of_a, __dmul_rn(rest, of_b)), log_m = wide_ln(m, m - 1.0);
            double log_p = fma((double)z_p - of_p.top, n.inverse, -of_p.log) - log_m;
            double log_q = fma((double)z_q - of_q.top, n.inverse, -of_q.log) - log_m;
            r.of_p = mass_p ? __dmul_rn(weight_p, log_p) : 0.0;
            r.of_q = mass_q ? __dmul_rn(weight_q, log_q) : 0.0;
            r.value = fma(of_a, r.of_p, of_b * r.of_q);
            if (cross() != 0) {
                double part = __dmul_rn(__dmul_rn(of_b - of_a, cross()), wide_inverse(m));
                r.of_p = mass_p ? fma(part, share, r.of_p) : 0.0;
                r.of_q = mass_q ? fma(part, rest, r.of_q) : 0.0;
            }
        } else if constexpr (TV) {
            r = wide_tv(of_b - of_a);
        } else {
            /* h but for the logarithm of the sum, which is the same for all classes. */
            double less = __dmul_rn(of_q.top - (double)z_q, n.inverse);
            r.of_p = mass_p ? less : 0.0;
            r.of_q = of_b - of_a;
            r.value = mass_p ? of_a * (less + of_q.log) : 0.0;
        }
        return r;
    }

    /* What each class adds, by its exponentials; h of the heaviest class first. Says if the row is
     * close. */
    __device__ __forceinline__ double plain() {
        of_p.origin = of_q.origin = 0;
        if (!ENTROPY || want_p)
            of_p.origin = terms_of((float)of_p.top, of_p.mate, 1.0, power(of_p.mate, of_q)).of_p;
        if (!ENTROPY && both)
            of_q.origin = terms_of(of_q.mate, (float)of_q.top, power(of_q.mate, of_p), 1.0).of_q;
        double sum[2] = {0, 0}, sum_q[1] = {0};
        int size = 0, size_q = 0;
        each_powers<true>([&](uint32_t) {
            each([&](int i) {
                sum[0] += plain_gradients(i);
                sum[1] += x[i];
                size = max(size, wide_size(x[i]));
                if (!HELD) {
                    sum_q[0] += y[HELD ? 0 : i];
                    size_q = max(size_q, wide_size(y[HELD ? 0 : i]));
                }
            });
        });
        team.sum(sum);
        if (both)
            team.sum(sum_q);
        set_dots(true, sum[1], sum_q[0]);
        if (ENTROPY) { /* of q - p alone */
            is_close = want_q && team.largest(both ? size_q : size) <
                                     wide_size(LEAST_DIFFERENCE * of_q.inverse);
        } else {
            is_close = !(sum[0] >= LEAST_VALUE);
            is_close |= team.largest(size) < wide_size(LEAST_SLOPE * of_p.inverse);
            if (both)
                is_close |= team.largest(size_q) < wide_size(LEAST_SLOPE * of_q.inverse);
        }
        return sum[0];
    }
    /* Of q - p there is none. */
    __device__ __forceinline__ void set_dots(bool these, double sum_p, double sum_q) {
        of_p.dot = these ? ENTROPY && !want_p ? 0.0 : sum_p : of_p.dot;
        of_q.dot = these ? ENTROPY ? 0.0 : sum_q : of_q.dot;
    }
    /* What is wanted to x, or to x and y, where `these`. */
    __device__ __forceinline__ void keep(bool these, int i, const wide_terms &r) {
        double mass_p = a[i] * of_p.inverse, mass_q = b[i] * of_q.inverse;
        double left_p = has_p(i) ? mass_p * (r.of_p - of_p.origin) : 0.0;
        double left_q = ENTROPY ? r.of_q : has_q(i) ? mass_q * (r.of_q - of_q.origin) : 0.0;
        double left = ENTROPY && !want_p ? left_q : left_p;
        x[i] = these ? left : x[i];
        if (!HELD)
            y[HELD ? 0 : i] = these ? left_q : y[HELD ? 0 : i];
    }
    __device__ __forceinline__ double plain_gradients(int i) {
        const wide_terms r = terms_of(p[i], q[i], a[i], b[i]);
        keep(true, i, r);
        return r.value;
    }

    /* The same of a class of a close row, from d = ln p - ln q. */
    __device__ __forceinline__ wide_terms careful_terms(float z_p, float z_q, double its_a,
                                                        double its_b) const {
        const double of_a = __dmul_rn(its_a, of_p.inverse), of_b = __dmul_rn(its_b, of_q.inverse);
        const double d = difference(z_p, z_q) - shift;
        wide_terms r;
        if constexpr (MIXTURE) {
            r = wide_mixture(weight_p, weight_q, share, rest, of_a, of_b, d);
        } else {
            double more = fabs(d) < WIDE_NEAR ? wide_less(of_a, d) : of_b - of_a;
            if constexpr (TV) {
                r = wide_tv(more);
            } else {
                r = terms_of(z_p, z_q, its_a, its_b);
                r.of_q = more;
            }
        }
        return r;
    }
    __device__ __forceinline__ double careful_gradients(int i) {
        const wide_terms r = careful_terms(p[i], q[i], a[i], b[i]);
        keep(is_close, i, r);
        return r.value;
    }
    __device__ __forceinline__ double careful(double value) {
        double sum[3] = {0, 0, 0};
        double top_p = careful_terms((float)of_p.top, of_p.mate, 1.0, power(of_p.mate, of_q)).of_p;
        of_p.origin = is_close && !ENTROPY ? top_p : of_p.origin;
        if (both && !ENTROPY) {
            double top_q =
                careful_terms(of_q.mate, (float)of_q.top, power(of_q.mate, of_p), 1.0).of_q;
            of_q.origin = is_close ? top_q : of_q.origin;
        }
        each_powers<true>([&](uint32_t) {
            each([&](int i) {
                sum[0] += careful_gradients(i);
                sum[1] += x[i];
                sum[2] += HELD ? 0.0 : y[HELD ? 0 : i];
            });
        });
        team.sum(sum);
        set_dots(is_close, sum[1], sum[2]);
        return is_close ? sum[0] : value;
    }
    /* Where x and y were not kept: those of rows that are not close once more as well. */
    __device__ __forceinline__ void again(bool any_close) {
        each([&](int i) { plain_gradients(i); });
        if (any_close)
            each([&](int i) { careful_gradients(i); });
    }
    __device__ __forceinline__ void gradients_of_others() {
        each([&](int i) {
            double mass = a[i] * of_p.inverse, mass_q = b[i] * of_q.inverse;
            a[i] = fma(-mass, of_p.dot, x[i]);
            if (both)
                b[i] = fma(-mass_q, of_q.dot, y[HELD ? 0 : i]);
        });
    }

    /* ---- to where the logits are ------------------------------------------------------------ */

    __device__ __forceinline__ void gradients(float its_factor) { factor = its_factor; }
    __device__ __forceinline__ void store(T *to_row, uint32_t first, bool aligned, bool zero,
                                          const double (&from)[E]) const {
        float z[E];
        each([&](int i) { z[i] = zero ? 0.0f : (float)((double)factor * from[i]); });
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            uint32_t i = at(first, m);
            if (i < classes)
                store_some<T, W>(to_row + i, aligned, &z[m * W]);
        }
    }
    /* ACTIVE: else another team has the same row, and writes it. */
    __device__ __forceinline__ void put(T *to_p, T *to_q, bool aligned, bool zero, bool active) {
        const bool any_close = __any_sync(KLD_FULL_WARP, is_close);
        each_powers<true>([&](uint32_t first) {
            if constexpr (KL) {
                if (!HELD)
                    each([&](int i) { x[i] = difference(p[i], q[i]); });
                if (any_close)
                    gradients_of_kl<true>();
                else
                    gradients_of_kl<false>();
            } else {
                if (!HELD)
                    again(any_close);
                gradients_of_others();
            }
            if (active)
                store(want_p ? to_p : to_q, first, aligned, zero, a);
            if (active && both)
                store(to_q, first, aligned, zero, b);
        });
    }
};

} /* namespace logits_short */
#endif
