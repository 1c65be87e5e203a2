/* resident.cu - which rows of logits are held in shared memory, and by how many blocks. */
#include "kernels/cuda/resident.cuh"

/* Shared memory of a block so that `blocks` of them fit a multiprocessor, whose largest block may
 * have most + 2048 bytes: each pays 1024 to the system and less than that for static variables. */
static size_t share(uint32_t most, uint32_t blocks) {
    return ((most + 3072) / blocks - 2048) & ~(size_t)127;
}

static bool fits(kld_cuda_args *args, uint32_t cluster, size_t element, size_t bytes) {
    uint64_t slice = (args->classes + cluster - 1) / cluster;
    slice = (slice + 63) / 64 * 64;
    uint64_t chunks =
        (slice * element + 16 * KLD_CUDA_RESIDENT_CHUNK - 1) / (16 * KLD_CUDA_RESIDENT_CHUNK);
    args->cluster = cluster;
    args->slice = (uint32_t)slice;
    for (args->slots = KLD_CUDA_RESIDENT_SLOTS_MAX; args->slots >= 1; args->slots--)
        if (args->slots * chunks <= KLD_CUDA_RESIDENT_CHUNKS_MAX &&
            resident::bytes(*args, element) <= bytes)
            return true;
    args->cluster = 0;
    return false;
}

/* Is the only gradient asked for a multiple of q - p? */
static bool is_difference(const kld_cuda_args *args) {
    bool kl = args->rule.kind == KLD_RULE_KL && args->rule.of_q == 0;
    return !args->grad_p.dtype && (kl || args->rule.kind == KLD_RULE_CROSS_ENTROPY);
}

extern "C" void kld_cuda_resident_layout(kld_cuda_args *args, uint32_t shared_bytes_max) {
    size_t element = args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2;
    args->cluster = 0;
    /* Devices with clusters and this much shared memory: sm_90 and sm_100. */
    if (shared_bytes_max < 200 * 1024 || args->classes * element < 4096 ||
        args->classes > (1u << 24))
        return;
    uint32_t blocks = element == 4 || !is_difference(args) ? KLD_CUDA_RESIDENT_BLOCKS_FEW
                                                           : KLD_CUDA_RESIDENT_BLOCKS_MANY;
    for (uint32_t cluster = 1; cluster <= 8; cluster *= 2)
        if (fits(args, cluster, element, share(shared_bytes_max, blocks)))
            return;
    fits(args, 8, element, share(shared_bytes_max, 1)); /* more is not to be had everywhere */
}

extern "C" cudaError_t kld_cuda_resident_rows(const kld_cuda_args *args, uint32_t groups,
                                              cudaStream_t stream) {
    bool difference = is_difference(args);
    switch (args->p.dtype) {
    case KLD_DTYPE_FP16:
        return difference ? kld_cuda_resident_fp16(args, groups, stream)
                          : kld_cuda_resident_general_fp16(args, groups, stream);
    case KLD_DTYPE_BF16:
        return difference ? kld_cuda_resident_bf16(args, groups, stream)
                          : kld_cuda_resident_general_bf16(args, groups, stream);
    default:
        return difference ? kld_cuda_resident_fp32(args, groups, stream)
                          : kld_cuda_resident_general_fp32(args, groups, stream);
    }
}
