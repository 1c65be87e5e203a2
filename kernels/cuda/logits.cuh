/* logits.cuh - rows of logits, both tensors of one dtype: maxima, sums of exponentials, then terms
 * and gradients. The first `args.cached` vectors of each thread stay in shared memory between these
 * passes, the rest is read again (from L2 where it fits).
 *
 * The value of a row is the sum of p d - p + q, each >= 0, with d = ln p - ln q taken from the
 * difference of the logits: two close rows give neither noise nor a negative value. The difference
 * of the two logarithms of the sums comes from the sum of the differences of the exponentials. */
#ifndef KLD_KERNELS_CUDA_LOGITS_CUH
#define KLD_KERNELS_CUDA_LOGITS_CUH

#include <type_traits>

#include "kernels/cuda/logits_math.cuh"
#include "kernels/cuda/row.cuh"

struct logits_row {
    float max_p, max_q, inverse_temperature;
    float inverse_temperature_low; /* what its rounding left */
    float exponent_scale;          /* of exponential() */
    float inverse_sum_p, inverse_sum_q;
    double wide_inverse_sum_p;
    double log_sums; /* ln (sum_p / sum_q) */
    bool far;        /* a constant between the sides would round what is subtracted */

    /* zp - zq less that of the maxima, of these and of the logits less the maxima */
    __device__ __forceinline__ float difference(float z_p, float z_q, float high_p,
                                                float high_q) const {
        return far ? high_p - high_q : (z_p - z_q) - (max_p - max_q);
    }
};

/* Difference of the two shifted logits, not yet divided by T. low: what its rounding left, FP32. */
struct logits_difference {
    float high, low;
};

struct logits_element {
    float p, q, d, value, q_minus_p;
    logits_difference u;
};

/* A double as two floats: what is taken from u / T to get ln p - ln q, or that less a row's value.
 */
struct logits_shift {
    float high, low;

    __device__ __forceinline__ explicit logits_shift(double shift) {
        high = (float)shift;
        low = (float)(shift - (double)high);
    }
    /* u / T - shift; FULL: rounded about once */
    template <bool FULL>
    __device__ __forceinline__ float from(const logits_row &row, const logits_difference &u) const {
        float d = fmaf(u.high, row.inverse_temperature, -high);
        if constexpr (FULL) {
            float rest = fmaf(u.high, row.inverse_temperature_low, -low);
            rest = fmaf(u.low, row.inverse_temperature, rest);
            d = fabsf(d) < CUDART_INF_F ? d + rest : d;
        }
        return d;
    }
};

/* exp(x / T). What rounds to 16 bits afterwards takes the hardware's 2^x: 2e-7 of the result where
 * it weighs, more only where it is e^-16 of the largest and less. */
template <class T> static __device__ __forceinline__ float exponential(float x, float scale) {
    if constexpr (sizeof(T) == 4)
        return expf(x * scale);
    return exp2_fast(x * scale);
}

/* exp((z - max) / T) and z - max. PRECISE carries what the difference and its product with 1 / T
 * round away: FP32 gradients are held to 4 units in the last place. */
template <class T, bool PRECISE>
static __device__ __forceinline__ float shifted(const logits_row &row, float z, float max,
                                                float &ret_high, float &ret_low) {
    float high = z - max;
    ret_high = high;
    ret_low = 0.0f;
    if constexpr (!PRECISE) {
        return exponential<T>(high, row.exponent_scale);
    } else {
        float back = high - z;
        float low = (z - (high - back)) - (max + back);
        low = high > -CUDART_INF_F ? low : 0.0f;
        float x = high * row.inverse_temperature;
        float rest = fmaf(high, row.inverse_temperature, -x);
        rest = fmaf(high, row.inverse_temperature_low, fmaf(low, row.inverse_temperature, rest));
        ret_low = low;
        return exp_precise(x, rest);
    }
}

template <bool PRECISE>
static __device__ __forceinline__ logits_difference difference(float high_p, float low_p,
                                                               float high_q, float low_q) {
    logits_difference u = {high_p - high_q, 0.0f};
    if constexpr (PRECISE) {
        float back = u.high - high_p;
        float low = (high_p - (u.high - back)) - (high_q + back);
        u.low = fabsf(u.high) < CUDART_INF_F ? low + (low_p - low_q) : 0.0f;
    }
    return u;
}

