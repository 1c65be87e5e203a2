/* resident_exchange.cuh - sums over the warps of a block and the blocks of a cluster. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_EXCHANGE_CUH
#define KLD_KERNELS_CUDA_RESIDENT_EXCHANGE_CUH

#include "kernels/cuda/resident.cuh"

namespace resident {
inline namespace KLD_CUDA_TEAM {

/* Four sums over the warp: lane l gets number l / 8. */
static __device__ __forceinline__ double warp_sums(const double (&x)[4]) {
    unsigned lane = threadIdx.x % 32;
    bool upper = lane & 16;
    double keep[2] = {upper ? x[2] : x[0], upper ? x[3] : x[1]};
    keep[0] += __shfl_xor_sync(KLD_FULL_WARP, upper ? x[0] : x[2], 16);
    keep[1] += __shfl_xor_sync(KLD_FULL_WARP, upper ? x[1] : x[3], 16);
    upper = lane & 8;
    double sum = upper ? keep[1] : keep[0];
    sum += __shfl_xor_sync(KLD_FULL_WARP, upper ? keep[0] : keep[1], 8);
#pragma unroll
    for (int step = 4; step; step /= 2)
        sum += __shfl_xor_sync(KLD_FULL_WARP, sum, step);
    return sum;
}

/* Four sums of this warp, each still in four, to its place in the slot. */
static __device__ __forceinline__ void store_sums(double *to, const double (&x)[4]) {
    unsigned lane = threadIdx.x % 32;
    bool upper = lane & 16;
    double keep[2] = {upper ? x[2] : x[0], upper ? x[3] : x[1]};
    keep[0] += __shfl_xor_sync(KLD_FULL_WARP, upper ? x[0] : x[2], 16);
    keep[1] += __shfl_xor_sync(KLD_FULL_WARP, upper ? x[1] : x[3], 16);
    upper = lane & 8;
    double sum = upper ? keep[1] : keep[0];
    sum += __shfl_xor_sync(KLD_FULL_WARP, upper ? keep[0] : keep[1], 8);
    sum += __shfl_xor_sync(KLD_FULL_WARP, sum, 4);
    if (!(lane & 4))
        to[lane / 8 * 4 + lane % 4] = sum;
    __syncwarp();
}

/* One warp: what all warps of a group have stored, to all its lanes. */
static __device__ __forceinline__ void load_sums(const double (&from)[FAR ? 1 : GROUP_WARPS][16],
                                                 double (&ret)[4]) {
    unsigned lane = threadIdx.x % 32;
    double sum = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < GROUP_WARPS; warp += 2)
        if (GROUP_WARPS > 1 || lane < 16)
            sum += from[warp + lane / 16][lane % 16];
    sum += __shfl_xor_sync(KLD_FULL_WARP, sum, 16);
    sum += __shfl_xor_sync(KLD_FULL_WARP, sum, 2);
    sum += __shfl_xor_sync(KLD_FULL_WARP, sum, 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
        ret[i] = __shfl_sync(KLD_FULL_WARP, sum, 4 * i);
}

/* What this warp found, to `to`. */
static __device__ __forceinline__ void store_part(part *to, const double (&sums)[4], int32_t mark_0,
                                                  int32_t mark_1, float top_0, float top_1) {
    unsigned lane = threadIdx.x % 32;
    double sum = warp_sums(sums);
    if (lane % 8 == 0)
        to->sum[lane / 8] = sum;
    if (lane == 0) {
        to->mark[0] = mark_0;
        to->mark[1] = mark_1;
        to->top[0] = top_0;
        to->top[1] = top_1;
    }
    __syncwarp();
}

/* A whole warp: `mine`, which all its lanes hold, to place `rank` of `parts` in every block, and
 * all blocks' parts here. */
static __device__ __forceinline__ void exchange(const part &mine, part *parts, barrier *arrived,
                                                uint32_t parity) {
    const place &at = here().place;
    unsigned lane = threadIdx.x % 32;
    if (lane == 0)
        barrier_expect(arrived, at.cluster * (uint32_t)sizeof(part));
    __syncwarp();
    if (lane < at.cluster) {
        part *to = parts + at.rank;
#pragma unroll
        for (int i = 0; i < 4; i++)
            cluster_send(&to->sum[i], arrived, lane, (uint64_t)__double_as_longlong(mine.sum[i]));
        cluster_send(to->mark, arrived, lane,
                     (uint64_t)(uint32_t)mine.mark[1] << 32 | (uint64_t)(uint32_t)mine.mark[0]);
        cluster_send(to->top, arrived, lane,
                     (uint64_t)__float_as_uint(mine.top[1]) << 32 |
                         (uint64_t)__float_as_uint(mine.top[0]));
    }
    barrier_wait(arrived, parity);
}

/* All warps of a group, of which each has a part of the row in here().extra_warps: the row's, to
 * all lanes of the first. MERGE_WARPS(parts), MERGE(parts, count): many parts to one, by a whole
 * warp, its result in all lanes. */
template <class MERGE_WARPS, class MERGE>
static __device__ __forceinline__ part merge_parts(MERGE_WARPS merge_warps, MERGE merge) {
    block_shared &block = here();
    part row;
    uint32_t group = group_number();
    group_sync();
    if (group_thread() < 32) {
        row = merge_warps(block.extra_warps + group * GROUP_WARPS);
        if (block.place.cluster > 1) {
            uint32_t turn = block.extra_exchanges[group];
            part *parts = block.extra_blocks[group][turn & 1];
            exchange(row, parts, &block.extra_arrived[group][turn & 1], turn >> 1 & 1);
            row = merge(parts, block.place.cluster);
            __syncwarp();
            if (group_thread() == 0)
                block.extra_exchanges[group] = turn + 1;
            __syncwarp();
        }
    }
    return row;
}
template <class MERGE> static __device__ __forceinline__ part merge_parts(MERGE merge) {
    return merge_parts([&](const part *parts) { return merge(parts, GROUP_WARPS); }, merge);
}

/* The same of what each warp has in registers. */
template <class MERGE>
static __device__ __forceinline__ part merge_row(const double (&sums)[4], int32_t mark_0,
                                                 int32_t mark_1, MERGE merge, float top_0 = 0.0f,
                                                 float top_1 = 0.0f) {
    uint32_t warp = threadIdx.x / 32;
    store_part(&here().extra_warps[warp], sums, mark_0, mark_1, top_0, top_1);
    return merge_parts(merge);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace resident */
#endif
