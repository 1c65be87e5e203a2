/* logits_resident.cuh - rows of logits, both tensors of one dtype, held in shared memory: the way
 * of a row from its statistics to loss and gradients. What is made of the statistics is a BODY:
 *
 *     EXTRA                   the fourth sum of the statistics
 *     numbers                 what its passes need to know of a row, made once by one warp
 *     value(args, stats)      the row's value, where the statistics give it
 *     passes<CAREFUL>(...)    the passes over the row; returns its value
 *
 * logits_difference.cuh and logits_general.cuh are the two. */
#ifndef KLD_KERNELS_CUDA_LOGITS_RESIDENT_CUH
#define KLD_KERNELS_CUDA_LOGITS_RESIDENT_CUH

#include "kernels/cuda/any.cuh"
#include "kernels/cuda/logits_stats.cuh"

namespace logits_resident {

using logits_stats::row_stats;
using resident::part;
using resident::place;

/* What the first warp tells the others. */
enum way { FAST, AGAIN, CAREFUL, ANY };
template <class BODY> struct row_shared {
    typename BODY::numbers numbers;
    enum way way;
};

/* A row in the hands of a body. */
template <class BODY> struct row_at_hand {
    const kld_cuda_args &args;
    const place &at;
    resident::slice &slice;
    const temperature &t;
    row_shared<BODY> *shared;
    char *grad_p, *grad_q; /* NULL: not to be written */
    bool whole_p, whole_q;
    double value;        /* what the statistics say; first warp */
    uint32_t &exchanges; /* so far */
};

/* What no fast way serves: the first block of the cluster takes the whole row. */
static __device__ __noinline__ double row_by_any(const kld_cuda_args &args, uint64_t index,
                                                 team_shared *shared) {
    team team;
    team.size = resident::COMPUTING;
    team.lane = threadIdx.x;
    team.mask = KLD_FULL_WARP;
    team.shared = shared;
    double value = any_body::value(args, row_open(args, index), team);
    row_zero(args, index, false, team); /* where weights sum to 0 */
    return value;
}

template <class BODY> struct rows {
    typedef typename BODY::type T;
    typedef typename BODY::type type;

    static __device__ __forceinline__ resident::slice
    slice_of(const place &at, const resident::row_info &info, uint32_t slot, uint32_t turn) {
        uint32_t first = slot * at.chunks;
        resident::slice slice;
        slice.p = at.tensor(slot, 0) + 16 * threadIdx.x;
        slice.q = at.tensor(slot, 1) + 16 * threadIdx.x;
        slice.odd_p = info.odd_p;
        slice.odd_q = info.odd_q;
        slice.count = at.count;
        slice.chunks = at.chunks;
        slice.full = &at.shared->full[first];
        slice.empty = &at.shared->empty[first];
        slice.parity = turn & 1;
        slice.arrived = false;
        return slice;
    }

    /* First warp: from all warps' parts to what the others need. Returns the row's value. */
    template <bool FIRST>
    static __device__ __forceinline__ double settle(const kld_cuda_args &args, const place &at,
                                                    double factor, uint32_t turn,
                                                    row_shared<BODY> *shared) {
        const part *parts = resident::wait_for_parts(at, turn);
        uint32_t count = at.cluster * resident::WARPS;
        temperature t(args.inverse_temperature); /* FP32 uses both parts of the scale */
        double scale = args.inverse_temperature * LOG2_E;
        double unit = sizeof(T) == 4 ? LN_2 : LN_2 * scale / (double)t.scale.high;
        row_stats stats =
            FIRST
                ? logits_stats::fast_row<BODY::EXTRA>(parts, count, logits_stats::FAST_MIN<T>, unit)
                : logits_stats::careful_row<BODY::EXTRA>(parts, count, args.inverse_temperature);
        if (threadIdx.x == 0) {
            shared->numbers = typename BODY::numbers(args, stats, factor);
            shared->way = FIRST ? (stats.good ? FAST : AGAIN) : stats.good ? CAREFUL : ANY;
        }
        return BODY::value(args, stats);
    }

    /* Returns the row's value to the first thread of the cluster. */
    static __device__ __forceinline__ double
    one_row(const kld_cuda_args &args, const place &at, const resident::row_info &info,
            resident::slice &slice, const temperature &t, float span, bool divides,
            row_shared<BODY> *shared, team_shared *team_shared, uint32_t &exchanges) {
        double weight = 0, factor = 0;
        if (threadIdx.x < 32) { /* its loads are on their way during the pass */
            row row = row_open(args, info.index);
            weight = row.weight;
            factor = row.gradient * args.inverse_temperature;
        }
        row_at_hand<BODY> hand = {args,
                                  at,
                                  slice,
                                  t,
                                  shared,
                                  divides ? info.grad_p : nullptr,
                                  divides ? info.grad_q : nullptr,
                                  info.whole_p,
                                  info.whole_q,
                                  0.0,
                                  exchanges};
        logits_stats::fast<T, BODY::EXTRA>(at, slice, t, span, exchanges);
        if (threadIdx.x < 32)
            hand.value = settle<true>(args, at, factor, exchanges, shared);
        exchanges++;
        block_sync(1, resident::COMPUTING);
        enum way way = shared->way;
        if (way == FAST)
            return weight * BODY::template passes<false>(hand);
        logits_stats::careful<T, BODY::EXTRA>(at, slice, t, span, exchanges);
        if (threadIdx.x < 32)
            hand.value = settle<false>(args, at, factor, exchanges, shared);
        exchanges++;
        block_sync(1, resident::COMPUTING);
        way = shared->way;
        if (way == CAREFUL)
            return weight * BODY::template passes<true>(hand);
        uint64_t index = info.index;
        slice.release();
        return at.rank == 0 ? weight * row_by_any(args, index, team_shared) : 0.0;
    }

    static __device__ void compute(const kld_cuda_args &args, const place &at) {
        __shared__ row_shared<BODY> shared;
        __shared__ team_shared team_shared;
        temperature t(args.inverse_temperature);
        float span = (float)(300.0 / (args.inverse_temperature * LOG2_E));
        bool divides = args.divisor != 0 || args.scratch->divisor != 0;
        uint32_t exchanges = 0, slot = 0, turn = 0;
        double total = 0; /* of the group; the first thread's */
        uint64_t group = UINT64_MAX;
        for (;;) {
            barrier_wait(&at.shared->full[slot * at.chunks], turn & 1);
            const resident::row_info &info = at.shared->info[slot];
            if (info.end)
                break;
            resident::slice slice = slice_of(at, info, slot, turn);
            uint64_t index = info.index, its_group = info.group;
            char *grad_p = info.grad_p, *grad_q = info.grad_q;
            if (++slot == at.slots) {
                slot = 0;
                turn++;
            }
            double value =
                one_row(args, at, info, slice, t, span, divides, &shared, &team_shared, exchanges);
            /* Weights sum to 0, and gradients are 0; row_by_any() has seen to its own. */
            if (!divides && shared.way != ANY) {
                resident::clear<T>(grad_p, at.count, threadIdx.x, resident::COMPUTING);
                resident::clear<T>(grad_q, at.count, threadIdx.x, resident::COMPUTING);
            }
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
#if __CUDA_ARCH__ >= 900
    resident::run<rows<BODY>>(args);
#endif
}

/* BLOCKS: on one multiprocessor; as many as registers allow, so that one waits while another
 * computes. */
template <class BODY, int BLOCKS>
static cudaError_t launch(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    static_assert(sizeof(row_shared<BODY>) + sizeof(team_shared) <= 1000, "see share()");
    auto function = kernel<BODY, BLOCKS>;
    cudaFuncAttributes code;
    cudaError_t error = cudaFuncGetAttributes(&code, function);
    if (error)
        return error;
    if (code.ptxVersion < 90) /* built for older devices only: there is no body */
        return cudaErrorNotSupported;
    size_t shared = resident::bytes(args, sizeof(typename BODY::type));
    error =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
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
    if (clusters == 0)
        return cudaErrorNotSupported;
    uint32_t used = groups < (uint32_t)clusters ? groups : (uint32_t)clusters;
    config.gridDim = dim3(used * args.cluster);
    return cudaLaunchKernelEx(&config, function, args);
}

} /* namespace logits_resident */
#endif
