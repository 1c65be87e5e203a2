/* resident.cu - which rows of logits are held in shared memory, and by how many blocks. */
#include "kernels/cuda/resident.cuh"

/* Shared memory of a block so that `blocks` of them fit a multiprocessor of `bytes`. */
static size_t share(uint32_t bytes, uint32_t blocks) {
    return (bytes + 2048) / blocks - 1024 - 1024; /* the system's, and static */
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

extern "C" void kld_cuda_resident_layout(kld_cuda_args *args, uint32_t shared_bytes_max) {
    size_t element = args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2;
    args->cluster = 0;
    /* Devices with clusters and this much shared memory: sm_90 and sm_100. */
    if (shared_bytes_max < 200 * 1024 || args->classes * element < 4096 ||
        args->classes > (1u << 24))
        return;
    uint32_t blocks = element == 4 ? 2 : 3;
    for (uint32_t cluster = 1; cluster <= 8; cluster *= 2)
        if (fits(args, cluster, element, share(shared_bytes_max, blocks)))
            return;
    if (!fits(args, 8, element, share(shared_bytes_max, 1)))
        fits(args, 16, element, share(shared_bytes_max, 1));
}

extern "C" cudaError_t kld_cuda_resident_rows(const kld_cuda_args *args, uint32_t groups,
                                              cudaStream_t stream) {
    switch (args->p.dtype) {
    case KLD_DTYPE_FP16: return kld_cuda_resident_fp16(args, groups, stream);
    case KLD_DTYPE_BF16: return kld_cuda_resident_bf16(args, groups, stream);
    default: return kld_cuda_resident_fp32(args, groups, stream);
    }
}
