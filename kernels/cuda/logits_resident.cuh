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
static __device__ __forceinline__ void
write_difference(const place &at, resident::slice &slice, const difference_row &row,
                 const temperature &t, char *to, bool whole) {
    constexpr int V = packet<T>::V;
    slice.last_pass(V, [&](uint32_t vector, uint32_t left, const uint4 &raw_p, const uint4 &raw_q) {
        float z_p[V], z_q[V];
        unpack<T>(raw_p, z_p);
        unpack<T>(raw_q, z_q);
#pragma unroll
        for (int i = 0; i < V; i++)
            if constexpr (sizeof(T) == 4)
                z_q[i] = difference_fp32<CLASSES_OUT>(z_p[i], z_q[i], row, t);
            else
                z_q[i] = difference_16<CLASSES_OUT>(z_p[i], z_q[i], row, t);
        resident::put<T>(at, to, whole, vector, left, z_q);
    });
}

/* ---- a row ------------------------------------------------------------------------------------
 */

/* The slot, and how often it has been used. */
struct progress {
    uint32_t slot, turn;
};

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
    slice_of(const place &at, const resident::row_info &info, const progress &progress) {
        uint32_t first = progress.slot * at.chunks;
        resident::slice slice;
        slice.p = at.tensor(progress.slot, 0) + 16 * threadIdx.x;
        slice.q = at.tensor(progress.slot, 1) + 16 * threadIdx.x;
        slice.odd_p = info.odd_p;
        slice.odd_q = info.odd_q;
        slice.count = at.count;
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
    static __device__ __forceinline__ double
    one_row(const kld_cuda_args &args, const place &at, const resident::row_info &info,
            resident::slice &slice, const temperature &t, float span, bool divides,
            row_shared *shared, team_shared *team_shared, uint32_t &exchanges) {
        double value = 0, weight = 0, factor = 0;
        if (threadIdx.x < 32) { /* its loads are on their way during the pass */
            row row = row_open(args, info.index);
            weight = row.weight;
            factor = row.gradient * args.inverse_temperature;
        }
        char *to = info.gradient;
        bool whole = info.flags & resident::ROW_WHOLE;
        logits_stats::fast<T, EXTRA>(at, slice, t, span, exchanges);
        if (threadIdx.x < 32)
            value = settle<true>(args, at, factor, exchanges, shared);
        exchanges++;
        block_sync(1, resident::COMPUTING);
        if (shared->way == AGAIN) {
            logits_stats::careful<T, EXTRA>(at, slice, t, span, exchanges);
            if (threadIdx.x < 32)
                value = settle<false>(args, at, factor, exchanges, shared);
            exchanges++;
            block_sync(1, resident::COMPUTING);
        }
        enum way way = shared->way;
        if (way == ANY) {
            uint64_t index = info.index;
            slice.release();
            value = at.rank == 0 ? row_by_any(args, index, team_shared) : 0.0;
            if (!divides && at.rank == 0) {
                block_sync(1, resident::COMPUTING);
                resident::clear<T>(at_row(args.grad_q, index), (uint32_t)args.classes, threadIdx.x,
                                   resident::COMPUTING);
            }
        } else if (to && divides) {
            difference_row numbers = shared->numbers;
            if (way == CAREFUL)
                write_difference<T, true>(at, slice, numbers, t, to, whole);
            else
                write_difference<T, false>(at, slice, numbers, t, to, whole);
        } else {
            slice.release();
            resident::clear<T>(to, at.count, threadIdx.x, resident::COMPUTING);
        }
        return value * weight;
    }

    static __device__ void compute(const kld_cuda_args &args, const place &at) {
        __shared__ row_shared shared;
        __shared__ team_shared team_shared;
        temperature t(args.inverse_temperature);
        float span = (float)(300.0 / (args.inverse_temperature * LOG2_E));
        /* Where weights sum to 0 gradients are 0. */
        bool divides = args.divisor != 0 || args.scratch->divisor != 0;
        progress progress = {0, 0};
        uint32_t exchanges = 0;
        double total = 0; /* of the group; the first thread's */
        uint64_t group = UINT64_MAX;
        for (;;) {
            barrier_wait(&at.shared->full[progress.slot * at.chunks], progress.turn & 1);
            const resident::row_info &info = at.shared->info[progress.slot];
            if (info.flags & resident::ROW_END)
                break;
            resident::slice slice = slice_of(at, info, progress);
            uint64_t index = info.index, its_group = info.group;
            if (++progress.slot == at.slots) {
                progress.slot = 0;
                progress.turn++;
            }
            double value =
                one_row(args, at, info, slice, t, span, divides, &shared, &team_shared, exchanges);
            if (at.rank == 0 && threadIdx.x == 0) {
                row_store(args, index, value);
                total = its_group == group ? total + value : value;
                group = its_group;
                args.scratch->partial[args.first_group + group] = total;
            }
        }
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
