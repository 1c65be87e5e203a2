/* logits_short_wide.cuh - a short row of FP32 logits, in FP64, by a few lanes of one warp:
 * gradients that a sum over the row is taken off, where few classes leave nothing to average out.
 * The formulas are those of any_rule.cuh but for KL, whose gradients are
 *
 *     by p's logits  of_p p (d - mean of d over p) - of_q (q - p)
 *     by q's         -of_q q (d - mean of d over q) + of_p (q - p),  d = ln p - ln q,
 *
 * with means that come with the sums of the exponentials, and d counted from the heaviest class, of
 * which nothing else may be left. However close a row is, d keeps its digits: it is u, what is
 * left of the difference of the logits without that of the largest, over T, less the shift, the
 * logarithm of the ratio of the sums, which comes from the sum of their differences. A row stays in
 * shared memory, and gradients take the logits' place there: FP64 takes the registers. Where a lane
 * has a few classes only, what they add is kept, else exponentials are made again. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_CUH

#include "kernels/cuda/any_rule.cuh"
#include "kernels/cuda/logits_short_lanes.cuh"

namespace logits_short {

/* Lane l of n has the classes l, l + n, ..., HELD at most, or 0: any number, of which nothing is
 * kept. What row() of logits_short.cuh calls, in its order. */
