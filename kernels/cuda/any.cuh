/* any.cuh - the row body for every divergence, dtype and form, loss of each element, grad_output of
 * each element: all arithmetic in FP64, so that mixed forms (a probability against a logarithm) and
 * close rows do not lose what their difference is made of. Reads a row up to four times. Also the
 * careful way for a row that a faster body finds too close for FP32. Enqueues nothing itself. */
#ifndef KLD_KERNELS_CUDA_ANY_CUH
#define KLD_KERNELS_CUDA_ANY_CUH

#include "kernels/cuda/any_rule.cuh"
#include "kernels/cuda/row.cuh"

struct any_side {
    const char *at;
    uint32_t dtype, form, bytes;
    double max, log_sum;

    __device__ __forceinline__ double load(uint64_t i) const {
        return load_double(at + i * bytes, dtype);
    }
};

struct any_body {
    static constexpr int BATCH = 2; /* elements of a thread in flight */

    struct state {
        any_side p, q;
        any_rule rule;
        double inverse_temperature;
        bool both_logits, both_probs;
        bool subtracts; /* logits of sides that are near: one from the other */
    };

    /* A constant between the sides, in units of T, up to which logits are subtracted as they are,
     * which is exact where they agree, and it comes off behind that. Beyond it what is subtracted
     * would be rounded at its size: each side loses its own maximum first. */
    static constexpr double NEAR_SIDES = 32;

    /* The value and logarithm of an element; a probability that is negative or infinite is NaN, and
     * -0 is 0: what is infinite over it has its sign. */
    static __device__ __forceinline__ void read(const any_side &side, double inverse_temperature,
                                                bool log_wanted, double x, double &ret_value,
                                                double &ret_log) {
        if (side.form == KLD_FORM_PROBS) {
            ret_value = x >= 0 && x < CUDART_INF ? fabs(x) : CUDART_NAN;
            ret_log = log_wanted ? log(ret_value) : 0.0;
        } else {
            ret_log = side.form == KLD_FORM_LOGPROBS
                          ? x
                          : (x - side.max) * inverse_temperature - side.log_sum;
            ret_value = ret_log < CUDART_INF ? exp(ret_log) : CUDART_NAN;
        }
    }

    static __device__ __forceinline__ any_element element(const state &s, double raw_p,
                                                          double raw_q) {
        any_element e;
        double log_p;
        bool close = s.both_probs && fabs(raw_p - raw_q) < 0.5 * raw_q;
        bool entropy = s.rule.rule.kind == KLD_RULE_CROSS_ENTROPY;
        read(s.p, s.inverse_temperature, !close, raw_p, e.p, log_p);
        read(s.q, s.inverse_temperature, !close || entropy, raw_q, e.q, e.log_q);
        if (s.subtracts)
            e.d = ((raw_p - raw_q) - (s.p.max - s.q.max)) * s.inverse_temperature -
                  (s.p.log_sum - s.q.log_sum);
        else if (close)
            e.d = log1p((raw_p - raw_q) / raw_q);
        else
            e.d = log_p - e.log_q;
        return e;
    }

    /* The maximum and the logarithm of the sum of a side of logits. */
    static __device__ void statistics(any_side &side, uint64_t classes, double inverse_temperature,
                                      const team &team) {
        if (side.form != KLD_FORM_LOGITS)
            return;
        double max[1] = {-CUDART_INF}, sum[1] = {0};
        uint64_t step = team.size;
#pragma unroll 4
        for (uint64_t i = team.lane; i < classes; i += step)
            max[0] = fmax(max[0], side.load(i));
        team.max(max);
#pragma unroll 2
        for (uint64_t i = team.lane; i < classes; i += step)
            sum[0] += exp((side.load(i) - max[0]) * inverse_temperature);
        team.sum(sum);
        side.max = max[0];
        side.log_sum = log(sum[0]);
    }

    /* What each class adds: FUNCTION gets its index, masses, result and grad_output. */
    template <class FUNCTION>
    static __device__ __forceinline__ void each(const kld_cuda_args &args, const state &s,
                                                const row &row, const team &team,
                                                FUNCTION function) {
        uint32_t go_bytes = dtype_bytes(args.grad_output.dtype);
        for (uint64_t first = team.lane; first < row.classes; first += BATCH * team.size) {
            double x[BATCH], y[BATCH], go[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                uint64_t i = min(first + k * team.size, row.classes - 1);
                x[k] = s.p.load(i);
                y[k] = s.q.load(i);
                go[k] = row.go ? load_double(row.go + i * go_bytes, args.grad_output.dtype) : 1.0;
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                uint64_t i = first + k * team.size;
                if (i >= row.classes)
                    break;
                any_element e = element(s, x[k], y[k]);
                function(i, e, any_apply(s.rule, e), go[k]);
            }
        }
    }

