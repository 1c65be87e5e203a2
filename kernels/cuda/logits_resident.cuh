/* logits_resident.cuh - rows of logits, both tensors of one dtype, held in shared memory: one read
 * of the row pair gives loss and gradients. This file: the gradient by q's logits of KL(p, q) and
 * of the cross entropy, w (q - p), which needs one pass after the statistics. */
#ifndef KLD_KERNELS_CUDA_LOGITS_RESIDENT_CUH
#define KLD_KERNELS_CUDA_LOGITS_RESIDENT_CUH

#include "kernels/cuda/any.cuh"
#include "kernels/cuda/logits_stats.cuh"

namespace logits_resident {

using logits_stats::row_stats;
using resident::part;
using resident::place;

/* What the warps of a block share between a row's passes. */
struct row_shared {
    row_stats stats;
};

/* ---- q - p ------------------------------------------------------------------------------------
 */

/* The numbers of a row that one pair needs; factor: of the gradient. */
struct difference_row {
    float c_p, c_q;
    two_floats factor_p, factor_q; /* 1 / sum, times the factor */
    two_floats shift;

    __device__ __forceinline__ difference_row(const row_stats &row, double factor)
        : c_p((float)row.c_p), c_q((float)row.c_q), factor_p(row.inverse_p * factor),
          factor_q(row.inverse_q * factor), shift(row.shift) {}
};

/* factor (q - p) in FP32. CLASSES_OUT: logits of -inf may come. */
template <bool CLASSES_OUT>
static __device__ __forceinline__ float
difference_fp32(float z_p, float z_q, const difference_row &row, const temperature &t) {
    two_floats u = subtract(z_p, z_q);
    float d = fmaf(u.high, t.inverse.high, -row.shift.high);
    float rest = fmaf(u.low, t.inverse.high, fmaf(u.high, t.inverse.low, -row.shift.low));
    if (CLASSES_OUT)
        d = fabsf(d) < CUDART_INF_F ? d + rest : d;
    else
        d += rest;
    bool more_q = d < 0.0f; /* q > p */
    float z = more_q ? z_q : z_p, c = more_q ? row.c_q : row.c_p;
    float high = more_q ? row.factor_q.high : -row.factor_p.high;
    float low = more_q ? row.factor_q.low : -row.factor_p.low;
    exp_parts e = exp_split(z, t);
    float mass = (high + fmaf(e.w, high, low)) * exp2_fast(e.k - c);
    float g = mass * one_minus_exp(fabsf(d));
    if (CLASSES_OUT)
        g = z == -CUDART_INF_F ? 0.0f : g;
    return g;
}

/* factor (q - p) to 3e-5 of itself: enough for 16 bits. */
template <bool CLASSES_OUT>
static __device__ __forceinline__ float
difference_16(float z_p, float z_q, const difference_row &row, const temperature &t) {
    float p = exp2_fast(fmaf(z_p, t.scale.high, -row.c_p));
    float q = exp2_fast(fmaf(z_q, t.scale.high, -row.c_q)) * row.factor_q.high;
    float d = fmaf(z_p - z_q, t.inverse.high, -row.shift.high) - row.shift.low;
    float g = fmaf(p, -row.factor_p.high, q);
    /* q (1 - e^d) for small d */
    float y = fmaf(fmaf(d, 1.0f / 6, 0.5f), d, 1.0f);
    return fabsf(d) < 0.0625f ? (q * -d) * y : g;
}

template <class T, bool CLASSES_OUT>
static __device__ __forceinline__ void write_difference(const place &at, resident::slice &slice,
                                                        const difference_row &row,
                                                        const temperature &t, char *to) {
    constexpr int V = packet<T>::V;
    bool whole = aligned16<T>(to);
    slice.pass<true>(
        [&](uint32_t vector, const uint4 &raw_p, const uint4 &raw_q) {
            float z_p[V], z_q[V];
            unpack<T>(raw_p, z_p);
            unpack<T>(raw_q, z_q);
#pragma unroll
            for (int i = 0; i < V; i++)
                if constexpr (sizeof(T) == 4)
                    z_q[i] = difference_fp32<CLASSES_OUT>(z_p[i], z_q[i], row, t);
                else
                    z_q[i] = difference_16<CLASSES_OUT>(z_p[i], z_q[i], row, t);
            resident::put<T>(at, to, whole, vector, z_q);
        },
        [] {});
}

/* ---- a row ------------------------------------------------------------------------------------
 */

/* Counts the exchanges; the slot and the phase of the barriers. */
struct progress {
    uint32_t exchanges = 0, slot = 0, turn = 0;
};

static __device__ __forceinline__ void share(row_shared *shared, const row_stats &stats) {
    if (threadIdx.x == 0)
        shared->stats = stats;
    block_sync(1, resident::COMPUTING);
}

/* The statistics of the row, by both ways if need be. */
template <class T, int EXTRA>
static __device__ __forceinline__ row_stats statistics(const kld_cuda_args &args, const place &at,
                                                       resident::slice &slice, const temperature &t,
                                                       row_shared *shared, progress &progress,
                                                       bool *ret_careful) {
    float span = (float)(300.0 / (args.inverse_temperature * LOG2_E));
    uint32_t parts = at.cluster * resident::WARPS;
    part mine = logits_stats::fast<T, EXTRA>(slice, t, span);
    const part *all = resident::exchange(at, mine, progress.exchanges++);
    row_stats stats;
    if (threadIdx.x < 32)
        stats = logits_stats::fast_row<EXTRA>(all, parts, logits_stats::FAST_MIN<T>);
    share(shared, stats);
    stats = shared->stats;
    *ret_careful = !stats.good;
    if (stats.good)
        return stats;
    mine = logits_stats::careful<T, EXTRA>(slice, t, span); /* a copy: registers keep theirs */
    all = resident::exchange(at, mine, progress.exchanges++);
    if (threadIdx.x < 32)
        stats = logits_stats::careful_row<EXTRA>(all, parts, args.inverse_temperature);
    share(shared, stats);
    return shared->stats;
}

/* What no fast way serves: the first block of the cluster takes the whole row. */
static __device__ __noinline__ double row_by_any(const kld_cuda_args &args, uint64_t index,
                                                 team_shared *shared) {
    team team;
    team.size = resident::COMPUTING;
    team.lane = threadIdx.x;
    team.mask = KLD_FULL_WARP;
    team.shared = shared;
    return any_body::value(args, row_open(args, index), team);
}

template <class T, bool ENTROPY> struct difference_body {
    typedef T type;
    static constexpr int EXTRA = ENTROPY ? logits_stats::ENTROPY : logits_stats::NOTHING;

    static __device__ __forceinline__ double one_row(const kld_cuda_args &args, const place &at,
                                                     const row &row, uint64_t index,
                                                     const temperature &t, row_shared *shared,
                                                     team_shared *team_shared, progress &progress) {
        uint32_t first = progress.slot * at.chunks;
        resident::slice slice;
        slice.p = at.tensor(progress.slot, 0);
        slice.q = at.tensor(progress.slot, 1);
        slice.odd_p = resident::is_odd(row.p);
        slice.odd_q = resident::is_odd(row.q);
        slice.count = at.count;
        slice.vectors = (at.count + packet<T>::V - 1) / packet<T>::V;
        slice.chunks = at.chunks;
        slice.full = &at.shared->full[first];
        slice.empty = &at.shared->empty[first];
        slice.parity = progress.turn & 1;
        slice.arrived = false;
        bool careful;
        row_stats stats = statistics<T, EXTRA>(args, at, slice, t, shared, progress, &careful);
        if (++progress.slot == at.slots) {
            progress.slot = 0;
            progress.turn++;
        }
        if (!stats.good) {
            slice.release();
            return at.rank == 0 ? row_by_any(args, index, team_shared) : 0.0;
        }
        double weight = ENTROPY ? 1.0 : args.rule.of_p;
        if (row.grad_q) {
            double factor = row.gradient * args.inverse_temperature * weight;
            difference_row numbers(stats, factor);
            char *to = row.grad_q + (uint64_t)at.rank * at.slice * sizeof(T);
            if (careful)
                write_difference<T, true>(at, slice, numbers, t, to);
            else
                write_difference<T, false>(at, slice, numbers, t, to);
        } else {
            slice.release();
        }
        return weight * (ENTROPY ? stats.entropy : stats.forward);
    }

    static __device__ void compute(const kld_cuda_args &args, const place &at) {
        __shared__ row_shared shared;
        __shared__ team_shared team_shared;
        temperature t(args.inverse_temperature);
        team zeroing = {at.rank * resident::COMPUTING + threadIdx.x,
                        at.cluster * resident::COMPUTING, KLD_FULL_WARP, nullptr};
        progress progress;
        double total = 0;
        resident::each_row(args, at, [&](uint64_t index, uint64_t group, bool last) {
            bool masked = row_is_masked(args, index);
            double value = 0;
            if (!masked) {
                row row = row_open(args, index);
                value =
                    row.weight * one_row(args, at, row, index, t, &shared, &team_shared, progress);
            }
            row_zero(args, index, masked, zeroing);
            if (at.rank == 0 && threadIdx.x == 0) {
                row_store(args, index, value);
                total += value;
                if (last) {
                    args.scratch->partial[args.first_group + group] = total;
                    total = 0;
                }
            }
        });
    }
};

template <class BODY, int BLOCKS>
static __global__ void __launch_bounds__(resident::THREADS, BLOCKS)
    kernel(const __grid_constant__ kld_cuda_args args) {
    resident::run<BODY>(args);
}

/* Blocks of THREADS threads on one multiprocessor: as many as registers allow, so that one waits
 * while another computes. */
template <class BODY, int BLOCKS>
static cudaError_t launch(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    auto function = kernel<BODY, BLOCKS>;
    size_t shared = resident::bytes(args, sizeof(typename BODY::type));
    cudaError_t error =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (!error && args.cluster > 8)
        error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error)
        return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {args.cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(args.cluster);
    config.blockDim = dim3(resident::THREADS);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, function, &config);
    if (error)
        return error;
    uint32_t used = groups < (uint32_t)clusters ? groups : (uint32_t)clusters;
    config.gridDim = dim3((used ? used : 1) * args.cluster);
    return cudaLaunchKernelEx(&config, function, args);
}

template <class T>
static cudaError_t launch_rows(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    constexpr int BLOCKS = sizeof(T) == 4 ? 2 : 3;
    return args.rule.kind == KLD_RULE_CROSS_ENTROPY
               ? launch<difference_body<T, true>, BLOCKS>(args, groups, stream)
               : launch<difference_body<T, false>, BLOCKS>(args, groups, stream);
}

} /* namespace logits_resident */
#endif
