/* launch.cu - which kernel and layout serve a launch, and the small kernels around it: the sum of
 * weights before, the final sum after, and the ceilings that kernels are compared with.
 * Enqueues only; no memory is allocated here. */
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/row.cuh"

/* A mixture that all but leaves out a side: for kernels that take logits in FP32 it is too little.
 */
static bool is_of_one(const kld_cuda_args *args) {
    const kld_rule &rule = args->rule;
    return rule.kind == KLD_RULE_MIXTURE && args->p.form == KLD_FORM_LOGITS &&
           (rule.share < 0x1p-12 || rule.rest < 0x1p-12);
}

/* A temperature so low that what FP32 loses of a difference of logits of 16 bits shows, where large
 * ones stand beside small ones: 2^-22 at 9. */
static bool is_fine(const kld_cuda_args *args) {
    return args->p.form == KLD_FORM_LOGITS && args->p.dtype != KLD_DTYPE_FP32 &&
           args->inverse_temperature > 1024;
}

/* Tensors of one kind, and nothing asked for by element. */
static bool is_even(const kld_cuda_args *args) {
    return args->p.dtype == args->q.dtype && args->p.form == args->q.form && !is_of_one(args) &&
           !is_fine(args) && args->p.dtype != KLD_DTYPE_FP64 &&
           args->loss_extent != KLD_CUDA_ELEMENTS && args->grad_output_extent != KLD_CUDA_ELEMENTS;
}

static bool is_elementwise(const kld_cuda_args *args) {
    return is_even(args) && args->p.form != KLD_FORM_LOGITS;
}

static bool is_logits(const kld_cuda_args *args) {
    return is_even(args) && args->p.form == KLD_FORM_LOGITS && args->rule.kind == KLD_RULE_KL &&
           args->rule.of_q == 0 && args->inverse_temperature < 1e38;
}

/* A mixture that is nearly its own side: what is left of the logarithms is too little for the
 * 16-bit kernels' arithmetic. */
static bool is_lopsided(const kld_cuda_args *args) {
    const kld_rule &rule = args->rule;
    double rest = rule.of_p * rule.rest + rule.of_q * rule.share;
    return rule.kind == KLD_RULE_MIXTURE && args->p.dtype != KLD_DTYPE_FP32 &&
           rest < 0.06 * (rule.of_p + rule.of_q);
}

extern "C" bool kld_cuda_can_be_flat(const kld_cuda_args *args) {
    return is_elementwise(args) && args->loss_extent == KLD_CUDA_SCALAR && !args->weights.dtype &&
           !args->mask.dtype && !args->row_loss.dtype && args->divisor != 0;
}

/* Tiles of whole steps of a block. Few enough that what ends a tile costs little: 2^28 elements of
 * 16 bits take 0.258 ms in 8192 tiles, 0.273 in 32768. */
static void flat_layout(kld_cuda_args *args) {
    args->team = 256;
    args->group_rows = 1;
    args->classes = 4096;
    while ((args->elements - 1) / args->classes >= 8192)
        args->classes *= 2;
}

extern "C" void kld_cuda_layout(kld_cuda_args *args, uint64_t job_rows, uint32_t shared_bytes_max) {
    args->cached = 0;
    if (args->elements) {
        flat_layout(args);
        return;
    }
    uint64_t classes = args->classes;
    bool elementwise = is_elementwise(args), logits = is_logits(args);
    bool common = elementwise || logits;
    /* `any` takes one element a thread and step, the others 16 bytes. */
    uint64_t vectors = common ? (classes * dtype_bytes(args->p.dtype) + 15) / 16 : classes;
    uint64_t warp_max = !common ? 512 : logits ? 128 : 1024;
    if (vectors <= 16)
        args->team = 4;
    else if (vectors <= 64)
        args->team = 16;
    else if (vectors <= warp_max)
        args->team = 32;
    else if (logits && vectors <= 512)
        args->team = 128;
    else if (elementwise || vectors <= 2048)
        args->team = 256;
    else
        args->team = 512;
    /* Enough rows that every team of a block has one, and more as the job is larger: a block's
     * start and end cost as much as some thousand elements. */
    uint64_t least = args->team > 32 ? 1 : 256 / args->team;
    uint64_t elements = job_rows / 2048 * classes;
    elements = elements < 8192 ? 8192 : elements > 65536 ? 65536 : elements;
    args->group_rows = elements / classes > least ? elements / classes : least;
    if (args->team > 32 && args->group_rows > 4)
        args->group_rows = 4;
    /* Rows of a warp or less are read again from the first-level cache; longer ones keep what fits,
     * with two blocks on a multiprocessor. */
    if (logits && args->team > 32) {
        uint64_t wanted = (vectors + args->team - 1) / args->team;
        uint64_t most = (shared_bytes_max / 2 - 2048) / (2 * 16 * args->team);
        args->cached = (uint32_t)(wanted < most ? wanted : most);
    }
    args->cluster = args->tile_rows = 0;
    bool gradient = args->grad_p.dtype || args->grad_q.dtype;
    if (is_even(args) && args->p.form == KLD_FORM_LOGITS && !(is_lopsided(args) && gradient))
        kld_cuda_short_layout(args, job_rows);
    if (args->tile_rows)
        return;
    if (is_even(args) && args->p.form == KLD_FORM_LOGITS && !is_lopsided(args))
        kld_cuda_resident_layout(args, shared_bytes_max);
    if (args->cluster)
        args->group_rows = (job_rows + KLD_CUDA_GROUPS_MAX - 1) / KLD_CUDA_GROUPS_MAX;
}

