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
    return (args->small_team ? 0 : 6) + (is_difference(args) ? 0 : 3) + type;
}

extern "C" void kld_cuda_resident_layout(kld_cuda_args *args, uint32_t shared_bytes_max) {
    size_t element = args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2;
    args->cluster = 0;
    /* Devices with clusters and this much shared memory: sm_90 and sm_100. */
    if (shared_bytes_max < 200 * 1024 || args->classes * element < 4096 ||
        args->classes > (1u << 24))
        return;
    args->small_team = args->classes * element <= KLD_CUDA_RESIDENT_SMALL_BYTES;
    if (args->small_team)
        kld_cuda_small_team_layout(args, shared_bytes_max);
    else
        kld_cuda_large_team_layout(args, shared_bytes_max);
    if (args->active_clusters) {
        uint32_t power = 0; /* cluster is 2^power, 8 at most */
        while (1u << power < args->cluster)
            power++;
        args->active_clusters += (4 * kernel_of(args) + args->rule.kind) * 4 + power;
    }
}

extern "C" cudaError_t kld_cuda_resident_rows(const kld_cuda_args *args, uint32_t groups,
                                              cudaStream_t stream) {
    typedef cudaError_t launch(const kld_cuda_args *, uint32_t, cudaStream_t);
    static launch *const launches[] = {
#define X(name) kld_cuda_##name,
        KLD_CUDA_TEAM_MAP(X)
#undef X
    };
    static_assert(sizeof launches / sizeof *launches * 16 == KLD_CUDA_ACTIVE_CLUSTERS,
                  "four rules, four sizes of clusters");
    return launches[kernel_of(args)](args, groups, stream);
}
