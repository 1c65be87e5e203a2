/* logits_fast.cuh - the fast way through a row pair of logits (logits_stats.cuh): the sums of one
 * thread, in FP32 for some classes at a time and in FP64 beyond that; classes that have much of the
 * mass one by one in FP64. */
#ifndef KLD_KERNELS_CUDA_LOGITS_FAST_CUH
#define KLD_KERNELS_CUDA_LOGITS_FAST_CUH

#include "kernels/cuda/logits_stats.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

/* Sums of one chunk, of one thread, in FP32. */
template <int EXTRA> struct chunk_sums {
    float p = 0, p_low = 0, q = 0, q_low = 0, u = 0, extra = 0;

    template <class T> __device__ __forceinline__ void flush(double (&total)[4]) {
        if (sizeof(T) == 4) {
            total[0] += (double)p + (double)p_low;
            total[1] += (double)q + (double)q_low;
        } else {
            total[0] += (double)p;
            total[1] += (double)q;
        }
        total[2] += (double)u;
        if (EXTRA != NOTHING)
            total[3] += (double)extra;
        p = p_low = q = q_low = u = extra = 0;
    }
};

template <int EXTRA>
static __device__ __forceinline__ void fast_fp32(float z_p, float z_q, const reference &at,
                                                 const temperature &t, chunk_sums<EXTRA> &sum) {
    exp_parts e_p = exp_split(z_p, t), e_q = exp_split(z_q, t);
    float k_p = e_p.k - at.c_p, k_q = e_q.k - at.c_q;
    float scale_p = exp2_fast(k_p), scale_q = exp2_fast(k_q);
    sum.p += scale_p;
    sum.q += scale_q;
    sum.p_low = fmaf(scale_p, e_p.w, sum.p_low);
    sum.q_low = fmaf(scale_q, e_q.w, sum.q_low);
    float a = fmaf(scale_p, e_p.w, scale_p), u = (k_p - k_q) + (e_p.r - e_q.r);
    sum.u = fmaf(a, u, sum.u);
    if (EXTRA == REVERSE)
        sum.extra = fmaf(fmaf(scale_q, e_q.w, scale_q), u, sum.extra);
    if (EXTRA == ENTROPY)
        sum.extra = fmaf(a, k_q + e_q.r, sum.extra);
    if (EXTRA == SQUARES)
        sum.extra = fmaf(__fmul_rn(a, u), u, sum.extra);
}

static __device__ __forceinline__ void fast_roughly(float z_p, float z_q, const reference &at,
                                                    const temperature &t, chunk_sums<ROUGH> &sum) {
    const rough_side p(z_p, at.c_p, t), q(z_q, at.c_q, t);
    float u = (p.k - q.k) + (p.r - q.r), part = __fmul_rn(p.power, u);
    sum.p += p.power;
    sum.q += q.power;
    sum.u += part;
    sum.extra = fmaf(part, u, sum.extra);
}

template <int EXTRA>
static __device__ __forceinline__ void fast_16(float z_p, float z_q, const reference &at,
                                               const temperature &t, chunk_sums<EXTRA> &sum) {
    float x_p = fmaf(z_p, t.scale.high, -at.c_p), x_q = fmaf(z_q, t.scale.high, -at.c_q);
    float a = exp2_fast(x_p), b = exp2_fast(x_q), u = x_p - x_q;
    sum.p += a;
    sum.q += b;
    sum.u = fmaf(a, u, sum.u);
    if (EXTRA == REVERSE)
        sum.extra = fmaf(b, u, sum.extra);
    if (EXTRA == ENTROPY)
        sum.extra = fmaf(a, x_q, sum.extra);
}

/* What classes above the limit add, in FP64. */
struct heavy_sums {
    double sum[4];
};
template <class T, int EXTRA>
static __device__ __forceinline__ void add_heavy(heavy_sums &to, float z_p, float z_q,
                                                 const reference &at, const temperature &t) {
    /* 16 bits take the scale by its high part alone */
    double scale = (double)t.scale.high + (sizeof(T) == 4 ? (double)t.scale.low : 0.0);
    double x_p = fma((double)z_p, scale, -(double)at.c_p);
    double x_q = fma((double)z_q, scale, -(double)at.c_q);
    /* So far above the reference that a sum against another one would lose it: infinite, so that
     * the row is judged not good. */
    double a = x_p > HEAVY_MOST ? CUDART_INF : wide_exp2(x_p);
    double b = x_q > HEAVY_MOST ? CUDART_INF : wide_exp2(x_q), u = x_p - x_q;
    to.sum[0] += a;
    to.sum[1] += b;
    to.sum[2] += a * u;
    if (EXTRA == REVERSE)
        to.sum[3] += b * u;
    if (EXTRA == ENTROPY)
        to.sum[3] += a * x_q;
    if (EXTRA >= SQUARES)
        to.sum[3] += a * u * u;
}
template <class T, int EXTRA>
static __device__ __noinline__ heavy_sums heavy_terms(uint4 raw_p, uint4 raw_q, uint32_t left,
                                                      reference at, temperature t) {
    constexpr int V = packet<T>::V;
    heavy_sums to = {{0, 0, 0, 0}};
    float z_p[V], z_q[V];
    unpack<T>(raw_p, z_p);
    unpack<T>(raw_q, z_q);
#pragma unroll 1
    for (int i = 0; i < V; i++)
        if (i < left && !(z_p[i] <= at.limit_p && z_q[i] <= at.limit_q))
            add_heavy<T, EXTRA>(to, z_p[i], z_q[i], at, t);
    return to;
}

