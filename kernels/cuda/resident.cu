/* resident.cu - which rows of logits are held in shared memory, and which are read once, by which
 * team, and which code does it. */
#include "kernels/cuda/resident_team.h"

/* Is the only gradient asked for a multiple of q - p? */
static bool is_difference(const kld_cuda_args *args) {
    bool kl = args->rule.kind == KLD_RULE_KL && args->rule.of_q == 0;
    return !args->grad_p.dtype && (kl || args->rule.kind == KLD_RULE_CROSS_ENTROPY);
}

/* Is it p (ln p/q less its mean)? */
static bool is_centred(const kld_cuda_args *args) {
    return args->rule.kind == KLD_RULE_KL && args->rule.of_q == 0 && args->grad_p.dtype &&
           !args->grad_q.dtype;
}

/* Is it js of 16 bits, with no more than one gradient? */
static bool is_shannon(const kld_cuda_args *args) {
    const kld_rule &rule = args->rule;
    return rule.kind == KLD_RULE_MIXTURE && rule.of_p == rule.share && rule.of_q == rule.rest &&
           args->p.dtype != KLD_DTYPE_FP32 && !(args->grad_p.dtype && args->grad_q.dtype);
}

/* Is it a mixture of FP32, likewise, on a device that is good at FP64? */
static bool is_wide(const kld_cuda_args *args) {
    return args->rule.kind == KLD_RULE_MIXTURE && args->p.dtype == KLD_DTYPE_FP32 &&
           args->has_fp64 && !(args->grad_p.dtype && args->grad_q.dtype);
}

/* Is one gradient wanted, which the sums of a row give class by class? */
static bool writes_by_sums(const kld_cuda_args *args) {
    return (is_difference(args) && args->grad_q.dtype) || is_centred(args);
}

/* Is the value all that is wanted, and known after one pass? And are rows neither so short that
 * what a row takes besides would count most, nor longer than the largest cluster takes? */
static bool streams(const kld_cuda_args *args, uint64_t bytes) {
    bool known = args->rule.kind == KLD_RULE_KL || args->rule.kind == KLD_RULE_CROSS_ENTROPY;
    return known && !args->grad_p.dtype && !args->grad_q.dtype &&
           bytes >= KLD_CUDA_ONEPASS_LEAST_BYTES && bytes <= 8 * KLD_CUDA_ONEPASS_BLOCK_BYTES;
}

/* The order of KLD_CUDA_TEAM_MAP and, behind it, of KLD_CUDA_ONEPASS_MAP and KLD_CUDA_REREAD_MAP.
 */
static uint32_t kernel_of(const kld_cuda_args *args) {
    uint32_t type = args->p.dtype == KLD_DTYPE_FP32 ? 0 : args->p.dtype == KLD_DTYPE_FP16 ? 1 : 2;
    if (args->resident_team >= KLD_CUDA_ONEPASS_WARP)
        return 18 + 3 * (args->resident_team - KLD_CUDA_ONEPASS_WARP) + type;
    return 6 * args->resident_team + (is_difference(args) ? 0 : 3) + type;
}

/* Rows so short that other kernels serve them better: FP64 the gradients of FP32 that take a sum
 * off every class, where few classes leave nothing to average out; the row kernels, in half the
 * instructions, what they can do. */
static bool is_better_elsewhere(const kld_cuda_args *args, uint64_t bytes) {
    bool fp32 = args->p.dtype == KLD_DTYPE_FP32;
    bool gradient = args->grad_p.dtype || args->grad_q.dtype;
    bool by_row_kernels = args->rule.kind == KLD_RULE_KL && args->rule.of_q == 0;
    uint64_t most = args->rule.kind == KLD_RULE_MIXTURE ? 4096 : 4095;
    if (fp32 && gradient && !is_difference(args) && bytes <= most)
        return true;
    return by_row_kernels && bytes < (fp32 ? 2048 : 3072);
}