template <class T, bool PRECISE>
static __device__ __forceinline__ logits_element logits_at(const logits_row &row,
                                                           const logits_shift &log_sums, float z_p,
                                                           float z_q) {
    logits_element e;
    float high_p, low_p, high_q, low_q;
    e.p = shifted<T, PRECISE>(row, z_p, row.max_p, high_p, low_p) * row.inverse_sum_p;
    e.q = shifted<T, PRECISE>(row, z_q, row.max_q, high_q, low_q) * row.inverse_sum_q;
    if constexpr (PRECISE)
        e.u = difference<true>(high_p, low_p, high_q, low_q);
    else
        e.u = {row.difference(z_p, z_q, high_p, high_q), 0.0f};
    e.d = log_sums.from<PRECISE>(row, e.u);
    if (fabsf(e.d) < 0.5f) {
        float f = e.d * e.d * term_series(e.d);
        e.value = e.p * f;
        e.q_minus_p = e.p * (f - e.d);
    } else {
        e.q_minus_p = e.q - e.p;
        e.value = fmaf(e.p, e.d, e.q_minus_p);
    }
    if (e.p == 0.0f) /* also both -inf: d is NaN */
        e.value = e.q_minus_p = e.q;
    return e;
}

template <class T, bool GRADIENT> struct logits {
    static constexpr int V = packet<T>::V;
    static constexpr bool PRECISE = GRADIENT && sizeof(T) == 4;

    struct source {
        const T *p, *q;
        uint4 *cache; /* [2][cached][threads], this thread's column */
        uint32_t cached, stride;
        uint64_t classes;
        bool whole;

        __device__ __forceinline__ void global(uint64_t at, uint4 &raw_p, uint4 &raw_q) const {
            if (whole && at + V <= classes) {
                raw_p = *reinterpret_cast<const uint4 *>(p + at);
                raw_q = *reinterpret_cast<const uint4 *>(q + at);
            } else {
                raw_p = load_edge<T>(p, at, classes, to<T>(-CUDART_INF_F));
                raw_q = load_edge<T>(q, at, classes, to<T>(-CUDART_INF_F));
            }
        }
        __device__ __forceinline__ void get(uint32_t k, uint64_t at, uint4 &raw_p,
                                            uint4 &raw_q) const {
            if (k < cached) {
                raw_p = cache[k * stride];
                raw_q = cache[(cached + k) * stride];
            } else {
                global(at, raw_p, raw_q);
            }
        }
        __device__ __forceinline__ void put(uint32_t k, const uint4 &raw_p,
                                            const uint4 &raw_q) const {
            if (k < cached) {
                cache[k * stride] = raw_p;
                cache[(cached + k) * stride] = raw_q;
            }
        }
    };

    static __device__ __forceinline__ float max_of(const uint4 &raw, float so_far) {
        float x[V];
        unpack<T>(raw, x);
#pragma unroll
        for (int i = 0; i < V; i++)
            so_far = fmaxf(so_far, x[i]);
        return so_far;
    }

    static __device__ void maxima(const source &from, const team &team, logits_row &ret) {
        float max[2] = {-CUDART_INF_F, -CUDART_INF_F};
        uint64_t step = (uint64_t)team.size * V, at = (uint64_t)team.lane * V;
        uint32_t k = 0;
        constexpr int BATCH = 4;
        for (; at + (BATCH - 1) * step < from.classes; at += BATCH * step, k += BATCH) {
            uint4 raw_p[BATCH], raw_q[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; j++)
                from.global(at + j * step, raw_p[j], raw_q[j]);
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                from.put(k + j, raw_p[j], raw_q[j]);
                max[0] = max_of(raw_p[j], max[0]);
                max[1] = max_of(raw_q[j], max[1]);
            }
        }
        for (; at < from.classes; at += step, k++) {
            uint4 raw_p, raw_q;
            from.global(at, raw_p, raw_q);
            from.put(k, raw_p, raw_q);
            max[0] = max_of(raw_p, max[0]);
            max[1] = max_of(raw_q, max[1]);
        }
        team.max(max);
        ret.max_p = max[0];
        ret.max_q = max[1];
        ret.far = !(fabsf(max[0] - max[1]) * ret.inverse_temperature <= 32.0f);
    }

    /* Exponentials good to 1e-8, added in FP64: an FP32 gradient is held to that where it is a
     * small difference. */
    static __device__ __forceinline__ void precise_sums(const logits_row &row, float z_p, float z_q,
                                                        double (&sum)[3]) {
        float high_p, low_p, high_q, low_q;
        shifted<T, true>(row, z_p, row.max_p, high_p, low_p);
        shifted<T, true>(row, z_q, row.max_q, high_q, low_q);
        double inverse = (double)row.inverse_temperature + (double)row.inverse_temperature_low;
        double a = wide_exp2(((double)high_p + (double)low_p) * (inverse * LOG2_E));
        double b = wide_exp2(((double)high_q + (double)low_q) * (inverse * LOG2_E));
        logits_difference u = difference<true>(high_p, low_p, high_q, low_q);
        float x = logits_shift(0.0).from<true>(row, u);
        sum[0] += a;
        sum[1] += b;
        sum[2] += fabsf(x) < 0.5f ? b * (double)fmaf(x * x, term_series(-x), x) : a - b;
    }

    static __device__ __forceinline__ double precise_p(const logits_row &row, float z_p) {
        double inverse = (double)row.inverse_temperature + (double)row.inverse_temperature_low;
        return wide_exp2(((double)z_p - (double)row.max_p) * (inverse * LOG2_E)) *
               row.wide_inverse_sum_p;
    }

    /* ln p - ln q - value */
    static __device__ __forceinline__ double
    precise_less(const logits_row &row, const logits_difference &u, double value) {
        double inverse = (double)row.inverse_temperature + (double)row.inverse_temperature_low;
        return ((double)u.high + (double)u.low) * inverse - (row.log_sums + value);
    }

    static __device__ void sums(const source &from, const team &team, logits_row &ret) {
        /* In bfloat16 the logits differ by so much, or not at all, that the two sums alone tell
         * their ratio well enough; else it comes from the sum of the differences. */
        constexpr bool FINE = sizeof(T) == 4 || (GRADIENT && std::is_same<T, __half>::value);
        constexpr int COUNT = FINE ? 3 : 2;
        double sum[COUNT] = {0};
        uint64_t step = (uint64_t)team.size * V;
        uint32_t k = 0;
        for (uint64_t at = (uint64_t)team.lane * V; at < from.classes; at += step, k++) {
            uint4 raw_p, raw_q;
            from.get(k, at, raw_p, raw_q);
            float z_p[V], z_q[V], part[COUNT] = {0};
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
            if constexpr (PRECISE) {
#pragma unroll
                for (int i = 0; i < V; i++)
                    precise_sums(ret, z_p[i], z_q[i], sum);
            } else {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float high_p, low_p, high_q, low_q;
                    float a = shifted<T, PRECISE>(ret, z_p[i], ret.max_p, high_p, low_p);
                    float b = shifted<T, PRECISE>(ret, z_q[i], ret.max_q, high_q, low_q);
                    /* A gradient may be what is left beside a class that has all the mass. */
                    if (GRADIENT && (a > 0.25f || b > 0.25f)) {
                        sum[0] += (double)a;
                        sum[1] += (double)b;
                    } else {
                        part[0] += a;
                        part[1] += b;
                    }
                    if constexpr (COUNT == 3) {
                        logits_difference u = {ret.difference(z_p[i], z_q[i], high_p, high_q),
                                               0.0f};
                        float x = logits_shift(0.0).from<PRECISE>(ret, u);
                        part[2] += fabsf(x) < 0.5f ? b * fmaf(x * x, term_series(-x), x) : a - b;
                    }
                }
#pragma unroll
                for (int i = 0; i < COUNT; i++)
                    sum[i] += (double)part[i];
            }
        }
        team.sum(sum);
        ret.wide_inverse_sum_p = 1.0 / sum[0];
        ret.inverse_sum_p = (float)ret.wide_inverse_sum_p;
        ret.inverse_sum_q = (float)(1.0 / sum[1]);
        double relative = COUNT == 3 ? sum[COUNT - 1] / sum[1] : 1.0;
        ret.log_sums = fabs(relative) < 0.5 ? log1p(relative) : log(sum[0] / sum[1]);
    }

    /* Terms; and the gradients, those that the pointers ask for. */
    static __device__ double terms(const source &from, const row &row, const team &team,
                                   const logits_row &stats, bool whole_out, T *grad_q, float g) {
        const logits_shift log_sums(stats.log_sums);
        double sum[1] = {0};
        uint64_t step = (uint64_t)team.size * V;
        uint32_t k = 0;
        for (uint64_t at = (uint64_t)team.lane * V; at < from.classes; at += step, k++) {
            uint4 raw_p, raw_q;
            from.get(k, at, raw_p, raw_q);
            float z_p[V], z_q[V], part = 0;
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
#pragma unroll
            for (int i = 0; i < V; i++) {
                logits_element e = logits_at<T, PRECISE>(stats, log_sums, z_p[i], z_q[i]);
                /* beyond C both are -inf: p = q = 0 */
                part += e.value;
                z_q[i] = g * e.q_minus_p;
            }
            sum[0] += (double)part;
            if (GRADIENT && grad_q)
                store<T>(grad_q, at, from.classes, whole_out, z_q);
        }
        team.sum(sum);
        return sum[0];
    }

    /* sum p (d - value): what the rounding of `value` left. Where one class holds nearly all of p,
     * its gradient p (d - value) is nothing but such remainders. */
    static __device__ double remainder(const source &from, const team &team,
                                       const logits_row &stats, double value) {
        const logits_shift log_sums(stats.log_sums), both(stats.log_sums + value);
        double sum[1] = {0};
        uint64_t step = (uint64_t)team.size * V;
        uint32_t k = 0;
        for (uint64_t at = (uint64_t)team.lane * V; at < from.classes; at += step, k++) {
            uint4 raw_p, raw_q;
            from.get(k, at, raw_p, raw_q);
            float z_p[V], z_q[V], part = 0;
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
#pragma unroll
            for (int i = 0; i < V; i++) {
                logits_element e = logits_at<T, PRECISE>(stats, log_sums, z_p[i], z_q[i]);
                float less = e.p == 0.0f ? 0.0f : both.from<true>(stats, e.u);
                if (PRECISE) /* terms may be much larger than their sum */
                    sum[0] += e.p == 0.0f
                                  ? 0.0
                                  : precise_p(stats, z_p[i]) * precise_less(stats, e.u, value);
                else
                    part += e.p * less;
            }
            sum[0] += (double)part;
        }
        team.sum(sum);
        return sum[0];
    }

    /* The gradient of p's logits needs the row's value: a pass of its own, which writes both. */
    static __device__ void gradients(const source &from, const row &row, const team &team,
                                     const logits_row &stats, bool whole_out, double value,
                                     float g) {
        double rest = isfinite(value) ? remainder(from, team, stats, value) : 0.0;
        const logits_shift log_sums(stats.log_sums), both(stats.log_sums + value);
        uint64_t step = (uint64_t)team.size * V;
        uint32_t k = 0;
        for (uint64_t at = (uint64_t)team.lane * V; at < from.classes; at += step, k++) {
            uint4 raw_p, raw_q;
            from.get(k, at, raw_p, raw_q);
            float z_p[V], z_q[V];
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
#pragma unroll
            for (int i = 0; i < V; i++) {
                logits_element e = logits_at<T, PRECISE>(stats, log_sums, z_p[i], z_q[i]);
                if (e.p == 0.0f)
                    z_p[i] = 0.0f;
                else if (PRECISE)
                    z_p[i] = g * (float)(precise_p(stats, z_p[i]) *
                                         (precise_less(stats, e.u, value) - rest));
                else
                    z_p[i] = g * (e.p * (both.from<true>(stats, e.u) - (float)rest));
                z_q[i] = g * e.q_minus_p;
            }
            if (row.grad_q)
                store<T>((T *)row.grad_q, at, from.classes, whole_out, z_q);
            store<T>((T *)row.grad_p, at, from.classes, whole_out, z_p);
        }
    }

    static __device__ double value(const kld_cuda_args &args, const row &row, const team &team) {
        source from;
        from.p = (const T *)row.p;
        from.q = (const T *)row.q;
        from.cached = args.cached;
        from.stride = blockDim.x;
        from.cache = dynamic_shared() + threadIdx.x;
        from.classes = row.classes;
        from.whole = aligned16<T>(row.p) && aligned16<T>(row.q);
        bool whole_out = aligned16<T>(row.grad_p) && aligned16<T>(row.grad_q);
        logits_row stats;
        stats.inverse_temperature = (float)args.inverse_temperature;
        stats.inverse_temperature_low =
            (float)(args.inverse_temperature - (double)stats.inverse_temperature);
        const double log2_e = 1.4426950408889634;
        stats.exponent_scale = (float)(args.inverse_temperature * (sizeof(T) == 4 ? 1.0 : log2_e));
        maxima(from, team, stats);
        sums(from, team, stats);
        float g = (float)(row.gradient * args.inverse_temperature);
        bool later = GRADIENT && row.grad_p;
        double value =
            terms(from, row, team, stats, whole_out, later ? nullptr : (T *)row.grad_q, g);
        if (later)
            gradients(from, row, team, stats, whole_out, value, g);
        return value;
    }
};

#endif
