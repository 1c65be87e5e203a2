/* logits_difference.cuh - rows of logits: KL(p, q) and the cross entropy with the gradient by q's
 * logits, which is q - p up to a factor: one pass after the statistics. */
#ifndef KLD_KERNELS_CUDA_LOGITS_DIFFERENCE_CUH
#define KLD_KERNELS_CUDA_LOGITS_DIFFERENCE_CUH

#include "kernels/cuda/logits_resident.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What a pair needs of its row to give q - p: masses are 2^(z s - c) factor. */
struct difference_row {
    float c_p, c_q;
    float apart;                   /* see row_stats; 0 in FP32 */
    two_floats factor_p, factor_q; /* 1 / sum, times the factor of the gradient */
    two_floats shift;

    __device__ __forceinline__ difference_row() {}
    /* is_fine: of FP32. */
    __device__ __forceinline__ difference_row(const row_stats &row, double factor, bool is_fine)
        : c_p((float)row.c_p), c_q((float)row.c_q), apart(row.apart),
          factor_p(row.inverse_p * factor, is_fine), factor_q(row.inverse_q * factor, is_fine),
          shift(row.shift) {}
};

/* (zp - zq) / T - shift, rounded about once. */
template <bool CLASSES_OUT>
static __device__ __forceinline__ float logarithm(const two_floats &u, const two_floats &shift,
                                                  const temperature &t) {
    float d = fmaf(u.high, t.inverse.high, -shift.high);
    float rest = fmaf(u.low, t.inverse.high, fmaf(u.high, t.inverse.low, -shift.low));
    if (CLASSES_OUT)
        return fabsf(d) < CUDART_INF_F ? d + rest : d;
    return d + rest;
}

/* The same of 16-bit logits, whose difference is exact. */
template <bool CLASSES_OUT>
static __device__ __forceinline__ float logarithm_16(float u, const two_floats &shift,
                                                     const temperature &t) {
    float d = fmaf(u, t.inverse.high, -shift.high);
    float rest = fmaf(u, t.inverse.low, -shift.low);
    if (CLASSES_OUT)
        return fabsf(d) < CUDART_INF_F ? d + rest : d;
    return d + rest;
}

/* The first with what it was rounded by, where that is wanted. */
template <bool CLASSES_OUT>
static __device__ __forceinline__ two_floats logarithm_wide(const two_floats &u,
                                                            const two_floats &shift,
                                                            const temperature &t, bool wanted) {
    two_floats d;
    d.low = 0.0f;
    if (!wanted) {
        d.high = logarithm<CLASSES_OUT>(u, shift, t);
        return d;
    }
    float product = u.high * t.inverse.high, lost = fmaf(u.high, t.inverse.high, -product);
    two_floats e = subtract(product, shift.high);
    float rest = lost + (e.low - shift.low);
    rest = fmaf(u.low, t.inverse.high, fmaf(u.high, t.inverse.low, rest));
    bool finite = fabsf(e.high) < 1e30f;
    d.high = finite ? e.high + rest : e.high;
    d.low = finite ? (e.high - d.high) + rest : 0.0f;
    return d;
}

/* A mass in FP32: 2^(k - c) (1 + w) factor. Far below all others w may be infinite, where the power
 * is 0. Held within what it can be, and not left out: a branch would part each class from the next.
 */
static __device__ __forceinline__ float mass_fp32(float z, float c, float high, float low,
                                                  const temperature &t) {
    exp_parts e = exp_split(z, t);
    float power = exp2_fast(e.k - c), w = fminf(fmaxf(e.w, -1.0f), 1.0f);
    return (high + fmaf(w, high, low)) * power;
}

/* And of 16 bits; rounded here, so that every copy of the code gives the same bits. */
static __device__ __forceinline__ float mass_16(float z, float c, float factor, float scale) {
    return __fmul_rn(exp2_fast(fmaf(z, scale, -c)), factor);
}

