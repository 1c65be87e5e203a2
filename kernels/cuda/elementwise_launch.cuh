/* elementwise_launch.cuh - the kernels of probs and logprobs of one element type, and the choice
 * among them. Included once by each elementwise_*.cu, so that they compile side by side. */
#ifndef KLD_KERNELS_CUDA_ELEMENTWISE_LAUNCH_CUH
#define KLD_KERNELS_CUDA_ELEMENTWISE_LAUNCH_CUH

#include "kernels/cuda/elementwise.cuh"

#define ELEMENT_THREADS 256
#define ELEMENT_WARPS (ELEMENT_THREADS / 32)

/* BLOCKS on one multiprocessor: as many as leave the registers that no value is spilled. */
template <class BODY, int BLOCKS>
static __global__ void __launch_bounds__(ELEMENT_THREADS, BLOCKS)
    element_rows_kernel(const __grid_constant__ kld_cuda_args args) {
    do_group<BODY>(args);
}

/* A block for each tile. Blocks that stay and take tiles in turn are no faster, and leave no room
 * for the kernels of others before the end: with these a small job of higher priority begins some
 * 20 us later, beside a job of 0.5 ms. */
template <class BODY, class T, int BLOCKS>
static __global__ void __launch_bounds__(ELEMENT_THREADS, BLOCKS)
    element_tiles_kernel(const __grid_constant__ kld_cuda_args args) {
    __shared__ double sums[ELEMENT_WARPS];
    double gradient = args.gradient_scale / args.divisor;
    if (args.grad_output.at)
        gradient *= load_double(args.grad_output.at, args.grad_output.dtype);
    const element_numbers numbers(args.rule, gradient);
    uint64_t tile = blockIdx.x, at = tile * args.classes;
    const element_span<T> span = {(const T *)args.p.at + at, (const T *)args.q.at + at,
                                  args.grad_p.at ? (T *)args.grad_p.at + at : nullptr,
                                  args.grad_q.at ? (T *)args.grad_q.at + at : nullptr,
                                  min(args.classes, args.elements - at)};
    double sum = BODY::run(numbers, span, threadIdx.x, ELEMENT_THREADS);
#pragma unroll
    for (int width = 16; width; width /= 2)
        sum += __shfl_xor_sync(KLD_FULL_WARP, sum, width);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    double all = 0;
#pragma unroll
    for (int i = 0; i < ELEMENT_WARPS; i++)
        all += sums[i];
    args.scratch->partial[args.first_group + tile] = all * args.scale;
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
    if (args.elements)
        return start(element_tiles_kernel<body, T, BLOCKS>, (uint32_t)args.rows, ELEMENT_THREADS, 0,
                     stream, args);
    return start(element_rows_kernel<body, 2>, groups, ELEMENT_THREADS, 0, stream, args);
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
