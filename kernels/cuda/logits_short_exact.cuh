/* logits_short_exact.cuh - a short row of FP32 logits in registers: KL(p, q) with the gradient
 * q - p, which is held to 4 units in the last place. As for long rows: sums good to 1e-8 and what
 * belongs to the row in FP64, d in two floats from the difference of the logits, and the larger
 * mass times 1 - e^-|d|: three roundings an element. Rows that are close get their sums from terms
 * of the size of the result, in FP64. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_EXACT_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_EXACT_CUH

#include "kernels/cuda/logits_short_row.cuh"

namespace logits_short {

template <int W, int E> struct exact_row : short_row<float, KLD_RULE_KL, DIFFERENCE, W, E> {
    typedef short_row<float, KLD_RULE_KL, DIFFERENCE, W, E> base;
    using base::base, base::each, base::n, base::p, base::q, base::shift, base::team;
    using base::low, base::v; /* the exponentials of p and q, until the sums are known */

    float c_p, c_q;
    double inverse_p, inverse_q, forward;
    two_floats apart; /* d is (zp - zq - apart) / T - shift */

    /* From the logits, which stay, to the sums, the shift and the value. */
    __device__ __forceinline__ void statistics() {
        float top[2] = {-CUDART_INF_F, -CUDART_INF_F};
        each([&](int i) {
            top[0] = max_nan(top[0], p[i]);
            top[1] = max_nan(top[1], q[i]);
        });
        team.max(top);
        c_p = exp_split(top[0], n.t).k;
        c_q = exp_split(top[1], n.t).k;
        c_p = fabsf(c_p) < 2097152.0f ? c_p : CUDART_NAN_F;
        c_q = fabsf(c_q) < 2097152.0f ? c_q : CUDART_NAN_F;
        float least_p = top[0] - n.span, least_q = top[1] - n.span;
        float sum[5] = {0, 0, 0, 0, 0};
        each([&](int i) {
            exp_parts e_p = exp_split(fmaxf(p[i], least_p), n.t);
            exp_parts e_q = exp_split(fmaxf(q[i], least_q), n.t);
            float k_p = e_p.k - c_p, k_q = e_q.k - c_q;
            float power_p = exp2_fast(k_p), power_q = exp2_fast(k_q);
            sum[0] += power_p;
            sum[1] = fmaf(power_p, e_p.w, sum[1]);
            sum[2] += power_q;
            sum[3] = fmaf(power_q, e_q.w, sum[3]);
            float u = (p[i] - top[0]) - (q[i] - top[1]);
            v[i] = fmaf(power_p, e_p.w, power_p);
            low[i] = fmaf(power_q, e_q.w, power_q);
            sum[4] = fmaf(v[i], pick(v[i] > 0.0f, u, 0.0f), sum[4]);
        });
        team.sum(sum);
        double sum_p = (double)sum[0] + (double)sum[1], sum_q = (double)sum[2] + (double)sum[3];
        inverse_p = wide_reciprocal(sum_p);
        inverse_q = wide_reciprocal(sum_q);
        double by = sum_p * inverse_q, log = wide_log(by, by - 1.0);
        double delta = (double)top[0] - (double)top[1];
        double inverse = (double)n.t.inverse.high + (double)n.t.inverse.low;
        double from_top = fma((double)(c_p - c_q), LN_2, log) - delta * inverse;
        forward = (double)sum[4] * inverse_p * inverse - from_top;
        shift = two_floats(fma(delta, inverse, from_top));
        apart.high = apart.low = 0.0f;
        /* Gradients that are small beside the heaviest class need better sums than that. */
        float size[2] = {0, 0}, factor_p = (float)inverse_p, factor_q = (float)inverse_q;
        each([&](int i) {
            float a = v[i] * factor_p, b = low[i] * factor_q;
            size[0] = fmaxf(size[0], fabsf(a - b));
            size[1] = fmaxf(size[1], fmaxf(a, b));
        });
        team.max(size);
        bool close = !(size[0] >= 0.25f * size[1]);
        if (__any_sync(KLD_FULL_WARP, close))
            careful(close, delta, inverse);
        inverse_p = fabsf(shift.high) <= base::APART_MOST ? inverse_p : CUDART_NAN;
    }

    /* p's exponentials are made e^((zp - zq - delta) / T) of q's: for the class whose logits are
     * `delta` apart that is 1, exactly. */
    __device__ __forceinline__ void careful(bool close, double delta, double inverse) {
        const double scale = (double)n.t.scale.high + (double)n.t.scale.low;
        double sum[3] = {0, 0, 0}; /* b, change, the terms */
        each([&](int i) {
            double z_p = (double)p[i], z_q = (double)q[i], v = (z_p - z_q - delta) * inverse;
            double b = wide_exp2(fma(z_q, scale, -(double)c_q));
            double f = (double)expm1_rest((float)v), square = v * v * b;
            double change = fma(square, f, b * v), term = square * fma(v - 1.0, f, 1.0);
            if (!(fabs(v) < 0.5)) {
                double a = wide_exp2(fma(z_p - delta, scale, -(double)c_q));
                change = a - b;
                term = a == 0.0 ? b : fma(a, v, -change);
            }
            sum[0] += b;
            sum[1] += change;
            sum[2] += term;
        });
        team.sum(sum);
        double by = sum[1] / sum[0], inverse_a = 1.0 / (sum[0] + sum[1]);
        double log = log1p(by), value = fma(sum[2], inverse_a, sum[1] * inverse_a - log);
        const two_floats its(log), between(delta);
        forward = close ? (value < 0.0 ? 0.0 : value) : forward;
        shift.high = close ? its.high : shift.high;
        shift.low = close ? its.low : shift.low;
        apart.high = close ? between.high : 0.0f;
        apart.low = close ? between.low : 0.0f;
    }

    __device__ __forceinline__ float terms(float gradient) {
        const two_floats factor_p(inverse_p * (double)gradient);
        const two_floats factor_q(inverse_q * (double)gradient);
        each([&](int i) {
            two_floats u = subtract(p[i], q[i]);
            float d = log_ratio_of(u.high - apart.high, u.low - apart.low, shift, n.t);
            bool more_q = d < 0.0f;
            float z = more_q ? q[i] : p[i], c = more_q ? c_q : c_p;
            float high = more_q ? factor_q.high : -factor_p.high;
            float low = more_q ? factor_q.low : -factor_p.low;
            exp_parts e = exp_split(z, n.t);
            float power = exp2_fast(e.k - c);
            float mass = pick(power == 0.0f, 0.0f, (high + fmaf(e.w, high, low)) * power);
            p[i] = pick(power == 0.0f, 0.0f, mass * one_minus_exp(fabsf(d)));
        });
        this->factor_p = (float)inverse_p;
        this->factor_q = (float)inverse_q;
        return (float)forward * n.of_p;
    }
};

} /* namespace logits_short */
#endif
