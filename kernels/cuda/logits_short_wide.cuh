/* logits_short_wide.cuh - a short row of FP32 logits, in FP64, by a few lanes of one warp:
 * gradients that a sum over the row is taken off, where few classes leave nothing to average out.
 * The formulas are those of any_rule.cuh but for KL, whose gradients are
 *
 *     by p's logits  of_p p (d - mean of d over p) - of_q (q - p)
 *     by q's         -of_q q (d - mean of d over q) + of_p (q - p),  d = ln p - ln q,
 *
 * with means that come with the sums of the exponentials. A row stays in shared memory: FP64 takes
 * the registers, and exponentials are made again rather than kept. Gradients take the logits' place
 * there. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_WIDE_CUH

#include "kernels/cuda/any_rule.cuh"
#include "kernels/cuda/logits_short_lanes.cuh"

namespace logits_short {

/* Lane l of n has the classes l, l + n, ... What row() of logits_short.cuh calls, in its order. */
template <int RULE_> struct wide_row {
    typedef float T;
    static constexpr int RULE = RULE_, MODE = GENERAL, W = 1;
    static constexpr bool ALL = true, KL = RULE == KLD_RULE_KL;

    const launch_numbers &n;
    lanes team;
    uint32_t classes;
    bool want_p, want_q; /* gradients */
    const float *p, *q;
    double top_p, top_q, log_p, log_q; /* the largest logits, and of what exponentials sum to */
    double dot_p, dot_q;               /* what the softmax takes off the gradients; KL: off d */
    float factor;

    __device__ __forceinline__ wide_row(const launch_numbers &numbers, const lanes &at,
                                        uint32_t of_classes, bool gradient_p, bool gradient_q)
        : n(numbers), team(at), classes(of_classes), want_p(gradient_p), want_q(gradient_q),
          factor(0) {}

    __device__ __forceinline__ void load(const float *from_p, const float *from_q, bool) {
        p = from_p;
        q = from_q;
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
        double sum[KL ? 4 : 2] = {0, 0};
#pragma unroll 2
        for (uint32_t i = team.lane; i < classes; i += team.count) {
            double x_p = ((double)p[i] - top_p) * n.inverse;
            double x_q = ((double)q[i] - top_q) * n.inverse;
            double a = exp(x_p), b = exp(x_q);
            sum[0] += a;
            sum[1] += b;
            if constexpr (KL) {
                double u = x_p - x_q;
                sum[2] += a == 0 ? 0.0 : a * u;
                sum[3] += b == 0 ? 0.0 : b * u;
            }
        }
        team.sum(sum);
        log_p = log(sum[0]);
        log_q = log(sum[1]);
        if constexpr (KL) {
            double shift = log_p - log_q;
            dot_p = sum[2] / sum[0] - shift;
            dot_q = sum[3] / sum[1] - shift;
        }
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
    __device__ __forceinline__ any_element element(uint32_t i) const {
        double z_p = (double)p[i], z_q = (double)q[i];
        any_element e;
        e.log_q = (z_q - top_q) * n.inverse - log_q;
        e.p = exp((z_p - top_p) * n.inverse - log_p);
        e.q = exp(e.log_q);
        e.d = ((z_p - z_q) - (top_p - top_q)) * n.inverse - (log_p - log_q);
        return e;
    }

    /* The value, and the sums of the gradients. */
    __device__ __forceinline__ float terms(float) {
        if constexpr (KL) {
            double of_p = n.rule.of_p == 0 ? 0.0 : n.rule.of_p * dot_p;
            return (float)(n.rule.of_q == 0 ? of_p : of_p - n.rule.of_q * dot_q);
        }
        const any_rule at = rule();
        double sum[3] = {0, 0, 0};
#pragma unroll 1
        for (uint32_t i = team.lane; i < classes; i += team.count) {
            any_result r = any_apply(at, element(i));
            sum[0] += r.value;
            sum[1] += r.of_p;
            sum[2] += r.of_q;
        }
        team.sum(sum);
        dot_p = sum[1];
        dot_q = RULE == KLD_RULE_CROSS_ENTROPY ? 0.0 : sum[2]; /* q - p has the sum 0 */
        return (float)sum[0];
    }
    __device__ __forceinline__ bool good(float value) const { return value < 1e30f; }

    __device__ __forceinline__ void gradients(float its_factor) { factor = its_factor; }

    /* Of class i, both gradients but for `factor`. */
    __device__ __forceinline__ void gradients_at(uint32_t i, const any_rule &at, double &ret_p,
                                                 double &ret_q) const {
        const any_element e = element(i);
        if constexpr (KL) {
            double more = fabs(e.d) < ANY_NEAR ? e.p * (any_excess(e.d) - e.d) : e.q - e.p;
            bool of_p = n.rule.of_p != 0 && e.p != 0, of_q = n.rule.of_q != 0 && e.q != 0;
            double slope_p = of_p ? n.rule.of_p * e.p * (e.d - dot_p) : 0.0;
            double slope_q = of_q ? -n.rule.of_q * e.q * (e.d - dot_q) : 0.0;
            ret_p = slope_p - n.rule.of_q * more;
            ret_q = slope_q + n.rule.of_p * more;
        } else {
            const any_result r = any_apply(at, e);
            ret_p = r.of_p - (e.p == 0 ? 0.0 : e.p * dot_p);
            ret_q = r.of_q - (e.q == 0 ? 0.0 : e.q * dot_q);
        }
    }
    /* To where the logits are. ACTIVE: else another team has the same row, and writes it. */
    __device__ __forceinline__ void put(float *to_p, float *to_q, bool, bool zero,
                                        bool active) const {
        const any_rule at = rule();
        if (!active)
            return;
#pragma unroll 1
        for (uint32_t i = team.lane; i < classes; i += team.count) {
            double g_p, g_q;
            gradients_at(i, at, g_p, g_q);
            if (want_p)
                to_p[i] = zero ? 0.0f : (float)((double)factor * g_p);
            if (want_q)
                to_q[i] = zero ? 0.0f : (float)((double)factor * g_q);
        }
    }
};

} /* namespace logits_short */
#endif
