/* elementwise.cuh - rows of probs or logprobs, both tensors of one dtype and form: loss and
 * gradients of an element depend on that element alone, so one pass over the row does everything.
 *
 * A divergence is a rule: RULE::at(p, q, gradient, &value, &grad_p, &grad_q) for one element. This
 * file holds that of KL(p, q); the loops know nothing of it. Single precision; sums of 4 or 8 terms
 * in single, beyond that in double. */
#ifndef KLD_KERNELS_CUDA_ELEMENTWISE_CUH
#define KLD_KERNELS_CUDA_ELEMENTWISE_CUH

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/row.cuh"

template <int FORM, bool GRADIENT> struct kl_rule;

template <bool GRADIENT> struct kl_rule<KLD_FORM_PROBS, GRADIENT> {
    static __device__ __forceinline__ void at(float p, float q, float g, float &value,
                                              float &grad_p, float &grad_q) {
        bool plain = is_plain(p) && is_plain(q);
        if (GRADIENT)
            plain = plain && abs(__float_as_int(p) - __float_as_int(q)) < (100 << 23);
        if (plain) {
            float d = log_ratio(p, q);
            value = p * d;
            if (GRADIENT) {
                grad_p = fmaf(g, d, g);
                grad_q = -g * ratio(p, q);
            }
        } else {
            double r;
            float d = log_ratio_rare(p, q, &r);
            bool none = p == 0.0f && q >= 0.0f;
            value = none ? 0.0f : p * d;
            if (GRADIENT) {
                grad_p = none ? 0.0f : fmaf(g, d, g);
                grad_q = none ? 0.0f : (float)(-(double)g * r);
            }
        }
    }
};

template <bool GRADIENT> struct kl_rule<KLD_FORM_LOGPROBS, GRADIENT> {
    static __device__ __forceinline__ void at(float log_p, float log_q, float g, float &value,
                                              float &grad_p, float &grad_q) {
        float p = expf(log_p), d = log_p - log_q;
        bool none = p == 0.0f && !isnan(log_q);
        value = none ? 0.0f : p * d;
        if (GRADIENT) {
            float gp = g * p;
            grad_p = none ? 0.0f : gp * (d + 1.0f);
            grad_q = -gp;
        }
    }
};

template <class T, int FORM, bool GRADIENT> struct elementwise {
    static constexpr int V = packet<T>::V;
    static constexpr int BATCH = sizeof(T) == 4 ? 4 : 2; /* 16-byte loads in flight, each tensor */

    static __device__ __forceinline__ void vector(const uint4 &raw_p, const uint4 &raw_q,
                                                  uint64_t at, bool whole, const row &row, float g,
                                                  double &sum) {
        float p[V], q[V], grad_p[V], grad_q[V], value[V];
        unpack<T>(raw_p, p);
        unpack<T>(raw_q, q);
#pragma unroll
        for (int i = 0; i < V; i++)
            kl_rule<FORM, GRADIENT>::at(p[i], q[i], g, value[i], grad_p[i], grad_q[i]);
#pragma unroll
        for (int half = V / 2; half; half /= 2)
#pragma unroll
            for (int i = 0; i < half; i++)
                value[i] += value[i + half];
        sum += (double)value[0];
        if (GRADIENT) {
            if (row.grad_q)
                store<T>((T *)row.grad_q, at, row.classes, whole, grad_q);
            if (row.grad_p)
                store<T>((T *)row.grad_p, at, row.classes, whole, grad_p);
        }
    }

    static __device__ double value(const kld_cuda_args &args, const row &row, const team &team) {
        const T *p = (const T *)row.p, *q = (const T *)row.q;
        uint64_t classes = row.classes, step = (uint64_t)team.size * V;
        uint64_t at = (uint64_t)team.lane * V;
        bool whole_in = aligned16<T>(p) && aligned16<T>(q);
        bool whole_out = aligned16<T>(row.grad_p) && aligned16<T>(row.grad_q);
        float g = (float)row.gradient;
        double sum[1] = {0};
        if (whole_in) {
            for (; at + (BATCH - 1) * step + V <= classes; at += BATCH * step) {
                uint4 raw_p[BATCH], raw_q[BATCH];
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    raw_p[k] = load_full(p, at + k * step);
                    raw_q[k] = load_full(q, at + k * step);
                }
#pragma unroll
                for (int k = 0; k < BATCH; k++)
                    vector(raw_p[k], raw_q[k], at + k * step, whole_out, row, g, sum[0]);
            }
            for (; at + V <= classes; at += step)
                vector(load_full(p, at), load_full(q, at), at, whole_out, row, g, sum[0]);
        }
        for (; at < classes; at += step)
            vector(load_edge<T, FORM>(p, at, classes), load_edge<T, FORM>(q, at, classes), at,
                   whole_out, row, g, sum[0]);
        team.sum(sum);
        return sum[0];
    }
};

#endif
