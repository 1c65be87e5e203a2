/* resident_large.cu - into how many blocks of the large team a row of logits is cut, and how many
 * rows a block holds: by the row's bytes and what a gradient needs. */
#include "kernels/cuda/resident.cuh"

/* Shared memory of a block so that `blocks` of them fit a multiprocessor, which has 1024 bytes more
 * than the largest block: each pays 1024 to the system, and for its static variables. */
static size_t share(uint32_t most, uint32_t blocks) {
    return ((most + 1024) / blocks - 1024 - KLD_CUDA_STATIC_MAX) & ~(size_t)127;
}

/* As many slots as there is room for; false if they are fewer than `least`. */
static bool fits(kld_cuda_args *args, uint32_t cluster, uint32_t least, size_t element,
                 size_t bytes) {
    uint64_t slice = (args->classes + cluster - 1) / cluster;
    slice = (slice + 63) / 64 * 64;
    uint64_t chunks = (slice * element + 15 + 16 * resident::CHUNK - 1) / (16 * resident::CHUNK);
    args->cluster = cluster;
    args->slice = (uint32_t)slice;
    for (args->slots = resident::SLOTS_MAX; args->slots >= least; args->slots--)
        if (args->slots * chunks <= resident::CHUNKS_MAX &&
            resident::bytes(*args, element) <= bytes)
            return true;
    args->cluster = 0;
    return false;
}

/* How many of its rows a group may have read and not yet written. Beside those of all groups one
 * slot is for what comes in. Where rows are only read a slot is free as soon as it is; then the
 * ring must hold what one group has read while another is kept from settling its row. */
static uint32_t lag_of(uint32_t slots, bool streams) {
    uint32_t most = streams ? 3 : 2, lag;
    if (resident::GROUPS == 1)
        lag = slots - (slots > 1 && !streams ? 2 : 1);
    else if (streams)
        lag = slots < 2 ? 0 : (slots - 2) / 2;
    else
        lag = slots <= 2 * resident::GROUPS ? 0 : (slots - 1) / resident::GROUPS - 1;
    return lag < most ? lag : most;
}

/* The smallest cluster that leaves three slots: of two groups each has a row, and another comes in;
 * if none does, two or one. More than eight blocks only for rows that fit no less: of such clusters
 * fewer find a place. Where rows are only read, one slot will do: it fills again chunk by chunk. */
extern "C" void KLD_CUDA_TEAM_NAME(layout)(kld_cuda_args *args, uint32_t shared_bytes_max) {
    size_t element = args->p.dtype == KLD_DTYPE_FP32 ? 4 : 2;
    size_t room = share(shared_bytes_max, KLD_CUDA_TEAM_BLOCKS);
    bool done = false;
    bool gradient = args->grad_p.dtype || args->grad_q.dtype;
    bool known = args->rule.kind == KLD_RULE_KL || args->rule.kind == KLD_RULE_CROSS_ENTROPY;
    bool streams = known && !gradient;
    const uint32_t most[] = {resident::CLUSTER_PORTABLE, resident::CLUSTER_MAX};
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t least = streams && resident::GROUPS > 1 ? 1 : 3; least >= 1 && !done; least--)
            for (uint32_t cluster = 1; cluster <= most[i] && !done; cluster *= 2)
                done = fits(args, cluster, least, element, room);
    args->lag = lag_of(args->slots, streams);
}