/* Is such a gradient all that is wanted, of rows that the caches keep? */
static bool rereads(const kld_cuda_args *args, uint64_t bytes) {
    return writes_by_sums(args) && !is_better_elsewhere(args, bytes) &&
           bytes >= KLD_CUDA_REREAD_LEAST_BYTES && bytes <= KLD_CUDA_REREAD_BLOCK_BYTES;
}

/* The same of longer ones. */
static bool keeps(const kld_cuda_args *args, uint64_t bytes) {
    if (bytes > 16 * KLD_CUDA_KEPT_SLICE_BYTES)
        return false;
    if (is_wide(args))
        return bytes >= KLD_CUDA_KEPT_WIDE_LEAST_BYTES;
    if (is_shannon(args) && !args->grad_p.dtype && !args->grad_q.dtype)
        return bytes >= KLD_CUDA_KEPT_VALUES_LEAST_BYTES;
    return (writes_by_sums(args) || is_shannon(args)) && bytes >= KLD_CUDA_KEPT_LEAST_BYTES;
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

/* Rows that are read once: a warp each or, where they would keep one waiting too long, a block or
 * the blocks of a cluster. Returns the power of 2 of these. */
static uint32_t onepass_layout(kld_cuda_args *args, uint64_t bytes) {
    uint32_t size = 0;
    bool warp = bytes <= KLD_CUDA_ONEPASS_WARP_BYTES;
    while (!warp && bytes > (uint64_t)KLD_CUDA_ONEPASS_BLOCK_BYTES << size)
        size++;
    args->resident_team = warp ? KLD_CUDA_ONEPASS_WARP : KLD_CUDA_ONEPASS_BLOCK;
    args->slots = 1;
    args->lag = 0;
    args->cluster = 1u << size;
    args->slice = (uint32_t)((args->classes + args->cluster - 1) / args->cluster + 63) / 64 * 64;
    return size;
}

/* Rows that are read again: a warp each or a block. */
static void reread_layout(kld_cuda_args *args, uint64_t bytes) {
    bool warp = bytes <= KLD_CUDA_REREAD_WARP_BYTES;
    args->resident_team = warp ? KLD_CUDA_REREAD_WARP : KLD_CUDA_REREAD_BLOCK;
    args->slots = 1;
    args->lag = 0;
    args->cluster = 1;
    args->slice = (uint32_t)(args->classes + 63) / 64 * 64;
}

/* Rows that are kept: cut into as many blocks as it takes, a power of 2, or 12, of which more find
 * a place than of 16. Returns which. */
static uint32_t kept_layout(kld_cuda_args *args, uint64_t bytes) {
    uint32_t blocks = 1, size = 0;
    for (; (uint64_t)blocks * KLD_CUDA_KEPT_SLICE_BYTES < bytes; size++)
        blocks *= 2;
    if (blocks == 16 && bytes <= 12 * KLD_CUDA_KEPT_SLICE_BYTES) {
        blocks = 12;
        size++;
    }
    args->resident_team = KLD_CUDA_KEPT;
    args->slots = 1;
    args->lag = 0;
    args->cluster = blocks;
    args->slice = (uint32_t)((args->classes + blocks - 1) / blocks + 63) / 64 * 64;
    return size;
}

/* Which kernel of its function: those of one divergence take other registers than of another. Of
 * rows that are kept the next one is that of rows that may start anywhere (kept_launch.cuh). */
static uint32_t rule_of(const kld_cuda_args *args) {
    if (args->resident_team < KLD_CUDA_ONEPASS_WARP)
        return args->rule.kind;
    if (args->resident_team >= KLD_CUDA_REREAD_WARP && is_centred(args))
        return 4;
    if (is_wide(args))
        return 6 + 2 * (args->grad_p.dtype || args->grad_q.dtype) +
               4 * kld_cuda_is_even(&args->rule);
    if (is_shannon(args))
        return 6;
    return args->rule.kind == KLD_RULE_CROSS_ENTROPY ? 2 : args->rule.of_q != 0;
}

/* Which team takes rows of so many bytes, and cut into what. False: none. ret_size: which of the
 * sizes of its clusters, or of its slots. */
static bool find_layout(kld_cuda_args *args, uint64_t bytes, uint32_t shared_bytes_max,
                        uint32_t *ret_size) {
    size_t element = args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2;
    /* Devices with clusters and this much shared memory: sm_90 and sm_100. */
    bool clusters = shared_bytes_max >= 200 * 1024;
    *ret_size = 0;
    if (clusters && keeps(args, bytes)) {
        *ret_size = kept_layout(args, bytes);
    } else if (rereads(args, bytes)) {
        reread_layout(args, bytes);
    } else if (streams(args, bytes) && (clusters || bytes <= KLD_CUDA_ONEPASS_BLOCK_BYTES)) {
        *ret_size = onepass_layout(args, bytes);
    } else if (!clusters || bytes < KLD_CUDA_RESIDENT_LEAST_BYTES || args->classes > (1u << 24) ||
               is_better_elsewhere(args, bytes)) {
        return false;
    } else if (bytes <= KLD_CUDA_RESIDENT_SINGLE_BYTES) {
        args->resident_team = KLD_CUDA_TEAM_OF_ONE;
        *ret_size = alone_layout(args, bytes, KLD_CUDA_RESIDENT_SINGLE_BYTES, element);
    } else if (bytes <= KLD_CUDA_RESIDENT_SMALL_BYTES) {
        args->resident_team = KLD_CUDA_TEAM_OF_FOUR;
        *ret_size = alone_layout(args, bytes, KLD_CUDA_RESIDENT_SMALL_BYTES, element);
    } else {
        args->resident_team = KLD_CUDA_TEAM_OF_MANY;
        kld_cuda_large_team_layout(args, shared_bytes_max);
        while (1u << *ret_size < args->cluster) /* cluster is 2^size, 16 at most */
            ++*ret_size;
    }
    return true;
}

extern "C" void kld_cuda_resident_layout(kld_cuda_args *args, uint32_t shared_bytes_max) {
    uint64_t bytes = args->classes * (args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2);
    uint32_t size;
    args->cluster = 0;
    if (find_layout(args, bytes, shared_bytes_max, &size) && args->active_clusters)
        args->active_clusters +=
            (KLD_CUDA_CLUSTER_RULES * kernel_of(args) + rule_of(args)) * KLD_CUDA_CLUSTER_SIZES +
            size;
}

extern "C" cudaError_t kld_cuda_resident_rows(const kld_cuda_args *args, uint32_t groups,
                                              cudaStream_t stream) {
    typedef cudaError_t launch(const kld_cuda_args *, uint32_t, cudaStream_t);
    static launch *const launches[] = {
#define X(name) kld_cuda_##name,
        KLD_CUDA_TEAM_MAP(X) KLD_CUDA_ONEPASS_MAP(X) KLD_CUDA_REREAD_MAP(X) KLD_CUDA_KEPT_MAP(X)
#undef X
    };
    static_assert(sizeof launches / sizeof *launches * KLD_CUDA_CLUSTER_RULES *
                          KLD_CUDA_CLUSTER_SIZES ==
                      KLD_CUDA_ACTIVE_CLUSTERS,
                  "rules, sizes of clusters, or four of slots");
    cudaError_t error = launches[kernel_of(args)](args, groups, stream);
    if (error != cudaErrorNotSupported || args->resident_team != KLD_CUDA_KEPT ||
        args->cluster <= 8)
        return error;
    /* Clusters of more than eight blocks are not to be had on every device: the large team gets
     * along with eight. */
    kld_cuda_args other = *args;
    int device, most;
    if ((error = cudaGetDevice(&device)) ||
        (error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)))
        return error;
    other.resident_team = KLD_CUDA_TEAM_OF_MANY;
    other.active_clusters = NULL;
    kld_cuda_large_team_layout(&other, (uint32_t)most);
    return other.cluster ? launches[kernel_of(&other)](&other, groups, stream)
                         : cudaErrorNotSupported;
}
