/* logits_short.cuh - short rows of logits, both tensors of one dtype, on any device from sm_80 on:
 * every warp by itself takes tiles of a few rows, of which the next one is on its way to shared
 * memory while it computes on this one. Each row is read once and held in the registers of 1 to 32
 * lanes (logits_short_row.cuh). What that arithmetic does not serve (NaN, mass over a zero) goes to
 * any.cuh, row by row. Included once by each logits_short_*.cu, so that they compile side by side.
 */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_CUH

#include "kernels/cuda/any.cuh"
#include "kernels/cuda/logits_short_exact.cuh"
#include "kernels/cuda/logits_short_tile.cuh"

namespace logits_short {

/* Where a warp is: the tile that it computes on, and the next one, which is being loaded. */
struct warp_state {
    tile_cursor now, next;
    uint32_t turn; /* of the two places: the next tile's */
    bool again;    /* now's rows are done but for the bad ones, and next is being loaded */
    double total[32];
    uint32_t bad[32]; /* rows of now that are left to any.cuh, a bit each */
};

/* Shared memory of one warp: two tiles of both tensors, at any offset. The state is there while
 * any.cuh works. */
template <uint32_t TILE_BYTES> struct warp_space {
    alignas(16) char at[2][2][TILE_BYTES + 32];
    warp_state state;
};

/* The rows of a tile that are left to any.cuh, by the whole warp: bit k of a lane is its row r + k
 * step. Their gradients also go where the tile's lie. Everything else of the kernel is in shared
 * memory meanwhile: no register has to be kept for its sake. */
template <class T, uint32_t TILE_BYTES>
static __device__ __noinline__ void rows_by_any(const kld_cuda_args &args,
                                                warp_space<TILE_BYTES> &space) {
    const uint32_t lane = threadIdx.x % 32, classes = (uint32_t)args.classes;
    const uint32_t r = lane / args.team, step = 32 / args.team;
    const team team = {lane, 32, KLD_FULL_WARP, nullptr};
    warp_state &state = space.state;
    uint64_t first = state.now.row;
    T *tile_p = (T *)(space.at[state.turn ^ 1][0] + tile_tensor<T>(args, args.p).offset(first));
    T *tile_q = (T *)(space.at[state.turn ^ 1][1] + tile_tensor<T>(args, args.q).offset(first));
    uint32_t bits = state.bad[lane];
    for (uint32_t k = 0; k < 32; k++) {
        for (unsigned left = __ballot_sync(KLD_FULL_WARP, bits >> k & 1); left; left &= left - 1) {
            uint32_t its = __shfl_sync(KLD_FULL_WARP, r, __ffs(left) - 1) + k * step;
            row row = row_open(args, first + its);
            double value = any_body::value(args, row, team) * row.weight;
            for (uint32_t i = lane; i < classes; i += 32) { /* NULL: weights sum to 0 */
                if (row.grad_p)
                    tile_p[its * classes + i] = ((const T *)row.grad_p)[i];
                if (row.grad_q)
                    tile_q[its * classes + i] = ((const T *)row.grad_q)[i];
            }
            if (lane == 0) {
                row_store(args, first + its, value);
                state.total[0] += value;
            }
        }
    }
    __syncwarp();
}

/* Called through this: with a direct call the loop spills twice as much. The code is in every
 * kernel all the same. Nobody changes it. */
template <class T, uint32_t TILE_BYTES>
static __device__ void (*volatile rows_by_any_at)(const kld_cuda_args &, warp_space<TILE_BYTES> &) =
    rows_by_any<T, TILE_BYTES>;

template <class ROW> struct tiles {
    typedef typename ROW::T T;
    typedef warp_space<ROW::TILE_BYTES> space_type;

    const kld_cuda_args &args;
    const launch_numbers n;
    double base; /* of gradients, but for weights and grad_output by row; 0: weights sum to 0 */
    lanes team;

    __device__ __forceinline__ explicit tiles(const kld_cuda_args &a) : args(a), n(a), base(0) {
        double divisor = a.divisor != 0 ? a.divisor : a.scratch->divisor;
        if (divisor != 0)
            base = a.gradient_scale * a.inverse_temperature / divisor;
        if (a.grad_output.at && a.grad_output_extent == KLD_CUDA_SCALAR)
            base *= load_double(a.grad_output.at, a.grad_output.dtype);
        team.count = a.team;
        team.lane = threadIdx.x % a.team;
    }

    __device__ __forceinline__ float factor_of(uint64_t index, float weight) const {
        double factor = base * (double)weight;
        if (args.grad_output.at && args.grad_output_extent == KLD_CUDA_ROWS)
            factor *= load_double(at_row(args.grad_output, index), args.grad_output.dtype);
        return (float)factor;
    }

    /* All lanes, one row for each team of them, at `at_p` and `at_q`. Returns w scale value to the
     * first lane of a team, and stores it; or says that the row is not to be done this way. */
    __device__ __forceinline__ double row(uint64_t index, bool active, T *at_p, T *at_q,
                                          bool aligned, bool &ret_bad) const {
        bool masked = row_is_masked(args, index);
        float weight =
            args.weights.at && !masked ? *(const float *)at_row(args.weights, index) : 1.0f;
        ROW row(n, team, (uint32_t)args.classes, ROW::ALL && args.grad_p.at,
                ROW::MODE != LOSS && args.grad_q.at);
        row.load(at_p, at_q, aligned);
        row.statistics();
        float factor = 0;
        if (ROW::MODE != LOSS)
            factor =
                args.weights.at || args.grad_output.at ? factor_of(index, weight) : (float)base;
        float value = row.terms(factor);
        const bool is_own = active;
        active = active && team.lane == 0;
        ret_bad = active && !masked && !row.good(value);
        if (ROW::ALL && (row.want_p || row.want_q))
            row.gradients(factor);
        if (ROW::MODE != LOSS) {
            __syncwarp(); /* a lane may have read what another writes: see load_as(), compute() */
            row.put(at_p, at_q, aligned, masked || base == 0.0, is_own);
        }
        if (!active || ret_bad)
            return 0.0;
        double result = masked ? 0.0 : (double)fmaxf(value, 0.0f) * ((double)weight * args.scale);
        row_store(args, index, result);
        return result;
    }

    /* The rows of a tile; ret_bad: those left to any.cuh. */
    __device__ __forceinline__ double compute(const tile_cursor &at,
                                              char (&place)[2][ROW::TILE_BYTES + 32],
                                              uint32_t &ret_bad) const {
        uint32_t offset_p = tile_tensor<T>(args, args.p).offset(at.row);
        uint32_t offset_q = tile_tensor<T>(args, args.q).offset(at.row);
        T *tile_p = (T *)(place[0] + offset_p), *tile_q = (T *)(place[1] + offset_q);
        bool aligned = (offset_p | offset_q) % (ROW::W * sizeof(T)) == 0;
        const uint32_t at_once = 32 / team.count, mine = threadIdx.x % 32 / team.count;
        uint32_t bit = 1;
        double sum = 0;
        ret_bad = 0;
#pragma unroll 1
        for (uint32_t r = mine; r - mine < at.rows; r += at_once, bit += bit) {
            /* Teams behind the last row do it once more, and write the same. */
            uint32_t its = min(r, at.rows - 1), to = its * (uint32_t)args.classes;
            bool is_bad;
            sum += row(at.row + its, r < at.rows, tile_p + to, tile_q + to, aligned, is_bad);
            ret_bad |= is_bad ? bit : 0;
        }
        return sum;
    }

    __device__ __forceinline__ void store(const tile_cursor &at,
                                          const char (&place)[2][ROW::TILE_BYTES + 32]) const {
        if (ROW::MODE == LOSS)
            return;
        __syncwarp();
        if (ROW::ALL && args.grad_p.at)
            tile_tensor<T>(args, args.grad_p)
                .store(place[0], tile_tensor<T>(args, args.p).offset(at.row), at.row, at.rows);
        if (args.grad_q.at)
            tile_tensor<T>(args, args.grad_q)
                .store(place[1], tile_tensor<T>(args, args.q).offset(at.row), at.row, at.rows);
    }

    /* False: rows are left to any.cuh, and then this is to be called again. */
    __device__ __forceinline__ bool run(space_type &space) const {
        const uint64_t groups = (args.rows + args.group_rows - 1) / args.group_rows;
        const uint32_t lane = threadIdx.x % 32;
        tile_cursor now = space.state.now, next = space.state.next;
        uint32_t turn = space.state.turn;
        bool again = space.state.again;
        double total = space.state.total[lane];
        for (;; turn ^= 1) {
            uint32_t bad = 0;
            if (!again) {
                if (next.rows) {
                    tile_tensor<T>(args, args.p).load(space.at[turn][0], next.row, next.rows);
                    tile_tensor<T>(args, args.q).load(space.at[turn][1], next.row, next.rows);
                }
                copies_end();
                if (now.rows) {
                    copies_wait<1>(); /* for the tile before that */
                    __syncwarp();
                    total += compute(now, space.at[turn ^ 1], bad);
                }
            }
            if (__any_sync(KLD_FULL_WARP, bad)) {
                space.state.now = now; /* all lanes write the same */
                space.state.next = next;
                space.state.turn = turn;
                space.state.again = true;
                space.state.total[lane] = total;
                space.state.bad[lane] = bad;
                __syncwarp();
                return false;
            }
            again = false;
            if (now.rows) {
                store(now, space.at[turn ^ 1]);
                __syncwarp(); /* all have read it, before another comes there */
                if (!next.rows || next.group != now.group) {
                    finish(now.group, total);
                    total = 0;
                }
            }
            if (!next.rows)
                return true;
            now = next;
            next.next(args, groups, (uint64_t)gridDim.x * ROW::WARPS);
        }
    }

    __device__ __forceinline__ void finish(uint64_t group, double total) const {
#pragma unroll
        for (int width = 16; width; width /= 2)
            total += __shfl_xor_sync(KLD_FULL_WARP, total, width);
        if (threadIdx.x % 32 == 0)
            args.scratch->partial[args.first_group + group] = total;
    }
};

/* ROW says how many warps a block has, and how many blocks a multiprocessor. */
template <class ROW>
static __global__ void __launch_bounds__(32 * ROW::WARPS, ROW::BLOCKS)
    kernel(const __grid_constant__ kld_cuda_args args) {
    __shared__ typename tiles<ROW>::space_type spaces[ROW::WARPS];
    typename tiles<ROW>::space_type &space = spaces[threadIdx.x / 32];
    tile_cursor first, none;
    first.group = (uint64_t)blockIdx.x * ROW::WARPS + threadIdx.x / 32;
    first.open(args, (args.rows + args.group_rows - 1) / args.group_rows);
    none = first;
    none.rows = 0;
    space.state.next = first; /* all lanes write the same */
    space.state.now = none;
    space.state.turn = 0;
    space.state.again = false;
    space.state.total[threadIdx.x % 32] = 0;
    __syncwarp();
    while (!tiles<ROW>(args).run(space))
        rows_by_any_at<typename ROW::T, ROW::TILE_BYTES>(args, space);
}

/* Blocks on a multiprocessor; its shared memory is made as large as they need, and no larger: what
 * is left caches. */
template <class ROW> static uint32_t resident_blocks(void (*function)(kld_cuda_args)) {
    int device = 0, most = 0, blocks = 0;
    size_t wanted = ROW::BLOCKS * (ROW::WARPS * sizeof(typename tiles<ROW>::space_type) + 1024);
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    int share = most > 0 && wanted < (size_t)most ? (int)(100 * wanted / (size_t)most) + 1 : 100;
    cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, share);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 32 * ROW::WARPS, 0);
    cudaGetLastError(); /* what failed here will fail again where it counts */
    return blocks < 1 ? 1 : (uint32_t)blocks;
}