static __global__ void __launch_bounds__(256) mask_kernel(const kld_cuda_args args) {
    uint64_t row = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    bool is = row < args.rows && *at_row(args.mask, row) == 0;
    unsigned masked = __ballot_sync(KLD_FULL_WARP, is);
    if (threadIdx.x % 32 == 0 && row < args.rows)
        args.masked[row / 32] = masked;
}

static cudaError_t launch_kind(const kld_cuda_args *args, cudaStream_t stream) {
    uint32_t groups = (uint32_t)((args->rows + args->group_rows - 1) / args->group_rows);
    bool elementwise = is_elementwise(args);
    if (args->cluster) {
        cudaError_t error = kld_cuda_resident_rows(args, groups, stream);
        if (error != cudaErrorNotSupported)
            return error;
        cudaGetLastError(); /* the other kernels do it */
    }
    if (args->tile_rows)
        return kld_cuda_short_rows(args, groups, stream);
    if (!elementwise && !is_logits(args))
        return kld_cuda_rows_any(args, groups, stream);
    switch (args->p.dtype) {
    case KLD_DTYPE_FP16:
        return elementwise ? kld_cuda_elementwise_fp16(args, groups, stream)
                           : kld_cuda_rows_fp16(args, groups, stream);
    case KLD_DTYPE_BF16:
        return elementwise ? kld_cuda_elementwise_bf16(args, groups, stream)
                           : kld_cuda_rows_bf16(args, groups, stream);
    default:
        return elementwise ? kld_cuda_elementwise_fp32(args, groups, stream)
                           : kld_cuda_rows_fp32(args, groups, stream);
    }
}

extern "C" cudaError_t kld_cuda_launch_rows(const kld_cuda_args *args, cudaStream_t stream) {
    if (args->masked) {
        uint32_t blocks = (uint32_t)((args->rows + 255) / 256);
        cudaError_t error = start(mask_kernel, blocks, 256, 0, stream, *args);
        if (error)
            return error;
    }
    return launch_kind(args, stream);
}

/* ---- sums of whole blocks ---------------------------------------------------------------------
 */

static __device__ double block_sum(double value, team_shared *shared) {
    team team = {threadIdx.x, blockDim.x, KLD_FULL_WARP, shared};
    double sum[1] = {value};
    team.sum(sum);
    return sum[0];
}

static __global__ void __launch_bounds__(256) weights_kernel(const kld_cuda_args args) {
    __shared__ team_shared shared;
    uint64_t first = blockIdx.x * (uint64_t)KLD_CUDA_DIVISOR_BLOCK_ROWS;
    uint64_t end = min(first + KLD_CUDA_DIVISOR_BLOCK_ROWS, args.rows);
    double sum = 0;
    for (uint64_t i = first + threadIdx.x; i < end; i += blockDim.x)
        if (!args.mask.at || *at_row(args.mask, i) != 0)
            sum += args.weights.at ? (double)*(const float *)at_row(args.weights, i) : 1.0;
    sum = block_sum(sum, &shared);
    if (threadIdx.x == 0)
        args.scratch->partial[blockIdx.x] = sum;
}