/* factor (q - p) in FP32. CLASSES_OUT: logits of -inf may come. */
template <bool CLASSES_OUT>
static __device__ __forceinline__ float
difference_fp32(float z_p, float z_q, const difference_row &row, const temperature &t) {
    float d = logarithm<CLASSES_OUT>(subtract(z_p, z_q), row.shift, t);
    bool more_q = d < 0.0f; /* q > p */
    float z = more_q ? z_q : z_p;
    float mass =
        mass_fp32(z, more_q ? row.c_q : row.c_p, more_q ? row.factor_q.high : -row.factor_p.high,
                  more_q ? row.factor_q.low : -row.factor_p.low, t);
    float g = mass * one_minus_exp(fabsf(d));
    if (CLASSES_OUT)
        g = z == -CUDART_INF_F ? 0.0f : g;
    return g;
}

/* q - p to 1e-6 of itself, of p, q and d: sums of it are what first-order terms leave. */
static __device__ __forceinline__ float difference_16(float p, float q, float d) {
    /* (e^d - 1) / d for |d| < 1/4, minimax, 9e-8 */
    float y = fmaf(d, 0.008351953375f, 0.04177530086f);
    y = fmaf(y, d, 0.1666662301f);
    y = fmaf(y, d, 0.4999983019f);
    y = fmaf(y, d, 1.0f);
    return fabsf(d) < 0.25f ? (q * -d) * y : q - p;
}

/* Where q - p is less than this part of q, the two masses, each 8e-7 off at worst, do not give it
 * to half a step of the type. */
template <class T> static constexpr float CLOSE = 1.0f / 2048;
template <> constexpr float CLOSE<__half> = 1.0f / 256;

/* What a difference of masses does not need, and close ones do. */
struct alignas(16) close_pairs {
    float apart, shift, rest, inverse;

    __device__ __forceinline__ close_pairs() {}
    __device__ __forceinline__ close_pairs(const difference_row &row, const temperature &t)
        : apart(row.apart), shift(row.shift.high),
          rest(fmaf(row.shift.high * t.inverse.low, reciprocal(t.inverse.high), -row.shift.low)),
          inverse(t.inverse.high) {}
    __device__ __forceinline__ const close_pairs &get() const { return *this; }
};
/* The same in shared memory, from where it is read when it is needed: it is not to take registers.
 */
struct close_pairs_shared {
    const close_pairs *at;

    __device__ __forceinline__ close_pairs get() const {
        close_pairs x;
        float4 words = load_shared_float4(shared_at(at));
        x.apart = words.x;
        x.shift = words.y;
        x.rest = words.z;
        x.inverse = words.w;
        return x;
    }
};

/* factor (q - p) of 16-bit logits: the difference of the masses, and where these are close
 * q (1 - e^d). Rounded here as mass_16() is: what is written depends on the pair alone, not on
 * those beside it. Result in z_q. */
