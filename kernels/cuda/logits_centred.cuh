/* logits_centred.cuh - rows of logits: KL(p, q) with the gradient by p's logits,
 *     p (ln p - ln q - KL) / T,
 * in one pass after the statistics. (The reverse divergence with the gradient by the predictions,
 * that is: its sides have changed places.) What is taken off is the mean over p of the difference
 * of the logits, which the statistics give without q's sum. They are good to 1e-7 of the logits'
 * range, and so that a class that has all the mass does not show it classes that have much of it
 * are added up in FP64. Where that is too little, in FP32 and where the careful way had to sum
 * differences that are large, the mean is put right by another look: is_far, and
 * written_rows::recentre(). */
#ifndef KLD_KERNELS_CUDA_LOGITS_CENTRED_CUH
#define KLD_KERNELS_CUDA_LOGITS_CENTRED_CUH

#include "kernels/cuda/logits_difference.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What a pair needs of its row: the mass is 2^(zp s - c), times a factor. */
template <bool FP32> struct centred_row;
template <> struct centred_row<true> {
    float c;
    two_floats factor; /* 1 / sum, times that of the gradient */
    two_floats center; /* of (zp - zq) / T */
    float rest;        /* and what these two were rounded by */
    bool is_far;       /* see written_rows::recentre() */

    __device__ __forceinline__ centred_row() {}
    __device__ __forceinline__ centred_row(const row_stats &row, double factor, double)
        : c((float)row.c_p), factor(row.inverse_p * factor), center(row.center),
          rest((float)(((double)center.high - row.center) + (double)center.low)), is_far(true) {}
};
/* Of 16 bits whole powers of 2 of the factor are in c, and the rest of it, `part`, where it costs
 * nothing: it is (zp - apart - zq) slope - shift + rest, for part ((zp - apart - zq) / T - center);
 * rest is what the two before it were rounded by. */
template <> struct centred_row<false> {
    float c, apart;
    float slope, shift, rest;
    bool is_far;

    __device__ __forceinline__ centred_row() {}
    __device__ __forceinline__ centred_row(const row_stats &row, double factor,
                                           double inverse_temperature)
        : apart(row.apart), is_far(row.is_careful && row.forward > 1.0 / 32) {
        /* |part| is 1 at most, so that what is finite in the statistics is so here, too; and no
         * mass that shows becomes 0 by its power of 2. */
        split_factor all(row.inverse_p * factor);
        c = (float)(row.c_p - all.power);
        double center = all.part * row.center, by = all.part * inverse_temperature;
        slope = (float)by;
        shift = (float)center;
        double lost = (double)slope - by;
        rest = fabsf(slope) > 1e-30f
                   ? (float)(((double)shift - center) - lost * (double)(shift * reciprocal(slope)))
                   : 0.0f;
    }
};

struct nothing_aside {
    __device__ __forceinline__ nothing_aside() {}
    template <class NUMBERS>
    __device__ __forceinline__ nothing_aside(const NUMBERS &, const temperature &) {}
};

/* A vector of the gradient. CAREFUL: logits of -inf may come, and a constant between the sides. */
template <class T_, bool CAREFUL> struct centred_pairs {
    typedef T_ T;
    static constexpr uint32_t V = packet<T>::V;

    const centred_row<sizeof(T) == 4> row;
    const temperature t;

    __device__ __forceinline__ centred_pairs(const centred_row<sizeof(T) == 4> &row,
                                             const temperature &t, const nothing_aside *)
        : row(row), t(t) {}

    /* A part of it: what is no number is to show. */
    __device__ __forceinline__ float factor() const {
        if constexpr (sizeof(T) == 4)
            return row.factor.high;
        else
            return row.slope;
    }
    __device__ __forceinline__ void pair(float z_p, float z_q, float &mass, float &distance) const {
        if constexpr (sizeof(T) == 4) {
            mass = mass_fp32(z_p, row.c, row.factor.high, row.factor.low, t);
            distance = __fadd_rn(logarithm<CAREFUL>(subtract(z_p, z_q), row.center, t), row.rest);
        } else {
            float u = (CAREFUL ? z_p - row.apart : z_p) - z_q;
            mass = exp2_fast(fmaf(z_p, t.scale.high, -row.c));
            distance = __fadd_rn(fmaf(u, row.slope, -row.shift), row.rest);
        }
    }
    __device__ __forceinline__ uint4 of(const uint4 &raw_p, const uint4 &raw_q) const {
        alignas(16) T y[V];
        float z_p[V], z_q[V];
        unpack<T>(raw_p, z_p);
        unpack<T>(raw_q, z_q);
#pragma unroll
        for (uint32_t i = 0; i < V; i++) {
            float mass, distance;
            pair(z_p[i], z_q[i], mass, distance);
            float g = __fmul_rn(mass, distance);
            /* where the distance may be infinite */
            y[i] = ::to<T>(CAREFUL && mass == 0.0f ? 0.0f * factor() : g);
        }
        return *(uint4 *)y;
    }
};

template <class T_> struct centred_body : usual_body {
    typedef T_ T;
    typedef T_ type;
    static constexpr bool KNOWN = true; /* the value, by the statistics */
    static constexpr int EXTRA = logits_stats::NOTHING;
    static constexpr bool CENTRES = true, OF_P = true;
    static constexpr bool WRITES_CAREFULLY = true;
    typedef nothing_aside aside;
    template <bool CAREFUL> using pairs = centred_pairs<T, CAREFUL>;

    struct numbers : centred_row<sizeof(T) == 4> {
        __device__ __forceinline__ numbers() {}
        __device__ __forceinline__ numbers(const kld_cuda_args &args, const row_stats &stats,
                                           double factor)
            : centred_row<sizeof(T) == 4>(stats, factor * args.rule.of_p,
                                          args.inverse_temperature) {}
    };

    static __device__ __forceinline__ double value(const kld_cuda_args &args,
                                                   const row_stats &stats) {
        return args.rule.of_p * stats.forward;
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