    /* Of a side of logits: df/dz = (x df/dx - x sum(x df/dx)) / T; a class of probability 0 takes
     * nothing, even off an infinite sum. */
    static __device__ __forceinline__ void gradient(const any_side &side, char *to, uint64_t i,
                                                    double factor, double derivative, double mass,
                                                    double dot) {
        if (to)
            store_double(to + i * side.bytes, side.dtype,
                         factor * (derivative - (mass == 0 ? 0.0 : mass * dot)));
    }

    static __device__ uint32_t wanted(const any_side &side, const row &row, const char *to) {
        return !to                                       ? ANY_NOTHING
               : side.form == KLD_FORM_PROBS             ? ANY_SLOPE
               : side.form == KLD_FORM_LOGITS && !row.go ? ANY_CENTRED
                                                         : ANY_MOMENT;
    }

    static __device__ state begin(const kld_cuda_args &args, const row &row, const team &team) {
        state s;
        s.inverse_temperature = args.inverse_temperature;
        s.p = {row.p, args.p.dtype, args.p.form, dtype_bytes(args.p.dtype), 0, 0};
        s.q = {row.q, args.q.dtype, args.q.form, dtype_bytes(args.q.dtype), 0, 0};
        s.both_logits = s.p.form == KLD_FORM_LOGITS && s.q.form == KLD_FORM_LOGITS;
        s.both_probs = s.p.form == KLD_FORM_PROBS && s.q.form == KLD_FORM_PROBS;
        s.rule.rule = args.rule;
        s.rule.balanced = s.both_logits && args.loss_extent != KLD_CUDA_ELEMENTS;
        s.rule.want_p = wanted(s.p, row, row.grad_p);
        s.rule.want_q = wanted(s.q, row, row.grad_q);
        statistics(s.p, row.classes, s.inverse_temperature, team);
        statistics(s.q, row.classes, s.inverse_temperature, team);
        double between = (s.p.max - s.q.max) * s.inverse_temperature;
        s.subtracts = s.both_logits && fabs(between) <= NEAR_SIDES;
        return s;
    }

    static __device__ double value(const kld_cuda_args &args, const row &row, const team &team) {
        const state s = begin(args, row, team);
        const double inverse = s.inverse_temperature;
        const double factor_p = row.gradient * (s.p.form == KLD_FORM_LOGITS ? inverse : 1.0);
        const double factor_q = row.gradient * (s.q.form == KLD_FORM_LOGITS ? inverse : 1.0);
        /* Where p is a softmax, KL(p, q) and cross entropy have a q - p whose sum is 0. */
        bool known_q = s.both_logits && !row.go &&
                       (s.rule.rule.kind == KLD_RULE_CROSS_ENTROPY ||
                        (s.rule.rule.kind == KLD_RULE_KL && s.rule.rule.of_q == 0));
        bool later_p = row.grad_p && s.p.form == KLD_FORM_LOGITS;
        bool later_q = row.grad_q && s.q.form == KLD_FORM_LOGITS && !known_q;
        /* What waits for a sum reads both sides again: then neither may be overwritten before. */
        bool later = later_p || later_q;
        uint32_t loss_bytes = dtype_bytes(args.loss.dtype);
        double sum[3] = {0, 0, 0}; /* the row's value; x df/dx of p and of q */
        each(args, s, row, team,
             [&](uint64_t i, const any_element &e, const any_result &r, double go) {
                 sum[0] += r.value;
                 sum[1] += go * r.of_p;
                 sum[2] += go * r.of_q;
                 if (row.loss)
                     store_double(row.loss + i * loss_bytes, args.loss.dtype, row.weight * r.value);
                 if (later)
                     return;
                 gradient(s.p, row.grad_p, i, factor_p, go * r.of_p, e.p, 0.0);
                 gradient(s.q, row.grad_q, i, factor_q, go * r.of_q, e.q, 0.0);
             });
        team.sum(sum);
        if (!later)
            return sum[0];
        double dot_p = s.p.form == KLD_FORM_LOGITS ? sum[1] : 0.0;
        double dot_q = s.q.form == KLD_FORM_LOGITS && !known_q ? sum[2] : 0.0;
        each(args, s, row, team,
             [&](uint64_t i, const any_element &e, const any_result &r, double go) {
                 gradient(s.p, row.grad_p, i, factor_p, go * r.of_p, e.p, dot_p);
                 gradient(s.q, row.grad_q, i, factor_q, go * r.of_q, e.q, dot_q);
             });
        return sum[0];
    }
};

#endif