template <class T, int N, class CLOSE_PAIRS>
static __device__ __forceinline__ void
difference_of_16(const float (&z_p)[N], float (&z_q)[N], float c_p, float c_q, float factor_p,
                 float factor_q, float scale, const CLOSE_PAIRS &close_pairs) {
    float g[N], q[N];
    bool close = false;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float a = exp2_fast(fmaf(z_p[i], scale, -c_p));
        q[i] = mass_16(z_q[i], c_q, factor_q, scale);
        g[i] = fmaf(-a, factor_p, q[i]);
        close |= fabsf(g[i]) < fabsf(__fmul_rn(q[i], CLOSE<T>));
    }
    if (close) {
        const auto by = close_pairs.get();
#pragma unroll
        for (int i = 0; i < N; i++) {
            float u = z_p[i] - by.apart - z_q[i];
            float d = __fadd_rn(fmaf(u, by.inverse, -by.shift), by.rest);
            float near = __fmul_rn(-q[i], fmaf(__fmul_rn(d, 0.5f), d, d));
            g[i] = fabsf(g[i]) < fabsf(__fmul_rn(q[i], CLOSE<T>)) ? near : g[i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        z_q[i] = g[i];
}

/* A vector of q - p, wherever it lies: the same arithmetic as difference_body's. ASIDE lies in
 * shared memory. */
template <class T_, bool CAREFUL> struct difference_pairs {
    typedef T_ T;
    static constexpr uint32_t V = packet<T>::V;

    const difference_row row;
    const temperature t;
    const close_pairs_shared close;

    __device__ __forceinline__ difference_pairs(const difference_row &row, const temperature &t,
                                                const close_pairs *aside)
        : row(row), t(t), close{aside} {}

    /* Of 16 bits in two halves, which take fewer registers. */
    __device__ __forceinline__ uint4 of(const uint4 &raw_p, const uint4 &raw_q) const {
        alignas(16) T y[V];
        float z_p[V], z_q[V];
        unpack<T>(raw_p, z_p);
        unpack<T>(raw_q, z_q);
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (uint32_t i = 0; i < V; i++)
                y[i] = difference_fp32<CAREFUL>(z_p[i], z_q[i], row, t);
        } else {
            constexpr int HALF = V / 2;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float half_p[HALF], half_q[HALF];
#pragma unroll
                for (int i = 0; i < HALF; i++) {
                    half_p[i] = z_p[half * HALF + i];
                    half_q[i] = z_q[half * HALF + i];
                }
                difference_of_16<T>(half_p, half_q, row.c_p, row.c_q, row.factor_p.high,
                                    row.factor_q.high, t.scale.high, close);
#pragma unroll
                for (int i = 0; i < HALF; i++)
                    y[half * HALF + i] = ::to<T>(half_q[i]);
            }
        }
        return *(uint4 *)y;
    }
};

template <class T_, bool ENTROPY> struct difference_body : usual_body {
    typedef T_ T;
    typedef T_ type;
    static constexpr bool KNOWN = true; /* the value, by the statistics */
    static constexpr int EXTRA = ENTROPY ? logits_stats::ENTROPY : logits_stats::NOTHING;
    static constexpr bool WRITES_CAREFULLY = sizeof(T) == 4; /* 16 bits are written alike */
    typedef close_pairs aside;
    template <bool CAREFUL> using pairs = difference_pairs<T, CAREFUL>;

    struct numbers : difference_row {
        __device__ __forceinline__ numbers() {}
        __device__ __forceinline__ numbers(const kld_cuda_args &args, const row_stats &stats,
                                           double factor)
            : difference_row(stats, ENTROPY ? factor : factor * args.rule.of_p, sizeof(T_) == 4) {}
    };

    static __device__ __forceinline__ double value(const kld_cuda_args &args,
                                                   const row_stats &stats) {
        return ENTROPY ? stats.entropy : args.rule.of_p * stats.forward;
    }

    template <bool CAREFUL>
    static __device__ __forceinline__ double passes(const row_at_hand<difference_body> &hand) {
        constexpr int V = packet<T>::V;
        double value = hand.shared->value;
        if (!hand.grad_q) {
            hand.slice.release();
            return value;
        }
        difference_row row = hand.shared->numbers;
        const temperature &t = hand.t;
        const close_pairs close(row, t);
        const resident::slice slice = hand.slice.template evened<T>();
        slice.template last_pass<!CAREFUL>(V, [&](uint32_t vector, auto left, const uint4 &raw_p,
                                                  const uint4 &raw_q) {
            float z_p[V], z_q[V];
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
            if constexpr (sizeof(T) == 4) {
#pragma unroll
                for (int i = 0; i < V; i++)
                    z_q[i] = difference_fp32<CAREFUL>(z_p[i], z_q[i], row, t);
            } else {
                difference_of_16<T>(z_p, z_q, row.c_p, row.c_q, row.factor_p.high,
                                    row.factor_q.high, t.scale.high, close);
            }
            resident::put<T>(hand.grad_q, hand.whole_q, slice.count, slice.head, vector, left, z_q);
        });
        return value;
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
