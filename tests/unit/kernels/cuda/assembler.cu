/* assembler.cu - each wrapper of ptx.cuh and cluster.cuh, called once: what is in them nobody reads
 * before ptxas, which CI asks about this file and not about kernels of minutes. Never run. */
#include "kernels/cuda/cluster.cuh"

struct words {
    float number[8];
    double wide;
    uint32_t at[8];
    uint64_t sent;
    uint4 piece[4];
    float4 four;
};

__global__ void of_any_card(struct words *to, const struct words *from) {
    const float *x = from->number;
    uint32_t at = shared_at(dynamic_shared());
    to->number[0] = reciprocal(x[0]);
    to->number[1] = log2_fast(x[1]);
    to->number[2] = exp2_fast(x[2]);
    to->number[3] = max_nan(x[3], x[4]);
    to->number[4] = pick(from->at[0] > 3, x[5], x[6]);
    to->number[5] = load_shared_float(at);
    to->wide = reciprocal_wide(from->wide);
    to->at[0] = lanes_before();
    to->at[1] = thread_again();
    to->four = load_shared_float4(at);
    to->piece[0] = load_shared(at);
    to->piece[1] = load_evict_last<true>(from->piece);
    to->piece[2] = load_evict_last<false>(from->piece + 1);
    store_shared(at, from->piece[2]);
    prefetch_l2(from);
    copy_16(at, from->piece);
    copy_piece(dynamic_shared(), from->piece, from->at[1]);
    copies_end();
    copies_wait<1>();
    block_sync<3>(64);
}

__global__ void of_clusters(struct words *to, const struct words *from) {
    __shared__ barrier arrived;
    if (threadIdx.x == 0)
        barrier_init(&arrived, 2);
    barrier_init_done();
    await_kernel_ahead();
    fence_copies();
    if (arrives_for_warp())
        barrier_arrive(&arrived);
    barrier_expect(&arrived, 16);
    copy_bulk(dynamic_shared(), from->piece, 16, &arrived);
    barrier_wait(&arrived, 0);
    cluster_sync();
    to->at[2] = cluster_rank();
    to->sent = *cluster_at(&arrived, 0);
    cluster_send(dynamic_shared(), &arrived, 0, from->sent);
}
