/* elementwise_launch.cuh - the kernels of probs and logprobs of one element type, and the choice
 * among them. Included once by each elementwise_*.cu, so that they compile side by side. */
#ifndef KLD_KERNELS_CUDA_ELEMENTWISE_LAUNCH_CUH
#define KLD_KERNELS_CUDA_ELEMENTWISE_LAUNCH_CUH

#include "kernels/cuda/elementwise.cuh"

#define ELEMENT_THREADS 256
#define ELEMENT_WARPS (ELEMENT_THREADS / 32)
#define ELEMENT_ROUNDS 32 /* tiles of a block between two of its barriers */

/* BLOCKS on one multiprocessor: as many as leave the registers that no value is spilled. */
template <class BODY, int BLOCKS>
static __global__ void __launch_bounds__(ELEMENT_THREADS, BLOCKS)
    element_rows_kernel(const __grid_constant__ kld_cuda_args args) {
    do_group<BODY>(args);
}

/* Sums of the warps of a block for the tiles it has done since the last barrier. */
struct tile_sums {
    double of[ELEMENT_ROUNDS][ELEMENT_WARPS];
};

/* Partial sums of `count` tiles, of which the first is `tile` and the next ones are `step` away. */
static __device__ void tiles_store(const kld_cuda_args &args, const tile_sums &sums, unsigned count,
                                   uint64_t tile, uint64_t step) {
    if (threadIdx.x >= count)
        return;
    double sum = 0;
#pragma unroll
    for (int i = 0; i < ELEMENT_WARPS; i++)
        sum += sums.of[threadIdx.x][i];
    args.scratch->partial[args.first_group + tile + threadIdx.x * step] = sum * args.scale;
}

/* Blocks take tiles in turn. Within a round of tiles no warp waits for another, so that loads of
 * the next tile are under way while other warps still compute. */
template <class BODY, class T, int BLOCKS>
static __global__ void __launch_bounds__(ELEMENT_THREADS, BLOCKS)
    element_tiles_kernel(const __grid_constant__ kld_cuda_args args) {
    __shared__ tile_sums sums;
    double gradient = args.gradient_scale / args.divisor;
    if (args.grad_output.at)
        gradient *= load_double(args.grad_output.at, args.grad_output.dtype);
    const element_numbers numbers(args.rule, gradient);
    uint64_t tile = blockIdx.x, first = tile, step = gridDim.x;
    unsigned round = 0;
    for (; tile < args.rows; tile += step) {
        uint64_t at = tile * args.classes;
        const element_span<T> span = {(const T *)args.p.at + at, (const T *)args.q.at + at,
                                      args.grad_p.at ? (T *)args.grad_p.at + at : nullptr,
                                      args.grad_q.at ? (T *)args.grad_q.at + at : nullptr,
                                      min(args.classes, args.elements - at)};
        double sum = BODY::run(numbers, span, threadIdx.x, ELEMENT_THREADS);
#pragma unroll
        for (int width = 16; width; width /= 2)
            sum += __shfl_xor_sync(KLD_FULL_WARP, sum, width);
        if (threadIdx.x % 32 == 0)
            sums.of[round][threadIdx.x / 32] = sum;
        if (++round < ELEMENT_ROUNDS)
            continue;
        __syncthreads(); /* all sums of the round are written */
        tiles_store(args, sums, round, first, step);
        __syncthreads(); /* and read, before the next round overwrites them */
        first = tile + step;
        round = 0;
    }
    __syncthreads();
    tiles_store(args, sums, round, first, step);
}

/* Blocks of a kernel on one multiprocessor: more than planned where registers are left. */
static uint32_t resident_blocks(void (*kernel)(kld_cuda_args), uint32_t planned) {
    int blocks = 0;
    cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, ELEMENT_THREADS, 0);
    return error || blocks < 1 ? planned : (uint32_t)blocks;
}

