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

/* ---- q - p ------------------------------------------------------------------------------------
 */

/* The numbers of a row that one pair needs; factor: of the gradient. */
struct difference_row {
    float c_p, c_q;
    two_floats factor_p, factor_q; /* 1 / sum, times the factor */
    two_floats shift;

    __device__ __forceinline__ difference_row() {}
    __device__ __forceinline__ difference_row(const row_stats &row, double factor)
        : c_p((float)row.c_p), c_q((float)row.c_q), factor_p(row.inverse_p * factor),
          factor_q(row.inverse_q * factor), shift(row.shift) {}
};

/* What the first warp tells the others. */
enum way { FAST, AGAIN, CAREFUL, ANY };
struct row_shared {
    difference_row numbers;
    enum way way;
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

/* Counts the exchanges; the slot and the phase of its barriers. */
struct progress {
    uint32_t exchanges, slot, turn;
};

/* Where weights sum to 0 gradients are 0, and row_zero() writes them. */
static __device__ __forceinline__ bool divides(const kld_cuda_args &args) {
    return args.divisor != 0 || args.scratch->divisor != 0;
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

    static __device__ __forceinline__ resident::slice
    slice_of(const kld_cuda_args &args, const place &at, uint64_t index, const progress &progress) {
        uint32_t first = progress.slot * at.chunks;
        resident::slice slice;
        slice.p = at.tensor(progress.slot, 0);
        slice.q = at.tensor(progress.slot, 1);
        slice.odd_p = resident::is_odd(at_row(args.p, index));
        slice.odd_q = resident::is_odd(at_row(args.q, index));
        slice.count = at.count;
        slice.vectors = (at.count + packet<T>::V - 1) / packet<T>::V;
        slice.chunks = at.chunks;
        slice.full = &at.shared->full[first];
        slice.empty = &at.shared->empty[first];
        slice.parity = progress.turn & 1;
        slice.arrived = false;
        return slice;
    }

    /* First warp: from all warps' parts to what the others need. Returns the row's value. */
    template <bool FIRST>
    static __device__ __forceinline__ double settle(const kld_cuda_args &args, const place &at,
                                                    double factor, uint32_t turn,
                                                    row_shared *shared) {
        const part *parts = resident::wait_for_parts(at, turn);
        uint32_t count = at.cluster * resident::WARPS;
        double weight = ENTROPY ? 1.0 : args.rule.of_p;
        row_stats stats =
            FIRST ? logits_stats::fast_row<EXTRA>(parts, count, logits_stats::FAST_MIN<T>)
                  : logits_stats::careful_row<EXTRA>(parts, count, args.inverse_temperature);
        if (threadIdx.x == 0) {
            shared->numbers = difference_row(stats, factor * weight);
            shared->way = FIRST ? (stats.good ? FAST : AGAIN) : stats.good ? CAREFUL : ANY;
        }
        return weight * (ENTROPY ? stats.entropy : stats.forward);
    }

    /* Returns the row's value to the first thread of the cluster. */
    static __device__ __forceinline__ double one_row(const kld_cuda_args &args, const place &at,
                                                     uint64_t index, const temperature &t,
                                                     float span, row_shared *shared,
                                                     team_shared *team_shared, progress &progress) {
        resident::slice slice = slice_of(args, at, index, progress);
        if (++progress.slot == at.slots) {
            progress.slot = 0;
            progress.turn++;
        }
        double value = 0, weight = 0, factor = 0;
        if (threadIdx.x < 32) { /* its loads are on their way during the pass */
            row row = row_open(args, index);
            weight = row.weight;
            factor = row.gradient * args.inverse_temperature;
        }
        logits_stats::fast<T, EXTRA>(at, slice, t, span, progress.exchanges);
        if (threadIdx.x < 32)
            value = settle<true>(args, at, factor, progress.exchanges, shared);
        progress.exchanges++;
        block_sync(1, resident::COMPUTING);
        if (shared->way == AGAIN) {
            logits_stats::careful<T, EXTRA>(at, slice, t, span, progress.exchanges);
            if (threadIdx.x < 32)
                value = settle<false>(args, at, factor, progress.exchanges, shared);
            progress.exchanges++;
            block_sync(1, resident::COMPUTING);
        }
        enum way way = shared->way;
        difference_row numbers = shared->numbers;
        char *to = at_row(args.grad_q, index);
        if (way == ANY) {
            slice.release();
            value = at.rank == 0 ? row_by_any(args, index, team_shared) : 0.0;
        } else if (to && divides(args)) {
            to += (uint64_t)at.rank * at.slice * sizeof(T);
            if (way == CAREFUL)
                write_difference<T, true>(at, slice, numbers, t, to);
            else
                write_difference<T, false>(at, slice, numbers, t, to);
        } else {
            slice.release();
        }
        return value * weight;
    }

    static __device__ void compute(const kld_cuda_args &args, const place &at) {
        __shared__ row_shared shared;
        __shared__ team_shared team_shared;
        __shared__ double total; /* of the group; the first thread's */
        temperature t(args.inverse_temperature);
        float span = (float)(300.0 / (args.inverse_temperature * LOG2_E));
        progress progress = {0, 0, 0};
        if (threadIdx.x == 0)
            total = 0;
        resident::each_row(args, at, [&](uint64_t index, uint64_t group, bool last) {
            bool masked = row_is_masked(args, index);
            double value =
                masked ? 0.0 : one_row(args, at, index, t, span, &shared, &team_shared, progress);
            if (masked || !divides(args)) {
                team zeroing = {at.rank * resident::COMPUTING + threadIdx.x,
                                at.cluster * resident::COMPUTING, KLD_FULL_WARP, nullptr};
                row_zero(args, index, masked, zeroing);
            }
            if (at.rank == 0 && threadIdx.x == 0) {
                row_store(args, index, value);
                double sum = total + value;
                if (last)
                    args.scratch->partial[args.first_group + group] = sum;
                total = last ? 0.0 : sum;
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
