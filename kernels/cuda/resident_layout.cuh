/* resident_layout.cuh - into how many blocks a row of logits is cut, and how many rows a block
 * holds: by the row's bytes and what a gradient needs. The body of resident_small.cu and
 * resident_large.cu.
 */
#include "kernels/cuda/resident.cuh"

/* Shared memory of a block so that `blocks` of them fit a multiprocessor, whose largest block may
 * have most + 2048 bytes: each pays 1024 to the system and at most 3072 for static variables. */
static size_t share(uint32_t most, uint32_t blocks) {
    return ((most + 3072) / blocks - 4096) & ~(size_t)127;
}

/* As many slots as there is room for; false if they are fewer than `least`. */
static bool fits(kld_cuda_args *args, uint32_t cluster, uint32_t least, size_t element,
                 size_t bytes) {
    uint64_t slice = (args->classes + cluster - 1) / cluster;
    slice = (slice + 63) / 64 * 64;
    uint64_t chunks = (slice * element + 16 * resident::CHUNK - 1) / (16 * resident::CHUNK);
    args->cluster = cluster;
    args->slice = (uint32_t)slice;
    for (args->slots = resident::SLOTS_MAX; args->slots >= least; args->slots--)
        if (args->slots * chunks <= resident::CHUNKS_MAX &&
            resident::bytes(*args, element) <= bytes)
            return true;
    args->cluster = 0;
    return false;
}

/* The smallest cluster that leaves three slots: one is read, one waits for the exchange, one is
 * written while the row after next comes in. Where rows are only read, a slot is free as soon as it
 * is read, and those that wait for the exchange need none. */
extern "C" void KLD_CUDA_TEAM_NAME(layout)(kld_cuda_args *args, uint32_t shared_bytes_max) {
    size_t element = args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2;
    size_t room = share(shared_bytes_max, KLD_CUDA_TEAM_BLOCKS);
    bool done = false;
    for (uint32_t least = 3; least >= 1 && !done; least--)
        for (uint32_t cluster = 1; cluster <= resident::CLUSTER_MAX && !done; cluster *= 2)
            done = fits(args, cluster, least, element, room);
    bool gradient = args->grad_p.dtype || args->grad_q.dtype;
    bool known = args->rule.kind == KLD_RULE_KL || args->rule.kind == KLD_RULE_CROSS_ENTROPY;
    uint32_t lag_max = known && !gradient ? 3 : 2;
    uint32_t spare = known && !gradient ? 1 : 2;
    uint32_t lag = args->slots < spare ? 0 : args->slots - spare;
    args->lag = lag < lag_max ? lag : lag_max;
}