/* The classes of a vector that count by themselves are not to be added otherwise. */
template <class T>
static __device__ __forceinline__ void take_out(const reference &at, pair_of<T> &z) {
#pragma unroll
    for (int i = 0; i < packet<T>::V; i++)
        if (!(z.p[i] <= at.limit_p && z.q[i] <= at.limit_q)) {
            z.p[i] = at.pad_p;
            z.q[i] = at.pad_q;
        }
}

template <int EXTRA>
static __device__ __forceinline__ void add_to(double (&total)[4], const heavy_sums &more) {
#pragma unroll
    for (int i = 0; i < (EXTRA == NOTHING ? 3 : 4); i++)
        total[i] += more.sum[i];
}

template <class T, int EXTRA>
static __device__ __forceinline__ void fast_pairs(const pair_of<T> &z, const reference &at,
                                                  const temperature &t, chunk_sums<EXTRA> &sum) {
#pragma unroll
    for (int i = 0; i < packet<T>::V; i++)
        if constexpr (EXTRA == ROUGH)
            fast_roughly(z.p[i], z.q[i], at, t, sum);
        else if constexpr (sizeof(T) == 4)
            fast_fp32(z.p[i], z.q[i], at, t, sum);
        else
            fast_16(z.p[i], z.q[i], at, t, sum);
}

/* All that a vector adds, its heavy classes one by one. */
template <class T, int EXTRA>
static __device__ __noinline__ heavy_sums heavy_vector(uint4 raw_p, uint4 raw_q, uint32_t left,
                                                       reference at, temperature t) {
    heavy_sums r = {{0, 0, 0, 0}};
    pair_of<T> z(raw_p, raw_q);
    z.pad(resident::some_of{left}, at.pad_p, at.pad_q);
    top_of<T> top(at);
    if (top.add(resident::some_of{left}, raw_p, raw_q, z, at)) {
        add_to<EXTRA>(r.sum, heavy_terms<T, EXTRA>(raw_p, raw_q, left, at, t));
        take_out(at, z);
    }
    chunk_sums<EXTRA> sum;
    fast_pairs<T, EXTRA>(z, at, t, sum);
    sum.template flush<T>(r.sum);
    return r;
}

/* sum: a, b, a u, and b u or a ln b; logarithms of base 2 and less the references. */
template <class T, int EXTRA, bool SHIFTED>
static __device__ __forceinline__ void fast_of(const resident::slice &slice, const temperature &t,
                                               const reference &at, uint32_t ring, bool release) {
    constexpr int V = packet<T>::V;
    double total[4] = {0, 0, 0, 0};
    chunk_sums<EXTRA> sum;
    top_of<T> top(at);
    /* Vectors with heavy classes, of the chunk at hand: a call would spill the loop's registers. */
    uint32_t heavy = 0;
    slice.template pass_of<SHIFTED, true>(
        V,
        [&](uint32_t vector, auto left, const uint4 &raw_p, const uint4 &raw_q) {
            pair_of<T> z(raw_p, raw_q);
            z.pad(left, at.pad_p, at.pad_q);
            if (top.add(left, raw_p, raw_q, z, at)) {
                heavy |= 1u << slice.step_of(vector);
                take_out(at, z);
            }
            fast_pairs<T, EXTRA>(z, at, t, sum);
        },
        [&](uint32_t chunk) {
            sum.template flush<T>(total);
            for (; heavy; heavy &= heavy - 1) {
                uint4 raw_p = {}, raw_q = {};
                uint32_t left = slice.template vector_of<SHIFTED>(
                    chunk, (uint32_t)__ffs((int)heavy) - 1, V, raw_p, raw_q);
                add_to<EXTRA>(total, heavy_terms<T, EXTRA>(raw_p, raw_q, left, at, t));
            }
            if (release)
                slice.release(chunk);
        });
    resident::block_shared &block = resident::here();
    top.store(block.tops[ring][resident::group_thread() / 32]);
    resident::store_sums(block.sums[ring][resident::group_thread() / 32], total);
    if (arrives_for_warp())
        barrier_arrive(&block.found[ring]);
}

template <class T, int EXTRA>
static __device__ __forceinline__ void fast(const resident::slice &slice, const temperature &t,
                                            const reference &at, uint32_t ring, bool release) {
    if (slice.shift_p || slice.shift_q)
        fast_of<T, EXTRA, true>(slice, t, at, ring, release);
    else
        fast_of<T, EXTRA, false>(slice, t, at, ring, release);
}

/* The same by any slice, all of which has come. */
template <class T, int EXTRA, class SLICE>
static __device__ __noinline__ part fast_again(SLICE slice, temperature t, reference at) {
    part mine = {{0, 0, 0, 0},
                 {reference::mark(at.c_p, at.top_p, at.limit_p, t.scale.high),
                  reference::mark(at.c_q, at.top_q, at.limit_q, t.scale.high)},
                 {}};
    slice.template pass<T>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
        add_to<EXTRA>(mine.sum, heavy_vector<T, EXTRA>(raw_p, raw_q, left.left, at, t));
    });
    return mine;
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
