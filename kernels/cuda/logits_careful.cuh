/* logits_careful.cuh - the statistics of rows of logits whose sides are close, or have a heavy
 * class in common: see logits_stats.cuh. A warp counts from the class of its part that is the
 * heaviest of q, so two passes over it: all that is added up is then of the size of the result. */
#ifndef KLD_KERNELS_CUDA_LOGITS_CAREFUL_CUH
#define KLD_KERNELS_CUDA_LOGITS_CAREFUL_CUH

#include "kernels/cuda/logits_stats.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

struct careful_term {
    double b, change, forward, reverse, a;
};

/* Logits below it have no mass, whatever the rest: what masks classes without being -inf. */
static constexpr float NO_MASS = -1e30f;

/* 2^(z s - c) in FP64. */
static __device__ __forceinline__ double careful_exp(float z, float c, const temperature &t) {
    exp_parts e = exp_split(z, t);
    double scale = (double)exp2_fast(e.k - c);
    return fma(scale, (double)e.w, scale);
}

/* p's exponentials are 2^(zp s - c_p) fraction there; v is (zp - zq - delta) / T. */
static __device__ careful_term careful_pair(float z_p, float z_q, const reference &at, float delta,
                                            float c_p, double fraction, const temperature &t) {
    bool no_p = z_p == -CUDART_INF_F, no_q = z_q == -CUDART_INF_F;
    double inverse = (double)t.inverse.high + (double)t.inverse.low;
    double v = no_p || no_q ? 0.0 : ((double)z_p - (double)z_q - (double)delta) * inverse;
    careful_term r;
    r.b = z_q < NO_MASS ? 0.0 : careful_exp(fmaxf(z_q, at.pad_q), at.c_q, t);
    if (!no_p && !no_q && fabs(v) < 0.5) {
        double f = (double)expm1_rest((float)v), square = v * v * r.b;
        r.change = fma(square, f, r.b * v);
        r.forward = square * fma(v - 1.0, f, 1.0);
        r.reverse = square * f;
        r.a = r.b + r.change;
        return r;
    }
    r.a = z_p < NO_MASS ? 0.0 : careful_exp(fmaxf(z_p, at.pad_p), c_p, t) * fraction;
    r.change = r.a - r.b;
    if (isnan(z_p + z_q)) { /* fmaxf() drops it */
        r.forward = r.reverse = CUDART_NAN;
        return r;
    }
    r.forward = r.a == 0.0 ? r.b : no_q ? CUDART_INF : fma(r.a, v, -r.change);
    r.reverse = r.b == 0.0 ? r.a : no_p ? CUDART_INF : fma(-r.b, v, r.change);
    return r;
}

/* The same of 16 bits, in FP32: v is exact but for its last bit, and every term is of the size of
 * the result. */
static __device__ __forceinline__ void careful_pair_16(float z_p, float z_q, const reference &at,
                                                       float delta, float c_p, float fraction,
                                                       const temperature &t, float &ret_b,
                                                       float &ret_change, float &ret_forward,
                                                       float &ret_reverse, float &ret_a) {
    bool no_p = z_p == -CUDART_INF_F, no_q = z_q == -CUDART_INF_F;
    float v = no_p || no_q ? 0.0f : (z_p - z_q - delta) * t.inverse.high;
    float b = z_q < NO_MASS ? 0.0f : exp2_fast(fmaf(fmaxf(z_q, at.pad_q), t.scale.high, -at.c_q));
    float f = expm1_rest(v), square = v * v * b;
    bool near = !no_p && !no_q && fabsf(v) < 0.5f;
    float a =
        z_p < NO_MASS ? 0.0f : exp2_fast(fmaf(fmaxf(z_p, at.pad_p), t.scale.high, -c_p)) * fraction;
    float change = near ? fmaf(square, f, b * v) : a - b;
    float forward = a == 0.0f ? b : no_q ? CUDART_INF_F : fmaf(a, v, -change);
    float reverse = b == 0.0f ? a : no_p ? CUDART_INF_F : fmaf(-b, v, change);
    ret_b = b;
    ret_change = change;
    ret_forward = near ? square * fmaf(v - 1.0f, f, 1.0f) : forward;
    if (isnan(z_p + z_q)) /* fmaxf() drops it */
        ret_forward = CUDART_NAN_F;
    ret_reverse = near ? square * f : reverse;
    ret_a = near ? b + change : a;
}