template <int RULE_, int HELD> struct wide_row {
    typedef float T;
    static constexpr int RULE = RULE_, MODE = GENERAL, W = 1;
    static constexpr bool ALL = true, KL = RULE == KLD_RULE_KL;

    /* Masses below it are none: a part of them might be 0, which is divided by. */
    static constexpr double LEAST = 1e-300;

    const launch_numbers &n;
    lanes team;
    uint32_t classes;
    bool want_p, want_q; /* gradients */
    const float *p, *q;
    double top_p, top_q, log_p, log_q; /* the largest logits, and of what exponentials sum to */
    double shift;                      /* log_p - log_q */
    double dot_p, dot_q;               /* what the softmax takes off the gradients; KL: off d */
    double inverse_p, inverse_q;       /* of the sums */
    double from_p, from_q;             /* KL: where u is counted from */
    float factor;
    double a[HELD ? HELD : 1], b[HELD ? HELD : 1];       /* HELD: exponentials */
    double of_p[HELD ? HELD : 1], of_q[HELD ? HELD : 1]; /* and of the gradients, but for KL */

    /* FUNCTION(k, class) for each of this lane's. */
    template <class FUNCTION> __device__ __forceinline__ void each(FUNCTION function) const {
        if constexpr (HELD != 0) {
#pragma unroll
            for (int k = 0; k < HELD; k++)
                if (team.lane + k * team.count < classes)
                    function(k, team.lane + k * team.count);
        } else {
#pragma unroll 1
            for (uint32_t i = team.lane; i < classes; i += team.count)
                function(0, i);
        }
    }

    __device__ __forceinline__ wide_row(const launch_numbers &numbers, const lanes &at,
                                        uint32_t of_classes, bool gradient_p, bool gradient_q)
        : n(numbers), team(at), classes(of_classes), want_p(gradient_p), want_q(gradient_q),
          factor(0) {}

    __device__ __forceinline__ void load(const float *at_p, const float *at_q, bool) {
        p = at_p;
        q = at_q;
    }

    __device__ __forceinline__ void statistics() {
        float top[2] = {-CUDART_INF_F, -CUDART_INF_F};
        for (uint32_t i = team.lane; i < classes; i += team.count) {
            top[0] = max_nan(top[0], p[i]);
            top[1] = max_nan(top[1], q[i]);
        }
        team.max(top);
        top_p = (double)top[0];
        top_q = (double)top[1];
        float ties[2] = {0, 0};
        find_heaviest(top, ties);
        double sum[KL ? 5 : 3] = {0, 0, 0};
        each([&](int k, uint32_t i) {
            double z_p = (double)p[i], z_q = (double)q[i], u = difference(z_p, z_q);
            double e_p = exp((z_p - top_p) * n.inverse), e_q = exp((z_q - top_q) * n.inverse);
            sum[0] += p[i] == top[0] ? 0.0 : e_p;
            sum[1] += q[i] == top[1] ? 0.0 : e_q;
            sum[2] += fabs(u) < ANY_NEAR ? e_q * (u + any_excess(-u)) : e_p - e_q;
            if constexpr (KL) {
                sum[3] += e_p == 0 ? 0.0 : e_p * (u - from_p);
                sum[4] += e_q == 0 ? 0.0 : e_q * (u - from_q);
            }
            a[k] = e_p;
            b[k] = e_q;
        });
        team.sum(sum);
        log_p = log_of(ties[0], sum[0]);
        log_q = log_of(ties[1], sum[1]);
        inverse_p = 1.0 / ((double)ties[0] + sum[0]);
        inverse_q = 1.0 / ((double)ties[1] + sum[1]);
        double more = sum[2] * inverse_q;
        shift = fabs(more) < 0.5 ? log1p(more) : log_p - log_q;
        if constexpr (KL) {
            dot_p = sum[3] * inverse_p;
            dot_q = sum[4] * inverse_q;
        }
    }

    /* ln(largest + rest), where each of the `largest` is 1: all that there is may be in the rest.
     */
    static __device__ __forceinline__ double log_of(float largest, double rest) {
        return log1p((double)largest - 1.0 + rest);
    }
    /* u, rounded here: it is the same number wherever it is compared. */
    __device__ __forceinline__ double difference(double z_p, double z_q) const {
        return __dmul_rn((z_p - top_p) - (z_q - top_q), n.inverse);
    }
    /* Of the classes with the largest logit of a side one, whichever lane has it; and how many. */
    __device__ __forceinline__ void find_heaviest(const float (&top)[2], float (&ret_ties)[2]) {
        float other[2] = {-CUDART_INF_F, -CUDART_INF_F};
        for (uint32_t i = team.lane; i < classes; i += team.count) {
            other[0] = p[i] == top[0] ? fmaxf(other[0], -q[i]) : other[0];
            other[1] = q[i] == top[1] ? fmaxf(other[1], p[i]) : other[1];
            ret_ties[0] += p[i] == top[0] ? 1.0f : 0.0f;
            ret_ties[1] += q[i] == top[1] ? 1.0f : 0.0f;
        }
        team.max(other);
        team.sum(ret_ties);
        from_p = difference(top_p, (double)-other[0]);
        from_q = difference((double)other[1], top_q);
    }

    __device__ __forceinline__ any_rule rule() const {
        any_rule r;
        r.rule = n.rule;
        r.rule.kind = RULE;
        r.want_p = want_p ? ANY_CENTRED : ANY_NOTHING;
        r.want_q = want_q ? ANY_CENTRED : ANY_NOTHING;
        r.balanced = false; /* nor need it be in FP64 */
        return r;
    }
    __device__ __forceinline__ any_element element(int k, uint32_t i) const {
        double z_p = (double)p[i], z_q = (double)q[i];
        any_element e;
        e.log_q = (z_q - top_q) * n.inverse - log_q;
        e.p = HELD ? a[k] * inverse_p : exp((z_p - top_p) * n.inverse - log_p);
        e.q = HELD ? b[k] * inverse_q : exp(e.log_q);
        if (RULE == KLD_RULE_MIXTURE) {
            e.p = e.p < LEAST ? 0.0 : e.p;
            e.q = e.q < LEAST ? 0.0 : e.q;
        }
        e.d = difference(z_p, z_q) - shift;
        return e;
    }

    /* The value, and the sums of the gradients. */
    __device__ __forceinline__ float terms(float) {
        if constexpr (KL) {
            double value = 0;
            if (n.rule.of_p != 0)
                value = n.rule.of_p * (dot_p + (from_p - shift));
            if (n.rule.of_q != 0)
                value -= n.rule.of_q * (dot_q + (from_q - shift));
            return (float)value;
        }
        const any_rule at = rule();
        double sum[3] = {0, 0, 0};
        each([&](int k, uint32_t i) {
            any_result r = any_apply(at, element(k, i));
            sum[0] += r.value;
            sum[1] += r.of_p;
            sum[2] += r.of_q;
            of_p[k] = r.of_p;
            of_q[k] = r.of_q;
        });
        team.sum(sum);
        dot_p = sum[1];
        dot_q = RULE == KLD_RULE_CROSS_ENTROPY ? 0.0 : sum[2]; /* q - p has the sum 0 */
        return (float)sum[0];
    }
    __device__ __forceinline__ bool good(float value) const { return value < 1e30f; }

    __device__ __forceinline__ void gradients(float its_factor) { factor = its_factor; }

    /* Of class i, both gradients but for `factor`. */
    __device__ __forceinline__ void gradients_at(int k, uint32_t i, double &ret_p,
                                                 double &ret_q) const {
        const any_element e = element(k, i);
        if constexpr (KL) {
            double more = fabs(e.d) < ANY_NEAR ? e.p * (any_excess(e.d) - e.d) : e.q - e.p;
            bool has_p = n.rule.of_p != 0 && e.p != 0, has_q = n.rule.of_q != 0 && e.q != 0;
            double u = difference((double)p[i], (double)q[i]);
            double slope_p = has_p ? n.rule.of_p * e.p * (u - from_p - dot_p) : 0.0;
            double slope_q = has_q ? -n.rule.of_q * e.q * (u - from_q - dot_q) : 0.0;
            ret_p = slope_p - n.rule.of_q * more;
            ret_q = slope_q + n.rule.of_p * more;
        } else {
            any_result r;
            if constexpr (HELD != 0)
                r = {0.0, of_p[k], of_q[k]};
            else
                r = any_apply(rule(), e);
            ret_p = r.of_p - (e.p == 0 ? 0.0 : e.p * dot_p);
            ret_q = r.of_q - (e.q == 0 ? 0.0 : e.q * dot_q);
        }
    }
    /* To where the logits are. ACTIVE: else another team has the same row, and writes it. */
    __device__ __forceinline__ void put(float *to_p, float *to_q, bool, bool zero,
                                        bool active) const {
        if (!active)
            return;
        each([&](int k, uint32_t i) {
            double g_p, g_q;
            gradients_at(k, i, g_p, g_q);
            if (want_p)
                to_p[i] = zero ? 0.0f : (float)((double)factor * g_p);
            if (want_q)
                to_q[i] = zero ? 0.0f : (float)((double)factor * g_q);
        });
    }
};

} /* namespace logits_short */
#endif