template <class T, int FORM, int KIND, int GRADIENTS>
static cudaError_t launch_kind(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    /* Registers for so many blocks on a multiprocessor, without a spill that matters: measured for
     * each of these. BATCH fits them. */
    constexpr bool LOGPROBS = FORM == KLD_FORM_LOGPROBS, HALF = sizeof(T) == 2;
    constexpr int BLOCKS = GRADIENTS || KIND == ELEMENT_JS ? 3
                           : LOGPROBS                      ? (HALF ? 3 : 2)
                                                           : (HALF ? 4 : 3);
    constexpr int BATCH = sizeof(T) == 4 && !GRADIENTS ? 4 : 2;
    using body = elementwise<T, FORM, KIND, GRADIENTS, BATCH>;
    if (args.elements) {
        static const uint32_t resident =
            resident_blocks(element_tiles_kernel<body, T, BLOCKS>, BLOCKS);
        uint64_t blocks = (uint64_t)args.multiprocessors * resident;
        blocks = blocks < args.rows ? blocks : args.rows;
        element_tiles_kernel<body, T, BLOCKS>
            <<<(uint32_t)blocks, ELEMENT_THREADS, 0, stream>>>(args);
    } else {
        element_rows_kernel<body, 2><<<groups, ELEMENT_THREADS, 0, stream>>>(args);
    }
    return cudaGetLastError();
}

/* Kernels for each of the gradients only where they are many's everyday work. */
template <class T, int FORM>
static cudaError_t launch_form(const kld_cuda_args &args, uint32_t groups, cudaStream_t s) {
    bool any = args.grad_q.at || args.grad_p.at;
    switch (args.rule.kind) {
    case KLD_RULE_TV:
        return any ? launch_kind<T, FORM, ELEMENT_TV, 3>(args, groups, s)
                   : launch_kind<T, FORM, ELEMENT_TV, 0>(args, groups, s);
    case KLD_RULE_CROSS_ENTROPY:
        return any ? launch_kind<T, FORM, ELEMENT_CROSS_ENTROPY, 3>(args, groups, s)
                   : launch_kind<T, FORM, ELEMENT_CROSS_ENTROPY, 0>(args, groups, s);
    case KLD_RULE_MIXTURE:
        if (!any && args.rule.share == 0.5 && args.rule.of_p == 0.5 && args.rule.of_q == 0.5)
            return launch_kind<T, FORM, ELEMENT_JS_EVEN, 0>(args, groups, s);
        if (args.rule.of_q != 0)
            return any ? launch_kind<T, FORM, ELEMENT_JS, 3>(args, groups, s)
                       : launch_kind<T, FORM, ELEMENT_JS, 0>(args, groups, s);
        return any ? launch_kind<T, FORM, ELEMENT_SKEW, 3>(args, groups, s)
                   : launch_kind<T, FORM, ELEMENT_SKEW, 0>(args, groups, s);
    default: break;
    }
    if (args.rule.of_q != 0)
        return any ? launch_kind<T, FORM, ELEMENT_KL_BOTH, 3>(args, groups, s)
                   : launch_kind<T, FORM, ELEMENT_KL_BOTH, 0>(args, groups, s);
    switch ((args.grad_q.at ? GRADIENT_Q : 0) | (args.grad_p.at ? GRADIENT_P : 0)) {
    case 0: return launch_kind<T, FORM, ELEMENT_KL, 0>(args, groups, s);
    case 1: return launch_kind<T, FORM, ELEMENT_KL, 1>(args, groups, s);
    case 2: return launch_kind<T, FORM, ELEMENT_KL, 2>(args, groups, s);
    default: return launch_kind<T, FORM, ELEMENT_KL, 3>(args, groups, s);
    }
}

template <class T>
static cudaError_t launch_elementwise(const kld_cuda_args *args, uint32_t groups,
                                      cudaStream_t stream) {
    return args->p.form == KLD_FORM_PROBS
               ? launch_form<T, KLD_FORM_PROBS>(*args, groups, stream)
               : launch_form<T, KLD_FORM_LOGPROBS>(*args, groups, stream);
}

#endif