/* Against what the careful way measures a warp's part. */
struct careful_reference : reference {
    float delta; /* the difference at the class whose q is the largest */
    float c_p;   /* p's exponentials are 2^(zp s - c_p) fraction there */
    double fraction;

    template <class T, class SLICE>
    static __device__ __forceinline__ careful_reference of(const SLICE &slice, const temperature &t,
                                                           float span) {
        careful_reference at;
        /* The largest of all, and that class of the largest q of which both have mass. */
        float top_p = -CUDART_INF_F, top_q = -CUDART_INF_F;
        float main_q = -CUDART_INF_F, delta = CUDART_NAN_F;
        slice.template pass<T>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            pair_of<T> z(raw_p, raw_q);
            z.pad(left, -CUDART_INF_F, -CUDART_INF_F);
#pragma unroll
            for (int i = 0; i < packet<T>::V; i++) {
                top_p = fmaxf(top_p, z.p[i]);
                top_q = fmaxf(top_q, z.q[i]);
                bool main = z.q[i] > main_q && fabsf(z.p[i]) < 1e30f;
                delta = main ? z.p[i] - z.q[i] : delta;
                main_q = main ? z.q[i] : main_q;
            }
        });
        (reference &)at = reference::of_tops(warp_max(top_p), warp_max(top_q), t, span);
        float main = warp_max(main_q);
        unsigned have = __ballot_sync(KLD_FULL_WARP, main_q == main && fabsf(delta) < 1e30f);
        delta = __shfl_sync(KLD_FULL_WARP, delta, have ? __ffs(have) - 1 : 0);
        bool known = have || fabsf(at.top_p - at.top_q) < 1e30f;
        if (!have)
            delta = known ? at.top_p - at.top_q : 0.0f;
        /* 16 bits take all exponentials by the high part alone */
        double scale = (double)t.scale.high + (sizeof(T) == 4 ? (double)t.scale.low : 0.0);
        double c = (double)at.c_q + (double)delta * scale;
        at.delta = delta;
        at.c_p = known ? (float)floor(c) : CUDART_NAN_F;
        at.fraction = exp2(floor(c) - c);
        at.pad_p = below(at.top_q + delta, span);
        return at;
    }
};

/* sum: b, change, forward terms, and reverse terms or a zq. mark: delta, the reference of b. */
template <class T, int EXTRA, class SLICE>
static __device__ __noinline__ part careful(SLICE slice, temperature t, float span) {
    constexpr int V = packet<T>::V;
    careful_reference at = careful_reference::of<T>(slice, t, span);
    float fraction = (float)at.fraction;
    double total[4] = {0, 0, 0, 0};
    slice.template pass<T>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
        pair_of<T> z(raw_p, raw_q);
        z.pad(left, -CUDART_INF_F, -CUDART_INF_F);
        [[maybe_unused]] float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < V; i++)
            if constexpr (sizeof(T) == 4) {
                careful_term r = careful_pair(z.p[i], z.q[i], at, at.delta, at.c_p, at.fraction, t);
                total[0] += r.b;
                total[1] += r.change;
                total[2] += r.forward;
                if (EXTRA == REVERSE)
                    total[3] += r.reverse;
                if (EXTRA == ENTROPY)
                    total[3] += r.a == 0.0 ? 0.0 : r.a * (double)z.q[i];
            } else {
                float b, change, forward, reverse, a;
                careful_pair_16(z.p[i], z.q[i], at, at.delta, at.c_p, fraction, t, b, change,
                                forward, reverse, a);
                sum[0] += b;
                sum[1] += change;
                sum[2] += forward;
                if (EXTRA == REVERSE)
                    sum[3] += reverse;
                if (EXTRA == ENTROPY)
                    sum[3] = a == 0.0f ? sum[3] : fmaf(a, z.q[i], sum[3]);
            }
        if constexpr (sizeof(T) != 4)
