/* logits_merge.cuh - from what each warp has found in its part of a row of logits
 * (logits_stats.cuh) to the row: parts are put together, and the row's numbers made of the one that
 * is left, by a warp or, of many rows at a time, by a thread each. Also says whether the sums do at
 * all. */
#ifndef KLD_KERNELS_CUDA_LOGITS_MERGE_CUH
#define KLD_KERNELS_CUDA_LOGITS_MERGE_CUH

#include "kernels/cuda/logits_stats.cuh"

namespace logits_stats {
inline namespace KLD_CUDA_TEAM {

/* As FAST_MIN, of the values of FP32 mixtures, of which the square of such an error shows. */
static constexpr double MIXTURE_MIN = 1e-5;

/* 2^x, 0 far below. */
static __device__ __forceinline__ double power_of_2(int x) {
    return x < -1000 ? 0.0 : __hiloint2double((1023 + min(x, 1000)) << 20, 0);
}

/* Part number `lane`; beyond `count` one without classes. */
static __device__ __forceinline__ part lane_part(const part *parts, uint32_t count, unsigned lane) {
    return lane < count ? parts[lane]
                        : part{{0, 0, 0, 0},
                               {reference::NO_MARK, reference::NO_MARK},
                               {-CUDART_INF_F, -CUDART_INF_F}};
}

/* The sums of all lanes, to all of them. */
static __device__ __forceinline__ void sums_of(part &to, const double (&x)[4]) {
    double sum = resident::warp_sums(x);
#pragma unroll
    for (int i = 0; i < 4; i++)
        to.sum[i] = __shfl_sync(KLD_FULL_WARP, sum, 8 * i);
}
/* The same, to the bit, where eight lanes after eight lanes have the same, of which but the first
 * `count` are 0: each eight take a sum. */
static __device__ __forceinline__ void sums_of_few(part &to, const double (&x)[4], uint32_t count) {
    const unsigned lane = threadIdx.x % 32;
    double sum = lane & 8 ? lane & 16 ? x[3] : x[1] : lane & 16 ? x[2] : x[0];
    if (count > 4)
        sum += __shfl_xor_sync(KLD_FULL_WARP, sum, 4);
    if (count > 2)
        sum += __shfl_xor_sync(KLD_FULL_WARP, sum, 2);
    sum += __shfl_xor_sync(KLD_FULL_WARP, sum, 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
        to.sum[i] = __shfl_sync(KLD_FULL_WARP, sum, 8 * i);
}

/* sum a u^2, with u against other references. */
static __device__ __forceinline__ double squares_by(const double (&sum)[4], double by) {
    return sum[3] + by * (2.0 * sum[2] + by * sum[0]);
}

/* One warp: up to 32 parts to one, in all its lanes. */
template <int EXTRA>
static __device__ __forceinline__ part fast_merge(const part *parts, uint32_t count) {
    constexpr uint32_t FEW = 8;
    part from = lane_part(parts, count, threadIdx.x % (count <= FEW ? FEW : 32)), to;
    to.mark[0] = __reduce_max_sync(KLD_FULL_WARP, from.mark[0]);
    to.mark[1] = __reduce_max_sync(KLD_FULL_WARP, from.mark[1]);
    to.top[0] = warp_max(from.top[0]);
    to.top[1] = warp_max(from.top[1]);
    int by_p = reference::mark_c(from.mark[0]) - reference::mark_c(to.mark[0]);
    int by_q = reference::mark_c(from.mark[1]) - reference::mark_c(to.mark[1]);
    int above_p = __reduce_max_sync(KLD_FULL_WARP, reference::mark_above(from.mark[0]) + by_p);
    int above_q = __reduce_max_sync(KLD_FULL_WARP, reference::mark_above(from.mark[1]) + by_q);
    to.mark[0] = reference::mark(reference::mark_c(to.mark[0]), above_p);
    to.mark[1] = reference::mark(reference::mark_c(to.mark[1]), above_q);
    double scale_p = power_of_2(by_p), scale_q = power_of_2(by_q);
    double x[4] = {scale_p * from.sum[0], scale_q * from.sum[1],
                   scale_p * (from.sum[2] + from.sum[0] * (double)(by_p - by_q)), 0.0};
    if (EXTRA == REVERSE)
        x[3] = scale_q * (from.sum[3] + from.sum[1] * (double)(by_p - by_q));
    if (EXTRA == ENTROPY)
        x[3] = scale_p * (from.sum[3] + from.sum[0] * (double)by_q);
    if (EXTRA >= SQUARES)
        x[3] = scale_p * squares_by(from.sum, (double)(by_p - by_q));
    if (count <= FEW)
        sums_of_few(to, x, count);
    else
        sums_of(to, x);
    return to;
}

/* The same of a group's warps that have counted from the same reference, and have no marks yet. */
static __device__ __forceinline__ part fast_merge_alike(const part *parts, const reference &at,
                                                        float scale) {
    constexpr unsigned WARPS = resident::GROUP_WARPS;
    static_assert(WARPS <= 8 && 32 % WARPS == 0, "a lane for each sum");
    unsigned lane = threadIdx.x % 32;
    part to;
    double sum = parts[lane / 4 % WARPS].sum[lane % 4];
#pragma unroll
    for (unsigned step = 4; step < 4 * WARPS; step *= 2)
        sum += __shfl_xor_sync(KLD_FULL_WARP, sum, step);
#pragma unroll
    for (int i = 0; i < 4; i++)
        to.sum[i] = __shfl_sync(KLD_FULL_WARP, sum, i);
#pragma unroll
    for (int i = 0; i < 2; i++)
        to.top[i] = warp_max(parts[lane % WARPS].top[i]);
    to.mark[0] = reference::mark(at.c_p, to.top[0], at.limit_p, scale);
    to.mark[1] = reference::mark(at.c_q, to.top[1], at.limit_q, scale);
    return to;
}

/* Of ROUGH: are there exponentials beyond what rough_side can do? Then the part is to spoil the
 * row, also where other blocks' references are so far above that its own would vanish. */
static __device__ __forceinline__ void spoil_if_above(part &part) {
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (reference::mark_above(part.mark[i]) > 120)
            part.sum[i] = CUDART_INF;
}

/* One thread: `count` parts, of which get(i) is one, to one. */
template <int EXTRA, class GET>
static __device__ __forceinline__ part fast_merge_by_one(uint32_t count, GET get) {
    part to = get(0);
    for (uint32_t i = 1; i < count; i++) {
        const part from = get(i);
        double sum[4] = {0, 0, 0, 0};
        int c_p = max(reference::mark_c(to.mark[0]), reference::mark_c(from.mark[0]));
        int c_q = max(reference::mark_c(to.mark[1]), reference::mark_c(from.mark[1]));
        int above_p = INT32_MIN, above_q = INT32_MIN;
        auto add = [&](const part &x) {
            int by_p = reference::mark_c(x.mark[0]) - c_p,
                by_q = reference::mark_c(x.mark[1]) - c_q;
            double scale_p = power_of_2(by_p), scale_q = power_of_2(by_q);
            above_p = max(above_p, reference::mark_above(x.mark[0]) + by_p);
            above_q = max(above_q, reference::mark_above(x.mark[1]) + by_q);
            sum[0] += scale_p * x.sum[0];
            sum[1] += scale_q * x.sum[1];
            sum[2] += scale_p * (x.sum[2] + x.sum[0] * (double)(by_p - by_q));
            if (EXTRA == REVERSE)
                sum[3] += scale_q * (x.sum[3] + x.sum[1] * (double)(by_p - by_q));
            if (EXTRA == ENTROPY)
                sum[3] += scale_p * (x.sum[3] + x.sum[0] * (double)by_q);
            if (EXTRA >= SQUARES)
                sum[3] += scale_p * squares_by(x.sum, (double)(by_p - by_q));
        };
        add(to);
        add(from);
#pragma unroll
        for (int k = 0; k < 4; k++)
            to.sum[k] = sum[k];
        to.mark[0] = reference::mark(c_p, above_p);
        to.mark[1] = reference::mark(c_q, above_q);
        to.top[0] = fmaxf(to.top[0], from.top[0]);
        to.top[1] = fmaxf(to.top[1], from.top[1]);
    }
    return to;
}

/* What takes long of one side of a row: by one thread. */
struct fast_side {
    double inverse, logarithm; /* of its sum */
    bool heavy, above; /* its largest class that did not count by itself: too heavy; far above
                          what was known of it */

    __device__ __forceinline__ fast_side() {}
    __device__ __forceinline__ fast_side(double sum, int32_t mark)
        : inverse(wide_reciprocal(sum)), logarithm(wide_log(sum, sum - 1.0)) {
        float powers = (float)reference::mark_above(mark);
        heavy = exp2_fast(powers) > HEAVY_PART * (float)sum;
        above = powers > HEAVY_ABOVE;
    }
    __device__ __forceinline__ fast_side from(int lane) const {
        fast_side r;
        r.inverse = __shfl_sync(KLD_FULL_WARP, inverse, lane);
        r.logarithm = __shfl_sync(KLD_FULL_WARP, logarithm, lane);
        int both = __shfl_sync(KLD_FULL_WARP, heavy + 2 * above, lane);
        r.heavy = both & 1;
        r.above = both & 2;
        return r;
    }
};

/* How rows are judged. stretch: 1 but for what rounding left of the scale that was used: a
 * logarithm of a sum is that much larger, but for the entropies, of which the sides' are alike. */
struct fast_bounds {
    double least, most, heavy_min, stretch, shift;
};

/* The row from the only part that is left, and its sides. shift: NaN where the sums do not tell. */
template <int EXTRA>
static __device__ __forceinline__ row_stats fast_row(const part &all, const fast_side &p,
                                                     const fast_side &q,
                                                     const fast_bounds &bounds) {
    row_stats row;
    row.c_p = reference::mark_c(all.mark[0]);
    row.c_q = reference::mark_c(all.mark[1]);
    row.apart = 0.0f;
    row.is_careful = false;
    row.log_p = p.logarithm;
    row.log_q = q.logarithm;
    row.inverse_p = p.inverse;
    row.inverse_q = q.inverse;
    double ratio = p.logarithm - q.logarithm;
    row.shift = ((double)(row.c_p - row.c_q) * LN_2 + ratio) * bounds.stretch;
    double mean = all.sum[2] * row.inverse_p;
    row.forward = mean * LN_2 - ratio;
    row.center = ((double)(row.c_p - row.c_q) + mean) * (LN_2 * bounds.stretch);
    row.reverse = EXTRA == REVERSE ? ratio - all.sum[3] * row.inverse_q * LN_2 : 0.0;
    row.entropy = EXTRA == ENTROPY ? q.logarithm - all.sum[3] * row.inverse_p * LN_2 : 0.0;
    row.variance =
        EXTRA >= SQUARES ? (all.sum[3] * row.inverse_p - mean * mean) * (LN_2 * LN_2) : 0.0;
    /* Judged in FP32, in which a comparison takes no turn of the units for FP64: all that is
     * settled in a row waits for this. */
    const float sum_p = (float)all.sum[0], sum_q = (float)all.sum[1], forward = (float)row.forward;
    const float least = (float)bounds.least, most = (float)bounds.most;
    float small = EXTRA == ENTROPY   ? fminf(forward, (float)row.entropy)
                  : EXTRA == REVERSE ? fminf(forward, (float)row.reverse)
                                     : forward;
    bool doubtful = small >= least && small < (float)bounds.heavy_min;
    row.missed = (p.heavy && (doubtful || p.above)) || (q.heavy && (doubtful || q.above));
    row.good = !row.missed && small >= least && forward < 1e30f && sum_p > 0.25f && sum_p < most &&
               sum_q > 0.25f && sum_q < most && (EXTRA == NOTHING || fabs(all.sum[3]) < 1e300) &&
               fabs(row.shift) <= bounds.shift;
    /* Where the mass is, to look again. */
    row.powers[0] = (float)row.c_p + (float)(p.logarithm * LOG2_E);
    row.powers[1] = (float)row.c_q + (float)(q.logarithm * LOG2_E);
    bool known = sum_p > 1e-20f && sum_q > 1e-20f && sum_p < 1e30f && sum_q < 1e30f;
    if (!row.good && (row.missed || !known))
        row.shift = CUDART_NAN;
    return row;
}
/* The same by a warp, a lane for each side: the first lane's. */
template <int EXTRA>
static __device__ __forceinline__ row_stats fast_row(const part &all, const fast_bounds &bounds) {
    bool is_q = threadIdx.x % 2;
    fast_side mine(is_q ? all.sum[1] : all.sum[0], is_q ? all.mark[1] : all.mark[0]);
    return fast_row<EXTRA>(all, mine, mine.from(1), bounds);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_stats */
#endif
