/* elementwise.cuh - rows of probs or logprobs, both tensors of one dtype and form: loss and
 * gradients of an element depend on that element alone, so one pass over the row does everything.
 *
 * A divergence is a rule: RULE::apply() turns the V elements of a 16-byte load into V terms and,
 * as GRADIENTS asks, their derivatives. This file holds that of KL(p, q); the loops know nothing of
 * it. Single precision; sums of 4 or 8 terms in single, beyond that in double. */
#ifndef KLD_KERNELS_CUDA_ELEMENTWISE_CUH
#define KLD_KERNELS_CUDA_ELEMENTWISE_CUH

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/row.cuh"

enum gradients { NO_GRADIENT = 0, GRADIENT_Q = 1, GRADIENT_P = 2 }; /* or both: 3 */

template <int FORM, int GRADIENTS> struct kl_rule;

/* One element with a zero, denormal, huge or impossible value. */
static __device__ __forceinline__ void kl_rare(float p, float q, float g, float &value,
                                               float &grad_p, float &grad_q) {
    double r;
    float d = log_ratio_rare(p, q, &r);
    bool none = p == 0.0f && q >= 0.0f; /* its own mass is 0: so is the term, whatever q */
    value = none ? 0.0f : p * d;
    grad_p = none ? 0.0f : fmaf(g, d, g);
    grad_q = none ? 0.0f : (float)(-(double)g * r);
}

template <int GRADIENTS> struct kl_rule<KLD_FORM_PROBS, GRADIENTS> {
    /* What stands beyond the last class: a term of 0 that is not rare. */
    static constexpr float PAD_P = 0.0f, PAD_Q = 1.0f;

    template <int V>
    static __device__ __forceinline__ void apply(const float (&p)[V], const float (&q)[V], float g,
                                                 float (&value)[V], float (&grad_p)[V],
                                                 float (&grad_q)[V]) {
        unsigned rank = 0;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < V; i++) {
            /* p = 0 is common (one class holds all the mass): any logarithm does, it is times 0. */
            float present = p[i] == 0.0f ? 1.0f : p[i];
            rank = max(rank, max(plain_rank(present), plain_rank(q[i])));
            float d = log_ratio(present, q[i]);
            value[i] = p[i] * d;
            if (GRADIENTS & GRADIENT_P)
                grad_p[i] = p[i] == 0.0f ? 0.0f : fmaf(g, d, g);
            if (GRADIENTS & GRADIENT_Q) {
                float r = ratio(p[i], q[i], largest);
                grad_q[i] = -g * r;
            }
        }
        if (rank < PLAIN_RANKS && (!(GRADIENTS & GRADIENT_Q) || largest < 3.0e38f))
            return;
/* One copy of the rare code, its operands chosen without indexing the registers. */
#pragma unroll 1
        for (int k = 0; k < V; k++) {
            float one_p = p[0], one_q = q[0], one[3];
#pragma unroll
            for (int i = 1; i < V; i++) {
                one_p = k == i ? p[i] : one_p;
                one_q = k == i ? q[i] : one_q;
            }
            kl_rare(one_p, one_q, g, one[0], one[1], one[2]);
#pragma unroll
            for (int i = 0; i < V; i++) {
                value[i] = k == i ? one[0] : value[i];
                if (GRADIENTS & GRADIENT_P)
                    grad_p[i] = k == i ? one[1] : grad_p[i];
                if (GRADIENTS & GRADIENT_Q)
                    grad_q[i] = k == i ? one[2] : grad_q[i];
            }
        }
    }
};

template <int GRADIENTS> struct kl_rule<KLD_FORM_LOGPROBS, GRADIENTS> {
    static constexpr float PAD_P = -INFINITY, PAD_Q = 0.0f;

    template <int V>
    static __device__ __forceinline__ void apply(const float (&log_p)[V], const float (&log_q)[V],
                                                 float g, float (&value)[V], float (&grad_p)[V],
                                                 float (&grad_q)[V]) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            float p = expf(log_p[i]), d = log_p[i] - log_q[i], gp = g * p;
            bool none = p == 0.0f && !isnan(log_q[i]);
            value[i] = none ? 0.0f : p * d;
            if (GRADIENTS & GRADIENT_P)
                grad_p[i] = none ? 0.0f : gp * (d + 1.0f);
            if (GRADIENTS & GRADIENT_Q)
                grad_q[i] = isnan(log_p[i]) || isnan(log_q[i]) ? CUDART_NAN_F : -gp;
        }
    }
};

template <class T, int FORM, int GRADIENTS> struct elementwise {
    static constexpr int V = packet<T>::V;
    static constexpr int BATCH = sizeof(T) == 4 ? 4 : 2; /* 16-byte loads in flight, each tensor */
    using rule = kl_rule<FORM, GRADIENTS>;

    static __device__ __forceinline__ void vector(const uint4 &raw_p, const uint4 &raw_q,
                                                  uint64_t at, bool whole, const row &row, float g,
                                                  double &sum) {
        float p[V], q[V], grad_p[V], grad_q[V], value[V];
        unpack<T>(raw_p, p);
        unpack<T>(raw_q, q);
        rule::apply(p, q, g, value, grad_p, grad_q);
#pragma unroll
        for (int half = V / 2; half; half /= 2)
#pragma unroll
            for (int i = 0; i < half; i++)
                value[i] += value[i + half];
        sum += (double)value[0];
        if ((GRADIENTS & GRADIENT_Q) && row.grad_q)
            store<T>((T *)row.grad_q, at, row.classes, whole, grad_q);
        if ((GRADIENTS & GRADIENT_P) && row.grad_p)
            store<T>((T *)row.grad_p, at, row.classes, whole, grad_p);
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
            vector(load_edge<T>(p, at, classes, to<T>(rule::PAD_P)),
                   load_edge<T>(q, at, classes, to<T>(rule::PAD_Q)), at, whole_out, row, g, sum[0]);
        team.sum(sum);
        return sum[0];
    }
};

#endif