#pragma unroll
            for (int i = 0; i < 4; i++)
                total[i] += (double)sum[i];
    });
    return {{total[0], total[1], total[2], total[3]},
            {__float_as_int(at.delta), reference::mark(at.c_q)}};
}

/* One warp: up to 32 parts to one. With eta by which a part's delta differs from that of the part
 * with the largest reference: a grows by e^eta. */
template <int EXTRA>
static __device__ part careful_merge(const part *parts, uint32_t count,
                                     double inverse_temperature) {
    part from = lane_part(parts, count), to;
    int mark = from.sum[0] > 0 ? from.mark[1] : INT32_MIN / 4;
    int c_q = __reduce_max_sync(KLD_FULL_WARP, mark);
    int main = __ffs(__ballot_sync(KLD_FULL_WARP, mark == c_q)) - 1;
    to.mark[0] = __shfl_sync(KLD_FULL_WARP, from.mark[0], main);
    to.mark[1] = c_q;
    double origin = (double)__int_as_float(to.mark[0]);
    double scale = power_of_2(from.mark[1] - c_q);
    double b = from.sum[0], a = from.sum[0] + from.sum[1];
    double eta = ((double)__int_as_float(from.mark[0]) - origin) * inverse_temperature;
    double grow = a > 0 ? expm1(eta) : 0.0, more = grow * a;
    if (threadIdx.x % 32 >= count)
        eta = 0.0;
    /* sum of a'(v + eta) - a' + b with a' = a e^eta */
    double x[4] = {scale * b, scale * (from.sum[1] + more),
                   scale * (from.sum[2] + grow * (from.sum[2] - b) + (more + a) * eta), 0.0};
    if (EXTRA == REVERSE)
        x[3] = scale * (from.sum[3] + more - eta * b);
    if (EXTRA == ENTROPY)
        x[3] = scale * from.sum[3] * (1.0 + grow);
    sums_of(to, x);
    return to;
}

/* scale: of the exponentials. least: an entropy below it is lost in the numbers it is made of. */
template <int EXTRA>
static __device__ row_stats careful_row(const part &all, double inverse_temperature, double scale,
                                        double least) {
    const double(&x)[4] = all.sum; /* b, change, forward, reverse or a zq */
    row_stats row;
    double relative = x[1] / x[0], ratio = log1p(relative), inverse_a = 1.0 / (x[0] + x[1]);
    row.c_q = all.mark[1];
    row.inverse_q = 1.0 / x[0];
    double delta = (double)__int_as_float(all.mark[0]);
    row.shift = delta * inverse_temperature + ratio;
    double lse_p = (double)row.c_q + log2(x[0]) + delta * scale + ratio * LOG2_E;
    row.c_p = (int)floor(lse_p);
    row.inverse_p = exp2(floor(lse_p) - lse_p);
    row.forward = fmax(x[2] * inverse_a + (relative * x[0] * inverse_a - ratio), 0.0);
    row.reverse = EXTRA == REVERSE ? fmax(x[3] / x[0] + (ratio - relative), 0.0) : 0.0;
    row.entropy = EXTRA == ENTROPY
                      ? (double)row.c_q * LN_2 + log(x[0]) - x[3] * inverse_a * inverse_temperature
                      : 0.0;
    /* Of rows that are far apart, as those with classes of -inf may be, the rest is noise. */
    bool apart = fabs(ratio) > 1.0 && row.forward < 0.25 * fabs(ratio);
    apart = apart || (EXTRA == REVERSE && relative > 1.0 + 4.0 * row.reverse);
    row.missed = false;
    row.good = !apart && x[0] > 0 && x[0] < 1e300 && x[0] + x[1] > 0 && fabs(x[2]) < 1e300 &&
               fabs(x[3]) < 1e300 && fabs(lse_p) < 1e6 &&
               (EXTRA != ENTROPY || row.entropy >= least);
    return row;
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
