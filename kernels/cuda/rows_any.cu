/* rows_any.cu - the row kernel for everything that has no kernel of its own: any dtype and form of
 * either tensor, loss of each element, grad_output of each element. All arithmetic in FP64, so that
 * mixed forms (a probability against a logarithm) do not lose what their difference is made of.
 * Reads a row up to four times; right first. Enqueues only. */
#include "kernels/cuda/row.cuh"

struct any_side {
    const char *at;
    uint32_t dtype, form, bytes;
    double max, log_sum;
};

struct any_element {
    double p, q, d; /* d = ln p - ln q, 0 where p = 0 */
};

/* x and ln x of one element; a negative probability is NaN. */
static __device__ void read_side(const any_side &side, uint64_t i, double inverse_temperature,
                                 double &ret_raw, double &ret_value, double &ret_log) {
    double x = load_double(side.at + i * side.bytes, side.dtype);
    ret_raw = x;
    if (side.form == KLD_FORM_PROBS) {
        ret_value = x >= 0 ? x : CUDART_NAN;
        ret_log = log(ret_value);
    } else {
        ret_log = side.form == KLD_FORM_LOGPROBS
                      ? x
                      : (x - side.max) * inverse_temperature - side.log_sum;
        ret_value = exp(ret_log);
    }
}

struct any_body {
    struct state {
        any_side p, q;
        double inverse_temperature;
        bool both_logits;
    };

    static __device__ any_element at(const state &s, uint64_t i) {
        any_element e;
        double raw_p, raw_q, log_p, log_q;
        read_side(s.p, i, s.inverse_temperature, raw_p, e.p, log_p);
        read_side(s.q, i, s.inverse_temperature, raw_q, e.q, log_q);
        e.d = log_p - log_q;
        if (s.both_logits)
            e.d = ((raw_p - raw_q) - (s.p.max - s.q.max)) * s.inverse_temperature -
                  (s.p.log_sum - s.q.log_sum);
        else if (s.p.form == KLD_FORM_PROBS && s.q.form == KLD_FORM_PROBS &&
                 fabs(e.p - e.q) < 0.5 * e.q)
            e.d = log1p((e.p - e.q) / e.q);
        if (e.p == 0 && !isnan(log_q))
            e.d = 0; /* its own mass is 0: the term is 0 whatever the other side */
        return e;
    }

    /* p ln(p/q) - p + q, without cancellation where p and q are close. */
    static __device__ double logits_term(const any_element &e) {
        if (e.p == 0)
            return e.q;
        if (fabs(e.d) >= 0.02)
            return e.p * e.d - e.p + e.q;
        double d = e.d, y = 1.0 / 40320;
        y = y * -d + 1.0 / 5040; /* sum of (-d)^n / (n + 2)! */
        y = y * -d + 1.0 / 720;
        y = y * -d + 1.0 / 120;
        y = y * -d + 1.0 / 24;
        y = y * -d + 1.0 / 6;
        y = y * -d + 0.5;
        return e.p * (d * d * y);
    }

    static __device__ void statistics(any_side &side, uint64_t classes, double inverse_temperature,
                                      const team &team) {
        double max[1] = {-CUDART_INF};
        for (uint64_t i = team.lane; i < classes; i += team.size)
            max[0] = fmax(max[0], load_double(side.at + i * side.bytes, side.dtype));
        team.max(max);
        double sum[1] = {0};
        for (uint64_t i = team.lane; i < classes; i += team.size)
            sum[0] += exp((load_double(side.at + i * side.bytes, side.dtype) - max[0]) *
                          inverse_temperature);
        team.sum(sum);
        side.max = max[0];
        side.log_sum = log(sum[0]);
    }

    /* d/dx of the loss, x in its own form; go: grad_output of the element, or 1. */
    static __device__ double gradient_q(const state &s, const any_element &e, double go,
                                        double sum_p) {
        if (s.q.form == KLD_FORM_LOGITS)
            return (e.q * sum_p - go * e.p) * s.inverse_temperature;
        if (s.q.form == KLD_FORM_LOGPROBS)
            return isnan(e.q) ? e.q : -go * e.p;
        return e.p == 0 && !isnan(e.q) ? 0.0 : -go * e.p / e.q;
    }
    static __device__ double gradient_p(const state &s, const any_element &e, double go,
                                        double sum_p_d1) {
        if (e.p == 0 && !isnan(e.q))
            return s.p.form == KLD_FORM_LOGITS ? 0.0 * sum_p_d1 : 0.0;
        if (s.p.form == KLD_FORM_LOGITS)
            return e.p * (go * (e.d + 1) - sum_p_d1) * s.inverse_temperature;
        return s.p.form == KLD_FORM_LOGPROBS ? go * e.p * (e.d + 1) : go * (e.d + 1);
    }

    static __device__ double value(const kld_cuda_args &args, const row &row, const team &team) {
        state s;
        s.inverse_temperature = args.inverse_temperature;
        s.p = {row.p, args.p.dtype, args.p.form, dtype_bytes(args.p.dtype), 0, 0};
        s.q = {row.q, args.q.dtype, args.q.form, dtype_bytes(args.q.dtype), 0, 0};
        s.both_logits = s.p.form == KLD_FORM_LOGITS && s.q.form == KLD_FORM_LOGITS;
        if (s.p.form == KLD_FORM_LOGITS)
            statistics(s.p, row.classes, s.inverse_temperature, team);
        if (s.q.form == KLD_FORM_LOGITS)
            statistics(s.q, row.classes, s.inverse_temperature, team);

        uint32_t go_bytes = dtype_bytes(args.grad_output.dtype);
        /* The row's value; sums over p and p (d + 1), weighed by grad_output. */
        double sum[3] = {0, 0, 0};
        for (uint64_t i = team.lane; i < row.classes; i += team.size) {
            any_element e = at(s, i);
            double go = row.go ? load_double(row.go + i * go_bytes, args.grad_output.dtype) : 1.0;
            double term = e.p == 0 && !isnan(e.d) ? 0.0 : e.p * e.d;
            sum[0] += s.both_logits ? logits_term(e) : term;
            sum[1] += go * e.p;
            sum[2] += go * (term + e.p);
            if (row.loss)
                store_double(row.loss + i * dtype_bytes(args.loss.dtype), args.loss.dtype,
                             row.weight * term);
        }
        team.sum(sum);
        if (!row.grad_p && !row.grad_q)
            return sum[0];
        for (uint64_t i = team.lane; i < row.classes; i += team.size) {
            any_element e = at(s, i);
            double go = row.go ? load_double(row.go + i * go_bytes, args.grad_output.dtype) : 1.0;
            if (row.grad_q)
                store_double(row.grad_q + i * s.q.bytes, args.q.dtype,
                             row.gradient * gradient_q(s, e, go, sum[1]));
            if (row.grad_p)
                store_double(row.grad_p + i * s.p.bytes, args.p.dtype,
                             row.gradient * gradient_p(s, e, go, sum[2]));
        }
        return sum[0];
    }
};

static __global__ void __launch_bounds__(512) any_kernel(const kld_cuda_args args) {
    do_group<any_body>(args);
}

extern "C" cudaError_t kld_cuda_rows_any(const kld_cuda_args *args, uint32_t groups,
                                         cudaStream_t stream) {
    uint32_t threads = args->team > 32 ? args->team : 256;
    any_kernel<<<groups, threads, 0, stream>>>(*args);
    return cudaGetLastError();
}