template <class ROW>
static cudaError_t launch_row(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    static const uint32_t resident = resident_blocks<ROW>(kernel<ROW>);
    uint32_t blocks = (groups + ROW::WARPS - 1) / ROW::WARPS;
    uint32_t most = args.multiprocessors * resident, used = blocks < most ? blocks : most;
    return start(kernel<ROW>, used, 32 * ROW::WARPS, 0, stream, args);
}

/* What a row is to its kernel. */
template <class T, int RULE, int MODE, int W, int E> struct row_type {
    typedef short_row<T, RULE, MODE, W, E> type;
};
template <int W, int E> struct row_type<float, KLD_RULE_KL, DIFFERENCE, W, E> {
    typedef exact_row<W, E> type;
};

/* A row of which W elements lie side by side in a lane that has E. */
template <class T, int RULE, int MODE, int W, int... E>
static cudaError_t launch_width(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    cudaError_t error = cudaErrorInvalidValue;
    (
        [&] {
            if constexpr (E % W == 0)
                if (args.lane_elements == E)
                    error = launch_row<typename row_type<T, RULE, MODE, W, E>::type>(args, groups,
                                                                                     stream);
        }(),
        ...);
    return error;
}

/* The kernels that there are: kld_cuda_short_layout() chooses among the same. */
template <class T, int RULE, int MODE>
static cudaError_t launch(const kld_cuda_args &args, uint32_t groups, cudaStream_t s) {
    constexpr int V = packet<T>::V;
    if constexpr (MODE == GENERAL || (MODE == DIFFERENCE && sizeof(T) == 4)) {
        switch (args.lane_width) {
        case 1: return launch_width<T, RULE, MODE, 1, 3, 5, 8>(args, groups, s);
        case 2: return launch_width<T, RULE, MODE, 2, 2, 4, 6, 10>(args, groups, s);
        default: return launch_width<T, RULE, MODE, V, 4, 8>(args, groups, s);
        }
    } else {
        switch (args.lane_width) {
        case 1: return launch_width<T, RULE, MODE, 1, 3, 5, 8, 13, 16>(args, groups, s);
        case 2: return launch_width<T, RULE, MODE, 2, 2, 4, 6, 10, 16>(args, groups, s);
        default: return launch_width<T, RULE, MODE, V, 4, 8, 16>(args, groups, s);
        }
    }
}

template <class T>
static cudaError_t launch_simple(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    if (args.rule.kind == KLD_RULE_MIXTURE)
        return launch<T, KLD_RULE_MIXTURE, LOSS>(args, groups, stream);
    return args.grad_q.at ? launch<T, KLD_RULE_KL, DIFFERENCE>(args, groups, stream)
                          : launch<T, KLD_RULE_KL, LOSS>(args, groups, stream);
}

/* In FP32 only tv and the cross entropy, without gradients. */
template <class T>
static cudaError_t launch_general(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    switch (args.rule.kind) {
    case KLD_RULE_TV: return launch<T, KLD_RULE_TV, GENERAL>(args, groups, stream);
    case KLD_RULE_CROSS_ENTROPY:
        return launch<T, KLD_RULE_CROSS_ENTROPY, GENERAL>(args, groups, stream);
    default: break;
    }
    if constexpr (sizeof(T) == 4)
        return cudaErrorInvalidValue;
    else
        return args.rule.kind == KLD_RULE_MIXTURE
                   ? launch<T, KLD_RULE_MIXTURE, GENERAL>(args, groups, stream)
                   : launch<T, KLD_RULE_KL, GENERAL>(args, groups, stream);
}

} /* namespace logits_short */
#endif
