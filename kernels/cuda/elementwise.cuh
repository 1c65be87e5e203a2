/* elementwise.cuh - probs or logprobs, both tensors of one dtype and form: loss and gradients of an
 * element depend on that element alone, so one pass does everything.
 *
 * Two ways through a tensor: row by row, where a row has a value, a weight or a mask of its own;
 * and flat, where it has not: then the whole tensor is one list of elements, cut into tiles of one
 * size, and short or ragged rows cost nothing. The loops know no divergence (elementwise_rule.cuh).
 * Single precision; sums of 4 or 8 terms in single, beyond that in double. */
#ifndef KLD_KERNELS_CUDA_ELEMENTWISE_CUH
#define KLD_KERNELS_CUDA_ELEMENTWISE_CUH

#include "kernels/cuda/elementwise_rule.cuh"
#include "kernels/cuda/row.cuh"

/* Elements of both tensors that lie one after the other. */
template <class T> struct element_span {
    const T *p, *q;
    T *grad_p, *grad_q; /* NULL: not asked for */
    uint64_t count;
};

/* BATCH: 16-byte loads in flight, of each tensor. */
template <class T, int FORM, int KIND, int GRADIENTS, int BATCH> struct elementwise {
    static constexpr int V = packet<T>::V;
    using rule = element_rule<T, FORM, KIND, GRADIENTS>;

    /* An element of a vector that has some rare one, which may be another row's: this one may be
     * plain, and then has the bits that it has in any other vector, or be absent from both, as
     * where only the largest classes were kept. */
    static __device__ __forceinline__ element_result once_more(const element_numbers &numbers,
                                                               float p, float q) {
        using single = element_rule<T, FORM, KIND, GRADIENTS, false>;
        float g = (float)numbers.g, inf = CUDART_INF_F;
        if (FORM == KLD_FORM_PROBS && p == 0.0f && q == 0.0f)
            return {0.0f, rule::ZEROS ? g * 0.0f : 0.0f, rule::ZEROS ? g * -0.0f : 0.0f};
        if (FORM == KLD_FORM_PROBS && KIND == ELEMENT_KL && q == 0.0f && p > 0.0f && p < inf)
            return {inf, g * inf, g * -inf};
        typename single::check check;
        element_result r = single::plain(numbers, p, q, check);
        r.of_p *= g;
        r.of_q *= g;
        return single::is_plain(check, r.value) ? r : careful<rule, KIND>(numbers, p, q);
    }

    /* One copy of the rare code, its operands chosen without indexing the registers. Returns the
     * sum of the terms. */
    static __device__ __forceinline__ float again(const element_numbers &numbers,
                                                  const float (&p)[V], const float (&q)[V],
                                                  float (&grad_p)[V], float (&grad_q)[V]) {
        float sum = 0.0f;
#pragma unroll 1
        for (int k = 0; k < V; k++) {
            float one_p = p[0], one_q = q[0];
#pragma unroll
            for (int i = 1; i < V; i++) {
                one_p = k == i ? p[i] : one_p;
                one_q = k == i ? q[i] : one_q;
            }
            element_result r = once_more(numbers, one_p, one_q);
            sum += r.value;
#pragma unroll
            for (int i = 0; i < V; i++) {
                if (GRADIENTS & GRADIENT_P)
                    grad_p[i] = k == i ? r.of_p : grad_p[i];
                if (GRADIENTS & GRADIENT_Q)
                    grad_q[i] = k == i ? r.of_q : grad_q[i];
            }
        }
        return sum;
    }

    static __device__ __forceinline__ void vector(const element_numbers &numbers,
                                                  const uint4 &raw_p, const uint4 &raw_q,
                                                  const element_span<T> &span, uint64_t at,
                                                  bool whole, double &sum) {
        float p[V], q[V], grad_p[V], grad_q[V], g = (float)numbers.g, part[2] = {0.0f, 0.0f};
        unpack<T>(raw_p, p);
        unpack<T>(raw_q, q);
        typename rule::check check;
        packed_check<T> packed;
        if (rule::PACKED) {
            packed.add(raw_p.x, raw_q.x);
            packed.add(raw_p.y, raw_q.y);
            packed.add(raw_p.z, raw_q.z);
            packed.add(raw_p.w, raw_q.w);
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            element_result r = rule::plain(numbers, p[i], q[i], check);
            part[i % 2] += r.value;
            grad_p[i] = g * r.of_p;
            grad_q[i] = g * r.of_q;
        }
        float all = part[0] + part[1];
        if (!rule::is_plain(check, all) || (rule::PACKED && !packed.passed()))
            all = again(numbers, p, q, grad_p, grad_q);
        sum += (double)all;
        if ((GRADIENTS & GRADIENT_Q) && span.grad_q)
            store<T>(span.grad_q, at, span.count, whole, grad_q);
        if ((GRADIENTS & GRADIENT_P) && span.grad_p)
            store<T>(span.grad_p, at, span.count, whole, grad_p);
    }

    static __device__ __forceinline__ uint4 load_some(const T *from, uint64_t at, uint64_t count,
                                                      bool whole) {
        return whole && at + V <= count ? load_full(from, at)
                                        : load_edge<T>(from, at, count, to<T>(rule::PAD));
    }

    /* The share of thread `lane` of `size` in the sum of a span's terms. */
    static __device__ __forceinline__ double
    run(const element_numbers &numbers, const element_span<T> &span, unsigned lane, unsigned size) {
        const T *p = span.p, *q = span.q;
        uint64_t count = span.count, step = (uint64_t)size * V;
        bool whole_in = aligned16<T>(p) && aligned16<T>(q);
        bool whole_out = aligned16<T>(span.grad_p) && aligned16<T>(span.grad_q);
        double sum = 0;
        for (uint64_t at = (uint64_t)lane * V; at < count; at += BATCH * step) {
            uint4 raw_p[BATCH], raw_q[BATCH];
            if (whole_in && at + (BATCH - 1) * step + V <= count) {
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    raw_p[k] = load_full(p, at + k * step);
                    raw_q[k] = load_full(q, at + k * step);
                }
            } else { /* what is beyond the end adds 0 */
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    raw_p[k] = load_some(p, at + k * step, count, whole_in);
                    raw_q[k] = load_some(q, at + k * step, count, whole_in);
                }
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                vector(numbers, raw_p[k], raw_q[k], span, at + k * step, whole_out, sum);
        }
        return sum;
    }

    static __device__ double value(const kld_cuda_args &args, const row &row, const team &team) {
        const element_numbers numbers(args.rule, row.gradient);
        const element_span<T> span = {(const T *)row.p, (const T *)row.q, (T *)row.grad_p,
                                      (T *)row.grad_q, row.classes};
        double sum[1] = {run(numbers, span, team.lane, team.size)};
        team.sum(sum);
        return sum[0];
    }
};

#endif