static __device__ double partial_sum(const kld_cuda_scratch *scratch, uint32_t count,
                                     team_shared *shared) {
    double sum = 0;
/* One block reads them all: the time is that of its loads one after the other. */
#pragma unroll 32
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        sum += scratch->partial[i];
    return block_sum(sum, shared);
}

static __global__ void __launch_bounds__(1024)
    divisor_kernel(kld_cuda_scratch *scratch, uint32_t count, bool first) {
    __shared__ team_shared shared;
    double sum = partial_sum(scratch, count, &shared);
    if (threadIdx.x == 0)
        scratch->divisor = (first ? 0.0 : scratch->divisor) + sum;
}

static __global__ void __launch_bounds__(1024)
    finish_kernel(kld_cuda_scratch *scratch, uint32_t count, bool first, bool last, double divisor,
                  char *loss, uint32_t loss_dtype, double *result) {
    __shared__ team_shared shared;
    await_kernel_ahead();
    double sum = partial_sum(scratch, count, &shared);
    if (threadIdx.x != 0)
        return;
    double total = (first ? 0.0 : scratch->total) + sum;
    scratch->total = total;
    if (!last)
        return;
    if (divisor == 0)
        divisor = scratch->divisor;
    double value = divisor == 0 ? 0.0 : total / divisor;
    if (loss_dtype == KLD_DTYPE_FP32)
        value = (double)(float)value;
    if (loss)
        store_double(loss, loss_dtype, value);
    *result = value;
}

extern "C" cudaError_t kld_cuda_launch_divisor(const kld_cuda_args *args, bool first,
                                               cudaStream_t stream) {
    uint32_t blocks =
        (uint32_t)((args->rows + KLD_CUDA_DIVISOR_BLOCK_ROWS - 1) / KLD_CUDA_DIVISOR_BLOCK_ROWS);
    cudaError_t error = start(weights_kernel, blocks, 256, 0, stream, *args);
    return error ? error : start(divisor_kernel, 1, 1024, 0, stream, args->scratch, blocks, first);
}

extern "C" cudaError_t kld_cuda_launch_finish(const kld_cuda_args *args, uint32_t groups,
                                              bool first, bool last, uint32_t loss_dtype,
                                              double *result, cudaStream_t stream) {
    /* Not more threads than there may be sums: on a busy device a
     * block finds its place the sooner the smaller it is. The order of the sums is the same. */
    uint32_t threads = groups <= 256 ? 256 : 1024;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = args->begins_early;
    return start(config, finish_kernel, args->scratch, groups, first, last, args->divisor,
                 args->loss.at, loss_dtype, result);
}

extern "C" bool kld_cuda_begins_early(void) {
    cudaFuncAttributes code;
    return !cudaFuncGetAttributes(&code, finish_kernel) && code.ptxVersion >= 90;
}

/* ---- ceilings ---------------------------------------------------------------------------------
 */

template <bool WRITE>
static __global__ void __launch_bounds__(512)
    ceiling_kernel(const uint4 *a, const uint4 *b, uint4 *out, uint64_t count) {
    constexpr int BATCH = 4;
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    unsigned kept = 0;
    for (; i < count; i += BATCH * step) {
        uint4 x[BATCH], y[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            uint64_t at = min(i + k * step, count - 1);
            x[k] = __ldcs(a + at);
            y[k] = __ldcs(b + at);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            uint4 z = {x[k].x ^ y[k].x, x[k].y ^ y[k].y, x[k].z ^ y[k].z, x[k].w ^ y[k].w};
            if (WRITE) {
                if (i + k * step < count)
                    __stcs(out + i + k * step, z);
            } else {
                kept |= z.x ^ z.y ^ z.z ^ z.w;
            }
        }
    }
    /* As good as never true, but the compiler cannot know: the loads stay. */
    if (!WRITE && kept == 0x9e3779b9u)
        out[0].x = kept;
}

extern "C" cudaError_t kld_cuda_launch_ceiling(const void *a, const void *b, void *out,
                                               uint64_t bytes, bool write, uint32_t blocks,
                                               cudaStream_t stream) {
    uint64_t count = bytes / 16;
    return start(write ? ceiling_kernel<true> : ceiling_kernel<false>, blocks, 512, 0, stream,
                 (const uint4 *)a, (const uint4 *)b, (uint4 *)out, count);
}
