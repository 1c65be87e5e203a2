/* resident.cu - which rows of logits are held in shared memory, by which team, and which code does
 * it. */
#include "kernels/cuda/resident_team.h"

/* Is the only gradient asked for a multiple of q - p? */
static bool is_difference(const kld_cuda_args *args) {
    bool kl = args->rule.kind == KLD_RULE_KL && args->rule.of_q == 0;
    return !args->grad_p.dtype && (kl || args->rule.kind == KLD_RULE_CROSS_ENTROPY);
}

/* The order of KLD_CUDA_TEAM_MAP. */
static uint32_t kernel_of(const kld_cuda_args *args) {
    uint32_t type = args->p.dtype == KLD_DTYPE_FP32 ? 0 : args->p.dtype == KLD_DTYPE_FP16 ? 1 : 2;
    return 6 * args->resident_team + (is_difference(args) ? 0 : 3) + type;
}

/* Rows so short that other kernels serve them better: FP64 the gradients of FP32 that take a sum
 * off every class, where few classes leave nothing to average out; the row kernels, in half the
 * instructions, what they can do. */
static bool is_better_elsewhere(const kld_cuda_args *args, uint64_t bytes) {
    bool fp32 = args->p.dtype == KLD_DTYPE_FP32;
    bool gradient = args->grad_p.dtype || args->grad_q.dtype;
    bool by_row_kernels = args->rule.kind == KLD_RULE_KL && args->rule.of_q == 0;
    if (fp32 && gradient && !is_difference(args) && bytes < 4096)
        return true;
    return by_row_kernels && bytes < (fp32 ? 2048 : 3072);
}

/* Of a block that works alone: two slots in one of four sizes, which say how many blocks a
 * multiprocessor takes. Returns which. */
static uint32_t alone_layout(kld_cuda_args *args, uint64_t bytes, uint32_t most, size_t element) {
    uint32_t size = (uint32_t)((4 * bytes - 1) / most);
    args->cluster = 1;
    args->slots = 2;
    args->lag = 0;
    args->slice = (size + 1) * most / 4 / (uint32_t)element;
    return size;
}

extern "C" void kld_cuda_resident_layout(kld_cuda_args *args, uint32_t shared_bytes_max) {
    size_t element = args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2;
    args->cluster = 0;
    /* Devices with clusters and this much shared memory: sm_90 and sm_100. */
    uint64_t bytes = args->classes * element;
    if (shared_bytes_max < 200 * 1024 || bytes < KLD_CUDA_RESIDENT_LEAST_BYTES ||
        args->classes > (1u << 24) || is_better_elsewhere(args, bytes))
        return;
    uint32_t size = 0;
    if (bytes <= KLD_CUDA_RESIDENT_SINGLE_BYTES) {
        args->resident_team = 0;
        size = alone_layout(args, bytes, KLD_CUDA_RESIDENT_SINGLE_BYTES, element);
    } else if (bytes <= KLD_CUDA_RESIDENT_SMALL_BYTES) {
        args->resident_team = 1;
        size = alone_layout(args, bytes, KLD_CUDA_RESIDENT_SMALL_BYTES, element);
    } else {
        args->resident_team = 2;
        kld_cuda_large_team_layout(args, shared_bytes_max);
        while (1u << size < args->cluster) /* cluster is 2^size, 16 at most */
            size++;
    }
    if (args->active_clusters)
        args->active_clusters += (4 * kernel_of(args) + args->rule.kind) * 5 + size;
}

extern "C" cudaError_t kld_cuda_resident_rows(const kld_cuda_args *args, uint32_t groups,
                                              cudaStream_t stream) {
    typedef cudaError_t launch(const kld_cuda_args *, uint32_t, cudaStream_t);
    static launch *const launches[] = {
#define X(name) kld_cuda_##name,
        KLD_CUDA_TEAM_MAP(X)
#undef X
    };
    static_assert(sizeof launches / sizeof *launches * 4 * 5 == KLD_CUDA_ACTIVE_CLUSTERS,
                  "four rules, five sizes of clusters, or four of slots");
    return launches[kernel_of(args)](args, groups, stream);
}
